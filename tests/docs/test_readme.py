"""What the README shows is what happens: its blocks are run, in order, in one folder.

A `console` block is one command and what it writes. White space, times, rates and the size of the
buffers may differ, and a line of `...` stands for any lines. A `python` block is executed.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from restride.testing.command_line import SAMPLE, run

README = Path(__file__).resolve().parents[2] / "README.md"
_TIMES = re.compile(r"\d+(\.\d+)? (s|min|h)\b( \d+ (s|min)\b)?")
_RATES = re.compile(r"\d+(\.\d+)? [kMGT]?B/s")
# They depend on the number of cores.
_BUFFERS = re.compile(r"buffers below \d+(\.\d+)? [kMGT]?B")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def blocks() -> list[Block]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in fenced]


def sessions() -> list[tuple[str, str]]:
    """The command of each console block, with what the block shows of its output."""
    shown = [block.text.partition("\n") for block in blocks() if block.language == "console"]
    return [(command.removeprefix("$ "), output) for command, _, output in shown]


def loosely(text: str) -> list[str]:
    masked = _TIMES.sub("TIME", _RATES.sub("RATE", _BUFFERS.sub("BUFFERS", text)))
    return [" ".join(line.split()) for line in masked.splitlines() if line.strip()]


def matches(shown: str, written: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in loosely(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in loosely(written))) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_every_command_of_the_readme_writes_what_the_readme_shows() -> None:
    commands = sessions()

    assert {shlex.split(command)[1] for command, _ in commands} == {
        "info",
        "check",
        "convert",
        "diff",
        "layouts",
        "demo",
    }
    for command, shown in commands:
        ran = run(*shlex.split(command)[1:])
        assert ran.code == 0, ran.err
        assert matches(shown, ran.out), f"$ {command}\n{ran.out}"


@pytest.mark.usefixtures("folder")
def test_the_python_of_the_readme_runs() -> None:
    programs = [block.text for block in blocks() if block.language == "python"]

    assert programs
    names: dict[str, object] = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)  # noqa: S102


def test_every_link_of_the_readme_to_a_file_resolves() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README.read_text())

    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target


def test_a_command_that_differs_from_the_readme_would_be_noticed() -> None:
    assert matches("a  b\n...\nz 0.1 s\n", "a b\nc\nd\nz 2.5 s\n")
    assert not matches("a\nz\n", "a\nb\nz\n")
    assert not matches("a 1 row\n", "a 2 row\n")
