"""What the README shows is what happens: its blocks are run, in order, in one folder."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from restride.testing.command_line import SAMPLE, run
from restride.testing.documents import blocks_of, links_of, matches, sessions_of

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_every_command_of_the_readme_writes_what_the_readme_shows() -> None:
    commands = sessions_of(README)

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
    programs = [block.text for block in blocks_of(README) if block.language == "python"]

    assert programs
    names: dict[str, object] = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)  # noqa: S102


def test_every_link_of_the_readme_to_a_file_resolves() -> None:
    targets = links_of(README)

    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target


def test_a_command_that_differs_from_the_readme_would_be_noticed() -> None:
    assert matches("a  b\n...\nz 0.1 s\n", "a b\nc\nd\nz 2.5 s\n")
    assert not matches("a\nz\n", "a\nb\nz\n")
    assert not matches("a 1 row\n", "a 2 row\n")
