"""The drawn blocks are the layout: compared with a walk over every element."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

import pytest

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.cli.blocks import block_grid
from restride.layouts.catalogue import CATALOGUE, build

if TYPE_CHECKING:
    from restride.cli.blocks import Grid

CASES = {name: build(name, entry.example) for name, entry in CATALOGUE.items()}
CASES["codegen at four ranks"] = build(
    "codegen-qkv", {"shape": "96x6", "mesh": "tp=4", "heads": "16"}
)
CASES["uneven rows"] = build("split", {"shape": "10x3", "mesh": "tp=3", "sizes": "5,2,3"})
CASES["cut along one of two mesh axes"] = build(
    "split", {"shape": "6x4", "mesh": "dp=2,tp=2", "dim": "1", "axis": "tp"}
)
CASES["three dimensions"] = build("split", {"shape": "2x6x3", "mesh": "tp=3", "dim": "1"})
CASES["one dimension"] = build("split", {"shape": "6", "mesh": "tp=3"})
CASES["columns in reverse rank order"] = Layout.of(
    {"tp": 2},
    (2, 6),
    [(2, 3)] * 2,
    [Piece((Axis(2, -3, 1, 0), Axis(2, 6, 0, 3), Axis(3, 1, 0, 1)), full_base=3)],
)
CASES["a hole"] = Layout.of(
    {"tp": 2}, (4, 2), [(1, 2)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(2, 1, 0, 1)))]
)


def walk(layout: Layout) -> dict[tuple[int, int], int]:
    """Full element of every (rank, shard index), one element at a time."""
    found: dict[tuple[int, int], int] = {}
    for piece in layout.all_pieces:
        for steps in product(*(range(axis.extent) for axis in piece.axes)):
            moved = list(zip(steps, piece.axes, strict=True))
            rank = piece.rank_base + sum(step * axis.rank_stride for step, axis in moved)
            shard = piece.shard_base + sum(step * axis.shard_stride for step, axis in moved)
            full = piece.full_base + sum(step * axis.full_stride for step, axis in moved)
            found[rank, shard] = full
    return found


def cell_elements(layout: Layout, grid: Grid) -> list[set[int]]:
    width = sum(map(len, grid.columns))
    assert width * sum(map(len, grid.rows)) == prod(layout.full_shape)
    return [
        {row * width + column for row in rows for column in columns}
        for rows in grid.rows
        for columns in grid.columns
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_cell_is_held_by_exactly_the_ranks_that_hold_each_of_its_elements(name: str) -> None:
    layout = CASES[name]
    grid = block_grid(layout)
    assert grid is not None
    held = walk(layout)

    flat = [ranks for line in grid.holders for ranks in line]
    for ranks, elements in zip(flat, cell_elements(layout, grid), strict=True):
        for element in elements:
            assert {rank for (rank, _), full in held.items() if full == element} == set(ranks)


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_a_shard_lists_each_cell_where_its_first_element_is_stored(name: str) -> None:
    layout = CASES[name]
    grid = block_grid(layout)
    assert grid is not None
    held = walk(layout)
    cells = cell_elements(layout, grid)

    for rank in range(layout.rank_count):
        shard = {
            full: index for (r, index), full in sorted(held.items(), reverse=True) if r == rank
        }
        starts = [shard[min(cells[number])] for number in grid.order[rank]]
        stored = {number for number, cell in enumerate(cells) if cell & shard.keys()}
        assert set(grid.order[rank]) == stored
        assert starts == sorted(starts)


def test_the_cells_of_codegen_do_not_grow_with_the_hidden_size() -> None:
    small = block_grid(build("codegen-qkv", {"shape": "96x8", "mesh": "tp=4", "heads": "16"}))
    large = block_grid(
        build("codegen-qkv", {"shape": "49152x16384", "mesh": "tp=4", "heads": "64"})
    )

    assert small is not None
    assert large is not None
    assert small.order == large.order
    assert len(large.rows) == 48


def test_columns_dealt_out_in_turn_are_drawn_once_for_all_rows() -> None:
    grid = block_grid(every_second_element(20000, 4))

    assert grid is not None
    assert grid.rows == (range(20000),)
    assert grid.holders == (((0,), (1,), (0,), (1,)),)


def test_more_blocks_than_a_screen_can_show_are_not_enumerated() -> None:
    assert block_grid(every_second_element(100, 20000)) is None


def every_second_element(rows: int, columns: int) -> Layout:
    return Layout.of(
        {"tp": 2},
        (rows, columns),
        [(rows, columns // 2)] * 2,
        [Piece((Axis(2, 1, 1, 0), Axis(rows * columns // 2, 2, 0, 1)))],
    )


def test_a_tensor_without_elements_has_no_picture() -> None:
    assert block_grid(build("replicated", {"shape": "0x4", "mesh": "tp=2"})) is None
