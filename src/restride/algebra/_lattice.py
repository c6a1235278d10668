"""Strided sets on one address: normal form, and the structural proof that some of them tile.

A lattice is a base and digits (extent, stride), from the largest stride to the smallest. Its points
are ``base + sum y_i * stride_i`` with ``0 <= y_i < extent_i``, with multiplicity where digits
reach over each other.
"""

from __future__ import annotations

from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = [
    "Digits",
    "Lattice",
    "compact",
    "count_below",
    "is_nested",
    "normalize",
    "numel_of",
    "reach_of",
    "unroll",
    "whole",
]

Digits: TypeAlias = tuple[tuple[int, int], ...]
Lattice: TypeAlias = tuple[int, Digits]

_by_stride = itemgetter(1)


def normalize(base: int, digits: Iterable[tuple[int, int]]) -> Lattice:
    """Sort digits, flip negative strides, and merge digits that continue each other.

    Digits that stand still (stride 0, extent 1) are dropped: what remains is the set of points, and
    their multiplicity up to the product of the dropped extents.

    Examples:
        >>> normalize(9, [(3, 1), (4, -3)])
        (0, ((12, 1),))
    """
    moving: list[tuple[int, int]] = []
    for digit in digits:
        extent, stride = digit
        if extent == 1:
            continue
        if stride > 0:
            moving.append(digit)
        elif stride:
            base += (extent - 1) * stride
            moving.append((extent, -stride))
    moving.sort(key=_by_stride)
    merged: list[tuple[int, int]] = []
    next_stride = 0
    for extent, stride in moving:
        if stride == next_stride:
            inner, stride = merged.pop()  # noqa: PLW2901 - the digit grows
            extent *= inner  # noqa: PLW2901
        merged.append((extent, stride))
        next_stride = extent * stride
    merged.reverse()
    return base, tuple(merged)


def numel_of(digits: Digits) -> int:
    """Number of points, counted with multiplicity."""
    return prod([extent for extent, _ in digits])


def reach_of(digits: Digits) -> int:
    """Distance between the first point and the last."""
    return sum([(extent - 1) * stride for extent, stride in digits])


def is_nested(digits: Digits) -> bool:
    """Whether each stride exceeds the reach of the smaller ones, so that no point occurs twice."""
    reach = 0
    for extent, stride in reversed(digits):
        if stride <= reach:
            return False
        reach += (extent - 1) * stride
    return True


def count_below(lattice: Lattice, limit: int) -> int:
    """Count the points of a nested lattice below `limit`.

    Examples:
        >>> count_below((2, ((3, 10), (4, 1))), 13)   # 2 3 4 5 12 13 14 15 22 23 24 25
        5
    """
    base, digits = lattice
    left = limit - base
    if left <= 0:
        return 0
    below, block = 0, numel_of(digits)
    for extent, stride in digits:
        block //= extent
        whole = left // stride
        if whole >= extent:
            return below + extent * block
        below += whole * block
        left -= whole * stride
        if not left:
            return below
    return below + 1


def compact(lattices: Iterable[Lattice], *, union: bool = False) -> list[Lattice]:
    """Merge neighbouring intervals, and repeated intervals that touch, as far as they go.

    A lattice is read as an interval that its other digits repeat. Intervals with the same
    repetition that touch are joined; one that fills the stride of its innermost repetition swallows
    it. This turns everything that was cut along mixed radices back into one interval, and is exact:
    it proves by structure alone.

    Args:
        lattices: In normal form.
        union: Whether points that are held twice may be merged into one. Otherwise every point
            keeps its multiplicity.

    Returns:
        Lattices with the same points. ``[(0, ((n, 1),))]`` proves that the input tiles ``[0, n)``
        (with `union`: covers it); anything else proves nothing.

    Cost:
        O(lattices * digits), apart from sorting. Never walks points.

    Examples:
        >>> compact([(0, ((4, 6), (3, 1))), (3, ((4, 6), (3, 1)))])
        [(0, ((24, 1),))]
        >>> compact([(0, ((5, 1),)), (3, ((7, 1),))], union=True)
        [(0, ((10, 1),))]
    """
    levels: dict[int, dict[Digits, list[tuple[int, int]]]] = {}
    for base, digits in lattices:
        outer, stop = digits, base + 1
        if digits and digits[-1][1] == 1:
            outer, stop = digits[:-1], base + digits[-1][0]
        levels.setdefault(len(outer), {}).setdefault(outer, []).append((base, stop))
    done: list[Lattice] = []
    for depth in range(max(levels, default=0), 0, -1):
        for outer, intervals in levels.pop(depth, {}).items():
            extent, stride = outer[-1]
            for start, stop in _join(intervals, union=union):
                if stop - start == stride or (union and stop - start > stride):
                    wider = levels.setdefault(depth - 1, {}).setdefault(outer[:-1], [])
                    wider.append((start, stop + (extent - 1) * stride))
                else:
                    done.append((start, outer + _interval(stop - start)))
    for intervals in levels.get(0, {}).values():
        done.extend((start, _interval(stop - start)) for start, stop in _join(intervals, union))
    return done


def unroll(lattices: Collection[Lattice]) -> list[Lattice] | None:
    """Write out repeated intervals one by one, where that is not many more than there are lattices.

    Pieces of single ranks beside a piece of several, zigzags and expert tables become intervals
    that `compact` can join.

    Examples:
        >>> unroll([(1, ((2, 10), (3, 1)))])
        [(1, ((3, 1),)), (11, ((3, 1),))]
        >>> unroll([(0, ((10**6, 10), (3, 1)))]) is None
        True
    """
    left = 64 + 4 * len(lattices)
    unrolled: list[Lattice] = []
    for base, digits in lattices:
        inner = 1 if digits and digits[-1][1] == 1 else 0
        outer, interval = digits[: len(digits) - inner], digits[len(digits) - inner :]
        left -= numel_of(outer)
        if left < 0:
            return None
        bases = [base]
        for extent, stride in outer:
            bases = [start + step * stride for start in bases for step in range(extent)]
        unrolled.extend((start, interval) for start in bases)
    return unrolled


def whole(numel: int) -> Lattice:
    """All of ``[0, numel)`` in normal form."""
    return 0, _interval(numel)


def _interval(length: int) -> Digits:
    return ((length, 1),) if length > 1 else ()


def _join(intervals: list[tuple[int, int]], union: bool) -> list[tuple[int, int]]:  # noqa: FBT001
    """Join intervals that touch, or with `union` overlap."""
    if len(intervals) == 1:
        return intervals
    intervals.sort()
    joined = [intervals[0]]
    for start, stop in intervals[1:]:
        first, last = joined[-1]
        if start == last or (union and start < last):
            joined[-1] = first, max(last, stop)
        else:
            joined.append((start, stop))
    return joined
