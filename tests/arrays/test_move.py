"""`move` turns the shards of one layout into those of another."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.compose import compose
from restride.algebra.layout import Layout, Padding
from restride.algebra.piece import Axis, Piece
from restride.algebra.transfer import Transfer, TransferAxis, Transfers
from restride.arrays.extract import extract
from restride.arrays.move import move
from restride.errors import (
    CoverageError,
    LayoutError,
    PlanError,
    ShapeMismatchError,
    UnsupportedError,
)
from restride.planning.transfers import plan_transfer
from restride.testing.arrays import random_elements, somewhere_in_memory
from restride.testing.strategies import layout_pairs

pytestmark = pytest.mark.usefixtures("both_ways")

ROWS = Layout.of({"tp": 2}, (4, 6), [(2, 6)] * 2, [Piece((Axis(2, 12, 1, 0), Axis(12, 1, 0, 1)))])
COLUMNS = Layout.of(
    {"tp": 3},
    (4, 6),
    [(4, 2)] * 3,
    [Piece((Axis(3, 2, 1, 0), Axis(4, 6, 0, 2), Axis(2, 1, 0, 1)))],
)
EVERYWHERE = Layout.of(
    {"tp": 2}, (4, 6), [(4, 6)] * 2, [Piece((Axis(2, 0, 1, 0), Axis(24, 1, 0, 1)))]
)


def cut(layout: Layout, full: np.ndarray) -> dict[int, np.ndarray]:
    return {rank: extract(layout, full, rank) for rank in range(layout.rank_count)}


def once_each(relation: Transfers) -> Transfers:
    """Write out a relation step by step and keep the first source of each target address."""
    chosen = {}
    for transfer in relation.descriptors:
        for step in _steps(transfer.as_walk()):
            full, source_rank, source_shard, target_rank, target_shard = step
            chosen.setdefault(
                (target_rank, target_shard),
                Transfer(
                    (), full, source_rank, source_shard, target_rank, target_shard, transfer.scale
                ),
            )
    return replace(relation, descriptors=tuple(chosen.values()))


def _steps(walk):
    from restride.testing.oracles import walk_addresses

    return walk_addresses(walk)


@given(layout_pairs(with_scales=False), st.randoms(use_true_random=False))
def test_moved_shards_are_those_that_the_target_layout_cuts(pair, random):
    source, target = pair
    full = random_elements(random, source.full_shape, "float32")
    shards = {rank: somewhere_in_memory(random, shard) for rank, shard in cut(source, full).items()}

    moved = move(once_each(compose(target, source)), shards)

    assert moved.keys() == set(range(target.rank_count))
    for rank, expected in cut(target, full).items():
        assert moved[rank].tobytes() == expected.tobytes()
        assert moved[rank].shape == expected.shape


@pytest.mark.parametrize(
    ("source", "target"), [(ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, EVERYWHERE), (ROWS, ROWS)]
)
def test_one_descriptor_for_all_ranks_is_carried_out(source, target):
    full = np.arange(24).reshape(4, 6)
    transfers = compose(target, source)

    moved = move(transfers, cut(source, full))

    for rank, expected in cut(target, full).items():
        np.testing.assert_array_equal(moved[rank], expected)


def test_transfers_of_a_plan_are_carried_out():
    full = np.arange(24).reshape(4, 6)

    moved = move(plan_transfer(COLUMNS, EVERYWHERE), cut(EVERYWHERE, full))

    for rank, expected in cut(COLUMNS, full).items():
        np.testing.assert_array_equal(moved[rank], expected)


def dealt(order, ranks):
    """Rows dealt out to the ranks in some order, one piece for each."""
    pieces = [
        Piece((Axis(3, 1, 0, 1),), 3 * row, place % ranks, 3 * (place // ranks))
        for place, row in enumerate(order)
    ]
    rows = len(order)
    return Layout.of({"ep": ranks}, (rows, 3), [(rows // ranks, 3)] * ranks, pieces)


@pytest.mark.parametrize("kind", ["array", pytest.param("tensor", marks=pytest.mark.interop)])
@pytest.mark.parametrize("seed", range(12))
def test_rows_that_turn_around_are_moved(kind, seed):
    """Their transfers go backwards in the source, in the target or in both; no tensor can."""
    random = Random(seed)  # noqa: S311
    orders = []
    for _ in range(2):
        order = list(range(8))
        if seed % 3:
            random.shuffle(order)
        elif random.random() < 0.8:
            order.reverse()
        orders.append(order)
    source, target = (dealt(order, random.choice([1, 2, 4])) for order in orders)
    full = np.arange(24, dtype=np.float32).reshape(8, 3)
    if kind == "tensor":
        full = pytest.importorskip("torch").from_numpy(full)
    transfers = compose(target, source)

    moved = move(transfers, cut(source, full))

    for rank, expected in cut(target, full).items():
        assert moved[rank].tolist() == expected.tolist()


def test_the_rows_above_go_backwards_on_either_side():
    forwards, backwards = dealt(range(8), 1), dealt(range(7, -1, -1), 1)
    found = {
        (axis.source_shard_stride < 0, axis.target_shard_stride < 0)
        for source, target in ((forwards, backwards), (backwards, forwards), (backwards, backwards))
        for transfer in compose(target, source).descriptors
        for axis in transfer.axes
    }

    assert {(True, False), (False, True)} & found


def test_padding_of_the_target_is_zero():
    padded = Layout.of(
        {"dp": 2},
        (3,),
        [(2,)] * 2,
        [Piece((Axis(2, 1, 0, 1),)), Piece((), 2, 1, 0)],
        [Padding((), 1, 1, "undefined")],
    )
    whole = Layout.of({"tp": 1}, (3,), [(3,)], [Piece((Axis(3, 1, 0, 1),))])

    moved = move(compose(padded, whole), {0: np.array([1.0, 2.0, 3.0])})

    assert moved[1].tolist() == [3.0, 0.0]


def test_a_scale_is_applied_as_extract_applies_it():
    third = Piece((Axis(3, 0, 1, 0), Axis(24, 1, 0, 1)), scale=Fraction(1, 3))
    target = Layout.of({"tp": 3}, (4, 6), [(4, 6)] * 3, [third])
    full = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)

    moved = move(compose(target, ROWS), cut(ROWS, full))

    assert moved[2].tobytes() == (full / np.float32(3)).tobytes()
    with pytest.raises(UnsupportedError, match="'exp_avg' by 3"):
        move(compose(target, ROWS), cut(ROWS, full), state="exp_avg")


def test_ranks_that_nobody_reads_may_be_missing():
    full = np.arange(24).reshape(4, 6)
    from_first = once_each(compose(ROWS, EVERYWHERE))

    moved = move(from_first, {0: full})

    np.testing.assert_array_equal(moved[1], full[2:])


def test_a_missing_rank_that_is_read_is_named():
    with pytest.raises(PlanError, match="target rank 0 reads source rank 1, which is not given"):
        move(compose(COLUMNS, ROWS), {0: np.zeros((2, 6))})


def test_transfers_that_name_every_replica_are_refused():
    with pytest.raises(PlanError, match="let plan_transfer choose"):
        move(compose(ROWS, EVERYWHERE), cut(EVERYWHERE, np.zeros((4, 6))))


def test_transfers_that_leave_a_gap_or_write_twice_are_refused():
    transfers = compose(COLUMNS, ROWS)
    half = replace(transfers, descriptors=transfers.descriptors[:-1])
    double = replace(transfers, descriptors=transfers.descriptors * 2)
    shards = cut(ROWS, np.zeros((4, 6)))

    with pytest.raises(CoverageError, match="transfers: nobody writes shard index"):
        move(half, shards)
    with pytest.raises(CoverageError, match="transfers: piece 0 and piece"):
        move(double, shards)


def test_source_shards_are_checked_like_those_of_rebuild():
    transfers = compose(COLUMNS, ROWS)

    with pytest.raises(ShapeMismatchError, match=r"source shard of rank 1: .*\(6, 2\)"):
        move(transfers, {0: np.zeros((2, 6)), 1: np.zeros((6, 2))})
    with pytest.raises(UnsupportedError, match="source shard of rank 1"):
        move(transfers, {0: np.zeros((2, 6)), 1: np.zeros((2, 6), np.int64)})
    with pytest.raises(LayoutError, match="source shards: none are given"):
        move(transfers, {})


def test_transfers_that_leave_the_source_memory_are_refused():
    whole = Layout.of({"tp": 1}, (4,), [(4,)], [Piece((Axis(4, 1, 0, 1),))])
    outside = Transfers(whole, whole, (Transfer((TransferAxis(4, 1, 0, 2, 0, 1),), 0, 0, 0, 0, 0),))

    with pytest.raises(LayoutError, match="leaves the memory"):
        move(outside, {0: np.zeros(4)})
