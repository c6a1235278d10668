"""Strided walks over several addresses at once, and the join of two of them digit by digit.

A walk is a nest of loops that moves k addresses together. What the addresses mean is up to the
caller: (full, rank, shard) for pieces, (shard, file element) for copies. `join` finds every pair of
steps of two walks that stand at the same first address, as walks again, without walking steps.

The method is top-down digit matching. Take the largest stride t of the first address on either
side. If the other side reaches beyond t in smaller steps, cut it on the grid of t into head, middle
and tail, so that the middle has a digit of stride t too. Match the two digits of stride t: their
difference is fixed up to a carry out of the lower digits, so few values are possible, each a
smaller problem of the same kind. Two single digits are an equation in two unknowns, solved by the
extended Euclidean algorithm (Knuth, TAOCP volume 2, section 4.5.2), whatever their strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import gcd, lcm, prod
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Digit", "Digits", "Walk", "coalesce", "fix", "join", "merge", "restrict"]

Digit: TypeAlias = tuple[int, ...]
"""(extent, stride of the first address, stride of the second, ...)."""
Digits: TypeAlias = tuple[Digit, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """Loops that move k addresses together.

    Attributes:
        bases: Where the addresses start.
        digits: Loops, outermost first: the extent, then one stride for each address.
    """

    bases: tuple[int, ...]
    digits: Digits = ()

    @property
    def numel(self) -> int:
        """Number of steps."""
        return prod(digit[0] for digit in self.digits)


def coalesce(digits: Iterable[Digit]) -> Digits:
    """Merge neighbouring loops that continue each other on every address, and drop loops of one.

    The steps and their order stay the same. Called *coalesce* in CuTe.

    Cost:
        O(digits). Never walks steps.

    Examples:
        >>> coalesce([(4, 8, 8), (1, 5, 5), (8, 1, 1)])
        ((32, 1, 1),)
    """
    merged: list[Digit] = []
    for digit in digits:
        extent = digit[0]
        if extent == 1:
            continue
        if merged and all(
            outer == extent * inner for outer, inner in zip(merged[-1][1:], digit[1:], strict=True)
        ):
            merged[-1] = (merged[-1][0] * extent, *digit[1:])
        else:
            merged.append(digit)
    return tuple(merged)


def restrict(walk: Walk, low: int, high: int) -> list[Walk]:
    """The steps of a walk whose first address is in ``[low, high)``, as walks.

    Cost:
        As `join` with an interval.

    Examples:
        >>> restrict(Walk((0, 100), ((10, 1, 2),)), 3, 5)
        [Walk(bases=(3, 106), digits=((2, 1, 2),))]
    """
    first = walk.bases[0]
    lowest = first + sum((d[0] - 1) * d[1] for d in walk.digits if d[1] < 0)
    highest = first + sum((d[0] - 1) * d[1] for d in walk.digits if d[1] > 0)
    if low <= lowest and highest < high:
        return [walk]
    if highest < low or high <= lowest:
        return []
    return join(walk, Walk((low,), coalesce(((high - low, 1),))))


def fix(walk: Walk, address: int, value: int) -> list[Walk]:
    """The steps of a walk at which one address has a value, as walks that do not move it.

    Args:
        walk: The walk.
        address: Which address, counted from 0.
        value: What it shall be.

    Returns:
        One walk for every way to reach the value: none, one, or several where the loops that move
        the address reach over each other.

    Cost:
        O(loops) where each stride exceeds the reach of the smaller ones, as on every mesh.

    Examples:
        >>> fix(Walk((0, 0), ((4, 1, 6), (6, 0, 1))), 0, 2)
        [Walk(bases=(2, 12), digits=((6, 0, 1),))]
    """
    moving = [digit for digit in walk.digits if digit[1 + address]]
    if not moving:
        return [walk] if walk.bases[address] == value else []
    moving.sort(key=lambda digit: -abs(digit[1 + address]))
    others = tuple(digit for digit in walk.digits if not digit[1 + address])
    return [Walk(bases, others) for bases in _solved(walk.bases, moving, address, value)]


def join(
    a: Walk,
    b: Walk,
    *,
    pure: Sequence[tuple[int, int]] = (),
    is_legal: Callable[[tuple[int, ...]], bool] | None = None,
) -> list[Walk]:
    """Find every pair of steps of `a` and `b` that stand at the same first address.

    Exact for every input: loops may reach over each other, stand still or go backwards.

    Args:
        a: A walk over at least one address.
        b: Another one.
        pure: As for `merge`, of the result.
        is_legal: As for `merge`, of the result.

    Returns:
        Walks over (first address, the other addresses of `a`, the other addresses of `b`) that
        together visit each pair of steps exactly once.

    Cost:
        Independent of extents. The number of results is constant where strides divide each other,
        and grows with ``lcm / max`` of the strides where they do not.

    Examples:
        Columns 0-2 of a 4 x 6 tensor (shard rows of 3) against its rows 1-2 (shard from 0):

        >>> join(Walk((0, 0), ((4, 6, 3), (3, 1, 1))), Walk((6, 0), ((12, 1, 1),)))
        [Walk(bases=(6, 3, 0), digits=((2, 6, 3, 6), (3, 1, 1, 1)))]
    """
    left, right = _prepared(a), _prepared(b)
    if left is None or right is None:
        return []
    no_a, no_b = (0,) * (len(a.bases) - 1), (0,) * (len(b.bases) - 1)
    still = tuple((d[0], 0, *d[2:], *no_b) for d in left[2])
    still += tuple((d[0], 0, *no_a, *d[2:]) for d in right[2])
    found = [
        Walk((at_a[0], *at_a[1:], *at_b[1:]), digits + still)
        for at_a, at_b, digits in _Matcher(no_a, no_b).match(
            _Side(left[0], left[1]), _Side(right[0], right[1]), ()
        )
    ]
    return (
        merge(found, pure=pure, is_legal=is_legal)
        if len(found) > 1
        else [Walk(w.bases, _ordered(w.digits)) for w in found]
    )


def merge(
    walks: Iterable[Walk],
    *,
    pure: Sequence[tuple[int, int]] = (),
    is_legal: Callable[[tuple[int, ...]], bool] | None = None,
) -> list[Walk]:
    """Merge walks whose loops are equal and whose bases are in progression, or continue each other.

    Args:
        walks: Walks over the same addresses. Their order does not matter.
        pure: Pairs of addresses that no new loop may move together.
        is_legal: Says of the strides of a new loop whether it may be; by default all may.

    Returns:
        Walks with the same steps (the same multiset), in the order of their bases, at most as many.

    Cost:
        O(n log n) a round, in the number of walks; a round that merges nothing is the last.

    Examples:
        >>> merge([Walk((0, 0), ((3, 1, 1),)), Walk((6, 3), ((3, 1, 1),))])
        [Walk(bases=(0, 0), digits=((2, 6, 3), (3, 1, 1)))]
    """
    items = [(walk.bases, _ordered(walk.digits)) for walk in walks]

    def may_be(step: tuple[int, ...]) -> bool:
        is_pure = not any(step[i] and step[j] for i, j in pure)
        return is_pure and (is_legal is None or is_legal(step))

    while len(items) > 1:
        before = len(items)
        items = _continued(_in_progression(items, may_be))
        if len(items) == before:
            break
    return [Walk(bases, digits) for bases, digits in sorted(items)]


_Item: TypeAlias = tuple[tuple[int, ...], Digits]


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a join: where it stands, and its loops by falling stride of the first address."""

    at: tuple[int, ...]
    digits: Digits

    @property
    def span(self) -> int:
        return sum((digit[0] - 1) * digit[1] for digit in self.digits)

    def moved(self, steps: int, strides: tuple[int, ...], digits: Digits) -> _Side:
        return _Side(_moved(self.at, steps, strides), digits)


