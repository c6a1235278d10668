"""One dimension cut into runs of rows, one run per rank: the plain column and row split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra._checks import require_int
from restride.algebra.layout import Fill, Layout, Padding
from restride.algebra.piece import Piece
from restride.errors import RuleError
from restride.layouts._arguments import (
    MeshAxis,
    as_dim,
    as_shape,
    as_widths,
    find_mesh_axis,
)
from restride.layouts.lifting import along, axes_of, place, row_layout
from restride.layouts.segmented import cut_segments
from restride.layouts.sizes import chunk_sizes, even_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.mesh import MeshLike

__all__ = ["chunked", "padded", "padded_rows", "split"]


def split(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    axis: str | None = None,
) -> Layout:
    """Give each rank one run of rows along a dimension, in rank order.

    Column-parallel weights (``dim=0``), row-parallel weights (``dim=1``) and vocabulary-parallel
    embeddings differ in nothing else.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        dim: Dimension that is cut.
        sizes: Rows of each rank, zero allowed; by default all ranks get the same. Take uneven ones
            from the framework's own rule: `autotp_sizes`, `chunk_sizes`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is negative.
        RuleError: The sizes are not one per rank or do not add up, or the rows do not cut evenly
            and no sizes are given.

    Examples:
        >>> columns = split((2, 6), mesh={"tp": 3}, dim=1)
        >>> columns.shard_shape(0), [piece.full_base for piece in columns.pieces(2)]
        ((2, 2), [4])
    """
    full = as_shape(shape)
    cut = as_dim(dim, full)
    target = find_mesh_axis(mesh, axis)
    if sizes is None:
        widths = even_sizes(full[cut], target.size)
    else:
        widths = as_widths("sizes", sizes, ranks=target.size, total=full[cut])
    return cut_segments(full, target, [(full[cut], widths)], cut)


def chunked(
    shape: Sequence[int], *, mesh: MeshLike, dim: int = 0, axis: str | None = None
) -> Layout:
    """Cut as `torch.chunk` does: FSDP2 (`fully_shard`) and DTensor's `Shard(dim)`.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        dim: Dimension that is cut.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is negative.

    Examples:
        >>> [chunked((5, 2), mesh={"dp": 4}).shard_shape(rank) for rank in range(4)]
        [(2, 2), (2, 2), (1, 2), (0, 2)]
    """
    full = as_shape(shape)
    cut = as_dim(dim, full)
    target = find_mesh_axis(mesh, axis)
    return cut_segments(full, target, [(full[cut], chunk_sizes(full[cut], target.size))], cut)


def padded(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    rows: int,
    dim: int = 0,
    fill: Fill = "zero",
    axis: str | None = None,
) -> Layout:
    """Pad a dimension at its end until it cuts evenly, and cut it.

    The vocabulary of Megatron and of engines that want even shards. The padding is declared: it is
    skipped on read, filled on write, and two layouts that pad differently still compose.

    Args:
        shape: Shape of the full tensor, without padding.
        mesh: The ranks.
        rows: Size of the padded dimension, a multiple of the ranks.
        dim: Dimension that is padded and cut.
        fill: ``"zero"``, or ``"undefined"`` where nobody may rely on the content.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is negative, or the fill is unknown.
        RuleError: `rows` is less than the dimension, or does not cut evenly.

    Examples:
        >>> vocabulary = padded((5, 2), mesh={"tp": 4}, rows=8)
        >>> vocabulary.shard_shape(3), len(vocabulary.pieces(3)), len(vocabulary.paddings(3))
        ((2, 2), 0, 1)
    """
    full = as_shape(shape)
    cut = as_dim(dim, full)
    target = find_mesh_axis(mesh, axis)
    require_int("rows", rows, at_least=0)
    if rows < full[cut]:
        raise RuleError(f"{rows} padded rows are fewer than the {full[cut]} of shape {full}")
    width = even_sizes(rows, target.size)[0]
    return place(along(padded_rows(target, full[cut], width, fill), full, cut), target)


def padded_rows(target: MeshAxis, rows: int, width: int, fill: Fill) -> Layout:
    """Give rank r the rows from ``r * width`` on; what lies beyond `rows` is padding."""
    whole, part = divmod(rows, width) if width else (0, 0)
    pieces: list[Piece] = []
    padding: list[Padding] = []
    if whole:
        pieces.append(Piece(axes_of((whole, width, 1, 0), (width, 1, 0, 1))))
    if part:
        pieces.append(Piece(axes_of((part, 1, 0, 1)), whole * width, whole))
        padding.append(Padding(axes_of((width - part, 0, 0, 1)), whole, part, fill))
    empty = target.size - whole - (part > 0)
    if empty and width:
        axes = axes_of((empty, 0, 1, 0), (width, 0, 0, 1))
        padding.append(Padding(axes, target.size - empty, 0, fill))
    return row_layout(target, rows, [width] * target.size, pieces, padding)
