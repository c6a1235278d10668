"""Differences of two runs, against comparing their elements one by one."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays.casts import cast, to_comparable
from restride.arrays.differences import Tolerance, can_compare, compare_runs, join_differences
from restride.checkpoint.dtypes import DTYPES

EXACT = Tolerance()
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint32", "uint16", "uint8")


def run(values, dtype):
    return np.asarray(values, dtype).view(np.uint8)


def compared(a, b, a_name, b_name=None, tolerance=EXACT):
    return compare_runs(a, b, (DTYPES[a_name], DTYPES[b_name or a_name]), tolerance)


def numbers_of(found):
    return (found.different_numel, found.first_index, found.first_values, found.largest)


@pytest.mark.parametrize("name", DTYPES)
def test_the_same_bits_are_the_same_and_one_other_bit_is_found(name):
    itemsize = DTYPES[name].itemsize_nbytes
    content = np.random.default_rng(3).integers(0, 256, 20_001 * itemsize, dtype=np.uint8)
    other = content.copy()
    other[12_345 * itemsize] ^= 1

    found = compared(content, other, name)

    assert compared(content, content.copy(), name) is None
    assert (found.different_numel, found.first_index) == (1, 12_345)
    assert found.largest >= 0


@given(
    values=st.lists(
        st.tuples(*[st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan])] * 2),
        max_size=40,
    ),
    tolerance=st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 1.0), (0.5, 1e-3)]),
)
def test_floats_differ_where_looking_at_them_one_by_one_says_so(values, tolerance):
    a = np.array([pair[0] for pair in values], np.float32)
    b = np.array([pair[1] for pair in values], np.float32)
    rtol, atol = tolerance
    different = []
    for index, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        same_bits = a[index].tobytes() == b[index].tobytes()
        both_nan = math.isnan(x) and math.isnan(y)
        gap = 0.0 if x == y or both_nan else abs(x - y)
        gap = math.inf if math.isnan(gap) else gap
        near = gap == 0 or (math.isfinite(gap) and gap <= atol + rtol * abs(y))
        if not (near if rtol or atol else same_bits):
            different.append((index, gap))

    found = compared(a.view(np.uint8), b.view(np.uint8), "float32", tolerance=Tolerance(*tolerance))

    if not different:
        assert found is None
    else:
        assert found.different_numel == len(different)
        assert found.first_index == different[0][0]
        assert found.largest == max(gap for _, gap in different)
        shown = np.array(found.first_values, np.float32)
        wanted = np.array([a[found.first_index], b[found.first_index]])
        assert np.array_equal(shown, wanted, equal_nan=True)


@pytest.mark.parametrize("name", INTEGERS)
def test_differences_of_integers_are_exact(name):
    bounds = np.iinfo(name)
    a, b = run([bounds.min, bounds.max], name), run([bounds.max, bounds.max - 1], name)

    found = compared(a, b, name)

    assert numbers_of(found) == (2, 0, (bounds.min, bounds.max), bounds.max - bounds.min)


def test_large_integers_that_are_near_within_a_tolerance_are_near():
    a, b = run([2**62, 5], "int64"), run([2**62 + 2**20, 5], "int64")

    assert compared(a, b, "int64").largest == 2**20
    assert compared(a, b, "int64", tolerance=Tolerance(rtol=1e-9)) is None


@pytest.mark.parametrize(("bits", "name"), [(53, "int64"), (62, "int64"), (63, "uint64")])
def test_integers_are_one_further_apart_than_a_tolerance_of_more_bits_than_a_float_has(bits, name):
    zeros, tolerance = run([0, 0], name), Tolerance(atol=2.0**bits)

    found = compared(run([2**bits, 2**bits + 1], name), zeros, name, tolerance=tolerance)

    assert numbers_of(found) == (1, 1, (2**bits + 1, 0), 2**bits + 1)
    assert compared(run([2**bits + 1], name), zeros[:8], name, tolerance=Tolerance(0, 1e30)) is None


@pytest.mark.parametrize(("a_name", "b_name"), list(product(FLOATS, FLOATS)))
def test_floats_of_two_dtypes_are_compared_as_what_they_are(a_name, b_name):
    values = np.array([0.0, -0.0, 1.5, -2.0, 0.25, 4.0])
    a, b = (as_float(values, name) for name in (a_name, b_name))
    other = as_float(np.array([0.0, 0.0, 1.5, -2.0, 0.5, 4.0]), b_name)

    found = compared(a, other, a_name, b_name)

    assert compared(a, b, a_name, b_name) is None
    assert numbers_of(found) == (2, 1, (-0.0, 0.0), 0.25)
    assert math.copysign(1, found.first_values[0]) == -1


def as_float(values, name):
    if name.startswith("float8"):
        codes = to_comparable(np.arange(256, dtype=np.uint8), DTYPES[name])
        signs = np.signbit(codes)
        return np.array(
            [np.flatnonzero((codes == v) & (signs == np.signbit(v)))[0] for v in values], np.uint8
        )
    return cast(values, DTYPES["float64"], DTYPES[name])


def test_a_rounded_copy_differs_by_what_was_rounded_away():
    master = np.random.default_rng(5).standard_normal(10_000).astype(np.float32)
    rounded = cast(master, DTYPES["float32"], DTYPES["bfloat16"])

    found = compared(master.view(np.uint8), rounded, "float32", "bfloat16")

    gaps = np.abs(master.astype(np.float64) - to_comparable(rounded, DTYPES["bfloat16"]))
    assert found.different_numel == np.count_nonzero(gaps)
    assert found.first_index == np.flatnonzero(gaps)[0]
    assert found.largest == gaps.max()
    near = Tolerance(rtol=2.0**-8)
    assert compared(master.view(np.uint8), rounded, "float32", "bfloat16", near) is None


def test_a_nan_is_a_nan_in_every_dtype_and_infinitely_far_from_a_number():
    a, b = run([math.nan, 1.0], np.float32), run([math.nan, math.nan], np.float64)

    found = compared(a, b, "float32", "float64")

    assert (found.different_numel, found.first_index, found.largest) == (1, 1, math.inf)
    assert compared(a, b, "float32", "float64", Tolerance(1.0, 1.0)) is not None


def test_complex_numbers_differ_by_the_size_of_their_difference():
    a = np.array([1 + 2j, complex(math.nan, 1)], np.complex64)
    b = np.array([4 + 6j, complex(math.nan, 1)], np.complex64)

    alike = compared(a.view(np.uint8), b.view(np.uint8), "complex64")
    mixed = compared(
        a.view(np.uint8), b.astype(np.complex128).view(np.uint8), "complex64", "complex128"
    )

    assert numbers_of(alike) == (1, 0, (1 + 2j, 4 + 6j), 5.0)
    assert numbers_of(mixed) == numbers_of(alike)


@pytest.mark.parametrize("is_real", [True, False])
@pytest.mark.parametrize(
    ("names", "tolerance"),
    [(("complex64", "complex128"), EXACT), (("complex64", "complex64"), Tolerance(0.5, 0.5))],
)
def test_complex_numbers_differ_in_one_part_even_if_the_other_is_no_number(
    names, tolerance, is_real
):
    def parts(values):
        return [complex(v, math.nan) if is_real else complex(math.nan, v) for v in values]

    a, b = parts([1, 2, math.nan, math.nan]), parts([1, 5, math.nan, 3])
    sides = [np.array(v, name).view(np.uint8) for v, name in zip((a, b), names, strict=True)]

    found = compared(*sides, *names, tolerance)

    assert (found.different_numel, found.first_index, found.largest) == (2, 1, math.inf)


def test_a_difference_of_complex_singles_may_be_larger_than_any_of_them():
    largest = complex(3e38, 3e38)
    a, b = (np.array([value], np.complex64).view(np.uint8) for value in (largest, -largest))

    found = compared(a, b, "complex64")

    assert found.largest == pytest.approx(2 * abs(largest))
    assert compared(a, b, "complex64", tolerance=Tolerance(2.0)) is None


@pytest.mark.parametrize("names", [("complex64",) * 2, ("complex64", "complex128")])
@pytest.mark.parametrize("tolerance", [EXACT, Tolerance(0.5)])
def test_a_nan_that_signals_is_compared_in_silence(names, tolerance):
    signalling = np.array([0x7F800001, 0, 0x3F800000, 0], np.uint32)
    other = np.ones(2, names[1])

    found = [
        compared(signalling.view(np.uint8), other.view(np.uint8), *names, tolerance),
        compared(other.view(np.uint8), signalling.view(np.uint8), *names[::-1], tolerance),
    ]

    assert [(one.different_numel, one.largest) for one in found] == [(1, math.inf)] * 2


def test_integers_of_two_dtypes_are_compared_where_one_holds_both():
    assert compared(run([-1, 2], "int8"), run([-1, 2], "int64"), "int8", "int64") is None
    found = compared(run([255], "uint8"), run([-1], "int8"), "uint8", "int8")
    assert numbers_of(found) == (1, 0, (255, -1), 256)


def test_dtypes_without_a_common_one_cannot_be_compared():
    comparable = {
        frozenset((a, b)) for a, b in product(DTYPES, DTYPES) if can_compare(DTYPES[a], DTYPES[b])
    }

    for a, b in [
        ("int64", "uint64"),
        ("float32", "int32"),
        ("bool", "uint8"),
        ("complex64", "float32"),
    ]:
        assert frozenset((a, b)) not in comparable
    assert {frozenset((name,)) for name in DTYPES} <= comparable


@pytest.mark.parametrize("name", ["int8", "bfloat16", "float32", "float64"])
def test_the_same_elements_in_another_order_are_balanced_and_others_are_not(name):
    size = DTYPES[name].itemsize_nbytes
    content = np.random.default_rng(5).integers(0, 63, (30_000, size), dtype=np.uint8)
    shuffled = content[np.random.default_rng(6).permutation(30_000)]
    halves = [
        compared(content[part].copy(), shuffled[part].copy(), name)
        for part in (slice(0, 11_000), slice(11_000, None))
    ]

    assert compared(content, shuffled, name).imbalance == 0
    assert join_differences(halves[0], halves[1], 11_000).imbalance == 0
    shuffled[77, 0] ^= 1
    assert compared(content, shuffled, name).imbalance != 0


@pytest.mark.parametrize("names", [("float32", "float64"), ("complex128", "complex128")])
def test_what_has_no_sum_is_not_balanced(names):
    values = [
        np.array([1, 2], {"float32": "f4", "float64": "f8", "complex128": "c16"}[name])
        for name in names
    ]

    assert compared(values[0], values[1][::-1].copy(), *names).imbalance != 0
