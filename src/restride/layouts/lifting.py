"""From a cut of one dimension over one row of ranks to a layout of a tensor on a mesh.

Every builder says only what it knows: how the rows (or blocks of rows) of one dimension go to the
ranks of one mesh axis. `along` carries that to a tensor of any shape, and `lift` to a mesh with
other axes, along which everything is held again.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.canonical import canonicalize
from restride.algebra.layout import Layout, Padding, Shape, shape_runs
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import RuleError
from restride.layouts._arguments import MeshAxis, find_mesh_axis

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from restride.algebra.mesh import MeshLike

__all__ = ["along", "axes_of", "lift", "place", "repeated", "reshaped", "row_layout"]


def axes_of(*steps: tuple[int, int, int, int]) -> tuple[Axis, ...]:
    """Make axes from (extent, full stride, rank stride, shard stride), without loops of one step.

    Examples:
        >>> axes_of((1, 8, 1, 0), (4, 1, 0, 1))
        (Axis(extent=4, full_stride=1, rank_stride=0, shard_stride=1),)
    """
    return tuple(Axis(*step) for step in steps if step[0] != 1)


def row_layout(
    axis: MeshAxis,
    rows: int,
    shard_rows: Sequence[int],
    pieces: Iterable[Piece],
    padding: Iterable[Padding] = (),
) -> Layout:
    """Describe how `rows` rows go to the ranks of one mesh axis."""
    ranks = Mesh(((axis.name, axis.size),))
    return Layout.of(ranks, (rows,), [(width,) for width in shard_rows], pieces, padding)


def reshaped(layout: Layout, shape: Shape) -> Layout:
    """Describe the same walks over the same elements of a tensor with another shape."""
    return Layout(
        layout.mesh, shape, layout.shard_shapes, layout.all_pieces, layout.padding, layout.unit_bits
    )


def along(rows: Layout, shape: Shape, dim: int) -> Layout:
    """Cut dimension `dim` of a tensor as `rows` cuts a vector.

    The vector may count blocks: its size then divides the dimension, and each of its elements
    stands for as many rows.

    Args:
        rows: Layout of a vector. Padding is allowed.
        shape: Shape of the full tensor.
        dim: Dimension that is cut, counted from 0.

    Returns:
        A layout of the tensor with shards that differ from it in dimension `dim` only.

    Cost:
        O(pieces), times the ranks of those pieces that walk over shards of unequal size.
    """
    outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
    block = shape[dim] // rows.full_numel if rows.full_numel else 1
    widths = [rows.shard_numel(rank) * block for rank in range(rows.rank_count)]
    spread = _Spread(outer, shape[dim] * inner, block * inner, tuple(w * inner for w in widths))
    padding = [
        Padding(_still(piece.axes), piece.rank_base, piece.shard_base, padding.fill)
        for padding in rows.padding
        for piece in spread.of(padding.as_piece())
    ]
    return Layout.of(
        rows.mesh,
        shape,
        [(*shape[:dim], width, *shape[dim + 1 :]) for width in widths],
        [piece for row_piece in rows.all_pieces for piece in spread.of(row_piece)],
        padding,
    )


class _Spread:
    """The other dimensions around the rows: how often a row is repeated, and how far apart.

    Attributes:
        outer: How often the cut dimension is repeated.
        full: Distance between two repetitions in the full tensor.
        unit: Elements that stand for one row of the vector.
        shards: Distance between two repetitions in the shard of each rank.
    """

    def __init__(self, outer: int, full: int, unit: int, shards: tuple[int, ...]) -> None:
        self.outer = outer
        self.full = full
        self.unit = unit
        self.shards = shards

    def of(self, piece: Piece) -> Iterator[Piece]:
        """Carry one piece of the vector to the tensor."""
        if not self.outer or not self.unit:
            return
        strides = {self.shards[rank] for rank in piece.ranks()}
        if self.outer == 1 or len(strides) == 1:
            yield self._grown(piece, strides.pop())
            return
        # Shards of unequal width repeat at unequal distances: no single stride walks them all.
        for rank in sorted(set(piece.ranks())):
            for concrete in piece.at_rank(rank):
                yield self._grown(concrete, self.shards[rank])

    def _grown(self, piece: Piece, shard: int) -> Piece:
        unit = self.unit
        rows = [
            (axis.extent, axis.full_stride * unit, axis.rank_stride, axis.shard_stride * unit)
            for axis in piece.axes
        ]
        axes = axes_of((self.outer, self.full, 0, shard), *rows, (unit, 1, 0, 1))
        base = (piece.full_base * unit, piece.rank_base, piece.shard_base * unit)
        return Piece(axes, *base, piece.scale)


def _still(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Keep the loops over rank and shard, and stand still in the full tensor."""
    return tuple(Axis(axis.extent, 0, axis.rank_stride, axis.shard_stride) for axis in axes)


