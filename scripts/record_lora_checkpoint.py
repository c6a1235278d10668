"""Save what the Trainer leaves of a LoRA run: a real DeepSpeed checkpoint without the frozen base.

    python scripts/record_lora_checkpoint.py

Writes tests/data/deepspeed_lora/z2/, about 20 kB: the checkpoint, and in `reference/` the adapter
as PEFT itself saves it after the same steps. Needs torch, deepspeed, transformers and peft (seen
with 2.13.0, 0.19.8, 5.24.0 and 0.21.2); CPU and gloo, some seconds.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from record_deepspeed_checkpoints import build_llama, record

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "deepspeed_lora"


def train(rank: int, variant: dict[str, Any], out: str) -> None:
    """Train two steps of the adapters and save, as the Trainer does where it has a PEFT model."""
    import deepspeed
    import peft
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    chosen = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(build_llama(), chosen)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[each for each in model.parameters() if each.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": variant["stage"]},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        tokens = torch.randint(0, 8, (2, 4), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, tag="step", exclude_frozen_parameters=True)
    if not rank:
        model.save_pretrained(f"{out}/reference")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Record it."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")
        record({"ranks": 2, "stage": 2}, saved, train)
        for unwanted in (*saved.glob("*.py"), *saved.glob("reference/*.md")):
            unwanted.unlink()
        shutil.rmtree(FOLDER / "z2", ignore_errors=True)
        shutil.copytree(saved, FOLDER / "z2")


if __name__ == "__main__":
    main()
