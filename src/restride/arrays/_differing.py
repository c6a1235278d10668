"""Find out where two runs of elements differ, of which the bytes do or the dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from restride.arrays.casts import storage_dtype, to_comparable
from restride.arrays.differences import Difference, join_differences
from restride.arrays.memory import same_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

    from restride.arrays.differences import KindedDType, Tolerance

__all__ = ["common_dtype", "compare"]

# Elements that are compared at one time: temporaries stay in the core's cache.
_SLICE_NUMEL: Final = 8192
_LARGEST_WORD_NBYTES: Final = 8
_MOST_GAPS: Final = 2.0**64  # between two integers


def compare(
    a: ReadableBuffer,
    b: ReadableBuffer,
    dtypes: tuple[KindedDType, KindedDType],
    tolerance: Tolerance,
) -> Difference | None:
    """Do what `compare_runs` does, element by element where bytes differ."""
    sides = np.frombuffer(memoryview(a), np.uint8), np.frombuffer(memoryview(b), np.uint8)
    same_dtype = dtypes[0].name == dtypes[1].name
    sizes = [storage_dtype(dtype).itemsize for dtype in dtypes]
    found: Difference | None = None
    for start in range(0, sides[0].nbytes // sizes[0], _SLICE_NUMEL):
        stop = start + _SLICE_NUMEL
        first, second = (
            side[start * size : stop * size] for side, size in zip(sides, sizes, strict=True)
        )
        if not (same_dtype and same_bytes(first.data, second.data)):
            part = _compare_slice((first, second), dtypes, tolerance)
            found = join_differences(found, part, start)
    return found


def _compare_slice(
    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    dtypes: tuple[KindedDType, KindedDType],
    tolerance: Tolerance,
) -> Difference | None:
    # A NaN that signals does so in every conversion and difference.
    with np.errstate(invalid="ignore", over="ignore"):
        return _compare_values(parts, dtypes, tolerance)


def _compare_values(
    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    dtypes: tuple[KindedDType, KindedDType],
    tolerance: Tolerance,
) -> Difference | None:
    common = None if dtypes[0].name == dtypes[1].name else common_dtype(*dtypes)
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
        allowed = tolerance.atol + tolerance.rtol * size
        # A number is infinitely far from infinity and from NaN, whatever is allowed.
        is_near = (gaps == 0) | (_at_most(gaps, allowed) & np.isfinite(gaps))
        is_different[is_different] = ~is_near
        gaps = gaps[~is_near]
    if not gaps.size:
        return None
    first = int(np.flatnonzero(is_different)[0])
    values = (a[first].item(), b[first].item())
    imbalance = 1 if common is not None else _imbalance(*parts, storage_dtype(dtypes[0]).itemsize)
    return Difference(int(gaps.size), first, values, gaps.max().item(), imbalance)


def _imbalance(a: NDArray[np.uint8], b: NDArray[np.uint8], itemsize: int) -> int:
    if itemsize > _LARGEST_WORD_NBYTES:
        return 1
    words = [part.view(f"u{itemsize}").astype(np.uint64) for part in (a, b)]
    first, second = (int(np.dot(side, side)) for side in words)
    return (first - second) % (1 << 64)


def common_dtype(a: KindedDType, b: KindedDType) -> np.dtype[Any] | None:
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


def _at_most(gaps: NDArray[Any], allowed: NDArray[np.float64]) -> NDArray[np.bool_]:
    is_any: NDArray[np.bool_] = gaps <= allowed
    if gaps.dtype.kind == "u":
        # Where it is compared with a float, a gap of more than 53 bits is rounded.
        is_any = allowed >= _MOST_GAPS
        is_any |= gaps <= np.where(is_any, 0, allowed).astype(np.uint64)
    return is_any


def _equal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    if a.dtype.kind == "c":  # of which NumPy takes all for one NaN that have one in either part
        return _equal(a.real, b.real) & _equal(a.imag, b.imag)
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
    # A difference of singles need not be one.
    first = a.astype(np.complex128, copy=False) if a.dtype.kind == "c" else a
    gaps: NDArray[np.float64] = np.abs(first - b).astype(np.float64)
    gaps[_equal(a, b)] = 0.0
    gaps[np.isnan(gaps)] = np.inf
    return gaps
