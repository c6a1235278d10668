"""Rules of two parts, as users give them from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from restride.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["require_pairs"]

_Second = TypeVar("_Second")


def require_pairs(
    option: str, rules: Sequence[tuple[str, _Second]], example: tuple[str, str]
) -> Sequence[tuple[str, _Second]]:
    """Refuse what is no list of pairs. A text of two letters, as a key of a dict, is none.

    Raises:
        PlanError: It is something else.
    """
    if not _are_pairs(rules):
        raise PlanError(
            f"{option} is {rules!r:.80}, and no list of pairs", remedy=f"write it as [{example}]"
        )
    return rules


def _are_pairs(given: object) -> bool:
    return isinstance(given, list | tuple) and all(
        isinstance(rule, list | tuple) and len(rule) == 2  # noqa: PLR2004
        for rule in given
    )
