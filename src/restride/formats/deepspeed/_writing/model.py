"""The model files: weights and buffers, shapes in flat order, and what is not a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint.values import OrderedDictValue, SizeValue, keyed
from restride.formats.deepspeed._settings import round_robin_order
from restride.formats.deepspeed._writing.folding import model_folding

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.training import ModelRank, ParameterGroup
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.writing import Writing

__all__ = [
    "common_entries",
    "expert_entries",
    "flat_members",
    "module_of",
    "ordered",
    "said_by",
    "write_models",
]

_GRADIENTS = 2


def write_models(writing: Writing) -> None:
    """Add the model file of each tensor-parallel rank, as ZeRO-1 and ZeRO-2 write them.

    Raises:
        CoverageError: A layout of the target is not whole.
        UnsupportedError: A weight cannot be written.
    """
    saves_frozen = writing.target.zero >= _GRADIENTS

    def is_saved_frozen(name: str) -> bool:
        return saves_frozen and writing.tensors[name].is_frozen

    arrays = {
        name: writing.output.array(selected, writing.layouts[name])
        for name, selected in writing.weights.items()
        if writing.stage is None and (not writing.is_expert(name) or is_saved_frozen(name))
    }
    for tp in range(writing.target.tp):
        draft = writing.draft(writing.model_name(tp))
        rank = writing.source_rank(0, tp, dp_size=1)
        made = {name: draft.tensor(array, tp) for name, array in arrays.items()}
        frozen = None
        if saves_frozen:
            frozen = [
                tensor.name
                for tensor in writing.tensors.values()
                if tensor.kind == "parameter"
                and not writing.is_owned(tensor.name, tp)
                and writing.is_held(tensor.name, tp)
            ]
        entries: dict[Value, Value] = {
            # The weights of a pipeline are in the files of its layers.
            "module": None
            if writing.stage is not None
            else module_of(writing, rank, made.__getitem__),
            "param_shapes": [
                # Of experts the first rank speaks for all: they hold equally many.
                _shapes(
                    {
                        writing.name_on(name, tp): shape
                        for name, shape in flat_members(
                            writing, number, group, writing.cutter(group, tp)
                        ).items()
                    }
                )
                for number, group in enumerate(writing.training.groups)
            ],
            "frozen_param_shapes": None
            if frozen is None
            else _shapes({name: writing.shard_shape(name, tp) for name in frozen}),
            "frozen_param_fragments": None
            if frozen is None
            else ordered({name: made[name] for name in frozen}),
            **common_entries(writing, rank, tp),
            **expert_entries(writing, writing.target.rank(0, tp)),
        }
        writing.output.add(draft, entries, alike=_kind(writing, rank, tp))


def said_by(rank: ModelRank) -> tuple[Hashable, ...]:
    """What a rank of the source says, to tell it from others: most say the very same values."""
    values = (*rank.values.values(), *rank.module.values(), rank.module_state)
    return (*rank.values, "", *rank.module, *map(id, values))


def _kind(writing: Writing, rank: ModelRank, tp: int) -> Hashable:
    """What a model file follows from, beside the shapes of its tensors, which are all of the model.

    None where it is laid out by itself: ranks with experts and stages have names of their own.
    """
    if writing.experts is not None or writing.stage is not None:
        return None
    tells_of_shared = tp == 0 and any(tensor.aliases for tensor in writing.tensors.values())
    return ("model", tells_of_shared, *said_by(rank))


def _module_names(writing: Writing) -> list[str]:
    """Names of the tensors that a model file has in its module."""
    second = writing.experts.aliases if writing.experts is not None else {}
    known = {name for own in writing.tensors.values() for name in (own.name, *own.aliases)}
    return [
        name
        for name in dict.fromkeys((*writing.training.order, *writing.tensors))
        if not writing.is_expert(name) and (name in known or name in second)
    ]


def module_of(
    writing: Writing, rank: ModelRank, weight: Callable[[str], Value]
) -> OrderedDictValue:
    """The state dict of the module in its own order; tied weights are one tensor.

    Args:
        writing: The conversion.
        rank: The rank of the source that what is no tensor comes from.
        weight: Gives what stands in the module for a tensor of a name.
    """
    tensors = {
        name: tensor
        for tensor in writing.tensors.values()
        for name in (tensor.name, *tensor.aliases)
    }
    module = OrderedDictValue()
    second = writing.experts.aliases if writing.experts is not None else {}
    for name in dict.fromkeys((*writing.training.order, *writing.tensors)):
        if writing.is_expert(name):
            continue
        if name in tensors or name in second:
            module[name] = weight(second[name] if name in second else tensors[name].name)
        elif name in rank.module:
            module[name] = rank.module[name]
    module.state = rank.module_state
    return module


def common_entries(writing: Writing, rank: ModelRank, tp: int) -> dict[Value, Value]:
    """What model files of every stage have besides module, shapes and frozen parameters.

    Args:
        writing: The conversion.
        rank: The rank of the source that what is no geometry comes from.
        tp: Tensor-parallel rank of the target.
    """
    target = writing.target
    entries: dict[Value, Value] = {
        "buffer_names": [
            writing.name_on(tensor.name, tp)
            for tensor in writing.tensors.values()
            if tensor.kind == "buffer" and writing.is_held(tensor.name, tp)
        ],
        "optimizer": None,
        # Only the first rank of all knows of shared parameters (`_get_shared_params`).
        "shared_params": {
            alias: tensor.name for tensor in writing.tensors.values() for alias in tensor.aliases
        }
        if writing.model_rank(tp) == 0
        else {},
        "dp_world_size": target.dp,
        "mp_world_size": writing.model_ranks,
        "checkpoint_parallel_dimensions": {
            "pp_degree": writing.model_ranks // target.tp,
            "tp_degree": target.tp,
        },
    }
    if writing.universal_info is not None:
        entries["universal_checkpoint_info"] = writing.universal_info
    return {**entries, **keyed(rank.values)}


def expert_entries(writing: Writing, rank: int) -> dict[Value, Value]:
    """What the model file of a rank says of experts, where there are any."""
    placed = writing.experts
    if placed is None:
        return {}
    return {
        **placed.entries(rank, writing.universal_info),
        **model_folding(placed, rank, _module_names(writing)),
    }


def flat_members(
    writing: Writing, number: int, group: ParameterGroup, cutter: int
) -> dict[str, Shape]:
    """Parameters of a group on a cutter of its spread in the order of its ZeRO-1/2 buffer."""
    members = writing.members(group, cutter)
    if not writing.is_round_robin:
        return members
    count = writing.group_spread(number, group).partitions
    return {name: members[name] for name in round_robin_order([*members], count)}


def ordered(entries: Mapping[str, Value]) -> OrderedDictValue:
    """Make an ordered dict, as the engine has it."""
    made = OrderedDictValue()
    made.update(entries)
    return made


def _shapes(shapes: Mapping[str, Shape]) -> OrderedDictValue:
    return ordered({name: SizeValue(shape) for name, shape in shapes.items()})
