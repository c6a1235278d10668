"""Hold what files of ``torch.save`` contain against the checksums that they state.

A zip file has a CRC-32 of each of its records. ``torch.load`` looks at none of them, so a training
goes on with what a disk or a copy made of its bytes. A checksum of 0 says that none was computed:
torch can be told so, and a conversion, whose manifest has digests instead, knows none when it
begins a record.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import defaultdict
from itertools import islice
from pathlib import Path
from threading import Event, local
from typing import TYPE_CHECKING, Final

from restride.arrays.memory import allocate
from restride.checkpoint.catalog import Finding
from restride.executors.verifying import MOST_AT_ONE_TIME, ROW_NBYTES
from restride.frozen import Frozen
from restride.storage.ranges import FilePool, RangeFile
from restride.storage.zip_directory import read_zip_directory
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from restride.checkpoint.catalog import Catalog

__all__ = ["check_sums", "summed_nbytes"]

_ZIP: Final = ".pt"


class _Record(Frozen):
    """A record that has a checksum.

    Attributes:
        file: Number of its file in the catalog.
        name: Its name inside the file, without the top folder.
        start_nbytes: First byte of its content in the file.
        nbytes: Length of its content.
        crc32: What is stated.
    """

    file: int
    name: str
    start_nbytes: int
    nbytes: int
    crc32: int


def summed_nbytes(catalog: Catalog) -> int:
    """Most bytes that `check_sums` reads: those of all files that may have checksums."""
    return sum(file.nbytes for file in catalog.files if file.name.endswith(_ZIP))


def check_sums(
    catalog: Catalog, *, workers: int, rows: int, on_read: Callable[[int], None]
) -> tuple[list[Finding], int]:
    """Read every record of which a checksum is stated, and compare.

    Args:
        catalog: The checkpoint.
        workers: Threads.
        rows: Rows of 1 KiB that each of them reads at a time.
        on_read: Called with the number of bytes that were read, by any thread.

    Returns:
        One error for each record that has another one, and the bytes that were read.

    Raises:
        ExecutionError: A file cannot be read.
        FormatError, CorruptError: It is not the one that it was.

    Cost:
        Those files are read once.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes long

    root, state, is_over = Path(catalog.root), local(), Event()

    def is_sound(record: _Record) -> bool:
        buffer: memoryview | None = getattr(state, "buffer", None)
        if buffer is None:
            buffer = state.buffer = allocate(rows * ROW_NBYTES)
        path, done, crc32 = str(root / catalog.files[record.file].name), 0, 0
        while done < record.nbytes and not is_over.is_set():
            part = buffer[: record.nbytes - done]
            pool.read_exact(path, record.start_nbytes + done, part)
            crc32 = zlib.crc32(part, crc32)
            done += part.nbytes
            on_read(part.nbytes)
        return crc32 == record.crc32

    left, findings, nbytes = _records(catalog), list[Finding](), 0
    held: Mapping[int, list[tuple[int, str, str]]] = {}
    with FilePool() as pool, ThreadPoolExecutor(workers, thread_name_prefix="restride") as threads:
        try:
            while some := tuple(islice(left, MOST_AT_ONE_TIME)):
                for record, sound in zip(some, threads.map(is_sound, some), strict=True):
                    nbytes += record.nbytes
                    if not sound:
                        held = held or _held(catalog)
                        findings.append(_damaged(catalog, record, held.get(record.file, [])))
        finally:
            is_over.set()
            threads.shutdown(wait=False, cancel_futures=True)
    return findings, nbytes


def _records(catalog: Catalog) -> Iterator[_Record]:
    for number, entry in enumerate(catalog.files):
        if not entry.name.endswith(_ZIP):
            continue
        with RangeFile(Path(catalog.root) / entry.name) as file:
            records = read_zip_directory(file)
        for record in records:
            if record.crc32 and record.nbytes:
                name = record.name.partition("/")[2]
                yield _Record(number, name, record.start_nbytes, record.nbytes, record.crc32)


def _held(catalog: Catalog) -> dict[int, list[tuple[int, str, str]]]:
    """Where what begins in each file: the byte, the tensor and the state, in this order."""
    held: dict[int, set[tuple[int, str, str]]] = defaultdict(set)
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            for region in entry.regions:
                if region is not None:
                    held[region.file].add((region.start_nbytes, tensor.name, state))
    return {file: sorted(found) for file, found in held.items()}


def _damaged(catalog: Catalog, record: _Record, held: list[tuple[int, str, str]]) -> Finding:
    name = catalog.files[record.file].name
    stop_nbytes = record.start_nbytes + record.nbytes
    first, last = (bisect_left(held, (at, "", "")) for at in (record.start_nbytes, stop_nbytes))
    own = held[first:last]
    holds = ""
    if own:
        _, tensor, state = own[0]
        more = f" and {counted(len(own) - 1, 'other array')}" if own[1:] else ""
        holds = f", which holds state {state!r} of tensor {tensor!r}{more}"
    message = (
        f"{name}: bytes changed after the file was written, by the checksum of {record.name}"
        f"{holds}: copy it again, or take an earlier save"
    )
    details: dict[str, object] = {
        "start_nbytes": record.start_nbytes,
        "stop_nbytes": stop_nbytes,
        "arrays": [[tensor, state] for _, tensor, state in own],
    }
    return Finding("error", "checksum-differs", message, name, details)
