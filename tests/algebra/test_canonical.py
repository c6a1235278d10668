"""The canonical form: one way of writing, the same meaning."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.canonical import (
    canonicalize,
    canonicalize_pieces,
    piece_of_walk,
    walk_of_piece,
)
from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.walks import Walk, coalesce
from restride.errors import LayoutError
from restride.testing.oracles import walk_addresses, walk_padding, walk_piece, walk_relation
from restride.testing.strategies import layouts, pieces, recut, wild_layouts


@given(layouts() | wild_layouts())
def test_a_canonical_layout_means_the_same(layout):
    canonical = canonicalize(layout)

    event(f"fewer pieces: {len(canonical.all_pieces) < len(layout.all_pieces)}")
    assert walk_relation(canonical) == walk_relation(layout)
    assert walk_padding(canonical) == walk_padding(layout)
    assert replace(canonical, all_pieces=(), padding=()) == replace(
        layout, all_pieces=(), padding=()
    )


@given(layouts() | wild_layouts())
def test_writing_canonically_twice_changes_nothing_and_adds_no_piece(layout):
    canonical = canonicalize(layout)

    assert canonicalize(canonical) == canonical
    assert len(canonical.all_pieces) <= len(layout.all_pieces)
    assert len(canonical.padding) <= len(layout.padding)


@given(layouts() | wild_layouts())
def test_rank_axes_come_first_and_strides_fall(layout):
    canonical = canonicalize(layout)

    for piece in (*canonical.all_pieces, *(pad.as_piece() for pad in canonical.padding)):
        places = [(axis.rank_stride, axis.shard_stride) for axis in piece.axes]
        assert places == sorted(places, reverse=True)
        walk = walk_of_piece(piece)
        assert coalesce(walk.digits) == walk.digits
    starts = [(piece.rank_base, piece.shard_base) for piece in canonical.all_pieces]
    assert starts == sorted(starts)


@given(st.data(), pieces())
def test_the_order_of_pieces_and_axes_does_not_matter(data, piece):
    written = data.draw(recut(piece))
    shuffled = [
        replace(part, axes=tuple(data.draw(st.permutations(part.axes))))
        for part in data.draw(st.permutations(written))
    ]

    assert canonicalize_pieces(shuffled) == canonicalize_pieces(written)


@given(pieces())
def test_a_piece_survives_being_a_walk(piece):
    assert piece_of_walk(walk_of_piece(piece), piece.scale) == piece


def test_one_piece_a_rank_becomes_one_piece_over_the_ranks():
    rows = Axis(6, 1, 0, 1)
    each = [Piece((Axis(2, 3, 0, 3), Axis(3, 1, 0, 1)), 6 * rank, rank) for rank in range(5)]

    assert canonicalize_pieces(each) == (Piece((Axis(5, 6, 1, 0), rows)),)


def test_ranks_that_hold_parts_backwards_are_one_piece_with_a_negative_full_stride():
    """The second half of a zigzag split."""
    each = [Piece((Axis(4, 1, 0, 1),), 28 - 4 * rank, rank, 4) for rank in range(4)]

    assert canonicalize_pieces(each) == (Piece((Axis(4, -4, 1, 0), Axis(4, 1, 0, 1)), 28, 0, 4),)


def test_parts_that_lie_backwards_in_a_shard_stay_apart():
    """A full stride that falls along the shard is no axis."""
    up_first = (Piece((Axis(4, 1, 0, 1),), 4, 0, 0), Piece((Axis(4, 1, 0, 1),), 0, 0, 4))

    assert canonicalize_pieces(up_first) == up_first


def test_pieces_of_different_scale_stay_apart():
    halves = (Piece((), 0, 0, 0), Piece((), 0, 1, 0, Fraction(1, 2)))

    assert canonicalize_pieces(halves) == halves


def test_a_loop_over_ranks_and_one_over_the_shard_stay_apart():
    """They continue each other in the full tensor, but only there."""
    split = Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))

    assert canonicalize_pieces([split]) == (split,)


def test_padding_is_merged_and_paddings_of_different_fill_stay_apart():
    tails = [Padding((), rank, 3, "undefined") for rank in (1, 0)]
    layout = Layout(as_mesh("tp=2"), (0,), ((2, (5,)),), (), (*tails, Padding((), 1, 4)))

    assert canonicalize(layout).padding == (
        Padding((Axis(2, 0, 1, 0),), 0, 3, "undefined"),
        Padding((), 1, 4, "zero"),
    )


def test_what_walks_the_same_steps_in_another_nesting_is_written_alike():
    """Twelve columns in loops of 3 and 4, and of 2 and 6."""
    nested = [
        Piece((Axis(3, 4, 0, 4), Axis(4, 1, 0, 1))),
        Piece((Axis(6, 1, 0, 1), Axis(2, 6, 0, 6))),
    ]

    written = {canonicalize_pieces([piece]) for piece in nested}

    assert written == {(Piece((Axis(12, 1, 0, 1),)),)}
    assert sorted(walk_piece(nested[0])) == sorted(walk_piece(nested[1]))


def test_a_walk_backwards_over_ranks_or_shard_is_turned_round_and_loops_of_one_are_dropped():
    walk = Walk((3, 8, 20), ((4, -1, 0, 6), (1, 5, 5, 5), (2, 0, -8, -2)))

    piece = piece_of_walk(walk, Fraction(1))

    assert piece == Piece((Axis(4, -6, 1, 0), Axis(2, 2, 0, 8)), 36, 0, 0)
    assert sorted(walk_piece(piece)) == sorted((f, r, s) for r, s, f in walk_addresses(walk))


@pytest.mark.parametrize("strides", [(1, 1, 1), (0, 0, 1), (0, -1, 1)])
def test_a_loop_that_is_no_axis_is_refused(strides):
    """It moves rank and shard together, none of them, or goes backwards in the full tensor."""
    with pytest.raises(LayoutError):
        piece_of_walk(Walk((0, 8, 8), ((2, *strides),)), Fraction(1))
