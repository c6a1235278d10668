"""Axes and pieces against walking every step, and what is neither."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise
from time import process_time

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.testing.oracles import walk_piece
from restride.testing.strategies import pieces


@given(pieces())
def test_ranges_are_the_smallest_that_contain_the_walk(piece):
    fulls, ranks, shards = map(set, zip(*walk_piece(piece), strict=True))

    assert piece.numel == len(list(walk_piece(piece)))
    for found, visited in (
        (piece.full_range, fulls),
        (piece.rank_range, ranks),
        (piece.shard_range, shards),
    ):
        assert (found.start, found.stop) == (min(visited), max(visited) + 1)


@given(pieces())
def test_each_axis_moves_over_ranks_or_inside_the_shard(piece):
    assert sorted((*piece.rank_axes, *piece.shard_axes), key=repr) == sorted(piece.axes, key=repr)
    assert all(axis.is_rank_axis and not axis.shard_stride for axis in piece.rank_axes)
    assert all(not axis.is_rank_axis and axis.shard_stride for axis in piece.shard_axes)


@given(pieces())
def test_the_shard_axes_walk_one_shard_once_for_each_visit_of_a_rank(piece):
    visits = Counter(piece.ranks())
    steps = Counter(rank for _, rank, _ in walk_piece(piece))
    in_shard = piece.numel // visits.total()

    assert steps == Counter({rank: count * in_shard for rank, count in visits.items()})


@given(pieces(ranks=8))
def test_fixing_the_rank_leaves_what_walking_finds_there(piece):
    for rank in range(-1, 9):
        concrete = piece.at_rank(rank)
        event(f"visits of one rank: {len(concrete)}")

        assert all(part.rank_base == rank and not part.rank_axes for part in concrete)
        assert all(part.scale == piece.scale for part in concrete)
        assert len(concrete) == Counter(piece.ranks())[rank]
        assert Counter(step for part in concrete for step in walk_piece(part)) == Counter(
            step for step in walk_piece(piece) if step[1] == rank
        )


@given(pieces(ranks=30), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_the_first_rank_in_some_runs_is_the_one_that_walking_meets(piece, sizes, data):
    stops = [0, *accumulate(sizes)]
    runs = [
        range(start, stop)
        for start, stop in pairwise(stops)
        if data.draw(st.booleans(), label=f"run from {start} to {stop}")
    ]

    found = piece.first_rank_in(runs)

    event(f"found: {found is not None}")
    visited = set(piece.ranks())
    assert found == next((rank for run in runs for rank in run if rank in visited), None)


def test_ranks_are_visited_in_the_order_of_the_walk():
    piece = Piece((Axis(2, 0, 1, 0), Axis(3, 1, 0, 1), Axis(3, 3, 2, 0)), rank_base=4)

    assert list(piece.ranks()) == [4, 6, 8, 5, 7, 9]


def test_a_piece_that_visits_a_rank_twice_has_two_parts_there():
    """Two loops over ranks that meet: (0, 1) + (0, 1) is 1 twice."""
    piece = Piece((Axis(2, 5, 1, 0), Axis(2, 7, 1, 0)))

    assert [part.full_base for part in piece.at_rank(1)] == [7, 5]
    assert piece.at_rank(3) == ()


def test_sixty_loops_over_the_same_ranks_are_not_visited_one_by_one():
    piece = Piece((Axis(2, 0, 1, 0),) * 60)

    started = process_time()

    assert piece.first_rank_in([range(60, 100)]) == 60
    assert piece.first_rank_in([range(61, 100)]) is None
    assert process_time() - started < 1


def test_a_rank_of_a_long_axis_is_found_without_visiting_the_others():
    piece = Piece((Axis(2**19, 6, 1, 0), Axis(2, 3, 2**19, 0), Axis(3, 1, 0, 1)))

    assert piece.at_rank(2**20 - 1) == (Piece((Axis(3, 1, 0, 1),), 6 * (2**19 - 1) + 3, 2**20 - 1),)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((1, 1, 0, 1), "extent of an axis must be at least 2, got 1"),
        ((0, 1, 0, 1), "extent of an axis must be at least 2, got 0"),
        ((-4, 1, 0, 1), "extent of an axis must be at least 2, got -4"),
        ((2.0, 1, 0, 1), "extent of an axis must be an integer, got 2.0 (float)"),
        ((True, 1, 0, 1), "extent of an axis must be an integer, got True (bool)"),
        ((2, None, 0, 1), "full stride of an axis must be an integer, got None (NoneType)"),
        ((2, 0.5, 0, 1), "full stride of an axis must be an integer, got 0.5 (float)"),
        ((2, 1, -1, 0), "rank stride of an axis must be at least 0, got -1"),
        ((2, 1, "1", 0), "rank stride of an axis must be an integer, got '1' (str)"),
        ((2, 1, 0, -1), "shard stride of an axis must be at least 0, got -1"),
        ((2, 1, 0, False), "shard stride of an axis must be an integer, got False (bool)"),
        ((2, 1, 1, 1), "an axis moves either the rank or the shard index, got rank stride 1 and"),
        ((2, 1, 0, 0), "an axis moves either the rank or the shard index, got rank stride 0 and"),
        ((2, -3, 0, 1), "full stride -3 is negative on an axis that does not move the rank"),
    ],
)
def test_numbers_that_are_no_axis_are_refused(numbers, problem):
    with pytest.raises(LayoutError) as caught:
        Axis(*numbers)

    assert str(caught.value).startswith(problem)


def test_full_strides_may_be_zero_and_backwards_over_ranks():
    assert Axis(2, 0, 0, 1).full_stride == 0
    assert Axis(2, 0, 1, 0).is_rank_axis
    assert Axis(2, -6, 1, 0).full_stride == -6


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"full_base": -1}, "a piece reaches full index -1, below 0"),
        ({"full_base": 1.0}, "full base of a piece must be an integer, got 1.0 (float)"),
        ({"rank_base": -1}, "rank base of a piece must be at least 0, got -1"),
        ({"rank_base": True}, "rank base of a piece must be an integer, got True (bool)"),
        ({"shard_base": -2}, "shard base of a piece must be at least 0, got -2"),
        ({"shard_base": "0"}, "shard base of a piece must be an integer, got '0' (str)"),
        ({"scale": Fraction(0)}, "the scale of a piece is an exact non-zero Fraction, got Frac"),
        ({"scale": 1}, "the scale of a piece is an exact non-zero Fraction, got 1"),
        ({"scale": 0.5}, "the scale of a piece is an exact non-zero Fraction, got 0.5"),
        ({"scale": float("nan")}, "the scale of a piece is an exact non-zero Fraction, got nan"),
        ({"axes": (Axis(3, -2, 1, 0),), "full_base": 3}, "a piece reaches full index -1, below 0"),
    ],
)
def test_fields_that_are_no_piece_are_refused(fields, problem):
    with pytest.raises(LayoutError) as caught:
        Piece(**{"axes": (), **fields})

    assert str(caught.value).startswith(problem)


def test_a_piece_may_go_back_to_element_zero_and_not_further():
    axes = (Axis(3, -2, 1, 0),)

    assert Piece(axes, full_base=4).full_range == range(5)


def test_equal_pieces_are_equal_values():
    one, other = (Piece((Axis(2, 1, 0, 1),), 3, 1, 0, Fraction(1, 2)) for _ in range(2))

    assert one == other
    assert len({one, other}) == 1
    with pytest.raises(AttributeError):
        one.full_base = 4
