"""Convert one checkpoint, beside `cp` of the same bytes and DeepSpeed's own converter.

    python benchmarks/conversion.py [--gib 1] [--rounds 3] [--only PATTERN] [--json FILE]

All run in turn, in one call, on the same input with a warm page cache, and nothing of the run
before waits to be written. Before each, a process touches as much memory as will be written, and
ends: a virtual machine may have given its free memory back, and whoever writes first would pay for
getting it again (`--cold` leaves that out). Then the input is read: what nobody looked at for some
seconds may have been dropped from the page cache, too. What syncs its output stands beside `cp`
with a sync of every file; what does not, beside `cp`, and beside `limit.c`, which is what the
machine can do. Read the ratios: machines differ, and this one may be busy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Usage, measure, read_again, touch_memory

PEER = (
    "from deepspeed.checkpoint.ds_to_universal import main, parse_arguments;"
    "import sys; sys.argv[0] = 'ds_to_universal'; main(parse_arguments())"
)


# Says on stderr how long after the start of its process the first bytes of tensors were written.
FIRST_BYTE = """
import os, sys, time
from restride.executors.direct import Direct
real = Direct.carry_out
def first(self, bundle):
    Direct.carry_out = real
    is_done = real(self, bundle)
    ticks = int(open("/proc/self/stat").read().rpartition(") ")[2].split()[19])
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    print(f"first byte after {since:.2f} s", file=sys.stderr)
    return is_done
Direct.carry_out = first
from restride.cli import main
main()
"""


def contenders(source: Path, out: Path, limit: Path | None) -> dict[str, list[str]]:
    step = str(source / "step")
    restride = [sys.executable, "-m", "restride", "convert", str(source), str(out)]
    everything = [*restride, "--states", "all"]
    universal = [*restride, "--to", "universal"]
    sharded = [*restride, "--to", "deepspeed", "--tp", "4", "--dp", "1"]
    one, two = ["--no-sync", "--workers", "1"], ["--no-sync", "--workers", "2"]
    files = [str(path) for path in sorted((source / "step").iterdir())] if limit else []
    bare = {
        f"C, {threads} thread{'s'[: threads - 1]}, {does}": [
            *(str(limit), str(threads), str(digests), str(out), *files)
        ]
        for digests, does in enumerate(("copies only", "copies and digests"))
        for threads in ((1, 2) if limit else ())
    }
    half = 'mkdir "$1"; cp "$0"/*mp_rank_00* "$1" & cp "$0"/*mp_rank_01* "$1"; wait'
    synced = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return {
        "`cp`": ["cp", "-r", step, str(out)],
        "`cp`, two at a time": ["sh", "-c", half, step, str(out)],
        **bare,
        "universal, 1 worker, no sync": [*universal, *one],
        "universal, 2 workers, no sync": [*universal, *two],
        "all states, 1 worker, no sync": [*everything, *one],
        "all states, 2 workers, no sync": [*everything, *two],
        "TP2 DP2 -> TP4 DP1, 1 worker, no sync": [*sharded, *one],
        "TP2 DP2 -> TP4 DP1, 2 workers, no sync": [*sharded, *two],
        "weights, 2 workers, no sync": [*restride, *two],
        "`cp` and `sync`": ["sh", "-c", synced, step, str(out)],
        "universal, 2 workers": [*universal, "--workers", "2"],
        "all states, 2 workers": [*everything, "--workers", "2"],
        "all states, 2 workers, `--memory 64MB`": [*everything, *two[1:], "--memory", "64MB"],
        "all states, 2 workers, `--memory 128MB`": [*everything, *two[1:], "--memory", "128MB"],
        "all states, 2 workers, `--memory 1GB`": [*everything, *two[1:], "--memory", "1GB"],
        "TP2 DP2 -> TP4 DP1, 2 workers": [*sharded, "--workers", "2"],
        "`ds_to_universal`, 1 worker": [
            *(sys.executable, "-c", PEER, "--input_folder", step, "--output_folder", str(out)),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        ],
        "`ds_to_universal`, 2 workers": [
            *(sys.executable, "-c", PEER, "--input_folder", step, "--output_folder", str(out)),
            *("--num_extract_workers", "2", "--num_merge_workers", "2"),
        ],
    }


def compiled_limit(folder: Path) -> Path | None:
    """`limit.c` with the digests of the kernel, compiled; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    own = Path(__file__).with_name("limit.c")
    kernel = own.parents[1] / "src" / "restride" / "arrays" / "_kernel.c"
    flags = ["-O3", "-pthread"]
    command = [compiler, *flags, str(own), str(kernel), "-o", str(folder / "limit")]
    subprocess.run(command, check=True)
    return folder / "limit"


