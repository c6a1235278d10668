"""What DeepSpeed 0.19.8 does wrongly with maps, shown with the real peer, and the right behaviour.

One test a fault. If a later version of the peer mends one, the first half of its test fails, and
the comparison has to be written again.
"""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from restride import Axis, Layout, Piece, extract, move, plan_transfer, prove, rebuild
from restride.algebra.coverage import Covered, Hole, Overlap
from restride.errors import (
    CoverageError,
    LayoutError,
    ReplicaError,
    ShapeMismatchError,
    UnsupportedError,
)
from restride.layouts import (
    block_gather,
    codegen_qkv,
    padded,
    replicated,
    split,
    sub_params,
    transposed,
)

torch = pytest.importorskip("torch")
affine = pytest.importorskip("deepspeed.checkpoint.affine")
peer_planner = pytest.importorskip("deepspeed.checkpoint.affine_transfer")

pytestmark = pytest.mark.interop


def peer_run(numel, full, shard, holders):
    return affine.AffinePiece((numel,), full, (1,), shard, (1,), holders)


def run(numel, full, rank, shard=0):
    return Piece((Axis(numel, 1, 0, 1),), full, rank, shard)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (1, 2)), ((1, 2), (1, 4)), ((1, 4), (1, 1))]
)
def test_e1_scaled_pieces_are_planned(before, after):
    source, target = Fraction(*before), Fraction(*after)
    with pytest.raises(peer_planner.UnsupportedLayoutError):
        peer_planner.plan_transfer(
            affine.replicated_map((8,), 4, scale=float(target)),
            affine.replicated_map((8,), 2, scale=float(source)),
        )

    layouts = [
        replicated((8,), mesh={"tp": tp}, scale=scale) for tp, scale in ((4, target), (2, source))
    ]
    shard = np.arange(8, dtype=np.float32)
    moved = move(plan_transfer(*layouts), {0: shard, 1: shard})

    assert all(np.array_equal(moved[rank], shard * float(target / source)) for rank in range(4))


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 48])
def test_e3_a_divided_bias_is_what_the_layer_stores(ranks):
    bias = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    peer = affine.replicated_map(bias.shape, ranks, scale=1.0 / ranks)
    assert not torch.equal(peer.extract(bias, 0), bias / ranks)

    layout = replicated(tuple(bias.shape), mesh={"tp": ranks}, scale=Fraction(1, ranks))

    assert torch.equal(extract(layout, bias, 0), bias / ranks)
    assert torch.equal(torch.from_numpy(extract(layout, bias.numpy(), 0)), bias / ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_e3_a_convolution_over_input_channels_has_layouts_where_the_layer_has_no_map(ranks):
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    conv = torch.nn.Conv2d(7, 5, 3)
    shards = [layers.TensorParallelIcShardConv2d(conv, rank, ranks).conv for rank in range(ranks)]
    sizes = [shard.weight.shape[1] for shard in shards]

    weight = split((5, 7, 3, 3), mesh={"tp": ranks}, dim=1, sizes=sizes)
    bias = replicated((5,), mesh={"tp": ranks}, scale=Fraction(1, ranks))

    for rank, shard in enumerate(shards):
        assert torch.equal(extract(weight, conv.weight.detach(), rank), shard.weight)
        assert torch.equal(extract(bias, conv.bias.detach(), rank), shard.bias)


def test_e5_strided_pieces_may_not_write_the_same_shard_address():
    columns = [affine.AffinePiece((4, 2), at, (4, 1), 0, (4, 1), [0]) for at in (0, 2)]
    peer = affine.ParamAffineMap((4, 4), {0: (4, 4)}, {0: columns})
    peer.validate_coverage()
    full = torch.arange(16.0).view(4, 4)
    assert not torch.equal(peer.rebuild({0: full.clone()}), full)

    pieces = [Piece((Axis(4, 4, 0, 4), Axis(2, 1, 0, 1)), at) for at in (0, 2)]
    verdict = prove(Layout.of({"tp": 1}, (4, 4), [(4, 4)], pieces), side="shard")

    assert isinstance(verdict, Overlap)
    assert (verdict.rank, verdict.shard_index) == (0, 0)
    with pytest.raises(LayoutError, match="reaches shard index 18 of rank 0"):
        Layout.of({"tp": 1}, (4, 4), [(4, 4)], [Piece((Axis(4, 4, 0, 5), Axis(4, 1, 0, 1)))])


def test_e6_a_hole_is_found_before_memory_is_read():
    peer = affine.contiguous_split_map((6, 2), [2, 2], 0)
    assert peer.rebuild({0: torch.zeros(2, 2), 1: torch.ones(2, 2)}).shape == (6, 2)

    pieces = [run(4, 0, 0), run(4, 4, 1)]
    layout = Layout.of({"tp": 2}, (6, 2), [(2, 2)] * 2, pieces)

    verdict = prove(layout)
    assert isinstance(verdict, Hole)
    assert (verdict.element, verdict.coordinates, verdict.count) == (8, (4, 0), 4)
    with pytest.raises(CoverageError):
        rebuild(layout, {0: np.zeros((2, 2)), 1: np.ones((2, 2))})
    with pytest.raises(LayoutError):
        split((6, 2), mesh={"tp": 2}, sizes=[2, 2])
    with pytest.raises(LayoutError):
        split((6, 2), mesh={"tp": 2}, sizes=[4, 4])


def test_e6_proofs_do_not_vanish_with_assertions_switched_off():
    code = (
        "from restride import Axis, Layout, Piece, prove;"
        "layout = Layout.of({'tp': 1}, (6,), [(6,)], [Piece((Axis(4, 1, 0, 1),))]);"
        "print(type(prove(layout)).__name__)"
    )

    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "Hole"


def differently_cut():
    both = [run(4, 0, 0), run(2, 0, 1), run(2, 2, 1, 2)]
    return Layout.of({"tp": 2}, (4,), [(4,)] * 2, both)


def test_e7_replicas_are_compared_whatever_way_they_are_cut():
    pieces = {
        0: [peer_run(4, 0, 0, [0, 1])],
        1: [peer_run(2, 0, 0, [0, 1]), peer_run(2, 2, 2, [0, 1])],
    }
    peer = affine.ParamAffineMap((4,), {0: (4,), 1: (4,)}, pieces)
    good, bad = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 99.0, 99.0])
    assert peer.rebuild({0: good, 1: bad}).tolist() == [1, 2, 99, 99]

    with pytest.raises(ReplicaError) as error:
        rebuild(differently_cut(), {0: good, 1: bad})

    assert (error.value.ranks, error.value.different_numel) == ((0, 1), 2)
    assert error.value.largest == 96


def test_e7_replicas_are_compared_bit_for_bit():
    peer = affine.replicated_map((2,), 2)
    nan, plus, minus = (torch.tensor([value, 1.0]) for value in (float("nan"), 0.0, -0.0))
    with pytest.raises(ValueError, match="different data"):
        peer.rebuild({0: nan.clone(), 1: nan.clone()})
    assert peer.rebuild({0: plus, 1: minus}).tolist() == [0, 1]

    layout = replicated((2,), mesh={"tp": 2})

    assert torch.isnan(rebuild(layout, {0: nan.clone(), 1: nan.clone()})[0])
    with pytest.raises(ReplicaError):
        rebuild(layout, {0: plus, 1: minus})


def test_e7_holders_are_derived_and_cannot_lie():
    pieces = {0: [peer_run(2, 0, 0, [0])], 1: [peer_run(2, 0, 0, [1])]}
    peer = affine.ParamAffineMap((2,), {0: (2,), 1: (2,)}, pieces)
    one, two = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])
    assert peer.rebuild({0: one, 1: two}).tolist() == [2, 2]

    layout = Layout.of({"tp": 2}, (2,), [(2,)] * 2, [run(2, 0, 0), run(2, 0, 1)])

    with pytest.raises(ReplicaError):
        rebuild(layout, {0: one, 1: two})


def test_e8_transposed_flat_and_strided_shards_are_planned():
    stored = affine.ParamAffineMap(
        (4, 6), {0: (6, 4)}, {0: [affine.AffinePiece((4, 6), 0, (6, 1), 0, (1, 4), [0])]}
    )
    with pytest.raises(peer_planner.UnsupportedLayoutError):
        peer_planner.plan_transfer(affine.contiguous_split_map((4, 6), [4], 0), stored)

    full = np.arange(24).reshape(4, 6)
    rows = Piece((Axis(2, 6, 1, 0), Axis(2, 12, 0, 6), Axis(6, 1, 0, 1)))
    sources = [
        transposed(replicated((6, 4), mesh={"tp": 1})),
        Layout.of({"tp": 1}, (4, 6), [(24,)], [run(24, 0, 0)]),
        Layout.of({"tp": 2}, (4, 6), [(2, 6)] * 2, [rows]),
    ]
    for source in sources:
        target = split((4, 6), mesh={"tp": 2}) if source.full_shape == (4, 6) else None
        target = target or replicated(source.full_shape, mesh={"tp": 1})
        whole = full.reshape(source.full_shape)
        shards = {rank: extract(source, whole, rank) for rank in range(source.rank_count)}
        moved = move(plan_transfer(target, source), shards)
        assert all(np.array_equal(moved[r], extract(target, whole, r)) for r in moved)


def test_e8_replicas_with_different_cuts_are_planned():
    assert isinstance(prove(differently_cut()), Covered)

    plan = plan_transfer(replicated((4,), mesh={"tp": 1}), differently_cut(), colocated={})

    shard = np.arange(4)
    assert move(plan, {0: shard, 1: shard})[0].tolist() == [0, 1, 2, 3]


def test_e8_two_paddings_of_one_vocabulary_compose():
    with pytest.raises(peer_planner.InvalidMapError):
        peer_planner.plan_transfer(
            affine.contiguous_split_map((50258, 8), [25129] * 2, 0),
            affine.contiguous_split_map((50260, 8), [12565] * 4, 0),
        )

    four, two = (
        padded((50257, 8), mesh={"tp": tp}, rows=rows) for tp, rows in ((4, 50260), (2, 50258))
    )
    full = np.arange(50257 * 8).reshape(50257, 8)
    moved = move(plan_transfer(two, four), {rank: extract(four, full, rank) for rank in range(4)})

    assert np.array_equal(np.concatenate([moved[0], moved[1]])[:50257], full)
    assert not moved[1][-1].any()


def test_e9_ordinary_topologies_are_planned():
    rows = [affine.contiguous_split_map((1536, 2), [1536 // tp] * tp, 0) for tp in (768, 1)]
    with pytest.raises(peer_planner.AffineTransferError, match="max_pair_checks"):
        peer_planner.plan_transfer(rows[1], rows[0])

    ours = [split((1536, 2), mesh={"tp": tp}) for tp in (768, 1)]

    assert len(plan_transfer(ours[1], ours[0]).descriptors) == 1
    many = codegen_qkv((36864, 8), mesh={"tp": 16}, heads=192)
    more = codegen_qkv((36864, 8), mesh={"tp": 48}, heads=192)
    assert len(plan_transfer(more, many).descriptors) < 10


def test_e10_a_proof_does_not_depend_on_the_size():
    layout = codegen_qkv((3 * 2**40, 2**20), mesh={"tp": 4}, heads=2**20)

    verdict = prove(layout)

    assert isinstance(verdict, Covered)
    assert verdict.method == "structure"


def test_e17_nonsense_is_refused_where_it_is_written():
    affine.ParamAffineMap((2,), {0: (2,)}, {0: [peer_run(2, 0, 0, [0, 7])]}).validate()
    affine.block_gather_map((4, 2), {0: [0, 1], 1: [1, 0]}, 2, 0).validate()
    affine.block_gather_map((4, 2), {0: [5]}, 2, 0).validate()
    affine.sub_param_map((10, 2), [3, 3], [[1, 2], [2, 1]], 0).validate()
    assert affine.AffinePiece((2.9,), 0.9, (1,), 0, (1,), [0]).shape == (2,)
    affine.AffinePiece((1,), 0, (1,), 0, (1,), [0], scale=float("nan"))

    with pytest.raises(LayoutError):
        Layout.of({"tp": 1}, (2,), [(2,)], [Piece((Axis(2, 0, 7, 0),))])
    for wrong in ([[0, 1], [1, 0]], [[0, 1], [5, 3]], [[0], [1]]):
        with pytest.raises(LayoutError):
            block_gather((4, 2), mesh={"tp": 2}, ids=wrong, block=1)
    with pytest.raises(LayoutError):
        sub_params((10, 2), mesh={"tp": 2}, sizes=[3, 3])
    with pytest.raises(LayoutError):
        Axis(2.9, 1, 0, 1)
    for scale in (float("nan"), float("inf"), 0, 0.5):
        with pytest.raises(LayoutError):
            replicated((2,), mesh={"tp": 1}, scale=scale)


def test_e17_shards_that_do_not_fit_are_refused():
    peer = affine.contiguous_split_map((4,), [2, 2], 0)
    mixed = {0: torch.zeros(2, dtype=torch.int32), 1: torch.tensor([1.5, 2.5])}
    assert peer.rebuild(mixed).tolist() == [0, 0, 1, 2]
    wide = affine.contiguous_split_map((2, 3), [1, 1], 0)
    assert wide.extract(torch.arange(12.0), 1).numel() == 3

    layout = split((4,), mesh={"tp": 2})

    with pytest.raises(UnsupportedError):
        rebuild(layout, mixed)
    with pytest.raises(ShapeMismatchError):
        extract(split((2, 3), mesh={"tp": 2}), torch.arange(12.0), 1)
    with pytest.raises(LayoutError):
        rebuild(layout, {0: torch.zeros(2), 1: torch.zeros(2), 5: torch.zeros(2)})
    with pytest.raises(CoverageError):
        rebuild(layout, {0: torch.zeros(2)})