def lift(layout: Layout, *, mesh: MeshLike, axis: str | None = None) -> Layout:
    """Carry a layout over a row of ranks to one axis of a mesh; the other axes hold replicas.

    Args:
        layout: Layout on a mesh with a single axis; its name does not matter.
        mesh: Mesh of the result.
        axis: Axis of `mesh` that takes the ranks of `layout`, by default the only one.

    Returns:
        A canonical layout in which all ranks with the same coordinate on `axis` hold the same.

    Raises:
        RuleError: The layout has more than one mesh axis, or the axis is missing or of another
            size.

    Cost:
        O(pieces + ranks).

    Examples:
        >>> from restride.layouts.split import split
        >>> both = lift(split((4, 3), mesh={"tp": 2}), mesh={"dp": 2, "tp": 2}, axis="tp")
        >>> [piece.full_base for rank in range(4) for piece in both.pieces(rank)]
        [0, 6, 0, 6]
    """
    target = find_mesh_axis(mesh, axis)
    if len(layout.mesh.axes) != 1:
        raise RuleError(f"a layout on one mesh axis can be lifted, this one is on {layout.mesh}")
    if layout.rank_count != target.size:
        raise RuleError(
            f"the layout is for {layout.rank_count} ranks, axis {target.name!r} of the mesh "
            f"{str(target.mesh)!r} has {target.size}"
        )
    return place(layout, target)


def repeated(layout: Layout, mesh: Mesh) -> Layout:
    """Carry a layout to the ranks of a larger mesh, which have the same again and again.

    Args:
        layout: Layout of some ranks.
        mesh: A mesh of so many times as many.

    Returns:
        A layout in which each rank holds what the one holds that is so many ranks before it; the
        same layout where the mesh has as many ranks.

    Raises:
        RuleError: The mesh has no multiple of the ranks.

    Cost:
        O(pieces + ranks).

    Examples:
        >>> from restride.layouts.split import split
        >>> layout = repeated(split((4,), mesh={"tp": 2}), Mesh((("file", 4),)))
        >>> [[piece.full_base for piece in layout.pieces(rank)] for rank in range(4)]
        [[0], [2], [0], [2]]
    """
    if layout.rank_count == mesh.size:
        return layout
    if mesh.size % layout.rank_count:
        raise RuleError(
            f"the layout is for {layout.rank_count} ranks, and the mesh {str(mesh)!r} has "
            f"{mesh.size}, which is no multiple"
        )
    ranks = Mesh((("rank", layout.rank_count),))
    copies = Mesh((("copy", mesh.size // layout.rank_count), *ranks.axes))
    return replace(lift(replace(layout, mesh=ranks), mesh=copies, axis="rank"), mesh=mesh)


def place(layout: Layout, target: MeshAxis) -> Layout:
    """Lift a layout of as many ranks as `target` has, and bring it into canonical form."""
    mesh, stride = target.mesh, target.mesh.axis_stride(target.name)
    others = [
        (size, 0, mesh.axis_stride(name), 0) for name, size in mesh.axes if name != target.name
    ]

    def lifted(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        moved = [(a.extent, a.full_stride, a.rank_stride * stride, a.shard_stride) for a in axes]
        return axes_of(*others, *moved)

    pieces = [
        Piece(lifted(p.axes), p.full_base, p.rank_base * stride, p.shard_base, p.scale)
        for p in layout.all_pieces
    ]
    padding = [
        Padding(lifted(p.axes), p.rank_base * stride, p.shard_base, p.fill) for p in layout.padding
    ]
    shapes = [layout.shard_shape(rank // stride % target.size) for rank in range(mesh.size)]
    return canonicalize(
        Layout(
            mesh,
            layout.full_shape,
            shape_runs(shapes),
            tuple(pieces),
            tuple(padding),
            layout.unit_bits,
        )
    )
