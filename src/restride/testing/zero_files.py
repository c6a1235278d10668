"""A slow writer of ZeRO-1/2 checkpoints: the oracle for the reader.

It does what DeepSpeed 0.19.8 does, on whole arrays and in the plainest way: cut every parameter
over the tensor-parallel ranks, lay the shards of a group end to end, pad, cut it evenly, save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from msgspec import field

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.frozen import Frozen
from restride.testing.saved_values import Array, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Cut", "Parameter", "ZeroRun", "box_map", "shard_of", "stored", "write_zero_run"]

Cut: TypeAlias = "tuple[int, tuple[int, ...]] | None"
"""Dimension and width of each tensor-parallel rank, or None where all hold it whole."""

Writer: TypeAlias = Literal["zero", "elastic", "bf16_optimizer"]


class Parameter(Frozen):
    """One parameter with its states, whole.

    Attributes:
        shape: Shape.
        states: Arrays by state, with ``weight`` among them.
        cut: How tensor-parallel ranks cut it.
        group: Number of its optimizer group.
    """

    shape: tuple[int, ...]
    states: dict[str, NDArray[Any]]
    cut: Cut = None
    group: int = 0


class ZeroRun(Frozen):
    """What is to be written.

    Attributes:
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        parameters: By name, in the order of the model.
        writer: Which class of DeepSpeed writes, and whether ``elastic_checkpoint`` is on.
        alignment: Parameters start at multiples of so many elements.
        is_round_robin: Whether parameters are dealt to the partitions in turn.
        has_mappings: Whether the fragments are written; old versions do not.
        extra: More entries of the model files.
        settings: Of every parameter group.
        is_muon: Whether Muon updates all parameters: it sorts them by size, and keeps a state
            ``momentum_buffer`` of each whole on the ranks with a part of it.
    """

    dp: int
    tp: int
    parameters: dict[str, Parameter]
    writer: Writer = "zero"
    alignment: int = 1
    is_round_robin: bool = False
    has_mappings: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.5})
    is_muon: bool = False


def write_zero_run(folder: Path, run: ZeroRun) -> None:
    """Write a checkpoint with one tag."""
    tag = folder / "step"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step")
    for tp in range(run.tp):
        groups = _groups(run, tp)
        save_file(tag / f"mp_rank_{tp:02d}_model_states.pt", _model_file(run, tp, groups))
        for dp in range(run.dp):
            name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"
            save_file(tag / name, _zero_file(run, dp, tp, groups))


def shard_of(run: ZeroRun, name: str, state: str, tp: int) -> NDArray[Any]:
    """The part of a state that a tensor-parallel rank has."""
    parameter = run.parameters[name]
    whole = parameter.states[state].reshape(parameter.shape)
    if parameter.cut is None:
        return whole
    dim, widths = parameter.cut
    first = sum(widths[:tp])
    return whole.take(range(first, first + widths[tp]), axis=dim)


def _groups(run: ZeroRun, tp: int) -> list[list[str]]:
    """Names of each group in the order of its buffer; empty shards are nobody's business."""
    count = 1 + max(parameter.group for parameter in run.parameters.values())
    groups = []
    for number in range(count):
        names = [
            name
            for name, parameter in run.parameters.items()
            if parameter.group == number and shard_of(run, name, "weight", tp).size
        ]
        names = _by_size(run, names, tp)
        if run.is_round_robin:
            names = [name for first in range(run.dp) for name in names[first :: run.dp]]
        groups.append(names)
    return groups


def _by_size(run: ZeroRun, names: list[str], tp: int) -> list[str]:
    """As Muon sorts: the largest first, and what is of one shape as it was."""
    if not run.is_muon:
        return names
    return sorted(names, key=lambda name: shard_of(run, name, "weight", tp).shape, reverse=True)


def _flat(run: ZeroRun, names: list[str], state: str, tp: int) -> tuple[NDArray[Any], list[int]]:
    """The padded buffer, and the padding after each parameter."""
    parts: list[NDArray[Any]] = []
    paddings = []
    for place, name in enumerate(names):
        parts.append(shard_of(run, name, state, tp).ravel())
        stop = sum(map(len, parts))
        paddings.append(0 if place == len(names) - 1 else -stop % run.alignment)
        parts.append(np.zeros(paddings[-1], parts[0].dtype))
    stop = sum(map(len, parts))
    parts.append(np.zeros(-stop % (2 * run.dp), np.float32))
    return np.concatenate(parts).astype(np.float32), paddings


def _momentum(
    run: ZeroRun, names: list[str], paddings: list[int], width: int, dp: int, tp: int
) -> dict[Any, Any]:
    """All of every parameter with an element in the partition, end to end; or nothing."""
    owners: list[str | None] = []
    for name, padding in zip(names, paddings, strict=True):
        owners += [name] * shard_of(run, name, "weight", tp).size + [None] * padding
    held = [name for name in dict.fromkeys(owners[dp * width : (dp + 1) * width]) if name]
    parts = [shard_of(run, name, "momentum_buffer", tp).ravel() for name in held]
    return {"momentum_buffer": stored(np.concatenate(parts))} if parts else {}


