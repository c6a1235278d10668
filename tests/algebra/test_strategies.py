"""The public strategies and oracles, which the other laws stand on."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.transfer import Transfer, TransferAxis
from restride.algebra.walks import Walk
from restride.testing.oracles import (
    chain_by_walking,
    compose_by_walking,
    join_by_walking,
    walk_addresses,
    walk_padding,
    walk_piece,
    walk_relation,
    walk_transfers,
)
from restride.testing.strategies import layout_pairs, layouts, pieces, recut, wild_layouts

ONE = Fraction(1)
GENERATE = (Phase.generate,)


@given(layouts())
def test_drawn_layouts_hold_every_element_and_write_every_shard_address_once(layout):
    held = {full for full, _, _, _ in walk_relation(layout)}
    written = Counter((rank, shard) for _, rank, shard, _ in walk_relation(layout).elements())
    written.update((rank, shard) for rank, shard, _ in walk_padding(layout).elements())

    assert held == set(range(layout.full_numel))
    assert written == Counter(
        (rank, shard)
        for rank in range(layout.rank_count)
        for shard in range(layout.shard_numel(rank))
    )


@given(layout_pairs())
def test_drawn_pairs_describe_one_tensor(pair):
    assert pair[0].full_shape == pair[1].full_shape


@given(st.data(), pieces())
def test_recut_pieces_walk_the_same_steps(data, piece):
    steps = Counter(step for part in data.draw(recut(piece)) for step in walk_piece(part))

    assert steps == Counter(walk_piece(piece))


CASES = {
    "a piece over ranks": lambda layout: any(
        axis.is_rank_axis and axis.full_stride for piece in layout.all_pieces for axis in piece.axes
    ),
    "replicas": lambda layout: any(
        axis.is_rank_axis and not axis.full_stride
        for piece in layout.all_pieces
        for axis in piece.axes
    ),
    "ranks that go backwards": lambda layout: any(
        axis.full_stride < 0 for piece in layout.all_pieces for axis in piece.axes
    ),
    "an element twice in a shard": lambda layout: any(
        not axis.full_stride and not axis.is_rank_axis
        for piece in layout.all_pieces
        for axis in piece.axes
    ),
    "uneven shards": lambda layout: len(layout.shard_shapes) > 2,
    "an empty shard": lambda layout: any(0 in shape for _, shape in layout.shard_shapes),
    "padding": lambda layout: any(padding.axes for padding in layout.padding),
    "an inexact scale": lambda layout: any(
        piece.scale.denominator == 3 for piece in layout.all_pieces
    ),
    "several pieces in one shard": lambda layout: len(layout.pieces(0)) > 2,
    "a permuted shard": lambda layout: any(
        len(piece.shard_axes) > 2 for piece in layout.all_pieces
    ),
    "an empty tensor": lambda layout: layout.full_numel == 0,
    "a scalar": lambda layout: layout.full_shape == (),
}


@pytest.mark.parametrize("case", CASES)
def test_drawn_layouts_reach_every_kind_of_case(case):
    find(
        layouts(), CASES[case], settings=settings(max_examples=2000, database=None, phases=GENERATE)
    )


def test_wild_layouts_have_holes_and_overlaps():
    def is_hole(layout):
        return len({held[0] for held in walk_relation(layout)}) < layout.full_numel

    def is_overlap(layout):
        written = Counter(held[1:3] for held in walk_relation(layout).elements())
        return max(written.values(), default=0) > 1

    for case in (is_hole, is_overlap):
        find(wild_layouts(), case, settings=settings(max_examples=2000, database=None))


def test_oracle_of_walks_counts_each_step():
    assert list(walk_addresses(Walk((4, 1), ()))) == [(4, 1)]
    assert list(walk_addresses(Walk((4, 1), ((3, -2, 0),)))) == [(4, 1), (2, 1), (0, 1)]


def test_oracle_of_relations_names_holders_and_scale():
    split = Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)), scale=Fraction(1, 2))
    pad = Padding((Axis(2, 0, 1, 0),), shard_base=2, fill="undefined")
    layout = Layout.of({"tp": 2}, (4,), [(3,)] * 2, [split], [pad])

    half = Fraction(1, 2)
    assert walk_relation(layout) == Counter(
        {(0, 0, 0, half): 1, (1, 0, 1, half): 1, (2, 1, 0, half): 1, (3, 1, 1, half): 1}
    )
    assert walk_padding(layout) == Counter({(0, 2, "undefined"): 1, (1, 2, "undefined"): 1})


def test_oracle_of_compositions_pairs_every_holder():
    both = Layout.of({"dp": 2}, (2,), [(2,)] * 2, [Piece((Axis(2, 0, 1, 0), Axis(2, 1, 0, 1)))])
    second = Layout.of({"tp": 1}, (2,), [(1,)], [Piece((), 1, scale=Fraction(3))])

    assert compose_by_walking(second, both) == Counter(
        {(1, 0, 1, 0, 0, Fraction(3)): 1, (1, 1, 1, 0, 0, Fraction(3)): 1}
    )


def test_oracle_of_joins_counts_multiplicities():
    twice = Walk((5, 0), ((2, 0, 1),))

    assert join_by_walking(twice, twice) == Counter(
        {(5, 0, 0): 1, (5, 0, 1): 1, (5, 1, 0): 1, (5, 1, 1): 1}
    )


def test_oracle_of_transfers_counts_each_move():
    axes = (TransferAxis(2, 1, 1, 0, 0, 1),)

    assert walk_transfers([Transfer(axes, 3, 0, 7, 2, 5, ONE)]) == Counter(
        {(3, 0, 7, 2, 5, ONE): 1, (4, 1, 7, 2, 6, ONE): 1}
    )


def test_oracle_of_chains_follows_the_shard_address():
    halves = Layout.of({"tp": 2}, (2,), [(1,)] * 2, [Piece((Axis(2, 1, 1, 0),))])
    pad = Padding((), rank_base=1)
    padded = Layout(Mesh((("dp", 2),)), (1,), ((2, (1,)),), (Piece(()),), (pad,))

    relation, padding = chain_by_walking(
        halves, {0: padded, 1: padded}, outer_stride=1, inner_stride=2
    )

    assert relation == Counter({(0, 0, 0, ONE): 1, (1, 1, 0, ONE): 1})
    assert padding == Counter({(2, 0, "zero"): 1, (3, 0, "zero"): 1})
