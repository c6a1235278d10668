"""Real torchrun starts the processes, and starts them again when one was killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from restride.testing.command_line import SAMPLE
from restride.testing.contents import tree

pytest.importorskip("torch")
pytestmark = pytest.mark.interop

# What rank 2 does in its first life: it dies after a few records of its journal.
DYING = """
import os, signal, sys
from restride import cli
from restride.executors import blocks, manifests, resuming
from restride.storage.journal import Journal
for module in (blocks, manifests, resuming):
    module.BLOCK_NBYTES = 4096
append, left = Journal.append, [4]
def dying(self, records):
    append(self, records)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "2" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Journal.append = dying
sys.exit(cli.main(sys.argv[1:]))
"""


def start(*words):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def torchrun(*words):
    return start("-m", "torch.distributed.run", "--standalone", *words)


def test_two_processes_write_the_bytes_of_one_and_the_first_reports(tmp_path):
    options = ("--to", "universal", "--workers", "1")
    alone = start("-m", "restride", "convert", SAMPLE, tmp_path / "alone", *options)

    ran = torchrun(
        *("--nproc-per-node", "2", "-m", "restride"),
        *("convert", SAMPLE, tmp_path / "out", *options),
    )

    assert ran.returncode == alone.returncode == 0, ran.stderr
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")
    told, of_one = (text.partition(" read, ")[0] for text in (ran.stdout, alone.stdout))
    assert told == of_one.replace(str(tmp_path / "alone"), str(tmp_path / "out"))
    assert ran.stdout.count("written") == 1


def test_four_processes_of_which_one_is_killed_are_started_again_and_write_the_bytes_of_one(
    tmp_path,
):
    script = tmp_path / "script.py"
    script.write_text(DYING)
    options = ("--states", "all", "--workers", "1", "--memory", "2MiB", "--resume")
    alone = start(script, "convert", SAMPLE, tmp_path / "alone", *options)

    ran = torchrun(
        *("--nproc-per-node", "4", "--max-restarts", "2", script),
        *("convert", SAMPLE, tmp_path / "out", *options),
    )

    assert ran.returncode == alone.returncode == 0, ran.stderr
    assert "Signal 9 (SIGKILL)" in ran.stderr or "exitcode: -9" in ran.stderr
    assert " of it before)" in ran.stdout
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out", "script.py"]
