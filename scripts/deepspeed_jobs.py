"""Train with the real DeepSpeed engine on the CPU: a server that reads and answers JSON.

Each line on stdin is a job, each line on stdout its answer, in the same order::

    {"model": "llama", "world": 2, "tp": 2, "zero": 1, "steps": 2, "save": "OUT", "more": 2}
    {"ok": true, "losses": ["0x1.3p+2", ...]}

    {"peer": ["OUT/step", "UNIVERSAL/step"], "inject": true}
    {"ok": true, "losses": []}

    {"script": ["record_optimizer_checkpoints", "train"], "variant": {...}, "out": "OUT"}
    {"ok": true, "losses": []}

The second kind runs DeepSpeed's own `ds_to_universal`, the third a function of one of the scripts
on each of `world` ranks; one with a ``pipeline`` trains that (`pipeline_jobs.py`). The first starts
`world` processes, builds a tiny model with random weights (nothing is downloaded), makes an engine
of it, loads (`load`, and `universal` where that is a universal folder), skips `skip` batches, saves
what it loaded (`resave`), trains `steps` batches, saves (`save`, with the model's ``config.json``
beside it), and trains `more`. Losses are exact, in hexadecimal.

With `zero_init` the model is made under ``deepspeed.zero.Init``. A `dtype` of ``fp16`` is trained
in as well, of which DeepSpeed thinks that few CPUs can. Lamb and the fused Adam take their steps by
torch.

Models with DeepSpeed's own layers of experts have tensor-parallel ranks of their own
(`native_moe`), which cut them with `cut_experts`, and `ep` may list a number of expert-parallel
ranks for each layer.

Parameters whose names have one of the parts in `freeze` are frozen; `vectors` are settings of the
optimizer for a group of the parameters with one dimension.

Processes are forked from one that has imported torch, DeepSpeed and transformers once, which makes
a job a matter of half a second instead of ten. Every rank gets the same batches, so that the
gradients do not depend on the number of data-parallel ranks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import native_moe
import ranks

# A rank that had to import them itself, most of them at the first use of a model, would take two
# seconds for that, and a tenth of one for its job.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.pipe",
    "transformers.models.llama.modeling_llama",
]
SECONDS = 180
# Other ranks that fail mostly do so at once, or wait for ever.
LATER_SECONDS = 2
HIDDEN, HEADS, KV_HEADS = 64, 8, 4
LAYERS, VOCABULARY, POSITIONS = 2, 128, 64
# Their forward pass fails under AutoTP; a loss on the parameters trains them all the same.
WITHOUT_FORWARD = {"bloom", "falcon", "mpt"}
# transformers' plan cuts CodeGen's fused weight against its heads.
WITHOUT_PLAN = {"codegen"}
# Layers of DeepSpeed's own mixture of experts, with an expert beside them or not.
NATIVE = {"native_moe": False, "native_residual_moe": True}


def build(name: str, hidden: int, heads: int, kv_heads: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    llama = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
    }
    gpt = {
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_embd": hidden,
        "n_layer": LAYERS,
        "n_head": heads,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
    }
    wide = {"intermediate_size": 2 * hidden}
    bloom = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "n_layer": LAYERS,
        "n_head": heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    opt = {
        **common,
        "ffn_dim": 2 * hidden,
        "max_position_embeddings": POSITIONS,
        "dropout": 0.0,
        "word_embed_proj_dim": hidden,
    }
    falcon = {
        **common,
        "new_decoder_architecture": True,
        "num_kv_heads": kv_heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    mpt = {
        "vocab_size": VOCABULARY,
        "d_model": hidden,
        "n_heads": heads,
        "n_layers": LAYERS,
        "expansion_ratio": 2,
        "max_seq_len": POSITIONS,
    }
    mixture = {"intermediate_size": hidden, "num_local_experts": 4, "num_experts_per_tok": 2}
    sparse = {
        "intermediate_size": hidden,
        "moe_intermediate_size": hidden // 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {**llama, **wide}),
        "llama_tied": ("Llama", {**llama, **wide, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2", {**llama, **wide}),
        "codegen": ("CodeGen", {**gpt, "n_ctx": POSITIONS, "rotary_dim": 4}),
        "gptbigcode": ("GPTBigCode", {**gpt, "multi_query": True}),
        "gpt2": ("GPT2", gpt),
        "opt": ("OPT", opt),
        "bloom": ("Bloom", bloom),
        "falcon": ("Falcon", falcon),
        "gptneox": ("GPTNeoX", {**common, **wide, "max_position_embeddings": POSITIONS}),
        "mpt": ("Mpt", mpt),
        "glm": ("Glm", {**llama, **wide, "head_dim": 8, "pad_token_id": 0}),
        "mixtral": ("Mixtral", {**llama, **mixture}),
        "qwen3moe": ("Qwen3Moe", {**llama, **sparse}),
    }
    family, settings = known[name]
    if name in {"mixtral", "qwen3moe"}:
        repair_registry()
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}{head}")(config)


def repair_registry() -> None:
    """AutoEP asks transformers' registry in a way that version 5.24 does not answer."""
    import transformers.utils.output_capturing as capturing

    registry: Any = capturing._CanRecordRegistry
    if getattr(registry, "is_repaired", False):
        return

    def named(key: Any) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        found = dict.get(self, named(key))
        return found if found is not None else ({} if default is None else default)

    def put(self: Any, key: Any, value: Any) -> None:
        dict.__setitem__(self, named(key), value)

    registry.get, registry.__setitem__, registry.is_repaired = get, put, True


