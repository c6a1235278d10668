"""Conversions between float types, rounded as PyTorch rounds them, and values to compare.

NumPy has no bfloat16 and no 8-bit floats, so buffers are bytes and a dtype says what the bits mean.
Wherever a dtype comes from, only its name is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NamedDType", "cast", "largest_gap", "round_once", "storage_dtype", "to_comparable"]


class NamedDType(Protocol):
    """Whatever has the name of a dtype, such as `restride.checkpoint.dtypes.DType`."""

    @property
    def name(self) -> str:
        """Name as in ``torch.<name>``."""


# The types whose values NumPy does not know are stored as unsigned integers of their width.
_STORED_AS: Final = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
_CAST_NAMES: Final = ("float64", "float32", "float16", "bfloat16")
_QUIET_NAN_BFLOAT16: Final = 0x7FC0
_QUIET_NAN_FLOAT16: Final = 0x7E00


def storage_dtype(dtype: NamedDType) -> np.dtype[Any]:
    """NumPy type that holds the bits of one element.

    Raises:
        UnsupportedError: NumPy does not know the name.
    """
    try:
        return np.dtype(_STORED_AS.get(dtype.name, dtype.name))
    except TypeError:
        raise UnsupportedError(f"dtype {dtype.name!r} is not known") from None


def cast(buffer: NDArray[Any], source: NamedDType, target: NamedDType) -> NDArray[np.uint8]:
    """Convert a buffer of floats, each rounded to nearest even, exactly as PyTorch does.

    Like PyTorch, float64 goes to the 16-bit types by way of float32. A NaN stays a NaN of the same
    sign, and is quiet; PyTorch's other bits depend on the place of the element.

    Args:
        buffer: Contiguous elements of type `source`, of whatever NumPy type.
        source: What the bits are.
        target: What they should be.

    Returns:
        The bytes of the converted elements, in one dimension; the input's own bytes where the two
        types are the same.

    Raises:
        UnsupportedError: One of the types is none of float64, float32, float16 and bfloat16.

    Examples:
        >>> from types import SimpleNamespace as Named
        >>> bits = cast(np.array([1.0, -2.5], np.float32), Named(name="float32"),
        ...             Named(name="bfloat16"))
        >>> [hex(word) for word in bits.view(np.uint16)]
        ['0x3f80', '0xc020']
    """
    if source.name == target.name:
        return _elements(buffer, source).view(np.uint8)
    for dtype in (source, target):
        if dtype.name not in _CAST_NAMES:
            raise UnsupportedError(
                f"a cast from {source.name} to {target.name} is not supported",
                remedy=f"casts go between {', '.join(_CAST_NAMES)}",
            )
    elements = _elements(buffer, source)
    if source.name == "bfloat16":
        elements = _from_bfloat16(elements)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if target.name == "float64":
            return elements.astype(np.float64).view(np.uint8)
        singles = elements.astype(np.float32, copy=False)
        if target.name == "float16":
            return _to_float16(singles).view(np.uint8)
    if target.name == "bfloat16":
        return _to_bfloat16(singles).view(np.uint8)
    return singles.view(np.uint8)


def round_once(values: NDArray[np.float64], target: NamedDType) -> NDArray[np.uint8]:
    """Round float64 values to a narrower type in a single step, to nearest even.

    A computed mean must not be rounded twice, which is what PyTorch's cast by way of float32 does.

    Raises:
        UnsupportedError: `target` is none of float64, float32, float16 and bfloat16.
    """
    if target.name in {"float16", "bfloat16"}:
        return cast(_round_to_odd(values), _FLOAT32, target)
    return cast(values, _FLOAT64, target)


def to_comparable(buffer: NDArray[Any], dtype: NamedDType) -> NDArray[np.float64]:
    """Values of a buffer as float64, for differences in reports. Exact but for large integers.

    Raises:
        UnsupportedError: The type has no order: it is complex, or unknown.
    """
    elements = _elements(buffer, dtype)
    if elements.dtype.kind == "c":
        raise UnsupportedError(f"values of dtype {dtype.name} have no order")
    if dtype.name == "bfloat16":
        elements = _from_bfloat16(elements)
    elif dtype.name in _STORED_AS:
        elements = _float8_values(dtype.name)[elements]
    with np.errstate(invalid="ignore"):
        return elements.astype(np.float64, copy=False)


def largest_gap(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Largest difference; NaN is at no distance from NaN, and infinitely far from numbers."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(a - b)
    gaps[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    gaps[np.isnan(gaps)] = np.inf
    return float(gaps.max())


def _elements(buffer: NDArray[Any], dtype: NamedDType) -> NDArray[Any]:
    storage = storage_dtype(dtype)
    flat = np.ascontiguousarray(buffer).reshape(-1)
    if flat.nbytes % storage.itemsize:
        raise UnsupportedError(
            f"a buffer of {flat.nbytes} bytes holds no whole number of {dtype.name} elements"
        )
    return flat.view(storage)


def _from_bfloat16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    wide: NDArray[np.uint32] = words.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _to_bfloat16(singles: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(singles).view(np.uint32)
    # Half of the last place, or one bit less where the last bit is even already.
    rounded = bits + np.uint32(0x7FFF)
    rounded += (bits >> np.uint32(16)) & np.uint32(1)
    words = (rounded >> np.uint32(16)).astype(np.uint16)
    not_numbers = np.isnan(singles)
    if not_numbers.any():
        high = (bits[not_numbers] >> np.uint32(16)).astype(np.uint16)
        words[not_numbers] = high | np.uint16(_QUIET_NAN_BFLOAT16)
    return words


def _to_float16(singles: NDArray[np.float32]) -> NDArray[np.uint16]:
    halves = singles.astype(np.float16).view(np.uint16)
    not_numbers = np.isnan(singles)
    if not_numbers.any():
        # NumPy leaves signaling ones so; the machine's own instruction, and the kernel, do not.
        bits = np.ascontiguousarray(singles).view(np.uint32)[not_numbers]
        kept = (bits >> np.uint32(16) & np.uint32(0x8000)) | (
            bits >> np.uint32(13) & np.uint32(511)
        )
        halves[not_numbers] = kept.astype(np.uint16) | np.uint16(_QUIET_NAN_FLOAT16)
    return halves


def _round_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round so that a second rounding to nearest gives what one alone would have given.

    The result is cut off towards zero, and its last bit is set where anything was cut off: enough
    to tell a tie from what is just above or below it (Boldo and Melquiond, 2008).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = values.astype(np.float32)
        back = nearest.astype(np.float64)
        bits = nearest.view(np.uint32)
        is_inexact = np.isfinite(values) & (back != values)
        is_too_far = is_inexact & (np.abs(back) > np.abs(values))
    odd: NDArray[np.uint32] = (bits - is_too_far.astype(np.uint32)) | is_inexact.astype(np.uint32)
    return odd.view(np.float32)


def _float8_values(name: str) -> NDArray[np.float64]:
    """Value of each of the 256 bit patterns (OCP 8-bit formats, and their `fnuz` variants)."""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.where(codes == 0xFF, np.nan, np.exp2(codes - 127.0))  # noqa: PLR2004
    mantissa_bits = 3 if "e4m3" in name else 2
    has_no_negative_zero = name.endswith("fnuz")
    bias = (1 << (6 - mantissa_bits)) - 1 + has_no_negative_zero
    exponent = (codes & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(
        exponent == 0,
        np.exp2(1.0 - bias) * fraction,
        np.exp2(exponent - float(bias)) * (1 + fraction),
    )
    if has_no_negative_zero:
        values[0x80] = np.nan
    elif mantissa_bits == 3:  # noqa: PLR2004 - e4m3fn: no infinity, one pattern for NaN
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    signed: NDArray[np.float64] = np.where(codes < 0x80, values, -values)  # noqa: PLR2004
    return signed


class _Named(Frozen):
    name: str


_FLOAT64: Final = _Named("float64")
_FLOAT32: Final = _Named("float32")
