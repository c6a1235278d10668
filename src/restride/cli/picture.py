"""Draw a layout: the full tensor as blocks by rank, the order in each shard, and the axes."""

from __future__ import annotations

from itertools import groupby, zip_longest
from string import ascii_letters, digits
from typing import TYPE_CHECKING

from restride.cli.blocks import block_grid
from restride.cli.output import Cell, Column
from restride.cli.sizes import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.piece import Axis, Piece
    from restride.cli.blocks import Grid
    from restride.cli.output import Page

__all__ = ["draw_layout", "format_shape"]

_LETTERS = ascii_letters.upper()[:26] + ascii_letters[:26] + digits
_EVERYONE, _HOLE, _BEYOND = "=", ".", "+"
_MOST_COLUMNS = 8
_BAR_WIDTH = 48
_FOLD_HEIGHT, _MOST_FOLD_HEIGHT, _MOST_FOLDS = 12, 24, 3
_MOST_RANKS, _MOST_IN_ORDER, _MOST_PIECES = 16, 24, 6


def draw_layout(page: Page, layout: Layout) -> None:
    """Write the blocks, the shards and the axes of `layout`."""
    grid = block_grid(layout)
    if grid is None:
        page.line("the blocks are too many or too few to draw; the axes say where they are")
    else:
        _draw_blocks(page, layout, grid)
        page.line()
        _draw_shards(page, layout, grid)
    page.line()
    _draw_axes(page, layout)


