"""Read, convert and check what hundreds of ranks have cut up: processor time and memory.

    python benchmarks/scale.py [--only headers|conversions]

Headers are those of terabytes, with holes for the bytes of tensors: from `synthetic.py --sparse`,
or laid out by restride itself. Conversions and checks are of a small model with all its bytes, so
that names and places are what takes time and memory. Commands are whole processes. What one takes
beside the program is counted from the peak of the same command on a model of one layer. What it
was said to take is in its own report; of a check it is what `info` takes, and the budget. The wall
clock is not shown: these may run beside other work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import synthetic
from measure import Usage, measure
from restride import api
from restride.exports import lay_out_export
from restride.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from restride.checkpoint.output import Output

RESTRIDE = [sys.executable, "-m", "restride"]
LARGE = {"hidden": 12288, "vocab": 128256}
SMALL = {"hidden": 128, "layers": 20, "vocab": 4096}
ONE = {"tp": 1, "dp": 1}
ZERO_3 = ["--to", "deepspeed", "--tp", "1", "--zero", "3", "--dp"]

COMMANDS = [
    ("info", [], "ZeRO-1, TP8 x DP64"),
    ("layouts", [], "ZeRO-1, TP8 x DP64"),
    ("convert", ["--to", "universal", "--dry-run"], "ZeRO-1, TP8 x DP64"),
    ("info", [], "ZeRO-3 on 512 ranks"),
    ("info", [], "ZeRO-3 on 1,024 ranks"),
    ("info", [], "a universal folder"),
    ("info", [], "safetensors"),
    ("layouts", [], "safetensors"),
]

# Each goes on from what those before it have written.
CONVERSIONS = [
    ("one rank to ZeRO-3 on 512", "one", "512", [*ZERO_3, "512"]),
    ("the same over its output, `--force`", "one", "512", [*ZERO_3, "512", "--force"]),
    ("one rank to a universal folder", "one", "universal", ["--to", "universal"]),
    ("a universal folder to ZeRO-3 on 512", "universal", "of-universal", [*ZERO_3, "512"]),
    ("ZeRO-3 on 512 ranks to 1,024", "512", "1024", [*ZERO_3, "1024"]),
    ("ZeRO-3 on 512 ranks to a universal folder", "512", "whole", ["--to", "universal"]),
    (
        "ZeRO-3 on 512 ranks to safetensors, all states",
        *("512", "safetensors", ["--to", "safetensors", "--states", "all"]),
    ),
]
CHECKS = [("ZeRO-3 on 512 ranks", "512"), ("ZeRO-3 on 1,024 ranks", "1024")]
CHECK_MB = 8


def write_holes(root: Path, output: Output) -> None:
    """Write the fixed parts of all files."""
    for file in output.files:
        path = root / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as opened:
            opened.truncate(file.nbytes)
            for start, content in file.spelled():
                opened.seek(start)
                opened.write(content)


def ranks(tp: int, dp: int) -> Callable[[Path], object]:
    """What 80 layers leave in DeepSpeed's own files."""
    return lambda at: synthetic.write(at, layers=80, tp=tp, dp=dp, sparse=True, **LARGE)


def partitioned(dp: int) -> Callable[[Path], object]:
    """What restride would write of 160 layers under ZeRO-3, from one rank."""

    def make(at: Path) -> None:
        source = at.with_name("source")
        synthetic.write(source, layers=160, sparse=True, **LARGE, **ONE)
        wanted = api.Wanted("deepspeed", tp=1, dp=dp, zero=3)
        write_holes(at, lay_out_export(api.open(source), wanted).output)
        shutil.rmtree(source)

    return make


def universal(at: Path) -> None:
    """A folder for each parameter of 555 narrow layers, and a file for each of its states."""
    source = at.with_name("source")
    synthetic.write(source, hidden=32, layers=555, vocab=4096, **ONE)
    api.convert(source, at, to="universal", durable=False)
    shutil.rmtree(source)


