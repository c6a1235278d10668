"""Prove that a layout is whole, on both of its sides, without walking elements.

The *full side* is whole when every element of the full tensor is held by somebody: replicas are
fine, and may be cut differently. The *shard side* is whole when every address of every shard is
written exactly once or declared padding.

Three arguments, each tried where the one before it does not settle the matter:

1. *Structure*: walks that were cut along mixed radices merge back into one interval. Exact, and
   all that layouts of frameworks need. The ranks are one more address, so the cost does not depend
   on their number.
2. *Fingerprint*: the addresses as a polynomial over GF(2^127 - 1), evaluated at a point that is
   derived from a hash of the very walks in question, so that walks cannot be chosen for a point
   short of trying some 2^77 of them. By the Schwartz-Zippel lemma two different multisets of
   addresses agree there with probability below 2^-77. A disagreement is certain.
3. *Radix sweep*: exact, finds the witness and the count of what is wrong.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from restride.algebra._holders import Held, holders, replication
from restride.algebra._lattice import normalize, numel_of
from restride.algebra._sweep import Region, lowest_missing, sweep
from restride.algebra._tiling import (
    full_lattice,
    located_sweep,
    shard_lattice,
    tiles_by_fingerprint,
    tiles_by_structure,
)
from restride.algebra._verdict import (
    Covered,
    Gap,
    Hole,
    Method,
    Overlap,
    Verdict,
    Writer,
    coordinates_of,
    explain,
)
from restride.errors import CoverageError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra._lattice import Lattice
    from restride.algebra.layout import Layout

__all__ = [
    "Covered",
    "Gap",
    "Held",
    "Hole",
    "Method",
    "Overlap",
    "Region",
    "Verdict",
    "Writer",
    "explain",
    "holders",
    "prove",
    "replication",
    "require_covered",
    "sweep",
]

_STRENGTH: tuple[Method, ...] = ("structure", "sweep", "fingerprint")


def prove(layout: Layout, *, side: Literal["both", "full", "shard"] = "both") -> Verdict:
    """Prove that a layout covers its tensor and writes its shards once, or find the place.

    Args:
        layout: Layout in question.
        side: What to prove: ``"full"`` that every full element is held, ``"shard"`` that every
            shard address is written exactly once or declared padding, ``"both"`` by default. Only
            ``"full"`` makes sense where shards have room for something else, as in a flat buffer.

    Returns:
        `Covered`, or the first thing that is wrong: a `Hole` at the lowest element; failing that,
        a `Gap` or an `Overlap`, whichever has the lowest (rank, shard index). Counts are exact.

    Raises:
        LayoutError: `side` is none of the three.
        UnsupportedError: The strides have so little in common that the place of a fault could not
            be found in reasonable time. The verdict is never guessed.

    Cost:
        Microseconds for what frameworks write: O(pieces * axes), whatever the extents and the
        number of ranks. Never walks elements.

    Examples:
        CodeGen's fused QKV of 24 rows at TP 2 is one piece. With a stride wrong by one, rows of
        one block land on another:

        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> def codegen(step):
        ...     axes = Axis(2, 12, 1, 0), Axis(2, 6, 0, 6), Axis(2, 1, 0, 3), Axis(3, step, 0, 1)
        ...     return Layout.of({"tp": 2}, (24, 1), [(12, 1)] * 2, [Piece(axes)])
        >>> prove(codegen(2))
        Covered(full_numel=24, shard_numel=24, method='structure')
        >>> prove(codegen(1))
        Hole(element=4, coordinates=(4, 0), count=8)
    """
    if side not in {"both", "full", "shard"}:
        raise LayoutError(f"the side to prove is 'both', 'full' or 'shard', got {side!r}")
    methods: list[Method] = []
    if side != "shard":
        full = _prove_full(layout)
        if isinstance(full, Hole):
            return full
        methods.append(full)
    if side != "full":
        shards = _prove_shards(layout)
        if isinstance(shards, Gap | Overlap):
            return shards
        methods.append(shards)
    return Covered(
        None if side == "shard" else layout.full_numel,
        None if side == "full" else _shard_total(layout),
        max(methods, key=_STRENGTH.index),
    )


def require_covered(layout: Layout, *, side: Literal["both", "full", "shard"] = "both") -> None:
    """Refuse a layout that is not whole.

    Raises:
        CoverageError: With the verdict of `prove` as its `verdict`.
    """
    verdict = prove(layout, side=side)
    if not isinstance(verdict, Covered):
        raise CoverageError(explain(verdict, layout), verdict=verdict)


def _prove_full(layout: Layout) -> Method | Hole:
    numel = layout.full_numel
    if not numel:
        return "structure"
    lattices = [full_lattice(piece) for piece in layout.all_pieces]
    if tiles_by_structure(lattices, numel, union=True):
        return "structure"
    different = set(lattices)
    if sum(numel_of(digits) for _, digits in different) == numel and tiles_by_fingerprint(
        different, numel
    ):
        return "fingerprint"
    regions = located_sweep(((*lattice, "held") for lattice in different), numel, "full side")
    count = numel - sum(region.numel for region in regions)
    if not count:
        return "sweep"
    element = lowest_missing(regions, numel)
    return Hole(element, coordinates_of(element, layout.full_shape), count)


def _prove_shards(layout: Layout) -> Method | Gap | Overlap:
    width = max((prod(shape) for _, shape in layout.shard_shapes), default=0)
    numel = width * layout.rank_count
    if not numel:
        return "structure"
    pieces = [shard_lattice(piece, width) for piece in layout.all_pieces]
    pieces += [shard_lattice(padding.as_piece(), width) for padding in layout.padding]
    lattices = [*pieces, *_beyond_shards(layout, width)]
    if tiles_by_structure(lattices, numel):
        return "structure"
    steps = sum(numel_of(digits) for _, digits in lattices)
    if steps == numel and tiles_by_fingerprint(lattices, numel):
        return "fingerprint"
    walks = ((base, digits, number) for number, (base, digits) in enumerate(lattices))
    regions = located_sweep(walks, numel, "shard side")
    return _first_fault(layout, regions, width) or "sweep"


def _first_fault(
    layout: Layout, regions: tuple[Region[int], ...], width: int
) -> Gap | Overlap | None:
    numel = width * layout.rank_count
    repeated = [region for region in regions if len(region.tags) > 1]
    missing = numel - sum(region.numel for region in regions)
    lowest = lowest_missing(regions, numel) if missing else numel
    if repeated and repeated[0].base < lowest:
        rank, shard_index = divmod(repeated[0].base, width)
        first, second = (_writer(layout, number) for number in repeated[0].tags[:2])
        count = sum(region.numel for region in repeated)
        return Overlap(rank, shard_index, first, second, count)
    return Gap(*divmod(lowest, width), missing) if missing else None


def _writer(layout: Layout, number: int) -> Writer:
    pieces = len(layout.all_pieces)
    return Writer("piece", number) if number < pieces else Writer("padding", number - pieces)


def _beyond_shards(layout: Layout, width: int) -> Iterator[Lattice]:
    """Addresses between the end of a shorter shard and the start of the next rank's."""
    rank = 0
    for count, shape in layout.shard_shapes:
        numel = prod(shape)
        if numel < width:
            yield normalize(rank * width + numel, [(count, width), (width - numel, 1)])
        rank += count


def _shard_total(layout: Layout) -> int:
    return sum(count * prod(shape) for count, shape in layout.shard_shapes)
