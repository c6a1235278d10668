"""Match two layouts of one tensor, and cut a layout's shards once more.

The ranks ride along as one more stride, so one call gives the transfers of all pairs of ranks.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from restride.algebra._digits import Walk, join, merge
from restride.algebra.canonical import canonicalize, piece_of_walk
from restride.algebra.layout import Layout, Padding, shape_runs
from restride.algebra.piece import Axis, Piece
from restride.algebra.transfer import Transfer, Transfers
from restride.errors import LayoutError, ShapeMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from fractions import Fraction

    from restride.algebra.mesh import Mesh

__all__ = ["chain", "compose", "intersect"]

_PURE: Final = ((1, 2), (3, 4))
# Radices that do not divide give descriptors for every residue; one rank at a time gives fewer.
_MOST_JOINT: Final = 64


def compose(full_to_target: Layout, source_to_full: Layout, /) -> Transfers:
    """Find every element that a source shard and a target shard have in common.

    Args:
        full_to_target: Layout that is wanted.
        source_to_full: Layout that is there, of a tensor of the same shape.

    Returns:
        The whole relation: every (source rank, shard index) and (target rank, shard index) that
        hold the same element, exactly once. Replicas of either side are all there; which one to
        read is not decided here.

    Raises:
        ShapeMismatchError: The full tensors differ in shape or unit.

    Cost:
        O(pieces * pieces) joins, independent of sizes and of the number of ranks where the strides
        divide each other.

    Examples:
        Rows over two ranks into rows over four, for all ranks at once:

        >>> def rows(ranks: int) -> Layout:
        ...     piece = Piece((Axis(ranks, 8 // ranks, 1, 0), Axis(8 // ranks, 1, 0, 1)))
        ...     return Layout.of({"tp": ranks}, (8,), [(8 // ranks,)] * ranks, [piece])
        >>> len(compose(rows(4), rows(2)).descriptors)
        1
    """
    _require_same_tensor(full_to_target, source_to_full)
    by_scale: dict[Fraction, list[Walk]] = {}
    for target in full_to_target.all_pieces:
        for source in source_to_full.all_pieces:
            if (
                target.full_range.start >= source.full_range.stop
                or source.full_range.start >= target.full_range.stop
            ):
                continue
            found = _joined(target, source)
            if found:
                by_scale.setdefault(target.scale / source.scale, []).extend(found)
    return Transfers(
        source_to_full,
        full_to_target,
        tuple(
            Transfer.of_walk(walk, scale)
            for scale, walks in by_scale.items()
            for walk in merge(walks, pure=_PURE)
        ),
    )


def intersect(target: Piece, source: Piece, /) -> tuple[Transfer, ...]:
    """Find the elements that two pieces have in common, for all their ranks together.

    Args:
        target: Piece of the layout that is wanted.
        source: Piece of the layout that is there, in the same full tensor.

    Returns:
        Transfers that visit each pair of steps at the same full index exactly once, and no other.

    Cost:
        Independent of extents; constant in number where strides divide each other.

    Examples:
        >>> intersect(Piece((Axis(6, 1, 0, 1),)), Piece((Axis(6, 1, 0, 1),), full_base=4))[0].numel
        2
    """
    scale = target.scale / source.scale
    return tuple(Transfer.of_walk(walk, scale) for walk in _joined(target, source))


def chain(
    outer: Layout,
    inner: Layout | Mapping[int, Layout],
    *,
    mesh: Mesh,
    outer_stride: int = 1,
    inner_stride: int | None = None,
) -> Layout:
    """Cut the shards of a layout once more: ZeRO over tensor parallel, FSDP over expert parallel.

    Args:
        outer: Cuts the full tensor over its ranks.
        inner: Cuts the flattened shard of each outer rank over inner ranks: one layout for all, or
            one for each outer rank.
        mesh: Names of the ranks of the result.
        outer_stride: Distance in the result between two neighbouring outer ranks.
        inner_stride: Distance between two neighbouring inner ranks; by default they come after all
            outer ranks, so that the outer rank is the fastest.

    Returns:
        The layout of the full tensor over rank ``outer * outer_stride + inner * inner_stride``.
        Padding of either layout is padding of the result.

    Raises:
        ShapeMismatchError: An inner layout is not one of its outer rank's shard.
        LayoutError: An outer rank has no inner layout, or the ranks do not fill the mesh.

    Cost:
        As `compose`; with one inner layout for all it does not depend on the number of ranks.

    Examples:
        >>> from restride.algebra.mesh import as_mesh
        >>> def rows(numel: int) -> Layout:
        ...     piece = Piece((Axis(2, numel // 2, 1, 0), Axis(numel // 2, 1, 0, 1)))
        ...     return Layout.of({"part": 2}, (numel,), [(numel // 2,)] * 2, [piece])
        >>> both = chain(rows(8), rows(4), mesh=as_mesh("dp=2,tp=2"))
        >>> [both.pieces(rank)[0].full_base for rank in range(4)]
        [0, 4, 2, 6]
    """
    steps = outer_stride, outer.rank_count if inner_stride is None else inner_stride
    pieces: list[Piece] = []
    padding: list[Padding] = []
    for rank, layout in _cuts(outer, inner):
        held, pads = (
            (outer.all_pieces, outer.padding)
            if rank is None
            else (outer.pieces(rank), outer.paddings(rank))
        )
        for piece, part in product(held, layout.all_pieces):
            pieces.extend(_chained(piece, part, steps))
        for pad, part in product(pads, layout.all_pieces):
            padding.extend(
                Padding(piece.axes, piece.rank_base, piece.shard_base, pad.fill)
                for piece in _chained(pad.as_piece(), part, steps)
            )
        padding.extend(_inner_padding(outer, layout, rank, steps))
    return canonicalize(
        Layout(
            mesh,
            outer.full_shape,
            shape_runs(_chained_shapes(outer, inner, mesh, steps)),
            tuple(pieces),
            tuple(padding),
            outer.unit_bits,
        )
    )


def _joined(target: Piece, source: Piece) -> list[Walk]:
    """Walks over (full, source rank, source shard, target rank, target shard)."""
    found = join(_by_full(source), _by_full(target), pure=_PURE)
    if len(found) <= _MOST_JOINT or not target.rank_axes:
        return found
    ranks = sorted(set(target.ranks()))
    parts = [
        walk
        for rank in ranks
        for part in target.at_rank(rank)
        for walk in join(_by_full(source), _by_full(part), pure=_PURE)
    ]
    merged = merge(parts, pure=_PURE)
    return merged if len(merged) < len(found) else found


def _by_full(piece: Piece) -> Walk:
    return Walk(
        (piece.full_base, piece.rank_base, piece.shard_base),
        tuple((a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in piece.axes),
    )


def _require_same_tensor(target: Layout, source: Layout) -> None:
    if target.full_shape != source.full_shape:
        raise ShapeMismatchError(
            f"the target is a layout of shape {target.full_shape}, "
            f"the source of shape {source.full_shape}"
        )
    if target.unit_bits != source.unit_bits:
        raise ShapeMismatchError(
            f"the target counts units of {target.unit_bits} bits, the source of {source.unit_bits}"
        )


def _cuts(
    outer: Layout, inner: Layout | Mapping[int, Layout]
) -> Iterator[tuple[int | None, Layout]]:
    """Inner layouts with the outer rank that they cut; None where one cuts them all."""
    if isinstance(inner, Layout):
        for rank in range(outer.rank_count):
            _require_shard(outer, rank, inner)
        yield None, inner
        return
    for rank in range(outer.rank_count):
        if rank not in inner:
            raise LayoutError(f"no layout says how the shard of outer rank {rank} is cut")
        _require_shard(outer, rank, inner[rank])
        yield rank, inner[rank]


def _require_shard(outer: Layout, rank: int, inner: Layout) -> None:
    if inner.full_numel != outer.shard_numel(rank):
        raise ShapeMismatchError(
            f"outer rank {rank} holds {outer.shard_numel(rank)} elements, "
            f"its inner layout describes {inner.full_numel}"
        )


def _chained(outer: Piece, inner: Piece, steps: tuple[int, int]) -> Iterator[Piece]:
    """Match the shard addresses of `outer` with the full addresses of `inner`."""
    by_outer, by_inner = steps
    a = Walk(
        (outer.shard_base, outer.rank_base * by_outer, outer.full_base),
        tuple(
            (x.extent, x.shard_stride, x.rank_stride * by_outer, x.full_stride) for x in outer.axes
        ),
    )
    b = Walk(
        (inner.full_base, inner.rank_base * by_inner, inner.shard_base),
        tuple(
            (x.extent, x.full_stride, x.rank_stride * by_inner, x.shard_stride) for x in inner.axes
        ),
    )
    # The ranks of both add up, so no loop of the result may move one of them and the shard. Parts
    # that happen to follow each other backwards in the full tensor are no axis either.
    for walk in join(a, b, pure=((1, 4), (3, 4), (1, 3)), is_legal=_is_forward):
        _, outer_rank, full, inner_rank, shard = walk.bases
        yield piece_of_walk(
            Walk(
                (outer_rank + inner_rank, shard, full),
                tuple((n, o + i, s, f) for n, _, o, f, i, s in walk.digits),
            ),
            outer.scale * inner.scale,
        )


def _is_forward(step: tuple[int, ...]) -> bool:
    """Whether strides over (match, outer rank, full, inner rank, shard) make an axis."""
    _, outer_rank, full, inner_rank, shard = step
    if shard:
        return shard > 0 and full >= 0
    return outer_rank + inner_rank > 0


def _inner_padding(
    outer: Layout, inner: Layout, rank: int | None, steps: tuple[int, int]
) -> Iterator[Padding]:
    by_outer, by_inner = steps
    over: tuple[Axis, ...] = ()
    if rank is None and outer.rank_count > 1:
        over = (Axis(outer.rank_count, 0, by_outer, 0),)
    for pad in inner.padding:
        axes = tuple(
            Axis(axis.extent, 0, axis.rank_stride * by_inner, axis.shard_stride)
            for axis in pad.axes
        )
        base = (rank or 0) * by_outer + pad.rank_base * by_inner
        yield Padding((*over, *axes), base, pad.shard_base, pad.fill)


def _chained_shapes(
    outer: Layout, inner: Layout | Mapping[int, Layout], mesh: Mesh, steps: tuple[int, int]
) -> list[tuple[int, ...]]:
    """The shard shape of each rank of the result, which all have to be there once."""
    shapes: dict[int, tuple[int, ...]] = {}
    count = 0
    for rank in range(outer.rank_count):
        layout = inner if isinstance(inner, Layout) else inner[rank]
        for part in range(layout.rank_count):
            shapes[rank * steps[0] + part * steps[1]] = layout.shard_shape(part)
            count += 1
    if sorted(shapes) != list(range(mesh.size)) or count != mesh.size:
        raise LayoutError(
            f"{outer.rank_count} outer ranks in steps of {steps[0]} with inner ranks in steps of "
            f"{steps[1]} do not fill the mesh {mesh} of {mesh.size} ranks"
        )
    return [shapes[rank] for rank in range(mesh.size)]
