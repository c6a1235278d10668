"""Plans of transfers: every target address once, from somebody who holds the element."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import event, given

from restride.algebra.compose import compose
from restride.algebra.coverage import Gap, Hole
from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.errors import CoverageError, PlanError, ShapeMismatchError
from restride.layouts import bigcode_qkv, codegen_qkv, replicated, split
from restride.planning.transfers import plan_transfer
from restride.testing.oracles import compose_by_walking, walk_relation, walk_transfers
from restride.testing.strategies import layout_pairs


@given(layout_pairs())
def test_every_target_address_is_filled_once_from_a_rank_that_holds_the_element(pair):
    target, source = pair

    plan = plan_transfer(target, source)

    moved = walk_transfers(plan.descriptors)
    event(f"replicas: {sum(compose_by_walking(target, source).values()) > moved.total()}")
    filled = Counter((full, rank, shard) for full, _, _, rank, shard, _ in moved.elements())
    wanted = Counter((full, rank, shard) for full, rank, shard, _ in walk_relation(target))
    assert filled == wanted
    assert not moved - compose_by_walking(target, source)


@given(layout_pairs())
def test_a_policy_decides_every_choice_and_only_those(pair):
    target, source = pair
    asked = []

    def last(choice):
        asked.append(choice)
        return choice.source_ranks[-1]

    plan = plan_transfer(target, source, prefer=last)

    moved = walk_transfers(plan.descriptors)
    assert sum(moved.values()) == sum(walk_relation(target).values())
    assert all(len(choice.source_ranks) > 1 for choice in asked)
    assert all(list(choice.source_ranks) == sorted(choice.source_ranks) for choice in asked)


def test_a_rank_that_holds_the_element_itself_copies_it_locally():
    whole = replicated((6, 4), mesh={"tp": 4})

    plan = plan_transfer(whole, whole)

    assert {moved[1:4:2] for moved in walk_transfers(plan.descriptors)} == {
        (rank, rank) for rank in range(4)
    }
    assert len(plan.descriptors) == 1


def test_source_and_target_ranks_are_two_namespaces():
    whole = replicated((6, 4), mesh={"tp": 4})

    turned = plan_transfer(whole, whole, colocated={rank: 3 - rank for rank in range(4)})
    apart = plan_transfer(replicated((6, 4), mesh={"tp": 8}), whole, colocated={})

    assert {moved[1:4:2] for moved in walk_transfers(turned.descriptors)} == {
        (3 - rank, rank) for rank in range(4)
    }
    sent = Counter(moved[1] for moved in walk_transfers(apart.descriptors).elements())
    assert sent == dict.fromkeys(range(4), 48)


def test_replicas_are_read_from_the_ranks_that_have_least_to_send():
    # The peer takes the lowest holder: 640 of 768 elements from rank 0.
    layouts = [bigcode_qkv((96, 8), mesh={"tp": tp}, heads=8, hidden=64) for tp in (2, 4)]

    plan = plan_transfer(layouts[1], layouts[0], colocated={})

    sent = Counter(moved[1] for moved in walk_transfers(plan.descriptors).elements())
    assert max(sent.values()) - min(sent.values()) <= 32 * 8


@pytest.mark.parametrize(("a", "b"), [(2, 4), (4, 2), (2, 8), (8, 2), (4, 8), (8, 4)])
def test_codegen_moves_between_any_parallelism_in_one_descriptor(a, b):
    counts = {
        len(
            plan_transfer(
                codegen_qkv((3 * hidden, hidden), mesh={"tp": b}, heads=32),
                codegen_qkv((3 * hidden, hidden), mesh={"tp": a}, heads=32),
            ).descriptors
        )
        for hidden in (512, 1024, 8192)
    }

    assert counts == {1}


def test_what_only_one_rank_can_send_counts_before_anything_is_chosen():
    """Two elements that both have come first in the target, one of rank 0 alone comes last."""
    source = Layout.of(
        {"tp": 2},
        (3,),
        [(3,), (2,)],
        [Piece((Axis(3, 1, 0, 1),)), Piece((Axis(2, 1, 0, 1),), 0, 1, 0)],
    )

    plan = plan_transfer(replicated((3,), mesh={"tp": 1}), source, colocated={})

    assert sorted(moved[:2] for moved in walk_transfers(plan.descriptors)) == [
        *((0, 1), (1, 1)),
        (2, 0),
    ]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_hole_of_the_source_that_the_target_needs_is_refused_with_the_element(copies):
    replicas = (Axis(2, 0, 2, 0),) if copies == 2 else ()
    axes = (*replicas, Axis(2, 2, 1, 0), Axis(2, 1, 0, 1))
    half = Layout.of({"dp": copies, "tp": 2}, (8,), [(2,)] * 2 * copies, [Piece(axes)])

    with pytest.raises(CoverageError, match="source layout") as error:
        plan_transfer(replicated((8,), mesh={"tp": 1}), half)

    assert isinstance(error.value.verdict, Hole)
    assert error.value.verdict.element == 4
    assert plan_transfer(half, replicated((8,), mesh={"tp": 1})).numel == 4 * copies


def test_a_target_address_that_nobody_fills_is_refused():
    short = Layout.of({"tp": 1}, (4,), [(6,)], [Piece((Axis(4, 1, 0, 1),))])

    with pytest.raises(CoverageError, match="target layout") as error:
        plan_transfer(short, replicated((4,), mesh={"tp": 1}))

    assert isinstance(error.value.verdict, Gap)


def test_a_policy_that_names_a_rank_without_the_element_is_refused():
    with pytest.raises(PlanError, match=r"chose source rank 7 .*choose one of 0, 1"):
        plan_transfer(
            replicated((4,), mesh={"tp": 1}),
            replicated((4,), mesh={"tp": 2}),
            prefer=lambda _: 7,
        )


def test_layouts_of_different_tensors_do_not_meet():
    with pytest.raises(ShapeMismatchError, match=r"\(4, 2\).*\(2, 4\)"):
        plan_transfer(replicated((4, 2), mesh={"tp": 1}), replicated((2, 4), mesh={"tp": 1}))


def test_an_exact_replica_is_preferred_to_a_scaled_one():
    # Scale is part of the language here; the peer refuses any scaled piece, even 0.5 to 0.5.
    both = Layout.of(
        {"tp": 2},
        (4,),
        [(4,)] * 2,
        [Piece((Axis(4, 1, 0, 1),), scale=Fraction(1, 3)), Piece((Axis(4, 1, 0, 1),), rank_base=1)],
    )
    scaled = replicated((4,), mesh={"tp": 2}, scale=Fraction(1, 3))

    exact = plan_transfer(replicated((4,), mesh={"tp": 1}), both)

    assert [(t.source_rank_base, t.scale) for t in exact.descriptors] == [(1, 1)]
    assert {t.scale for t in plan_transfer(scaled, scaled).descriptors} == {1}
    assert {t.scale for t in plan_transfer(both, scaled).descriptors} == {1, 3}


def test_plans_need_no_limits_on_the_number_of_pieces():
    # The peer refuses more than 512 frames on a side, and a 1024-fold replica.
    rows = [split((513 * 512, 2), mesh={"tp": tp}) for tp in (512, 513)]
    many = replicated((8,), mesh={"tp": 1024})

    assert plan_transfer(rows[1], rows[0]).numel == 513 * 512 * 2
    assert plan_transfer(replicated((8,), mesh={"tp": 1}), many).numel == 8
    # 512 and 513 shards overlap in 1024 stretches, each of another length.
    assert len(compose(rows[1], rows[0]).descriptors) == 1024
