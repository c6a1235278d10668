"""One process at a time: locks that the system takes back when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError
from restride.storage.stale import again_while_stale

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["holder_of", "is_held", "locked"]

# What file systems answer that have no locks. There, nobody can be kept out.
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_LONGEST_NAME: Final = 200
_UNKNOWN: Final = "another process"
_SECONDS_BETWEEN_TRIES: Final = 0.05


@contextmanager
def locked(
    path: Path, *, what: str, patience_seconds: float = 0.0, shared: bool = False
) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing and may be removed meanwhile.

    Args:
        path: The file; its folder must exist.
        what: What is protected, for the error.
        patience_seconds: How long to wait for somebody who holds it.
        shared: Whether any number may hold it in this way. Nobody signs as its holder then.

    Raises:
        ExecutionError: Somebody else holds it: the error names the process.
        FileNotFoundError: The folder is not there, or no longer.
        OSError: The system cannot open the file.
    """
    descriptor = _acquire_patiently(path, what, patience_seconds, shared=shared)
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool | None:
    """Whether somebody holds the lock of a file; None where the file system does not tell.

    For that it is taken for a moment, which `locked` with some patience does not mind.

    Raises:
        OSError: The system cannot open the file.
    """
    return again_while_stale(partial(_is_held, path))


def _is_held(path: Path) -> bool | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    finally:
        os.close(descriptor)
    return False


def holder_of(path: Path) -> str:
    """Who holds the lock of a file, in a few words; empty where nobody does.

    Raises:
        OSError: The system cannot open the file.
    """
    if not is_held(path):
        return ""
    with suppress(OSError), path.open("rb") as file:
        return _name_in(file.read(_LONGEST_NAME))
    return _UNKNOWN


def _acquire_patiently(path: Path, what: str, seconds: float, *, shared: bool) -> int:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return again_while_stale(partial(_acquire, path, what, shared=shared))
        except ExecutionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _acquire(path: Path, what: str, *, shared: bool) -> int:
    """Open the file and lock it; try again where its last holder removed it meanwhile."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
        try:
            _take(descriptor, what, shared=shared)
            if _is_at(descriptor, path):
                if not shared:
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


def _name_in(content: bytes) -> str:
    return content.decode(errors="replace") or _UNKNOWN


def _take(descriptor: int, what: str, *, shared: bool) -> None:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ExecutionError(
            f"{_name_in(os.pread(descriptor, _LONGEST_NAME, 0))} is writing it",
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
