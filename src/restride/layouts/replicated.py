"""Every rank holds the whole tensor."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from restride.algebra.layout import Layout
from restride.algebra.mesh import MeshLike, as_mesh
from restride.algebra.piece import Piece
from restride.layouts._arguments import as_scale, as_shape
from restride.layouts.lifting import axes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["replicated"]


def replicated(
    shape: Sequence[int], *, mesh: MeshLike, scale: Fraction | int = Fraction(1)
) -> Layout:
    """Every rank holds the whole tensor, times `scale` where the layer stores it scaled.

    Row-parallel layers that add their bias before the all-reduce store it divided by the number of
    ranks: ``scale=Fraction(1, ranks)``.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        scale: Exact factor: ``shard == full * scale``.

    Returns:
        One piece for all ranks.

    Raises:
        LayoutError: The shape or the mesh is none.
        RuleError: The scale is zero, or not exact: floats, also NaN and infinity, are refused.

    Examples:
        >>> bias = replicated((6,), mesh={"tp": 2}, scale=Fraction(1, 2))
        >>> bias.pieces(1)[0].scale, bias.shard_shape(1)
        (Fraction(1, 2), (6,))
    """
    sizes = as_shape(shape)
    ranks = as_mesh(mesh)
    factor = as_scale(scale)
    whole = Layout(ranks, sizes, ((ranks.size, sizes),), ())
    if not whole.full_numel:
        return whole
    axes = axes_of((ranks.size, 0, 1, 0), (whole.full_numel, 1, 0, 1))
    return Layout(ranks, sizes, whole.shard_shapes, (Piece(axes, scale=factor),))
