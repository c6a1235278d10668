"""Stored elements are multiplied by an exact factor and rounded once, to nearest even."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from restride.algebra.scales import SCALABLE, is_rounded_once
from restride.arrays.scaling import scaled_once
from restride.checkpoint.dtypes import DTYPES
from restride.testing.rounding import nearest_bits, value_of

PARTS = st.one_of(st.sampled_from((1, 2, 4, 1 << 24)), st.integers(1, 1 << 24))
FACTORS = st.builds(Fraction, PARTS, PARTS).filter(is_rounded_once)


@pytest.mark.parametrize("name", SCALABLE)
@given(data=st.data(), factor=FACTORS, is_negative=st.booleans())
def test_each_element_is_the_nearest_to_the_exact_product(name, data, factor, is_negative):
    dtype = DTYPES[name]
    width = 8 * dtype.itemsize_nbytes
    bits = data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=1, max_size=20))
    words = np.array([b for b in bits if value_of(b, dtype) is not None], f"u{width // 8}")
    assume(words.size)
    signed = -factor if is_negative else factor

    found = scaled_once(words, dtype, signed).view(words.dtype)

    for word, result in zip(words.tolist(), found.tolist(), strict=True):
        exact = value_of(word, dtype)
        if exact and abs(exact * signed) > Fraction(1, 1 << 1000):  # far from what float64 loses
            assert result == nearest_bits(exact * signed, dtype), (word, signed)


@pytest.mark.parametrize("name", SCALABLE)
def test_infinities_stay_and_signs_of_zero_are_multiplied(name):
    dtype = DTYPES[name]
    as_bits = {value: nearest_bits(value, dtype) for value in ("inf", "-inf", "0", "-0")}

    words = np.array(list(as_bits.values()), f"u{dtype.itemsize_nbytes}")
    found = scaled_once(words, dtype, Fraction(-1, 3)).view(words.dtype).tolist()

    assert found == [as_bits[value] for value in ("-inf", "inf", "-0", "0")]


@pytest.mark.interop
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12, 48])
def test_a_division_is_that_of_torch(name, ranks):
    torch = pytest.importorskip("torch")
    bias = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    words = {2: torch.int16, 4: torch.int32}[bias.element_size()]

    found = scaled_once(bias.view(words).numpy(), DTYPES[name], Fraction(1, ranks))

    assert np.array_equal(found.view(f"i{bias.element_size()}"), (bias / ranks).view(words).numpy())
