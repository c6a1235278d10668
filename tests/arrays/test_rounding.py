"""The kernel rounds as NumPy's casts do."""

from __future__ import annotations

import numpy as np
import pytest

from restride.arrays.casts import cast
from restride.arrays.rounding import rounded
from restride.checkpoint.dtypes import DTYPES
from restride.errors import UnsupportedError

SINGLE = DTYPES["float32"]


def interesting():
    """Each sign, exponent and first digits with rests that are ties, and next to ties, or none."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    rests = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    shifts = [1 << bit for bit in range(16)]
    return np.concatenate([high | np.uint32(rest) for rest in rests + shifts])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("skew", [0, 1])
def test_floats_are_rounded_the_same_way_with_the_kernel_and_without(each_way, name, skew):
    words, target = interesting(), DTYPES[name]
    memory = bytearray(skew) + words.tobytes()
    wanted = cast(words, SINGLE, target)

    for found in each_way(lambda: rounded(memoryview(memory)[skew:], SINGLE, target)):
        bits, expected = np.frombuffer(found, np.uint16), wanted.view(np.uint16)
        is_nan = np.isnan(words.view(np.float32))
        assert np.array_equal(bits[~is_nan], expected[~is_nan])
        # Of a NaN the sign is promised, and that it is one.
        infinite = 0x7F80 if name == "bfloat16" else 0x7C00
        assert ((bits[is_nan] & 0x7FFF) > infinite).all()
        assert np.array_equal(bits[is_nan] >> 15, expected[is_nan] >> 15)


def test_the_kernel_keeps_what_the_cast_keeps_of_a_nan_in_bfloat16(each_way):
    words = np.uint32([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF81FFFF])

    for found in each_way(lambda: rounded(words.data.cast("B"), SINGLE, DTYPES["bfloat16"])):
        assert bytes(found) == cast(words, SINGLE, DTYPES["bfloat16"]).tobytes()


def test_other_casts_are_those_of_numpy(each_way):
    for source, target in (("float64", "bfloat16"), ("float16", "float32"), ("float32", "float64")):
        content = np.arange(6).astype(source)
        wanted = cast(content, DTYPES[source], DTYPES[target]).tobytes()
        for found in each_way(
            lambda: rounded(content.data.cast("B"), DTYPES[source], DTYPES[target])  # noqa: B023
        ):
            assert bytes(found) == wanted


def test_elements_of_one_dtype_are_left_where_they_are():
    content = memoryview(bytearray(6))

    assert rounded(content, DTYPES["bfloat16"], DTYPES["bfloat16"]) is content


def test_what_is_no_whole_number_of_elements_or_no_float_is_refused(each_way):
    def refused():
        with pytest.raises(UnsupportedError, match="no whole number"):
            rounded(memoryview(bytes(7)), SINGLE, DTYPES["float16"])
        with pytest.raises(UnsupportedError, match="not supported"):
            rounded(memoryview(bytes(8)), SINGLE, DTYPES["int16"])

    each_way(refused)


def test_no_elements_are_rounded_to_none(each_way):
    found = each_way(lambda: rounded(memoryview(b""), SINGLE, DTYPES["float16"]))

    assert {bytes(each) for each in found} == {b""}
