"""Record tiny checkpoints of the real DeepSpeed engine, in the variants that the shared ones lack.

    python scripts/record_deepspeed_checkpoints.py [NAME ...]

Writes tests/data/deepspeed/NAME/, about 30 kB each, with a `reference.safetensors` that comes from
the running engine and not from the files: master weights and moments as DeepSpeed gathers them over
the ranks. Needs torch and deepspeed (seen with 2.13.0 and 0.19.8); CPU and gloo, 10 s for each.

For ZeRO-3, which keeps no weights in its files, the gathered weights are in it as well, widened to
fp32; with tensor parallelism there is a file for each of its ranks.

`round_robin_z2` is the exception: there the engine's own view of its fragments is wrong, and the
reference is that of the same run without the round robin. The experts have no reference: no rank
of the engine can gather them all; those that are folded into tensor parallelism have one of their
own, put together from what the ranks say. They need transformers as well (seen with 5.24.0).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import ranks

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "deepspeed"
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
BF16 = {"bf16": {"enabled": True}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
# The plan of transformers 5.24 has what DeepSpeed 0.19.8 does not know; its own preset goes before.
FOLDED = {"tensor_parallel": {"autotp_size": 2, "preset_model": "mixtral"}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}

# Every run: ranks, and what the model and the configuration have of their own.
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16_optimizer_z1": {
        "ranks": 2,
        "groups": True,
        "config": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "tied_frozen_z1": {
        "ranks": 3,
        "groups": True,
        "tied": True,
        "frozen": True,
        "config": {"zero_optimization": {"stage": 1}},
    },
    "aligned_frozen_z2": {
        "ranks": 3,
        "groups": True,
        "frozen": True,
        "config": {"zero_optimization": {"stage": 2, "parameter_alignment": True}},
    },
    "elastic_z1": {
        "ranks": 2,
        "groups": True,
        "config": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    },
    "round_robin_z2": {
        "ranks": 3,
        "config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        "reference": {"zero_optimization": {"stage": 2}},
    },
    "momentum_z1": {
        "ranks": 2,
        "momentum": True,
        "config": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
    },
    "experts_z1": {
        "ranks": 4,
        "experts": True,
        "config": {"zero_optimization": {"stage": 1}, **EXPERTS},
    },
    "experts_data_first_z1": {
        "ranks": 4,
        "experts": True,
        "config": {
            "zero_optimization": {"stage": 1},
            "use_data_before_expert_parallelism": True,
            **EXPERTS,
        },
    },
    "numbered_groups_z0": {
        "ranks": 2,
        "groups": True,
        "tied": True,
        "frozen": True,
        "config": {"zero_optimization": {"stage": 0}},
    },
    "numbered_fp32_z0": {
        "ranks": 2,
        "config": {"bf16": {"enabled": False}, "zero_optimization": {"stage": 0}},
    },
    "numbered_flat_z0": {
        "ranks": 2,
        "groups": True,
        "tied": True,
        "frozen": True,
        "config": {"zero_optimization": {"stage": 0}, **FUSED},
    },
    "numbered_momentum_z0": {
        "ranks": 2,
        "momentum": True,
        "config": {"zero_optimization": {"stage": 0}},
    },
    "experts_z0": {
        "ranks": 4,
        "experts": True,
        "config": {"zero_optimization": {"stage": 0}, **EXPERTS},
    },
    "partitioned_z3": {
        "ranks": 3,
        "groups": True,
        "tied": True,
        "frozen": True,
        "config": {
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": 30,
            }
        },
    },
    "persistent_momentum_z3": {
        "ranks": 2,
        "momentum": True,
        "config": {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True},
    },
    "tensor_parallel_z3": {
        "ranks": 4,
        "llama": True,
        "config": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "tensor_parallel": {"autotp_size": 2},
        },
    },
    "experts_folded_z0": {
        "ranks": 4,
        "experts": True,
        "config": {
            "zero_optimization": {"stage": 0},
            **FOLDED,
            # With fewer, two ranks would write the same file of an expert at once.
            "expert_parallel": {**EXPERTS["expert_parallel"], "autoep_size": 4},
        },
    },
    "experts_folded_z1": {
        "ranks": 4,
        "experts": True,
        "config": {"zero_optimization": {"stage": 1}, **EXPERTS, **FOLDED},
    },
    "experts_folded_z3": {
        "ranks": 4,
        "experts": True,
        "config": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            **EXPERTS,
            **FOLDED,
        },
    },
    "experts_z3": {
        "ranks": 4,
        "experts": True,
        "config": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            **EXPERTS,
        },
    },
}


def build(variant: dict[str, Any]) -> Any:
    """Build a model with odd sizes, a buffer and a parameter without elements."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    stage = variant["config"]["zero_optimization"]["stage"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.up = nn.Linear(6, 7)
            self.base = nn.Linear(7, 5, bias=False)
            self.down = nn.Linear(5, 6)
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 11, bias=False)
            if stage < 3:
                self.empty = nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("positions", torch.arange(5, dtype=torch.int64))

        def forward(self, tokens: Any) -> Any:
            hidden = self.base(torch.relu(self.up(self.embed(tokens))))
            hidden = self.norm(self.down(torch.relu(hidden)))
            return self.head(hidden).float().pow(2).mean()

    model = Model()
    if variant.get("tied"):
        model.head.weight = model.embed.weight
    model.base.weight.requires_grad_(not variant.get("frozen"))
    return model


