"""What is loaded when, and who may import whom."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"numpy", "torch", "rich", "msgspec", "deepspeed", "safetensors", "transformers"}


# What only some conversions need: presets and rule files to cut for other ranks, other formats, and
# what works on arrays in memory, compares or checks.
RARELY_NEEDED = {
    "difflib",
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


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after `code`."""
    program = (
        f"import contextlib, io, json, sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
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


def test_the_version_loads_no_more_than_the_kernel_needs() -> None:
    loaded = loaded_after("import restride.cli; restride.cli.main(['--version'])")

    assert loaded & HEAVY <= {"numpy"}


def test_a_plain_conversion_loads_only_what_it_needs(tmp_path: Path) -> None:
    weight = np.ones((4, 2), np.float32)
    states = dict.fromkeys(("weight", "fp32", "exp_avg", "exp_avg_sq"), weight)
    run = ZeroRun(dp=2, tp=2, parameters={"a.weight": Parameter((4, 2), states, cut=(0, (2, 2)))})
    write_zero_run(tmp_path / "in", run)
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "universal"]

    loaded = modules_after(
        f"import restride.cli; sys.exit(1) if restride.cli.main({words!r} + ['--dry-run']) else 0"
    )

    assert {"restride.executors.streaming", "restride.formats.universal.writer"} <= loaded
    assert not loaded & (RARELY_NEEDED | (HEAVY - {"msgspec", "numpy"}))


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
