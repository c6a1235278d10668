"""Programs for the kernel: reads, copies, digests and writes in one call.

A thread that calls the system gives the interpreter's lock away and has to get it back, at every
read, digest and write. Where the kernel is there, some steps are one call of it instead, and
threads do not wait for one another. What it does is what `Digester`, `copy_strided` and positioned
reads and writes do.
"""

from __future__ import annotations

import ctypes
from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, Final

from restride.arrays import _kernel
from restride.arrays.fingerprint import weight_addresses, weights_of_run
from restride.arrays.memory import address_of
from restride.arrays.strided import prepared
from restride.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CHUNK_NBYTES", "Program", "start_writing"]

# In `_kernel_program.c` the kinds have the same numbers.
_READ: Final = 1
_COPY: Final = 2
_WRITE: Final = 3
_MOVE: Final = 4
_SAME: Final = 5

CHUNK_NBYTES: Final = 128 << 10
"""What is moved at one time: it stays in the core's cache until it is digested and written."""


class Program:
    """Steps that are collected first and then run in one call, in their order.

    Memory that is named must stay where it is until then, and files open.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._digests = 0

    def read(self, descriptor: int, at: int, into: memoryview) -> None:
        """Fill memory with bytes of a file.

        Args:
            descriptor: The file.
            at: Where they start in it.
            into: Contiguous bytes.

        Raises:
            LayoutError: They are not, or must not be written.
        """
        address = _address(into, is_written=True)
        self._parts.append(pack("5q", _READ, descriptor, at, address, into.nbytes))

    def copy(
        self,
        source: memoryview,
        target: memoryview,
        loops: Sequence[tuple[int, int, int]],
        run_nbytes: int,
        *,
        source_start: int = 0,
        target_start: int = 0,
    ) -> bool:
        """Copy runs of bytes, as `copy_strided` does.

        Returns:
            Whether the kernel can do it; if not, the program is not to be run.

        Raises:
            LayoutError: As for `copy_strided`.
        """
        found = prepared(source, target, loops, run_nbytes, source_start, target_start)
        if found is None:
            return True
        if not found.is_for_kernel:
            return False
        steps = found.steps
        numbers = _COPY, found.target, found.source, run_nbytes, len(steps)
        self._parts.append(pack(f"{5 + 3 * len(steps)}q", *numbers, *chain.from_iterable(steps)))
        return True

    def write(self, descriptor: int, at: int, content: memoryview, start_nbytes: int) -> None:
        """Digest bytes, and write it into a file.

        Args:
            descriptor: The file.
            at: Where to write.
            content: Contiguous bytes.
            start_nbytes: Where they start in what is digested, as for `Digester.digest`.

        Raises:
            LayoutError: The bytes are not contiguous.
        """
        start, count, weights = weights_of_run(start_nbytes, content.nbytes)
        numbers = _WRITE, descriptor, at, _address(content), content.nbytes, start, count
        self._parts += [pack("7q", *numbers), weights]
        self._digests += 1

    def move(
        self,
        source: tuple[int, int],
        target: tuple[int, int],
        nbytes: int,
        buffer: memoryview,
        start_nbytes: int,
    ) -> None:
        """Move bytes from file to file through a buffer, and digest them.

        Args:
            source: Descriptor, and the first byte to read.
            target: Descriptor, and the first byte to write.
            nbytes: How many.
            buffer: Contiguous bytes, at least one; `CHUNK_NBYTES` of them are used at most.
            start_nbytes: Where they start in what is digested.

        Raises:
            LayoutError: The buffer is none, or the first byte to write is before that of the file.
        """
        chunk = min(buffer.nbytes, CHUNK_NBYTES)
        if not chunk or target[1] < 0:  # either would have the kernel leave the buffer
            raise LayoutError(f"a move to byte {target[1]} through {chunk} bytes has no chunks")
        start, count, weights = weights_of_run(start_nbytes, nbytes)
        address = _address(buffer, is_written=True)
        numbers = *source, *target, nbytes, address, chunk, start, count
        self._parts += [pack("10q", _MOVE, *numbers), weights]
        self._digests += 1

    def require_same(self, a: memoryview, b: memoryview) -> None:
        """Go on only where two runs of as many bytes are the same; else nothing more is done.

        Raises:
            LayoutError: They are not contiguous, or not as many.
        """
        if a.nbytes != b.nbytes:
            raise LayoutError(f"{a.nbytes} bytes are never the same as {b.nbytes}")
        self._parts.append(pack("4q", _SAME, _address(a), _address(b), a.nbytes))

    def run(self) -> list[int] | None:
        """Do all of it, and forget it.

        Returns:
            The digest of what each `write` and `move` wrote; None if there is no kernel, the system
            did not do all of it, or bytes are not the same that are required to be: some of the
            bytes may be written then.
        """
        parts, digests = self._parts, self._digests
        self._parts, self._digests = [], 0
        if _kernel.KERNEL is None:
            return None
        totals = (ctypes.c_uint64 * (2 * digests))()
        program = b"".join(parts)
        if not _kernel.KERNEL.run(program, len(program) // 8, *weight_addresses(), totals):
            return None
        halves = iter(totals)
        return [low | high << 64 for low, high in zip(halves, halves, strict=True)]


def start_writing(descriptor: int, start_nbytes: int, nbytes: int) -> None:
    """Have the system begin to write a part of a file to the disk, if the kernel is there.

    It is a hint: where the system knows none, or refuses, nothing happens.
    """
    if _kernel.KERNEL is not None:
        _kernel.KERNEL.start_writing(descriptor, start_nbytes, nbytes)


def _address(memory: memoryview, *, is_written: bool = False) -> int:
    if not memory.c_contiguous or (is_written and memory.readonly):
        raise LayoutError("a program was given memory that is not contiguous, or not to be written")
    return address_of(memory)
