"""Multiply stored elements by an exact factor, each rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from restride.arrays.casts import cast, round_once

if TYPE_CHECKING:
    from fractions import Fraction

    from numpy.typing import NDArray

    from restride.arrays.casts import NamedDType

__all__ = ["scaled_once"]


class _Float64:
    name = "float64"


def scaled_once(buffer: NDArray[Any], dtype: NamedDType, scale: Fraction) -> NDArray[np.uint8]:
    """Multiply a buffer of floats by a factor.

    Narrower types are computed in float64, which has more than twice their digits and two to spare:
    rounding its one product or quotient again gives what rounding once would have given. That is
    also what PyTorch computes where it divides by a number.

    Args:
        buffer: Contiguous elements.
        dtype: What the bits are, one of `restride.algebra.scales.SCALABLE`.
        scale: A factor for which `restride.algebra.scales.is_rounded_once` holds.

    Returns:
        The bytes of the products.

    Notes:
        Figueroa, "When is double rounding innocuous?", 1995.

    Examples:
        >>> from fractions import Fraction
        >>> from types import SimpleNamespace as Named
        >>> thirds = scaled_once(np.float32([1, 6]), Named(name="float32"), Fraction(1, 3))
        >>> thirds.view(np.float32).tolist() == [np.float32(1) / np.float32(3), 2.0]
        True
    """
    wide = cast(buffer, dtype, _Float64()).view(np.float64)
    with np.errstate(all="ignore"):
        if scale.numerator != 1:
            wide = wide * float(scale.numerator)
        if scale.denominator != 1:
            wide = wide / float(scale.denominator)
    return round_once(wide, dtype)
