"""One process at a time: locks that the system takes back when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["locked"]

# What file systems answer that have no locks. There, nobody can be kept out.
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_LONGEST_NAME: Final = 200


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing and may be removed meanwhile.

    Args:
        path: The file; its folder must exist.
        what: What is protected, for the error.

    Raises:
        ExecutionError: Somebody else holds it: the error names the process.
        FileNotFoundError: The folder is not there, or no longer.
        OSError: The system cannot open the file.
    """
    descriptor = _acquire(path, what)
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    """Open the file and lock it; try again where its last holder removed it meanwhile."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
        try:
            _take(descriptor, what)
            if _is_at(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    """Say who holds it, for those who want it. On a full disk it is held without a name."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def _take(descriptor: int, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace")
        raise ExecutionError(
            f"{holder or 'another process'} is writing it",
            where=what,
            remedy="wait until it is done, or name another output",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file is still the one under that name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))
