"""Record how the real frameworks cut tensors, as test vectors for machines that lack them.

    python scripts/record_partitions.py            write tests/data/partitions/*.json
    python scripts/record_partitions.py --check    compare them with what the framework does now

Each kind is a function that runs the framework's own code on int64 markers, one shard after the
other. The interop tests import this file, so a kind that is added here is both recorded and tested
on many more shapes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "partitions"
FORMAT = "restride-partitions/1"

Arguments = dict[str, Any]
Shards = list["torch.Tensor"]


class Refused(Exception):  # noqa: N818 - not an error: the answer of the framework
    """The framework refuses this case, or cuts it so that elements are lost."""


# What a partition function raises on numbers that it was not made for.
_REFUSALS = (
    AssertionError,
    AttributeError,
    IndexError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


def load_frameworks() -> SimpleNamespace:
    """Import torch and DeepSpeed once, quietly, for the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import torch
        from deepspeed.checkpoint import affine, autoep_affine
        from deepspeed.module_inject import fusedqkv_utils, layers, tp_shard
        from deepspeed.runtime.zero import stage_1_and_2
        from torch.distributed.fsdp._fully_shard import _fsdp_common

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return SimpleNamespace(
        torch=torch,
        affine=affine,
        autoep=autoep_affine,
        fused=fusedqkv_utils,
        layers=layers,
        tp_shard=tp_shard,
        zero=stage_1_and_2,
        fsdp=_fsdp_common,
        versions={"deepspeed": deepspeed.__version__, "torch": torch.__version__},
    )


_LOADED: list[SimpleNamespace] = []


def real() -> SimpleNamespace:
    if not _LOADED:
        _LOADED.append(load_frameworks())
    return _LOADED[0]


def markers(shape: Sequence[int]) -> torch.Tensor:
    return real().torch.arange(prod(shape), dtype=real().torch.int64).reshape(tuple(shape))


