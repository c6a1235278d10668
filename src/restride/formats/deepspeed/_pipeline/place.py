"""The ranks of one stage of a pipeline among those of all.

What is written of a stage counts its own ranks. Only what the stages of the source hold copies of,
a tied module, is announced over the ranks of all stages, where the others hold nothing of it: so a
rank of the target has its place in the pipeline, and of copies that drifted it can be given the one
of the same stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.frozen import Frozen
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.values import StoredTensor, Value
    from restride.storage.torch_output import OutputArray

__all__ = ["StageDraft", "StagePlace"]

_PIPE: Final = "pp"


class StagePlace(Frozen):
    """Which stage of a pipeline is written.

    Attributes:
        number: The stage.
        count: Stages in all.
        info: What the model files of all stages say of the cut of every parameter.
    """

    number: int
    count: int
    info: dict[Value, Value] | None

    def placed(self, layout: Layout, source: Layout) -> Layout:
        """A layout over the ranks of the stage as one over those of all stages.

        Args:
            layout: How the stage cuts an array.
            source: How the source does, by which it is told whether stages hold copies.
        """
        if self.count == 1 or not _has_stages(source):
            return layout
        size, none = layout.mesh.size, (0,)
        before, after = self.number * size, (self.count - 1 - self.number) * size
        return replace(
            layout,
            mesh=Mesh(((_PIPE, self.count), *layout.mesh.axes)),
            shard_shapes=(
                *(((before, none),) if before else ()),
                *layout.shard_shapes,
                *(((after, none),) if after else ()),
            ),
            all_pieces=tuple(
                replace(piece, rank_base=piece.rank_base + before) for piece in layout.all_pieces
            ),
            padding=tuple(
                replace(padding, rank_base=padding.rank_base + before) for padding in layout.padding
            ),
        )


class StageDraft(FileDraft):
    """A file of a stage: ranks of arrays are counted inside the stage."""

    place: StagePlace | None = None

    def tensor(self, array: OutputArray, rank: int) -> StoredTensor:
        """Make a tensor of the shard of one rank of the stage."""
        made = self.buffer(array.selected.dtype, *array.layout.shard_shape(self._rank(array, rank)))
        self.put(made, array, rank)
        return made

    def put(self, buffer: StoredTensor, array: OutputArray, rank: int, start: int = 0) -> None:
        """Put the shard of one rank of the stage into a buffer."""
        FileDraft.put(self, buffer, array, self._rank(array, rank), start)

    def _rank(self, array: OutputArray, rank: int) -> int:
        place = self.place
        if place is None or not _has_stages(array.layout):
            return rank
        return place.number * (array.layout.rank_count // place.count) + rank


def _has_stages(layout: Layout) -> bool:
    return any(axis == _PIPE for axis, _ in layout.mesh.axes)
