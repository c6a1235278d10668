"""Casts round as PyTorch rounds; comparable values are PyTorch's own."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays.casts import cast, round_once, storage_dtype, to_comparable
from restride.errors import UnsupportedError

FLOATS = ("float64", "float32", "float16", "bfloat16")
EIGHT_BITS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def named(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name)


def difficult_floats() -> np.ndarray:
    """Every float16 and bfloat16, the values half way between them and their neighbours."""
    words = np.arange(1 << 16, dtype=np.uint16)
    half = words.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        brain = (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    ladders = []
    for ladder in (np.sort(half[np.isfinite(half)]), np.sort(brain[np.isfinite(brain)])):
        middle = (ladder[1:] + ladder[:-1]) / 2
        ladders += [ladder, middle, middle * (1 + 2.0**-30), middle * (1 - 2.0**-40)]
    rng = np.random.default_rng(0)
    random = rng.integers(0, 1 << 63, 100_000, dtype=np.uint64).view(np.float64)
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.999, 65520.0, 3.3961775e38]
    return np.concatenate([*ladders, random, special])


@pytest.mark.interop
@pytest.mark.parametrize(("source", "target"), list(product(FLOATS, FLOATS)))
def test_a_cast_gives_the_bits_that_torch_gives(source, target):
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(difficult_floats()).to(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    nan = torch.isnan(expected).numpy()

    bytes_in = values.view(torch.uint8).numpy()
    bytes_out = cast(bytes_in, named(source), named(target))

    words = bytes_out.view(storage_dtype(named(target)))
    bits = words.view(f"u{words.itemsize}")
    expected_bits = expected.view(torch.uint8).numpy().view(bits.dtype)
    np.testing.assert_array_equal(bits[~nan], expected_bits[~nan])
    assert np.isnan(to_comparable(bytes_out, named(target))[nan]).all()


@pytest.mark.interop
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_floats_have_the_values_that_torch_gives_them(name):
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)

    values = to_comparable(codes.numpy(), named(name))

    np.testing.assert_array_equal(values, codes.view(getattr(torch, name)).double().numpy())


@pytest.mark.parametrize("name", ["int64", "uint8", "int16", "bool"])
def test_integers_are_comparable_as_they_are(name):
    values = np.array([0, 1, 1, 0], name)

    np.testing.assert_array_equal(to_comparable(values, named(name)), [0.0, 1.0, 1.0, 0.0])


def test_a_cast_to_the_same_type_returns_the_bytes_that_went_in():
    words = np.array([0x7F81, 0xFFFF, 0x8000], np.uint16)  # a signalling NaN among them

    same = cast(words, named("bfloat16"), named("bfloat16"))

    assert same.tobytes() == words.tobytes()


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_a_nan_keeps_its_sign(target):
    values = np.array([np.nan, -np.nan], np.float32)

    words = cast(values, named("float32"), named(target)).view(np.uint16)

    assert (words >> 15).tolist() == [0, 1]
    assert np.isnan(to_comparable(words, named(target))).all()


@given(
    st.floats(allow_nan=False, allow_infinity=False, width=64),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_rounding_once_finds_a_nearest_value_and_the_even_one_of_two(value, target):
    width = {"float16": 2, "bfloat16": 2, "float32": 4}[target]
    word = int(round_once(np.array([value]), named(target)).view(f"u{width}")[0])

    def exact(bits):
        number = to_comparable(np.array([bits], f"u{width}"), named(target))[0]
        return Fraction(number) if np.isfinite(number) else None

    rounded = exact(word)
    if rounded is None:  # beyond the largest number: what the next step of the ladder would be
        largest, below = exact(word - 1), exact(word - 2)
        assert abs(Fraction(value)) >= abs(largest + (largest - below) / 2)
        return
    error = abs(rounded - Fraction(value))
    for neighbour in (word - 1, word + 1):
        if 0 <= neighbour < 1 << 8 * width and exact(neighbour) is not None:
            other = abs(exact(neighbour) - Fraction(value))
            assert error < other or (error == other and word % 2 == 0) or rounded == 0


def test_rounding_once_is_not_rounding_twice():
    # 1 + 2^-8 + 2^-40 is above the tie, which float32 cannot see.
    value = np.array([1 + 2.0**-8 + 2.0**-40])

    once = round_once(value, named("bfloat16")).view(np.uint16)[0]
    twice = cast(value, named("float64"), named("bfloat16")).view(np.uint16)[0]

    assert (once, twice) == (0x3F81, 0x3F80)


@pytest.mark.parametrize(
    ("source", "target"), [("int64", "bfloat16"), ("float32", "float8_e5m2"), ("float32", "bool")]
)
def test_a_cast_that_is_not_between_floats_is_refused_with_those_that_are(source, target):
    with pytest.raises(UnsupportedError, match="casts go between float64, float32"):
        cast(np.zeros(8, np.uint8), named(source), named(target))


def test_a_buffer_with_half_an_element_is_refused():
    with pytest.raises(UnsupportedError, match="7 bytes"):
        to_comparable(np.zeros(7, np.uint8), named("bfloat16"))


def test_complex_values_have_no_order():
    with pytest.raises(UnsupportedError, match="no order"):
        to_comparable(np.zeros(2, np.complex64), named("complex64"))


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="float3"):
        storage_dtype(named("float3"))
