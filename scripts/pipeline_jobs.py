"""Train a pipeline with the real DeepSpeed engine: jobs of `deepspeed_jobs.py`.

    {"pipeline": {"layers": ["embed", "block", "norm"], "pp": 2, "dp": 1}, "world": 2, "steps": 2}

`pipeline` is a variant of `record_pipeline_checkpoints.py`, whose tiny layers it is made of, with
the ``method`` by which they are dealt out to the stages. All else is as in any other job: it loads,
saves what it loaded, trains, saves, and trains on. Every data-parallel rank gets the same batches.
"""

from __future__ import annotations

from typing import Any

__all__ = ["train"]


def train(rank: int, job: dict[str, Any]) -> list[str]:
    """One rank of one job; returns its losses, exact, in hexadecimal."""
    import torch

    from record_pipeline_checkpoints import start

    variant = dict(job["pipeline"])
    config = {"zero_optimization": {"stage": job.get("zero", 1)}, **variant.get("config", {})}
    if job.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    engine, _ = start(rank, {**variant, "config": config})
    if job.get("load"):
        path, _ = engine.load_checkpoint(job["load"])
        if path is None:
            raise RuntimeError("the engine loaded nothing")
    if job.get("resave"):
        engine.save_checkpoint(job["resave"], tag="step", client_state={"epoch": 3})
    endless = batches(engine.module, is_embedded=variant["layers"][0].startswith("embed"))
    for _ in range(job.get("skip", 0) * engine.gradient_accumulation_steps()):
        next(endless)
    losses: list[str] = []
    first, last = job.get("steps", 0), job.get("steps", 0) + job.get("more", 0)
    for step in range(last):
        if step == first and job.get("save"):
            engine.save_checkpoint(job["save"], tag="step", client_state={"epoch": 3})
        losses.append(float(engine.train_batch(endless)).hex())
    if job.get("save") and first == last:
        engine.save_checkpoint(job["save"], tag="step", client_state={"epoch": 3})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return losses


def batches(module: Any, *, is_embedded: bool) -> Any:
    """The same numbers on every rank, without end."""
    import torch

    from record_pipeline_checkpoints import HIDDEN, VOCABULARY

    numbers = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, 4), generator=numbers)
        hidden = torch.rand(2, 4, HIDDEN, generator=numbers).to(dtype)
        yield tokens if is_embedded else hidden, torch.zeros(2)
