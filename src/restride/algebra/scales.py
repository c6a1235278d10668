"""How what belongs to a parameter follows its scale.

A layer that stores its bias divided by the number of ranks has ``shard == full * s``. Its gradient
is then ``g / s``, so the first moment of Adam is divided by `s` and the second by its square: a
state follows a power of the scale, and its own layout has that power as its scale. The optimizer
takes the same steps only with ``lr * s`` and ``eps / s``, which belong to a whole group of
parameters.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

__all__ = ["SCALABLE", "STATE_POWERS", "is_rounded_once"]

STATE_POWERS: Final[Mapping[str, int]] = MappingProxyType(
    {"weight": 1, "fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}
)
"""Power of the scale that a state follows, by its name."""

SCALABLE: Final = ("float64", "float32", "float16", "bfloat16")
"""Dtypes whose elements can be scaled."""

# Numerators and denominators up to this size are exact in float32, and their products with a
# float32 in float64.
_LARGEST_FACTOR: Final = 1 << 24


def is_rounded_once(scale: Fraction) -> bool:
    """Whether the product of a float with a scale can be computed with one rounding.

    A multiplication rounds once, a division rounds once; powers of two do not round, short of
    overflow and subnormal numbers.

    Examples:
        >>> from fractions import Fraction
        >>> [is_rounded_once(Fraction(scale)) for scale in ("1/3", "5", "3/4", "2/3", "3/5")]
        [True, True, True, True, False]
    """
    parts = abs(scale.numerator), scale.denominator
    is_small = max(parts) <= _LARGEST_FACTOR
    return is_small and any(part & (part - 1) == 0 for part in parts)
