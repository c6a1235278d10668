"""The files of ZeRO-3: every parameter cut by itself, one model and one optimizer file a rank.

    TAG/zero_pp_rank_D_mp_rank_TT_model_states.pt
    TAG/[bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt

A rank's model file has of each parameter an empty tensor of its type, and its chunk where it is
frozen; buffers are whole in all of them. Its optimizer file has one flat partition for each
sub-group: the chunks of its parameters end to end. The last chunks are padded with zeros: the
engine leaves whatever was in memory there, trains it along, and never looks at it. The rules are
those of deepspeed 0.19.8 `runtime/zero/stage3.py` and `runtime/zero/partition_parameters.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import Constructed, GlobalName, SizeValue, keyed
from restride.formats.deepspeed._settings import zero_setting
from restride.formats.deepspeed._spread import spread_dense
from restride.formats.deepspeed._sub_groups import DEFAULT_SUB_GROUP_NUMEL
from restride.formats.deepspeed._writing.chunked_groups import ChunkedGroup, chunks_of
from restride.formats.deepspeed._writing.folding import optimizer_folding
from restride.formats.deepspeed._writing.model import (
    common_entries,
    expert_entries,
    module_of,
    ordered,
)
from restride.layouts.replicated import replicated
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.training import ParameterGroup
    from restride.checkpoint.values import StoredTensor, Value
    from restride.formats.deepspeed._spread import Spread
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.storage.torch_output import OutputArray

__all__ = ["write_chunks"]

_STAGE: Final = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
_STATIC_SCALER: Final = GlobalName("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_PARTITIONED_WEIGHTS: Final = 3
_SUB_GROUP_SIZE: Final = "sub_group_size"
_SHARD_GROUPS: Final = "mics_shard_size"


def write_chunks(writing: Writing) -> None:
    """Add the model file and the optimizer file of every rank.

    Raises:
        CoverageError: A layout of the target is not whole.
        UnsupportedError: A state is missing, or is not one of a flat partition.
        ExecutionError: The step of a parameter cannot be read.
    """
    limit = _sub_group_numel(writing)
    groups = [
        tuple(_spread_alike(writing, number, group, limit))
        for number, group in enumerate(writing.training.groups)
    ]
    models = _ModelFiles(writing, groups)
    for dp in range(writing.target.dp):
        for tp in range(writing.target.tp):
            models.write(dp, tp)
            _write_optimizer(writing, groups, dp, tp)
    writing.findings.extend(_findings(writing, groups, limit))


def _spread_alike(
    writing: Writing, number: int, group: ParameterGroup, limit: int
) -> Iterator[ChunkedGroup]:
    """A group of the model; its experts and other parameters have sub-groups of their own."""
    by_spread: dict[tuple[bool, Spread], list[str]] = {}
    for name in group.names:
        key = writing.is_expert(name), writing.spread(name)
        by_spread.setdefault(key, []).append(name)
    for (_, spread), names in by_spread.items():
        part = replace(group, names=tuple(names))
        yield ChunkedGroup(writing, number, part, spread, limit)


class _ModelFiles:
    """Writes the model files, of which every rank has its own."""

    def __init__(self, writing: Writing, groups: Sequence[Sequence[ChunkedGroup]]) -> None:
        self._writing = writing
        self._groups = groups
        self._spread = spread_dense(writing.target)
        self._buffers: dict[str, OutputArray] = {}
        self._frozen: dict[str, OutputArray] = {}
        for name, selected in writing.weights.items():
            tensor = writing.tensors[name]
            layout = writing.layouts[name]
            if tensor.kind == "buffer":
                copies = {
                    cutter: replicated(
                        (layout.shard_numel(cutter),), mesh={"dp": self._spread.partitions}
                    )
                    for cutter in range(self._spread.cutters)
                }
                self._buffers[name] = writing.output.array(
                    selected, self._spread.chain(layout, copies, writing.target)
                )
            elif tensor.is_frozen:
                self._frozen[name] = writing.output.array(
                    selected, chunks_of(layout, self._spread, writing.target)
                )

    def write(self, dp: int, tp: int) -> None:
        """Add the file of one rank."""
        writing = self._writing
        draft = FileDraft(writing.model_name(tp, dp))
        source = writing.source_rank(dp, tp, dp_size=writing.target.dp)
        rank = writing.target.rank(dp, tp)
        entries: dict[Value, Value] = {
            "module": module_of(writing, source, self._in_module(draft, dp, tp)),
            "param_shapes": [
                ordered({name: SizeValue(shape) for name, shape in shapes.items()})
                for parts in self._groups
                for part in parts
                for shapes in part.shapes(rank)
            ],
            **self._frozen_entries(draft, dp, tp),
            **common_entries(writing, source, tp),
            **expert_entries(writing, rank),
        }
        if dp:  # the first rank of all speaks for them
            entries["shared_params"] = {}
        alike = ("model", not dp, *_kind(writing, dp, tp))
        writing.output.add(draft, entries, alike=alike)

    def _in_module(self, draft: FileDraft, dp: int, tp: int) -> Callable[[str], Value]:
        """What stands in the module of a rank for each name: buffers whole, and else nothing."""
        empty: dict[DType, StoredTensor] = {}

        def value_of(name: str) -> Value:
            buffer = self._buffers.get(name)
            if buffer is not None:
                shape = self._writing.shard_shape(name, tp)
                made = draft.buffer(buffer.selected.dtype, *shape)
                draft.put(made, buffer, self._writing.target.rank(dp, tp))
                return made
            dtype = self._dtype(name)
            if dtype not in empty:
                empty[dtype] = draft.buffer(dtype, 0)
            return empty[dtype]

        return value_of

    def _frozen_entries(self, draft: FileDraft, dp: int, tp: int) -> dict[Value, Value]:
        """Shapes and chunks of what the optimizer does not own."""
        writing = self._writing
        rank = writing.target.rank(dp, tp)
        frozen = [
            tensor.name
            for tensor in writing.tensors.values()
            if tensor.kind == "parameter" and not writing.is_owned(tensor.name, tp)
        ]
        return {
            "frozen_param_shapes": ordered(
                {name: SizeValue(writing.shard_shape(name, tp)) for name in frozen}
            ),
            "frozen_param_fragments": ordered(
                {name: self._fragment(draft, name, rank) for name in frozen}
            ),
        }

    def _fragment(self, draft: FileDraft, name: str, rank: int) -> Value:
        """This rank's chunk; of a parameter that has no element here, and others train, nothing."""
        array = self._frozen.get(name)
        return draft.buffer(self._dtype(name), 0) if array is None else draft.tensor(array, rank)

    def _dtype(self, name: str) -> DType:
        return self._writing.weights[name].dtype


