"""Cover points of two addresses with few nests of loops.

The points are steps of a walk: (first, second) pairs whose first address rises. A *nest* is a base
and digits (extent, first stride, second stride), outermost first, that visit some of the points in
order. One point at a time would always do; the aim is the fewest nests.

The method, for a sequence that is not one nest already:

1. Strip the inner loop whose extent is the greatest common divisor of all positions at which the
   step changes. Maximal runs would be wrong: two blocks of CodeGen's fused QKV happen to touch, and
   a run of double length hides that all blocks are equal.
2. Find the smallest period: the sequence is a shorter one, repeated at a constant distance.
3. Otherwise choose cuts between nests by dynamic programming.
4. Join nests with equal digits whose bases lie on a nest themselves. This finds what is interleaved
   in the first address, which no cut can.
"""

from __future__ import annotations

from bisect import bisect_left
from math import gcd
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Digit", "Nest", "fold_points"]

Digit: TypeAlias = tuple[int, int, int]

# Up to here every position may be a cut. Above, only those near a change of step may.
_MOST_FREE_CUTS: Final = 256
# Above, the sequence is a table of no structure, and the search for cuts would take minutes.
_MOST_CUTS: Final = 4096


class Nest(Frozen):
    """A walk over two addresses.

    Attributes:
        first: First address of the first point.
        second: Second address of the first point.
        digits: Loops (extent, first stride, second stride), outermost first.
    """

    first: int
    second: int
    digits: tuple[Digit, ...] = ()


def fold_points(
    firsts: Sequence[int], seconds: Sequence[int], *, may_descend: bool = False
) -> list[Nest]:
    """Cover a sequence of points with nests.

    Args:
        firsts: First address of each point, strictly rising.
        seconds: Second address of each point.
        may_descend: Whether a loop may walk the second address downwards.

    Returns:
        Nests that together visit every point exactly once, by rising first address.

    Cost:
        O(points) for one nest; O(points * longest nest) up to a few hundred points that follow no
        common structure, and near the changes of step above.

    Examples:
        >>> fold_points([0, 1, 2, 3, 4, 5], [0, 1, 10, 11, 20, 21])
        [Nest(first=0, second=0, digits=((3, 2, 10), (2, 1, 1)))]
    """
    if not firsts:
        return []
    nests = _Sequence(firsts, seconds, may_descend=may_descend).fold()
    return sorted(nests, key=lambda nest: nest.first)


