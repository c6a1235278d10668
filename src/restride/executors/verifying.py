"""Read blocks of files back, and compare their digests with those that are known."""

from __future__ import annotations

from itertools import islice
from threading import local
from typing import TYPE_CHECKING, Final

from restride.arrays.fingerprint import MODULUS, Digester, scratch_nbytes
from restride.arrays.memory import allocate
from restride.errors import ExecutionError, FormatError
from restride.frozen import Frozen
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["MOST_AT_ONE_TIME", "ROW_NBYTES", "Damage", "Extent", "digest_rows", "find_damage"]

# Pieces that stay in the core's cache.
ROW_NBYTES: Final = 1 << 10
_MOST_ROWS: Final = 128
_ROWS_SHARE: Final = 16
# A pool of threads takes all that it is given at once.
MOST_AT_ONE_TIME: Final = 1024
_BUNDLE_NBYTES: Final = 1 << 17
_MOST_IN_BUNDLE: Final = 64


class Extent(Frozen):
    """Bytes of a file whose digest is known.

    Attributes:
        path: The file.
        start_nbytes: First byte in the file.
        nbytes: Number of bytes.
        base_nbytes: Place of the first byte in what the digest counts from.
        digest: What it has to be.
    """

    path: str
    start_nbytes: int
    nbytes: int
    base_nbytes: int
    digest: int


class Damage(Frozen):
    """Bytes that are not what they should be.

    Attributes:
        position: Number of the extent, counted as they were given.
        extent: Where they are.
        reason: What is wrong.
    """

    position: int
    extent: Extent
    reason: str


def digest_rows(budget_nbytes: int, workers: int) -> int:
    """Rows that each worker can digest at a time in a sixteenth of a budget.

    Examples:
        >>> digest_rows(512 << 20, 4), digest_rows(1 << 20, 2)
        (128, 1)
    """
    rows = _MOST_ROWS
    while rows > 1 and workers * scratch_nbytes(rows) > budget_nbytes // _ROWS_SHARE:
        rows //= 2
    return rows


def find_damage(
    extents: Iterable[Extent], *, workers: int, rows: int, on_read: Callable[[int], None]
) -> Iterator[Damage]:
    """Read extents, and yield those that are not what they should be.

    Args:
        extents: What to read.
        workers: Threads.
        rows: Rows of 1 KiB that each thread holds and digests at a time.
        on_read: Called with the size of each extent when it was read, by this thread.

    Cost:
        Every byte is read once.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes long

    state = local()

    def look(extents: Sequence[Extent]) -> list[str]:
        tools: tuple[Digester, memoryview] | None = getattr(state, "tools", None)
        if tools is None:
            tools = state.tools = Digester(rows), allocate(rows * ROW_NBYTES)
        return [_reason(extent, pool, *tools) for extent in extents]

    position, left = -1, iter(extents)
    with FilePool() as pool, ThreadPoolExecutor(workers, thread_name_prefix="restride") as threads:
        try:
            while some := tuple(islice(left, MOST_AT_ONE_TIME)):
                bundles = list(_bundled(some))
                for bundle, reasons in zip(bundles, threads.map(look, bundles), strict=True):
                    for extent, reason in zip(bundle, reasons, strict=True):
                        on_read(extent.nbytes)
                        position += 1
                        if reason:
                            yield Damage(position, extent, reason)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _bundled(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Small extents together, since a call of a thread takes longer than to read one."""
    bundle: list[Extent] = []
    nbytes = 0
    for extent in extents:
        bundle.append(extent)
        nbytes += extent.nbytes
        if nbytes >= _BUNDLE_NBYTES or len(bundle) == _MOST_IN_BUNDLE:
            yield bundle
            bundle, nbytes = [], 0
    if bundle:
        yield bundle


def _reason(extent: Extent, pool: FilePool, digester: Digester, buffer: memoryview) -> str:
    """What is wrong with an extent, or nothing."""
    try:
        found = _digest(extent, pool, digester, buffer)
    except (ExecutionError, FormatError) as error:
        return error.problem
    return "" if found == extent.digest else "other bytes than were written"


def _digest(extent: Extent, pool: FilePool, digester: Digester, buffer: memoryview) -> int:
    total = done = 0
    while done < extent.nbytes:
        # Pieces end on multiples of their size, as the digester cuts them anyway.
        at = extent.base_nbytes + done
        count = min(extent.nbytes - done, buffer.nbytes - at % buffer.nbytes)
        part = buffer[:count]
        pool.read_exact(extent.path, extent.start_nbytes + done, part)
        total += digester.digest(part, at)
        done += count
    return total % MODULUS
