"""Extract, rebuild and move in memory, beside memcpy and torch's own `copy_`, in one run.

    python benchmarks/arrays.py [--json FILE] [--rows 12288] [--columns 4096]

Every case is one tensor cut by one layout. What is timed is the whole call into memory that is used
again, checks and planning of views included; plans are made beforehand. `memcpy` moves the same
bytes between two plain buffers. `copy_` is what a careful user of torch would write by hand for the
same case: one `copy_` for each strided view. With two threads each does every second rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from restride import Layout, Piece, extract, move, plan_transfer, rebuild
from restride.algebra.piece import Axis
from restride.layouts import codegen_qkv, split, transposed

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
RANKS = 4


def seconds(call: Callable[[], Any]) -> float:
    """Median wall time of one call."""
    call()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def interleaved(rows: int, columns: int, run: int) -> Layout:
    """Runs of `run` elements of each row dealt out to the ranks in turn."""
    rounds = columns // (RANKS * run)
    width = rounds * run
    walk = (
        (RANKS, run, 1, 0),
        (rows, columns, 0, width),
        (rounds, RANKS * run, 0, run),
        (run, 1, 0, 1),
    )
    pieces = [Piece(tuple(Axis(*axis) for axis in walk if axis[0] > 1))]
    return Layout.of({"tp": RANKS}, (rows, columns), [(rows, width)] * RANKS, pieces)


def cases(rows: int, columns: int) -> dict[str, Layout]:
    mesh = {"tp": RANKS}
    turned = transposed(split((columns, rows), mesh=mesh))
    return {
        "rows (CodeGen's fused QKV)": codegen_qkv((rows, columns), mesh=mesh, heads=64),
        "columns": split((rows, columns), mesh=mesh, dim=1),
        "runs of 256 elements": interleaved(rows, columns, 256),
        "runs of 64 elements": interleaved(rows, columns, 64),
        "runs of 8 elements": interleaved(rows, columns, 8),
        "runs of 2 elements": interleaved(rows, columns, 2),
        "runs of 1 element": interleaved(rows, columns, 1),
        "transpose": turned,
    }


def by_hand(layout: Layout, full: Any, shards: list[Any]) -> list[tuple[Any, Any]]:
    """(shard, full) views of every rank, as strided tensors."""
    pairs = []
    for rank in range(layout.rank_count):
        for piece in layout.pieces(rank):
            extents = [axis.extent for axis in piece.axes]
            source = full.as_strided(
                extents, [axis.full_stride for axis in piece.axes], piece.full_base
            )
            target = shards[rank].as_strided(
                extents, [axis.shard_stride for axis in piece.axes], piece.shard_base
            )
            pairs.append((target, source))
    return pairs


def run_on(threads: int, calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """Do all calls, each thread every n-th."""
    if threads == 1:
        return lambda: [call() for call in calls] and None
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        parts = [calls[number::threads] for number in range(threads)]
        list(pool.map(lambda part: [call() for call in part], parts))

    return run


def measure(layout: Layout, target: Layout, dtype: str, threads: int) -> dict[str, float]:
    """GB/s of memcpy, and the speed of everything else as a part of it."""
    full = torch.arange(layout.full_numel, dtype=torch.int32).view(layout.full_shape)
    full = full.to(getattr(torch, dtype))
    again = torch.empty_like(full)
    ranks = range(layout.rank_count)
    shards = [extract(layout, full, rank) for rank in ranks]
    memory = [torch.empty_like(shard) for shard in shards]
    transfers = plan_transfer(target, layout)
    moved = {rank: torch.empty(target.shard_shape(rank)).to(full.dtype) for rank in ranks}
    halves = list(zip(again.view(-1).chunk(threads), full.view(-1).chunk(threads), strict=True))
    pairs = by_hand(layout, full, memory)
    taken = {
        "memcpy": seconds(run_on(threads, [lambda a=a, b=b: a.copy_(b) for a, b in halves])),
        "copy_": seconds(run_on(threads, [lambda a=a, b=b: a.copy_(b) for a, b in pairs])),
        "copy_ back": seconds(run_on(threads, [lambda a=a, b=b: b.copy_(a) for a, b in pairs])),
        "extract": seconds(
            run_on(
                threads,
                [lambda rank=rank: extract(layout, full, rank, out=memory[rank]) for rank in ranks],
            )
        ),
    }
    arrays = [array.view(torch.int16 if full.itemsize == 2 else torch.int32) for array in memory]
    native = [array.numpy() for array in arrays]
    whole = full.view(arrays[0].dtype).numpy()
    taken["extract, NumPy"] = seconds(
        run_on(
            threads,
            [lambda rank=rank: extract(layout, whole, rank, out=native[rank]) for rank in ranks],
        )
    )
    if threads == 1:
        given = dict(enumerate(shards))
        taken["rebuild"] = seconds(lambda: rebuild(layout, given, out=again))
        taken["move"] = seconds(lambda: move(transfers, given, out=moved))
        if not torch.equal(again.view(-1), full.view(-1)):
            raise SystemExit("rebuilt something else")
    nbytes = full.numel() * full.itemsize
    return {
        "memcpy_gb_s": nbytes / taken["memcpy"] / 1e9,
        **{name: taken["memcpy"] / value for name, value in taken.items() if name != "memcpy"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=12288)
    parser.add_argument("--columns", type=int, default=4096)
    a = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "cases": {},
    }
    columns = ("copy_", "copy_ back", "extract", "extract, NumPy", "rebuild", "move")
    print(f"{a.rows} x {a.columns}, {RANKS} ranks; speed as a part of memcpy's")
    print(f"{'case':28} {'':9} {'memcpy':>10}" + "".join(f"{name:>15}" for name in columns))
    for name, layout in cases(a.rows, a.columns).items():
        target = split((a.rows, a.columns), mesh={"tp": RANKS})
        for dtype in ("float16", "float32"):
            for threads in (1, 2):
                found = measure(layout, target, dtype, threads)
                record["cases"][f"{name}, {dtype}, {threads}"] = found
                cells = "".join(
                    f"{found[key]:15.2f}" if key in found else " " * 15 for key in columns
                )
                print(
                    f"{name:28} {dtype[5:]:>3}b x{threads}t {found['memcpy_gb_s']:7.1f}GB/s{cells}"
                )
    if a.json:
        a.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
