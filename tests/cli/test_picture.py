"""What is too large, too fine or incomplete is still drawn honestly."""

from __future__ import annotations

import pytest

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.cli.output import open_page
from restride.cli.picture import draw_layout
from restride.layouts.catalogue import build


@pytest.fixture
def draw(capsys: pytest.CaptureFixture[str]):
    def drawn(layout: Layout) -> list[str]:
        draw_layout(open_page(), layout)
        return capsys.readouterr().out.splitlines()

    return drawn


def test_neighbours_with_the_same_holder_are_drawn_as_one_where_there_are_many(draw) -> None:
    lines = draw(build("codegen-qkv", {"shape": "12288x4096", "mesh": "tp=8", "heads": "32"}))

    assert lines[0] == "full tensor 12288x4096: 96 blocks of 128x4096"
    assert lines[1] == "      0-511   A   0-3      6144-6655   E 48-51"
    assert lines[12] == "  5632-6143   D 44-47    11776-12287   H 92-95"


def test_a_picture_that_leaves_blocks_out_says_how_many(draw) -> None:
    layout = build("codegen-qkv", {"shape": "49152x64", "mesh": "tp=32", "heads": "128"})

    lines = draw(layout)

    assert lines[1] == "one row of blocks in 2 is drawn"
    assert sum("   " in line and " A " in line for line in lines[2:26]) > 0
    assert "... and 16 more ranks" in lines


def test_many_columns_are_drawn_as_letters(draw) -> None:
    lines = draw(build("split", {"shape": "4x64", "mesh": "tp=16", "dim": "1"}))

    assert lines[1] == "all rows  ABCDEFGHIJKLMNOP"


def test_columns_beyond_the_width_are_sampled(draw) -> None:
    lines = draw(build("split", {"shape": "4x128", "mesh": "tp=64", "dim": "1"}))

    bar = lines[1].removeprefix("all rows  ")
    assert len(bar) == 48
    assert bar.startswith("ABCE")
    assert bar.endswith("9+")  # letters and digits are for 62 ranks


def test_what_every_rank_holds_has_a_sign_of_its_own(draw) -> None:
    lines = draw(build("replicated", {"shape": "4x4", "mesh": "tp=4"}))

    assert lines[1:3] == ["all rows   = 0", "= is held by every rank"]


def test_more_holders_than_letters_have_room_for_are_hinted_at(draw) -> None:
    layout = Layout.of(
        {"tp": 5},
        (4, 2),
        [(4, 2)] * 4 + [(2, 2)],
        [Piece((Axis(4, 0, 1, 0), Axis(8, 1, 0, 1))), Piece((Axis(4, 1, 0, 1),), rank_base=4)],
    )

    lines = draw(layout)

    assert lines[1:4] == ["0-1   =    0", "2-3   ABC+ 1", "= is held by every rank"]


def test_a_hole_is_drawn_as_one(draw) -> None:
    layout = Layout.of(
        {"tp": 2}, (4, 2), [(1, 2)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(2, 1, 0, 1)))]
    )

    assert draw(layout)[1:4] == ["  0   A 0", "1-2   . 1", "  3   B 2"]


def test_a_rank_that_holds_nothing_says_so(draw) -> None:
    lines = draw(build("split", {"shape": "4x2", "mesh": "tp=2", "sizes": "4,0"}))

    assert " B  rank 1  0x2  nothing" in lines


def test_a_flat_partition_is_one_long_row(draw) -> None:
    lines = draw(build("flat-chunks", {"shape": "5x5", "mesh": "dp=4"}))

    assert lines[0] == "full tensor 5x5: 4 blocks"
    assert lines[1] == "elements   A 0  B 1  C 2  D 3"
    assert " D  rank 3  7  3, then 3 elements of padding" in lines


def test_what_is_too_fine_to_draw_is_left_to_the_axes(draw) -> None:
    layout = Layout.of(
        {"tp": 2},
        (2, 20000),
        [(2, 10000)] * 2,
        [Piece((Axis(2, 1, 1, 0), Axis(20000, 2, 0, 1)))],
    )

    lines = draw(layout)

    assert lines[0] == "the blocks are too many or too few to draw; the axes say where they are"
    assert lines[-1].split() == ["20000", "2", "-", "1", "walks", "the", "data"]


def test_a_tensor_beyond_all_machines_is_left_to_the_axes(draw) -> None:
    lines = draw(build("split", {"shape": f"{3 * 10**20}x9", "mesh": "tp=3"}))

    assert lines[0] == "the blocks are too many or too few to draw; the axes say where they are"


def test_pieces_beyond_a_few_and_blocks_beyond_a_line_are_counted(draw) -> None:
    reverse = ",".join(map(str, range(29, -1, -1)))
    lines = draw(
        build("block-gather", {"shape": "30x2", "mesh": "tp=1", "ids": reverse, "block": "1"})
    )
    steps = [(0, 2), (1, 5), (2, 0), (3, 7), (4, 1), (5, 3), (6, 4), (7, 6)]
    table = draw(
        Layout.of(
            {"tp": 1},
            (8, 2),
            [(8, 2)],
            [Piece((Axis(2, 1, 0, 1),), 2 * full, 0, 2 * shard) for full, shard in steps],
        )
    )

    assert any(line.endswith("... 6 more") for line in lines)
    assert table[-1] == "... and 2 more pieces"


def test_the_scale_of_a_piece_is_shown(draw) -> None:
    lines = draw(build("replicated", {"shape": "8", "mesh": "tp=2", "scale": "1/2"}))

    assert "piece 0 from full 0, rank 0, shard 0, scaled by 1/2" in lines
