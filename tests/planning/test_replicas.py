"""Every way to fill a target shard, laid side by side: no pair of addresses is lost or made up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride.algebra.compose import compose
from restride.algebra.layout import Layout
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import PlanError, UnsupportedError
from restride.layouts import replicated, split
from restride.planning.jobs import whole_layout
from restride.planning.replicas import blocks_of_target
from restride.testing.oracles import walk_addresses, walk_transfers
from restride.testing.strategies import layout_pairs, wild_layouts


def pairs_of(target: Layout, source: Layout) -> Counter[tuple[Any, ...]]:
    """What the ways of all blocks name; checks that blocks and ways are what they say."""
    relation = compose(target, source)
    named: Counter[tuple[Any, ...]] = Counter()
    for rank in range(target.rank_count):
        filled: set[int] = set()
        for block in blocks_of_target(relation, rank):
            ways = [[tuple(walk_addresses(walk)) for walk in way.walks] for way in block.ways]
            reached = [[step[0] for walk in walks for step in walk] for walks in ways]
            assert [len(own) for own in reached] == [block.numel] * len(ways)
            (addresses,) = {frozenset(own) for own in reached}
            assert len(addresses) == block.numel
            assert filled.isdisjoint(addresses)
            assert block.holders == tuple(sorted({r for way in block.ways for r in way.ranks}))
            filled |= addresses
            for way, walks in zip(block.ways, ways, strict=True):
                for to_shard, from_shard, full in (step for walk in walks for step in walk):
                    named.update(
                        (full, holder, from_shard, rank, to_shard, way.scale)
                        for holder in way.ranks
                    )
    return named


@given(layout_pairs())
def test_blocks_name_every_pair_of_addresses_once(pair):
    target, source = pair

    assert pairs_of(target, source) == walk_transfers(compose(target, source).descriptors)


@given(wild_layouts(), st.integers(1, 2))
def test_elements_that_a_shard_holds_twice_are_named_at_each_place(source, copies):
    target = replicated(source.full_shape, mesh={"tp": copies})
    relation = compose(target, source)
    event(f"twice: {max(walk_transfers(relation.descriptors).values(), default=0) > 1}")

    # A piece may even name the same place of a rank twice, which is one place.
    assert pairs_of(target, source).keys() == walk_transfers(relation.descriptors).keys()


@pytest.mark.parametrize("mesh", ["dp=2,tp=3,pp=2", "ep=2,tp=3,dp=2,pp=2", "dp=40,tp=3,pp=5"])
def test_copies_along_several_axes_of_ranks_are_named_all_and_in_order(mesh):
    source = split((6,), mesh=as_mesh(mesh), dim=0, axis="tp")
    target = whole_layout((6,))

    assert pairs_of(target, source) == walk_transfers(compose(target, source).descriptors)
    for block in blocks_of_target(compose(target, source), 0):
        (way,) = block.ways
        assert len(way.ranks) == source.rank_count // 3
        assert [*way.ranks] == sorted(way.ranks)


@pytest.mark.parametrize("first_shard", [[(4, 1)], [(2, 4), (2, 1)]])
def test_shards_that_share_no_more_than_one_element_are_both_its_holders(first_shard):
    """The second one begins with the last element of the first, whatever gaps that has."""
    first, index = [], 1
    for extent, full_stride in reversed(first_shard):
        first.append(Axis(extent, full_stride, 0, index))
        index *= extent
    last = sum((extent - 1) * stride for extent, stride in first_shard)
    second = Piece((Axis(4, 1, 0, 1),), last, 1, 0)
    source = Layout.of({"dp": 2}, (last + 4,), [(4,), (4,)], [Piece(tuple(first)), second])
    target = whole_layout(source.full_shape)

    assert pairs_of(target, source) == walk_transfers(compose(target, source).descriptors)
    blocks = blocks_of_target(compose(target, source), 0)
    assert [block.numel for block in blocks if block.holders == (0, 1)] == [1]


def held(times: int, *, apart: int = 0, numel: int = 4) -> Layout:
    """One shard with each of some elements so many times, in one walk."""
    axes = (Axis(times, apart, 0, numel), Axis(numel, 1, 0, 1))
    full = numel + (times - 1) * apart
    return Layout.of({"tp": 1}, (full,), [(times * numel,)], [Piece(axes)])


@pytest.mark.parametrize(
    ("times", "apart", "numel"), [(64, 0, 4), (64, 1, 4), (64, 1, 99), (2, 50, 99)]
)
def test_a_shard_that_holds_an_element_many_times_has_a_way_for_each(times, apart, numel):
    source = held(times, apart=apart, numel=numel)
    target = whole_layout(source.full_shape)

    assert pairs_of(target, source) == walk_transfers(compose(target, source).descriptors)


@pytest.mark.parametrize("times", [65, 1 << 40])
def test_a_shard_that_holds_an_element_more_often_than_anybody_means_is_refused_at_once(times):
    source = held(times)

    with pytest.raises(UnsupportedError, match=f"an element {times} times, more than the 64"):
        blocks_of_target(compose(whole_layout((4,)), source), 0)


@pytest.mark.parametrize("pitch", [1, 99])
@pytest.mark.parametrize("numel", [6931, 7000])
def test_walks_that_stand_at_an_element_too_often_are_refused_however_many_are_needed(numel, pitch):
    """They have 7,000 steps, and reach fewer elements: counting them would not tell."""
    axes = (Axis(70, pitch, 0, 100), Axis(100, 1, 0, 1))
    source = Layout.of({"tp": 1}, (numel,), [(7000,)], [Piece(axes)])
    relation = compose(whole_layout((numel,)), source)

    with pytest.raises(PlanError, match=r"holds the element of .* more than 64 times"):
        blocks_of_target(relation, 0)


def test_an_element_where_two_loops_together_meet_a_third_has_a_way_for_each():
    """The loops stand at 0, 1, 3, 4 and at 4, 5, 7, 8: no two of them reach a third alone."""
    axes = (Axis(2, 4, 0, 4), Axis(2, 3, 0, 2), Axis(2, 1, 0, 1))
    source = Layout.of({"tp": 1}, (9,), [(8,)], [Piece(axes)])

    pairs = pairs_of(whole_layout((9,)), source)

    assert pairs == walk_transfers(compose(whole_layout((9,)), source).descriptors)
    assert len(pairs) == 8


def test_long_loops_that_pass_each_other_without_meeting_are_one_block():
    axes = (Axis(72, 71, 0, 70), Axis(70, 72, 0, 1))
    source = Layout.of({"tp": 1}, (71 * 71 + 69 * 72 + 1,), [(72 * 70,)], [Piece(axes)])
    target = whole_layout(source.full_shape)

    assert pairs_of(target, source) == walk_transfers(compose(target, source).descriptors)
