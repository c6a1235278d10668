"""How the ZeRO-3 optimizer splits its parameter groups into sub-groups, one flat partition each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["DEFAULT_SUB_GROUP_NUMEL", "sub_groups"]

DEFAULT_SUB_GROUP_NUMEL: Final = 1_000_000_000
"""What the engine takes where the configuration says no ``sub_group_size``."""


def sub_groups(widths: Mapping[str, int], limit: int) -> Iterator[tuple[str, ...]]:
    """Split one parameter group as the engine does (deepspeed 0.19.8 `runtime/zero/stage3.py`).

    A sub-group is closed by the parameter with which it reaches the limit; so it may be longer than
    the limit by all but one element of that parameter's chunk.

    Args:
        widths: Elements of one rank's chunk of each parameter, padding included, in the order of
            the optimizer.
        limit: ``sub_group_size`` of the configuration.

    Examples:
        >>> list(sub_groups({"a": 3, "b": 4, "c": 5}, 7))
        [('a', 'b'), ('c',)]
        >>> list(sub_groups({"a": 3, "b": 4}, 7))
        [('a', 'b')]
    """
    if not widths:
        return
    if limit >= sum(widths.values()):
        yield tuple(widths)
        return
    names: list[str] = []
    numel = 0
    for name, width in widths.items():
        names.append(name)
        numel += width
        if numel >= limit:
            yield tuple(names)
            names, numel = [], 0
    if names:
        yield tuple(names)
