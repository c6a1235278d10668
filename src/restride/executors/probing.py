"""How fast is this machine at what a plan does? Nothing is written to a file system."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from restride.arrays.fingerprint import Digester
from restride.arrays.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.executors.sources import CatalogReader

__all__ = ["probe_rate"]

_MOST_NBYTES: Final = 32 << 20
_LEAST_NBYTES: Final = 1 << 20
_MOST_SECONDS: Final = 0.5
_PIECE_NBYTES: Final = 256 << 10


def probe_rate(reader: CatalogReader, sizes: list[int]) -> float | None:
    """Bytes a second at which one thread reads, digests and writes.

    The bytes come from the sources, spread over all of them, and go into memory that the system
    treats like the cache of a file. That the disk has to follow is not in it.

    Args:
        reader: The sources.
        sizes: Size of each source file in bytes.

    Returns:
        The rate, or None where there is too little to read to say anything.

    Raises:
        ExecutionError: A source cannot be read.
    """
    buffer = allocate(_PIECE_NBYTES)
    digester = Digester()
    digester.digest(buffer, 0)  # the weights are made once
    done = 0
    descriptor = os.memfd_create("restride-probe", os.MFD_CLOEXEC)
    try:
        started = time.perf_counter()
        for file, start in _places(sizes):
            reader.read_into(file, start, buffer)
            digester.digest(buffer, done)
            done += os.pwrite(descriptor, buffer, done)
            if time.perf_counter() - started > _MOST_SECONDS:
                break
        seconds = time.perf_counter() - started
    finally:
        os.close(descriptor)
    return done / max(seconds, 1e-9) if done >= _LEAST_NBYTES else None


def _places(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(file, first byte) of pieces, evenly spread over all files."""
    pieces = [size // _PIECE_NBYTES for size in sizes]
    every = max(1, sum(pieces) * _PIECE_NBYTES // _MOST_NBYTES)
    passed = 0
    for file, count in enumerate(pieces):
        for piece in range(-passed % every, count, every):
            yield file, piece * _PIECE_NBYTES
        passed += count