def format_shape(shape: Shape) -> str:
    """Write a shape as it is given on the command line.

    Examples:
        >>> format_shape((3072, 1024)), format_shape(())
        ('3072x1024', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def _draw_blocks(page: Page, layout: Layout, grid: Grid) -> None:
    count = len(grid.rows) * len(grid.columns)
    heights = {len(interval) for interval in grid.rows}
    widths = {len(interval) for interval in grid.columns}
    alike = ""
    if len(heights) == len(widths) == 1 < count:
        alike = f" of {format_count(min(widths), 'element')}"
        alike = alike if grid.is_flat else f" of {min(heights)}x{min(widths)}"
    page.line(
        f"full tensor {format_shape(layout.full_shape)}: {format_count(count, 'block')}{alike}",
        "bold",
    )
    bands = [range(row, row + 1) for row in range(len(grid.rows))]
    if len(bands) > _FOLD_HEIGHT * _MOST_FOLDS:
        bands = [_band(group) for _, group in groupby(bands, lambda band: grid.holders[band[0]])]
    stride = -(-len(bands) // (_MOST_FOLD_HEIGHT * _MOST_FOLDS))
    if stride > 1:
        page.line(f"one row of blocks in {stride} is drawn", "dim")
        bands = bands[::stride]
    lines = _block_lines(grid, bands, layout.rank_count)
    height = max(_FOLD_HEIGHT, -(-len(lines) // _MOST_FOLDS))
    folds = [lines[start : start + height] for start in range(0, len(lines), height)]
    page.picture([_beside(parts) for parts in zip_longest(*folds, fillvalue=())])
    if any(
        _letters(cell, layout.rank_count) == _EVERYONE for line in grid.holders for cell in line
    ):
        page.line(f"{_EVERYONE} is held by every rank", "dim")


def _band(rows: Iterable[range]) -> range:
    first, *rest = rows
    return range(first.start, rest[-1].stop if rest else first.stop)


def _block_lines(grid: Grid, bands: Sequence[range], rank_count: int) -> list[list[Cell]]:
    """One line for each band: which rows of the tensor it is, then its cells."""
    labels = [_row_label(grid, band) for band in bands]
    width = max(map(len, labels))
    draw = _numbered_cells if len(grid.columns) <= _MOST_COLUMNS else _lettered_cells
    cells = draw(grid, bands, rank_count)
    return [[Cell(f"{label:>{width}}  "), *line] for label, line in zip(labels, cells, strict=True)]


def _numbered_cells(grid: Grid, bands: Sequence[range], rank_count: int) -> list[list[Cell]]:
    """Cells with the letters of their ranks and their number, counted row by row."""
    count = len(grid.columns)
    texts = [
        [
            (_letters(ranks, rank_count), _numbers(band, column, count))
            for column, ranks in enumerate(grid.holders[band[0]])
        ]
        for band in bands
    ]
    letters = max(len(text) for line in texts for text, _ in line)
    numbers = max(len(number) for line in texts for _, number in line)
    return [
        [
            Cell(f" {text:<{letters}} {number:>{numbers}} ", _paint(ranks))
            for (text, number), ranks in zip(line, grid.holders[band[0]], strict=True)
        ]
        for line, band in zip(texts, bands, strict=True)
    ]


def _lettered_cells(grid: Grid, bands: Sequence[range], rank_count: int) -> list[list[Cell]]:
    """Cells of one letter, for more columns than numbers have room for."""
    count = len(grid.columns)
    shown = min(count, _BAR_WIDTH)
    columns = [place * count // shown for place in range(shown)]
    lines = [[grid.holders[band[0]][column] for column in columns] for band in bands]
    return [
        [Cell(_letters(ranks, rank_count)[:1], _paint(ranks)) for ranks in line] for line in lines
    ]


def _numbers(band: range, column: int, count: int) -> str:
    first = band[0] * count + column
    return _format_run(first, band[-1]) if count == 1 else str(first)


def _beside(parts: Iterable[Sequence[Cell]]) -> list[Cell]:
    joined: list[Cell] = []
    for part in parts:
        if part and joined:
            joined.append(Cell("   "))
        joined.extend(part)
    return joined


def _row_label(grid: Grid, band: range) -> str:
    if len(grid.rows) == 1:
        return "elements" if grid.is_flat else "all rows"
    return _format_run(grid.rows[band[0]][0], grid.rows[band[-1]][-1])


def _format_run(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else f"{first}"


def _letters(ranks: Sequence[int], rank_count: int) -> str:
    if not ranks:
        return _HOLE
    if len(ranks) == rank_count > 2:  # noqa: PLR2004 - two letters say it as well
        return _EVERYONE
    return "".join(map(_letter, ranks[:3])) + (_BEYOND if len(ranks) > 3 else "")  # noqa: PLR2004


def _letter(rank: int) -> str:
    return _LETTERS[rank] if rank < len(_LETTERS) else _BEYOND


def _paint(ranks: Sequence[int]) -> int | None:
    return ranks[0] if len(ranks) == 1 else None


def _draw_shards(page: Page, layout: Layout, grid: Grid) -> None:
    page.line("each shard holds these blocks, in this order", "bold")
    shown = min(layout.rank_count, _MOST_RANKS)
    names = [f"rank {rank}" for rank in range(shown)]
    shapes = [format_shape(layout.shard_shape(rank)) for rank in range(shown)]
    for rank, name in enumerate(names):
        order = _runs(grid.order[rank])
        rest = f" ... {len(order) - _MOST_IN_ORDER} more" if len(order) > _MOST_IN_ORDER else ""
        padded = sum(padding.as_piece().numel for padding in layout.paddings(rank))
        padding = f", then {format_count(padded, 'element')} of padding" if padded else ""
        text = " ".join(order[:_MOST_IN_ORDER]) or "nothing"
        page.picture(
            [
                [
                    Cell(f" {_letter(rank)} ", rank),
                    Cell(f" {name:<{len(names[-1])}}  {shapes[rank]:<{max(map(len, shapes))}}  "),
                    Cell(f"{text}{rest}{padding}"),
                ]
            ]
        )
    if layout.rank_count > shown:
        page.line(f"... and {format_count(layout.rank_count - shown, 'more rank')}", "dim")


def _runs(numbers: Sequence[int]) -> list[str]:
    """Write numbers that follow each other as ``first-last``.

    Examples:
        >>> _runs([0, 1, 2, 3, 8, 9, 4])
        ['0-3', '8', '9', '4']
    """
    texts: list[str] = []
    start = 0
    for position in range(1, len(numbers) + 1):
        if position < len(numbers) and numbers[position] == numbers[position - 1] + 1:
            continue
        run = numbers[start:position]
        texts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))  # noqa: PLR2004
        start = position
    return texts


def _draw_axes(page: Page, layout: Layout) -> None:
    pieces = layout.all_pieces
    held = {len(layout.pieces(rank)) for rank in range(layout.rank_count)}
    each = str(min(held)) if len(held) == 1 else f"{min(held)} to {max(held)}"
    page.line(
        f"{format_count(len(pieces), 'piece')} for the whole tensor, {each} on each rank", "bold"
    )
    for number, piece in enumerate(pieces[:_MOST_PIECES]):
        from_start = not (piece.full_base or piece.rank_base or piece.shard_base)
        if len(pieces) > 1 or not from_start or piece.scale != 1:
            page.line(f"piece {number} {_bases(piece, layout)}")
        if piece.axes:
            page.table(
                [Column(name, is_number=True) for name in ("extent", "full", "rank", "shard")]
                + [Column("what the axis does")],
                [_axis_row(axis, layout) for axis in piece.axes],
            )
    if len(pieces) > _MOST_PIECES:
        page.line(f"... and {len(pieces) - _MOST_PIECES} more pieces", "dim")


def _bases(piece: Piece, layout: Layout) -> str:
    full = _in_rows(piece.full_base, _columns(layout.full_shape))
    shard = _in_rows(piece.shard_base, _columns(layout.shard_shape(piece.rank_base)))
    scale = f", scaled by {piece.scale}" if piece.scale != 1 else ""
    return f"from full {full}, rank {piece.rank_base}, shard {shard}{scale}"


def _axis_row(axis: Axis, layout: Layout) -> list[str]:
    columns = _columns(layout.full_shape)
    is_run = axis.full_stride == axis.shard_stride == 1
    extent = _in_rows(axis.extent, columns) if is_run else str(axis.extent)
    return [
        extent,
        _in_rows(axis.full_stride, columns),
        str(axis.rank_stride or "-"),
        _in_rows(axis.shard_stride, _columns(layout.shard_shape(0))) if axis.shard_stride else "-",
        _meaning(axis),
    ]


def _meaning(axis: Axis) -> str:
    if axis.is_rank_axis:
        return "splits over ranks" if axis.full_stride else "replicates over ranks"
    return "walks the data" if axis.full_stride else "repeats an element"


def _columns(shape: Shape) -> int:
    return shape[-1] if len(shape) > 1 and all(shape) else 1


def _in_rows(number: int, columns: int) -> str:
    """Write a number of elements in rows where it is some rows."""
    rows, rest = divmod(number, columns)
    if columns == 1 or rest or not rows:
        return str(number)
    return f"{rows} row{'' if rows == 1 else 's'}"
