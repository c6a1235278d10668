"""Where two runs of elements differ, and by how much: bit for bit, or within a tolerance.

Elements of one dtype are compared as bits: +0.0 and -0.0 differ, two NaNs of the same bits do not.
Elements of two dtypes are widened to a type that holds every value of both, and compared there;
where no such type exists they are not compared at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from msgspec.structs import replace

from restride.arrays.casts import NamedDType, storage_dtype, to_comparable
from restride.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Difference", "Number", "Tolerance", "can_compare", "compare_runs", "join_differences"]

Number: TypeAlias = "bool | int | float | complex"

# Elements that are compared at one time where bytes differ: temporaries stay in the core's cache.
_SLICE_NUMEL: Final = 8192
_LARGEST_WORD_NBYTES: Final = 8


class KindedDType(NamedDType, Protocol):
    """Whatever has the name and the kind of a dtype."""

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
    """

    different_numel: int
    first_index: int
    first_values: tuple[Number, Number]
    largest: int | float


def can_compare(a: KindedDType, b: KindedDType) -> bool:
    """Whether elements of the two dtypes have values that can be compared exactly."""
    return a.name == b.name or _common(a, b) is not None


def compare_runs(
    a: NDArray[np.uint8],
    b: NDArray[np.uint8],
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
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> single = DTYPES["float32"]
        >>> a = np.array([1.0, 2.0, 3.0], np.float32).view(np.uint8)
        >>> b = np.array([1.0, 2.5, 3.0], np.float32).view(np.uint8)
        >>> compare_runs(a, b, (single, single), Tolerance())
        Difference(different_numel=1, first_index=1, first_values=(2.0, 2.5), largest=0.5)
    """
    same_dtype = dtypes[0].name == dtypes[1].name
    if same_dtype and _same_bytes(a, b):
        return None
    sizes = [storage_dtype(dtype).itemsize for dtype in dtypes]
    found: Difference | None = None
    for start in range(0, a.nbytes // sizes[0], _SLICE_NUMEL):
        stop = start + _SLICE_NUMEL
        parts = (a[start * sizes[0] : stop * sizes[0]], b[start * sizes[1] : stop * sizes[1]])
        if not (same_dtype and _same_bytes(*parts)):
            found = join_differences(found, _compare_slice(parts, dtypes, tolerance), start)
    return found


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
    )


def _same_bytes(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    wide = a.nbytes - a.nbytes % 8
    return bool(
        np.array_equal(a[:wide].view(np.uint64), b[:wide].view(np.uint64))
        and np.array_equal(a[wide:], b[wide:])
    )


def _compare_slice(
    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    dtypes: tuple[KindedDType, KindedDType],
    tolerance: Tolerance,
) -> Difference | None:
    common = None if dtypes[0].name == dtypes[1].name else _common(*dtypes)
    a, b = (_values(part, dtype, common) for part, dtype in zip(parts, dtypes, strict=True))
    if common is None:
        itemsize = storage_dtype(dtypes[0]).itemsize
        bits = f"{'u' if itemsize <= _LARGEST_WORD_NBYTES else 'V'}{itemsize}"
        is_different = parts[0].view(bits) != parts[1].view(bits)
    else:
        # A NaN is widened to a NaN, whose other bits mean nothing.
        is_different = ~(_equal(a, b) & _same_signs(a, b))
    gaps = _gaps(a[is_different], b[is_different])
    if not tolerance.is_exact:
        size = np.abs(b[is_different].astype(np.complex128 if b.dtype.kind == "c" else np.float64))
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = tolerance.atol + tolerance.rtol * size
            # A number is infinitely far from infinity and from NaN, whatever is allowed.
            is_near = (gaps == 0) | ((gaps <= allowed) & np.isfinite(gaps))
        is_different[is_different] = ~is_near
        gaps = gaps[~is_near]
    if not gaps.size:
        return None
    first = int(np.flatnonzero(is_different)[0])
    values = (a[first].item(), b[first].item())
    return Difference(int(gaps.size), first, values, gaps.max().item())


def _common(a: KindedDType, b: KindedDType) -> np.dtype[Any] | None:
    """A NumPy type that holds every value of both, or None."""
    kinds = {a.kind, b.kind}
    if kinds == {"float"}:
        return np.dtype(np.float64)
    if kinds == {"complex"}:
        return np.dtype(np.complex128)
    if kinds <= {"int", "uint"}:
        joined = np.result_type(storage_dtype(a), storage_dtype(b))
        return joined if joined.kind in "iu" else None
    return None


def _values(
    part: NDArray[np.uint8], dtype: KindedDType, common: np.dtype[Any] | None
) -> NDArray[Any]:
    if dtype.kind == "float":
        return to_comparable(part, dtype)
    values: NDArray[Any] = part.view(storage_dtype(dtype) if dtype.kind != "bool" else np.uint8)
    return values if common is None else values.astype(common, copy=False)


def _equal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
    return same


def _same_signs(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether zeros have the same sign; all else that is equal has."""
    if a.dtype.kind == "c":
        real, imag = _same_signs(a.real, b.real), _same_signs(a.imag, b.imag)
        return real & imag
    if a.dtype.kind != "f":
        return np.ones(a.shape, np.bool_)
    same: NDArray[np.bool_] = (np.signbit(a) == np.signbit(b)) | np.isnan(a)
    return same


def _gaps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Absolute differences: exact for integers, rounded once for floats."""
    if a.dtype.kind in "iu":
        # Without overflow: the difference of two integers of n bits has n bits and no sign.
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        high, low = np.maximum(a, b), np.minimum(a, b)
        wide: NDArray[np.uint64] = (high.view(unsigned) - low.view(unsigned)).astype(np.uint64)
        return wide
    with np.errstate(invalid="ignore", over="ignore"):
        gaps: NDArray[np.float64] = np.abs(a - b).astype(np.float64)
    gaps[_equal(a, b)] = 0.0
    gaps[np.isnan(gaps)] = np.inf
    return gaps
