"""Rows and columns in another order are found by their sums, and said as runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from restride.arrays.slice_sums import SliceSums, find_moves


def sums_of(array, cuts=()):
    """The sums of an array that is given in runs, as the steps of a plan do, the last first."""
    sums = SliceSums(array.shape, array.itemsize)
    flat = np.ascontiguousarray(array).reshape(-1)
    bounds = [0, *cuts, flat.size]
    for start, stop in reversed(list(pairwise(bounds))):
        sums.add(start, flat[start:stop].data)
    return sums


def array_of(shape, word="u2", seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 15, shape).astype(word)


def taken(array, moves):
    """The array that `moves` says the other one is."""
    other = array.copy()
    assert moves.run_count == len(moves.runs)
    for there, here, count in moves.runs:
        if moves.along == "rows":
            other[there : there + count] = array[here : here + count]
        else:
            other[:, there : there + count] = array[:, here : here + count]
    return other


@pytest.mark.parametrize("word", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_an_order_of_blocks_is_found_whatever_the_runs_are_read_in(word, axis, seed):
    rng = np.random.default_rng(seed)
    a = array_of((24, 36), word, seed)
    block, count = (3, 8) if axis == 0 else (6, 6)
    order = rng.permutation(count)
    order[:2] = order[1::-1]
    places = (order[:, None] * block + np.arange(block)).reshape(-1)
    b = np.take(a, places, axis=axis)
    cuts = sorted(rng.integers(1, a.size, 7))

    moves = find_moves(sums_of(a, cuts), sums_of(b))

    if (order == np.arange(count)).all():
        assert moves is None
        return
    assert moves.along == ("rows", "columns")[axis]
    assert moves.block % block == 0
    assert (taken(a, moves) == b).all()


def test_rows_longer_than_what_is_summed_at_one_time_are_found():
    a = array_of((3, 40_000))
    b = a[[2, 1, 0]]

    assert find_moves(sums_of(a), sums_of(b, [50_001])).runs == ((0, 2, 1), (2, 0, 1))


def test_one_other_bit_is_no_other_order():
    a = array_of((8, 8))
    b = a[::-1].copy()
    b[3, 3] ^= 1

    assert find_moves(sums_of(a), sums_of(b)) is None


def test_elements_that_changed_places_in_a_row_are_no_other_order_of_rows():
    a = array_of((4, 4))
    b = a.copy()
    b[1, [0, 2]] = a[1, [2, 0]]

    assert find_moves(sums_of(a), sums_of(b)) is None


def test_a_square_array_that_was_transposed_is_called_so():
    a = array_of((16, 16))

    assert find_moves(sums_of(a), sums_of(a.T)).along == "transposed"


def test_rows_that_are_alike_are_paired_in_their_order():
    a = array_of((2, 4))[[0, 0, 1, 1]]

    assert find_moves(sums_of(a), sums_of(a[[2, 3, 0, 1]])).runs == ((0, 2, 2), (2, 0, 2))


def test_an_array_of_one_dimension_has_its_elements_for_rows():
    a = array_of((100_000,), "u4")
    a[:] = np.arange(100_000)
    moves = find_moves(sums_of(a), sums_of(a[::-1]))

    assert (moves.along, moves.run_count, len(moves.runs)) == ("rows", 100_000, 4096)
    assert moves.runs[0] == (0, 99_999, 1)
