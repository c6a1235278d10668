"""The join of two walks: every pair of steps that stand at the same first address.

The method is top-down digit matching. Take the largest stride t of the first address on either
side. If the other side reaches beyond t in smaller steps, cut it on the grid of t into head, middle
and tail, so that the middle has a digit of stride t too. Match the two digits of stride t: their
difference is fixed up to a carry out of the lower digits, so few values are possible, each a
smaller problem of the same kind. Two single digits are an equation in two unknowns, solved by the
extended Euclidean algorithm (Knuth, TAOCP volume 2, section 4.5.2), whatever their strides::

    a   [4 : 6] [3 : 1]   rows of 6, the first 3 of each       t = 6
    b          [12 : 1]   two rows, from address 6
      = [2 : 6] [6 : 1]   b cut on the grid of 6
    6s: a may be one row ahead of b, or level        1s: [3 : 1] against [6 : 1], extent 3
"""

from __future__ import annotations

from math import gcd, lcm
from operator import add
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra._merge import merge, ordered
from restride.algebra._walk import Addresses, Digit, Digits, Walk, coalesce, moved
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["join", "restrict"]

# Real layouts need a few dozen. Loops that reach over each other in many ways have no short join.
_MOST_PROBLEMS: Final = 100_000


def join(
    a: Walk,
    b: Walk,
    *,
    pure: Sequence[tuple[int, int]] = (),
    is_legal: Callable[[Addresses], bool] | None = None,
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
        together visit each pair of steps exactly once, in the order of their bases.

    Raises:
        UnsupportedError: The loops reach over each other in a hundred thousand ways.

    Cost:
        Independent of extents. The number of results is constant where strides divide each other,
        and grows with ``lcm / max`` of the strides where they do not.

    Examples:
        Columns 0-2 of a 4 x 6 tensor (shard rows of 3) against its rows 1-2 (shard from 0):

        >>> join(Walk((0, 0), ((4, 6, 3), (3, 1, 1))), Walk((6, 0), ((12, 1, 1),)))
        [Walk(bases=(6, 3, 0), digits=((2, 6, 3, 6), (3, 1, 1, 1)))]
    """
    no_a, no_b = (0,) * (len(a.bases) - 1), (0,) * (len(b.bases) - 1)
    # Where the sides meet, the first address has moved as far for both: `a` counts it.
    from_a, loops_a, still_a = _prepared(a, slice(1, None), (), no_b)
    from_b, loops_b, still_b = _prepared(b, slice(2, None), (0, *no_a), ())
    matcher = _Matcher(still_a + still_b, f"walks of {len(loops_a)} and {len(loops_b)} loops")
    matcher.match(loops_a, loops_b, from_b[0] - from_a[0], (*from_a, *from_b[1:]), ())
    if len(matcher.found) > 1:
        return merge(matcher.found, pure=pure, is_legal=is_legal)
    return [Walk(walk.bases, ordered(walk.digits)) for walk in matcher.found]


def restrict(walk: Walk, low: int, high: int) -> list[Walk]:
    """The steps of a walk whose first address is in ``[low, high)``, as walks.

    Raises:
        UnsupportedError: As for `join`.

    Cost:
        As `join` with an interval.

    Examples:
        >>> restrict(Walk((0, 100), ((10, 1, 2),)), 3, 5)
        [Walk(bases=(3, 106), digits=((2, 1, 2),))]
    """
    if not walk.digits:
        return [walk] if low <= walk.bases[0] < high else []
    bottom = top = walk.bases[0]  # of one turn of the outermost loop
    for digit in walk.digits[1:]:
        if digit[1] > 0:
            top += (digit[0] - 1) * digit[1]
        else:
            bottom += (digit[0] - 1) * digit[1]
    turns = (walk.digits[0][0] - 1) * walk.digits[0][1]
    lowest, highest = bottom + min(turns, 0), top + max(turns, 0)
    if low <= lowest and highest < high:
        return [walk]
    if highest < low or high <= lowest or high <= low:
        return []
    found = _whole_turns(walk, low - bottom, high - 1 - top, top - bottom)
    return found or join(walk, Walk((low,), coalesce(((high - low, 1),))))


def _whole_turns(walk: Walk, low: int, high: int, reach: int) -> list[Walk]:
    """`restrict` where the bounds cut between two turns of the outermost loop; else nothing.

    That is what steps over rows and runs do, and it needs no search. Turns are kept that begin
    between `low` and `high`, counted from the first one; each of them reaches so far.
    """
    extent, stride, *_ = digit = walk.digits[0]
    if stride <= reach:  # the turns reach over each other, or come backwards
        return []
    first, stop = max(0, -(-low // stride)), min(extent, high // stride + 1)
    count = stop - first
    starts_within = first > 0 and (first - 1) * stride + reach >= low
    ends_within = stop < extent and stop * stride - reach <= high
    if count <= 0 or starts_within or ends_within:
        return []
    bases = tuple([b + first * s for b, s in zip(walk.bases, digit[1:], strict=True)])
    inner = walk.digits[1:]
    return [Walk(bases, ((count, *digit[1:]), *inner) if count > 1 else inner)]


_Loop: TypeAlias = tuple[int, int, Addresses]
"""(extent, stride of the first address, strides of the result); the first stride is positive."""
_Loops: TypeAlias = tuple[_Loop, ...]


def _prepared(
    walk: Walk, kept: slice, before: Addresses, after: Addresses
) -> tuple[Addresses, _Loops, Digits]:
    """(bases, moving loops by falling stride, loops that stand still), lifted to the result."""
    bases = walk.bases
    moving: list[Digit] = []
    still: list[Digit] = []
    for digit in walk.digits:
        extent, strides = digit[0], digit[1:]
        if not strides[0]:
            still.append(digit)
        elif strides[0] > 0:
            moving.append(digit)
        else:
            bases = moved(bases, extent - 1, strides)
            moving.append((extent, *[-stride for stride in strides]))
    moving.sort(key=lambda digit: -digit[1])
    return (
        bases,
        tuple(
            [(digit[0], digit[1], (*before, *digit[kept], *after)) for digit in coalesce(moving)]
        ),
        tuple([(digit[0], *before, *digit[kept], *after) for digit in still]),
    )


def _span(loops: _Loops) -> int:
    """How far loops reach."""
    return sum([(extent - 1) * stride for extent, stride, _ in loops])


class _Matcher:
    """The recursion of `join`.

    It looks for the steps at which loops of `a`, started at 0, and loops of `b`, started at a
    distance, are at the same address. `at` is where the result stands meanwhile, `done` the loops
    that it has so far.
    """

    __slots__ = ("_problems", "_still", "_what", "found")

    def __init__(self, still: Digits, what: str) -> None:
        self.found: list[Walk] = []
        self._still = still
        self._what = what
        self._problems = 0

    def match(self, a: _Loops, b: _Loops, distance: int, at: Addresses, done: Digits) -> None:
        """Add what two sides have in common to `found`."""
        self._problems += 1
        if self._problems > _MOST_PROBLEMS:
            raise UnsupportedError(
                f"{self._what} reach over each other in more than {_MOST_PROBLEMS} ways"
            )
        if not -_span(b) <= distance <= _span(a):
            return
        if not a and not b:
            self.found.append(Walk(at, done + self._still))
        elif distance % gcd(*[loop[1] for loop in a + b]):
            return
        elif len(a) <= 1 and len(b) <= 1:
            self._match_two_loops(a, b, distance, at, done)
        elif (cut := _find_cut(a, b, distance)) is None:
            self._match_top(a, b, distance, at, done)
        elif cut.is_of_a:
            for start, part in cut.parts(a):
                self.match(part, b, distance - start * a[0][1], moved(at, start, a[0][2]), done)
        else:
            for start, part in cut.parts(b):
                self.match(a, part, distance + start * b[0][1], moved(at, start, b[0][2]), done)

    def _match_two_loops(
        self, a: _Loops, b: _Loops, distance: int, at: Addresses, done: Digits
    ) -> None:
        """Solve ``x * stride_a - y * stride_b = distance`` for one loop, or none, on each side."""
        still = (0,) * len(at)
        extent_a, stride_a, strides_a = a[0] if a else (1, b[0][1], still)
        extent_b, stride_b, strides_b = b[0] if b else (1, a[0][1], still)
        # The caller knows that the greatest common divisor divides the distance.
        common = gcd(stride_a, stride_b)
        period_a, period_b = stride_b // common, stride_a // common
        # x is known modulo period_a; y follows.
        x = distance // common * pow(period_b, -1, period_a) % period_a
        y = (x * stride_a - distance) // stride_b
        first = max(0, -(y // period_b))
        last = min((extent_a - 1 - x) // period_a, (extent_b - 1 - y) // period_b)
        if first > last:
            return
        at = moved(moved(at, x + first * period_a, strides_a), y + first * period_b, strides_b)
        if last > first:
            step = moved(moved(still, period_a, strides_a), period_b, strides_b)
            done = (*done, (last - first + 1, *step))
        self.found.append(Walk(at, done + self._still))

    def _match_top(self, a: _Loops, b: _Loops, distance: int, at: Addresses, done: Digits) -> None:
        """Match the digits of the largest stride: their difference is fixed up to a carry."""
        stride = max(loops[0][1] for loops in (a, b) if loops)
        extent_a, strides_a, lower_a = _top(a, stride, len(at))
        extent_b, strides_b, lower_b = _top(b, stride, len(at))
        lowest = -((_span(lower_a) - distance) // stride)
        highest = (distance + _span(lower_b)) // stride
        both = tuple(map(add, strides_a, strides_b))
        for ahead in range(max(lowest, 1 - extent_b), min(highest, extent_a - 1) + 1):
            x, y = max(0, ahead), max(0, -ahead)
            extent = min(extent_a - x, extent_b - y)
            self.match(
                lower_a,
                lower_b,
                distance - ahead * stride,
                moved(moved(at, x, strides_a), y, strides_b),
                (*done, (extent, *both)) if extent > 1 else done,
            )


def _top(loops: _Loops, stride: int, addresses: int) -> tuple[int, Addresses, _Loops]:
    """(extent, strides, lower loops) of the digit of `stride`, which may be missing."""
    if loops and loops[0][1] == stride:
        return loops[0][0], loops[0][2], loops[1:]
    return 1, (0,) * addresses, loops


class _Cut(Frozen):
    """How to cut the first loop of one side: a head, whole periods as two loops, and a tail."""

    is_of_a: bool
    period: int
    head: int = 0

    def parts(self, loops: _Loops) -> Iterator[tuple[int, _Loops]]:
        """Yield (first step, loops) of the parts that are there."""
        (extent, stride, strides), lower = loops[0], loops[1:]
        head = min(self.head, extent)
        periods = (extent - head) // self.period
        middle = head + periods * self.period
        if head:
            yield 0, _loop(head, stride, strides) + lower
        if periods:
            slow = moved((0,) * len(strides), self.period, strides)
            whole = _loop(periods, self.period * stride, slow)
            yield head, (*whole, (self.period, stride, strides), *lower)
        if middle < extent:
            yield middle, _loop(extent - middle, stride, strides) + lower


def _loop(extent: int, stride: int, strides: Addresses) -> _Loops:
    return ((extent, stride, strides),) if extent > 1 else ()


def _find_cut(a: _Loops, b: _Loops, distance: int) -> _Cut | None:
    """Cut the side with the smaller top stride on the grid of the larger one, if it reaches beyond.

    Where the strides do not divide, the larger one is cut on the grid of their common multiple, if
    that pays; the smaller one follows in the next round.
    """
    if not a or not b:
        return None
    is_a_top = a[0][1] >= b[0][1]
    top, other = (a, b) if is_a_top else (b, a)
    (top_extent, grid, _), (extent, stride, _) = top[0], other[0]
    if grid % stride:
        common = lcm(grid, stride)
        if min(extent * stride, top_extent * grid) < 2 * common:
            return None
        return _Cut(is_a_top, common // grid)
    if stride == grid or extent * stride <= grid:
        return None
    # Cut where the low part of the top side does not wrap, so that fewer parts meet.
    corner = (-distance if is_a_top else distance) % grid
    period = grid // stride
    wraps = corner + _span(top[1:]) >= grid
    return _Cut(not is_a_top, period, -(-corner // stride) % period if wraps else 0)
