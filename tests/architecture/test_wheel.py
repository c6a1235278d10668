"""The wheel holds everything that it needs, and needs nothing but what it declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def declared(requirements: list[str]) -> set[str]:
    """Names of the packages that are needed without extras."""
    unconditional = [line for line in requirements if "extra ==" not in line]
    return {re.split(r"[ ;<>=!~\[]", line, maxsplit=1)[0].lower() for line in unconditional}


def link_packages(names: set[str], folder: Path) -> None:
    """Make these packages, and what they declare in turn, importable from `folder` alone."""
    done: set[str] = set()
    todo = sorted(names)
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        distribution = metadata.distribution(name)
        todo += sorted(declared(distribution.requires or []))
        for top in {Path(file).parts[0] for file in distribution.files or []} - {".."}:
            place = folder / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))))


@pytest.mark.slow
def test_the_wheel_tells_the_demo_with_nothing_but_what_it_declares(
    wheel: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        content = next(name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(content).decode().splitlines()
    needed = declared([line[15:] for line in lines if line.startswith("Requires-Dist: ")])
    (tmp_path / "packages").mkdir()
    link_packages(needed, tmp_path / "packages")

    # -S hides the packages of the environment that runs the tests.
    result = subprocess.run(
        [sys.executable, "-S", "-m", "restride", "demo", "--json"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{installed}:{tmp_path / 'packages'}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert needed == {"click", "msgspec", "numpy", "rich"}
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["different"] == []


@pytest.mark.slow
def test_the_wheel_holds_the_sample_the_licence_and_the_type_marker_and_no_tests(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert "restride/py.typed" in names
    assert "restride/cli/sample/latest" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests")]
    assert wheel.stat().st_size < 1_500_000
