"""Rows that each rank holds along one dimension, read off a layout without walking elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.algebra.boxes import BoxCutter, BoxWalk
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout, Shape
    from restride.layouts._arguments import MeshAxis

__all__ = ["RowCut", "read_row_cut"]

# A rank that holds more runs of rows than this is not described by any family of layouts.
_MOST_RUNS: Final = 4096
_MOST_RANKS: Final = 4096


class RowCut(Frozen):
    """Runs of rows along one dimension.

    Attributes:
        dim: The dimension that is cut.
        rows: Rows of the full tensor.
        runs: For each rank along the mesh axis (first row, how many), in the order of its shard.
    """

    dim: int
    rows: int
    runs: tuple[tuple[tuple[int, int], ...], ...]

    def held(self, rank: int, start: int, stop: int) -> int:
        """Rows between two that a rank holds."""
        return sum(
            max(0, min(stop, first + count) - max(start, first)) for first, count in self.runs[rank]
        )


def read_row_cut(layout: Layout, target: MeshAxis) -> RowCut | None:
    """Read the runs of rows of each rank along a mesh axis.

    Returns:
        None where the shards are not cut along exactly one dimension, or not into whole rows.

    Cost:
        O(ranks * runs). Never walks elements.
    """
    stride = target.mesh.axis_stride(target.name)
    if target.size > _MOST_RANKS or not layout.full_numel:
        return None
    ranks = range(0, target.size * stride, stride)
    dim = _cut_dimension(layout.full_shape, [layout.shard_shape(rank) for rank in ranks])
    if dim is None:
        return None
    runs: list[tuple[tuple[int, int], ...]] = []
    for rank in ranks:
        try:
            found = tuple(_runs(layout, rank, dim))
        except UnsupportedError:
            return None
        if None in found:
            return None
        runs.append(tuple(run for run in found if run is not None))
    return RowCut(dim, layout.full_shape[dim], tuple(runs))


def _cut_dimension(full: Shape, shards: list[Shape]) -> int | None:
    if any(len(shard) != len(full) for shard in shards):
        return None
    different = {dim for shard in shards for dim, size in enumerate(shard) if size != full[dim]}
    return different.pop() if len(different) == 1 else None


def _runs(layout: Layout, rank: int, dim: int) -> Iterator[tuple[int, int] | None]:
    full = layout.full_shape
    cutter = BoxCutter(full, layout.shard_shape(rank), _MOST_RUNS)
    walks = [
        BoxWalk(
            tuple((axis.extent, axis.full_stride, axis.shard_stride) for axis in piece.axes),
            piece.full_base,
            piece.shard_base,
            (rank,),
            piece.scale,
        )
        for piece in layout.pieces(rank)
    ]
    for box in cutter.cut(walks):
        others = (*full[:dim], *full[dim + 1 :])
        is_whole = (*box.extents[:dim], *box.extents[dim + 1 :]) == others
        yield (box.full_start[dim], box.extents[dim]) if is_whole and box.scale == 1 else None
