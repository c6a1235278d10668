"""Fingerprints: sums over walks, taken in a prime field in closed form.

A set of addresses is a polynomial: one monomial ``z^address`` for each step that stands there. A
walk is a product of geometric series, so its polynomial can be evaluated at a point without
visiting a step. Two different multisets of addresses below d are two different polynomials of
degree below d, and those agree in fewer than d of the 2^127 points (Schwartz 1980, Zippel 1979).

The prime is the Mersenne prime 2^127 - 1: small enough for Python's fast modular power, and large
enough that one point decides tensors of up to 2^50 elements with an error below 2^-77. Larger ones
take more points until the same bound holds.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ERROR_BITS", "MOST_BITS", "PRIME", "Fingerprint", "field_point", "points_needed"]

PRIME = (1 << 127) - 1

ERROR_BITS = 77
"""A proof by fingerprint is wrong with probability below 2^-ERROR_BITS."""

MOST_BITS = 100
"""Polynomials of a degree of more bits than this are not evaluated: no tensor is that large."""

_FIELD_BITS = 127


def points_needed(degree: int) -> int:
    """How many independent points decide polynomials below `degree` with the promised error.

    Examples:
        >>> points_needed(12288 * 4096), points_needed(2**60)
        (1, 2)
    """
    return -(-ERROR_BITS // (_FIELD_BITS - degree.bit_length()))


def field_point(seed: bytes, number: int) -> int:
    """Derive a point of the field, neither 0 nor 1, from a seed.

    Args:
        seed: What the point shall depend on.
        number: Which of the points of that seed.
    """
    digest = blake2b(seed, digest_size=64, salt=number.to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big") % (PRIME - 2) + 2


class Fingerprint:
    """Sums of ``prod points[k] ** address[k]`` over walks, at one point of the field.

    Args:
        points: One coordinate for each address of the walks.
    """

    __slots__ = ("_points", "_series")

    def __init__(self, points: Sequence[int]) -> None:
        self._points = tuple(points)
        # Pieces of one layout have most of their loops in common.
        self._series: dict[tuple[int, ...], int] = {}

    def walk(self, bases: Sequence[int], digits: Iterable[tuple[int, ...]]) -> int:
        """Sum over all steps of a walk.

        Args:
            bases: First step, one number for each address.
            digits: (extent, stride of the first address, stride of the second, ...) of each loop.

        Cost:
            O(loops * log(extents)). Never walks elements.
        """
        total = _monomial(self._points, bases)
        for digit in digits:
            if digit not in self._series:
                ratio = _monomial(self._points, digit[1:])
                self._series[digit] = _geometric_series(ratio, digit[0])
            total = total * self._series[digit] % PRIME
        return total


def _monomial(points: Sequence[int], exponents: Sequence[int]) -> int:
    value = 1
    for point, exponent in zip(points, exponents, strict=True):
        if exponent:
            value = value * pow(point, exponent, PRIME) % PRIME
    return value


def _geometric_series(ratio: int, extent: int) -> int:
    if ratio == 1:
        return extent % PRIME
    return (pow(ratio, extent, PRIME) - 1) * pow(ratio - 1, -1, PRIME) % PRIME
