"""A terminal gets colours within its width; a pipe gets whole lines and no escapes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from typing import TYPE_CHECKING

import pytest

from restride.cli import main
from restride.cli.output import Cell, Column, open_page, write_json
from restride.testing.command_line import SAMPLE, run

if TYPE_CHECKING:
    from pathlib import Path

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


def test_json_is_ascii_where_the_stream_takes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)

    write_json({"name": "Größe"})

    stream.flush()
    assert stream.buffer.getvalue() == b'{"name": "Gr\\u00f6\\u00dfe"}\n'


ROWS = [
    ["model.layers.0.self_attn.q_proj.weight", "0.123456789", "two words"],
    ["y\x1b[31m", "1", ""],
]
COLUMNS = [Column("name"), Column("largest difference", is_number=True), Column("what")]


@pytest.mark.parametrize("width", [20, 40])
def test_a_table_that_does_not_fit_is_written_row_by_row(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", terminal)

    open_page().table(COLUMNS, ROWS)

    lines = ESCAPE.sub("", terminal.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    words = " ".join(" ".join(lines).split())
    assert "largest difference 0.123456789, what two words" in words
    assert r"y\x1b[31m largest difference 1" in words


@pytest.mark.parametrize("stream", [StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_a_name_out_of_a_file_gives_the_terminal_no_orders(
    monkeypatch: pytest.MonkeyPatch, stream: StringIO
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    page = open_page()

    page.line("a\x1b]0;title\x07 b\nc")
    page.table([Column("n"), Column("")], [["x\ny\x1b[2J", "\u202e\udc80"]])

    shown = ESCAPE.sub("", stream.getvalue())
    assert r"a\x1b]0;title\x07 b\nc" in shown
    assert r"x\ny\x1b[2J  \u202e\udc80" in shown
    assert len(shown.splitlines()) == 3


def test_an_error_gives_the_terminal_no_orders() -> None:
    assert run("info", "a\x1b[31m\n").err == "restride: a\\x1b[31m\\n: no such file or folder\n"


def in_a_process(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", line, sys.executable, str(SAMPLE)],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )


def test_a_closed_output_ends_nothing_before_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"

    ran = in_a_process(f'exec "$0" -m restride convert "$1" "{out}" >&- 2>&-')

    assert ran.returncode == 0
    assert run("check", out).code == 0


def test_a_stream_of_few_letters_gets_the_others_spelled(tmp_path: Path) -> None:
    ran = in_a_process(
        f'exec "$0" -m restride convert "$1" "{tmp_path}/Größe"', PYTHONIOENCODING="ascii"
    )

    assert ran.returncode == 0, ran.stderr
    assert rb"Gr\xf6\xdfe: 13 arrays" in ran.stdout
