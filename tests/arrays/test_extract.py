"""`extract` copies exactly the elements that the layout names, from any memory."""

from __future__ import annotations

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.layout import Layout, Padding
from restride.algebra.piece import Axis, Piece
from restride.arrays._numpy import coordinates_of
from restride.arrays.extract import extract
from restride.errors import CoverageError, LayoutError, ShapeMismatchError, UnsupportedError
from restride.testing.arrays import extract_by_walking, random_elements, somewhere_in_memory
from restride.testing.partitions import PARTITIONS
from restride.testing.strategies import layouts

pytestmark = pytest.mark.usefixtures("both_ways")

DTYPES = ("float32", "float64", "float16", "int64", "uint8", "bool", "complex64", "complex128")
ROWS = Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))])


def scaled_bias(ranks: int, numel: int = 1000) -> Layout:
    """A bias that every rank holds divided by the number of ranks."""
    piece = Piece((Axis(ranks, 0, 1, 0), Axis(numel, 1, 0, 1)), scale=Fraction(1, ranks))
    return Layout.of({"tp": ranks}, (numel,), [(numel,)] * ranks, [piece])


@given(layouts(with_scales=False), st.randoms(use_true_random=False), st.sampled_from(DTYPES))
def test_a_shard_holds_what_walking_the_layout_finds(layout, random, dtype):
    full = random_elements(random, layout.full_shape, dtype)
    view = somewhere_in_memory(random, full)
    rank = random.randrange(layout.rank_count)

    shard = extract(layout, view, rank)

    assert shard.tobytes() == extract_by_walking(layout, full, rank).tobytes()
    assert shard.shape == layout.shard_shape(rank)
    assert shard.flags.c_contiguous
    assert shard.dtype == full.dtype


@given(layouts(), st.randoms(use_true_random=False))
def test_scaled_elements_are_multiplied_then_divided(layout, random):
    full = np.array([random.uniform(-2, 2) for _ in range(layout.full_numel)], np.float32)
    full = full.reshape(layout.full_shape)
    rank = random.randrange(layout.rank_count)

    shard = extract(layout, full, rank)

    np.testing.assert_array_equal(shard, extract_by_walking(layout, full, rank))


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: partition.name)
def test_shards_of_framework_layouts_are_those_of_the_partition_function(partition):
    from restride.algebra.fold import fold

    for ranks in partition.ranks[:2]:
        maps = partition.index_maps(1, ranks)
        layout = fold(
            [entries.reshape(-1).tolist() for entries in maps],
            mesh={"rank": ranks},
            full_shape=partition.shape(1),
            shard_shapes=[entries.shape for entries in maps],
        )
        full = np.random.default_rng(0).standard_normal(layout.full_shape).astype(np.float16)

        shards = [extract(layout, full, rank) for rank in range(ranks)]

        for shard, expected in zip(shards, partition.shards(full, 1, ranks), strict=True):
            np.testing.assert_array_equal(shard, expected)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12, 48])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_scaled_bias_is_what_division_gives_bit_for_bit(ranks, dtype):
    """Fault E 3 of the peer: it multiplies by a rounded reciprocal."""
    bias = np.random.default_rng(ranks).standard_normal(1000).astype(dtype)

    shard = extract(scaled_bias(ranks), bias, ranks - 1)

    assert shard.tobytes() == (bias / np.dtype(dtype).type(ranks)).astype(dtype).tobytes()


def test_padding_is_zero_whatever_it_is_called():
    layout = Layout.of(
        {"dp": 2},
        (3,),
        [(3,), (3,)],
        [Piece((Axis(3, 1, 0, 1),))],
        [Padding((), 1, 0, "undefined"), Padding((Axis(2, 0, 0, 1),), 1, 1, "zero")],
    )

    assert extract(layout, np.full(3, 7.0), 1).tolist() == [0.0, 0.0, 0.0]


