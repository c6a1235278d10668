"""Layouts of a tensor whose permuted copy is what was cut."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from restride.algebra.compose import chain
from restride.algebra.layout import Layout, Shape
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Piece
from restride.errors import RuleError
from restride.layouts._arguments import as_ints, as_shape, find_mesh_axis
from restride.layouts.lifting import axes_of
from restride.layouts.sizes import autotp_sizes
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.mesh import MeshLike

__all__ = ["conv1d_column", "conv1d_row", "permuted", "transposed"]


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """Describe a tensor whose permuted copy is cut as `layout`.

    `layout` is of the copy, the result of the original. The shards stay what they are: cuts of the
    copy. Many a checkpoint stores a weight with other axes than the model that is converted to.

    Args:
        layout: Layout of the permuted copy, on any mesh.
        order: For each dimension of the copy the dimension of the original that it is, as in
            ``original.permute(order)``.

    Returns:
        A canonical layout of the original, for the same ranks and shards.

    Raises:
        LayoutError: A number is no integer.
        RuleError: `order` does not name every dimension once.

    Cost:
        That of `chain`. Never walks elements.

    Examples:
        The columns of a 3 x 4 weight are the rows of its transposed copy:

        >>> columns = permuted(split((4, 3), mesh={"tp": 2}), (1, 0))
        >>> columns.full_shape, columns.shard_shape(1), columns.pieces(1)[0].full_base
        ((3, 4), (2, 3), 2)
    """
    dims = as_ints("order", order)
    shape = layout.full_shape
    if sorted(dims) != list(range(len(shape))):
        raise RuleError(
            f"order {dims} does not name each of the {len(shape)} dimensions of {shape} once"
        )
    original = tuple(shape[dims.index(dim)] for dim in range(len(dims)))
    return _through(original, dims, layout)


def transposed(layout: Layout) -> Layout:
    """Describe a tensor whose copy with the last two dimensions exchanged is cut as `layout`.

    GPT-2's `Conv1D` stores weights as (in, out); a layout of the (out, in) weight becomes one of
    the `Conv1D` weight.

    Raises:
        RuleError: The tensor has fewer than two dimensions.

    Examples:
        >>> transposed(split((4, 3), mesh={"tp": 2})).full_shape
        (3, 4)
    """
    ndim = len(layout.full_shape)
    if ndim < 2:  # noqa: PLR2004 - two dimensions are exchanged
        raise RuleError(f"a tensor of shape {layout.full_shape} has no two dimensions to exchange")
    return permuted(layout, (*range(ndim - 2), ndim - 1, ndim - 2))


def conv1d_column(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    heads: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut the outputs of a `Conv1D` weight (in, out) as DeepSpeed's `conv_LinearLayer` does.

    That class takes the sizes from the inputs and cuts the outputs with them, so it works for
    square weights without a bias only (deepspeed 0.19.8 `module_inject/layers.py`).

    Args:
        shape: Shape of the stored weight: (in, out).
        mesh: The ranks.
        heads: Key/value heads of the model, where they are known.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The weight is not square, or is a bias.

    Examples:
        >>> conv1d_column((4, 4), mesh={"tp": 2}).shard_shape(0)
        (4, 2)
    """
    side = _square(shape)
    target = find_mesh_axis(mesh, axis)
    sizes = autotp_sizes(side, target.size, heads=heads, grain=grain)
    return split((side, side), mesh=target.mesh, dim=1, sizes=sizes, axis=target.name)


def conv1d_row(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    heads: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Transpose a `Conv1D` weight and cut its inputs, as DeepSpeed's `Conv_LinearALlreduce` does.

    The shards are cuts of the transposed copy, (out, in). The sizes come from the outputs, so it
    works for square weights without a bias only; the peer's published map says rows and rebuilds
    another tensor (deepspeed 0.19.8 `module_inject/layers.py`).

    Args:
        shape: Shape of the stored weight: (in, out).
        mesh: The ranks.
        heads: Key/value heads of the model, where they are known.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The weight is not square, or is a bias.

    Examples:
        >>> row = conv1d_row((4, 4), mesh={"tp": 2})
        >>> row.shard_shape(1), row.pieces(1)[0].full_base
        ((4, 2), 8)
    """
    return transposed(conv1d_column(shape, mesh=mesh, heads=heads, grain=grain, axis=axis))


def _square(shape: Sequence[int]) -> int:
    full = as_shape(shape, ndim=2)
    if full[0] != full[1]:
        raise RuleError(
            f"a Conv1D weight of shape {full} is not square: the sizes of one side cut the other",
            remedy="describe your own cut with split(dim=1) or transposed(split(...))",
        )
    return full[0]


def _through(original: Shape, order: Sequence[int], layout: Layout) -> Layout:
    """Chain the permutation, as a layout that one rank holds, with a cut of the permuted copy."""
    copy = tuple(original[dim] for dim in order)
    numel = prod(original)
    if not numel:
        return Layout(layout.mesh, original, layout.shard_shapes, (), layout.padding)
    walk = axes_of(
        *(
            (copy[place], prod(original[dim + 1 :]), 0, prod(copy[place + 1 :]))
            for place, dim in enumerate(order)
        )
    )
    reorder = Layout(Mesh((("whole", 1),)), original, ((1, copy),), (Piece(walk),))
    return chain(reorder, layout, mesh=layout.mesh, inner_stride=1)
