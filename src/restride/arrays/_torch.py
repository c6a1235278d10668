"""Operations on PyTorch tensors. The module is handed in by whoever found it loaded."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from restride.arrays._numpy import coordinates_of, require_inside
from restride.arrays._words import WORDS, is_for_threads, word_nbytes
from restride.arrays.strided import copy_at
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TorchFramework"]

_COMPUTED_IN = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}


class TorchFramework(Frozen):
    """See `restride.arrays._frameworks.Framework`."""

    torch: Any
    name: str = "torch"
    has_negative_strides: bool = False

    def admit(self, tensor: Any) -> Any:
        """Strip gradients and lazy conjugation; refuse what has no strided memory."""
        if hasattr(tensor, "to_local"):
            raise UnsupportedError(
                "a distributed tensor is no shard", remedy="hand in the result of .to_local()"
            )
        if tensor.layout is not self.torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UnsupportedError(
                f"a tensor of layout {tensor.layout} on device {tensor.device} and of dtype "
                f"{tensor.dtype} has no plain elements in memory"
            )
        return tensor.detach().resolve_conj().resolve_neg()

    def dtype_name(self, tensor: Any) -> str:
        """Name of the element type."""
        return str(tensor.dtype).removeprefix("torch.")

    def place(self, tensor: Any) -> object:
        """The device."""
        return tensor.device

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(tensor.stride())

    def view(self, tensor: Any, base: int, extents: Sequence[int], strides: Sequence[int]) -> Any:
        """View through `as_strided`, inside the memory of `tensor`."""
        memory_strides = self.strides(tensor)
        shape = tuple(tensor.shape)
        start = coordinates_of(base, shape)
        require_inside(shape, memory_strides, start, extents, strides)
        at = sum(step * stride for step, stride in zip(start, memory_strides, strict=True))
        return tensor.as_strided(tuple(extents), tuple(strides), tensor.storage_offset() + at)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """Uninitialised memory on the same device."""
        return like.new_empty(tuple(shape))

    def is_writable(self, tensor: Any) -> bool:
        """Row-major, and no view that negates or conjugates what is in memory."""
        return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())

    def reach(self, tensor: Any) -> tuple[int, int]:
        """From address, shape and strides."""
        if not tensor.numel():
            return 0, 0
        start: int = tensor.data_ptr()
        if tensor.is_contiguous():
            return start, start + tensor.nbytes
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        steps = sum((size - 1) * stride for size, stride in sizes)
        return start, start + (steps + 1) * tensor.itemsize

    @property
    def is_parallel(self) -> bool:
        """As the caller has set it."""
        return bool(self.torch.get_num_threads() > 1)

    def addresses(self, arrays: Sequence[Any]) -> list[int] | None:
        """Of plain tensors on the CPU."""
        dtype = arrays[0].dtype
        if all(self._is_plain(a) and a.dtype == dtype and a.is_contiguous() for a in arrays):
            return [tensor.data_ptr() for tensor in arrays]
        return None

    def count_write(self, tensor: Any) -> None:
        """Autograd notices writes by counting them, and does not see those of the kernel."""
        count = getattr(self.torch.autograd.graph, "increment_version", None)
        if count is None:
            # An older version counts this one.
            tensor.as_strided((0,), (1,)).zero_()
        else:
            count(tensor)

    def fill_zero(self, view: Any) -> None:
        """Write zeros."""
        view.zero_()

    def copy(self, target: Any, source: Any) -> None:
        """Copy with the kernel, or in words as wide as both sides allow.

        PyTorch too is slow on very short runs.
        """
        itemsize = target.itemsize
        strides = (_strides_nbytes(target), _strides_nbytes(source))
        if (
            self._is_plain(target)
            and self._is_plain(source)
            and target.dtype == source.dtype
            and not (self.is_parallel and is_for_threads(itemsize, target.shape, strides))
        ):
            loops = tuple(zip(target.shape, strides[1], strides[0], strict=True))
            if copy_at(source.data_ptr(), target.data_ptr(), loops, itemsize):
                self.count_write(target)
                return
        width = word_nbytes(
            itemsize,
            target.shape,
            strides,
            (target.data_ptr(), source.data_ptr()),
        )
        # A view of another width starts at a whole number of its elements in the storage.
        width = gcd(width, *(side.storage_offset() * itemsize for side in (target, source)))
        if width > itemsize:
            word = getattr(self.torch, WORDS[width])
            target, source = target.view(word), source.view(word)
        target.copy_(source)

    def scaled(self, view: Any, scale: Fraction) -> Any:
        """Divide by a tensor on the same device.

        A plain number would do on the CPU. On a GPU PyTorch multiplies by its rounded reciprocal
        instead (BinaryDivTrueKernel.cu), and the same layout would mean other bits there.
        """
        computed_in = _COMPUTED_IN.get(self.dtype_name(view))
        if computed_in is None:
            raise UnsupportedError(f"elements of {view.dtype} cannot be scaled by {scale}")
        compute = getattr(self.torch, computed_in)
        factors = [
            self.torch.full((), part, dtype=self.torch.float64).to(compute)
            for part in (scale.numerator, scale.denominator)
        ]
        if [int(factor.real) for factor in factors] != [scale.numerator, scale.denominator]:
            raise UnsupportedError(f"the scale {scale} is not exact in {compute}")
        result = view.to(compute, copy=True)
        if scale.numerator != 1:
            result *= factors[0].to(view.device)
        if scale.denominator != 1:
            result /= factors[1].to(view.device)
        return result.to(view.dtype)

    def differing(self, a: Any, b: Any) -> NDArray[np.bool_] | None:
        """Compare bit patterns."""
        where = self._bits(a) != self._bits(b)
        if a.dtype is self.torch.complex128:
            where = where.any(-1)
        if not bool(where.any()):
            return None
        found: NDArray[np.bool_] = where.cpu().numpy()
        return found

    def is_ordered(self, tensor: Any) -> bool:
        """Everything but complex numbers is."""
        return not tensor.dtype.is_complex

    def values(self, view: Any) -> NDArray[np.float64]:
        """Values as float64, in the shape of the view."""
        found: NDArray[np.float64] = view.to(self.torch.float64).cpu().numpy()
        return found

    def put(self, full: Any, indices: NDArray[np.intp], words: NDArray[np.uint8]) -> None:
        """Write elements given as bytes."""
        elements = self.torch.from_numpy(words).view(full.dtype)
        full.view(-1)[self.torch.from_numpy(indices).to(full.device)] = elements.to(full.device)

    def _is_plain(self, tensor: Any) -> bool:
        """Whether the elements are where its address says, in memory of this process.

        Those of a subclass may be anywhere; what `functionalize` wraps is none, and has no address.
        """
        return (
            type(tensor) is self.torch.Tensor
            and tensor.device.type == "cpu"
            and tensor.data_ptr() != 0
        )

    def _bits(self, view: Any) -> Any:
        torch = self.torch
        if view.dtype is torch.complex128:
            return torch.view_as_real(view).view(torch.int64)
        return view.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.itemsize]
        )


def _strides_nbytes(tensor: Any) -> tuple[int, ...]:
    itemsize = tensor.itemsize
    return tuple(stride * itemsize for stride in tensor.stride())