def test_a_tensor_of_another_shape_is_refused_even_with_as_many_elements():
    """Fault E 11 and E 17 of the peer: a transposed or too large tensor is accepted."""
    for shape in [(3, 4), (12,), (8, 3), (4, 3, 1)]:
        with pytest.raises(ShapeMismatchError, match=r"the layout says \(4, 3\)"):
            extract(ROWS, np.zeros(shape), 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_on_the_mesh_is_refused(rank):
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 2"):
        extract(ROWS, np.zeros((4, 3)), rank)


def test_a_shard_address_that_nobody_writes_is_refused_with_its_place():
    short = Layout.of({"tp": 1}, (3,), [(3,)], [Piece((Axis(2, 1, 0, 1),))])

    with pytest.raises(CoverageError, match="nobody writes shard index 2") as caught:
        extract(short, np.zeros(3), 0)
    assert (caught.value.verdict.rank, caught.value.verdict.shard_index) == (0, 2)


def test_a_shard_address_that_is_written_twice_is_refused():
    """Fault E 5 of the peer: overlapping strided destinations are accepted."""
    columns = [Piece((Axis(2, 4, 0, 3), Axis(2, 1, 0, 1)), at, 0, at) for at in (0, 1)]
    layout = Layout.of({"tp": 1}, (2, 4), [(2, 3)], columns)

    with pytest.raises(CoverageError, match="both write"):
        extract(layout, np.zeros((2, 4)), 0)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_integers_cannot_be_scaled(dtype):
    with pytest.raises(UnsupportedError, match=f"dtype {dtype} cannot be scaled by 1/2"):
        extract(scaled_bias(2, 4), np.zeros(4, dtype), 0)


def test_a_scale_that_the_type_cannot_hold_is_refused():
    layout = Layout.of(
        {"tp": 1}, (2,), [(2,)], [Piece((Axis(2, 1, 0, 1),), scale=Fraction(1, 2**24 + 1))]
    )

    with pytest.raises(UnsupportedError, match="not exact in float32"):
        extract(layout, np.ones(2, np.float32), 0)
    assert extract(layout, np.ones(2), 0)[0] == 1 / (2**24 + 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            "exp_avg",
            r"'exp_avg' by 2, but the optimizer would also need lr \* \(1/2\) and eps / \(1/2\)",
        ),
        ("exp_avg_sq", "factor of 1/2, so the state 'exp_avg_sq' by 4"),
        ("momentum_buffer", "how the state 'momentum_buffer' follows is not known"),
    ],
)
def test_a_scaled_optimizer_state_is_refused_with_the_reason(state, message):
    """Fault E 2 of the peer: moments are scaled like weights."""
    with pytest.raises(UnsupportedError, match=message):
        extract(scaled_bias(2, 4), np.ones(4), 0, state=state)


def test_states_of_a_layout_without_scale_are_cut_like_weights():
    for state in ("exp_avg", "momentum_buffer"):
        assert extract(ROWS, np.ones((4, 3)), 0, state=state).sum() == 6
    assert extract(scaled_bias(2, 4), np.ones(4), 0, state="fp32").tolist() == [0.5] * 4


def test_the_shard_is_a_copy():
    full = np.zeros((4, 3))
    shard = extract(ROWS, full, 0)
    shard[...] = 1

    assert not full.any()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[object()] * 3] * 4), "holds references"),
        (np.ma.masked_array(np.zeros((4, 3)), mask=True), "lose its mask"),
        (np.zeros((4, 3), "V0"), "have no bytes"),
        ([[0.0] * 3] * 4, "builtins.list is neither"),
    ],
)
def test_what_has_no_elements_in_memory_is_refused(array, message):
    with pytest.raises(UnsupportedError, match=f"full tensor: .*{message}"):
        extract(ROWS, array, 0)


def test_elements_between_other_fields_are_reached():
    records = np.zeros((4, 3), [("flag", "u1"), ("weight", "f4")])
    records["weight"] = np.arange(12).reshape(4, 3)

    assert extract(ROWS, records["weight"], 1).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_big_endian_elements_stay_as_they_are():
    full = np.arange(12, dtype=">f4").reshape(4, 3)

    shard = extract(ROWS, full, 1)

    assert shard.dtype == full.dtype
    assert shard.tobytes() == full[2:].tobytes()


def test_elements_narrower_than_a_unit_are_refused():
    layout = Layout.of({"tp": 1}, (2,), [(2,)], [Piece((Axis(2, 1, 0, 1),))], unit_bits=16)

    assert extract(layout, np.ones(2, np.float16), 0).tolist() == [1, 1]
    with pytest.raises(UnsupportedError, match="8 bits are too narrow for units of 16"):
        extract(layout, np.ones(2, np.uint8), 0)


def test_short_runs_are_copied_right_whatever_words_they_are_copied_in():
    for dtype in ("u1", "u2", "u4", "u8"):
        for columns, part in [(8, 2), (12, 3), (16, 4), (16, 8), (64, 32), (10, 5)]:
            for start in range(columns - part + 1):
                piece = Piece((Axis(6, columns, 0, part), Axis(part, 1, 0, 1)), start)
                layout = Layout.of({"tp": 1}, (6, columns), [(6, part)], [piece])
                full = np.arange(6 * columns, dtype=dtype).reshape(6, columns)

                shard = extract(layout, full, 0)

                np.testing.assert_array_equal(shard, full[:, start : start + part])


def test_numpy_arrays_do_not_need_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert extract(ROWS, np.arange(12).reshape(4, 3), 0).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UnsupportedError, match="neither a NumPy array nor a PyTorch tensor"):
        extract(ROWS, "weight", 0)


@pytest.mark.parametrize(
    ("index", "shape", "expected"),
    [(0, (), []), (5, (2, 3), [1, 2]), (3, (2, 1, 3), [1, 0, 0]), (0, (1,), [0])],
)
def test_a_flat_index_is_found_in_each_dimension(index, shape, expected):
    assert coordinates_of(index, shape) == expected
    assert coordinates_of(index, shape) == [int(at) for at in np.unravel_index(index, shape)]


@pytest.mark.parametrize(
    ("index", "shape"), [(6, (2, 3)), (-1, (2, 3)), (1, ()), (0, (0, 3)), (0, (3, 0)), (-1, ())]
)
def test_an_element_that_an_array_does_not_have_is_refused(index, shape):
    with pytest.raises(LayoutError, match=f"no element {index} in"):
        coordinates_of(index, shape)
