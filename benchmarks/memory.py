"""Convert a checkpoint of one large tensor within smaller and smaller budgets.

    python benchmarks/memory.py [--gib 3] [--rounds 3]

The tensor is a parameter of so many GiB in float32, cut in columns over two tensor-parallel ranks
in DeepSpeed's files without ZeRO, so that nothing of it stands together. It goes out whole, as it
is and rounded to bfloat16. Memory is touched and the input read before each run, as in
`conversion.py`. The peak is that of the whole process; the first line is the interpreter with what
a conversion imports.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

from measure import Usage, measure, read_again, touch_memory
from synthetic import COLUMNS, model_state, shard_shape

BUDGETS = ("64MB", "128MB", "256MB", "1GB")
NAME = "model.layers.0.mlp.down_proj.weight"


def write(folder: Path, nbytes: int) -> None:
    """Write the files of both ranks. Elements are a counter, so that all differ."""
    import torch

    (folder / "step").mkdir(parents=True)
    (folder / "latest").write_text("step")
    columns = 16384
    shape = (nbytes // 4 // columns, columns)
    for rank in range(2):
        shapes = OrderedDict({NAME: shard_shape(shape, COLUMNS, 2)})
        start = rank * shape[0] * columns // 2
        numel = shape[0] * columns // 2
        shard = torch.arange(start, start + numel, dtype=torch.int32).view(torch.float32)
        module = OrderedDict({NAME: shard.view(shapes[NAME])})
        state = model_state(module, shapes, [(NAME, shape, COLUMNS)], 2, 1)
        torch.save(state, folder / "step" / f"mp_rank_{rank:02d}_model_states.pt")
        del shard, module, state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=3.0, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    a = parser.parse_args()
    results: dict[tuple[str, str], list[Usage]] = {}
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        source, out = Path(folder, "source"), Path(folder, "out")
        write(source, int(a.gib * 2**30))
        command = [sys.executable, "-m", "restride", "convert", str(source), str(out), "--no-sync"]
        start = measure([*command, "--dry-run"])
        for _ in range(a.rounds):
            for dtype in ("float32", "bfloat16"):
                for budget in BUDGETS:
                    touch_memory(int(a.gib * 2**30 * 5 / 4))
                    read_again(source)
                    usage = measure([*command, "--dtype", dtype, "--memory", budget])
                    results.setdefault((dtype, budget), []).append(usage)
                    shutil.rmtree(out)
    print("| one tensor | `--memory` | wall s (median, all) | CPU s | peak MB |")
    print("|---|---|---|---|---|")
    figures = f"{start.wall_s:.2f} | {start.cpu_s:.2f} | {start.peak_nbytes / 1e6:.0f}"
    print(f"| `--dry-run` | | {figures} |")
    for (dtype, budget), usages in results.items():
        each = " ".join(f"{usage.wall_s:.2f}" for usage in usages)
        wall = statistics.median(usage.wall_s for usage in usages)
        cpu = statistics.median(usage.cpu_s for usage in usages)
        peak = max(usage.peak_nbytes for usage in usages) / 1e6
        figures = f"{wall:.2f} ({each}) | {cpu:.2f} | {peak:.0f}"
        print(f"| {a.gib:g} GiB to {dtype} | {budget} | {figures} |")


if __name__ == "__main__":
    main()
