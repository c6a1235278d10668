"""Operations on NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from restride.arrays._words import WORDS, word_nbytes
from restride.arrays.casts import NamedDType, to_comparable
from restride.arrays.strided import copy_at
from restride.errors import LayoutError, UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = ["NUMPY", "NumpyFramework", "coordinates_of", "require_inside"]

# Type in which PyTorch computes, and so do we: halves are widened, and rounded once at the end.
_COMPUTED_IN: Final = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}
# A transposition in strips so narrow that a cache line is read once runs five to ten times faster.
_STRIP_EXTENT: Final = 16
_SMALLEST_STRIP_NUMEL: Final = 4096


class _Named(Frozen):
    name: str


class NumpyFramework:
    """See `restride.arrays._frameworks.Framework`."""

    name = "numpy"
    has_negative_strides = True
    is_parallel = False

    def admit(self, array: NDArray[Any]) -> NDArray[Any]:
        """Refuse what strides cannot reach, and views with half an element between elements."""
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedError(
                "a masked array would lose its mask", remedy="fill it with .filled(value) first"
            )
        if array.dtype.hasobject:
            raise UnsupportedError(f"an array of dtype {array.dtype} holds references, not values")
        if not array.itemsize:
            raise UnsupportedError(f"elements of dtype {array.dtype} have no bytes")
        plain = np.asarray(array)
        if any(stride % plain.itemsize for stride in plain.strides):
            return np.ascontiguousarray(plain)
        return plain

    def dtype_name(self, array: NDArray[Any]) -> str:
        """Name of the element type."""
        return array.dtype.name

    def place(self, array: NDArray[Any]) -> str:  # noqa: ARG002 - the other framework asks it
        """NumPy has one memory."""
        return "cpu"

    def strides(self, array: NDArray[Any]) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(stride // array.itemsize for stride in array.strides)

    def view(
        self, array: NDArray[Any], base: int, extents: Sequence[int], strides: Sequence[int]
    ) -> NDArray[Any]:
        """View through `as_strided`, inside the memory of `array`."""
        start = coordinates_of(base, array.shape)
        require_inside(array.shape, self.strides(array), start, extents, strides)
        # With an ellipsis the index of an array of no dimension is a view of it too.
        index: tuple[Any, ...] = (*(slice(at, at + 1) for at in start), ...)
        corner = array[index]
        return as_strided(corner, extents, [stride * array.itemsize for stride in strides])

    def empty(self, like: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """Uninitialised memory."""
        return np.empty(tuple(shape), like.dtype)

    def is_writable(self, array: NDArray[Any]) -> bool:
        """Row-major, in native memory, and not read-only."""
        return bool(array.flags.c_contiguous and array.flags.writeable)

    def reach(self, array: NDArray[Any]) -> tuple[int, int]:
        """From address, shape and strides."""
        if not array.size:
            return 0, 0
        below, above = _reach(array.shape, array.strides)
        address: int = array.__array_interface__["data"][0]
        return address + below, address + above + array.itemsize

    def addresses(self, arrays: Sequence[NDArray[Any]]) -> list[int] | None:
        """From the interface that NumPy has for that."""
        dtype = arrays[0].dtype
        if any(array.dtype != dtype or not array.flags.c_contiguous for array in arrays):
            return None
        return [array.__array_interface__["data"][0] for array in arrays]

    def count_write(self, array: NDArray[Any]) -> None:
        """Nobody does."""

    def fill_zero(self, view: NDArray[Any]) -> None:
        """Write zeros."""
        view[...] = np.zeros((), view.dtype)

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy with the kernel, or in words as wide as both sides allow.

        NumPy is slow on very short runs.
        """
        strides = (target.strides, source.strides)
        addresses = (source.__array_interface__["data"][0], target.__array_interface__["data"][0])
        if target.dtype == source.dtype and target.flags.writeable:
            loops = tuple(zip(target.shape, source.strides, target.strides, strict=True))
            if copy_at(*addresses, loops, target.itemsize):
                return
        width = word_nbytes(
            target.itemsize,
            target.shape,
            strides,
            addresses,
        )
        if width > target.itemsize:
            target, source = target.view(WORDS[width]), source.view(WORDS[width])
        tile = _tile_extent(target, source)
        for start in range(0, target.shape[-1], tile):
            stop = start + tile
            np.copyto(target[..., start:stop], source[..., start:stop], casting="no")

    def scaled(self, view: NDArray[Any], scale: Fraction) -> NDArray[Any]:
        """Compute as PyTorch does."""
        computed_in = _COMPUTED_IN.get(view.dtype.name)
        if computed_in is None:
            raise UnsupportedError(f"elements of dtype {view.dtype} cannot be scaled by {scale}")
        compute = np.dtype(computed_in)
        factors = [np.array(part, compute) for part in (scale.numerator, scale.denominator)]
        if [int(factor.real) for factor in factors] != [scale.numerator, scale.denominator]:
            raise UnsupportedError(f"the scale {scale} is not exact in {compute}")
        with np.errstate(all="ignore"):
            result = view.astype(compute)
            if scale.numerator != 1:
                result *= factors[0]
            if scale.denominator != 1:
                result /= factors[1]
            return result.astype(view.dtype, copy=False)

    def differing(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Compare bit patterns."""
        where: NDArray[np.bool_] = _bits(a) != _bits(b)
        return where if where.any() else None

    def is_ordered(self, array: NDArray[Any]) -> bool:
        """Everything but complex numbers is."""
        return array.dtype.kind != "c"

    def values(self, view: NDArray[Any]) -> NDArray[np.float64]:
        """Values as float64, in the shape of the view."""
        dtype: NamedDType = _Named(view.dtype.name)
        # Of which only the name is read, and not the order of bytes.
        native = view.astype(view.dtype.newbyteorder("="), copy=False)
        return to_comparable(native, dtype).reshape(view.shape)

    def put(self, full: NDArray[Any], indices: NDArray[np.intp], words: NDArray[np.uint8]) -> None:
        """Write elements given as native bytes."""
        full.reshape(-1)[indices] = words.view(full.dtype.newbyteorder("="))


NUMPY: Final = NumpyFramework()


def require_inside(
    shape: Sequence[int],
    memory_strides: Sequence[int],
    start: Sequence[int],
    extents: Sequence[int],
    strides: Sequence[int],
) -> None:
    """Refuse a view that leaves the memory of the array it is made from.

    This is the only guard between a layout and foreign memory, so it does not trust the checks of
    the layout.

    Raises:
        LayoutError: It does.
    """
    before, after = _reach(shape, memory_strides)
    at = sum(step * stride for step, stride in zip(start, memory_strides, strict=True))
    below, above = _reach(extents, strides)
    if at + below < before or at + above > after:
        raise LayoutError(
            f"a view of {tuple(extents)} elements with strides {tuple(strides)} from element {at} "
            f"leaves the memory of an array of shape {tuple(shape)}"
        )


def coordinates_of(index: int, shape: Sequence[int]) -> list[int]:
    """Place of a flat index in each dimension.

    Raises:
        LayoutError: An array of this shape has no such element.
    """
    start = [0] * len(shape)
    left = index
    for place in range(len(shape) - 1, -1, -1):
        left, start[place] = divmod(left, shape[place] or 1)
    if left or 0 in shape:
        raise LayoutError(f"there is no element {index} in an array of shape {tuple(shape)}")
    return start


def _reach(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    below = above = 0
    for extent, stride in zip(extents, strides, strict=True):
        if stride < 0:
            below += (extent - 1) * stride
        else:
            above += (extent - 1) * stride
    return below, above


def _bits(view: NDArray[Any]) -> NDArray[Any]:
    width = view.itemsize
    return view.view(f"u{width}" if width in {1, 2, 4, 8} else f"V{width}")


def _tile_extent(target: NDArray[Any], source: NDArray[Any]) -> int:
    """How much of the innermost loop to copy at a time: all of it unless that is a transposition.

    NumPy walks the target in order. Where each step of its innermost loop is in another cache line
    of the source, and another loop would have stayed in the line, the lines are gone when it comes
    back to them.
    """
    extent = target.shape[-1]
    steps = [
        abs(stride) for stride, size in zip(source.strides, source.shape, strict=True) if size > 1
    ]
    strips = -(-extent // _STRIP_EXTENT)
    is_transposed = (
        extent > 2 * _STRIP_EXTENT
        and abs(source.strides[-1]) >= _STRIP_EXTENT * source.itemsize
        and min(steps) < abs(source.strides[-1])
        and target.size // strips >= _SMALLEST_STRIP_NUMEL
    )
    return _STRIP_EXTENT if is_transposed else max(extent, 1)
