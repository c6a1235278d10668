"""Write many walks as few: loops in progression become one more loop, loops that go on are joined.

Walks are compared by their loops and by where they start, never step by step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from restride.algebra._walk import Addresses, Digit, Digits, Walk, coalesce, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["merge", "ordered"]

_Item: TypeAlias = tuple[Addresses, Digits]
_Rule: TypeAlias = "Callable[[Addresses], bool]"


def merge(
    walks: Iterable[Walk], *, pure: Sequence[tuple[int, int]] = (), is_legal: _Rule | None = None
) -> list[Walk]:
    """Merge walks whose loops are equal and whose bases are in progression, or continue each other.

    Args:
        walks: Walks over the same addresses. Their order does not matter.
        pure: Pairs of addresses that no new loop may move together.
        is_legal: Says of the strides of a new loop whether it may be; by default all may.

    Returns:
        Walks with the same steps (the same multiset), in the order of their bases, at most as many.
        Merging them again changes nothing.

    Cost:
        O(n log n) a round, in the number of walks; each round but the last leaves fewer.

    Examples:
        >>> merge([Walk((0, 0), ((3, 1, 1),)), Walk((6, 3), ((3, 1, 1),))])
        [Walk(bases=(0, 0), digits=((2, 6, 3), (3, 1, 1)))]
    """
    items = [(walk.bases, ordered(walk.digits)) for walk in walks]

    def may_be(step: Addresses) -> bool:
        is_pure = not any(step[i] and step[j] for i, j in pure)
        return is_pure and (is_legal is None or is_legal(step))

    def progress(parts: list[_Item]) -> list[_Item]:
        return _in_progression(parts, may_be)

    # Equal blocks of which two happen to touch want progressions first, unequal ones that all do
    # want them last.
    fewest = _settled(items, progress, _continued)
    if len(fewest) > 1:
        fewest = min(fewest, _settled(items, _continued, progress), key=len)
    return [Walk(bases, digits) for bases, digits in sorted(fewest)]


def ordered(digits: Iterable[Digit]) -> Digits:
    """Loops by falling strides, coalesced: equal for walks that differ only in their bases."""
    loops = tuple(digits)
    while len(loops) > 1:
        loops = tuple(sorted(loops, key=_falling))
        merged = coalesce(loops)
        if len(merged) == len(loops):
            return merged
        # Loops of one stride, which reach over each other, may now stand in another order.
        loops = merged
    return coalesce(loops)


def _falling(digit: Digit) -> list[int]:
    return [*[-abs(stride) for stride in digit[1:]], *digit]


def _settled(items: list[_Item], *passes: Callable[[list[_Item]], list[_Item]]) -> list[_Item]:
    """Repeat passes until they find nothing more to merge."""
    before = len(items) + 1
    while 1 < len(items) < before:
        before = len(items)
        for merge_some in passes:
            items = merge_some(items)
    return items


def _in_progression(items: list[_Item], may_be: _Rule) -> list[_Item]:
    """Turn runs of equal loops at equally spaced bases into one more loop."""
    groups: dict[Digits, list[Addresses]] = {}
    for bases, digits in items:
        groups.setdefault(digits, []).append(bases)
    merged: list[_Item] = []
    for digits, group in groups.items():
        group.sort()
        steps = [
            tuple([b - a for a, b in zip(one, other, strict=True)])
            for one, other in pairwise(group)
        ]
        start = 0
        while start < len(group):
            stop = start + 1
            if stop < len(group) and may_be(steps[start]):
                while stop < len(group) and steps[stop - 1] == steps[start]:
                    stop += 1
                merged.append((group[start], ordered(((stop - start, *steps[start]), *digits))))
            else:
                merged.append((group[start], digits))
            start = stop
    return merged


def _continued(items: list[_Item]) -> list[_Item]:
    """Join walks that follow each other along one loop and are equal in all others."""
    standing = _Standing(items)
    whole = {digits for _, digits in items}
    grown: list[_Item] = []
    for (strides, others), loops in standing.loops.items():
        if len(loops) == 1 and others not in whole:
            continue
        # In the order of walking, so that a chain is found from its first loop.
        is_backwards = strides < (0,) * len(strides)
        for start, extent, number in sorted(loops, reverse=is_backwards):
            if number in standing.left:
                first, total = standing.chain(number, start, extent, strides, others)
                if total > extent:
                    grown.append((first, ordered(((total, *strides), *others))))
    return standing.rest() + grown


class _Standing:
    """Walks by their loops and where these start, and which walks are still there.

    Walks are known by number: two equal ones are a multiplicity, and both have to stay.
    """

    __slots__ = ("_items", "_starting", "left", "loops")

    def __init__(self, items: list[_Item]) -> None:
        self.left = set(range(len(items)))
        self.loops: dict[tuple[Addresses, Digits], list[tuple[Addresses, int, int]]] = {}
        self._items = items
        self._starting: dict[tuple[Addresses, Addresses, Digits], list[tuple[int, int]]] = {}
        for number, (bases, digits) in enumerate(items):
            # A walk without the loop is one step of it.
            self._starting.setdefault((bases, (), digits), []).append((1, number))
            for place, (extent, *rest) in enumerate(digits):
                strides, others = tuple(rest), digits[:place] + digits[place + 1 :]
                self.loops.setdefault((strides, others), []).append((bases, extent, number))
                self._starting.setdefault((bases, strides, others), []).append((extent, number))

    def chain(
        self, number: int, start: Addresses, extent: int, strides: Addresses, others: Digits
    ) -> tuple[Addresses, int]:
        """Take what goes on with a loop, at its end and step by step at its start."""
        self.left.remove(number)
        total = extent
        after, before = moved(start, total, strides), moved(start, -1, strides)
        while taken := self._take(after, strides, others) or self._take(after, (), others):
            total += taken
            after = moved(start, total, strides)
        while self._take(before, (), others):
            start, before = before, moved(before, -1, strides)
            total += 1
        if total == extent:
            self.left.add(number)
        return start, total

    def rest(self) -> list[_Item]:
        """Walks that neither grew nor were taken by another one."""
        return [self._items[number] for number in sorted(self.left)]

    def _take(self, start: Addresses, strides: Addresses, others: Digits) -> int:
        for extent, number in self._starting.get((start, strides, others), ()):
            if number in self.left:
                self.left.remove(number)
                return extent
        return 0
