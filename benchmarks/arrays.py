"""Extract, rebuild, move and digest in memory, beside memcpy and torch's own `copy_`, in one run.

    python benchmarks/arrays.py [--json FILE] [--rows 12288] [--columns 4096] [--skip-digests]

Every case is one tensor cut by one layout. What is timed is the whole call into memory that is used
again, checks and planning of views included; plans are made beforehand. `memcpy` moves the same
bytes between two plain buffers. `copy_` is what a careful user of torch would write by hand for the
same case: one `copy_` for each strided view. Everything of a case runs in every
round, in an order that is drawn. One thread is timed by the processor time it takes, two by the
clock: of what is done rank by rank each has every second one, of `rebuild` and `move` each has a
tensor of its own. The best rounds are shown: those that other work on the machine disturbed least,
and in which both threads had a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

from restride import Layout, Piece, extract, move, plan_transfer, rebuild
from restride.algebra.piece import Axis
from restride.arrays import _kernel
from restride.arrays.fingerprint import Digester
from restride.layouts import codegen_qkv, split, transposed

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 11
RANKS = 4
COLUMNS = (
    "copy_",
    "copy_ back",
    "extract",
    "extract, NumPy",
    "rebuild",
    "move",
    "no kernel: extract",
    "extract, NumPy ",
    "rebuild ",
)


def in_turn(calls: dict[str, Callable[[], Any]], threads: int) -> dict[str, list[float]]:
    """Seconds of each call in each round."""
    clock = time.process_time if threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS * threads + 1):
        # What a call finds in the caches depends on the one before it, which is drawn afresh.
        for name, call in Random(number).sample(list(calls.items()), len(calls)):  # noqa: S311
            start = clock()
            call()
            if number:
                taken[name].append(clock() - start)
    return taken


def without_kernel(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        kept, _kernel.KERNEL = _kernel.KERNEL, None
        try:
            call()
        finally:
            _kernel.KERNEL = kept

    return run


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
    again = [torch.empty_like(full) for _ in range(threads)]
    ranks = range(layout.rank_count)
    shards = [extract(layout, full, rank) for rank in ranks]
    memory = [torch.empty_like(shard) for shard in shards]
    transfers = plan_transfer(target, layout)
    moved = [
        {rank: torch.empty(target.shard_shape(rank)).to(full.dtype) for rank in ranks}
        for _ in range(threads)
    ]
    halves = list(zip(again[0].view(-1).chunk(threads), full.view(-1).chunk(threads), strict=True))
    pairs = by_hand(layout, full, memory)
    arrays = [array.view(torch.int16 if full.itemsize == 2 else torch.int32) for array in memory]
    native = [array.numpy() for array in arrays]
    whole = full.view(arrays[0].dtype).numpy()
    given = dict(enumerate(shards))

    def cut(source: Any, out: list[Any]) -> Callable[[], None]:
        return run_on(threads, [lambda r=r: extract(layout, source, r, out=out[r]) for r in ranks])

    calls = {
        "memcpy": run_on(threads, [lambda a=a, b=b: a.copy_(b) for a, b in halves]),
        "copy_": run_on(threads, [lambda a=a, b=b: a.copy_(b) for a, b in pairs]),
        "copy_ back": run_on(threads, [lambda a=a, b=b: b.copy_(a) for a, b in pairs]),
        "extract": cut(full, memory),
        "extract, NumPy": cut(whole, native),
        "no kernel: extract": without_kernel(cut(full, memory)),
        "extract, NumPy ": without_kernel(cut(whole, native)),
    }
    whole_tensors = {
        "rebuild": [lambda out=out: rebuild(layout, given, out=out) for out in again],
        "move": [lambda out=out: move(transfers, given, out=out) for out in moved],
    }
    calls |= {name: run_on(threads, each) for name, each in whole_tensors.items()}
    calls["rebuild "] = without_kernel(calls["rebuild"])
    taken = in_turn(calls, threads)
    for out in again:
        out.zero_()
    calls["rebuild"]()
    if not all(torch.equal(out, full) for out in again):
        raise SystemExit("rebuilt something else")
    nbytes = full.numel() * full.itemsize
    memcpy = min(taken.pop("memcpy"))
    ratios = {name: memcpy / min(seconds) for name, seconds in taken.items()}
    for name in (*whole_tensors, "rebuild "):
        ratios[name] *= threads
    return {"memcpy_gb_s": nbytes / memcpy / 1e9, **ratios}


def digests(nbytes: int = 1 << 28, buffer_nbytes: int = 1 << 20) -> dict[str, float]:
    """GB/s of digests of random weights, of one buffer in the cache and of all memory in turn."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in ("float32", "bfloat16"):
        weights = torch.randn(nbytes // 4, generator=generator).to(getattr(torch, dtype))
        content = weights.view(torch.uint8).numpy()
        parts = np.split(content, content.nbytes // buffer_nbytes)
        hot = [parts[0][: 1 << 18]] * 1024

        def digest(buffers: list[Any]) -> int:
            digester = Digester()
            return sum(digester.digest(buffer, 0) for buffer in buffers)

        for threads in (1, 2):
            calls = {}
            for place, buffers in (("256 KiB in the cache", hot), ("memory", parts)):
                shares = [buffers[number::threads] for number in range(threads)]
                call = run_on(threads, [lambda share=share: digest(share) for share in shares])
                calls[f"{dtype}, {place}, {threads}"] = call
                calls[f"{dtype}, {place}, {threads}, NumPy"] = without_kernel(call)
            for name, seconds in in_turn(calls, threads).items():
                moved = sum(b.nbytes for b in (hot if "cache" in name else parts))
                found[name] = moved / min(seconds) / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=12288)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--skip-digests", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "kernel": _kernel.KERNEL and _kernel.KERNEL.level,
        "cases": {},
    }
    if not a.skip_digests:
        record["digests"] = digests()
        for name, rate in record["digests"].items():
            print(f"digest of {name:52} {rate:7.1f} GB/s")
    print(f"{a.rows} x {a.columns}, {RANKS} ranks; speed as a part of memcpy's")
    print(f"{'case':28} {'':9} {'memcpy':>10}" + "".join(f"{name:>19}" for name in COLUMNS))
    for name, layout in cases(a.rows, a.columns).items():
        target = split((a.rows, a.columns), mesh={"tp": RANKS})
        for dtype in ("float16", "float32"):
            for threads in (1, 2):
                found = measure(layout, target, dtype, threads)
                record["cases"][f"{name}, {dtype}, {threads}"] = found
                cells = "".join(
                    f"{found[key]:19.2f}" if key in found else " " * 19 for key in COLUMNS
                )
                print(
                    f"{name:28} {dtype[5:]:>3}b x{threads}t {found['memcpy_gb_s']:7.1f}GB/s{cells}"
                )
    if a.json:
        a.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
