"""The names that somebody may have meant who wrote another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["closest", "meant"]

_MOST_NAMED: Final = 3


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Known names that are like `name`, the most alike first; those that begin with it count.

    Examples:
        >>> closest("codegen_qkv", ["codegen-qkv", "split"])
        ['codegen-qkv']
        >>> closest("bloom", ["bloom-qkv", "split"])
        ['bloom-qkv']
        >>> closest("READNE.md", ["README.md", "docs"])
        ['README.md']
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only where a name is wrong

    names = list(known)
    by_lower = {other.lower(): other for other in names}
    alike = get_close_matches(name.lower(), by_lower, _MOST_NAMED)
    return [by_lower[other] for other in alike] or [
        other for other in names if name and other.startswith(name)
    ][:_MOST_NAMED]


def meant(names: Sequence[str]) -> str:
    """A question after a sentence that says what is not there; empty where nothing is alike.

    Examples:
        >>> meant(["--resume", "--rules"]), meant([])
        (' (did you mean --resume or --rules?)', '')
    """
    if not names:
        return ""
    *others, last = names[:_MOST_NAMED]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {listed}?)"