def throw_away(out: Path, old: Path) -> None:
    """Give the space back, and wait for the disk, so that the next run starts like this one.

    The empty files stay: ext4 searches long for the place of a new file while some were deleted
    in the last seconds, which no user does.
    """
    for path in out.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    old.mkdir(exist_ok=True)
    out.rename(old / str(len(list(old.iterdir()))))
    os.sync()


def first_byte_s(source: Path, out: Path, *options: str) -> float:
    """Seconds from the start of the process to the first bytes of a tensor in the output."""
    command = [sys.executable, "-c", FIRST_BYTE, "convert", str(source), str(out), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    throw_away(out, out.with_name("old"))
    found = re.search(r"first byte after ([\d.]+) s", done.stderr)
    return float(found[1]) if found else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the input, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose name matches, and cp")
    parser.add_argument("--cold", action="store_true", help="take the memory as it comes")
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
        limit = compiled_limit(Path(folder))
        nbytes = sum(path.stat().st_size for path in (source / "step").iterdir())
        for command in contenders(source, out, limit).values():
            if "restride" in command:
                measure([*command, "--dry-run"])  # compiles its modules
        results: dict[str, list[Usage]] = {}
        firsts: dict[str, list[float]] = {}
        for _ in range(a.rounds):
            for name, command in contenders(source, out, limit).items():
                if name.startswith(("`cp`", "C, ")) or re.search(a.only, name):
                    if not a.cold:
                        touch_memory(nbytes + nbytes // 4)
                        read_again(source)
                    usage = measure(command, {"DS_ACCELERATOR": "cpu"})
                    results.setdefault(name, []).append(usage)
                    print(f"{usage.wall_s:6.2f} s  {name}", file=sys.stderr, flush=True)
                    throw_away(out, Path(folder, "old"))
            for target in ("safetensors", "universal"):
                seconds = first_byte_s(source, out, "--to", target)
                firsts.setdefault(target, []).append(seconds)
    report(results, nbytes)
    for target, found in firsts.items():
        print(f"first byte of a tensor, to {target}: {statistics.median(found):.2f} s after start")
    if a.json:
        rows = {name: [vars(usage) for usage in usages] for name, usages in results.items()}
        record = {"machine": platform.platform(), "input_nbytes": nbytes, "runs": rows}
        a.json.write_text(json.dumps(record | {"first_byte_s": firsts}, indent=1))


def report(results: dict[str, list[Usage]], nbytes: int) -> None:
    """Print one table; what syncs is measured against the copy that does."""
    medians = {
        name: statistics.median(u.wall_s for u in usages) for name, usages in results.items()
    }
    print(f"input {nbytes / 1e9:.2f} GB, {platform.machine()}, Python {platform.python_version()}")
    print("| what | wall s (median, all) | x `cp` | CPU s | peak MB | read GB | written GB |")
    print("|---|---|---|---|---|---|---|")
    copy = "`cp`"
    for name, usages in results.items():
        if name == "`cp` and `sync`":
            copy = name
        elif name.startswith("`ds"):
            copy = "`cp`"
        each = " ".join(f"{usage.wall_s:.2f}" for usage in usages)
        cpu = statistics.median(usage.cpu_s for usage in usages)
        peak = max(usage.peak_nbytes for usage in usages) / 1e6
        read, written = usages[-1].read_nbytes / 1e9, usages[-1].written_nbytes / 1e9
        figures = f"{medians[name]:.2f} ({each}) | {medians[name] / medians[copy]:.2f} | {cpu:.2f}"
        print(f"| {name} | {figures} | {peak:.0f} | {read:.2f} | {written:.2f} |")


if __name__ == "__main__":
    main()
