"""A slow writer of ZeRO-3 checkpoints: the oracle for the reader.

It does what DeepSpeed 0.19.8 does, on whole arrays: cut every parameter over the tensor-parallel
ranks, pad each shard by itself to a multiple of the data-parallel ranks, and give each its chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.testing.saved_values import Array, save_file
from restride.testing.zero_files import box_map, shard_of, stored

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from restride.testing.zero_files import ZeroRun

__all__ = ["PADDING", "write_partitioned_run"]

PADDING: Final = -7777.0
"""What stands in the padding, which nobody may read."""


def write_partitioned_run(
    folder: Path, run: ZeroRun, *, sub_group_length: int = 2, padding: float = PADDING
) -> None:
    """Write a checkpoint with one tag.

    Args:
        folder: Where.
        run: The parameters. A ``weight`` is not written, and one without ``fp32`` is frozen. Its
            writer, alignment, round robin and mappings mean nothing here.
        sub_group_length: A parameter group is split into sub-groups of so many parameters.
        padding: What stands behind the last element of a parameter.
    """
    tag = folder / "step"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step")
    for tp in range(run.tp):
        groups = _sub_groups(run, tp, sub_group_length)
        for dp in range(run.dp):
            rank = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}"
            save_file(tag / f"{rank}_model_states.pt", _model_file(run, dp, tp, groups, padding))
            optimizer = _optimizer_file(run, dp, tp, groups, padding)
            save_file(tag / f"{rank}_optim_states.pt", optimizer)


def _sub_groups(run: ZeroRun, tp: int, length: int) -> list[tuple[int, list[str]]]:
    """Parameter group and names of each sub-group; empty shards are nobody's business."""
    count = 1 + max(parameter.group for parameter in run.parameters.values())
    found = []
    for group in range(count):
        names = [
            name
            for name, parameter in run.parameters.items()
            if parameter.group == group
            and "fp32" in parameter.states
            and shard_of(run, name, "fp32", tp).size
        ]
        found += [(group, names[n : n + length]) for n in range(0, len(names), length)]
    return found


def _chunk(values: NDArray[Any], dp: int, count: int, padding: float) -> NDArray[Any]:
    flat = values.ravel()
    width = -(-len(flat) // count)
    padded = np.full(width * count, padding).astype(flat.dtype)
    padded[: len(flat)] = flat
    return padded[dp * width :][:width]


def _model_file(
    run: ZeroRun, dp: int, tp: int, groups: list[tuple[int, list[str]]], padding: float
) -> Any:
    module: Any = OrderedDictValue()
    frozen: Any = OrderedDictValue()
    fragments: Any = OrderedDictValue()
    trained = {name for _, names in groups for name in names}
    for name in run.parameters:
        weight = shard_of(run, name, "weight", tp)
        module[name] = stored(weight.ravel()[:0])
        if name not in trained:
            frozen[name] = weight.shape
            fragments[name] = stored(_chunk(weight, dp, run.dp, padding))
    shapes = []
    for _, names in groups:
        group = OrderedDictValue()
        for name in names:
            group[name] = shard_of(run, name, "fp32", tp).shape
        shapes.append(group)
    maps = {"^" + name.replace(".", "\\.") + "$": box_map(run, name) for name in run.parameters}
    info: dict[str, Any] = {"affine_map": {"version": 1, "params": maps}}
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": frozen,
        "frozen_param_fragments": fragments,
        "shared_params": {},
        "global_steps": 2,
        "dp_world_size": run.dp,
        "mp_world_size": run.tp,
        "ds_config": _config(),
        **({"universal_checkpoint_info": info} if run.tp > 1 else {}),
        **run.extra,
    }


def _optimizer_file(
    run: ZeroRun, dp: int, tp: int, groups: list[tuple[int, list[str]]], padding: float
) -> Any:
    def flat(names: list[str], state: str) -> Array:
        shards = [shard_of(run, name, state, tp) for name in names]
        chunks = [_chunk(shard, dp, run.dp, padding) for shard in shards]
        return stored(np.concatenate(chunks).astype(np.float32))

    own: dict[Any, Any] = {}
    hyper: dict[int, dict[str, Any]] = {}
    for number, (group, names) in enumerate(groups):
        keys = [key for key in run.parameters[names[0]].states if key not in {"weight", "fp32"}]
        own[number] = {"step": Array("float32", (), np.float32(2).tobytes())}
        own[number] |= {key: flat(names, key) for key in keys}
        entry = hyper.setdefault(group, {"lr": 0.5 + group, "params": []})
        entry["params"].append(number)
    enum = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
    state: dict[str, Any] = {
        "zero_stage": Constructed(enum, (3,)),
        "partition_count": run.dp,
        "optimizer_state_dict": {"state": own, "param_groups": list(hyper.values())},
        "fp32_flat_groups": [flat(names, "fp32") for _, names in groups],
    }
    return {"optimizer_state_dict": state, "ds_config": _config(), "ds_version": "0.0"}


def _config() -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}}
