"""Write a DeepSpeed checkpoint of any size without training one: same files, same keys, same cuts.

    python benchmarks/synthetic.py OUT --hidden 1280 --layers 16 --vocab 32000 --tp 2 --dp 2

The model is Llama's with grouped K/V heads; the form is ZeRO-1 in bf16 with fp32 master weights, as
DeepSpeed 0.19.8 writes it, so that its own `ds_to_universal` converts it too. Values are a counter,
so that every element of a state differs from its neighbours. With `--sparse` they are holes, which
take no disk: the headers of a checkpoint of terabytes. Needs torch and deepspeed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
# Of Linux; mmap has a name for it from Python 3.13 on.
_NO_RESERVE = 0x4000


def parameters(hidden: int, layers: int, vocab: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, full shapes and cuts, in the order of the model."""
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("model.embed_tokens.weight", (vocab, hidden), ROWS)
    ]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found += [
            (at + "self_attn.q_proj.weight", (hidden, hidden), ROWS),
            (at + "self_attn.k_proj.weight", (hidden // 2, hidden), ROWS),
            (at + "self_attn.v_proj.weight", (hidden // 2, hidden), ROWS),
            (at + "self_attn.o_proj.weight", (hidden, hidden), COLUMNS),
            (at + "mlp.gate_proj.weight", (2 * hidden, hidden), ROWS),
            (at + "mlp.up_proj.weight", (2 * hidden, hidden), ROWS),
            (at + "mlp.down_proj.weight", (hidden, 2 * hidden), COLUMNS),
            (at + "input_layernorm.weight", (hidden,), WHOLE),
            (at + "post_attention_layernorm.weight", (hidden,), WHOLE),
        ]
    return [
        *found,
        ("model.norm.weight", (hidden,), WHOLE),
        ("lm_head.weight", (vocab, hidden), ROWS),
    ]


def write(
    out: Path, *, hidden: int, layers: int, vocab: int, tp: int, dp: int, sparse: bool = False
) -> int:
    """Write the checkpoint and return its size in bytes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    folder = out / "step"
    folder.mkdir(parents=True)
    named = parameters(hidden, layers, vocab)
    for t in range(tp):
        shapes = OrderedDict((name, shard_shape(shape, cut, tp)) for name, shape, cut in named)
        numels = [torch.Size(shape).numel() for shape in shapes.values()]
        padded = -(-sum(numels) // (2 * dp)) * 2 * dp
        flat, weights = untouched(padded), untouched(padded, torch.bfloat16)
        start = 0
        if not sparse:
            for (name, shape, cut), numel in zip(named, numels, strict=True):
                flat[start : start + numel] = shard_values(name, shape, cut, t, tp).reshape(-1)
                start += numel
            flat[start:] = 0
            weights.copy_(flat)
        module, start = OrderedDict(), 0
        for (name, shape), numel in zip(shapes.items(), numels, strict=True):
            module[name] = weights[start : start + numel].view(shape)
            start += numel
        state = model_state(module, shapes, named, tp, dp)
        save(state, folder / f"mp_rank_{t:02d}_model_states.pt", sparse=sparse)
        part = padded // dp
        for d in range(dp):
            fragments, start = OrderedDict(), 0
            for name, numel in zip(shapes, numels, strict=True):
                low, high = max(start, d * part), min(start + numel, (d + 1) * part)
                if low < high:
                    fragments[name] = fragment_address(numel=high - low, start=low - d * part)
                start += numel
            padding = max(0, min(part, (d + 1) * part - sum(numels)))
            own = slice(d * part, (d + 1) * part - padding)
            master = untouched(part - padding) if sparse else flat[own].clone()
            mine = untouched(part) if sparse else flat[d * part : (d + 1) * part]
            moments = [untouched(part) if sparse else mine * factor for factor in (0.5, 0.25)]
            state = optimizer_state(master, moments, padding, fragments, len(named), dp)
            path = folder / f"bf16_zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt"
            save(state, path, sparse=sparse)
    (out / "latest").write_text("step")
    (out / "config.json").write_text(json.dumps(config(hidden, layers, vocab)))
    return sum(path.stat().st_size for path in folder.iterdir())


def untouched(numel: int, dtype: Any = None) -> Any:
    """A tensor that takes no memory until somebody writes to it, even if it is larger than all."""
    import torch

    dtype = dtype or torch.float32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def save(state: dict[str, Any], path: Path, *, sparse: bool) -> None:
    """Write a file as an engine does, or with holes for the bytes of its tensors."""
    import torch

    with torch.serialization.skip_data() if sparse else nullcontext():
        torch.save(state, path)


def config(hidden: int, layers: int, vocab: int) -> dict[str, Any]:
    """What transformers would write beside it: half as many heads of K/V, of 32 elements each."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
    }


def shard_shape(shape: tuple[int, ...], cut: str, tp: int) -> Any:
    import torch

    if cut == ROWS:
        return torch.Size((shape[0] // tp, *shape[1:]))
    return torch.Size((shape[0], shape[1] // tp) if cut == COLUMNS else shape)


def shard_values(name: str, shape: tuple[int, ...], cut: str, rank: int, tp: int) -> Any:
    """The shard of a full tensor whose element i is (i + a number from the name) / 2**20."""
    import torch

    seed = sum(name.encode()) * 7919
    full = torch.arange(seed, seed + torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    if cut != WHOLE:
        full = full.chunk(tp, 0 if cut == ROWS else 1)[rank]
    return full.to(torch.float32) / 2**20


def optimizer_state(
    master: Any, moments: Any, padding: int, fragments: Any, count: int, dp: int
) -> dict[str, Any]:
    import torch

    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
    state = {"step": torch.tensor(2.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return {
        "optimizer_state_dict": {
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": {0: state}, "param_groups": [group]},
            "single_partition_of_fp32_groups": [master],
            "zero_stage": 1,
            "group_paddings": [padding],
            "param_alignment_paddings": [[0] * count],
            "partition_count": [dp],
            "ds_version": "0.19.8",
            "param_slice_mappings": [fragments],
        },
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
    }


def model_state(module: Any, shapes: Any, named: Any, tp: int, dp: int) -> dict[str, Any]:
    maps = {pattern(name): affine_map(shape, cut, tp) for name, shape, cut in named}
    by_cut = {
        wanted: [pattern(name) for name, _, cut in named if cut == wanted]
        for wanted in (ROWS, COLUMNS, WHOLE)
    }
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 2,
        "global_samples": 4,
        "dp_world_size": dp,
        "mp_world_size": tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
        "iteration": 2,
        "universal_checkpoint_info": {
            "universal_checkpoint_version": 0.4,
            "parameter_with_row_parallelism_patterns": by_cut[COLUMNS],
            "tp_replicated_parameter_patterns": by_cut[WHOLE],
            "vocabulary_parameter_patterns": [],
            "parameter_with_sub_params": [],
            "autotp_unsupported_parameter_patterns": {},
            "affine_map": {"version": 1, "params": maps},
        },
    }


def pattern(name: str) -> str:
    return f"^{re.escape(name)}$"


def affine_map(shape: tuple[int, ...], cut: str, tp: int) -> dict[str, Any]:
    """One box a rank, in DeepSpeed's stored form, version 1."""
    strides = [shape[1], 1] if len(shape) == 2 else [1]
    local = list(shard_shape(shape, cut, tp))
    local_strides = [local[1], 1] if len(local) == 2 else [1]
    step = {ROWS: local[0] * strides[0], COLUMNS: local[-1], WHOLE: 0}[cut]
    holders = list(range(tp))
    ranks = {
        rank: {
            "shard_shape": local,
            "pieces": [
                {
                    "shape": local,
                    "source": [rank * step, strides],
                    "dest": [0, local_strides],
                    "locations": holders if cut == WHOLE else [rank],
                }
            ],
        }
        for rank in holders
    }
    return {"logical_shape": list(shape), "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--sparse", action="store_true", help="holes for the bytes of tensors")
    a = parser.parse_args()
    sizes = {"hidden": a.hidden, "layers": a.layers, "vocab": a.vocab, "tp": a.tp, "dp": a.dp}
    nbytes = write(a.out, **sizes, sparse=a.sparse)
    print(f"{a.out}: {nbytes} bytes")


if __name__ == "__main__":
    main()
