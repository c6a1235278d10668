"""The rectangles of a tensor that its ranks store in one go: what a layout looks like.

The full tensor is seen as rows and columns: the last dimension is the columns, all others together
are the rows. A layout that does not follow rows (a flat partition) is seen as one long row.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.piece import Piece

__all__ = ["Block", "Grid", "block_grid"]

# More than a screen can show; above it the axes say more than a picture.
_MOST_BLOCKS = 4096


class Block(Frozen):
    """A rectangle of the full tensor in the shard of one rank.

    Attributes:
        rank: Who holds it.
        rows: Rows of the full tensor.
        columns: Columns of the full tensor.
        shard_base: Shard index of its first element.
    """

    rank: int
    rows: range
    columns: range
    shard_base: int


class Grid(Frozen):
    """The full tensor cut at every edge of every block.

    Attributes:
        rows: Row intervals, from the top.
        columns: Column intervals, from the left.
        holders: For each interval of rows and of columns the ranks that hold the cell, sorted;
            none where there is a hole.
        order: For each rank the numbers of its cells, counted row by row, in shard order.
        is_flat: Whether the tensor is seen as one long row, since the blocks do not follow rows.
    """

    rows: tuple[range, ...]
    columns: tuple[range, ...]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    order: tuple[tuple[int, ...], ...]
    is_flat: bool


def block_grid(layout: Layout) -> Grid | None:
    """Cut the full tensor into the cells that its ranks hold, or None where they are too many.

    Cost:
        O(cells that blocks cover), at most a few thousand. Never walks elements.
    """
    if not 0 < layout.full_numel <= sys.maxsize:  # a range has no length beyond it
        return None
    width = layout.full_shape[-1] if layout.full_shape else 1
    blocks = _all_blocks(layout, width)
    if blocks is None:
        width = layout.full_numel
        blocks = _all_blocks(layout, width)
    if blocks is None:
        return None
    rows = _intervals([block.rows for block in blocks], layout.full_numel // width)
    columns = _intervals([block.columns for block in blocks], width)
    if len(rows) * len(columns) > _MOST_BLOCKS:
        return None
    return _fill(rows, columns, blocks, layout.rank_count)


def _fill(
    rows: tuple[range, ...], columns: tuple[range, ...], blocks: Sequence[Block], rank_count: int
) -> Grid:
    row_starts = [interval.start for interval in rows]
    column_starts = [interval.start for interval in columns]
    holders: list[list[set[int]]] = [[set() for _ in columns] for _ in rows]
    order: list[list[int]] = [[] for _ in range(rank_count)]
    for block in sorted(blocks, key=lambda block: block.shard_base):
        first, last = (bisect_left(row_starts, edge) for edge in (block.rows[0], block.rows.stop))
        left, right = (
            bisect_left(column_starts, edge) for edge in (block.columns[0], block.columns.stop)
        )
        for row, column in product(range(first, last), range(left, right)):
            holders[row][column].add(block.rank)
            order[block.rank].append(row * len(columns) + column)
    return Grid(
        rows,
        columns,
        tuple(tuple(tuple(sorted(cell)) for cell in line) for line in holders),
        tuple(map(tuple, order)),
        is_flat=len(rows) == 1 and rows[0] == range(1),
    )


def _intervals(ranges: Sequence[range], size: int) -> tuple[range, ...]:
    edges = {0, size, *(r.start for r in ranges), *(r.stop for r in ranges)}
    return tuple(range(start, stop) for start, stop in pairwise(sorted(edges)))


def _all_blocks(layout: Layout, width: int) -> list[Block] | None:
    """Blocks of all pieces, or None where a piece is no rectangle or there are too many."""
    blocks: list[Block] = []
    for piece in layout.all_pieces:
        digits = _digits(piece, width)
        if digits is None:
            return None
        repeated, height, breadth = _take_runs(digits)
        if len(blocks) + prod(digit.extent for digit in repeated) > _MOST_BLOCKS:
            return None
        blocks.extend(_walk(piece, repeated, height, breadth, width))
    return blocks


class _Digit(NamedTuple):
    extent: int
    row: int
    column: int
    rank: int
    shard: int


def _digits(piece: Piece, width: int) -> list[_Digit] | None:
    """Axes as steps of whole rows or inside a row; None where one step does both."""
    digits: list[_Digit] = []
    for axis in piece.axes:
        full, rank, shard = axis.full_stride, axis.rank_stride, axis.shard_stride
        if full % width == 0:
            digits.append(_Digit(axis.extent, full // width, 0, rank, shard))
            continue
        steps = width // full if full > 0 and width % full == 0 else 0
        if steps and axis.extent > steps and axis.extent % steps == 0:
            digits.append(_Digit(axis.extent // steps, 1, 0, rank * steps, shard * steps))
            digits.append(_Digit(steps, 0, full, rank, shard))
        else:
            digits.append(_Digit(axis.extent, 0, full, rank, shard))
    first = piece.full_base % width
    low = first + sum((d.extent - 1) * min(d.column, 0) for d in digits)
    high = first + sum((d.extent - 1) * max(d.column, 0) for d in digits)
    return digits if low >= 0 and high < width else None


def _take_runs(digits: list[_Digit]) -> tuple[list[_Digit], int, int]:
    """Split off the rows and the columns that follow each other inside one shard."""
    repeated, height, breadth = list(digits), 1, 1
    row = next((d for d in repeated if d.row == 1 and not d.rank), None)
    if row is not None:
        repeated.remove(row)
        height = row.extent
    column = next((d for d in repeated if d.column == 1 and not d.rank), None)
    if column is not None:
        repeated.remove(column)
        breadth = column.extent
    return repeated, height, breadth


def _walk(
    piece: Piece, repeated: list[_Digit], height: int, breadth: int, width: int
) -> Iterator[Block]:
    first_row, first_column = divmod(piece.full_base, width)
    for steps in product(*(range(digit.extent) for digit in repeated)):
        moved = list(zip(steps, repeated, strict=True))
        row = first_row + sum(step * digit.row for step, digit in moved)
        column = first_column + sum(step * digit.column for step, digit in moved)
        yield Block(
            piece.rank_base + sum(step * digit.rank for step, digit in moved),
            range(row, row + height),
            range(column, column + breadth),
            piece.shard_base + sum(step * digit.shard for step, digit in moved),
        )