_Match: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Digits]


class _Matcher:
    """The recursion of `join`. Sides have positive strides, and no loop of one step."""

    __slots__ = ("_no_a", "_no_b")

    def __init__(self, no_a: tuple[int, ...], no_b: tuple[int, ...]) -> None:
        self._no_a = no_a
        self._no_b = no_b

    def match(self, a: _Side, b: _Side, digits: Digits) -> Iterator[_Match]:
        """Yield (position of a, position of b, loops over both) of all common addresses."""
        distance = b.at[0] - a.at[0]
        if not -b.span <= distance <= a.span:
            return
        if not a.digits and not b.digits:
            yield a.at, b.at, digits
            return
        if distance % gcd(*(digit[1] for digit in chain(a.digits, b.digits))):
            return
        if len(a.digits) <= 1 and len(b.digits) <= 1:
            yield from self._two_digits(a, b, distance, digits)
            return
        parts = _cut_on_grid(a, b)
        if parts is None:
            yield from self._top_digit(a, b, distance, digits)
            return
        for part_a, part_b in parts:
            yield from self.match(part_a, part_b, digits)

    def _two_digits(self, a: _Side, b: _Side, distance: int, digits: Digits) -> Iterator[_Match]:
        """Solve x * stride_a - y * stride_b = distance for one loop, or none, on each side."""
        extent_a, *strides_a = a.digits[0] if a.digits else (1, 1, *self._no_a)
        extent_b, *strides_b = b.digits[0] if b.digits else (1, 1, *self._no_b)
        common = gcd(strides_a[0], strides_b[0])
        if distance % common:
            return
        period_a, period_b = strides_b[0] // common, strides_a[0] // common
        # x is known modulo period_a; y follows.
        x = distance // common * pow(period_b, -1, period_a) % period_a if period_a > 1 else 0
        y = (x * strides_a[0] - distance) // strides_b[0]
        first = max(0, -(y // period_b))
        last = min((extent_a - 1 - x) // period_a, (extent_b - 1 - y) // period_b)
        if first > last:
            return
        x, y = x + first * period_a, y + first * period_b
        both = (
            last - first + 1,
            *(period_a * stride for stride in strides_a),
            *(period_b * stride for stride in strides_b[1:]),
        )
        yield (
            _moved(a.at, x, tuple(strides_a)),
            _moved(b.at, y, tuple(strides_b)),
            (*digits, both) if both[0] > 1 else digits,
        )

    def _top_digit(self, a: _Side, b: _Side, distance: int, digits: Digits) -> Iterator[_Match]:
        """Match the digits of the largest stride: their difference is fixed up to a carry."""
        stride = max(side.digits[0][1] for side in (a, b) if side.digits)
        extent_a, strides_a, lower_a = _top(a, stride, self._no_a)
        extent_b, strides_b, lower_b = _top(b, stride, self._no_b)
        span_a = sum((digit[0] - 1) * digit[1] for digit in lower_a)
        span_b = sum((digit[0] - 1) * digit[1] for digit in lower_b)
        lowest = -((span_a - distance) // stride)
        highest = (distance + span_b) // stride
        for ahead in range(max(lowest, 1 - extent_b), min(highest, extent_a - 1) + 1):
            x, y = max(0, ahead), max(0, -ahead)
            extent = min(extent_a - x, extent_b - y)
            both = ((extent, *strides_a, *strides_b[1:]),) if extent > 1 else ()
            yield from self.match(
                a.moved(x, strides_a, lower_a), b.moved(y, strides_b, lower_b), digits + both
            )


def _prepared(walk: Walk) -> tuple[tuple[int, ...], Digits, Digits] | None:
    """(bases, moving loops by falling positive stride, loops that stand still); None if empty."""
    bases = walk.bases
    moving: list[Digit] = []
    still: list[Digit] = []
    for digit in walk.digits:
        extent, strides = digit[0], digit[1:]
        if extent < 1:
            return None
        if extent == 1:
            continue
        if strides[0] < 0:
            bases = _moved(bases, extent - 1, strides)
            moving.append((extent, *(-stride for stride in strides)))
        elif strides[0]:
            moving.append(digit)
        else:
            still.append(digit)
    moving.sort(key=lambda digit: -digit[1])
    return bases, coalesce(moving), tuple(still)


def _top(side: _Side, stride: int, rest: tuple[int, ...]) -> tuple[int, tuple[int, ...], Digits]:
    """(extent, strides, lower digits) of the digit of `stride`, which may be missing."""
    if side.digits and side.digits[0][1] == stride:
        return side.digits[0][0], side.digits[0][1:], side.digits[1:]
    return 1, (stride, *rest), side.digits


def _cut_on_grid(a: _Side, b: _Side) -> list[tuple[_Side, _Side]] | None:
    """Cut the side with the smaller top stride on the grid of the larger one, if it reaches beyond.

    Where the strides do not divide, the larger one is cut on the grid of their common multiple, if
    that pays; the smaller one follows in the next round.
    """
    is_a_top = bool(a.digits) and (not b.digits or a.digits[0][1] >= b.digits[0][1])
    top, other = (a, b) if is_a_top else (b, a)
    if not other.digits:
        return None
    (top_extent, grid), (extent, stride) = top.digits[0][:2], other.digits[0][:2]
    if stride >= grid or other.span < grid or extent * stride <= grid:
        return None
    if grid % stride:
        common = lcm(grid, stride)
        if min(extent * stride // common, top_extent * grid // common) < 2:  # noqa: PLR2004
            return None
        pieces = _cut(top, common // grid, 0)
        return [(piece, other) if is_a_top else (other, piece) for piece in pieces]
    period = grid // stride
    if extent <= period:
        return None
    # Cut where the low part of the top side does not wrap, so that fewer parts meet.
    corner = (top.at[0] - other.at[0]) % grid
    wraps = corner + sum((digit[0] - 1) * digit[1] for digit in top.digits[1:]) >= grid
    pieces = _cut(other, period, -(-corner // stride) % period if wraps else 0)
    return [(piece, b) if not is_a_top else (a, piece) for piece in pieces]


def _cut(side: _Side, period: int, head: int) -> Iterator[_Side]:
    """Cut the first loop into a head, whole periods as two loops, and a tail."""
    (extent, *rest), lower = side.digits[0], side.digits[1:]
    strides = tuple(rest)
    head = min(head, extent)
    periods = (extent - head) // period
    tail = extent - head - periods * period
    slow = (periods, *(period * stride for stride in strides))
    for start, loops in (
        (0, ((head, *strides),) if head else None),
        (head, (slow, (period, *strides)) if periods else None),
        (head + periods * period, ((tail, *strides),) if tail else None),
    ):
        if loops is not None:
            digits = [digit for digit in (*loops, *lower) if digit[0] > 1]
            digits.sort(key=lambda digit: -digit[1])
            yield side.moved(start, strides, tuple(digits))


def _moved(at: tuple[int, ...], steps: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    if not steps:
        return at
    return tuple(base + steps * stride for base, stride in zip(at, strides, strict=True))


def _solved(
    bases: tuple[int, ...], moving: list[Digit], address: int, value: int
) -> Iterator[tuple[int, ...]]:
    """Bases after the loops in `moving`, by falling stride, have brought an address to a value."""
    distance = value - bases[address]
    if not moving:
        if not distance:
            yield bases
        return
    (extent, *rest), lower = moving[0], moving[1:]
    strides = tuple(rest)
    stride = strides[address]
    steps = [(digit[0] - 1) * digit[1 + address] for digit in lower]
    down, up = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    # distance - index * stride has to be in [down, up]
    bounds = (distance - up, distance - down) if stride > 0 else (down - distance, up - distance)
    lowest, highest = -(-bounds[0] // abs(stride)), bounds[1] // abs(stride)
    for index in range(max(0, lowest), min(extent - 1, highest) + 1):
        yield from _solved(_moved(bases, index, strides), lower, address, value)


def _ordered(digits: Iterable[Digit]) -> Digits:
    """Loops by falling strides, coalesced: equal for walks that differ only in their bases."""
    return coalesce(
        sorted(digits, key=lambda digit: [*(-abs(stride) for stride in digit[1:]), *digit])
    )


def _in_progression(items: list[_Item], may_be: Callable[[tuple[int, ...]], bool]) -> list[_Item]:
    """Turn runs of equal loops at equally spaced bases into one more loop."""
    groups: dict[Digits, list[tuple[int, ...]]] = {}
    for bases, digits in items:
        groups.setdefault(digits, []).append(bases)
    merged: list[_Item] = []
    for digits, group in groups.items():
        group.sort()
        start = 0
        while start < len(group):
            stop = start + 1
            step = _step(group, start)
            if step is not None and may_be(step):
                while _step(group, stop - 1) == step:
                    stop += 1
            loop = ((stop - start, *step),) if step is not None and stop - start > 1 else ()
            merged.append((group[start], _ordered((*loop, *digits)) if loop else digits))
            start = stop
    return merged


def _step(group: list[tuple[int, ...]], start: int) -> tuple[int, ...] | None:
    if start + 1 >= len(group):
        return None
    return tuple(b - a for a, b in zip(group[start], group[start + 1], strict=True))


def _continued(items: list[_Item]) -> list[_Item]:
    """Join walks that differ in the extent of one loop and follow each other along it."""
    present = dict.fromkeys(items)
    if len(present) < len(items):
        # Equal walks are a multiplicity; joining by their place would lose one.
        return items
    loops: dict[_Loop, tuple[int, _Item]] = {}
    for item in items:
        bases, digits = item
        for place, digit in enumerate(digits):
            others = digits[:place] + digits[place + 1 :]
            loops[bases, digit[1:], others] = digit[0], item
    for item in items:
        if item in present:
            _grow(item, present, loops)
    return list(present)


_Loop: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Digits]
"""(bases, strides of one loop, the other loops)."""


def _grow(item: _Item, present: dict[_Item, None], loops: dict[_Loop, tuple[int, _Item]]) -> None:
    """Let one walk swallow those that continue it, along the first loop along which they do."""
    bases, digits = item
    for place, (extent, *rest) in enumerate(digits):
        strides, others = tuple(rest), digits[:place] + digits[place + 1 :]
        start, total = bases, extent
        while True:
            after, before = _moved(start, total, strides), _moved(start, -1, strides)
            count, follower = loops.get((after, strides, others), (1, (after, others)))
            if follower in present and follower != item:
                total += count
            elif (before, others) in present and (before, others) != item:
                start, total, follower = before, total + 1, (before, others)
            else:
                break
            del present[follower]
        if total > extent:
            del present[item]
            present[start, _ordered(((total, *strides), *others))] = None
            return
