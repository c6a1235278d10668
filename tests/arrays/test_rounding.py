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
        assert bytes(found) == wanted.tobytes()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bfloat16", [0x7FC0, 0xFFFF, 0x7FC0, 0xFFC1, 0x7FE0]),
        ("float16", [0x7E00, 0xFFFF, 0x7E00, 0xFE0F, 0x7F00]),
    ],
)
def test_a_nan_stays_one_and_is_quiet_and_keeps_its_sign_and_first_digits(each_way, name, wanted):
    words = np.uint32([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF81FFFF, 0x7FA00000])

    for found in each_way(lambda: rounded(words.data.cast("B"), SINGLE, DTYPES[name])):
        assert np.frombuffer(found, np.uint16).tolist() == wanted


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
