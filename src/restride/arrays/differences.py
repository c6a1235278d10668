"""Where two runs of elements differ, and by how much: bit for bit, or within a tolerance.

Elements of one dtype are compared as bits: +0.0 and -0.0 differ, two NaNs of the same bits do not.
Elements of two dtypes are widened to a type that holds every value of both, and compared there;
where no such type exists they are not compared at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec.structs import replace

from restride.arrays.memory import same_bytes
from restride.frozen import Frozen

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "Difference",
    "KindedDType",
    "Number",
    "Tolerance",
    "can_compare",
    "compare_runs",
    "join_differences",
]

Number: TypeAlias = "bool | int | float | complex"


class KindedDType(Protocol):
    """Whatever has the name and the kind of a dtype."""

    @property
    def name(self) -> str:
        """Name as in ``torch.<name>``."""

    @property
    def kind(self) -> str:
        """One of float, int, uint, bool and complex."""


class Tolerance(Frozen):
    """How far elements may be apart: ``|a - b| <= atol + rtol * |b|``, as in NumPy."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing may differ, not even in its bits."""
        return not (self.rtol or self.atol)


class Difference(Frozen):
    """What is different between two runs of elements.

    Attributes:
        different_numel: How many elements differ.
        first_index: Index of the first one.
        first_values: That element on both sides.
        largest: Largest absolute difference; infinity between a number and a NaN.
        imbalance: What the sum of the squares of all bits is more on the first side, modulo 2^64:
            zero where both have the same elements in another order, and seldom otherwise.
    """

    different_numel: int
    first_index: int
    first_values: tuple[Number, Number]
    largest: int | float
    imbalance: int = 1


def can_compare(a: KindedDType, b: KindedDType) -> bool:
    """Whether elements of the two dtypes have values that can be compared exactly."""
    if a.name == b.name:
        return True
    from restride.arrays._differing import common_dtype  # noqa: PLC0415 - imports NumPy

    return common_dtype(a, b) is not None


def compare_runs(
    a: ReadableBuffer,
    b: ReadableBuffer,
    dtypes: tuple[KindedDType, KindedDType],
    tolerance: Tolerance,
) -> Difference | None:
    """Compare the elements of two buffers.

    Args:
        a: Bytes of the elements on one side.
        b: Bytes of as many elements on the other side.
        dtypes: What the bytes are; `can_compare` says whether it works.
        tolerance: How far elements may be apart.

    Returns:
        What is different, or None.

    Cost:
        O(bytes). Where all bits are the same, that is memory speed.

    Examples:
        >>> from array import array
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> single = DTYPES["float32"]
        >>> a, b = array("f", [1, 2, 3]), array("f", [1, 2.5, 3])
        >>> found = compare_runs(a, b, (single, single), Tolerance())
        >>> found.different_numel, found.first_index, found.first_values, found.largest
        (1, 1, (2.0, 2.5), 0.5)
    """
    if dtypes[0].name == dtypes[1].name and same_bytes(a, b):
        return None
    from restride.arrays._differing import compare  # noqa: PLC0415 - imports NumPy

    return compare(a, b, dtypes, tolerance)


def join_differences(
    known: Difference | None, found: Difference | None, start: int
) -> Difference | None:
    """Join what is known with what was found in a run that starts at index `start`."""
    if found is None:
        return known
    found = replace(found, first_index=start + found.first_index)
    if known is None:
        return found
    first = min(known, found, key=lambda difference: difference.first_index)
    return Difference(
        known.different_numel + found.different_numel,
        first.first_index,
        first.first_values,
        max(known.largest, found.largest),
        (known.imbalance + found.imbalance) % (1 << 64),
    )
