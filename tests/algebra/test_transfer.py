"""Transfers as values: what is no transfer, and what ranks may be asked for."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given

from restride.algebra.compose import compose
from restride.algebra.transfer import Transfer, TransferAxis
from restride.algebra.walks import Walk
from restride.errors import LayoutError
from restride.layouts import replicated, split
from restride.testing.oracles import walk_transfers
from restride.testing.strategies import layout_pairs


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((1, 1, 0, 1, 0, 1), "extent of a transfer axis must be at least 2, got 1"),
        ((2.0, 1, 0, 1, 0, 1), "extent of a transfer axis must be an integer, got 2.0 (float)"),
        ((2, 0.5, 0, 1, 0, 1), "full_stride of a transfer axis must be an integer, got 0.5"),
        ((2, 1, None, 1, 0, 1), "source_rank_stride of a transfer axis must be an integer"),
        ((2, 1, 0, "1", 0, 1), "source_shard_stride of a transfer axis must be an integer"),
        ((2, 1, 0, 1, True, 1), "target_rank_stride of a transfer axis must be an integer"),
        ((2, 1, 0, 1, 0, 1.0), "target_shard_stride of a transfer axis must be an integer"),
        (
            (2, 1, 3, 4, 0, 1),
            "a transfer axis moves source rank (by 3) and shard index (by 4)",
        ),
        (
            (2, 1, 0, 1, 1, -6),
            "a transfer axis moves target rank (by 1) and shard index (by -6)",
        ),
    ],
)
def test_numbers_that_are_no_transfer_axis_are_refused(numbers, problem):
    with pytest.raises(LayoutError) as caught:
        TransferAxis(*numbers)

    assert str(caught.value).startswith(problem)


def test_an_axis_may_move_the_rank_of_one_side_and_the_shard_of_the_other():
    axis = TransferAxis(2, 6, 1, 0, 0, 6)

    transfer = Transfer((axis,), 0, 0, 0, 0, 0)

    assert (transfer.numel, transfer.scale) == (2, 1)


@given(layout_pairs())
def test_a_transfer_survives_being_a_walk(pair):
    for transfer in compose(*pair).descriptors:
        walk = transfer.as_walk()

        assert Transfer.of_walk(walk, transfer.scale) == transfer
        assert walk.numel == transfer.numel == walk_transfers([transfer]).total()


def test_the_addresses_of_a_transfer_are_in_the_order_of_its_fields():
    walk = Walk((10, 11, 12, 13, 14), ((2, 1, 2, 0, 0, 5), (3, 6, 0, 7, 8, 0)))

    transfer = Transfer.of_walk(walk, Fraction(1, 3))

    assert transfer == Transfer(
        (TransferAxis(2, 1, 2, 0, 0, 5), TransferAxis(3, 6, 0, 7, 8, 0)),
        full_base=10,
        source_rank_base=11,
        source_shard_base=12,
        target_rank_base=13,
        target_shard_base=14,
        scale=Fraction(1, 3),
    )


@pytest.mark.parametrize("rank", [-1, 3])
def test_source_and_target_ranks_are_on_meshes_of_their_own(rank):
    """The source has three ranks, the target two: rank 2 is one of the source only."""
    transfers = compose(split((6,), mesh="tp=2"), replicated((6,), mesh="dp=3"))

    assert [move.numel for move in transfers.at_source(2)] == [6]
    with pytest.raises(LayoutError, match="rank 2 is not on a mesh of 2 ranks"):
        transfers.at_target(2)
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 3 ranks"):
        transfers.at_source(rank)
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 3 ranks"):
        transfers.between(rank, 0)
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 2 ranks"):
        transfers.between(0, rank)
