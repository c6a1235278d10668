"""Floats as exact fractions: what rounding to nearest even means, written out."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from restride.checkpoint.dtypes import DType

__all__ = ["nearest_bits", "value_of"]

_FIELDS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
"""Bits of the exponent and of the fraction."""


def value_of(bits: int, dtype: DType) -> Fraction | None:
    """Exact value of a bit pattern; None where it is no finite number.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> value_of(0x3FC0, DTYPES["bfloat16"]), value_of(0x7F80, DTYPES["bfloat16"])
        (Fraction(3, 2), None)
    """
    exponent_bits, fraction_bits = _FIELDS[dtype.name]
    fraction = bits & ((1 << fraction_bits) - 1)
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return None
    bias = (1 << (exponent_bits - 1)) - 1
    hidden = 1 if exponent else 0
    scale = max(exponent, 1) - bias - fraction_bits
    size = Fraction((hidden << fraction_bits) + fraction) * Fraction(2) ** scale
    return -size if bits >> (exponent_bits + fraction_bits) else size


def nearest_bits(value: Fraction | str, dtype: DType) -> int:
    """Bit pattern nearest to a value other than 0, the even one of two that are as near.

    Args:
        value: The number; or ``"inf"``, ``"-inf"``, ``"0"``, ``"-0"``.
        dtype: Type to round to.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> hex(nearest_bits(Fraction(3, 2), DTYPES["bfloat16"]))
        '0x3fc0'
    """
    exponent_bits, fraction_bits = _FIELDS[dtype.name]
    sign = 1 << (exponent_bits + fraction_bits)
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    if isinstance(value, str):
        return {"inf": infinity, "-inf": sign | infinity, "0": 0, "-0": sign}[value]
    size = abs(value)
    low, high = 0, infinity
    while high - low > 1:  # patterns of positive numbers are in the order of their values
        middle = (low + high) // 2
        found = value_of(middle, dtype)
        if found is not None and found <= size:
            low = middle
        else:
            high = middle
    below = value_of(low, dtype) or Fraction(0)
    step = below - (value_of(low - 1, dtype) or 0) if high == infinity else None
    above = below + step if step is not None else value_of(high, dtype) or Fraction(0)
    gap = (size - below) - (above - size)
    chosen = high if gap > 0 or (gap == 0 and low & 1) else low
    return chosen | (sign if value < 0 else 0)
