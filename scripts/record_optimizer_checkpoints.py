"""Save checkpoints of the real DeepSpeed engine with every optimizer that it takes.

    python scripts/record_optimizer_checkpoints.py OUT [NAME ...]

Writes OUT/NAME_zS/ for every optimizer and ZeRO stage, all from one pair of processes. Where the
engine itself refuses an optimizer at a stage, its reason is in OUT/refused.json. Needs torch and
deepspeed (seen with 2.13.0 and 0.19.8); CPU and gloo, a second for each after the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from record_deepspeed_checkpoints import record

# What the engine is given: a class of torch and its arguments, or a section of its configuration.
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"torch": "SGD", "lr": 0.1},
    "momentum": {"torch": "SGD", "lr": 0.1, "momentum": 0.9},
    "adam": {"torch": "Adam", "lr": 0.01},
    "adamw_amsgrad": {"torch": "AdamW", "lr": 0.01, "amsgrad": True},
    "adagrad": {"torch": "Adagrad", "lr": 0.01},
    "adadelta": {"torch": "Adadelta", "lr": 0.01},
    "adamax": {"torch": "Adamax", "lr": 0.01},
    "nadam": {"torch": "NAdam", "lr": 0.01},
    "radam": {"torch": "RAdam", "lr": 0.01},
    "rmsprop": {"torch": "RMSprop", "lr": 0.01, "momentum": 0.9, "centered": True},
    "rprop": {"torch": "Rprop", "lr": 0.01},
    "asgd": {"torch": "ASGD", "lr": 0.01},
    "lion": {"plain": "Lion"},
    "adamw": {"config": ADAMW},
    "adamw_offloaded": {"config": ADAMW, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "adamw_second_copy": {"config": ADAMW, "zero": {"zero_hpz_partition_size": 2}},
    "muon": {"config": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}},
}
STAGES = (1, 2, 3)


def build_model() -> Any:
    """Build a model of odd sizes, with a buffer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 5, bias=False))
    model.register_buffer("positions", torch.arange(3))
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim > 1
    return model


def build_lion(parameters: Any) -> Any:
    """Lion in plain torch, as it is published: the sign of an interpolated momentum."""
    import torch

    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.0})

        @torch.no_grad()
        def step(self, _: Any = None) -> None:
            for group in self.param_groups:
                first, second = group["betas"]
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
                    update = moment.mul(first).add(parameter.grad, alpha=1 - first).sign_()
                    parameter.add_(update, alpha=-group["lr"])
                    moment.mul_(second).add_(parameter.grad, alpha=1 - second)

    return Lion(parameters)


def train(rank: int, variant: dict[str, Any], out: str) -> None:
    """Train and save with one optimizer after the other, in one process."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    refused = {}
    for name in variant["names"]:
        for stage in STAGES:
            label = f"{name}_z{stage}"
            try:
                train_one(OPTIMIZERS[name], stage, f"{out}/{label}", rank)
            except (AssertionError, AttributeError, ImportError, RuntimeError, ValueError) as error:
                refused[label] = f"{type(error).__name__}: {error}"
    if not rank:
        Path(out, "refused.json").write_text(json.dumps(refused, indent=1))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_one(chosen: dict[str, Any], stage: int, out: str, rank: int) -> None:
    """Train two steps of one engine and save."""
    import deepspeed
    import torch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **chosen.get("zero", {})},
        "bf16": {"enabled": True},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        config["zero_optimization"]["reduce_scatter"] = False  # Muon refuses it
    model = build_model()
    optimizer = None
    if "torch" in chosen:
        options = {key: value for key, value in chosen.items() if key != "torch"}
        optimizer = getattr(torch.optim, chosen["torch"])(model.parameters(), **options)
    elif "plain" in chosen:
        optimizer = build_lion(model.parameters())
    else:
        config["optimizer"] = chosen["config"]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else model.parameters(),
        optimizer=optimizer,
        config=config,
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        loss = engine(torch.rand(3, 6, generator=generator).bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, tag="step")


def main() -> None:
    out, *names = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    record({"ranks": 2, "names": names or [*OPTIMIZERS]}, Path(out), train)


if __name__ == "__main__":
    main()
