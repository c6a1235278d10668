"""Pages of text: drawn with colours on a terminal, plain lines everywhere else.

A command says what it has to say once, as lines, tables and grids of cells. On a terminal rich
draws them. In a pipe or a file there is no colour, nothing is cut to a width, and every row of a
table is one line, so that `grep` and `awk` work.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["Cell", "Column", "Page", "Tone", "open_page", "write_json"]

Tone: TypeAlias = Literal["", "bold", "dim", "good", "bad", "warn"]

_STYLES: Final[dict[Tone, str]] = {
    "": "",
    "bold": "bold",
    "dim": "dim",
    "good": "bold green",
    "bad": "bold red",
    "warn": "bold yellow",
}
# Light backgrounds, on which black letters can be read; neighbours differ well.
_PAINTS: Final = (
    "#6cb6ff",
    "#ffb454",
    "#7fd88f",
    "#ff8f8f",
    "#c8a6ff",
    "#e8d25c",
    "#ff9fd0",
    "#66d9c8",
    "#b9c6d8",
    "#d9a57a",
    "#b5e61d",
    "#ffd0c0",
    "#9aa5ff",
    "#c2b280",
    "#a0f0f0",
    "#e0b0e0",
)


@dataclass(frozen=True, slots=True)
class Column:
    """Heading of a table column, and to which side its cells go."""

    name: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a picture.

    Attributes:
        text: What is written; letters tell the ranks apart where there is no colour.
        paint: Number of the colour behind the text, or None for none.
    """

    text: str
    paint: int | None = None


class Page(Protocol):
    """Where a command writes what people read."""

    def line(self, text: str = "", tone: Tone = "") -> None:
        """Write one line."""

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Write a heading, if the columns have names, and one line for each row."""

    def picture(self, lines: Sequence[Sequence[Cell]]) -> None:
        """Write lines of coloured cells."""


def open_page() -> Page:
    """Page on standard output: rich where it is a terminal, plain where it is not."""
    if not sys.stdout.isatty():
        return _PlainPage()
    from rich.console import Console  # noqa: PLC0415 - 50 ms that a pipe need not pay

    return _RichPage(Console(highlight=False))


def write_json(value: object) -> None:
    """Write one JSON value on one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


class _PlainPage:
    def line(self, text: str = "", tone: Tone = "") -> None:
        del tone
        sys.stdout.write(f"{text}\n")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        names = [column.name for column in columns]
        lines = [names, *rows] if any(names) else rows
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for cells in lines:
            padded = [
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for cell, width, column in zip(cells, widths, columns, strict=True)
            ]
            self.line("  ".join(padded).rstrip())

    def picture(self, lines: Sequence[Sequence[Cell]]) -> None:
        for cells in lines:
            self.line("".join(cell.text for cell in cells).rstrip())


class _RichPage:
    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, text: str = "", tone: Tone = "") -> None:
        self._console.print(text, style=_STYLES[tone], markup=False)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="bold",
            show_header=any(column.name for column in columns),
        )
        for column in columns:
            side: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(column.name, justify=side, overflow="fold", no_wrap=column.is_number)
        for cells in rows:
            table.add_row(*map(Text, cells))
        self._console.print(table)

    def picture(self, lines: Sequence[Sequence[Cell]]) -> None:
        from rich.text import Text  # noqa: PLC0415

        for cells in lines:
            line = Text(no_wrap=True, overflow="crop")
            for cell in cells:
                paint = None if cell.paint is None else _PAINTS[cell.paint % len(_PAINTS)]
                line.append(cell.text, "" if paint is None else f"#000000 on {paint}")
            self._console.print(line)
