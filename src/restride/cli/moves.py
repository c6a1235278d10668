"""Rows or columns that two arrays have in another order, in words and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.cli.sizes import format_count
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.arrays.slice_sums import Moves
    from restride.cli.output import Page
    from restride.comparison import ArrayDifference

__all__ = ["moves_to_json", "show_moves"]

_MOST_SHOWN: Final = 20
_MOST_RUNS: Final = 4


def show_moves(page: Page, differences: Sequence[ArrayDifference]) -> None:
    """Write one line for all arrays whose rows or columns moved alike."""
    alike: dict[Moves, list[ArrayDifference]] = {}
    for row in differences:
        if row.moves is not None:
            alike.setdefault(row.moves, []).append(row)
    for moves, rows in list(alike.items())[:_MOST_SHOWN]:
        page.line(f"{_where(rows)}: {_in_words(moves)}", "warn")


def _where(rows: Sequence[ArrayDifference]) -> str:
    more = f" and {format_count(len(rows) - 1, 'array')} more" if rows[1:] else ""
    return f"{rows[0].tensor}, {rows[0].state}{more}"


def _in_words(moves: Moves) -> str:
    if moves.along == "tensor":
        return f"in B it is what A has as {moves.tensor}"
    if moves.along == "transposed":
        return "the same elements, transposed"
    parts = [
        f"{_span(there, count)} of B {which(count, 'is', 'are')} {_span(here, count)} of A"
        for there, here, count in moves.runs[:_MOST_RUNS]
    ]
    left = moves.run_count - _MOST_RUNS
    more = [f"{format_count(left, 'run')} more, which --json lists"] if left > 0 else []
    blocks = f", in blocks of {moves.block}" if moves.block > 1 else ""
    return f"the same {moves.along} in another order{blocks}: {'; '.join([*parts, *more])}"


def _span(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


def moves_to_json(moves: Moves) -> dict[str, object]:
    """The same for machines."""
    return {
        "along": moves.along,
        "block": moves.block,
        "run_count": moves.run_count,
        "runs": [list(run) for run in moves.runs],
        "tensor": moves.tensor,
    }