class _Module:
    """A module as the framework sees it: its printed name is all that is looked at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attn = SimpleNamespace(split_size=0)

    def __str__(self) -> str:
        return self.name


def _meta(arguments: Arguments) -> Any:
    return real().tp_shard.AutoTPMeta(
        num_kv_heads=arguments.get("heads"),
        num_attention_heads=arguments.get("query_heads"),
        n_embd=arguments.get("hidden"),
        tp_grain_size=arguments.get("grain", 1),
    )


def _fused(block: str) -> Callable[[Sequence[int], int, Arguments], Shards]:
    """`prepare_tp_fused_qkvw`, and the path of the layer class where it is another one."""

    def cut(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
        ds, module = real(), _Module(block)
        full, meta = markers(shape), _meta(arguments)
        shards = [
            ds.fused.prepare_tp_fused_qkvw(module, full, ranks, rank, meta) for rank in range(ranks)
        ]
        sizes = ds.fused.fused_qkv_subparam_sizes(module, tuple(shape), meta)
        if sizes is not None:
            widths = ds.layers._subparam_shard_widths(sizes, ranks, meta)
            for rank in range(ranks):
                ds.fused.set_fused_qkv_shard_state(module, widths, rank)
                layer = ds.layers._partition_logical_tensor(
                    full, 0, ranks, rank, widths, subparam_sizes=sizes
                )
                if not ds.torch.equal(layer, shards[rank]):
                    raise Refused("the layer cuts otherwise than the function")
        return shards

    return cut


def _codegen(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    ds = real()
    if ds.fused.codegen_block_layout(shape[0], ranks, arguments.get("heads")) is None:
        raise Refused("codegen_block_layout describes no such cut")
    return _fused("CodeGenBlock")(shape, ranks, arguments)


def _bigcode(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    if arguments.get("hidden") is not None and arguments["hidden"] >= shape[0]:
        raise Refused("the layer publishes no map without key/value rows")
    return _fused("GPTBigCodeBlock")(shape, ranks, arguments)


def _yuan(*, is_value: bool) -> Callable[[Sequence[int], int, Arguments], Shards]:
    def cut(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
        ds, meta = real(), _meta(arguments)
        # The function wraps its result in a Parameter, which takes no integers. Markers stay
        # exact as doubles.
        full = markers(shape).double()
        if len(shape) > 1:
            weight = [
                ds.fused.shard_value_with_share_qk(full, None, rank, ranks, is_value, meta)[0]
                for rank in range(ranks)
            ]
            return [shard.detach().long() for shard in weight]
        beside = markers((shape[0], 1)).double()
        bias = [
            ds.fused.shard_value_with_share_qk(beside, full, rank, ranks, is_value, meta)[1]
            for rank in range(ranks)
        ]
        return [shard.detach().long() for shard in bias]

    return cut


def _sub_params(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    layers, meta = real().layers, _meta(arguments)
    sizes, dim = arguments["sizes"], arguments.get("dim", 0)
    widths = layers._subparam_shard_widths(sizes, ranks, meta)
    return [
        layers._partition_logical_tensor(
            markers(shape), dim, ranks, rank, widths, subparam_sizes=sizes
        )
        for rank in range(ranks)
    ]


def _gate_up(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    layers, half = real().layers, shape[0] // 2
    widths = layers._subparam_shard_widths((half, half), ranks, _meta(arguments), "mlp")
    return [
        layers._partition_logical_tensor(
            markers(shape), 0, ranks, rank, widths, subparam_sizes=(half, half)
        )
        for rank in range(ranks)
    ]


def _conv1d(name: str) -> Callable[[Sequence[int], int, Arguments], Shards]:
    def cut(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
        ds, shards = real(), []
        for rank in range(ranks):
            layer = SimpleNamespace(
                tp_world_size=ranks,
                tp_index=rank,
                tp_meta=_meta(arguments),
                name="c_proj",
                move=lambda shard: shard,
            )
            weight = ds.torch.nn.Parameter(markers(shape), requires_grad=False)
            getattr(ds.layers, name)._tp_partition(layer, [weight])
            shards.append(weight.data)
        return shards

    return cut


def _experts(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    autoep = real().autoep
    placement = [list(ids) for ids in arguments["placement"]]
    if len(placement) != ranks:
        raise Refused("one list per rank")
    descriptor = autoep.make_autoep_placement_descriptor(shape[0], placement)
    target = autoep.autoep_placement_to_affine_map(descriptor, shape)
    return [autoep.extract_autoep_rank_tensor(markers(shape), target, r) for r in range(ranks)]


def _chunked(shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    fsdp, full, dim = real().fsdp, markers(shape), arguments.get("dim", 0)
    return [
        chunk.view(fsdp._get_dim_chunked_size(chunk, full.size(), dim))
        if chunk.numel() == 0
        else chunk
        for chunk in fsdp._chunk_with_empty(full, ranks, dim)
    ]


def _zero_flat(_: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    """The flat buffer of a ZeRO-1/2 group; padding is -1, not 0, so that it can be told apart."""
    ds = real()
    numels = [prod(member) for member in arguments["shapes"]]
    align = arguments.get("parameter_alignment", 1)
    members = list((markers((sum(numels),)) + 1).split(numels))
    padding, end = [], 0
    for number, numel in enumerate(numels):
        end += numel
        padding.append(0 if number == len(numels) - 1 else -end % align)
        end += padding[-1]
    optimizer = SimpleNamespace(
        flatten=ds.torch._utils._flatten_dense_tensors, real_dp_process_group=[None]
    )
    flat = ds.zero.DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned(
        optimizer, members, 2 * ranks, param_padding=padding
    )
    return [shard - 1 for shard in flat.chunk(ranks)]


KINDS: dict[str, Callable[[Sequence[int], int, Arguments], Shards]] = {
    "codegen_qkv": _codegen,
    "bloom_qkv": _fused("BloomBlock"),
    "glm_qkv": _fused("BaichuanLayer"),
    "chatglm_qkv": lambda s, r, a: _fused("GLMBlock")(s, r, {**a, "heads": 2}),
    "qwen_qkv": _fused("QWenBlock"),
    "phi3_qkv": _fused("Phi3DecoderLayer"),
    "bigcode_qkv": _bigcode,
    "yuan_value": _yuan(is_value=True),
    "yuan_output": _yuan(is_value=False),
    "gate_up": _gate_up,
    "sub_params": _sub_params,
    "conv1d_column": _conv1d("conv_LinearLayer"),
    "conv1d_row": _conv1d("Conv_LinearALlreduce"),
    "experts": _experts,
    "chunked": _chunked,
    "zero_flat": _zero_flat,
}


def cut(kind: str, shape: Sequence[int], ranks: int, arguments: Arguments) -> Shards:
    """Run the real partition on markers; padding is negative.

    Raises:
        Refused: It raises, or an element is on no rank, or twice on one.
    """
    try:
        shards = KINDS[kind](shape, ranks, arguments)
    except _REFUSALS as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    held = [shard.reshape(-1) for shard in shards]
    held = [shard[shard >= 0] for shard in held]
    if any(shard.unique().numel() != shard.numel() for shard in held):
        raise Refused("an element is twice on one rank")
    total = arguments.get("shapes")
    numel = sum(map(prod, total)) if total else prod(shape)
    if real().torch.cat(held).unique().numel() != numel:
        raise Refused("elements are lost")
    return shards


# For each kind: (shape, ranks, arguments) of what is recorded.
CASES: dict[str, list[tuple[list[int], int, Arguments]]] = {
    "codegen_qkv": [
        ([24 * ranks, 2], ranks, {"heads": heads})
        for ranks in (2, 3, 4, 8)
        for heads in (8 * ranks, 4 * ranks + 1)
    ]
    + [([50, 2], 2, {"heads": 16}), ([48], 2, {"heads": 16}), ([48, 2], 1, {"heads": 16})],
    "bloom_qkv": [
        (shape, ranks, {"heads": heads})
        for ranks in (2, 3, 4, 8)
        for shape, heads in (([72, 2], 8), ([36], 3), ([37, 2], 4))
    ],
    "glm_qkv": [
        (shape, ranks, {"heads": heads})
        for ranks in (2, 3, 4, 8)
        for shape, heads in (([72, 2], 8), ([45], 5), ([37, 2], 4))
    ],
    "chatglm_qkv": [
        (shape, ranks, {"hidden": 12}) for ranks in (2, 3, 4) for shape in ([20, 2], [21], [8, 2])
    ],
    "qwen_qkv": [
        (shape, ranks, {"heads": 3}) for ranks in (2, 3, 4) for shape in ([36, 2], [37, 2])
    ],
    "phi3_qkv": [
        (shape, ranks, {"query_heads": 6, "heads": 3})
        for ranks in (2, 3, 4)
        for shape in ([24, 12], [8, 12], [24])
    ],
    "bigcode_qkv": [
        (shape, ranks, {"hidden": 12, "heads": heads})
        for ranks in (2, 3, 4)
        for shape, heads in (([16, 2], 1), ([18], 6), ([12, 2], 6))
    ],
    "yuan_value": [
        (shape, ranks, {"heads": heads})
        for ranks in (2, 3, 4, 8)
        for shape, heads in (([32, 2], 16), ([18], 6), ([36, 2], 12))
    ],
    "yuan_output": [
        ([2, 2 * heads], ranks, {"heads": heads}) for ranks in (2, 3, 4, 8) for heads in (16, 6, 12)
    ],
    "gate_up": [
        (shape, ranks, {"grain": grain})
        for ranks in (2, 3, 4)
        for shape, grain in (([24, 2], 1), ([20], 4), ([7, 2], 1))
    ],
    "sub_params": [
        ([12, 4], 2, {"sizes": [8, 2, 2]}),
        ([3, 12, 2], 4, {"sizes": [8, 4], "dim": 1}),
        ([12, 4], 2, {"sizes": [8, 2, 4]}),
    ],
    "conv1d_column": [([6, 6], 2, {}), ([6, 6], 4, {"heads": 3}), ([6, 8], 2, {})],
    "conv1d_row": [([6, 6], 2, {}), ([6, 6], 4, {"heads": 3}), ([6, 8], 2, {})],
    "experts": [
        ([8, 3], 4, {"placement": [[0, 4], [1, 5], [2, 6], [3, 7]]}),
        ([5, 3], 3, {"placement": [[4, 0], [2], [3, 1, 0]]}),
        ([5, 3], 2, {"placement": [[0, 1], [2, 3]]}),
        ([3, 3], 2, {"placement": [[0, 0, 1], [2]]}),
    ],
    "chunked": [([9, 2], ranks, {}) for ranks in (2, 4, 7)] + [([2, 3], 4, {})],
    "zero_flat": [
        ([], ranks, {"shapes": [[4, 5], [3], [2, 4]], "parameter_alignment": align})
        for ranks in (2, 3, 4)
        for align in (1, 4)
    ],
}


def record(kind: str) -> dict[str, Any]:
    """Everything recorded of one kind, as it stands in its file."""
    cases: list[dict[str, Any]] = []
    for shape, ranks, arguments in CASES[kind]:
        case: dict[str, Any] = {"shape": shape, "ranks": ranks, "arguments": arguments}
        try:
            shards = cut(kind, shape, ranks, arguments)
        except Refused as refusal:
            case["refused"] = str(refusal).split("\n", maxsplit=1)[0][:80]
        else:
            case["shards"] = [
                {"shape": list(shard.shape), "runs": _runs(shard.reshape(-1).tolist())}
                for shard in shards
            ]
        cases.append(case)
    return {"format": FORMAT, "kind": kind, "versions": real().versions, "cases": cases}


def _runs(index_map: list[int]) -> list[list[int]]:
    """Runs [first full index, length]; a negative first index is padding."""
    runs: list[list[int]] = []
    for full in index_map:
        first = max(full, -1)
        if runs and (first == runs[-1][0] == -1 or (runs[-1][0] >= 0 and first == sum(runs[-1]))):
            runs[-1][1] += 1
        else:
            runs.append([first, 1])
    return runs


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with one case a line, so that a change reads well."""
    cases = ",\n  ".join(json.dumps(case, separators=(",", ":")) for case in recorded["cases"])
    head = {key: value for key, value in recorded.items() if key != "cases"}
    return json.dumps(head)[:-1] + ', "cases": [\n  ' + cases + "\n]}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    changed = []
    for kind in KINDS:
        path, text = FOLDER / f"{kind}.json", as_text(record(kind))
        if is_check and (not path.is_file() or path.read_text() != text):
            changed.append(kind)
        elif not is_check:
            path.write_text(text)
    if changed:
        print("differ from what is recorded:", ", ".join(changed))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
