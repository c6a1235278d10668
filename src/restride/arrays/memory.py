"""Memory by its address, which is all that the kernel is given.

Buffers are of any kind: NumPy is not needed to have memory, to find it and to look whether it is
the same, as long as there is a kernel.
"""

from __future__ import annotations

import ctypes
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING

from restride.arrays import _kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["address_of", "allocate", "clear", "same_bytes"]


def allocate(nbytes: int) -> memoryview:
    """Get memory of its own: zeros, from the start of a page, given by the system when touched.

    Raises:
        MemoryError: The system has none.
    """
    if not nbytes:
        return memoryview(bytearray())
    try:
        return memoryview(mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError(f"the system gives no {nbytes} bytes ({error.strerror})") from error


def clear(memory: memoryview) -> None:
    """Fill contiguous memory with zeros, without as many zeros beside it.

    Raises:
        BufferError, TypeError, ValueError: The memory is not contiguous, or must not be written.
    """
    if memory.nbytes:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, memory.nbytes)


def address_of(memory: ReadableBuffer) -> int:
    """Where contiguous bytes begin. They stay there only as long as somebody keeps them.

    Raises:
        BufferError, TypeError, ValueError: The memory is not contiguous.
    """
    if isinstance(memory, bytes):
        return ctypes.cast(ctypes.c_char_p(memory), ctypes.c_void_p).value or 0
    view = memoryview(memory)
    if not view.readonly and view.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    # Only what may be written tells its address to ctypes.
    import numpy as np  # noqa: PLC0415 - takes longer than most conversions do besides

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def same_bytes(a: ReadableBuffer, b: ReadableBuffer) -> bool:
    """Whether two runs of bytes are the same, bit for bit.

    Both are contiguous.
    """
    first, second = memoryview(a), memoryview(b)
    if first.nbytes != second.nbytes:
        return False
    kernel = _kernel.KERNEL
    if kernel is not None:
        return kernel.same(address_of(first), address_of(second), first.nbytes)
    from restride.arrays import _without_kernel  # noqa: PLC0415 - it imports NumPy

    return _without_kernel.same_bytes(first, second)
