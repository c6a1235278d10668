"""What is loaded when, and who may import whom."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"numpy", "torch", "rich", "msgspec", "deepspeed", "safetensors", "transformers"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    program = (
        f"import contextlib, io, json, sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout))


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
