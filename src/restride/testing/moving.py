"""Files in memory, and jobs between random layouts: what every executor is tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from restride.checkpoint.catalog import FileEntry, Region, StateEntry
from restride.frozen import Frozen
from restride.planning.jobs import Job
from restride.testing.oracles import walk_padding, walk_relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from restride.algebra.copies import Replicas
    from restride.algebra.layout import Layout
    from restride.checkpoint.dtypes import DType

__all__ = ["MemoryFiles", "StoredState", "expected_shards", "job_between", "store"]


class MemoryFiles:
    """Files in memory that read and write like those on a disk, and remember how.

    Attributes:
        contents: Bytes of each file.
        writes: (file, first byte, end) of each write.
    """

    def __init__(self, contents: Sequence[bytes | bytearray]) -> None:
        self.contents = [bytearray(content) for content in contents]
        self.writes: list[tuple[int, int, int]] = []

    def read_into(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Copy bytes out of a file; all of them must be there."""
        found = self.contents[file][start_nbytes : start_nbytes + buffer.nbytes]
        assert start_nbytes >= 0
        assert len(found) == buffer.nbytes, "read past the end of a file"
        buffer[:] = found

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Copy bytes into a file; there must be room for them."""
        stop = start_nbytes + buffer.nbytes
        assert 0 <= start_nbytes <= stop <= len(self.contents[file]), "written past the end"
        self.contents[file][start_nbytes:stop] = buffer
        self.writes.append((file, start_nbytes, stop))


class StoredState(Frozen):
    """A state in memory files: one file a rank, with some other bytes in front of the shard."""

    entry: StateEntry
    files: tuple[FileEntry, ...]
    contents: tuple[bytes, ...]


_FRONT_NBYTES = 24


def store(layout: Layout, dtype: DType, full: NDArray[np.generic]) -> StoredState:
    """Cut a full tensor (flat bit patterns, one an element) into files, by walking its elements."""
    contents, regions = [], []
    shards = expected_shards(layout, full)
    for rank, shard in enumerate(shards):
        contents.append(b"\xa5" * _FRONT_NBYTES + shard.tobytes())
        regions.append(Region(rank, _FRONT_NBYTES) if shard.size else None)
    files = tuple(FileEntry(f"rank{r}", len(content)) for r, content in enumerate(contents))
    return StoredState(StateEntry(dtype, layout, tuple(regions)), files, tuple(contents))


def expected_shards(
    layout: Layout, full: NDArray[np.generic], *, padding: int = 0
) -> list[NDArray[np.generic]]:
    """What each rank has to hold, the slow and obvious way; undeclared addresses hold 0xEE."""
    shards = []
    for rank in range(layout.rank_count):
        shard = np.empty(layout.shard_numel(rank), full.dtype)
        shard.view(np.uint8)[:] = 0xEE
        shards.append(shard)
    for element, rank, index, _ in walk_relation(layout):
        shards[rank][index] = full[element]
    for rank, index, _ in walk_padding(layout):
        shards[rank].view(np.uint8).reshape(-1, full.dtype.itemsize)[index] = padding
    return shards


def job_between(
    source: StoredState, target: Layout, dtype: DType, replicas: Replicas = "check"
) -> tuple[Job, list[int]]:
    """A job that writes one file a target rank, and the sizes of those files."""
    sizes = [target.shard_numel(rank) * dtype.itemsize_nbytes for rank in range(target.rank_count)]
    regions = tuple(Region(rank, 0) if size else None for rank, size in enumerate(sizes))
    return Job("wte", "weight", source.entry, target, regions, dtype, replicas), sizes
