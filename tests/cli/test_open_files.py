"""A process may open fewer files than a checkpoint has, however few these are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from restride import api
from restride.testing.command_line import SAMPLE

LIMITED = (
    "import resource, sys\n"
    "limit = int(sys.argv.pop(1))\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
    "from restride.cli import main\n"
    "sys.exit(main())\n"
)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A checkpoint of 80 files."""
    out = tmp_path_factory.mktemp("many") / "checkpoint"
    return api.convert(SAMPLE, out, to="deepspeed", tp=1, dp=40, zero=3, durable=False).out


def run_with(limit, *arguments):
    command = [sys.executable, "-c", LIMITED, limit, *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("limit", [64, 32, 20])
@pytest.mark.parametrize("target", ["universal", "deepspeed --dp 30 --zero 1", "safetensors"])
def test_as_few_files_as_the_limit_allows_are_open(many, tmp_path, limit, target):
    out = tmp_path / "out"
    for command in (
        ("convert", many, out, "--to", *target.split(), "--workers", 8),
        ("check", out),
        ("diff", many, out, "--states", "weights"),
    ):
        ran = run_with(limit, *command)

        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_limit_below_that_is_an_error_with_one_that_is_enough(many, tmp_path):
    ran = run_with(6, "convert", many, tmp_path / "out", "--to", "universal")

    assert ran.returncode == 2
    assert ran.stderr.endswith("raise the limit of open files (ulimit -n): 32 are enough\n")
