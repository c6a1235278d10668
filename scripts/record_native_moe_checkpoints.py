"""Save checkpoints of the real DeepSpeed engine with layers of its own mixture of experts.

    python scripts/record_native_moe_checkpoints.py [NAME ...]

Writes tests/data/deepspeed_native_moe/NAME/, with a `reference.safetensors` that comes from the
running engines and not from the files: what each rank says of its own experts, by their numbers
among all. Needs torch and deepspeed (seen with 2.13.0 and 0.19.8); CPU and gloo, 10 s for each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import native_moe
from record_deepspeed_checkpoints import gather, look_up, record

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "deepspeed_native_moe"
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
BF16 = {"bf16": {"enabled": True}}
EXPERTS = (2, 4)
VOCABULARY = 8

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32_z0": {"ranks": 4, "ep": 2, "config": {"zero_optimization": {"stage": 0}, **ADAM}},
    "bf16_z0": {"ranks": 2, "ep": 2, "config": {"zero_optimization": {"stage": 0}, **ADAM, **BF16}},
    "flat_z0": {
        "ranks": 2,
        "ep": 2,
        "config": {"zero_optimization": {"stage": 0}, **FUSED, **BF16},
    },
    "residual_z1": {
        "ranks": 4,
        "ep": 2,
        "residual": True,
        "groups": True,
        "config": {"zero_optimization": {"stage": 1}, **ADAM, **BF16},
    },
    "data_first_z1": {
        "ranks": 4,
        "ep": 2,
        "config": {
            "zero_optimization": {"stage": 1},
            "use_data_before_expert_parallelism": True,
            **ADAM,
            **BF16,
        },
    },
    "round_robin_z2": {
        "ranks": 4,
        "ep": 2,
        "config": {
            "zero_optimization": {"stage": 2, "round_robin_gradients": True},
            **ADAM,
            **BF16,
        },
        "reference": {"zero_optimization": {"stage": 2}, **ADAM, **BF16},
    },
    "frozen_z2": {
        "ranks": 2,
        "ep": 1,
        "frozen": True,
        "config": {"zero_optimization": {"stage": 2}, **ADAM, **BF16},
    },
    # Tensor-parallel ranks beside experts: whole ones, and such that these ranks cut.
    "tensor_whole_z0": {
        "ranks": 2,
        "ep": 2,
        "tp": 2,
        "config": {"zero_optimization": {"stage": 0}, **ADAM, **BF16},
    },
    "tensor_whole_z1": {
        "ranks": 4,
        "ep": 2,
        "tp": 2,
        "config": {"zero_optimization": {"stage": 1}, **ADAM, **BF16},
    },
    "tensor_cut_z0": {
        "ranks": 4,
        "ep": 2,
        "tp": 2,
        "is_cut": True,
        "config": {"zero_optimization": {"stage": 0}, **ADAM, **BF16},
    },
    "tensor_cut_z2": {
        "ranks": 4,
        "ep": 2,
        "tp": 2,
        "is_cut": True,
        "residual": True,
        "config": {"zero_optimization": {"stage": 2}, **ADAM, **BF16},
    },
    "tensor_cut_data_first_z1": {
        "ranks": 8,
        "ep": 2,
        "tp": 2,
        "is_cut": True,
        "config": {
            "zero_optimization": {"stage": 1},
            "use_data_before_expert_parallelism": True,
            **ADAM,
            **BF16,
        },
    },
    # Layers on two and on four ranks, whose groups two processes have in one order and two in the
    # other.
    "several_z1": {
        "ranks": 4,
        "ep": (2, 4),
        "seeds": (0, 1, 1, 0),
        "groups": True,
        "config": {"zero_optimization": {"stage": 1}, **ADAM, **BF16},
    },
    "several_z0": {
        "ranks": 4,
        "ep": (2, 4),
        "seeds": (0, 1, 1, 0),
        "groups": True,
        "config": {"zero_optimization": {"stage": 0}, **ADAM, **BF16},
    },
    "bf16_optimizer_z1": {
        "ranks": 4,
        "ep": 2,
        "config": {
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
            **ADAM,
            **BF16,
        },
    },
}


def train(rank: int, variant: dict[str, Any], out: str) -> None:
    """Train two steps and save, in one process."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    tp = variant.get("tp", 1)
    mpu = native_moe.Mpu(rank, tp) if tp > 1 else None
    model = native_moe.build(
        VOCABULARY,
        rank,
        variant["ep"],
        experts=EXPERTS,
        residual=bool(variant.get("residual")),
        is_data_first="use_data_before_expert_parallelism" in variant["config"],
        mpu=mpu,
        is_cut=bool(variant.get("is_cut")),
    )
    if variant.get("frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".0.down.bias" not in name and "embed" not in name)
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, **variant["config"]}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, variant), config=config, mpu=mpu
    )
    numbers = torch.Generator().manual_seed(rank // tp)
    for _ in range(2):
        tokens = torch.randint(0, VOCABULARY, (2, 6), generator=numbers)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(out, tag="step", client_state={"epoch": 3})
    save_reference(engine, rank, out, cutters=tp if variant.get("is_cut") else 1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def parameter_groups(model: Any, variant: dict[str, Any]) -> list[Any]:
    """Split off what gets no weight decay; DeepSpeed splits the experts off by itself."""
    if not variant.get("groups"):
        return list(model.parameters())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02, "name": "vectors"},
    ]


