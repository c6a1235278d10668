"""A slow writer of ZeRO-0 checkpoints: the oracle for the reader, and for what it must not guess.

It does what the three classes of DeepSpeed 0.19.8 do that save an optimizer without ZeRO: the plain
optimizer in fp32, `FP16_UnfusedOptimizer` and `FP16_Optimizer`. Weights are the master weights
rounded to fp16.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from restride.checkpoint.values import OrderedDictValue
from restride.testing.saved_values import Array, save_file
from restride.testing.zero_files import box_map, shard_of, stored

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from restride.testing.zero_files import ZeroRun

__all__ = ["WholeKind", "rounded_run", "write_whole_run"]

WholeKind: TypeAlias = Literal["bare", "unfused", "flat"]


def rounded_run(run: ZeroRun, kind: WholeKind) -> ZeroRun:
    """Give a run the weights that its master weights round to; in fp32 they are the same.

    Master weights are divided by 4 before, so that those of `zero_runs` are in the range of fp16.
    """
    dtype = np.float32 if kind == "bare" else np.float16
    parameters = {}
    for name, parameter in run.parameters.items():
        master = parameter.states["fp32"] / np.float32(4)
        states = {**parameter.states, "fp32": master, "weight": master.astype(dtype)}
        parameters[name] = replace(parameter, states=states)
    return replace(run, parameters=parameters, dp=1)


def write_whole_run(
    folder: Path,
    run: ZeroRun,
    kind: WholeKind,
    *,
    order: Sequence[str] | None = None,
    has_names: bool = False,
) -> None:
    """Write a checkpoint with one tag.

    Args:
        folder: Where to.
        run: What `rounded_run` made.
        kind: Which class writes.
        order: Parameters in the order of the training script's list; by default the model's.
        has_names: Whether the optimizer was told the names.
    """
    tag = folder / "step"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step")
    for tp in range(run.tp):
        groups = _groups(run, kind, tp, list(order or run.parameters))
        save_file(
            tag / f"mp_rank_{tp:02d}_model_states.pt",
            _file(run, kind, tp, groups, has_names=has_names),
        )


def _groups(run: ZeroRun, kind: WholeKind, tp: int, order: list[str]) -> list[list[str]]:
    count = 1 + max(parameter.group for parameter in run.parameters.values())
    return [
        [
            name
            for name in order
            if run.parameters[name].group == number
            and (kind == "bare" or shard_of(run, name, "weight", tp).size)
        ]
        for number in range(count)
    ]


def _file(
    run: ZeroRun, kind: WholeKind, tp: int, groups: list[list[str]], *, has_names: bool
) -> dict[str, Any]:
    module: Any = OrderedDictValue()
    for name in run.parameters:
        module[name] = stored(shard_of(run, name, "weight", tp))
    if kind == "flat":
        for names in groups:
            _join(run, module, names, tp)
    maps = {f"^{name.replace('.', chr(92) + '.')}$": box_map(run, name) for name in run.parameters}
    info: dict[str, Any] = {"affine_map": {"version": 1, "params": maps}}
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": _optimizer(run, kind, tp, groups, has_names=has_names),
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "global_steps": 2,
        "dp_world_size": run.dp,
        "mp_world_size": run.tp,
        "ds_config": {"zero_optimization": {"stage": 0}},
        **({"universal_checkpoint_info": info} if run.tp > 1 else {}),
        **run.extra,
    }


def _join(run: ZeroRun, module: Any, names: list[str], tp: int) -> None:
    """Make the weights of a group views of one buffer, end to end."""
    shards = [shard_of(run, name, "weight", tp) for name in names]
    joined = np.concatenate([shard.ravel() for shard in shards]).tobytes()
    base = 0
    for name, shard in zip(names, shards, strict=True):
        module[name] = Array("float16", shard.shape, joined, base=base)
        base += shard.size


def _optimizer(
    run: ZeroRun, kind: WholeKind, tp: int, groups: list[list[str]], *, has_names: bool
) -> dict[str, Any]:
    state: dict[int, Any] = {}
    settings: list[Any] = []
    masters: list[Any] = []
    number = 0
    for group, names in enumerate(groups):
        buffers = [names] if kind == "flat" else [[name] for name in names]
        numbers = list(range(number, number + len(buffers)))
        for own in buffers:
            if any(shard_of(run, name, "weight", tp).size for name in own):
                state[number] = _state(run, own, tp, is_flat=kind == "flat")
            number += 1
        entry: dict[str, Any] = {"lr": 0.5 + group, "params": numbers}
        settings.append({**entry, "param_names": names} if has_names else entry)
        masters.append([_part(run, own, "fp32", tp, is_flat=kind == "flat") for own in buffers])
    base = {"state": state, "param_groups": settings}
    if kind == "bare":
        return base
    key = "fp32_groups_flat" if kind == "flat" else "fp32_groups"
    kept = [own[0] for own in masters] if kind == "flat" else masters
    return {"dynamic_loss_scale": False, "cur_scale": 1.0, "optimizer_state_dict": base, key: kept}


def _state(run: ZeroRun, names: list[str], tp: int, *, is_flat: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": Array("float32", (), np.float32(2).tobytes())}
    for key in run.parameters[names[0]].states:
        if key not in {"weight", "fp32"}:
            entry[key] = _part(run, names, key, tp, is_flat=is_flat)
    return entry


def _part(run: ZeroRun, names: list[str], state: str, tp: int, *, is_flat: bool) -> Array:
    shards = [shard_of(run, name, state, tp) for name in names]
    if not is_flat:
        return stored(shards[0])
    flat = np.concatenate([shard.ravel() for shard in shards])
    return Array("float32", (prod(flat.shape),), flat.astype(np.float32).tobytes())
