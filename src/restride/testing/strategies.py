"""Hypothesis strategies for walks, pieces and layouts.

`layouts` draws layouts that are whole by construction: every element of the full tensor is held,
and every shard address is written once or declared padding. `wild_layouts` and `pieces` draw
whatever the types allow: loops that reach over each other, holes, duplicates.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from msgspec import Struct, field
from msgspec.structs import replace

from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.walks import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy

    from restride.algebra.layout import Fill, Shape

__all__ = [
    "layout_pairs",
    "layouts",
    "meshes",
    "pieces",
    "recut",
    "scales",
    "shapes",
    "walks",
    "wild_layouts",
]

# Rich in divisors, small enough to walk, and the degenerate ones.
_NUMELS = (0, 1, 2, 7, 12, 16, 24, 30, 36, 48)
_MOST_RANKS = 6

_fills: SearchStrategy[Fill] = st.sampled_from(("zero", "undefined"))


def scales() -> SearchStrategy[Fraction]:
    """Mostly 1, else an exact factor, also one that is no power of two or negative."""
    others = (Fraction(1, 2), Fraction(1, 3), Fraction(4), Fraction(-5, 7))
    return st.sampled_from((Fraction(1),) * 5 + others)


@st.composite
def shapes(draw: DrawFn, numel: int) -> Shape:
    """A shape with so many elements."""
    if numel == 0:
        return draw(st.sampled_from(((0,), (3, 0), (0, 2))))
    if numel == 1:
        return draw(st.sampled_from(((1,), (), (1, 1))))
    return tuple(draw(_factors(numel)))


@st.composite
def meshes(draw: DrawFn, size: int) -> Mesh:
    """A mesh of so many ranks, under any names."""
    sizes = draw(_factors(size)) or [1]
    return Mesh(tuple((f"axis{number}", extent) for number, extent in enumerate(sizes)))


@st.composite
def walks(draw: DrawFn, addresses: int = 2, *, most_numel: int = 400) -> Walk:
    """Any walk over so many addresses: overlapping, standing still or going backwards."""
    strides = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 30, 48, -1, -2, -6))
    digits: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 4))):
        extent = draw(st.integers(1, 6))
        if prod(digit[0] for digit in digits) * extent > most_numel:
            break
        digits.append((extent, *(draw(strides) for _ in range(addresses))))
    bases = (draw(st.integers(-20, 60)), *(draw(st.integers(0, 9)) for _ in range(addresses - 1)))
    return Walk(bases, tuple(digits))


@st.composite
def pieces(draw: DrawFn, *, ranks: int = 4, most_axes: int = 4) -> Piece:
    """Any piece: loops over each other, elements held again, ranks visited backwards in full."""
    axes: list[Axis] = []
    left = ranks - 1
    for _ in range(draw(st.integers(0, most_axes))):
        extent = draw(st.integers(2, 4))
        if draw(st.booleans()) and extent - 1 <= left:
            rank_stride = draw(st.integers(1, left // (extent - 1)))
            left -= (extent - 1) * rank_stride
            full = draw(st.sampled_from((0, 1, 2, 3, 4, 6, 12, -1, -3, -6)))
            axes.append(Axis(extent, full, rank_stride, 0))
        else:
            full = draw(st.sampled_from((0, 1, 1, 2, 3, 4, 6, 8, 12)))
            axes.append(Axis(extent, full, 0, draw(st.sampled_from((1, 1, 2, 3, 4, 6, 12)))))
    below = -sum(min(0, axis.full_stride) * (axis.extent - 1) for axis in axes)
    return Piece(
        tuple(axes),
        below + draw(st.integers(0, 12)),
        draw(st.integers(0, left)),
        draw(st.integers(0, 6)),
        draw(scales()),
    )


@st.composite
def wild_layouts(draw: DrawFn, *, most_pieces: int = 4) -> Layout:
    """A layout of any pieces, of a tensor and shards that are just long enough or longer."""
    ranks = draw(st.integers(1, 4))
    drawn = draw(st.lists(pieces(ranks=ranks), max_size=most_pieces))
    spare = st.integers(0, 2)
    numel = max((piece.full_range.stop for piece in drawn), default=0) + draw(spare)
    shard = max((piece.shard_range.stop for piece in drawn), default=0) + draw(spare)
    return Layout(Mesh((("rank", ranks),)), (numel,), ((ranks, (shard,)),), tuple(drawn))


@st.composite
def layouts(
    draw: DrawFn,
    shape: Shape | None = None,
    *,
    ranks: int | None = None,
    with_padding: bool = True,
    with_scales: bool = True,
) -> Layout:
    """A layout that is whole by construction.

    The full tensor is cut into parts, and each part is a system of digits: some go over ranks, some
    into the shard, in an order of their own on each of the three addresses; further digits repeat
    the part on other ranks or in the shard. Parts may live on different ranks, so shards are uneven
    or empty, a part may be held again in another cut, and parts may alternate in the shard.

    Args:
        draw: Given by hypothesis.
        shape: Shape of the full tensor; drawn where it is None.
        ranks: Number of ranks; drawn where it is None.
        with_padding: Whether shards may have padding.
        with_scales: Whether pieces may have scales other than 1.
    """
    full_shape = draw(st.sampled_from(_NUMELS).flatmap(shapes)) if shape is None else shape
    mesh = draw(meshes(draw(st.integers(1, _MOST_RANKS)) if ranks is None else ranks))
    numel = prod(full_shape)
    times = draw(st.sampled_from([1, 1, *(n for n in (2, 3) if numel % n == 0)]))
    draft = _Draft([0] * mesh.size)
    for start, size in draw(_parts(numel // times)):
        for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
            _draw_part(draw, draft, start, size, may_pad=with_padding)
    if with_padding:
        for rank in draw(st.sets(st.integers(0, mesh.size - 1), max_size=2)):
            draft.pad(rank, draft.filled[rank] + draw(st.integers(1, 3)), draw(_fills))
    draft.repeat(times, numel // times)
    if with_scales:
        draft.pieces = [replace(piece, scale=draw(scales())) for piece in draft.pieces]
    return Layout.of(
        mesh,
        full_shape,
        [draw(shapes(size)) for size in draft.filled],
        [part for piece in draft.pieces for part in draw(recut(piece))],
        draft.padding,
    )


@st.composite
def layout_pairs(
    draw: DrawFn, *, with_padding: bool = True, with_scales: bool = True
) -> tuple[Layout, Layout]:
    """Two layouts of one tensor, each whole by construction, on meshes of their own."""
    shape = draw(st.sampled_from(_NUMELS).flatmap(shapes))
    one = layouts(shape, with_padding=with_padding, with_scales=with_scales)
    return draw(one), draw(one)


@st.composite
def recut(draw: DrawFn, piece: Piece) -> tuple[Piece, ...]:
    """The same walk written differently: cut in two, a loop split, the loops in another order."""
    axes = list(draw(st.permutations(piece.axes)))
    place = draw(st.integers(0, len(axes)))
    if place == len(axes):
        return (replace(piece, axes=tuple(axes)),)
    before, axis, after = axes[:place], axes[place], axes[place + 1 :]
    cut = draw(st.integers(1, axis.extent - 1))
    if cut > 1 and axis.extent % cut == 0:
        outer = Axis(
            axis.extent // cut,
            axis.full_stride * cut,
            axis.rank_stride * cut,
            axis.shard_stride * cut,
        )
        return (replace(piece, axes=(*before, outer, replace(axis, extent=cut), *after)),)
    return tuple(
        replace(
            piece,
            axes=(*before, *((replace(axis, extent=extent),) if extent > 1 else ()), *after),
            full_base=piece.full_base + start * axis.full_stride,
            rank_base=piece.rank_base + start * axis.rank_stride,
            shard_base=piece.shard_base + start * axis.shard_stride,
        )
        for start, extent in ((0, cut), (cut, axis.extent - cut))
    )


class _Draft(Struct):
    """How far each shard is filled, and with what."""

    filled: list[int]
    pieces: list[Piece] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)

    def pad(self, rank: int, numel: int, fill: Fill) -> None:
        """Fill a shard up to `numel` elements with padding."""
        start = self.filled[rank]
        if numel > start:
            axes = (Axis(numel - start, 0, 0, 1),) if numel - start > 1 else ()
            self.padding.append(Padding(axes, rank, start, fill))
            self.filled[rank] = numel

    def add(self, piece: Piece, ranks: range) -> None:
        """Append a piece, which starts at shard index 0, to the shards of its ranks."""
        starts = {self.filled[rank] for rank in ranks}
        if len(starts) == 1:
            self.pieces.append(replace(piece, shard_base=starts.pop()))
        else:
            self.pieces.extend(
                replace(concrete, shard_base=self.filled[rank])
                for rank in ranks
                for concrete in piece.at_rank(rank)
            )
        for rank in ranks:
            self.filled[rank] += piece.shard_range.stop

    def repeat(self, times: int, full_stride: int) -> None:
        """Put everything so many times, one full tensor and one shard behind the other."""
        if times == 1:
            return
        if len(set(self.filled)) > 1:
            ranks = range(len(self.filled))
            self.pieces = [
                c for piece in self.pieces for rank in ranks for c in piece.at_rank(rank)
            ]
        self.pieces = [
            replace(piece, axes=(self._loop(times, full_stride, piece.rank_base), *piece.axes))
            for piece in self.pieces
        ]
        self.padding = [
            replace(pad, axes=(self._loop(times, 0, pad.rank_base), *pad.axes))
            for pad in self.padding
        ]
        self.filled = [times * numel for numel in self.filled]

    def _loop(self, times: int, full_stride: int, rank: int) -> Axis:
        return Axis(times, full_stride, 0, self.filled[rank])


def _draw_part(draw: DrawFn, draft: _Draft, start: int, numel: int, *, may_pad: bool) -> None:
    """Put one part of the full tensor on a run of ranks."""
    most = len(draft.filled)
    extents = draw(_factors(numel))
    on_ranks = _at_most_ranks(draw, extents, most)
    split = [extent for extent, is_rank in zip(extents, on_ranks, strict=True) if is_rank]
    repeated = draw(st.sampled_from(((), (), (2,), (3,))))
    replicas = [extent for extent in repeated if extent * prod(split) <= most]
    duplicates = list(draw(st.sampled_from(((),) * 7 + ((2,),))))
    fulls = _mixed_radix(extents, draw(st.permutations(range(len(extents)))))
    rank_loops = [(n, f) for n, f, is_rank in zip(extents, fulls, on_ranks, strict=True) if is_rank]
    rank_loops += [(n, 0) for n in replicas]
    shard_loops = [
        (n, f) for n, f, is_rank in zip(extents, fulls, on_ranks, strict=True) if not is_rank
    ]
    shard_loops += [(n, 0) for n in duplicates]
    axes: list[Axis] = []
    for (extent, full), stride in _strided(draw, rank_loops):
        backwards = full and draw(st.sampled_from((False, False, True)))
        start += (extent - 1) * full if backwards else 0
        axes.append(Axis(extent, -full if backwards else full, stride, 0))
    axes.extend(Axis(n, full, 0, stride) for (n, full), stride in _strided(draw, shard_loops))
    holders = prod(split) * prod(replicas)
    first = draw(st.integers(0, most - holders))
    ranks = range(first, first + holders)
    if may_pad and draw(st.booleans()):
        level, fill = max(draft.filled[rank] for rank in ranks), draw(_fills)
        for rank in ranks:
            draft.pad(rank, level, fill)
    draft.add(Piece(tuple(draw(st.permutations(axes))), start, first), ranks)


def _at_most_ranks(draw: DrawFn, extents: Sequence[int], most: int) -> list[bool]:
    """Which digits go over ranks, so that there are not more ranks than the mesh has."""
    chosen: list[bool] = []
    holders = 1
    for extent in extents:
        is_rank = holders * extent <= most and draw(st.booleans())
        holders *= extent if is_rank else 1
        chosen.append(is_rank)
    return chosen


def _strided(draw: DrawFn, loops: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Loops with the strides of a dense order that is drawn."""
    strides = _mixed_radix(
        [extent for extent, _ in loops], draw(st.permutations(range(len(loops))))
    )
    return list(zip(loops, strides, strict=True))


def _mixed_radix(extents: Sequence[int], order: Sequence[int]) -> list[int]:
    """The stride of each loop where they nest densely in `order`, innermost first."""
    strides = [0] * len(extents)
    stride = 1
    for place in order:
        strides[place] = stride
        stride *= extents[place]
    return strides


@st.composite
def _parts(draw: DrawFn, numel: int) -> list[tuple[int, int]]:
    """Cut a tensor into (start, number of elements)."""
    if not numel:
        return []
    cuts = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=2))) if numel > 1 else []
    return [(start, stop - start) for start, stop in pairwise([0, *cuts, numel])]


@st.composite
def _factors(draw: DrawFn, numel: int) -> list[int]:
    """Factors of at least 2, in any order; the first chance is a single one."""
    factors: list[int] = []
    while numel > 1:
        factor = draw(st.sampled_from([n for n in range(numel, 1, -1) if numel % n == 0]))
        factors.append(factor)
        numel //= factor
    return factors
