"""Prove and plan beside DeepSpeed's affine maps, in one run.

    python benchmarks/algebra.py [--json FILE]

The peer is given the same layouts through its own builders, with its budgets lifted where it would
refuse (said so in the table). Its proof walks elements, so it is timed on a small tensor, and the
figure per element is what scales. Moves are compared by what they mean in the tests, not here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from restride import plan_transfer, prove, signature
from restride.layouts import codegen_qkv, sub_params

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median wall time of one call."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peer_codegen(rows: int, columns: int, ranks: int, heads: int) -> Any:
    from deepspeed.checkpoint.affine import block_gather_map
    from deepspeed.module_inject.fusedqkv_utils import codegen_block_layout

    block, ids = codegen_block_layout(rows, ranks, heads, 4)
    return block_gather_map((rows, columns), ids, block, 0)


def peer_fused(hidden: int, columns: int, ranks: int) -> Any:
    from deepspeed.checkpoint.affine import sub_param_map

    widths = [[hidden // ranks] * ranks] * 3
    return sub_param_map((3 * hidden, columns), [hidden] * 3, widths, 0)


def peer_plan(target: Any, source: Any) -> tuple[float, int, str]:
    """(seconds, segments, what had to be done for it)."""
    from deepspeed.checkpoint import affine_transfer as peer

    try:
        plan = peer.plan_transfer(target, source)
        rounds, limits, note = 3, None, ""
    except peer.AffineTransferError:
        fields = [field.name for field in dataclasses.fields(peer.PlanBudget)]
        lifted = dict.fromkeys([name for name in fields if name != "max_ndim"], 2**60)
        limits = peer.PlanBudget(**{**lifted, "max_merge_passes": 8})
        rounds, note = 1, "refused; budgets lifted"
        plan = None
    start = time.perf_counter()
    for _ in range(rounds):
        plan = peer.plan_transfer(target, source, *([limits] if limits else []))
    return (time.perf_counter() - start) / rounds, len(plan.segments), note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    record: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version()}
    record["prove"] = proofs()
    record["plan"] = plans()
    if a.json:
        a.json.write_text(json.dumps(record, indent=1))


def proofs() -> list[dict[str, Any]]:
    large = codegen_qkv((12288, 4096), mesh={"tp": 4}, heads=32)
    small = peer_codegen(768, 256, 4, 16)
    ours = seconds(lambda: prove(large), 101)
    theirs = seconds(small.validate_coverage, 1)
    numel, small_numel = 12288 * 4096, 768 * 256
    scaled = theirs / small_numel * numel
    print("| prove CodeGen TP4 | seconds | per element |")
    print("|---|---|---|")
    print(f"| restride, 12288 x 4096 | {ours * 1e6:.1f} us | {ours / numel:.1e} s |")
    print(f"| peer, 768 x 256 | {theirs:.3f} s | {theirs / small_numel:.1e} s |")
    print(f"| peer, 12288 x 4096 (scaled up) | {scaled:.0f} s | ratio {scaled / ours:.1e} |")
    print(f"signature: {seconds(lambda: signature(large), 101) * 1e6:.1f} us\n")
    return [{"restride_s": ours, "numel": numel}, {"peer_s": theirs, "numel": small_numel}]


def plans() -> list[dict[str, Any]]:
    rows, wide = 1536 * 8, 192 * 12

    def codegen(ranks: int) -> Any:
        return codegen_qkv((3072, 8), mesh={"tp": ranks}, heads=32)

    def wide_codegen(ranks: int) -> Any:
        return codegen_qkv((3 * wide, 8), mesh={"tp": ranks}, heads=192)

    def fused(ranks: int) -> Any:
        return sub_params((3 * rows, 8), mesh={"tp": ranks}, sizes=[rows] * 3)

    cases: list[tuple[str, Callable[[int], Any], Callable[[int], Any], int, int]] = [
        ("CodeGen", codegen, lambda ranks: peer_codegen(3072, 8, ranks, 32), 2, 4),
        ("CodeGen", wide_codegen, lambda ranks: peer_codegen(3 * wide, 8, ranks, 192), 16, 48),
        ("fused QKV", fused, lambda ranks: peer_fused(rows, 8, ranks), 64, 48),
        ("fused QKV", fused, lambda ranks: peer_fused(rows, 8, ranks), 512, 384),
    ]
    print("| plan | restride | descriptors | peer | segments | ratio |")
    print("|---|---|---|---|---|---|")
    found = []
    for kind, ours, theirs, before, after in cases:
        source, target = ours(before), ours(after)
        wall = seconds(lambda: plan_transfer(target, source))  # noqa: B023 - called at once
        count = len(plan_transfer(target, source).descriptors)
        peer_wall, segments, note = peer_plan(theirs(after), theirs(before))
        name = f"{kind} {before} -> {after}"
        peer = f"{peer_wall * 1e3:.1f} ms {note} | {segments} | {peer_wall / wall:.0f}"
        print(f"| {name} | {wall * 1e3:.3f} ms | {count} | {peer} |")
        row = {"case": name, "restride_s": wall, "descriptors": count}
        found.append({**row, "peer_s": peer_wall, "segments": segments, "note": note})
    return found


if __name__ == "__main__":
    main()
