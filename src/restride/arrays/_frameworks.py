"""The operations that this package needs of NumPy and of PyTorch, and which of the two it has.

PyTorch is never imported: whoever hands in a tensor has imported it already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from restride.arrays._numpy import NUMPY
from restride.arrays._torch import TorchFramework
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = ["Array", "Framework", "framework_of", "loaded_torch"]

Array: TypeAlias = Any
"""A `numpy.ndarray` or a `torch.Tensor`, the one that was handed in."""


class Framework(Protocol):
    """What is done with arrays, the same for both kinds."""

    @property
    def name(self) -> str:
        """``"numpy"`` or ``"torch"``."""

    @property
    def has_negative_strides(self) -> bool:
        """Whether a view may step backwards in memory."""

    def admit(self, array: Array, /) -> Array:
        """Return a plain strided array of the same elements, or refuse.

        Raises:
            UnsupportedError: The array has no elements in memory that strides could reach.
        """

    def dtype_name(self, array: Array, /) -> str:
        """Name of the element type, the same for both frameworks."""

    def place(self, array: Array, /) -> object:
        """Memory that the array is in, of which the text is such as ``cpu`` or ``cuda:0``."""

    def strides(self, array: Array, /) -> tuple[int, ...]:
        """Distance between two steps of each dimension, in elements."""

    def view(
        self, array: Array, base: int, extents: Sequence[int], strides: Sequence[int], /
    ) -> Array:
        """View elements of `array`, starting at flat index `base`, strides in memory elements."""

    def empty(self, like: Array, shape: Sequence[int], /) -> Array:
        """Contiguous memory of the same type and place."""

    def is_writable(self, array: Array, /) -> bool:
        """Whether it is contiguous memory that may be written in place."""

    def reach(self, array: Array, /) -> tuple[int, int]:
        """Address of the first byte, and of the one behind the last; (0, 0) where there is none."""

    @property
    def is_parallel(self) -> bool:
        """Whether its own copies of long runs take more than one thread."""

    def addresses(self, arrays: Sequence[Array], /) -> list[int] | None:
        """Where the first elements are, if all are contiguous, of one type, and in plain memory."""

    def count_write(self, array: Array, /) -> None:
        """Note that an array was written at its address, if anybody counts that."""

    def fill_zero(self, view: Array, /) -> None:
        """Write zeros."""

    def copy(self, target: Array, source: Array, /) -> None:
        """Copy bits between two views of one shape and type."""

    def scaled(self, view: Array, scale: Fraction, /) -> Array:
        """Multiply by the numerator, then divide by the denominator, each rounded once.

        Raises:
            UnsupportedError: The elements are no floats, or the factors not exact in their type.
        """

    def differing(self, a: Array, b: Array, /) -> NDArray[np.bool_] | None:
        """Where two views differ in any bit, or None where they are equal."""

    def is_ordered(self, array: Array, /) -> bool:
        """Whether one element can be larger than another."""

    def values(self, view: Array, /) -> NDArray[np.float64]:
        """Values of an ordered type, to report and to average."""

    def put(self, full: Array, indices: NDArray[np.intp], words: NDArray[np.uint8], /) -> None:
        """Write elements, given as bytes, at flat indices of a contiguous array."""


def loaded_torch() -> Any | None:
    """The module `torch`, if somebody has imported it."""
    return sys.modules.get("torch")


def framework_of(array: Array) -> Framework:
    """Find out whose array it is.

    Raises:
        UnsupportedError: It is neither a NumPy array nor a PyTorch tensor.
    """
    if isinstance(array, np.ndarray):
        return NUMPY
    torch = loaded_torch()
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchFramework(torch)
    raise UnsupportedError(
        f"{type(array).__module__}.{type(array).__qualname__} is neither a NumPy array nor a "
        "PyTorch tensor",
        remedy="convert it with numpy.asarray first",
    )
