"""Run what documentation shows: commands with what they write, and programs.

A `console` block is one command and what it writes. White space, times, rates and the size of the
buffers may differ, and a line of `...` stands for any lines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Block", "blocks_of", "links_of", "matches", "sessions_of", "tables_of"]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMES = re.compile(r"\d+(\.\d+)? (s|min|h)\b( \d+ (s|min)\b)?")
# One in brackets is told of what takes longer than a second, as anything may on a busy machine.
_RATES = re.compile(r"( \()?\d+(\.\d+)? [kMGT]?B/s(?(1)\))")
# They depend on the number of cores.
_BUFFERS = re.compile(r"memory below \d+(\.\d+)? [kMGT]?B")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Fenced blocks of a page of Markdown, in its order."""
    return [Block(language, text) for language, text in _FENCED.findall(page.read_text("utf-8"))]


def sessions_of(page: Path) -> list[tuple[str, str]]:
    """The command of each console block, with what the block shows of its output."""
    shown = [block.text.partition("\n") for block in blocks_of(page) if block.language == "console"]
    return [(command.removeprefix("$ "), output) for command, _, output in shown]


def links_of(page: Path) -> list[str]:
    """Files that a page links to, as it names them."""
    return re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))


def tables_of(page: Path) -> list[list[list[str]]]:
    """Rows of each table of a page, without the head; a row is its cells."""
    tables: list[list[list[str]]] = [[]]
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    return [table[2:] for table in tables if table]


def matches(shown: str, written: str) -> bool:
    r"""Whether a command wrote what is shown of it.

    Examples:
        >>> matches("a  b\n...\nz 0.1 s\n", "a b\nc\nd\nz 2.5 s\n")
        True
        >>> matches("0.9 s, z\n", "1.2 s (3 MB/s), z\n")
        True
        >>> matches("a\nz\n", "a\nb\nz\n")
        False
    """
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in _loosely(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _loosely(written))) is not None


def _rate(found: re.Match[str]) -> str:
    return "" if found[1] else "RATE"


def _loosely(text: str) -> list[str]:
    masked = _TIMES.sub("TIME", _RATES.sub(_rate, _BUFFERS.sub("BUFFERS", text)))
    return [" ".join(line.split()) for line in masked.splitlines() if line.strip()]
