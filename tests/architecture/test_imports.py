"""What is loaded when, and who may import whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from restride.arrays._kernel import is_available
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"numpy", "torch", "rich", "msgspec", "deepspeed", "safetensors", "transformers"}


# What only some conversions need: presets and rule files to cut for other ranks, other formats, and
# what works on arrays in memory, compares or checks; what removes folders; and pools of threads.
RARELY_NEEDED = {
    "concurrent.futures",
    "difflib",
    "logging",
    "shutil",
    "tomllib",
    "restride.arrays.extract",
    "restride.arrays.move",
    "restride.arrays.probe",
    "restride.arrays.rebuild",
    "restride.checking",
    "restride.checkpoint.fused_cuts",
    "restride.checkpoint.retarget",
    "restride.comparison",
    "restride.formats.deepspeed.told_cut",
    "restride.formats.deepspeed.writer",
    "restride.formats.safetensors",
    "restride.layouts.presets",
    "restride.layouts.recognition",
    "restride.targets",
}


def modules_after(code: str, environment: dict[str, str] | None = None) -> set[str]:
    """Modules that a fresh interpreter has loaded after `code`."""
    program = (
        f"import contextlib, io, json, sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(result.stdout))


def loaded_after(code: str) -> set[str]:
    """Top-level ones of them."""
    return {name.partition(".")[0] for name in modules_after(code)}


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_after("import restride")

    assert "restride" in loaded
    assert not loaded & (HEAVY | {"click"})


@pytest.mark.parametrize("arguments", ["['--help']", "[]", "['frob']"])
def test_help_and_usage_errors_load_nothing_heavy(arguments: str) -> None:
    loaded = loaded_after(
        "import restride.cli; sys.stderr = io.StringIO(); restride.cli.main(" + arguments + ")"
    )

    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "command", ["info", "check", "convert", "diff", "fingerprint", "layouts", "demo"]
)
def test_the_help_of_a_command_loads_no_arrays(command: str) -> None:
    loaded = loaded_after(f"import restride.cli; restride.cli.main(['{command}', '--help'])")

    assert "click" in loaded
    assert not loaded & (HEAVY - {"msgspec"})


def test_a_look_at_safetensors_loads_no_arrays(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    loaded = loaded_after(f"import restride.cli; restride.cli.main(['info', {str(path)!r}])")

    assert not loaded & (HEAVY - {"msgspec"})


def test_the_version_loads_nothing_heavy() -> None:
    loaded = loaded_after("import restride.cli; restride.cli.main(['--version'])")

    assert not loaded & HEAVY


RULES = """
format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "cut.weight"
layout = "column"
"""
FORMS = {
    "weights": [],
    "all states": ["--states", "all"],
    "universal": ["--to", "universal"],
    "ranks": ["--to", "deepspeed", "--tp", "4", "--dp", "1"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two by two ranks: one parameter is cut, the other is on all of them."""
    random = np.random.default_rng(5)
    parameters = {}
    for name, shape, cut in (("cut.weight", (400, 301), (0, (200, 200))), ("norm", (301,), None)):
        names = ("fp32", "exp_avg", "exp_avg_sq")
        states = {state: random.random(shape, np.float32) for state in names}
        weight = states["fp32"].astype(np.float16)
        parameters[name] = Parameter(shape, {"weight": weight, **states}, cut=cut)
    folder = tmp_path_factory.mktemp("imports")
    write_zero_run(folder / "in", ZeroRun(dp=2, tp=2, parameters=parameters))
    (folder / "rules.toml").write_text(RULES)
    return folder


def conversions(source: Path, out: Path, form: str) -> list[list[str]]:
    """Command lines that write one form, with one worker and with two, and without a sync."""
    more = ["--rules", str(source / "rules.toml")] if form == "ranks" else []
    base = ["convert", str(source / "in")]
    ways = {"1": ["--workers", "1"], "2": ["--workers", "2"], "quick": ["--no-sync"]}
    return [[*base, str(out / name), *FORMS[form], *more, *way] for name, way in ways.items()]


def converts(words: list[list[str]]) -> str:
    """What converts, and ends the interpreter with an error where that fails."""
    return f"import restride.cli; sys.exit(1) if any(map(restride.cli.main, {words!r})) else 0"


@pytest.mark.skipif(not is_available, reason="there is no kernel here")
@pytest.mark.parametrize("form", FORMS)
def test_a_plain_conversion_loads_no_numpy(source: Path, tmp_path: Path, form: str) -> None:
    words = conversions(source, tmp_path, form)

    loaded = modules_after(converts([[*words[0], "--dry-run"], *words]))

    assert {"restride.executors.streaming", "restride.executors.manifests"} <= loaded
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY - {"msgspec"})


@pytest.mark.skipif(not is_available, reason="there is no kernel here")
@pytest.mark.parametrize("form", FORMS)
def test_without_the_kernel_numpy_writes_the_same(source: Path, tmp_path: Path, form: str) -> None:
    outputs = []
    for kernel in ("1", "0"):
        out = tmp_path / kernel
        loaded = modules_after(
            converts(conversions(source, out, form)), environment={"RESTRIDE_KERNEL": kernel}
        )
        assert ("numpy" in loaded) == (kernel == "0")
        files = (path for path in out.rglob("*") if path.is_file())
        outputs.append({path.relative_to(out): path.read_bytes() for path in files})

    assert len(outputs[0]) > 3
    assert outputs[0] == outputs[1]


def test_a_plain_conversion_loads_only_what_it_needs(source: Path, tmp_path: Path) -> None:
    words = conversions(source, tmp_path, "universal")[0]

    loaded = modules_after(converts([[*words, "--dry-run"], words]))

    assert {"restride.executors.streaming", "restride.formats.universal.writer"} <= loaded
    assert not loaded & RARELY_NEEDED


def test_the_algebra_and_the_layouts_load_no_arrays() -> None:
    loaded = loaded_after(
        "import restride; restride.prove(restride.layouts.split((4, 3), mesh={'tp': 2}))"
    )

    assert not loaded & (HEAVY - {"msgspec"})


def test_using_everything_on_numpy_arrays_never_loads_a_framework() -> None:
    loaded = loaded_after(
        "import restride, numpy; layout = restride.layouts.split((4, 3), mesh={'tp': 2});"
        " restride.extract(layout, numpy.zeros((4, 3)), 0); restride.open, restride.convert"
    )

    assert not loaded & {"torch", "deepspeed", "safetensors", "transformers", "rich"}


def test_the_import_contracts_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout
