"""`rebuild` undoes `extract`, and compares whatever is held more than once."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.arrays.extract import extract
from restride.arrays.rebuild import rebuild
from restride.errors import (
    CoverageError,
    LayoutError,
    PlanError,
    ReplicaError,
    ShapeMismatchError,
    UnsupportedError,
)
from restride.testing.arrays import random_elements, somewhere_in_memory
from restride.testing.oracles import walk_piece
from restride.testing.strategies import layouts

pytestmark = pytest.mark.usefixtures("both_ways")

DTYPES = ("float32", "float64", "float16", "int64", "uint8", "bool", "complex64", "complex128")
ROWS = Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))])
# Rank 0 holds the tensor in one piece, rank 1 in two.
CUT_DIFFERENTLY = Layout.of(
    {"tp": 2},
    (4,),
    [(4,)] * 2,
    [
        Piece((Axis(4, 1, 0, 1),)),
        Piece((Axis(2, 1, 0, 1),), 0, 1, 0),
        Piece((Axis(2, 1, 0, 1),), 2, 1, 2),
    ],
)


def everywhere(ranks: int, numel: int, scale: Fraction = Fraction(1)) -> Layout:
    axes = [Axis(ranks, 0, 1, 0)] + ([Axis(numel, 1, 0, 1)] if numel > 1 else [])
    piece = Piece(tuple(axes), scale=scale)
    return Layout.of({"tp": ranks}, (numel,), [(numel,)] * ranks, [piece])


def cut(layout: Layout, full: np.ndarray) -> dict[int, np.ndarray]:
    return {rank: extract(layout, full, rank) for rank in range(layout.rank_count)}


def copies(layout: Layout) -> dict[int, list[tuple[int, int, Fraction]]]:
    """Who holds each full element: rank, shard index, scale, by walking."""
    found = defaultdict(list)
    for piece in layout.all_pieces:
        for full, rank, shard in walk_piece(piece):
            found[full].append((rank, shard, piece.scale))
    return found


@given(
    layouts(with_scales=False),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
    st.sampled_from(["check", "first", "mean"]),
)
def test_rebuilding_what_was_cut_gives_the_tensor_bit_for_bit(layout, random, dtype, replicas):
    full = random_elements(random, layout.full_shape, dtype)
    shards = {rank: somewhere_in_memory(random, shard) for rank, shard in cut(layout, full).items()}

    rebuilt = rebuild(layout, shards, replicas=replicas)

    assert rebuilt.tobytes() == full.tobytes()
    assert rebuilt.shape == layout.full_shape
    assert rebuilt.dtype == full.dtype


@given(layouts(), st.randoms(use_true_random=False))
def test_exact_copies_are_preferred_to_scaled_ones(layout, random):
    full = np.array([random.uniform(-2, 2) for _ in range(layout.full_numel)])
    full = full.reshape(layout.full_shape)
    shards = cut(layout, full)

    rebuilt = rebuild(layout, shards, replicas="first").reshape(-1)

    for index, held in copies(layout).items():
        expected = full.reshape(-1)[index]
        if any(scale == 1 for _, _, scale in held):
            assert rebuilt[index] == expected
        else:
            assert rebuilt[index] == pytest.approx(expected, rel=1e-15)


@given(layouts(), st.randoms(use_true_random=False))
def test_copies_of_different_scale_agree_when_they_come_from_one_tensor(layout, random):
    full = np.array([random.uniform(-2, 2) for _ in range(layout.full_numel)], np.float32)
    shards = cut(layout, full.reshape(layout.full_shape))
    scales = [{scale for _, _, scale in held} for held in copies(layout).values()]
    incomparable = sum(1 not in each and len(each) > 1 for each in scales)

    if incomparable:
        event("held with different scales and nowhere exactly")
        with pytest.raises(UnsupportedError, match=f"^{incomparable} elements"):
            rebuild(layout, shards)
    else:
        rebuild(layout, shards)
    mean = rebuild(layout, shards, replicas="mean").reshape(-1)  # which has nothing to compare
    np.testing.assert_allclose(mean, full, rtol=1e-6, atol=1e-37)


@given(layouts(with_scales=False), st.randoms(use_true_random=False))
def test_a_single_wrong_copy_is_found_whatever_way_copies_are_cut(layout, random):
    assume(layout.full_numel)
    full = np.arange(layout.full_numel, dtype=np.float32).reshape(layout.full_shape)
    shards = cut(layout, full)
    index, held = random.choice(sorted(copies(layout).items()))
    rank, shard_index, _ = random.choice(held)
    shards[rank].reshape(-1)[shard_index] += 0.5

    if len(held) == 1:
        event("sole copy")
        assert rebuild(layout, shards).reshape(-1)[index] == index + 0.5
        return
    with pytest.raises(ReplicaError) as caught:
        rebuild(layout, shards)
    error = caught.value
    assert error.different_numel == 1
    assert error.largest == 0.5
    assert error.first_index == index
    assert rank in error.ranks
    assert set(error.ranks) <= {holder for holder, _, _ in held}
    place = tuple(int(at) for at in np.unravel_index(index, layout.full_shape))
    assert f"the first at {place}: " in str(error)


@given(layouts(with_scales=False), st.randoms(use_true_random=False))
def test_the_first_copy_is_that_of_the_lowest_rank_and_the_mean_that_of_all(layout, random):
    full = np.zeros(layout.full_shape, np.float32)
    shards = cut(layout, full)
    for shard in shards.values():
        shard[...] = [random.choice([1.0, 2.0, 4.0])] if shard.ndim else random.choice([1.0, 4.0])

    first = rebuild(layout, shards, replicas="first").reshape(-1)
    mean = rebuild(layout, shards, replicas="mean").reshape(-1)

    for index, held in copies(layout).items():
        values = [float(shards[rank].reshape(-1)[shard]) for rank, shard, _ in held]
        lowest = min(rank for rank, _, _ in held)
        assert first[index] == shards[lowest].reshape(-1)[0]
        assert mean[index] == np.float32(sum(values) / len(values))


@given(layouts(with_scales=False), st.randoms(use_true_random=False))
def test_ranks_may_be_missing_where_the_others_hold_everything(layout, random):
    full = np.arange(layout.full_numel, dtype=np.int32).reshape(layout.full_shape)
    ranks = sorted(random.sample(range(layout.rank_count), random.randint(1, layout.rank_count)))
    shards = {rank: shard for rank, shard in cut(layout, full).items() if rank in ranks}
    held = {
        index for index, all_of in copies(layout).items() if any(r in ranks for r, _, _ in all_of)
    }

    if len(held) == layout.full_numel:
        assert rebuild(layout, shards).tobytes() == full.tobytes()
        return
    with pytest.raises(CoverageError, match="supply the shards of ranks") as caught:
        rebuild(layout, shards)
    assert caught.value.verdict.element == min(set(range(layout.full_numel)) - held)


# --- faults of the peer


def test_a_hole_is_an_error_and_not_uninitialised_memory():
    """Fault E 6: `rebuild` of the peer never checks coverage."""
    short = Layout.of({"tp": 2}, (6, 2), [(2, 2)] * 2, ROWS_OF_TWO)

    with pytest.raises(CoverageError, match=r"no rank holds full element 8 at \(4, 0\), 4 of 12"):
        rebuild(short, {0: np.zeros((2, 2)), 1: np.ones((2, 2))})


ROWS_OF_TWO = [Piece((Axis(2, 4, 1, 0), Axis(4, 1, 0, 1)))]


def test_a_replica_that_is_cut_differently_is_compared():
    """Fault E 7: the peer takes whatever was written last."""
    shards = {0: np.array([1.0, 2, 3, 4]), 1: np.array([1.0, 2, 99, 98])}

    with pytest.raises(ReplicaError) as caught:
        rebuild(CUT_DIFFERENTLY, shards)
    assert str(caught.value) == (
        "ranks 0, 1 hold different copies of 2 of 4 elements, the first at (2,): 3.0 on rank 0 "
        "and 99.0 on rank 1, the largest difference is 96.0; decide with replicas='first', "
        "'mean' or the rank that counts"
    )


def test_equal_nans_are_equal_and_different_nans_are_not():
    """Fault E 7: the peer refuses identical NaNs."""
    nan = np.array([np.nan, 1.0], np.float32)
    other = nan.copy()
    other.view(np.uint32)[0] += 1

    assert np.isnan(rebuild(everywhere(2, 2), {0: nan, 1: nan.copy()})[0])
    with pytest.raises(ReplicaError, match=r"nan on rank 1 \(with different bits\)") as caught:
        rebuild(everywhere(2, 2), {0: nan, 1: other})
    assert caught.value.largest == 0.0


def test_positive_and_negative_zero_are_different():
    """Fault E 7: the peer takes them as equal."""
    with pytest.raises(ReplicaError, match=r"0\.0 on rank 0 and -0\.0 on rank 1") as caught:
        rebuild(everywhere(2, 1), {0: np.array([0.0]), 1: np.array([-0.0])})
    assert caught.value.largest == 0.0


def test_holders_that_nobody_declared_are_compared():
    """Fault E 7: two pieces with an owner each for the same element, and the last writer wins."""
    layout = Layout.of(
        {"tp": 2}, (2,), [(2,)] * 2, [Piece((Axis(2, 1, 0, 1),), 0, rank) for rank in (0, 1)]
    )

    with pytest.raises(ReplicaError, match="copies of 2 of 2 elements"):
        rebuild(layout, {0: np.array([1.0, 1.0]), 1: np.array([2.0, 2.0])})


@given(layouts(with_scales=False), st.randoms(use_true_random=False), st.data())
def test_a_chosen_rank_gives_its_copies_and_has_to_agree_with_itself_alone(layout, random, data):
    """Against a walk over every copy of every element."""
    shards = cut(layout, np.zeros(layout.full_shape, np.float32))
    for shard in shards.values():
        shard[...] = np.array([random.choice([1, 1, 1, 2]) for _ in range(shard.size)]).reshape(
            shard.shape
        )
    rank = data.draw(st.integers(0, layout.rank_count - 1))
    axes = list(layout.mesh.coordinates(rank).items())
    at = data.draw(st.lists(st.sampled_from(axes), min_size=1, unique=True)) if axes else []
    said = ",".join(f"{axis}={index}" for axis, index in at) or rank
    expected, is_refused, is_torn = {}, False, False
    for index, held in copies(layout).items():
        chosen = [
            shards[holder].reshape(-1)[place]
            for holder, place, _ in held
            if all(layout.mesh.coordinates(holder)[axis] == index for axis, index in at)
        ]
        everybody = [shards[holder].reshape(-1)[place] for holder, place, _ in held]
        is_alone = len({holder for holder, *_ in held}) == 1
        is_refused |= not chosen and not is_alone
        counted = chosen or everybody
        is_torn |= len(set(counted)) > 1
        expected[index] = counted[0]

    if is_refused:
        event("no copy")
        with pytest.raises(PlanError, match="has no copy of"):
            rebuild(layout, shards, replicas=said)
    elif is_torn:
        event("chosen copies differ")
        with pytest.raises(ReplicaError):
            rebuild(layout, shards, replicas=said)
    else:
        event("chosen")
        rebuilt = rebuild(layout, shards, replicas=said).reshape(-1)
        assert {index: rebuilt[index] for index in expected} == expected


def test_a_scaled_copy_is_taken_where_its_rank_is_chosen():
    exact = Piece((Axis(2, 1, 0, 1),))
    halved = Piece((Axis(2, 1, 0, 1),), rank_base=1, scale=Fraction(1, 2))
    layout = Layout.of({"tp": 2}, (2,), [(2,)] * 2, [exact, halved])
    shards = {0: np.array([1.0, 2.0]), 1: np.array([3.0, 4.0])}

    assert rebuild(layout, shards, replicas="first").tolist() == [1, 2]
    assert rebuild(layout, shards, replicas=1).tolist() == [6, 8]
    assert rebuild(layout, shards, replicas="tp=0").tolist() == [1, 2]


def test_a_chosen_rank_that_is_not_supplied_has_no_copy():
    with pytest.raises(PlanError, match="has no copy of 4 of the 4 elements"):
        rebuild(everywhere(3, 4), {0: np.zeros(4), 1: np.zeros(4)}, replicas=2)


def test_a_shard_that_repeats_an_element_is_compared_with_itself():
    """Fault E 17: a stride of 0 is accepted and the last copy wins."""
    twice = Layout.of({"tp": 1}, (2,), [(2, 2)], [Piece((Axis(2, 0, 0, 2), Axis(2, 1, 0, 1)))])

    assert rebuild(twice, {0: np.array([[1, 2], [1, 2]])}).tolist() == [1, 2]
    with pytest.raises(ReplicaError, match=r"^rank 0 holds different copies of 1 of 2") as caught:
        rebuild(twice, {0: np.array([[1, 2], [1, 3]])})
    assert caught.value.ranks == (0,)
    assert rebuild(twice, {0: np.array([[1, 2], [1, 3]])}, replicas="first").tolist() == [1, 2]


@pytest.mark.parametrize("replicas", ["check", "first", "mean", 0, 1])
def test_a_part_of_a_copy_does_not_stand_for_all_of_it(replicas):
    """Both begin at one place and go on with one stride."""
    part_and_all = Layout.of(
        {"tp": 2},
        (4,),
        [(2,), (4,)],
        [Piece((Axis(2, 1, 0, 1),)), Piece((Axis(4, 1, 0, 1),), 0, 1, 0)],
    )
    shards = cut(part_and_all, np.arange(1, 5))

    for garbage in (0, 7):
        out = np.full(4, garbage)
        rebuild(part_and_all, shards, replicas=replicas, out=out)
        assert out.tolist() == [1, 2, 3, 4]


def test_loops_that_reach_over_each_other_are_compared_and_averaged():
    # Windows of 3 over 4 elements: 0 1 2 | 1 2 3.
    windows = Layout.of({"tp": 1}, (4,), [(2, 3)], [Piece((Axis(2, 1, 0, 3), Axis(3, 1, 0, 1)))])
    shard = np.array([[0.0, 1, 2], [1, 4, 3]])

    assert rebuild(windows, {0: shard}, replicas="first").tolist() == [0, 1, 2, 3]
    assert rebuild(windows, {0: shard}, replicas="mean").tolist() == [0, 1, 3, 3]
    with pytest.raises(ReplicaError) as caught:
        rebuild(windows, {0: shard})
    assert (caught.value.first_index, caught.value.largest) == (2, 2.0)


def test_mixed_dtypes_are_refused():
    """Fault E 17: a float shard is cast to the first shard's int."""
    with pytest.raises(
        UnsupportedError,
        match="shard of rank 1: the shard is numpy float64 cpu, that of rank 0 is numpy int32 cpu",
    ):
        rebuild(ROWS, {0: np.zeros((2, 3), np.int32), 1: np.full((2, 3), 2.5)})


