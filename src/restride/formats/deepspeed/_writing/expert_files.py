"""The files of single experts: ``layer_L_expert_E_mp_rank_00_model_states.pt``.

Every stage but ZeRO-3 stores the weights of experts there, one file each, whatever the number of
ranks; an engine reads those of the experts that it holds.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from restride.algebra.mesh import Mesh
from restride.formats.deepspeed._writing.folding import expert_folding
from restride.formats.deepspeed._writing.native_target import PlacedNative
from restride.layouts.gathered import experts
from restride.layouts.replicated import replicated
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.experts import Placed
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["write_expert_files"]


def write_expert_files(writing: Writing, placed: Placed) -> None:
    """Add the file of every expert of every layer.

    Raises:
        UnsupportedError: A weight cannot be written.
    """
    if isinstance(placed, PlacedNative):
        _write_native(writing, placed)
        return
    target = writing.target
    for layer in placed.layers:
        copies = target.tp // gcd(target.tp, target.ep)
        mesh = Mesh((("copy", copies), ("expert", layer.count)))
        arrays = {}
        for name in layer.names:
            selected = writing.weights[name]
            shape = selected.entry.layout.full_shape
            layout = experts(shape, mesh=mesh, axis="expert")
            arrays[name] = writing.output.array(selected, layout)
        for expert in range(layer.count):
            expert_rank = expert // (layer.count // target.ep)
            for copy, tp in enumerate(_writers(target, expert_rank)):
                draft = _draft(writing, layer.number, expert, tp)
                content: dict[Value, Value] = {}
                place = copy * layer.count + expert
                for name, array in arrays.items():
                    made = draft.buffer(array.selected.dtype, *array.layout.shard_shape(place)[1:])
                    draft.put(made, array, place)
                    content[f"{name}.{expert}"] = made
                content |= expert_folding(placed, expert_rank, tp)
                writing.output.add(draft, content)


def _writers(target: DeepSpeedTarget, expert_rank: int) -> list[int]:
    """Tensor-parallel ranks that an expert-parallel one folds: each has a file of its own."""
    common = gcd(target.tp, target.ep)
    return [tp for tp in range(target.tp) if tp % common == expert_rank % common]


def _write_native(writing: Writing, placed: PlacedNative) -> None:
    """Add the files of experts that are modules of their own, with all of their tensors.

    Each is of the tensor-parallel rank that the first rank with the expert is, or where they cut
    it, of all of them.
    """
    one = Mesh((("expert", 1),))
    for layer in placed.layers:
        for expert, names in enumerate(layer.names):
            arrays = {
                name: writing.output.array(
                    selected,
                    placed.cuts.get(name) or replicated(selected.entry.layout.full_shape, mesh=one),
                )
                for name in names
                for selected in [writing.weights[name]]
            }
            expert_rank = expert // (layer.count // placed.after[layer.prefix])
            holder = placed.spread_of(names[0]).ranks(expert_rank)[0] % placed.target.tp
            for tp in range(placed.target.tp) if placed.is_cut else (holder,):
                draft = _draft(writing, layer.number, expert, tp)
                place = tp if placed.is_cut else 0
                content: dict[Value, Value] = {
                    name: draft.tensor(array, place) for name, array in arrays.items()
                }
                writing.output.add(draft, content)


def _draft(writing: Writing, layer: int, expert: int, tp: int = 0) -> FileDraft:
    name = f"layer_{layer}_expert_{expert}_mp_rank_{tp:02d}_model_states.pt"
    return FileDraft(f"{writing.training.tag}/{name}")
