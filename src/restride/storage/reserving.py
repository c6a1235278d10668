"""Reserve the space of a file without writing into it.

Python's own `os.posix_fallocate` is not used: where a file system cannot reserve, as Ceph and NFS 3
cannot, the C library writes a byte into every page instead, and an output would be written twice.
macOS has neither.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fallocate", "reserve"]

# What file systems answer that cannot reserve space ahead.
_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a file a size; what is new is zero, and reserved where the file system can do that.

    Raises:
        OSError: There is no room for it, or it must not be as large.
    """
    size = os.fstat(descriptor).st_size
    if size == nbytes:
        return
    try:
        fallocate(descriptor, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    if os.fstat(descriptor).st_size != nbytes:
        os.ftruncate(descriptor, nbytes)


def fallocate(descriptor: int, nbytes: int) -> None:
    """Ask the system to reserve the first bytes of a file, at least one.

    Raises:
        OSError: It cannot.
    """
    function = _function()
    while function is None or function(descriptor, 0, 0, nbytes):
        number = errno.ENOSYS if function is None else ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@cache
def _function() -> Callable[[int, int, int, int], int] | None:
    """The system's call, in the form that takes sizes of 64 bits; None where there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("fallocate64", "fallocate"):
        try:
            function = library[name]
        except AttributeError:
            continue
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        function.restype = ctypes.c_int
        return function
    return None
