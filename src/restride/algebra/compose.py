"""Match two layouts of one tensor, and cut a layout's shards once more.

The ranks ride along as one more stride, so one call gives the transfers of all pairs of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.algebra.canonical import canonicalize, piece_of_walk
from restride.algebra.intersect import join_pieces
from restride.algebra.layout import Layout, Padding, shape_runs
from restride.algebra.piece import Axis, Piece
from restride.algebra.transfer import PURE, Transfer, Transfers
from restride.algebra.walks import Walk, join, merge
from restride.errors import LayoutError, ShapeMismatchError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from fractions import Fraction

    from restride.algebra.mesh import Mesh

__all__ = ["chain", "compose"]

# Some minutes. What a file says of pieces that all lie in one place would take days.
_MOST_PAIRS: Final = 1 << 24


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
        UnsupportedError: The axes of a piece reach over each other in too many ways, or the pieces
            of both layouts do so in more than 16 million pairs.

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
    by_scale: dict[Fraction, list[list[Walk]]] = {}
    meeting = _meeting(full_to_target.all_pieces, source_to_full.all_pieces)
    for number, (target, source) in enumerate(meeting):
        if number == _MOST_PAIRS:
            counts = [len(side.all_pieces) for side in (full_to_target, source_to_full)]
            raise UnsupportedError(
                f"the {counts[0]:,} pieces of one layout and {counts[1]:,} of the other reach over "
                f"each other in more than {_MOST_PAIRS:,} pairs"
            )
        found = join_pieces(target, source)
        if found:
            by_scale.setdefault(target.scale / source.scale, []).append(found)
    return Transfers(
        source_to_full,
        full_to_target,
        tuple(
            Transfer.of_walk(walk, scale)
            for scale, parts in sorted(by_scale.items())
            for walk in _merged(parts)
        ),
    )


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
            one for each outer rank. Where all are equal the result stays joint over outer ranks.
        mesh: Names of the ranks of the result.
        outer_stride: Distance in the result between two neighbouring outer ranks.
        inner_stride: Distance between two neighbouring inner ranks; by default they come after all
            outer ranks, so that the outer rank is the fastest.

    Returns:
        The layout of the full tensor over rank ``outer * outer_stride + inner * inner_stride``.
        Padding of either layout is padding of the result.

    Raises:
        ShapeMismatchError: An inner layout is not one of its outer rank's shard, or counts units of
            another width.
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
    layouts = _inner_layouts(outer, inner)
    shapes = _chained_shapes(layouts, mesh, steps)
    is_joint = all(layout == layouts[0] for layout in layouts)
    pieces: list[Piece] = []
    padding: list[Padding] = []
    for rank, layout in enumerate(layouts[:1] if is_joint else layouts):
        held = outer.all_pieces if is_joint else outer.pieces(rank)
        pads = outer.padding if is_joint else outer.paddings(rank)
        for part in layout.all_pieces:
            for piece in held:
                pieces.extend(_chained(piece, part, steps))
            for pad in pads:
                padding.extend(
                    Padding(piece.axes, piece.rank_base, piece.shard_base, pad.fill)
                    for piece in _chained(pad.as_piece(), part, steps)
                )
        ranks = range(outer.rank_count) if is_joint else range(rank, rank + 1)
        padding.extend(_inner_padding(pad, ranks, steps) for pad in layout.padding)
    return canonicalize(
        Layout(
            mesh,
            outer.full_shape,
            shape_runs(shapes),
            tuple(pieces),
            tuple(padding),
            outer.unit_bits,
        )
    )


def _meeting(targets: Iterable[Piece], sources: Iterable[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Pairs of a target and a source piece whose ranges in the full tensor overlap."""
    pieces = [(piece.full_range, 0, piece) for piece in targets]
    pieces += [(piece.full_range, 1, piece) for piece in sources]
    # Sweep over the tensor: who starts meets everybody of the other side who has not ended.
    pieces.sort(key=lambda entry: entry[0].start)
    open_pieces: list[list[tuple[range, Piece]]] = [[], []]
    for reach, side, piece in pieces:
        others = [entry for entry in open_pieces[1 - side] if entry[0].stop > reach.start]
        open_pieces[1 - side] = others
        open_pieces[side].append((reach, piece))
        for _, other in others:
            yield (other, piece) if side else (piece, other)


def _merged(parts: list[list[Walk]]) -> list[Walk]:
    """Merge what came from several pairs of pieces; what came from one is merged already."""
    if len(parts) == 1:
        return parts[0]
    return merge([walk for part in parts for walk in part], pure=PURE)


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


def _inner_layouts(outer: Layout, inner: Layout | Mapping[int, Layout]) -> list[Layout]:
    """How the shard of each outer rank is cut."""
    layouts: list[Layout] = []
    for rank in range(outer.rank_count):
        layout = inner if isinstance(inner, Layout) else inner.get(rank)
        if layout is None:
            raise LayoutError(f"no layout says how the shard of outer rank {rank} is cut")
        _require_shard(outer, rank, layout)
        layouts.append(layout)
    return layouts


def _require_shard(outer: Layout, rank: int, inner: Layout) -> None:
    if inner.full_numel != outer.shard_numel(rank):
        raise ShapeMismatchError(
            f"outer rank {rank} holds {outer.shard_numel(rank)} elements, "
            f"its inner layout describes {inner.full_numel}"
        )
    if inner.unit_bits not in {None, outer.unit_bits}:
        raise ShapeMismatchError(
            f"the outer layout counts units of {outer.unit_bits} bits, "
            f"the inner one of rank {rank} of {inner.unit_bits}"
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


def _inner_padding(pad: Padding, outer_ranks: range, steps: tuple[int, int]) -> Padding:
    """Padding of an inner layout, on the ranks that cut the shards of a run of outer ranks."""
    by_outer, by_inner = steps
    count = len(outer_ranks)
    over = (Axis(count, 0, by_outer, 0),) if count > 1 else ()
    axes = [
        Axis(axis.extent, 0, axis.rank_stride * by_inner, axis.shard_stride) for axis in pad.axes
    ]
    base = outer_ranks.start * by_outer + pad.rank_base * by_inner
    return Padding((*over, *axes), base, pad.shard_base, pad.fill)


def _chained_shapes(
    layouts: Sequence[Layout], mesh: Mesh, steps: tuple[int, int]
) -> list[tuple[int, ...]]:
    """The shard shape of each rank of the result, which all have to be there once."""
    shapes = [
        (rank * steps[0] + part * steps[1], layout.shard_shape(part))
        for rank, layout in enumerate(layouts)
        for part in range(layout.rank_count)
    ]
    shapes.sort(key=lambda entry: entry[0])
    if [rank for rank, _ in shapes] != list(range(mesh.size)):
        raise LayoutError(
            f"{len(layouts)} outer ranks in steps of {steps[0]} with inner ranks in steps of "
            f"{steps[1]} do not fill the mesh {mesh} of {mesh.size} ranks"
        )
    return [shape for _, shape in shapes]