def save_reference(  # noqa: C901 - one step after another
    engine: Any, rank: int, out: str, *, cutters: int
) -> None:
    """Save what all ranks say of their parameters and states, by the numbers of the experts."""
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups
    from safetensors.torch import save_file

    states = ["exp_avg", "exp_avg_sq"]
    if engine.zero_optimization():
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
            engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
        found = gather(engine, states)
    else:
        found = look_up(engine, states)
    named = engine.module.named_parameters()
    found |= {f"{name}/weight": own.detach().float().clone() for name, own in named}
    for path, layer in engine.module.named_modules():
        if isinstance(layer, MoE):
            first = groups._get_expert_parallel_rank(layer.expert_group_name)
            first *= layer.num_local_experts
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts."
            own = {key: found.pop(key) for key in [*found] if key.startswith(prefix)}
            for key, value in own.items():
                number, _, rest = key.removeprefix(prefix).partition(".")
                found[f"{prefix}{int(number) + first}.{rest}"] = value
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, found)
    if cutters > 1:  # neighbours have the same tensors, of which some are cut
        everyone = [
            {key: joined(key, own) for key in own[0]}
            for first in range(0, len(everyone), cutters)
            for own in [everyone[first : first + cutters]]
        ]
    if not rank:
        whole = {key: value for own in everyone for key, value in own.items()}
        for own in everyone:  # those that hold the same experts agree
            for key, value in own.items():
                if not torch.equal(value, whole[key]):
                    sys.exit(f"the ranks do not agree on {key}")
        save_file(whole, f"{out}/reference.safetensors")


def joined(key: str, own: list[dict[str, Any]]) -> Any:
    """Put together what tensor-parallel ranks have of a tensor; copies are compared."""
    import torch

    name = key.rpartition("/")[0]
    is_of_expert = "deepspeed_experts" in name or ".mlp." in name
    dim = native_moe.cut_dim(name) if is_of_expert else None
    if dim is not None:
        return torch.cat([shard[key] for shard in own], dim)
    if any(not torch.equal(shard[key], own[0][key]) for shard in own):
        sys.exit(f"the tensor-parallel ranks do not agree on {key}")
    return own[0][key]


def main() -> None:
    for name in sys.argv[1:] or VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "saved")
            variant = VARIANTS[name]
            record(variant, saved, train)
            if "reference" in variant:  # the engine's own view of its fragments is wrong there
                plain = Path(folder, "plain")
                record({**variant, "config": variant["reference"]}, plain, train)
                shutil.copy(plain / "reference.safetensors", saved)
            for script in saved.glob("*.py"):
                script.unlink()
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            shutil.copytree(saved, FOLDER / name)
        nbytes = sum(file.stat().st_size for file in (FOLDER / name).rglob("*") if file.is_file())
        print(json.dumps({"name": name, "nbytes": nbytes}))


if __name__ == "__main__":
    main()
