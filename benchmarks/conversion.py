"""Convert one checkpoint, beside `cp` of the same bytes and DeepSpeed's own converter.

    python benchmarks/conversion.py [--gib 1] [--rounds 3] [--json FILE]

All run in turn, in one call, on the same input with a warm page cache. restride syncs its output,
the others do not. Read the ratios: machines differ, and this one may be busy.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from measure import Usage, measure

PEER = (
    "from deepspeed.checkpoint.ds_to_universal import main, parse_arguments;"
    "import sys; sys.argv[0] = 'ds_to_universal'; main(parse_arguments())"
)


def contenders(source: Path, out: Path) -> dict[str, list[str]]:
    step = str(source / "step")
    restride = [sys.executable, "-m", "restride", "convert", str(source), str(out)]
    return {
        "cp": ["cp", "-r", step, str(out)],
        "restride --states all": [*restride, "--states", "all"],
        "restride --states all --memory 64MB": [*restride, "--states", "all", "--memory", "64MB"],
        "restride --to universal": [*restride, "--to", "universal"],
        "restride (weights)": restride,
        "ds_to_universal, 1 worker": [
            *(sys.executable, "-c", PEER, "--input_folder", step, "--output_folder", str(out)),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        ],
        "ds_to_universal, 2 workers": [
            *(sys.executable, "-c", PEER, "--input_folder", step, "--output_folder", str(out)),
            *("--num_extract_workers", "2", "--num_merge_workers", "2"),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the input, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        source, out = Path(folder, "source"), Path(folder, "out")
        # 14 bytes a parameter; a layer of hidden h has 9 h^2 of them.
        hidden = 1280 if a.gib >= 0.5 else 512
        layers = max(1, round((a.gib * 2**30 / 14 - 64000 * hidden) / (9 * hidden**2)))
        size = [f"--hidden={hidden}", f"--layers={layers}"]
        measure([sys.executable, str(Path(__file__).with_name("synthetic.py")), str(source), *size])
        nbytes = sum(path.stat().st_size for path in (source / "step").iterdir())
        results: dict[str, list[Usage]] = {}
        for _ in range(a.rounds):
            for name, command in contenders(source, out).items():
                results.setdefault(name, []).append(measure(command, {"DS_ACCELERATOR": "cpu"}))
                shutil.rmtree(out)
    report(results, nbytes)
    if a.json:
        rows = {name: [vars(usage) for usage in usages] for name, usages in results.items()}
        record = {"machine": platform.platform(), "input_nbytes": nbytes, "runs": rows}
        a.json.write_text(json.dumps(record, indent=1))


def report(results: dict[str, list[Usage]], nbytes: int) -> None:
    cp = statistics.median(usage.wall_s for usage in results["cp"])
    print(f"input {nbytes / 1e9:.2f} GB, {platform.machine()}, Python {platform.python_version()}")
    print("| what | wall s (median, all) | x cp | peak MB | read GB | written GB |")
    print("|---|---|---|---|---|---|")
    for name, usages in results.items():
        wall = statistics.median(usage.wall_s for usage in usages)
        each = " ".join(f"{usage.wall_s:.2f}" for usage in usages)
        peak = max(usage.peak_nbytes for usage in usages) / 1e6
        read, written = usages[-1].read_nbytes / 1e9, usages[-1].written_nbytes / 1e9
        ratio = wall / cp if cp else math.nan
        figures = f"{wall:.2f} ({each}) | {ratio:.2f} | {peak:.0f} | {read:.2f} | {written:.2f}"
        print(f"| {name} | {figures} |")


if __name__ == "__main__":
    main()
