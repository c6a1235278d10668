"""The files of single experts: ``layer_L_expert_E_mp_rank_00_model_states.pt``.

Every stage but ZeRO-3 stores the weights of experts there, one file each, whatever the number of
ranks; an engine reads those of the experts that it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra.mesh import Mesh
from restride.layouts.gathered import experts
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._expert_target import PlacedExperts
    from restride.formats.deepspeed._writing import Writing

__all__ = ["write_expert_files"]


def write_expert_files(writing: Writing, placed: PlacedExperts) -> None:
    """Add the file of every expert of every layer.

    Raises:
        UnsupportedError: A weight cannot be written.
    """
    for layer in placed.layers:
        mesh = Mesh((("expert", layer.count),))
        arrays = {}
        for name in layer.names:
            selected = writing.weights[name]
            shape = selected.entry.layout.full_shape
            arrays[name] = writing.output.array(selected, experts(shape, mesh=mesh))
        for expert in range(layer.count):
            draft = FileDraft(
                f"{writing.training.tag}/layer_{layer.number}_expert_{expert}"
                "_mp_rank_00_model_states.pt"
            )
            content: dict[Value, Value] = {}
            for name, array in arrays.items():
                made = draft.buffer(array.selected.dtype, *array.layout.shard_shape(expert)[1:])
                draft.put(made, array, expert)
                content[f"{name}.{expert}"] = made
            writing.output.add(draft, content)
