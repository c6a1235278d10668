"""Make the checkpoint that `restride demo` converts, and the digests it is compared with.

    python scripts/make_demo_sample.py [FOLDER]

The checkpoint is written by the real DeepSpeed engine: a CodeGen model of one layer with random
weights, two optimizer steps, two tensor-parallel times two data-parallel ranks, ZeRO-1, bfloat16.
The digests come from DeepSpeed's own `ds_to_universal`, and before they are believed, the fused
QKV weight is cut again with the function that DeepSpeed cut it with, and compared with the shards
in the files.

Needs torch, deepspeed and transformers (made with 2.13.0, 0.19.8, 5.24.0), and half a minute.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ranks

_SAMPLE = Path(__file__).resolve().parents[1] / "src" / "restride" / "cli" / "sample"
_TP, _DP = 2, 2
_HIDDEN, _HEADS, _VOCAB = 32, 8, 32
_QKV = "transformer.h.0.attn.qkv_proj.weight"
_ENGINE = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10**9,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"autotp_size": _TP},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main() -> None:
    """Write the sample and its digests, replacing what is there."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else _SAMPLE
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, "written")
        os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        _train(written)
        universal = Path(scratch, "universal")
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(written / "step")]
        command += ["--output_folder", str(universal / "step")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        arrays = _read_universal(universal / "step" / "zero")
        _require_the_cut_of_the_engine(written / "step", arrays)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(written, target, ignore=shutil.ignore_patterns("zero_to_*.py"))
        _write_expected(target / "expected.json", arrays)
    nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {nbytes} bytes")


def _train(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    meeting = folder.with_name("meeting")
    processes = [
        context.Process(target=_run_rank, args=(rank, meeting, folder)) for rank in range(_TP * _DP)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank of the engine failed; its traceback is above")


def _run_rank(rank: int, meeting: Path, folder: Path) -> None:
    ranks.join(rank, _TP * _DP, meeting)
    import deepspeed
    import torch
    from transformers import CodeGenConfig, CodeGenForCausalLM

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    sizes = {"n_embd": _HIDDEN, "n_head": _HEADS, "n_layer": 1, "vocab_size": _VOCAB}
    model = CodeGenForCausalLM(
        CodeGenConfig(**sizes, n_positions=64, n_ctx=64, rotary_dim=4, embd_pdrop=0, resid_pdrop=0)
    )
    # transformers 5.24 brings a plan that cuts the fused weight as plain rows, through its heads.
    # Without it DeepSpeed uses its own rule for CodeGen.
    model.config.base_model_tp_plan = None
    type(model)._tp_plan = {}
    for module in model.modules():
        if hasattr(module, "_tp_plan"):
            module._tp_plan = {}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_ENGINE
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(0, _VOCAB, (1, 16), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="step")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _read_universal(folder: Path) -> dict[str, dict[str, object]]:
    """Read full fp32 tensors by parameter and state, and the weight as trained: rounded once."""
    import torch

    arrays: dict[str, dict[str, object]] = {}
    for parameter in sorted(path for path in folder.iterdir() if path.is_dir()):
        states = {
            state: torch.load(parameter / f"{state}.pt", weights_only=False)["param"]
            for state in ("fp32", "exp_avg", "exp_avg_sq")
        }
        arrays[parameter.name] = {"weight": states["fp32"].to(torch.bfloat16), **states}
    return arrays


def _require_the_cut_of_the_engine(step: Path, arrays: dict[str, dict[str, object]]) -> None:
    """Cut the full fused weight with DeepSpeed's own function and compare with the files."""
    import torch
    from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    block = type("CodeGenBlock", (torch.nn.Module,), {"__str__": lambda _: "CodeGenBlock"})()
    meta = AutoTPMeta(num_kv_heads=_HEADS, num_attention_heads=_HEADS, n_embd=_HIDDEN)
    for rank in range(_TP):
        path = step / f"mp_rank_{rank:02d}_model_states.pt"
        stored = torch.load(path, weights_only=False)["module"][_QKV]
        cut = prepare_tp_fused_qkvw(block, arrays[_QKV]["weight"], _TP, rank, meta)
        if not torch.equal(stored, cut):
            sys.exit(f"rank {rank}: the fused weight in the file is not what DeepSpeed would cut")


def _write_expected(path: Path, arrays: dict[str, dict[str, object]]) -> None:
    import torch

    digests = {
        f"{name}/{state}": hashlib.sha256(
            array.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, states in arrays.items()
        for state, array in states.items()
    }
    content = {"made_with": "scripts/make_demo_sample.py", "sha256": digests}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