def hide_plan(model: Any) -> None:
    model.config.base_model_tp_plan = None
    for module in [type(model), *model.modules()]:
        if hasattr(module, "_tp_plan"):
            module._tp_plan = {}


def settings_of(job: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": job["zero"]}
    if job["zero"] == 3:
        zero["stage3_param_persistence_threshold"] = 0
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "checkpoint": {"load_universal": True} if job.get("universal") else {},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if job.get("dtype", "bf16") != "fp32":
        settings[job.get("dtype", "bf16")] = {"enabled": True}
    if job.get("tp", 1) > 1 and job["model"] not in NATIVE:
        settings["tensor_parallel"] = {"autotp_size": job["tp"]}
    if job.get("ep") and job["model"] not in NATIVE:
        settings["expert_parallel"] = {"enabled": True, "autoep_size": job["ep"]}
    for key, value in job.get("config", {}).items():
        merged = settings.get(key)
        settings[key] = {**merged, **value} if isinstance(merged, dict) else value
    return settings


def model_of(rank: int, job: dict[str, Any], mpu: Any = None) -> Any:
    if job["model"] in NATIVE:
        ep = job.get("ep", 1)
        return native_moe.build(
            VOCABULARY,
            rank,
            tuple(ep) if isinstance(ep, list) else ep,
            residual=NATIVE[job["model"]],
            is_data_first=bool(job.get("config", {}).get("use_data_before_expert_parallelism")),
            mpu=mpu,
            is_cut=bool(job.get("cut_experts")),
        )
    model = build(
        job["model"],
        job.get("hidden", HIDDEN),
        job.get("heads", HEADS),
        job.get("kv_heads", KV_HEADS),
    )
    if job["model"] in WITHOUT_PLAN or job.get("without_plan"):
        hide_plan(model)
    return model


def model_under_init(rank: int, job: dict[str, Any]) -> Any:
    """Make the model with every parameter cut at once, as `from_pretrained` does for ZeRO-3."""
    # zero.Init replaces functions of torch that this has to find as they were.
    import torch._dynamo  # noqa: F401 - imported for what it keeps
    from deepspeed import zero

    with zero.Init(config_dict_or_path=settings_of(job)):
        return model_of(rank, job)


def train(rank: int, job: dict[str, Any]) -> list[str]:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    allow(job)
    tp = job.get("tp", 1) if job["model"] in NATIVE else 1
    mpu = native_moe.Mpu(rank, tp) if tp > 1 else None
    model = model_under_init(rank, job) if job.get("zero_init") else model_of(rank, job, mpu)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained(model, job), config=settings_of(job), mpu=mpu
    )
    if job.get("load"):
        path, _ = engine.load_checkpoint(job["load"])
        if path is None:
            raise RuntimeError("the engine loaded nothing")
    if job.get("resave"):
        engine.save_checkpoint(job["resave"], tag="step")
    numbers = torch.Generator().manual_seed(1)
    losses: list[str] = []
    first, last = job.get("steps", 0), job.get("steps", 0) + job.get("more", 0)
    for step in range(-job.get("skip", 0), last):
        if step == first and job.get("save"):
            save(engine, job["save"], rank)
        tokens = torch.randint(0, VOCABULARY, (1, 16), generator=numbers)
        if step < 0:
            continue
        if job["model"] in WITHOUT_FORWARD:
            loss = sum((p.float() ** 2).mean() for p in engine.module.parameters())
        else:
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    if job.get("save") and first == last:
        save(engine, job["save"], rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return losses


def allow(job: dict[str, Any]) -> None:
    """Let a job have what DeepSpeed has for GPUs alone."""
    if job.get("dtype") == "fp16":
        allow_fp16()
    if settings_of(job)["optimizer"]["type"] == "Lamb":
        allow_lamb()


def allow_fp16() -> None:
    """Train in fp16 whatever this CPU has for it: torch computes it all the same, only slower."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True


def allow_lamb() -> None:
    """Let torch take the steps of DeepSpeed's Lamb, of which there is a kernel for GPUs alone."""
    import torch
    from deepspeed.ops.lamb import fused_lamb

    class Kernel:
        def load(self) -> Any:
            return self

        def lamb(self, *numbers: Any) -> Any:
            master, half, first, second, grad, rate, beta1, beta2, most, least, *others = numbers
            eps, scale, _, _, _, decay = others
            grad = grad.float() / scale
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = first / (second.sqrt() + eps) + decay * master
            trust = torch.clamp(master.norm() / update.norm(), least, most).nan_to_num(1.0)
            master.sub_(update * rate * trust)
            if half.numel():
                half.data.copy_(master)
            return trust

    fused_lamb.FusedLambBuilder = Kernel


def replace_fused_adam() -> None:
    """Let torch take the steps of DeepSpeed's fused Adam: its kernel takes a compiler a minute."""
    from deepspeed.ops.adam import fused_adam

    class Kernel:
        def load(self) -> Any:
            return self

        def multi_tensor_adam(self, _: int, __: Any, tensors: Any, *numbers: Any) -> None:
            rate, beta1, beta2, eps, step, is_decoupled, is_corrected, decay = numbers
            bias1, bias2 = (1 - beta**step if is_corrected else 1 for beta in (beta1, beta2))
            for grads, values, first, second in zip(*tensors, strict=True):
                own, grad = values.float(), grads.float()
                if not is_decoupled:
                    grad = grad + decay * own
                first.mul_(beta1).add_(grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = first.float() / bias1 / ((second.float() / bias2).sqrt() + eps)
                if is_decoupled:
                    update += decay * own
                values.data.copy_(own - rate * update)

    fused_adam.FusedAdamBuilder = Kernel


def trained(model: Any, job: dict[str, Any]) -> Any:
    """What the optimizer gets: all that is not frozen, vectors in a group of their own if asked."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in job.get("freeze", []))
    if "vectors" not in job:
        return model.parameters()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], **job["vectors"]}]
    for parameter in model.parameters():
        groups[parameter.dim() == 1]["params"].append(parameter)
    return groups


def save(engine: Any, folder: str, rank: int) -> None:
    engine.save_checkpoint(folder, tag="step")
    if rank == 0:
        Path(folder, "config.json").write_text(engine.module.config.to_json_string(), "utf-8")


def convert_as_peer(source: str, out: str, *, inject: bool) -> list[str]:
    """Without the injected state the peer refuses checkpoints of data parallelism alone."""
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

    ds_to_universal(
        argparse.Namespace(
            input_folder=source,
            output_folder=out,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=inject,
        )
    )
    return []


def run_rank(rank: int, job: dict[str, Any], meeting: Path, answers: Any) -> None:
    # What DeepSpeed prints is not an answer.
    os.dup2(2, 1)
    try:
        losses = work(rank, job, meeting)
    except BaseException as error:  # noqa: BLE001 - the server has to hear of it, whatever it is
        trace = traceback.format_exc()
        answers.put({"ok": False, "rank": rank, "error": f"{error!r}", "trace": trace})
        answers.close()
        answers.join_thread()
        os._exit(1)
    if rank == 0:
        answers.put({"ok": True, "losses": losses})


def work(rank: int, job: dict[str, Any], meeting: Path) -> list[str]:
    if "peer" in job:
        return convert_as_peer(*job["peer"], inject=job.get("inject", True))
    ranks.join(rank, job.get("world", 1), meeting)
    replace_fused_adam()
    if "script" in job:
        module, function = job["script"]
        getattr(importlib.import_module(module), function)(rank, job["variant"], job["out"])
        return []
    if "pipeline" in job:
        import pipeline_jobs

        return pipeline_jobs.train(rank, job)
    return train(rank, job)


def run(context: Any, job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_at(Path(folder, "meeting"), context, job)


def run_at(meeting: Path, context: Any, job: dict[str, Any]) -> dict[str, Any]:
    answers = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, job, meeting, answers))
        for rank in range(job.get("world", 1))
    ]
    for process in processes:
        process.start()
    try:
        answer: dict[str, Any] = answers.get(timeout=job.get("seconds", SECONDS))
    except queue.Empty:
        answer = {"ok": False, "error": "timeout"}
    answer = first_of(answer, answers, len(processes))
    for process in processes:
        if answer["ok"]:
            process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
    return answer


def first_of(answer: dict[str, Any], answers: Any, count: int) -> dict[str, Any]:
    """Of the ranks that fail, what the lowest one says: which is heard first is chance."""
    heard = [answer]
    with suppress(queue.Empty):
        while "rank" in answer and len(heard) < count:
            heard.append(answers.get(timeout=LATER_SECONDS))
    failed = [other for other in heard if "rank" in other]
    return min(failed, key=lambda other: other["rank"], default=answer)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Muon would compile its iteration in each process, for half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for line in sys.stdin:
        print(json.dumps(run(context, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
