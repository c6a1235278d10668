"""Pages of text: drawn with colours on a terminal, plain lines everywhere else.

A command says what it has to say once, as lines, tables and grids of cells. On a terminal rich
draws them. In a pipe or a file there is no colour, nothing is cut to a width, and every row of a
table is one line, so that `grep` and `awk` work.

Names come out of files, which are hostile: a character that a terminal would obey, such as the
start of an escape sequence or the end of a line, is written as Python would spell it.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["Cell", "Column", "Page", "Tone", "open_page", "printable", "tell", "write_json"]

Tone: TypeAlias = Literal["", "bold", "dim", "good", "bad", "warn"]

_STYLES: Final[dict[Tone, str]] = {
    "": "",
    "bold": "bold",
    "dim": "dim",
    "good": "bold green",
    "bad": "bold red",
    "warn": "bold yellow",
}
# A text column may be folded to this width, not below: letters one below the other are no name.
_LEAST_FOLDED: Final = 24
_GAP: Final = 2
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


class Column(NamedTuple):
    """Heading of a table column, and to which side its cells go."""

    name: str
    is_number: bool = False


class Cell(NamedTuple):
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


def printable(text: str) -> str:
    r"""Text that a terminal shows and does not obey.

    Examples:
        >>> print(printable("naïve"), printable("\x1b[31mred\n"))
        naïve \x1b[31mred\n
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def tell(sentence: str) -> None:
    """Write a line to standard error.

    Whoever reads it may be gone, as `tee` is after the first ^C: that ends no work, and changes no
    exit code.
    """
    try:
        sys.stderr.write(f"restride: {printable(sentence)}\n")
        sys.stderr.flush()
    except BrokenPipeError:  # what stays in the buffer would be written, and fail, at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def write_json(value: object) -> None:
    """Write one JSON value on one line of standard output."""
    is_ascii = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    sys.stdout.write(json.dumps(value, ensure_ascii=is_ascii, allow_nan=False) + "\n")


class _PlainPage:
    def line(self, text: str = "", tone: Tone = "") -> None:
        del tone
        sys.stdout.write(f"{printable(text)}\n")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        names = [column.name for column in columns]
        lines = [names, *rows] if any(names) else rows
        lines = [list(map(printable, cells)) for cells in lines]
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
        self._console.print(printable(text), style=_STYLES[tone], markup=False)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        rows = [list(map(printable, cells)) for cells in rows]
        if _least_width(columns, rows) > self._console.width:
            self._stack(columns, rows)
            return
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
            header_style="bold",
            show_header=any(column.name for column in columns),
        )
        for column in columns:
            side: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(column.name, justify=side, overflow="fold", no_wrap=column.is_number)
        for cells in rows:
            table.add_row(*map(Text, cells))
        self._console.print(table)

    def _stack(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Write each row as its first cell and, below it, the others with their headings."""
        from rich.padding import Padding  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        for first, *cells in rows:
            self._console.print(Text(first, overflow="fold"))
            words = [
                f"{column.name} {cell}".strip()
                for column, cell in zip(columns[1:], cells, strict=True)
                if cell
            ]
            self._console.print(Padding(Text(", ".join(words), overflow="fold"), (0, 0, 0, _GAP)))

    def picture(self, lines: Sequence[Sequence[Cell]]) -> None:
        from rich.text import Text  # noqa: PLC0415

        for cells in lines:
            line = Text(no_wrap=True, overflow="crop")
            for cell in cells:
                paint = None if cell.paint is None else _PAINTS[cell.paint % len(_PAINTS)]
                line.append(cell.text, "" if paint is None else f"#000000 on {paint}")
            self._console.print(line)


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Width in which the table is still readable: numbers whole, text cut between its words."""
    widths = []
    for number, column in enumerate(columns):
        cells = [column.name, *(cells[number] for cells in rows)]
        if column.is_number:
            widths.append(max(map(len, cells)))
        else:
            words = (word for cell in cells for word in cell.split())
            widths.append(min(max(map(len, words), default=0), _LEAST_FOLDED))
    return sum(widths) + _GAP * (len(widths) - 1)
