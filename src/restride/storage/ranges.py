"""Positioned reads and writes: byte ranges of files, never whole files.

Reads use ``preadv`` into the caller's buffer rather than a memory map: a file that shrinks under a
map kills the process with SIGBUS, under ``preadv`` it is an error that names the file.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Final, Self

from restride.errors import CorruptError, ExecutionError, FormatError, RestrideError
from restride.storage.machine import free_descriptors

if TYPE_CHECKING:
    from os import PathLike

    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["FilePool", "Lease", "RangeFile", "read_exact", "why_not_opened", "write_exact"]

_MOST_OPEN: Final = 64
# Journals, locks, and what is opened for a moment.
_LEFT_TO_OTHERS: Final = 8
_PAGE_NBYTES: Final = 4096
_MOST_PAGES: Final = 4
# Linux looks for one run of free pages for what one call writes. For a longer one it has to shift
# pages about where memory is in use, which was measured to take up to five times the copy; for a
# call that starts at no multiple of its size it takes many short ones.
_WRITE_NBYTES: Final = 128 << 10


class RangeFile:
    """One open regular file, for positioned reads and writes from any number of threads.

    Used as a context manager it is closed at the end, and an error of this package that leaves the
    block says which file it is about.

    Args:
        path: The file. It must exist.
        writable: Whether `write_exact` is wanted.

    Raises:
        ExecutionError: The system refuses to open it.
        FormatError: It is a directory, pipe or device.
    """

    def __init__(self, path: str | PathLike[str], *, writable: bool = False) -> None:
        self.path = os.fspath(path)
        # Without O_NONBLOCK, opening a pipe that someone put into a checkpoint waits for ever.
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            self._descriptor = os.open(self.path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            why = why_not_opened(error, self.path)
            raise ExecutionError(f"cannot be opened ({why})", where=self.path) from error
        self._pages: dict[int, bytes] = {}
        status = os.fstat(self._descriptor)
        self.nbytes = status.st_size
        # Another one after a write, or after another file took the place of this one.
        self.stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        if not stat.S_ISREG(status.st_mode):
            self.close()
            problem = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
            raise FormatError(problem, where=self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self.close()
        if isinstance(error, RestrideError) and not error.where.startswith(self.path):
            error.located(self.path)

    @property
    def descriptor(self) -> int:
        """What the system calls the open file; -1 when it is closed."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read_exact(self, start_nbytes: int, buffer: WriteableBuffer) -> None:
        """Fill `buffer` with the bytes of the file that start at `start_nbytes`.

        Raises:
            CorruptError: The file ends before the buffer is full.
            ExecutionError: The system cannot read it.
        """
        left = memoryview(buffer).cast("B")
        wanted, at = left.nbytes, start_nbytes
        if at < 0:  # which the system would take for the current position
            raise CorruptError(f"{wanted} bytes are expected at byte {at}", where=self.path)
        while left.nbytes:
            try:
                count = os.preadv(self._descriptor, (left,), at)
            except (OSError, OverflowError) as error:
                raise ExecutionError(
                    f"cannot read {left.nbytes} bytes at byte {at} ({_reason(error)})",
                    where=self.path,
                ) from error
            if not count:
                raise CorruptError(
                    f"the file ends at byte {at}, yet {wanted} bytes are expected "
                    f"at byte {start_nbytes}",
                    where=self.path,
                )
            left, at = left[count:], at + count

    def read(self, start_nbytes: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of the file from `start_nbytes`, for headers and the like.

        What stands beside them is kept for a while: a header is read in many parts, a few bytes
        each.

        Raises:
            CorruptError: The file is shorter. Nothing is allocated before that is known.
            ExecutionError: The system cannot read it.
        """
        if not 0 <= nbytes <= self.nbytes - start_nbytes or start_nbytes < 0:
            raise CorruptError(
                f"{nbytes} bytes are expected at byte {start_nbytes}, "
                f"the file has {self.nbytes} bytes",
                where=self.path,
            )
        number, base = divmod(start_nbytes, _PAGE_NBYTES)
        if base + nbytes > _PAGE_NBYTES:
            return self._read(start_nbytes, nbytes)
        page = self._pages.get(number)
        if page is None:
            if len(self._pages) >= _MOST_PAGES:
                self._pages.clear()
            page_start = number * _PAGE_NBYTES
            page = self._read(page_start, min(_PAGE_NBYTES, self.nbytes - page_start))
            self._pages[number] = page
        return page[base : base + nbytes]

    def _read(self, start_nbytes: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_exact(start_nbytes, buffer)
        return bytes(buffer)

    def write_exact(self, start_nbytes: int, buffer: ReadableBuffer) -> None:
        """Write all of `buffer` into the file from `start_nbytes`.

        Raises:
            ExecutionError: The system cannot write it: a full disk, a failing one.
        """
        write_exact(self._descriptor, start_nbytes, buffer, where=self.path)


class Lease:
    """An open file and how many calls are using it right now; in a ``with`` block, one less."""

    __slots__ = ("_pool", "file", "users")

    def __init__(self, file: RangeFile, pool: FilePool) -> None:
        self.file = file
        self.users = 0
        self._pool = pool

    def __enter__(self) -> RangeFile:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Count that a call has ended."""
        self._pool.give_back(self)


class FilePool:
    """Keeps the files that were used last open, and never more than a number of them.

    A checkpoint may have more files than a process may open. Calls may come from any number of
    threads; where all files are in use, a call waits for the first that is free.

    Args:
        max_open: Most descriptors to hold. By default 64, and at most half of those that the
            process has left: there is another pool for what is written.
        writable: Whether the files are opened for writing as well.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file, FilePool() as pool:
        ...     _ = file.write(b"0123456789")
        ...     file.flush()
        ...     buffer = bytearray(3)
        ...     pool.read_exact(file.name, 4, buffer)
        ...     bytes(buffer)
        b'456'
    """

    def __init__(self, *, max_open: int | None = None, writable: bool = False) -> None:
        if max_open is None:
            share = (free_descriptors() - _LEFT_TO_OTHERS) // 2
            max_open = max(1, min(_MOST_OPEN, share))
        if max_open < 1:
            raise ValueError(f"a pool holds at least one file, got max_open={max_open}")
        self._max_open = max_open
        self._is_writable = writable
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. No other call may be running; later ones open files again."""
        with self._lock:
            while self._leases:
                self._leases.popitem()[1].file.close()

    def nbytes(self, path: str | PathLike[str]) -> int:
        """Size of a file in bytes, when it was opened.

        Raises:
            ExecutionError: The system refuses to open it.
            FormatError: It is a directory, pipe or device.
        """
        with self._lease(os.fspath(path)) as file:
            return file.nbytes

    def hold(self, path: str | PathLike[str]) -> Lease | None:
        """Keep a file open for the ``with`` block of what is returned.

        Who holds one file may not wait for another: so this never waits.

        Returns:
            None where all files that the pool may have open are in use.

        Raises:
            ExecutionError: The system cannot open it.
            FormatError: It is a directory, pipe or device.
        """
        with self._lock:
            lease = self._get(os.fspath(path))
            if lease is not None:
                lease.users += 1
            return lease

    def read_exact(
        self, path: str | PathLike[str], start_nbytes: int, buffer: WriteableBuffer
    ) -> None:
        """Fill `buffer` with the bytes of the file that start at `start_nbytes`.

        Raises:
            CorruptError: The file ends before the buffer is full.
            ExecutionError: The system cannot open or read it.
            FormatError: It is a directory, pipe or device.
        """
        with self._lease(os.fspath(path)) as file:
            file.read_exact(start_nbytes, buffer)

    def write_exact(
        self, path: str | PathLike[str], start_nbytes: int, buffer: ReadableBuffer
    ) -> None:
        """Write all of `buffer` into the file from `start_nbytes`.

        Raises:
            ExecutionError: The system cannot open or write it.
            FormatError: It is a directory, pipe or device.
        """
        with self._lease(os.fspath(path)) as file:
            file.write_exact(start_nbytes, buffer)

    def give_back(self, lease: Lease) -> None:
        """Count that a call has ended."""
        with self._lock:
            lease.users -= 1
            if self._waiting and not lease.users:
                self._changed.notify()

    def _lease(self, path: str) -> Lease:
        """Hold the open file: it is not closed before the ``with`` block of the lease ends."""
        with self._lock:
            while (lease := self._get(path)) is None:
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1
            lease.users += 1
        return lease

    def _get(self, path: str) -> Lease | None:
        """Find or open a file, or return None while there is no room for another one."""
        lease = self._leases.get(path)
        if lease is not None:
            self._leases.move_to_end(path)
            return lease
        if len(self._leases) >= self._max_open:
            idle = next((name for name, held in self._leases.items() if not held.users), None)
            if idle is None:
                return None
            self._leases.pop(idle).file.close()
        try:
            file = RangeFile(path, writable=self._is_writable)
        except BaseException:
            if self._waiting:
                self._changed.notify()  # the room that this call found is for the next one
            raise
        lease = self._leases[path] = Lease(file, self)
        return lease


def write_exact(descriptor: int, start_nbytes: int, buffer: ReadableBuffer, *, where: str) -> None:
    """Write all of `buffer` into an open file from `start_nbytes`.

    Args:
        descriptor: The file.
        start_nbytes: Where to write.
        buffer: What.
        where: What errors call the file.

    Raises:
        ExecutionError: The system cannot write it: a full disk, a failing one.
    """
    left = memoryview(buffer).cast("B")
    at = start_nbytes
    while left.nbytes:
        try:
            some = left[: _WRITE_NBYTES - at % _WRITE_NBYTES]
            count = os.pwrite(descriptor, some, at)
        except (OSError, OverflowError) as error:
            raise ExecutionError(
                f"cannot write {left.nbytes} bytes at byte {at} ({_reason(error)})", where=where
            ) from error
        left, at = left[count:], at + count


def read_exact(path: str | PathLike[str], start_nbytes: int, buffer: WriteableBuffer) -> None:
    """Fill `buffer` with the bytes of one file that start at `start_nbytes`.

    Raises:
        CorruptError: The file ends before the buffer is full.
        ExecutionError: The system cannot open or read it.
        FormatError: It is a directory, pipe or device.
    """
    with RangeFile(path) as file:
        file.read_exact(start_nbytes, buffer)


def why_not_opened(error: OSError, path: str | PathLike[str]) -> str:
    """What the system said, or that a name is there, as a link, and no file behind it."""
    is_broken = isinstance(error, FileNotFoundError) and Path(path).is_symlink()
    return "a link to what is not there" if is_broken else str(error.strerror)


def _reason(error: OSError | OverflowError) -> str:
    return getattr(error, "strerror", None) or str(error)
