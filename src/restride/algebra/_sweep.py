"""The radix sweep: who stands on which address, exactly, without walking addresses.

Lattices that reach over each other are cut along a common grid, the largest stride among them.
What a lattice does inside the blocks of the grid is the same for long runs of blocks, so each
lattice becomes a few *runs*: (first block, number of blocks, rest inside one block). Between two
ends of runs the set of runs is constant, and its rests are swept in turn, one block instead of the
whole tensor. Every level has a smaller grid; a lattice that meets no other is done at once.

Blocks of the grid that differ one by one make it slow: strides that neither divide each other nor
have a small common multiple, or loops that reach over each other. No framework writes those, but a
hostile map file may, so the work is counted and refused beyond a limit.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from restride.algebra._lattice import (
    Digits,
    Lattice,
    compact,
    count_below,
    is_nested,
    normalize,
    numel_of,
    reach_of,
)
from restride.errors import LayoutError, UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

__all__ = ["DEFAULT_LIMIT", "Region", "lowest_missing", "sweep"]

DEFAULT_LIMIT = 200_000
"""Runs and regions that a sweep may handle before it gives up: about half a second."""

# Beyond that, for each lattice. Layouts of more than a dozen lattices need up to four; a map file
# may list ten thousands with nothing in common, and is refused in seconds.
_MOST_PER_LATTICE = 8

# Every level costs two Python frames; layouts of frameworks need fewer than ten levels and loops.
_MOST_DEPTH = 100
_MOST_DIGITS = 100

T = TypeVar("T", bound="Hashable")

_Tags: TypeAlias = tuple[int, ...]
_Entry: TypeAlias = tuple[int, Digits, _Tags]
_Run: TypeAlias = tuple[int, int, int, Digits]  # first block, end block, rest base, rest digits


class Region(Frozen, Generic[T]):
    """Addresses on which exactly the same tags stand.

    Attributes:
        base: Lowest address.
        digits: (extent, stride), strides falling, each larger than the reach of the smaller ones:
            no address occurs twice.
        tags: Who stands here, in the order in which the tags were first given. A tag that stands
            here more than once is listed twice.
    """

    base: int
    digits: Digits
    tags: tuple[T, ...]

    @property
    def numel(self) -> int:
        """Number of addresses."""
        return numel_of(self.digits)

    @property
    def is_repeated(self) -> bool:
        """Whether some tag stands here more than once."""
        return len(set(self.tags)) < len(self.tags)


def sweep(
    walks: Iterable[tuple[int, Iterable[tuple[int, int]], T]],
    numel: int,
    *,
    limit: int = DEFAULT_LIMIT,
) -> tuple[Region[T], ...]:
    """Cut overlapping lattices into disjoint ones with the exact tags of each.

    Args:
        walks: (base, digits, tag) of each lattice, a digit being (extent, stride). Strides may be
            negative or 0, loops may reach over each other, several walks may have the same tag.
        numel: Addresses are in ``[0, numel)``.
        limit: Work allowed beyond what the number of walks explains.

    Returns:
        Disjoint regions, by base, which together are all addresses that any walk visits. A tag
        that visits an address twice, by one walk or by two, is listed twice there.

    Raises:
        LayoutError: A walk leaves ``[0, numel)``.
        UnsupportedError: The strides have so little in common that the regions could not be found
            within `limit`.

    Cost:
        O(walks * log(walks)) where the radices divide, as in everything that frameworks write.
        Never walks addresses.

    Examples:
        >>> for region in sweep([(0, [(8, 1)], "a"), (4, [(8, 1)], "b")], 12):
        ...     print(region.base, region.digits, region.tags)
        0 ((4, 1),) ('a',)
        4 ((4, 1),) ('a', 'b')
        8 ((4, 1),) ('b',)
    """
    names: dict[T, int] = {}
    entries: dict[Lattice, _Tags] = {}
    for base, digits, tag in walks:
        digits = tuple(digits)  # noqa: PLW2901 - read twice
        if any(extent < 1 for extent, _ in digits):
            continue
        lattice = normalize(base, digits)
        _require_inside(lattice, numel)
        number = names.setdefault(tag, len(names))
        stands_still = any(stride == 0 and extent > 1 for extent, stride in digits)
        _add(entries, lattice, (number, number) if stands_still else (number,))
    sweeper = _Sweeper(limit + _MOST_PER_LATTICE * len(entries))
    found = sweeper.solve([(*lattice, tags) for lattice, tags in entries.items()], 0)
    by_tags: dict[_Tags, list[Lattice]] = {}
    for base, digits, tags in found:
        by_tags.setdefault(tags, []).append((base, digits))
    order = list(names)
    return tuple(
        Region(base, digits, tuple(order[number] for number in tags))
        for base, digits, tags in sorted(
            (*lattice, tags) for tags, group in by_tags.items() for lattice in compact(group)
        )
    )


def lowest_missing(regions: Iterable[Region[T]], numel: int) -> int:
    """Lowest address of ``[0, numel)`` that is in no region of a sweep.

    The regions must leave at least one address out.

    Cost:
        O(regions * log(numel)).
    """
    undecided = [(region.base, region.digits) for region in regions]
    low, high, below_low = 0, numel - 1, 0
    while low < high:
        middle = (low + high) // 2
        counts = [count_below(lattice, middle + 1) for lattice in undecided]
        if below_low + sum(counts) <= middle:
            high = middle
            undecided = [lattice for lattice in undecided if lattice[0] <= high]
        else:
            low = middle + 1
            left = []
            for lattice, count in zip(undecided, counts, strict=True):
                if count == numel_of(lattice[1]):
                    below_low += count
                else:
                    left.append(lattice)
            undecided = left
    return low


def _require_inside(lattice: Lattice, numel: int) -> None:
    base, digits = lattice
    if len(digits) > _MOST_DIGITS:
        msg = f"a walk of {len(digits)} loops is not swept, at most {_MOST_DIGITS} are"
        raise UnsupportedError(msg)
    if base < 0 or base + reach_of(digits) >= numel:
        msg = f"a walk covers addresses {base} to {base + reach_of(digits)}, outside [0, {numel})"
        raise LayoutError(msg)


def _add(entries: dict[Lattice, _Tags], lattice: Lattice, tags: _Tags) -> None:
    """Add tags to those that stand on the same lattice; nobody is counted further than twice."""
    known = entries.get(lattice)
    if known is None:
        entries[lattice] = tags
        return
    both = sorted(known + tags)
    entries[lattice] = tuple(
        tag
        for place, tag in enumerate(both)
        if place < 2 or both[place - 2] != tag  # noqa: PLR2004
    )


class _Sweeper:
    """State of one sweep: what was swept before, and how much work is left."""

    __slots__ = ("_known", "_left", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._known: dict[tuple[_Entry, ...], list[_Entry]] = {}

    def solve(self, entries: list[_Entry], depth: int) -> list[_Entry]:
        """Sweep lattices. Equal lattices have been merged into one entry."""
        entries.sort()
        solved: list[_Entry] = []
        for group in _components(entries):
            base, digits, _ = group[0]
            if len(group) == 1 and is_nested(digits):
                solved.append(group[0])
                continue
            key = tuple((start - base, digits, tags) for start, digits, tags in group)
            if key not in self._known:
                self._known[key] = self._solve_blocks(key, depth)
            # What is known costs nothing to solve, but it can still double on every level.
            self._spend(len(self._known[key]))
            solved.extend((base + start, digits, tags) for start, digits, tags in self._known[key])
        return solved

    def _solve_blocks(self, entries: tuple[_Entry, ...], depth: int) -> list[_Entry]:
        if depth == _MOST_DEPTH:
            raise UnsupportedError(
                f"lattices reach over each other on more than {_MOST_DEPTH} levels of strides"
            )
        grid = _grid(entries)
        runs: list[tuple[_Run, _Tags]] = []
        for base, digits, tags in entries:
            runs.extend((run, tags) for run in self._cut(base, digits, grid))
        solved: list[_Entry] = []
        for first, stop, rests in self._segments(runs):
            inside = [(*lattice, tags) for lattice, tags in rests.items()]
            solved.extend(
                (first * grid + base, _repeat(stop - first, grid, digits), tags)
                for base, digits, tags in self.solve(inside, depth + 1)
            )
        return solved

    def _segments(
        self, runs: list[tuple[_Run, _Tags]]
    ) -> list[tuple[int, int, dict[Lattice, _Tags]]]:
        """Split the blocks where a run starts or stops: [(first, end, rests inside a block)]."""
        starting: dict[int, list[tuple[_Run, _Tags]]] = {}
        for entry in runs:
            starting.setdefault(entry[0][0], []).append(entry)
        bounds = sorted({bound for run, _ in runs for bound in run[:2]})
        segments: list[tuple[int, int, dict[Lattice, _Tags]]] = []
        active: list[tuple[_Run, _Tags]] = []
        for first, stop in pairwise(bounds):
            active = [entry for entry in active if entry[0][1] > first]
            active += starting.get(first, [])
            self._spend(1 + len(active))
            rests: dict[Lattice, _Tags] = {}
            for (_, _, base, digits), tags in active:
                _add(rests, (base, digits), tags)
            if segments and segments[-1][1] == first and segments[-1][2] == rests:
                segments[-1] = (segments[-1][0], stop, rests)
            else:
                segments.append((first, stop, rests))
        return segments

    def _cut(self, base: int, digits: Digits, grid: int) -> list[_Run]:
        """Cut a lattice into runs of blocks. No stride exceeds the grid."""
        runs: list[_Run] = []
        pending: list[Lattice] = [(base, digits)]
        while pending:
            self._spend(1)
            base, digits = pending.pop()
            block, rest = divmod(base, grid)
            if rest + reach_of(digits) < grid:
                runs.append((block, block + 1, rest, digits))
                continue
            (extent, stride), lower = digits[0], digits[1:]
            if stride < grid:
                pending.extend(self._part(base, digits, grid))
            elif rest + reach_of(lower) < grid:
                runs.append((block, block + extent, rest, lower))
            else:
                for run in self._cut(base, lower, grid):
                    self._spend(1)
                    runs.extend(_convolve(run, extent))
        return runs

    def _part(self, base: int, digits: Digits, grid: int) -> list[Lattice]:
        """Split a lattice that crosses blocks with a stride below the grid, towards runs."""
        (extent, stride), lower = digits[0], digits[1:]
        rest = base % grid
        starts = -((rest - grid) // stride)  # so many steps start in the first block
        if extent <= starts:
            inside = (grid - 1 - reach_of(lower) - rest) // stride + 1
            inside = max(0, min(inside, extent))
            self._spend(extent - inside)
            crossing = [(base + step * stride, lower) for step in range(inside, extent)]
            return [(base, _digit(inside, stride, lower)), *crossing] if inside else crossing
        parts = [(base, _digit(starts, stride, lower))]
        base += starts * stride
        extent -= starts
        period = grid // stride
        periods = extent // period if grid % stride == 0 else 0
        if periods:
            parts.append((base, _digit(periods, grid, _digit(period, stride, lower))))
            base += periods * grid
            extent -= periods * period
        if extent:
            parts.append((base, _digit(extent, stride, lower)))
        return parts

    def _spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise UnsupportedError(
                f"the strides have so little in common that {self._limit} steps were not enough "
                "to tell who holds what",
                remedy="cut the pieces along common multiples of their strides",
            )


def _components(entries: list[_Entry]) -> list[list[_Entry]]:
    """Group sorted lattices whose ranges of addresses overlap."""
    groups: list[list[_Entry]] = []
    reach = -1
    for entry in entries:
        last = entry[0] + reach_of(entry[1])
        if entry[0] > reach:
            groups.append([entry])
        else:
            groups[-1].append(entry)
        reach = max(reach, last)
    return groups


def _grid(entries: tuple[_Entry, ...]) -> int:
    """Width of a block: no stride exceeds it, and lattices repeat from block to block."""
    grid = max(digits[0][1] for _, digits, _ in entries if digits)
    width = max(base + reach_of(digits) for base, digits, _ in entries) + 1
    for _, digits, _ in entries:
        if digits and grid % digits[0][1] and reach_of(digits) > grid:
            common = lcm(grid, digits[0][1])
            if 2 * common <= width:
                grid = common
    return grid


def _digit(extent: int, stride: int, lower: Digits) -> Digits:
    return ((extent, stride), *lower) if extent > 1 else lower


def _repeat(count: int, grid: int, digits: Digits) -> Digits:
    """Repeat a lattice inside one block over `count` blocks."""
    if count > 1 and digits and digits[0][0] * digits[0][1] == grid:
        return ((count * digits[0][0], digits[0][1]), *digits[1:])
    return _digit(count, grid, digits)


def _convolve(run: _Run, extent: int) -> list[_Run]:
    """Repeat a run from each of `extent` neighbouring blocks.

    The first and the last block of the result are reached once, those between more than once,
    which two runs say; nobody is counted further than twice.
    """
    first, stop, base, digits = run
    whole: _Run = (first, stop + extent - 1, base, digits)
    if stop - first == 1:
        return [whole]
    inner: _Run = (first + 1, stop + extent - 2, base, digits)
    return [whole, inner]