def build_experts() -> Any:
    """Build the smallest Mixtral."""
    import torch
    import transformers
    from transformers.utils import output_capturing

    # DeepSpeed 0.19.8 looks classes up by name and with a default, transformers 5.24 by class.
    registry = output_capturing._CanRecordRegistry
    by_class = registry.__setitem__

    def get(self: Any, key: Any, default: Any = None) -> Any:
        name = key if isinstance(key, str) else str(key.__class__)
        return dict.get(self, name, {} if default is None else default)

    def set_item(self: Any, key: Any, value: Any) -> None:
        (dict.__setitem__ if isinstance(key, str) else by_class)(self, key, value)

    registry.get, registry.__setitem__ = get, set_item
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=16,
        )
    )


def build_llama() -> Any:
    """Build a Llama whose three heads for keys and values are cut unevenly over two ranks."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=24,
            intermediate_size=10,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=16,
        )
    )


def parameter_groups(model: Any, variant: dict[str, Any]) -> list[Any]:
    """Split off what gets no weight decay, as everybody does."""
    if not variant.get("groups"):
        return list(model.parameters())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02},
    ]


def run_rank(
    job: Any, rank: int, variant: dict[str, Any], out: str, meeting: Path, results: Any
) -> None:
    """Train two steps and save, in one process."""
    try:
        os.environ["OMP_NUM_THREADS"] = "1"
        ranks.join(rank, variant["ranks"], meeting)
        job(rank, variant, out)
        results.put("")
    except BaseException:  # noqa: BLE001 - the parent must hear of it before this process goes
        results.put(traceback.format_exc())
        results.close()
        results.join_thread()
        os._exit(1)


def train(rank: int, variant: dict[str, Any], out: str) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    is_language_model = variant.get("experts") or variant.get("llama")
    if variant.get("llama"):
        model = build_llama()
    else:
        model = build_experts() if variant.get("experts") else build(variant)
    groups = parameter_groups(model, variant)
    # The norm of the gradients adds them up in the order of the buffer, which the variants change.
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, **BF16}
    config["gradient_clipping"] = 0.0
    optimizer = None
    if variant.get("momentum"):
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    else:
        config |= ADAM
    config |= variant["config"]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else groups,
        optimizer=optimizer,
        config=config,
    )
    # Tensor-parallel ranks are neighbours, and train on the same tokens.
    tp_size = config.get("tensor_parallel", {}).get("autotp_size", 1)
    generator = torch.Generator().manual_seed(rank // tp_size)
    for _ in range(2):
        tokens = torch.randint(0, 8, (2, 4), generator=generator)
        if is_language_model:
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        else:
            loss = engine(tokens)
        engine.backward(loss)
        engine.step()
    random_state = torch.get_rng_state()[:24].clone()
    engine.save_checkpoint(out, tag="step", client_state={"epoch": 3, "random": random_state})
    if "tensor_parallel" in config and variant.get("experts"):
        save_experts(engine, rank, out)
    if not variant.get("experts"):
        stage = config["zero_optimization"]["stage"]
        states = ["momentum_buffer"] if optimizer else ["exp_avg", "exp_avg_sq"]
        save_reference(engine, rank, out, states, stage, tp_size)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save_reference(
    engine: Any, rank: int, out: str, states: list[str], stage: int, tp_size: int
) -> None:
    """Save what the engine says that its parameters and states are; one file for each tp rank."""
    from safetensors.torch import save_file

    if stage in {1, 2}:
        # Fragments are linked after the step of the first group, when the others have no state.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    reference = gather(engine, states) if stage else look_up(engine, states)
    if rank < tp_size:
        name = f"reference_tp{rank}" if tp_size > 1 else "reference"
        save_file(reference, f"{out}/{name}.safetensors")


def save_experts(engine: Any, rank: int, out: str) -> None:
    """Save the master weights and moments of stacked experts, as the ranks that hold them say."""
    import torch
    from deepspeed.utils import groups
    from safetensors.torch import save_file

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = ["exp_avg", "exp_avg_sq"]
    found = (gather if engine.zero_optimization() else look_up)(engine, states)
    own = {key: value for key, value in found.items() if ".experts.w" in key}
    place = groups._get_expert_parallel_rank(groups._get_max_expert_size_name())
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (place, own))
    if not rank:
        held = dict(everyone)  # ranks with the same experts say the same
        whole = {key: torch.cat([held[n][key] for n in sorted(held)]) for key in own}
        save_file(whole, f"{out}/experts.safetensors")


def gather(engine: Any, states: list[str]) -> dict[str, Any]:
    """Ask the engine for the whole of each trained parameter; every rank has to take part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        is_partitioned = hasattr(parameter, "ds_id")
        if parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()):
            found[f"{name}/fp32"] = safe_get_full_fp32_param(parameter)
            for state in states:
                found[f"{name}/{state}"] = safe_get_full_optimizer_state(parameter, state)
        if is_partitioned:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[f"{name}/weight"] = parameter.detach().float()
    return {key: value.detach().clone().contiguous() for key, value in found.items()}


