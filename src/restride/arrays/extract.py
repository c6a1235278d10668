"""Cut the shard of one rank out of a full tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from restride.arrays._checks import (
    admit_out,
    admit_tensor,
    block_of,
    fill_padding,
    require_unscaled_state,
    require_written_once,
    scales_of,
)
from restride.arrays._parts import Part, Parts, copy_parts

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.arrays._frameworks import Array

__all__ = ["extract"]

_FULL: Final = 0


def extract(
    layout: Layout, full: Array, rank: int, *, state: str = "weight", out: Array | None = None
) -> Array:
    """Cut the shard of `rank` out of a full tensor.

    Args:
        layout: How the tensor is cut. Need not cover it.
        full: The tensor: a NumPy array or a PyTorch tensor of any dtype and memory order, views
            into larger storage included. It is not copied as a whole.
        rank: Whose shard.
        state: What the tensor holds of its parameter. Only a layout with scales asks.
        out: Where to write: a contiguous array of the shard's shape and the tensor's kind, dtype
            and device, without memory in common with it. New memory costs ten times as much as
            memory that is used again.

    Returns:
        `out`, or a new contiguous array of the same kind, dtype and device, without gradient.
        Elements are copied bit for bit, those of a scaled piece multiplied by the numerator and
        divided by the denominator as the layer does it; padding is zero.

    Raises:
        LayoutError: The rank is not on the mesh.
        ShapeMismatchError: The tensor has another shape than the layout.
        CoverageError: The layout does not say for every shard address what stands there, or says
            it twice.
        UnsupportedError: The layout scales, and the elements are integers or an optimizer state;
            or `out` is not what it must be.

    Cost:
        One pass over the shard, at the speed of a memory copy where runs are long.

    Examples:
        Column-wise cut of a bias-free layer, on two ranks:

        >>> import numpy as np
        >>> from restride import Axis, Layout, Piece
        >>> layout = Layout.of({"tp": 2}, (2, 4), [(2, 2)] * 2, [
        ...     Piece((Axis(2, 2, 1, 0), Axis(2, 4, 0, 2), Axis(2, 1, 0, 1)))])
        >>> extract(layout, np.arange(8).reshape(2, 4), 1)
        array([[2, 3],
               [6, 7]])
    """
    framework, source = admit_tensor(full, layout.full_shape, "full tensor", layout.unit_bits)
    shape = layout.shard_shape(rank)
    require_unscaled_state(scales_of(layout), state)
    parts = _parts(layout, rank)
    shard = admit_out(framework, out, shape, source, [framework.reach(source)], "out")
    fill_padding(framework, layout, rank, shard)
    copy_parts(framework, {_FULL: source}, shard, parts)
    return shard if out is None else out


# A loop over the steps of a training run cuts the same tensors again and again, for all ranks.
@lru_cache(maxsize=256)
def _parts(layout: Layout, rank: int) -> Parts:
    """What to copy for one rank, of a layout that is proved."""
    require_written_once(layout)
    pieces = layout.pieces(rank)
    return Parts(tuple(Part(_FULL, block_of(piece), piece.scale) for piece in pieces))
