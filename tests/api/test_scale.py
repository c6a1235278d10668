"""Checkpoints that no test machine has room for: their headers, with holes for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from restride import api

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_BUDGET_NBYTES = 128 << 20
SIZES = {"hidden": 8192, "layers": 12, "vocab": 32000, "tp": 2, "dp": 1}


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storages of 15 GB each, as torch itself writes them, in 108 GB of files."""
    pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("huge") / "checkpoint"
    sizes = [f"--{key}={value}" for key, value in SIZES.items()]
    script = str(BENCHMARKS / "synthetic.py")
    command = [sys.executable, script, str(folder), "--sparse", *sizes]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    files = [path.stat() for path in (folder / "step").iterdir()]
    if sum(status.st_blocks * 512 for status in files) > 1 << 30:
        pytest.skip("the file system of temporary files has no holes")
    assert sum(status.st_size for status in files) > 100 << 30
    return folder


@pytest.mark.interop
def test_storages_of_any_size_are_found(huge: Path) -> None:
    catalog = api.open(huge)

    sizes = {tensor.name: tensor.layout.full_numel for tensor in catalog.tensors}
    assert len(sizes) == 9 * 12 + 3
    assert sum(sizes.values()) == 12 * (9 * 8192**2 + 2 * 8192) + 2 * 32000 * 8192 + 8192
    regions = [
        region
        for tensor in catalog.tensors
        for entry in tensor.states.values()
        for region in entry.regions
        if region is not None
    ]
    assert max(region.start_nbytes for region in regions) > 1 << 34


@pytest.mark.interop
@pytest.mark.parametrize(
    "wanted",
    [
        api.Wanted("safetensors", states="all"),
        api.Wanted("universal"),
        api.Wanted("deepspeed", tp=8, dp=4, zero=3),
        api.Wanted("deepspeed", tp=1, dp=1, zero=0),
    ],
    ids=lambda wanted: f"{wanted.to}-{wanted.tp}",
)
def test_a_conversion_is_planned_within_a_budget_whatever_the_size(
    huge: Path, tmp_path: Path, wanted: api.Wanted
) -> None:
    projection = api.dry_run(huge, tmp_path / "out", wanted, budget_nbytes=_BUDGET_NBYTES)

    assert projection.nbytes > 90_000_000_000
    assert projection.projected_nbytes <= _BUDGET_NBYTES