def look_up(engine: Any, states: list[str]) -> dict[str, Any]:
    """Read the states of an engine without ZeRO by the identity of its parameters."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer, found = engine.optimizer, {}
    if hasattr(optimizer, "fp32_groups_flat"):  # one buffer for each group, in its order
        for own, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            known = {"fp32": flat, **optimizer.optimizer.state[flat]}
            start = 0
            for parameter in own:
                for state in ["fp32", *states]:
                    part = known[state][start : start + parameter.numel()]
                    found[f"{names[parameter]}/{state}"] = part.view(parameter.shape)
                start += parameter.numel()
    else:
        masters = {parameter: parameter for parameter in names}
        if hasattr(optimizer, "fp32_groups"):
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            masters = {own: master for pair in groups for own, master in zip(*pair, strict=True)}
            optimizer = optimizer.optimizer
        for parameter, master in masters.items():
            if optimizer.state.get(master):
                found[f"{names[parameter]}/fp32"] = master
                for state in states:
                    found[f"{names[parameter]}/{state}"] = optimizer.state[master][state]
    return {key: value.detach().clone().contiguous() for key, value in found.items()}


def record(variant: dict[str, Any], out: Path, job: Any = train) -> None:
    """Run all ranks of one variant."""
    with tempfile.TemporaryDirectory() as folder:
        record_at(Path(folder, "meeting"), variant, out, job)


def record_at(meeting: Path, variant: dict[str, Any], out: Path, job: Any) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(job, rank, variant, str(out), meeting, results))
        for rank in range(variant["ranks"])
    ]
    for number, process in enumerate(processes):
        if "seeds" in variant:  # of the hashes of strings, which a process takes at its start
            os.environ["PYTHONHASHSEED"] = str(variant["seeds"][number])
        process.start()
    os.environ.pop("PYTHONHASHSEED", None)
    try:
        for _ in processes:
            if problem := results.get(timeout=300):
                sys.exit(problem)
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def main() -> None:
    for name in sys.argv[1:] or VARIANTS:
        variant = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "saved")
            record(variant, saved)
            if "reference" in variant:
                plain = Path(folder, "plain")
                record({**variant, "config": variant["reference"]}, plain)
                shutil.copy(plain / "reference.safetensors", saved)
            for script in saved.glob("*.py"):
                script.unlink()
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            shutil.copytree(saved, FOLDER / name)
        nbytes = sum(file.stat().st_size for file in (FOLDER / name).rglob("*") if file.is_file())
        print(json.dumps({"name": name, "nbytes": nbytes}))


if __name__ == "__main__":
    main()
