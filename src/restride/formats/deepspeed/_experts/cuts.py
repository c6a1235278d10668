"""Whether tensor-parallel ranks cut the experts of DeepSpeed's own layers, and how.

Files tell whether: an expert that is cut has one of every rank, one that is whole has a single one.
`universal_checkpoint_info` tells how, by the names that the module of a rank has; as of all other
parameters (`_placement`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._placement import Placement
from restride.formats.deepspeed._settings import is_enabled
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout, Shape
    from restride.formats.deepspeed._experts.native import NativeExpert
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = ["ExpertCuts"]

_DATA_FIRST = "use_data_before_expert_parallelism"


class ExpertCuts:
    """The cuts of all experts of a run.

    Args:
        run: The files.
        files: Content of the expert files, by layer and expert, and by tensor-parallel rank.

    Raises:
        CorruptError: Some experts have a file of every rank, and some have not.
    """

    def __init__(self, run: Run, files: Mapping[tuple[int, int], Mapping[int, Field]]) -> None:
        self._run = run
        self._files = files
        self._is_cut = run.tp_size > 1 and any(len(own) > 1 for own in files.values())
        for (layer, expert), own in files.items() if self._is_cut else ():
            missing = [tp for tp in range(run.tp_size) if tp not in own]
            if missing:
                raise CorruptError(
                    f"layer {layer}, expert {expert} has no file of tensor-parallel rank "
                    f"{missing[0]}, others have one of each of {run.tp_size}",
                    where=str(run.folder.path),
                    remedy="put all files of one save into the folder",
                )

    def of(self, expert: NativeExpert) -> NativeExpert:
        """An expert's tensor with its cut, and with the shape that it has in full.

        Raises:
            CorruptError: The file of a whole expert is of a rank that does not hold it, or the
                shards do not fit what is said of them.
            UnsupportedError: Nothing says how it is cut.
        """
        own = self._files.get((expert.layer, expert.number), {})
        if not self._is_cut:
            self._require_holder(expert, [*own])
            return expert
        held = expert.expert_count // expert.rank_count
        name = f"{expert.prefix}.{expert.number % held}.{expert.rest}"
        layout = self._layout(expert, name, own)
        return replace(expert, shape=layout.full_shape, cut=layout)

    def _require_holder(self, expert: NativeExpert, ranks: list[int]) -> None:
        tp = expert.rank % self._run.tp_size
        if self._run.tp_size > 1 and not self._is_data_first and ranks not in ([], [tp]):
            raise CorruptError(
                f"layer {expert.layer}, expert {expert.number} has a file of tensor-parallel rank "
                f"{ranks[0]}, and expert-parallel rank {expert.rank}, which holds it, is rank {tp} "
                f"of {self._run.tp_size}",
                where=str(self._run.folder.path),
                remedy="put all files of one save into the folder",
            )

    @cached_property
    def _is_data_first(self) -> bool:
        config = self._run.models[0].root.get("ds_config")
        return is_enabled(config.get(_DATA_FIRST) if config else None)

    @cached_property
    def _placement(self) -> Placement:
        root = self._run.models[0].root
        mesh = Mesh((("tp", self._run.tp_size),))
        info = root.get("universal_checkpoint_info")
        return Placement(info, mesh, root.where, may_be_told=False)

    def _layout(self, expert: NativeExpert, name: str, own: Mapping[int, Field]) -> Layout:
        shapes: list[Shape] = []
        for tp in range(self._run.tp_size):
            content = own.get(tp)
            entry = content.get(expert.name) if content is not None else None
            shapes.append(
                entry.value.shape
                if entry is not None and isinstance(entry.value, StoredTensor)
                else expert.shape
            )
        if expert.is_buffer:
            return replicated(shapes[0], mesh=Mesh((("tp", self._run.tp_size),)))
        return self._placement.layout(name, shapes)