def _mapping(
    run: ZeroRun, names: list[str], paddings: list[int], width: int, dp: int, tp: int
) -> Any:
    if run.is_round_robin and not any(paddings):  # the fault of DeepSpeed
        names = _by_size(run, [name for name in run.parameters if name in names], tp)
    mapping = OrderedDictValue()
    start = 0
    for name, padding in zip(names, paddings, strict=True):
        stop = start + shard_of(run, name, "weight", tp).size
        low, high = max(start, dp * width), min(stop, (dp + 1) * width)
        if low < high:
            state: Any = {"numel": high - low, "start": low - dp * width}
            cls = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
            mapping[name] = Constructed(cls, (), state=state, is_new=True)
        start = stop + padding
    return mapping


def _zero_file(run: ZeroRun, dp: int, tp: int, groups: list[list[str]]) -> Any:
    is_bf16 = run.writer == "bf16_optimizer"
    state: dict[Any, Any] = {"clip_grad": 1.0, "ds_version": "0.0"}
    masters, own, paddings, alignments, mappings = [], [], [], [], []
    for names in groups:
        states = [key for key in run.parameters[names[0]].states if key not in {"weight", "fp32"}]
        flat, after = _flat(run, names, "fp32", tp)
        width = len(flat) // run.dp
        end = sum(shard_of(run, name, "fp32", tp).size for name in names) + sum(after)
        left = width - max(0, min(end - dp * width, width))
        booked = (len(flat) - end if dp == run.dp - 1 else 0) if is_bf16 else left
        kept = width - (0 if is_bf16 else left)
        masters.append(stored(flat[dp * width :][:kept]))
        kept = width - left if run.writer == "elastic" else width
        entry: dict[Any, Any] = {"step": Array("float32", (), np.float32(2).tobytes())}
        for key in states:
            entry[key] = stored(_flat(run, names, key, tp)[0][dp * width :][:kept])
        own.append(_momentum(run, names, after, width, dp, tp) if run.is_muon else entry)
        paddings.append(booked)
        alignments.append(after)
        mappings.append(_mapping(run, names, after, width, dp, tp))
    uses = {"use_muon": True} if run.is_muon else {}
    hyper = [{**run.settings, **uses, "params": [number]} for number in range(len(groups))]
    state["base_optimizer_state"] = (
        own
        if run.writer == "elastic"
        else {"state": {n: entry for n, entry in enumerate(own) if entry}, "param_groups": hyper}
    )
    state["single_partition_of_fp32_groups"] = masters
    state["group_paddings"] = paddings
    state["partition_count"] = [run.dp] * len(groups)
    if run.has_mappings:
        state["param_slice_mappings"] = mappings
    if not is_bf16:
        enum = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
        state["zero_stage"] = Constructed(enum, (1,))
        state["param_alignment_paddings"] = alignments
    return {"optimizer_state_dict": state, "ds_config": _config(run), "ds_version": "0.0"}


def _model_file(run: ZeroRun, tp: int, groups: list[list[str]]) -> Any:
    module: Any = OrderedDictValue()
    for name in run.parameters:
        shard = shard_of(run, name, "weight", tp)
        module[name] = stored(shard)
    shapes = []
    for names in groups:
        group = OrderedDictValue()
        for name in names:
            group[name] = shard_of(run, name, "weight", tp).shape
        shapes.append(group)
    maps = {f"^{_escape(name)}$": box_map(run, name) for name in run.parameters}
    info: dict[str, Any] = {"affine_map": {"version": 1, "params": maps}}
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "global_steps": 2,
        "dp_world_size": run.dp,
        "mp_world_size": run.tp,
        "ds_config": _config(run),
        **({"universal_checkpoint_info": info} if run.tp > 1 else {}),
        **run.extra,
    }


def box_map(run: ZeroRun, name: str) -> dict[str, Any]:
    """The affine map that DeepSpeed stores: one box on each rank."""
    parameter = run.parameters[name]
    full = parameter.shape
    ranks: dict[Any, Any] = {}
    for tp in range(run.tp):
        shard = shard_of(run, name, "weight", tp).shape
        base, holders = 0, list(range(run.tp))
        if parameter.cut is not None:
            dim, widths = parameter.cut
            base, holders = sum(widths[:tp]) * _strides(full)[dim], [tp]
        box = {
            "shape": list(shard),
            "source": [base, _strides(full)],
            "dest": [0, _strides(shard)],
            "locations": holders,
        }
        ranks[tp] = {"shard_shape": list(shard), "pieces": [box]}
    return {"logical_shape": list(full), "ranks": ranks}


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [int(np.prod(shape[dim + 1 :], dtype=int)) for dim in range(len(shape))]


def _escape(name: str) -> str:
    return name.replace(".", "\\.")


def _config(run: ZeroRun) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": 1,
        "round_robin_gradients": run.is_round_robin,
        "parameter_alignment": run.alignment > 1,
    }
    if run.writer != "bf16_optimizer":
        return {"zero_optimization": settings}
    return {
        "zero_optimization": settings,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def stored(values: NDArray[Any]) -> Array:
    """An array as a tensor to be saved."""
    return Array(str(values.dtype), values.shape, np.ascontiguousarray(values).tobytes())
