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
    "layouts": ("layouts",),
    "layouts-codegen-qkv": (
        *("layouts", "codegen-qkv", "--shape", "3072x1024"),
        *("--mesh", "tp=2", "--heads", "16"),
    ),
    "layouts-bigcode-qkv": ("layouts", "bigcode-qkv"),
    "layouts-padded": ("layouts", "padded"),
    "demo": ("demo",),
    **{
        f"help-{name}": (name, "--help")
        for name in ("info", "check", "convert", "diff", "fingerprint", "layouts", "demo")
    },
}
# The memory of the plan depends on the number of cores, the time on everything.
_VARYING = re.compile(r"\d+\.\d\d s, buffers below [\d.]+ .B")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_what_it_wrote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # help is wrapped to the terminal
    recorded = GOLDEN / f"{name}.txt"

    ran = run(*COMMANDS[name])

    written = _VARYING.sub("0.00 s, buffers below SIZE", ran.out)
    if os.environ.get("RESTRIDE_WRITE_GOLDEN"):
        recorded.write_text(written)
    assert ran.code == 0
    assert ran.err == ""
    assert written == recorded.read_text()


def test_nothing_is_recorded_that_no_command_writes() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)
