"""The memory budget holds in a fresh process, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Imports everything a conversion uses, converts, and says the largest resident set it ever had.
MEASURED = """
import json, sys
from restride import api
from restride.formats import deepspeed, safetensors, universal
from restride.formats.deepspeed import companions, training

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before = peak()
report = api.convert(
    sys.argv[1], sys.argv[2], to=sys.argv[3], states="all", budget_nbytes=int(sys.argv[4])
)
print(json.dumps([before, peak(), report.projected_nbytes, report.written_nbytes]))
"""


def converted(source, out, to, budget_nbytes):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, source, out, to, str(budget_nbytes)],
        check=True,
        capture_output=True,
        text=True,
    )
    shutil.rmtree(out)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize(
    ("to", "budget_nbytes"),
    [("safetensors", 256_000_000), ("safetensors", 64_000_000), ("universal", 64_000_000)],
)
def test_four_gibibytes_are_converted_inside_the_budget(to, budget_nbytes, large, tmp_path):
    before, peak, projected, written = converted(large, tmp_path / "out", to, budget_nbytes)

    assert written > 4 << 30
    assert projected <= budget_nbytes
    assert peak - before <= budget_nbytes


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 4 GiB in DeepSpeed's form, TP2 x DP2."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "synthetic.py",
            folder,
            "--hidden=1280",
            "--layers=17",
            "--vocab=24000",
        ],
        check=True,
        capture_output=True,
    )
    yield folder
    shutil.rmtree(folder)
