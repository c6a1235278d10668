"""What each command writes, word for word.

After a deliberate change: ``RESTRIDE_WRITE_GOLDEN=1 python -m pytest tests/cli/test_golden.py``,
then read the difference.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from restride.testing.command_line import SAMPLE, run

GOLDEN = Path(__file__).with_name("golden")
COMMANDS = {
    "help": ("--help",),
    "info": ("info", "codegen-tp2-dp2"),
    "check": ("check", "codegen-tp2-dp2"),
    "convert": ("convert", "codegen-tp2-dp2", "converted"),
    "dry-run": ("convert", "codegen-tp2-dp2", "converted", "--states", "all", "--dry-run"),
    "layouts": ("layouts",),
    "layouts-codegen-qkv": (
        *("layouts", "codegen-qkv", "--shape", "3072x1024"),
        *("--mesh", "tp=2", "--heads", "16"),
    ),
    "layouts-bigcode-qkv": ("layouts", "bigcode-qkv"),
    "layouts-padded": ("layouts", "padded"),
    "layouts-checkpoint": ("layouts", "codegen-tp2-dp2", "--tp", "1"),
    "help-layouts-checkpoint": ("layouts", "codegen-tp2-dp2", "--help"),
    "demo": ("demo",),
    **{
        f"help-{name}": (name, "--help")
        for name in ("info", "check", "convert", "diff", "fingerprint", "layouts", "demo")
    },
}
# The same of a real checkpoint in which ranks went on with copies of their own, with exit codes.
DRIFTED = {
    "drifted-check": (1, ("check", "gptbigcode-tp2")),
    "drifted-convert": (
        0,
        (
            *("convert", "gptbigcode-tp2", "converted", "--states", "all"),
            *("--replicas", "first", "--replicas", "*.bias=mean", "--replicas", "*.h.1.*=tp=1"),
        ),
    ),
}
# The memory of the plan depends on the number of cores, the time on everything.
_VARYING = re.compile(r"\d+\.\d\d s, memory below [\d.]+ .B")
_MACHINE = re.compile(r"below [\d.]+ .B with \d threads?|[\d.]+ .B free")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_what_it_wrote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # help is wrapped to the terminal
    compare(name, 0, COMMANDS[name])


@pytest.mark.parametrize("name", DRIFTED)
def test_copies_that_drifted_are_a_table_with_what_to_do(
    name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shared / "checkpoints" / "gptbigcode_tp2_z1", tmp_path / "gptbigcode-tp2")
    monkeypatch.chdir(tmp_path)

    compare(name, *DRIFTED[name])


def compare(name: str, code: int, command: tuple[str, ...]) -> None:
    """Run a command, and compare or record what it writes."""
    recorded = GOLDEN / f"{name}.txt"

    ran = run(*command)

    written = _MACHINE.sub("MACHINE", _VARYING.sub("0.00 s, memory below SIZE", ran.out))
    if os.environ.get("RESTRIDE_WRITE_GOLDEN"):
        recorded.write_text(written)
    assert ran.code == code
    assert ran.err == ""
    assert written == recorded.read_text()


def test_nothing_is_recorded_that_no_command_writes() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*COMMANDS, *DRIFTED}
