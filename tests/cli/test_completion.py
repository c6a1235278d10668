"""What a shell may offer behind a line that is being typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride.cli._app import COMMANDS, main
from restride.testing.command_line import SAMPLE

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def offered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """What is offered for the last word of a line, as the script of bash asks for it."""

    def complete(line: str) -> list[str]:
        monkeypatch.setenv("_RESTRIDE_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code = main([])
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out.split()

    return complete


def test_commands_are_offered(offered: Callable[[str], list[str]]) -> None:
    assert offered("restride ") == [f"plain,{name}" for name in COMMANDS]
    assert offered("restride con") == ["plain,convert"]


def test_options_and_their_words_are_offered(offered: Callable[[str], list[str]]) -> None:
    assert offered("restride convert --re") == ["plain,--replicas", "plain,--resume"]
    assert offered("restride convert a b --to u") == ["plain,universal"]
    assert "plain,--heads" in offered("restride layouts codegen-qkv --")
    assert "plain,--tp" in offered(f"restride layouts {SAMPLE} --t")


@pytest.mark.parametrize(
    "line", ["restride info x", "restride convert a --rules x", "restride layouts x"]
)
def test_files_are_left_to_the_shell(offered: Callable[[str], list[str]], line: str) -> None:
    assert offered(line) == ["file,x"]


def test_layouts_are_offered_before_files(offered: Callable[[str], list[str]]) -> None:
    assert offered("restride layouts codegen") == ["plain,codegen-qkv"]


@pytest.mark.parametrize("line", ["restride nonsense --", "restride layouts nonsense --x"])
def test_behind_what_makes_no_sense_nothing_is_offered(
    offered: Callable[[str], list[str]], line: str
) -> None:
    assert offered(line) == []


@pytest.mark.parametrize("words", [{}, {"COMP_WORDS": "restride"}, {"COMP_CWORD": "x"}])
def test_who_asks_without_a_line_is_offered_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: dict[str, str]
) -> None:
    for name in ("COMP_WORDS", "COMP_CWORD"):
        monkeypatch.delenv(name, raising=False)
    for name, word in {"_RESTRIDE_COMPLETE": "bash_complete", **words}.items():
        monkeypatch.setenv(name, word)

    assert (main([]), capfd.readouterr()) == (0, ("", ""))


def test_a_script_is_printed_for_each_shell_that_is_known(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_RESTRIDE_COMPLETE", f"{shell}_source")
        assert main([]) == 0
        assert "_RESTRIDE_COMPLETE=" in capfd.readouterr().out

    monkeypatch.setenv("_RESTRIDE_COMPLETE", "cmd_source")
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "say bash_source, zsh_source or fish_source" in err