class _Sequence:
    """Points in order, with the end of the run of equal steps that starts at each of them."""

    def __init__(self, firsts: Sequence[int], seconds: Sequence[int], *, may_descend: bool) -> None:
        self.firsts = firsts
        self.seconds = seconds
        self.may_descend = may_descend
        self.count = len(firsts)
        self.run_ends = self._run_ends()

    def fold(self) -> list[Nest]:
        whole = next(self.nests_from(0, [self.count]), None)
        if whole is not None:
            return [Nest(self.firsts[0], self.seconds[0], whole[1])]
        inner = self._inner_extent()
        if inner > 1:
            first, second = self._step(0, 1)
            outer = self._every(inner, self.count)
            return [_extended(nest, (inner, first, second)) for nest in outer.fold()]
        candidates = [self._repeat(period) for period in self._periods()]
        if not candidates or self.count <= _MOST_FREE_CUTS:
            candidates.append(self._join(self._cut()))
        return min(candidates, key=len)

    def nests_from(
        self, start: int, cuts: Sequence[int]
    ) -> Iterator[tuple[int, tuple[Digit, ...]]]:
        """Yield every nest that covers a stretch of points from `start` to one of `cuts`.

        There is no choice on the way up. In a nest without loops that continue each other the
        innermost loop is as long as the run of equal steps, the next as long as the run of equal
        blocks, and so on; only the outermost may stop early.
        """
        if _is_in(cuts, start + 1):
            yield start + 1, ()
        digits: tuple[Digit, ...] = ()
        block = 1
        while start + block < self.count:
            first, second = self._step(start, block)
            if second < 0 and not self.may_descend:
                return
            blocks = self._equal_blocks(start, block, first, second)
            if blocks == 1:
                return
            for stop in _multiples(cuts, start, block, blocks):
                yield stop, (((stop - start) // block, first, second), *digits)
            digits = ((blocks, first, second), *digits)
            block *= blocks

    def _run_ends(self) -> list[int]:
        """For each point the last one that is reached from it by equal steps."""
        firsts, seconds, last = self.firsts, self.seconds, self.count - 1
        ends = list(range(self.count))
        next_step = None
        for at in range(last - 1, -1, -1):
            step = (firsts[at + 1] - firsts[at], seconds[at + 1] - seconds[at])
            if step[1] >= 0 or self.may_descend:
                ends[at] = ends[at + 1] if step == next_step else at + 1
            next_step = step
        return ends

    def _step(self, start: int, distance: int) -> tuple[int, int]:
        to = start + distance
        return self.firsts[to] - self.firsts[start], self.seconds[to] - self.seconds[start]

    def _equal_blocks(self, start: int, block: int, first: int, second: int) -> int:
        """Count the blocks from `start` on that are the same but for a constant distance."""
        if block == 1:
            return self.run_ends[start] - start + 1
        run = self.run_ends[start] - start + 1
        starts = range(0, block, run)
        firsts, seconds, run_ends = self.firsts, self.seconds, self.run_ends
        inner = self._step(start, 1)
        blocks = 1
        while start + (blocks + 1) * block <= self.count:
            base = start + blocks * block
            for offset in starts:
                at, origin = base + offset, start + offset
                if (
                    firsts[at] - firsts[origin] != blocks * first
                    or seconds[at] - seconds[origin] != blocks * second
                    or run_ends[at] < at + run - 1
                    or self._step(at, 1) != inner
                ):
                    return blocks
            blocks += 1
        return blocks

    def _inner_extent(self) -> int:
        """Greatest extent of an innermost loop that all points share, 1 where there is none."""
        if self.run_ends[0] == 0:
            return 1
        extent, inner = self.count, self._step(0, 1)
        for at in range(1, self.count):
            if self._step(at - 1, 1) != inner:
                extent = gcd(extent, at)
                if extent == 1:
                    break
        return extent

    def _every(self, stride: int, stop: int) -> _Sequence:
        return self._points(range(0, stop, stride))

    def _points(self, positions: Sequence[int]) -> _Sequence:
        return _Sequence(
            [self.firsts[at] for at in positions],
            [self.seconds[at] for at in positions],
            may_descend=self.may_descend,
        )

    def _periods(self) -> Iterator[int]:
        """Yield the smallest period whose points all move alike, and the smallest at all.

        After one period every point has moved by its own constant distance: the heads of fused Q,
        K and V follow each other group by group, but lie further apart in Q than in K.
        """
        is_found = False
        for period in range(2, self.count // 2 + 1):
            if self.count % period:
                continue
            steps = {self._step(at, period) for at in range(period)}
            if min(second for _, second in steps) < 0 and not self.may_descend:
                continue
            is_alike = len(steps) == 1
            if (is_alike or (self.count > 2 * period and not is_found)) and self._repeats(period):
                yield period
                is_found = True
                if is_alike:
                    return

    def _repeats(self, period: int) -> bool:
        """Whether each period moves from the one before as the second does from the first."""
        return all(
            self._step(at, period) == self._step(at - period, period)
            for at in range(period, self.count - period)
        )

    def _repeat(self, period: int) -> list[Nest]:
        """Fold the points of one period, those that move alike together, and repeat the nests."""
        moving: dict[tuple[int, int], list[int]] = {}
        for at in range(period):
            moving.setdefault(self._step(at, period), []).append(at)
        return [
            Nest(nest.first, nest.second, ((self.count // period, *step), *nest.digits))
            for step, positions in moving.items()
            for nest in self._points(positions).fold()
        ]

    def _cut(self) -> list[Nest]:
        """Cover the sequence with the fewest nests that follow each other."""
        cuts = self._candidate_cuts()
        if len(cuts) > _MOST_CUTS:
            return self._greedy()
        # best[i]: (nests, loops) of the points before cuts[i], where the last nest starts, digits
        unreached = (self.count + 1, 0, 0, ())
        best: list[tuple[int, int, int, tuple[Digit, ...]]] = [unreached] * len(cuts)
        best[0] = (0, 0, 0, ())
        positions = {cut: number for number, cut in enumerate(cuts)}
        for number, start in enumerate(cuts[:-1]):
            nests, loops = best[number][0] + 1, best[number][1]
            for stop, digits in self.nests_from(start, cuts):
                to = positions[stop]
                if (nests, loops + len(digits)) < best[to][:2]:
                    best[to] = (nests, loops + len(digits), number, digits)
        result = []
        number = len(cuts) - 1
        while number:
            _, _, number, digits = best[number]
            start = cuts[number]
            result.append(Nest(self.firsts[start], self.seconds[start], digits))
        return result

    def _candidate_cuts(self) -> list[int]:
        if self.count <= _MOST_FREE_CUTS:
            return list(range(self.count + 1))
        cuts = {0, self.count}
        at = 0
        length_before = 0
        while at < self.count:
            end = self.run_ends[at]
            # A block may touch its neighbour by chance: cut where the blocks before would end.
            cuts.update((at, min(end, at + 1), end, end + 1))
            if 0 < length_before < end + 1 - at:
                cuts.update((at + length_before, end + 1 - length_before))
            length_before = end + 1 - at
            at = max(end, at + 1)
        return sorted(cuts)

    def _greedy(self) -> list[Nest]:
        """Take the longest nest each time: all that a table of no structure deserves."""
        result = []
        start = 0
        everywhere = range(self.count + 1)
        while start < self.count:
            stop, digits = max(self.nests_from(start, everywhere))
            result.append(Nest(self.firsts[start], self.seconds[start], digits))
            start = stop
        return result

    def _join(self, nests: list[Nest]) -> list[Nest]:
        """Join nests with equal digits whose bases follow a nest of their own."""
        while True:
            alike: dict[tuple[Digit, ...], list[Nest]] = {}
            for nest in nests:
                alike.setdefault(_ordered(nest.digits), []).append(nest)
            if len(alike) == len(nests) or len(nests) == self.count:
                return nests
            joined = [
                Nest(outer.first, outer.second, (*outer.digits, *digits))
                for digits, group in alike.items()
                for outer in self._bases(group).fold()
            ]
            if len(joined) == len(nests):
                return nests
            nests = joined

    def _bases(self, nests: list[Nest]) -> _Sequence:
        bases = sorted((nest.first, nest.second) for nest in nests)
        return _Sequence(
            [first for first, _ in bases],
            [second for _, second in bases],
            may_descend=self.may_descend,
        )


def _extended(nest: Nest, digit: Digit) -> Nest:
    return Nest(nest.first, nest.second, (*nest.digits, digit))


def _ordered(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    return tuple(sorted(digits, key=lambda digit: (-digit[1], -digit[2])))


def _is_in(cuts: Sequence[int], position: int) -> bool:
    if isinstance(cuts, range):
        return position in cuts
    at = bisect_left(cuts, position)
    return at < len(cuts) and cuts[at] == position


def _multiples(cuts: Sequence[int], start: int, block: int, blocks: int) -> Iterator[int]:
    """Yield the cuts at 2 to `blocks` whole blocks after `start`."""
    if len(cuts) > cuts[-1]:  # every position is one
        yield from range(start + 2 * block, start + blocks * block + 1, block)
        return
    for at in range(bisect_left(cuts, start + 2 * block), len(cuts)):
        if cuts[at] > start + blocks * block:
            return
        if not (cuts[at] - start) % block:
            yield cuts[at]
