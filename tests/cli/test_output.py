"""A terminal gets colours within its width; a pipe gets whole lines and no escapes."""

from __future__ import annotations

import re
import sys
from io import StringIO

import pytest

from restride.cli import main
from restride.cli.output import Cell, Column, open_page, write_json
from restride.testing.command_line import SAMPLE, run

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *arguments: str) -> str:
    terminal = Terminal()
    for name, value in (("COLUMNS", width), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(arguments) == 0
    monkeypatch.undo()
    return terminal.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ("info", str(SAMPLE)),
        ("check", str(SAMPLE)),
        ("demo",),
        ("layouts",),
        ("layouts", "codegen-qkv", "--shape", "12288x4096", "--mesh", "tp=8", "--heads", "32"),
        ("layouts", "experts"),
    ],
    ids=lambda arguments: (
        " ".join(map(str, arguments[:2])) if isinstance(arguments, tuple) else None
    ),
)
def test_nothing_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, arguments: tuple[str, ...]
) -> None:
    shown = on_terminal(monkeypatch, width, *arguments)

    assert "\x1b[" in shown
    assert max(len(line.rstrip()) for line in ESCAPE.sub("", shown).splitlines()) <= width


def test_a_terminal_and_a_pipe_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("layouts", "codegen-qkv", "--shape", "48x2", "--mesh", "tp=2", "--heads", "16")
    shown = ESCAPE.sub("", on_terminal(monkeypatch, 200, *arguments))

    assert shown.split() == run(*arguments).out.split()


def test_the_ranks_have_colours_of_their_own_and_letters_for_those_who_see_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = on_terminal(monkeypatch, 80, "layouts", "split", "--shape", "4x4", "--mesh", "tp=2")

    painted = dict(re.findall(r"\x1b\[38;2;0;0;0;(48;2;[\d;]+)m ([AB]) \d ", shown))
    assert sorted(painted.values()) == ["A", "B"]
    assert len(painted) == 2


def test_a_row_of_a_table_in_a_pipe_is_one_line_however_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "x" * 300
    open_page().table([Column("name"), Column("n", is_number=True)], [[name, "1"], ["y", "22"]])

    assert capsys.readouterr().out == f"name{' ' * 298} n\n{name}   1\ny{' ' * 301}22\n"


def test_a_table_without_names_has_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    open_page().table([Column(""), Column("")], [["a", "b"]])

    assert capsys.readouterr().out == "a  b\n"


def test_a_picture_in_a_pipe_is_letters(capsys: pytest.CaptureFixture[str]) -> None:
    open_page().picture([[Cell("0-3 "), Cell("A", 0), Cell("B ", 1)]])

    assert capsys.readouterr().out == "0-3 AB\n"


def test_json_has_one_line_and_no_numbers_that_json_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_json({"name": "Größe\n"})

    assert capsys.readouterr().out == '{"name": "Größe\\n"}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json({"largest": float("nan")})