def _write_optimizer(
    writing: Writing, groups: Sequence[Sequence[ChunkedGroup]], dp: int, tp: int
) -> None:
    draft = FileDraft(writing.optimizer_name(tp, dp))
    rank = writing.target.rank(dp, tp)
    masters: list[Value] = []
    states: dict[Value, Value] = {}
    hyper: list[Value] = []
    for group, parts in zip(writing.training.groups, groups, strict=True):
        numbers: list[Value] = []
        for part in parts:
            for master, own in part.sub_groups(draft, rank):
                number = len(masters)
                numbers.append(number)
                masters.append(master)
                if own:
                    states[number] = own
        hyper.append({**keyed(group.settings), "params": numbers})
    source = writing.source_rank(dp, tp, dp_size=writing.target.dp)
    state: dict[Value, Value] = {
        **keyed(_scaling(writing.training.optimizer)),
        "zero_stage": Constructed(_STAGE, (_PARTITIONED_WEIGHTS,)),
        "partition_count": writing.target.dp,
        "optimizer_state_dict": {"state": states, "param_groups": hyper},
        "fp32_flat_groups": masters,
    }
    if writing.experts is not None:
        state["ds_zero_partition_groups"] = _partition_groups(groups, rank)
    carried = {
        key: source.values[key] for key in ("ds_config", "ds_version") if key in source.values
    }
    alike = ("optimizer", *_kind(writing, dp, tp))
    content = {"optimizer_state_dict": state, **keyed(carried), **optimizer_folding(writing, rank)}
    writing.output.add(draft, content, alike=alike)


def _kind(writing: Writing, dp: int, tp: int) -> tuple[object, ...]:
    """What tells ranks apart of which the files say other things.

    Those of one tensor-parallel rank that one rank of the source speaks for say the same, for they
    have chunks of the same sizes; with experts, each says which chunk is its own.
    """
    number = writing.source_number(dp, tp, dp_size=writing.target.dp)
    return number, tp, None if writing.experts is None else dp


def _partition_groups(groups: Sequence[Sequence[ChunkedGroup]], rank: int) -> list[Value]:
    """Which ranks share each sub-group; the engine refuses files that say other than it does."""
    found: list[Value] = []
    for part in (part for parts in groups for part in parts):
        cutter, partition = part.spread.place(rank)
        name = part.expert_group_name
        for _ in part.shapes(rank):
            entry: dict[Value, Value] = {
                "sub_group": len(found),
                "partition_count": part.spread.partitions,
                "partition_rank": partition,
                "partition_ranks": list(part.spread.ranks(cutter)),
                "families": ["replicated" if name is None else "autoep_expert"],
                "group_names": [name or "replicated"],
            }
            found.append(entry)
    return found


def _scaling(optimizer: Mapping[str, Value]) -> Mapping[str, Value]:
    """State of the optimizer as a whole, with the scaling of the loss that the engine asks for.

    BF16_Optimizer scales no loss and says nothing of it; this optimizer says so.
    """
    if "loss_scaler" in optimizer:
        return optimizer
    state: dict[Value, Value] = {"cur_scale": 1.0, "dynamic": False}
    scaler = Constructed(_STATIC_SCALER, state=state, is_new=True)
    unscaled: dict[str, Value] = {
        "loss_scaler": scaler,
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    return {**unscaled, **optimizer}


def _sub_group_numel(writing: Writing) -> int:
    """``sub_group_size`` of the configuration that the source carries, or the engine's own."""
    stored = zero_setting(writing.config, _SUB_GROUP_SIZE)
    if stored is None:
        return DEFAULT_SUB_GROUP_NUMEL
    # Configurations spell large numbers as floats, and the engine rounds them down.
    if isinstance(stored.value, float) and stored.value.is_integer():
        return int(stored.value)
    return stored.integer(at_least=0)


def _findings(
    writing: Writing, groups: Sequence[Sequence[ChunkedGroup]], limit: int
) -> list[Finding]:
    found: list[Finding] = []
    if any(part.most_sub_groups > 1 for parts in groups for part in parts):
        message = (
            f"parameter groups are split into sub-groups for a sub_group_size of {limit}, "
            "and the engine that resumes must have the same"
        )
        found.append(Finding("note", "sub-groups", message, details={_SUB_GROUP_SIZE: limit}))
    stored = zero_setting(writing.config, _SHARD_GROUPS)
    size = stored.value if stored is not None else None
    if isinstance(size, int) and 0 < size != writing.target.dp:
        message = (
            f"ds_config in the files says {_SHARD_GROUPS} {size}, and parameters are cut over all "
            f"{writing.target.dp} data-parallel ranks: resume without it"
        )
        found.append(Finding("note", "config-mics", message))
    return found
