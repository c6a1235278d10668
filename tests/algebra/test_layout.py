"""Layouts: what one rank holds of them, and which numbers fit no layout."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given

from restride.algebra.layout import Layout, Padding, shape_runs
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.testing.oracles import walk_padding, walk_piece, walk_relation
from restride.testing.strategies import layouts, wild_layouts

ONE_RANK = Mesh((("tp", 1),))
TWO_RANKS = Mesh((("tp", 2),))
ROWS = Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))


@given(layouts() | wild_layouts())
def test_the_pieces_of_all_ranks_together_are_the_whole_layout(layout):
    relation = Counter(
        (*step, piece.scale)
        for rank in range(layout.rank_count)
        for piece in layout.pieces(rank)
        for step in walk_piece(piece)
    )

    assert relation == walk_relation(layout)


@given(layouts())
def test_the_paddings_of_all_ranks_together_are_the_whole_padding(layout):
    padding = Counter(
        (rank, shard, pad.fill)
        for rank in range(layout.rank_count)
        for pad in layout.paddings(rank)
        for _, rank, shard in walk_piece(pad.as_piece())
    )

    assert padding == walk_padding(layout)


@given(layouts() | wild_layouts())
def test_every_address_is_inside_the_tensor_the_mesh_and_the_shard(layout):
    for full, rank, shard, _ in walk_relation(layout):
        assert full < layout.full_numel
        assert shard < layout.shard_numel(rank)


@given(layouts())
def test_shard_shapes_are_runs_of_ranks_in_order(layout):
    shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]

    assert shape_runs(shapes) == layout.shard_shapes
    assert [layout.shard_numel(rank) for rank in range(layout.rank_count)] == list(
        map(prod, shapes)
    )
    assert layout.rank_count == layout.mesh.size


@given(layouts())
def test_a_layout_is_exact_where_no_piece_scales(layout):
    assert layout.is_exact == all(scale == 1 for *_, scale in walk_relation(layout))


@given(layouts())
def test_layouts_are_values(layout):
    same = Layout(
        layout.mesh,
        layout.full_shape,
        layout.shard_shapes,
        layout.all_pieces,
        layout.padding,
        layout.unit_bits,
    )

    assert same == layout
    assert hash(same) == hash(layout)


def test_a_layout_may_be_built_from_one_shape_for_each_rank():
    given_one_by_one = Layout.of({"tp": 2}, [4, 3], [[2, 3], [2, 3]], [ROWS])

    assert given_one_by_one == Layout(TWO_RANKS, (4, 3), ((2, (2, 3)),), (ROWS,))
    assert Layout.of(TWO_RANKS, (4, 3), [(2, 3)] * 2, [ROWS]) == given_one_by_one


def test_a_scalar_and_an_empty_tensor_have_layouts():
    scalar = Layout(TWO_RANKS, (), ((2, ()),), (Piece((Axis(2, 0, 1, 0),)),))
    empty = Layout(TWO_RANKS, (0, 4), ((2, (0, 2)),), ())

    assert (scalar.full_numel, scalar.shard_numel(1), empty.full_numel) == (1, 1, 0)


def layout(**fields):
    """Rows of a 4 x 3 tensor over two ranks, with other fields."""
    usual = {
        "mesh": TWO_RANKS,
        "full_shape": (4, 3),
        "shard_shapes": ((2, (2, 3)),),
        "all_pieces": (ROWS,),
    }
    return Layout(**usual | fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"full_shape": [4, 3]}, "full shape must be a tuple of integers, got [4, 3]"),
        ({"full_shape": (4.0, 3)}, "each size in full shape (4.0, 3) must be an integer, got 4.0"),
        ({"full_shape": (-4, -3)}, "each size in full shape (-4, -3) must be at least 0, got -4"),
        ({"shard_shapes": ((2, [2, 3]),)}, "shard shape must be a tuple of integers, got [2, 3]"),
        ({"shard_shapes": ((2, (2, True)),)}, "each size in shard shape (2, True) must be an int"),
        (
            {"shard_shapes": ((0, (9,)), (2, (2, 3)))},
            "number of ranks with one shard shape must be at least 1, got 0",
        ),
        (
            {"shard_shapes": ((2.0, (2, 3)),)},
            "number of ranks with one shard shape must be an integer, got 2.0",
        ),
        (
            {"shard_shapes": ((3, (2, 3)),)},
            "shard shapes are given for 3 ranks, the mesh tp=2 has 2",
        ),
        ({"shard_shapes": ()}, "shard shapes are given for 0 ranks, the mesh tp=2 has 2"),
        ({"unit_bits": 0}, "unit_bits must be at least 1, got 0"),
        ({"unit_bits": 4.0}, "unit_bits must be an integer, got 4.0 (float)"),
        ({"full_shape": (11,)}, "piece 0 reaches full index 11, the tensor has 11 elements"),
        (
            {"all_pieces": (ROWS, Piece((), 12))},
            "piece 1 reaches full index 12, the tensor has 12 elements",
        ),
        ({"all_pieces": (Piece((), 0, 2),)}, "piece 0 reaches rank 2, the mesh has 2"),
        (
            {"all_pieces": (Piece((Axis(2, 0, 0, 6),)),)},
            "piece 0 reaches shard index 6 of rank 0, whose shard has 6 elements",
        ),
        (
            {"shard_shapes": ((1, (2, 3)), (1, (1, 3)))},
            "piece 0 reaches shard index 5 of rank 1, whose shard has 3 elements",
        ),
        (
            {"padding": (Padding((), 0, 5), Padding((), 1, 6))},
            "padding 1 reaches shard index 6 of rank 1, whose shard has 6 elements",
        ),
        ({"padding": (Padding((), 2, 0),)}, "padding 0 reaches rank 2, the mesh has 2"),
    ],
)
def test_numbers_that_fit_no_layout_are_refused(fields, problem):
    with pytest.raises(LayoutError) as caught:
        layout(**fields)

    assert str(caught.value).startswith(problem)


def test_a_short_shard_between_the_ranks_of_a_piece_is_no_fault():
    every_second = Piece((Axis(2, 6, 2, 0), Axis(6, 1, 0, 1)))
    shapes = ((1, (6,)), (1, (0,)), (1, (6,)))

    uneven = Layout(Mesh((("tp", 3),)), (12,), shapes, (every_second,))

    assert [len(uneven.pieces(rank)) for rank in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("rank", [-1, 2, 100])
@pytest.mark.parametrize(
    "ask", [Layout.pieces, Layout.shard_shape, Layout.shard_numel, Layout.paddings]
)
def test_a_rank_beside_the_mesh_holds_nothing_to_ask_for(ask, rank):
    padded = layout(shard_shapes=((2, (7,)),), padding=(Padding((Axis(2, 0, 1, 0),), 0, 6),))

    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 2 ranks"):
        ask(padded, rank)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"fill": "ones"}, "padding is filled with 'zero' or 'undefined', got 'ones'"),
        ({"fill": None}, "padding is filled with 'zero' or 'undefined', got None"),
        (
            {"axes": (Axis(2, 0, 0, 1), Axis(2, 4, 0, 2))},
            "padding has no full element, yet an axis has full stride 4",
        ),
        ({"rank_base": -1}, "rank base of a piece must be at least 0, got -1"),
        ({"shard_base": 0.0}, "shard base of a piece must be an integer, got 0.0 (float)"),
    ],
)
def test_fields_that_are_no_padding_are_refused(fields, problem):
    with pytest.raises(LayoutError) as caught:
        Padding(**{"axes": (), **fields})

    assert str(caught.value) == problem


def test_a_layout_with_a_scale_says_that_it_is_no_copy():
    assert layout().is_exact
    assert not layout(all_pieces=(Piece((), scale=Fraction(1, 2)),)).is_exact


def test_padding_walks_as_a_piece_that_stands_still_at_element_zero():
    axes = (Axis(2, 0, 1, 0), Axis(3, 0, 0, 1))

    assert Padding(axes, 1, 4, "undefined").as_piece() == Piece(axes, 0, 1, 4)
