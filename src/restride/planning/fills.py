"""What fills the elements of a region, told apart from the files that it is read from.

The layers of a model are cut alike, and so are the states of a parameter. A *pattern* says which
elements of a region come from which elements of which rank's shard; all regions that are cut alike
share one. Where the shards are is the catalog's knowledge, tensor by tensor, and is not repeated.
"""

from __future__ import annotations

from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from restride.algebra.walks import restrict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.algebra.walks import Walk

__all__ = ["Fill", "Pattern", "Reach", "Row", "Source", "numel_of", "walks_within"]

_ONE: Final = Fraction(1)


class Source(Struct, frozen=True):
    """One place where the elements of a fill can be read.

    Attributes:
        rank: Source rank that holds them.
        walks: Walks over (target element of the region, source element of the shard).
    """

    rank: int
    walks: tuple[Walk, ...]


class Fill(Struct, frozen=True):
    """Elements of a region and every replica of them.

    Attributes:
        sources: Every place where they are, the chosen one first.
        agreeing: How many sources, from the first on, must hold the same; the others may differ.
        scale: Exact factor: the target is what is read times this, rounded once.
    """

    sources: tuple[Source, ...]
    agreeing: int = 1
    scale: Fraction = _ONE

    @property
    def target_range(self) -> range:
        """Smallest range of region elements that contains the fill."""
        reaches = [walk.reach() for walk in self.sources[0].walks]
        return range(min(r.start for r in reaches), max(r.stop for r in reaches))


class Reach(NamedTuple):
    """A fill, and the elements of the region that it is among.

    Attributes:
        start: First element.
        stop: Element after the last one.
        numel: Elements that it fills.
        fill: The fill.
    """

    start: int
    stop: int
    numel: int
    fill: Fill


class Row(NamedTuple):
    """One turn of a loop over rows of a source that have parts of several targets.

    Attributes:
        target_numel: Elements of the target.
        source_numel: Elements of the source.
        rank: Source rank.
    """

    target_numel: int
    source_numel: int
    rank: int


class Pattern(Struct, frozen=True):
    """Everything that fills a region, and what follows from it for all regions that share it.

    Attributes:
        fills: Disjoint sets of elements. What no fill reaches is padding, and zero.
        reaches: The same, by the first element.
        numel: Elements that are filled.
        is_moved: Whether all of them are read as they are, from one place.
        run_count: Runs of elements that stand together on both sides, where all elements are moved
            in such runs; else 0.
        row: The rows of a source of which the region has a part; None where it has all of them.
        pitches: Where the outermost loops may turn over: strides of the target.
        walk_count: Walks, sources, and two for the pattern itself: what it takes in memory goes by
            that.
    """

    fills: tuple[Fill, ...]
    reaches: tuple[Reach, ...]
    numel: int
    is_moved: bool
    run_count: int
    row: Row | None
    pitches: tuple[int, ...]
    walk_count: int

    @classmethod
    def of(cls, fills: tuple[Fill, ...]) -> Pattern:
        """Find out what follows from the fills.

        Cost:
            O(walks), but for sorting them. Never walks elements.
        """
        firsts = [walk for fill in fills for walk in fill.sources[0].walks]
        reaches = sorted(map(_reach, fills), key=attrgetter("start"))
        is_moved = all(len(fill.sources) == 1 and fill.scale == 1 for fill in fills)
        return cls(
            fills=fills,
            reaches=tuple(reaches),
            numel=sum([reach.numel for reach in reaches]),
            is_moved=is_moved,
            run_count=len(firsts) if is_moved and all(map(_is_run, firsts)) else 0,
            row=next(filter(None, map(_row, fills)), None),
            pitches=tuple({digit[1] for walk in firsts for digit in walk.digits if digit[1] > 0}),
            walk_count=2 + sum([1 + len(s.walks) for fill in fills for s in fill.sources]),
        )


def walks_within(walks: tuple[Walk, ...], start: int, stop: int) -> list[Walk]:
    """The parts of some walks that are among the elements [start, stop) of the target."""
    return [part for walk in walks for part in restrict(walk, start, stop)]


def numel_of(walks: Iterable[Walk]) -> int:
    """Elements of some walks."""
    return sum([walk.numel for walk in walks])


def _reach(fill: Fill) -> Reach:
    reach = fill.target_range
    return Reach(reach.start, reach.stop, numel_of(fill.sources[0].walks), fill)


def _is_run(walk: Walk) -> bool:
    """Whether elements stand together on both sides."""
    return not walk.digits or (len(walk.digits) == 1 and walk.digits[0][1:] == (1, 1))


def _row(fill: Fill) -> Row | None:
    """As `Pattern.row`, of one fill: its longest loop that leaves gaps in the source."""
    first = fill.sources[0]
    for walk in first.walks:
        for extent, target, source in walk.digits:
            if extent > 1 and 0 < target < source:
                return Row(target, source, first.rank)
    return None