def experts(at: Path) -> None:
    """A model of 60 layers with 500 experts each, in the 163 files of a hub."""
    at.mkdir()
    projections = {"gate_proj": [2048, 7168], "up_proj": [2048, 7168], "down_proj": [7168, 2048]}
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight", shape)
        for layer, expert, (projection, shape) in product(
            range(60), range(500), projections.items()
        )
    ]
    files = [f"model-{number:05d}-of-00163.safetensors" for number in range(1, 164)]
    for number, file in enumerate(files):
        header, end = {}, 0
        for name, shape in names[number :: len(files)]:
            start, end = end, end + 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (at / file).write_bytes(len(text).to_bytes(8, "little") + text)
        with (at / file).open("r+b") as opened:
            opened.truncate(8 + len(text) + end)
    places = {name: files[at % len(files)] for at, (name, _) in enumerate(names)}
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


CHECKPOINTS = {
    "ZeRO-1, TP8 x DP64": ranks(8, 64),
    "ZeRO-3 on 512 ranks": partitioned(512),
    "ZeRO-3 on 1,024 ranks": partitioned(1024),
    "a universal folder": universal,
    "safetensors": experts,
}


def measured(*words: object) -> tuple[Usage, dict[str, Any]]:
    """What a command of restride took, and what it reported."""
    with tempfile.NamedTemporaryFile() as report:
        keeping = ["sh", "-c", 'exec "$@" >"$0"', report.name]
        usage = measure([*keeping, *RESTRIDE, *map(str, words), "--json"])
        return usage, json.loads(Path(report.name).read_bytes())


def described(root: Path) -> str:
    catalog = api.open(root)
    files = [path for path in root.rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    return f"{len(catalog.tensors):,} tensors, {len(files):,} files of {format_size(nbytes)}"


def read_headers(folder: Path) -> None:
    print("| command | checkpoint | CPU s | peak memory, MB |")
    print("|---|---|---|---|")
    made = ""
    source = folder / "checkpoint"
    for command, options, name in COMMANDS:
        what = "the same"
        if name != made:
            shutil.rmtree(source, ignore_errors=True)
            CHECKPOINTS[name](source)
            made, what = name, f"{name}: {described(source)}"
        out = [folder / "out"] if command == "convert" else []
        usage = measure([*RESTRIDE, command, *map(str, (source, *out)), *options])
        line, peak = " ".join([command, *options]), f"{usage.peak_nbytes / 1e6:.0f}"
        print(f"| `{line}` | {what} | {usage.cpu_s:.1f} | {peak} |", flush=True)
    shutil.rmtree(source)


def convert_and_check(folder: Path) -> None:
    synthetic.write(folder / "one", **SMALL, **ONE)
    synthetic.write(folder / "tiny", hidden=64, layers=1, vocab=64, **ONE)
    print("| command | CPU s | said, MB | took beside the program, MB |")
    print("|---|---|---|---|")
    for name, source, target, options in CONVERSIONS:
        words = [*options, "--workers", "1", "--no-sync"]
        usage, report = measured("convert", folder / source, folder / target, *words)
        least = [*words[: words.index("--dp")], "--dp", "1"] if "--dp" in words else words
        program, _ = measured("convert", folder / "tiny", folder / "out", *least, "--dry-run")
        said = f"{report['projected_nbytes'] / 1e6:.0f}"
        print(f"| {name} | {usage.cpu_s:.1f} | {said} | {beside(usage, program)} |", flush=True)
    for name, target in CHECKS:
        told = [measured("info", folder / source)[0] for source in (target, "tiny")]
        usage, report = measured("check", folder / target, "--memory", f"{CHECK_MB}MB")
        program, _ = measured("check", folder / "tiny")
        assert report["verdict"] == "ok", report["findings"]
        said, took = f"{beside(*told)} + {CHECK_MB}", beside(usage, program)
        line = f"`check --memory {CHECK_MB}MB`: {name}"
        print(f"| {line} | {usage.cpu_s:.1f} | {said} | {took} |", flush=True)


def beside(usage: Usage, program: Usage) -> str:
    return f"{(usage.peak_nbytes - program.peak_nbytes) / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=("headers", "conversions"), help="one of both tables")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        if a.only != "conversions":
            read_headers(Path(folder))
        if a.only != "headers":
            convert_and_check(Path(folder))


if __name__ == "__main__":
    main()
