"""The compiled kernel, where the package was built with one.

`_kernel.c` is compiled when the package is built, and loaded here with ctypes: it needs no header
of Python, fits every version of it, and its calls let other threads run. Where it is missing, was
built from another version, or ``RESTRIDE_KERNEL=0`` is set, NumPy does the same work in more time.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ABI", "FILE_NAME", "KERNEL", "Kernel", "is_available", "load"]

ABI: Final = 8
"""What `_kernel.c` must say of itself; both change together."""

FILE_NAME: Final = "librestride.so"

_SWITCH: Final = "RESTRIDE_KERNEL"


class Kernel:
    """Functions of the library. Who calls them proves what is said there of every argument.

    Attributes:
        level: Width of vectors that is used, an index into what `_kernel.c` has.
        digest: ``restride_digest`` at this level.
    """

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        """Use the widest vectors that the machine has, or those of a lower level."""
        highest: int = library.restride_level()
        self.level = highest if level is None else level
        if not 0 <= self.level <= highest:
            raise ValueError(f"level {level} is not one of 0 to {highest}, which this machine has")
        self._library = library
        number, address, size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
        digest = library.restride_digest
        digest.argtypes = [number, address, size, size, *[address] * 4]
        digest.restype = None
        self.digest: Callable[[int, int, int, bytes, int, int, object], None]
        self.digest = partial(digest, self.level)
        self._copy = library.restride_copy
        self._copy.argtypes = [address, address, number, address, size]
        self._copy.restype = number
        self._copy_each = library.restride_copy_each
        self._copy_each.argtypes = [address, address, address, size]
        self._copy_each.restype = number
        self._run = library.restride_run
        self._run.argtypes = [number, address, size, *[address] * 3]
        self._run.restype = number
        self._same = library.restride_same
        self._same.argtypes = [address, address, size]
        self._same.restype = number
        self._round = library.restride_round
        self._round.argtypes = [address, address, size, number]
        self._round.restype = None
        self._start_writing = library.restride_start_writing
        self._start_writing.argtypes = [number, size, size]
        self._start_writing.restype = None

    def copy(self, target: int, source: int, count: int, loops: bytes, run_nbytes: int) -> bool:
        """Call ``restride_copy``; whether it could hold so many loops."""
        return bool(self._copy(target, source, count, loops, run_nbytes) == 0)

    def copy_each(self, target: int, sources: bytes, copies: bytes, count: int) -> bool:
        """Call ``restride_copy_each``; whether it could hold so many loops."""
        return bool(self._copy_each(target, sources, copies, count) == 0)

    def run(
        self, program: bytes, count: int, words: int, rows: int, totals: ctypes.Array[Any]
    ) -> bool:
        """Call ``restride_run``; whether all was done."""
        return bool(self._run(self.level, program, count, words, rows, totals) == 0)

    def same(self, a: int, b: int, nbytes: int) -> bool:
        """Call ``restride_same``; whether two runs have the same bytes."""
        return bool(self._same(a, b, nbytes))

    def round(self, target: int, source: int, count: int, *, is_bfloat16: bool) -> None:
        """Call ``restride_round``."""
        self._round(target, source, count, is_bfloat16)

    def start_writing(self, descriptor: int, start: int, nbytes: int) -> None:
        """Call ``restride_start_writing``."""
        self._start_writing(descriptor, start, nbytes)

    def at(self, level: int) -> Kernel:
        """The same functions with narrower vectors. The results are the same."""
        return Kernel(self._library, level)


def load(path: Path) -> Kernel | None:
    """Load a library, if it is there, for this machine, and of this version.

    Args:
        path: The file.

    Returns:
        Its functions, or None where NumPy has to do.
    """
    # A broken library is no error: what it would do is done without it.
    try:
        library = ctypes.CDLL(str(path))
        found = library.restride_abi()
    except (OSError, AttributeError):
        return None
    return Kernel(library) if found == ABI else None


KERNEL: Kernel | None = (
    None if os.environ.get(_SWITCH) == "0" else load(Path(__file__).with_name(FILE_NAME))
)
"""The kernel of this installation. Asked at every call, so that tests can take it away."""

is_available: Final = KERNEL is not None
"""Whether this process began with it."""
