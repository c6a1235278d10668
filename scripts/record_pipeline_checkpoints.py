"""Record tiny pipeline-parallel checkpoints of the real DeepSpeed engine.

    python scripts/record_pipeline_checkpoints.py [NAME ...]

Writes tests/data/deepspeed_pipeline/NAME/, about 40 kB each, with a `reference_ppP_tpT.safetensors`
of every stage and tensor-parallel rank: what the running engine gathers of its parameters and their
states over the data-parallel ranks. Needs torch and deepspeed (seen with 2.13.0 and 0.19.8); CPU
and gloo, 10 to 15 s for each.

With tensor parallelism the layers cut themselves, as those of Megatron-DeepSpeed do, and say how in
`universal_checkpoint_info`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from deepspeed_jobs import allow_fp16
from record_deepspeed_checkpoints import BF16, FUSED, gather, look_up, record

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "deepspeed_pipeline"
HIDDEN, VOCABULARY, INNER = 6, 11, 8
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}

# Every run: ranks of each kind, and what the layers and the configuration have of their own.
VARIANTS: dict[str, dict[str, Any]] = {
    # The last stage uses the embedding through a function, and stores no layer for it.
    "tied_z1": {
        "pp": 2,
        "dp": 2,
        "groups": True,
        "frozen": True,
        "layers": ("embed", "block", "function", "block", "norm", "embed_as_head"),
        "config": {"zero_optimization": {"stage": 1}, **BF16},
    },
    # On three ranks, the first stage cuts the embedding in two, and the last does not cut it.
    "uneven_z1": {
        "pp": 2,
        "dp": 3,
        "layers": ("embed", "block", "block", "norm", "embed_as_head"),
        "config": {"zero_optimization": {"stage": 1}, **BF16},
    },
    # In bf16 the optimizer of a pipeline saves files of ZeRO without ZeRO, and the models no shape.
    "bf16_z0": {
        "pp": 3,
        "dp": 1,
        "layers": ("tied_block", "norm", "tied_block", "block", "tied_block", "norm"),
        "config": {"zero_optimization": {"stage": 0}, **BF16},
    },
    "fp32_z0": {
        "pp": 2,
        "dp": 1,
        "layers": ("embed", "block", "norm"),
        "config": {"zero_optimization": {"stage": 0}},
    },
    # Each stage numbers the embedding first, and the last one has no file of it.
    "fp32_tied_z0": {
        "pp": 2,
        "dp": 1,
        "groups": True,
        "layers": ("embed", "block", "function", "block", "norm", "embed_as_head"),
        "config": {"zero_optimization": {"stage": 0}},
    },
    "fp32_tensor_z0": {
        "pp": 2,
        "dp": 1,
        "tp": 2,
        "layers": ("embed", "block", "block", "norm"),
        "config": {"zero_optimization": {"stage": 0}},
    },
    # One master copy of each parameter; shapes do not tell which of the blocks is frozen.
    "fp16_z0": {
        "pp": 2,
        "dp": 1,
        "frozen": True,
        "layers": ("embed", "block", "block", "norm"),
        "config": {"zero_optimization": {"stage": 0}, **FP16},
    },
    # One flat buffer for each group, and nothing that says where a parameter begins.
    "fp16_flat_z0": {
        "pp": 2,
        "dp": 1,
        "tp": 2,
        "groups": True,
        "frozen": True,
        "layers": ("embed", "block", "function", "block", "norm", "embed_as_head"),
        "config": {"zero_optimization": {"stage": 0}, **FP16, **FUSED},
        "whole": (r"^tied_modules\.embed\.weight$", r"^\d+\.scale$", r"^4\.weight$", r"^4\.bias$"),
    },
    "tensor_z1": {
        "pp": 2,
        "dp": 1,
        "tp": 2,
        "layers": ("embed", "block", "block", "norm"),
        "config": {"zero_optimization": {"stage": 1}, **BF16},
    },
    # One stage, and the same module in two layers, each of which is stored.
    "shared_z1": {
        "pp": 1,
        "dp": 2,
        "layers": ("embed", "tied_block", "norm", "tied_block"),
        "config": {"zero_optimization": {"stage": 1}, **BF16},
    },
}
# What tensor-parallel ranks have whole, beside what every block has so.
WHOLE = (r"^0\.weight$", r"^3\.weight$", r"^3\.bias$")
WHOLE_OF_BLOCKS = (r"^\d+\.norm\.weight$", r"^\d+\.norm\.bias$", r"^\d+\.down\.bias$")


def build_layers(variant: dict[str, Any], tp_rank: int, group: Any) -> list[Any]:  # noqa: C901
    """Build what the pipeline is made of."""
    import torch
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from torch import nn

    tp = variant.get("tp", 1)

    class Whole(torch.autograd.Function):
        """Every rank's input is the same; every rank has a part of its gradient."""

        @staticmethod
        def forward(_: Any, hidden: Any) -> Any:
            return hidden.clone()

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            total = grad.clone()
            torch.distributed.all_reduce(total, group=group)
            return total

    class Added(torch.autograd.Function):
        """Every rank has a part of the output."""

        @staticmethod
        def forward(_: Any, hidden: Any) -> Any:
            total = hidden.clone()
            torch.distributed.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            return grad

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Every rank draws the whole and keeps its part.
            up, down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
            own = slice(tp_rank * INNER // tp, (tp_rank + 1) * INNER // tp)
            self.norm = nn.LayerNorm(HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, INNER // tp), nn.Linear(INNER // tp, HIDDEN)
            self.up.weight.data, self.up.bias.data = (
                up.weight.data[own].clone(),
                up.bias.data[own].clone(),
            )
            self.down.weight.data = down.weight.data[:, own].clone()
            self.down.bias.data = down.bias.data
            self.register_buffer("positions", torch.arange(3))
            if variant.get("frozen"):
                self.scale = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
            for parameter in (self.up.weight, self.up.bias, self.down.weight):
                parameter.model_parallel = tp > 1

        def forward(self, hidden: Any) -> Any:
            normed = self.norm(hidden) * getattr(self, "scale", 1)
            if tp == 1:
                return hidden + self.down(torch.relu(self.up(normed)))
            inner = torch.relu(self.up(Whole.apply(normed)))
            return hidden + Added.apply(inner @ self.down.weight.t()) + self.down.bias

    def head(module: Any, hidden: Any) -> Any:
        return hidden @ module.weight.t()

    made = {
        "embed": lambda: LayerSpec(nn.Embedding, VOCABULARY, HIDDEN),
        "embed_tied": lambda: TiedLayerSpec("embed", nn.Embedding, VOCABULARY, HIDDEN),
        "embed_as_head": lambda: TiedLayerSpec(
            "embed", nn.Embedding, VOCABULARY, HIDDEN, forward_fn=head
        ),
        "block": lambda: LayerSpec(Block),
        "tied_block": lambda: TiedLayerSpec(
            "block", Block, tied_weight_attr=[name for name, _ in Block().named_parameters()]
        ),
        "norm": lambda: LayerSpec(nn.LayerNorm, HIDDEN),
        "function": lambda: lambda hidden: hidden,
    }
    names = variant["layers"]
    if "embed_as_head" in names:
        names = ["embed_tied" if name == "embed" else name for name in names]
    return [made[name]() for name in names]


def start(rank: int, variant: dict[str, Any]) -> tuple[Any, Any]:
    """Make the engine, and say where in the pipeline this process is."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import (
        PipeDataParallelTopology,
        PipeModelDataParallelTopology,
    )

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    if "fp16" in variant["config"]:
        allow_fp16()
    pp, dp, tp = variant["pp"], variant["dp"], variant.get("tp", 1)
    topology = (
        PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
        if tp > 1
        else PipeDataParallelTopology(num_pp=pp, num_dp=dp)
    )
    groups = [torch.distributed.new_group(ranks) for ranks in topology.get_axis_comm_lists("model")]
    place = topology.get_coord(rank)
    tp_rank = getattr(place, "model", 0)
    group = groups[rank // tp] if groups else None
    module = PipelineModule(
        layers=build_layers(variant, tp_rank, group),
        topology=topology,
        loss_fn=lambda hidden, _: hidden.float().pow(2).mean(),
        partition_method=variant.get("method", "uniform"),
        # The method "parameters" has numbers that no seed may be.
        seed_layers=variant.get("method") != "parameters",
    )
    if tp > 1:
        whole = [*WHOLE_OF_BLOCKS, *variant.get("whole", WHOLE)]
        module.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": whole,
            "parameter_with_row_parallelism_patterns": [r"^\d+\.down\.weight$"],
        }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if variant.get("groups"):
        trained = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **variant["config"],
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=trained, config=config)
    return engine, place


def train(rank: int, variant: dict[str, Any], out: str) -> None:
    """Train two batches and save, in one process."""
    import torch

    engine, place = start(rank, variant)
    generator = torch.Generator().manual_seed(place.data)
    is_embedded = variant["layers"][0] == "embed"
    dtype = next(engine.module.parameters()).dtype

    def batches() -> Any:
        while True:
            tokens = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
            hidden = torch.rand(2, 4, HIDDEN, generator=generator).to(dtype)
            yield tokens if is_embedded else hidden, torch.zeros(2)

    for _ in range(2):
        engine.train_batch(batches())
    engine.save_checkpoint(out, tag="step", client_state={"epoch": 3})
    save_reference(engine, place, out)


def resume(rank: int, variant: dict[str, Any], out: str) -> None:
    """Load a checkpoint of other ranks, and save what the engine holds then."""
    engine, place = start(rank, variant)
    path, client = engine.load_checkpoint(variant["load"])
    if path is None or client["epoch"] != 3:
        message = f"the engine loaded {path}, with {client}"
        raise RuntimeError(message)
    save_reference(engine, place, out)


def save_reference(engine: Any, place: Any, out: str) -> None:
    """Save what the engine says that its parameters and states are; one file for each stage."""
    import torch
    from safetensors.torch import save_file

    if hasattr(engine.optimizer, "fp32_groups_flat_partition") or engine.zero_optimization():
        if engine.zero_optimization():
            # Fragments are linked after the step of the first group, without those of the others.
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        reference = gather(engine, ["exp_avg", "exp_avg_sq"])
    elif hasattr(engine.optimizer, "fp16_groups"):
        reference = look_up(engine, ["exp_avg", "exp_avg_sq"])
    else:
        state = engine.optimizer.state
        reference = {
            f"{name}/{key}": value.detach().clone()
            for name, parameter in engine.module.named_parameters()
            for key, value in {"fp32": parameter, **state[parameter]}.items()
        }
    if place.data == 0:
        Path(out).mkdir(exist_ok=True)
        tp = getattr(place, "model", 0)
        save_file(reference, f"{out}/reference_pp{place.pipe}_tp{tp}.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    for name in sys.argv[1:] or VARIANTS:
        variant = VARIANTS[name]
        ranks = variant["pp"] * variant["dp"] * variant.get("tp", 1)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "saved")
            record({**variant, "ranks": ranks}, saved, train)
            for script in saved.glob("*.py"):
                script.unlink()
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            shutil.copytree(saved, FOLDER / name)
        nbytes = sum(file.stat().st_size for file in (FOLDER / name).rglob("*") if file.is_file())
        print(json.dumps({"name": name, "nbytes": nbytes}))


if __name__ == "__main__":
    main()
