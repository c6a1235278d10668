"""Take fingerprints of what a plan reads, instead of writing it."""

from __future__ import annotations

from threading import Lock, local
from typing import TYPE_CHECKING

from restride.arrays.fingerprint import MODULUS, Digester

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DigestWriter"]


class DigestWriter:
    """A target whose files are arrays, each of them alone and whole: it keeps their digests.

    Attributes:
        totals: Sum of the digests of what was written into each array so far.
    """

    def __init__(self, array_count: int) -> None:
        self._totals = [0] * array_count
        self._lock = Lock()
        self._local = local()

    @property
    def totals(self) -> Sequence[int]:
        """Digest of each array."""
        return self._totals

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Digest the bytes of array number `file` that start there. Any thread may call it."""
        digester: Digester | None = getattr(self._local, "digester", None)
        if digester is None:
            digester = self._local.digester = Digester()
        part = digester.digest(buffer, start_nbytes)
        with self._lock:
            self._totals[file] = (self._totals[file] + part) % MODULUS