def test_a_shard_of_another_shape_is_refused_even_with_as_many_elements():
    """Faults E 5 and E 11: a transposed shard is accepted."""
    with pytest.raises(ShapeMismatchError, match=r"rank 1: the array has shape \(3, 2\)"):
        rebuild(ROWS, {0: np.zeros((2, 3)), 1: np.zeros((3, 2))})


def test_a_shard_of_a_rank_that_does_not_exist_is_refused():
    """Fault E 17: phantom holders and extra shards are accepted."""
    with pytest.raises(LayoutError, match="shards: rank 5 is not on a mesh of 2"):
        rebuild(ROWS, {0: np.zeros((2, 3)), 1: np.zeros((2, 3)), 5: np.zeros((2, 3))})


def test_a_layout_that_writes_a_shard_address_twice_is_refused():
    """Fault E 5: `validate` skips strided destinations."""
    twice = Layout.of({"tp": 1}, (2,), [(1,)], [Piece((), 0), Piece((), 1)])

    with pytest.raises(CoverageError, match="both write shard index 0"):
        rebuild(twice, {0: np.zeros(1)})


# --- scales


def test_a_scaled_bias_is_checked_as_it_is_stored():
    """Fault E 3: 1/3 has no exact way back, so copies are not compared by way of it."""
    bias = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    shards = cut(everywhere(3, 1000, Fraction(1, 3)), bias)

    rebuilt = rebuild(everywhere(3, 1000, Fraction(1, 3)), shards)

    np.testing.assert_array_equal(rebuilt, shards[0] * np.float32(3))
    np.testing.assert_allclose(rebuilt, bias, rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_scale_that_is_a_power_of_two_has_an_exact_way_back(ranks):
    layout = everywhere(ranks, 1000, Fraction(1, ranks))
    bias = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    assert rebuild(layout, cut(layout, bias)).tobytes() == bias.tobytes()


def test_a_scaled_copy_is_compared_with_an_exact_one_by_scaling_that():
    layout = Layout.of(
        {"tp": 2},
        (1000,),
        [(1000,)] * 2,
        [
            Piece((Axis(1000, 1, 0, 1),), 0, 0, 0, Fraction(1, 3)),
            Piece((Axis(1000, 1, 0, 1),), 0, 1, 0),
        ],
    )
    bias = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    shards = cut(layout, bias)

    assert rebuild(layout, shards).tobytes() == bias.tobytes()
    shards[0][7] = np.nextafter(shards[0][7], np.float32(10))
    with pytest.raises(ReplicaError) as caught:
        rebuild(layout, shards)
    assert (caught.value.first_index, caught.value.different_numel) == (7, 1)
    assert caught.value.ranks == (0, 1)
    assert rebuild(layout, shards, replicas="mean").tobytes() == bias.tobytes()


def test_a_scaled_optimizer_state_is_refused():
    with pytest.raises(UnsupportedError, match="factor of 3, so the state 'exp_avg_sq' by 1/9"):
        rebuild(
            everywhere(3, 2, Fraction(1, 3)),
            dict.fromkeys(range(3), np.ones(2)),
            state="exp_avg_sq",
        )


# --- means


def test_a_mean_is_rounded_once():
    one = np.float16(1)
    above = np.nextafter(one, np.float16(2))
    shards = {0: np.array([one]), 1: np.array([above]), 2: np.array([above])}

    mean = rebuild(everywhere(3, 1), shards, replicas="mean")

    exact = (float(one) + 2 * float(above)) / 3
    assert mean.dtype == np.float16
    assert mean[0] == np.float16(exact)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", "<f4"])
def test_copies_in_either_order_of_bytes_are_told_of_and_averaged_by_their_values(dtype):
    shards = {rank: np.array([1, value, 3], dtype) for rank, value in enumerate((2, 4))}

    mean = rebuild(everywhere(2, 3), shards, replicas="mean")

    assert mean.dtype == dtype
    assert mean.tolist() == [1, 3, 3]
    with pytest.raises(ReplicaError, match=r"2\.0 on rank 0 and 4\.0 on rank 1, .* is 2\.0;"):
        rebuild(everywhere(2, 3), shards)


def test_copies_that_agree_keep_their_bits_in_a_mean():
    third = np.array([1 / 3, -0.0, np.inf, 5e-324])
    shards = {0: third, 1: third.copy(), 2: third.copy()}
    shards[1][2] = 1.0

    mean = rebuild(everywhere(3, 4), shards, replicas="mean")

    assert mean[[0, 1, 3]].tobytes() == third[[0, 1, 3]].tobytes()
    assert mean[2] == math.inf


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_what_is_no_float_has_no_mean(dtype):
    shards = {0: np.zeros(2, dtype), 1: np.ones(2, dtype)}

    with pytest.raises(UnsupportedError, match=f"copies of {dtype} elements differ and have no"):
        rebuild(everywhere(2, 2), shards, replicas="mean")
    assert not rebuild(everywhere(2, 2), shards, replicas="first").any()


# --- reports


def test_drift_is_counted_over_all_ranks_and_its_largest_difference_found():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((64, 64)).astype(np.float32)
    layout = Layout.of(
        {"tp": 4}, (64, 64), [(64, 64)] * 4, [Piece((Axis(4, 0, 1, 0), Axis(4096, 1, 0, 1)))]
    )
    shards = {rank: base.copy() for rank in range(4)}
    shards[2][10:12] += 1
    shards[3][11:13] -= 4

    with pytest.raises(ReplicaError) as caught:
        rebuild(layout, shards)
    error = caught.value
    assert error.ranks == (0, 2, 3)
    assert error.different_numel == 3 * 64
    assert error.largest == pytest.approx(4.0)
    assert error.first_index == 10 * 64


def test_a_number_against_a_nan_is_infinitely_far():
    with pytest.raises(ReplicaError) as caught:
        rebuild(everywhere(2, 2), {0: np.array([1.0, 2.0]), 1: np.array([1.5, np.nan])})
    assert caught.value.largest == math.inf


def test_complex_copies_have_no_largest_difference():
    with pytest.raises(ReplicaError, match=r"1j on rank 1; decide") as caught:
        rebuild(everywhere(2, 1), {0: np.array([0j]), 1: np.array([1j])})
    assert caught.value.largest is None


def test_large_replicas_are_compared_part_by_part():
    layout = everywhere(2, 700_001)
    one = np.zeros(700_001, np.int8)
    other = one.copy()
    other[[3, 650_000]] = 1, -3

    with pytest.raises(ReplicaError) as caught:
        rebuild(layout, {0: one, 1: other})
    assert (caught.value.different_numel, caught.value.first_index) == (2, 3)
    assert caught.value.largest == 3.0


# --- hostile input


def test_no_shards_at_all_are_refused():
    with pytest.raises(LayoutError, match="shards: none are given"):
        rebuild(ROWS, {})


def test_an_unknown_policy_is_refused():
    with pytest.raises(PlanError, match="'last' does not say which copy counts; say check, first"):
        rebuild(ROWS, {0: np.zeros((2, 3))}, replicas="last")


def test_missing_ranks_are_named():
    with pytest.raises(CoverageError, match="supply the shards of ranks 1 too"):
        rebuild(ROWS, {0: np.zeros((2, 3))})


def test_an_empty_tensor_is_rebuilt():
    empty = Layout.of({"tp": 2}, (0, 3), [(0, 3)] * 2, [])

    assert rebuild(empty, {0: np.zeros((0, 3)), 1: np.zeros((0, 3))}).shape == (0, 3)
