"""The source files of a plan: those that a catalog numbers, read through a pool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import ExecutionError
from restride.storage.machine import core_count, memory_limit_nbytes

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.storage.ranges import FilePool, Lease

__all__ = ["CatalogReader", "default_budget_nbytes", "default_workers"]

# Size, time of the last write, time of the last change of anything about it, number.
_Stamp: TypeAlias = tuple[int, int, int, int]

_MOST_WORKERS: Final = 4
_DEFAULT_BUDGET_NBYTES: Final = 512 << 20


class CatalogReader:
    """Source files by the number that the catalog gives them."""

    def __init__(self, catalog: Catalog, pool: FilePool) -> None:
        self._paths = [os.path.join(catalog.root, file.name) for file in catalog.files]  # noqa: PTH118
        self._pool = pool
        # Those of when the headers were read, if they are known: with hundreds of ranks, a training
        # may well have saved the next step into the same files since then.
        self._stamps = [
            _stamp(path) if file.stamp is None else (file.nbytes, *file.stamp)
            for path, file in zip(self._paths, catalog.files, strict=True)
        ]
        self._sizes = [file.nbytes for file in catalog.files]

    def read_into(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Fill `buffer` with the bytes of a file that start there.

        Raises:
            ExecutionError: The file cannot be read, or ends before.
        """
        self._pool.read_exact(self._paths[file], start_nbytes, buffer)

    def hold(self, file: int) -> Lease | None:
        """Keep a file open for somebody who reads it himself, as `FilePool.hold` does."""
        return self._pool.hold(self._paths[file])

    def require_unchanged(self) -> None:
        """Make sure that nobody wrote into the files while they were read, as a training may.

        Raises:
            ExecutionError: A file is not the one of the catalog, or was changed meanwhile.
        """
        for path, nbytes, before in zip(self._paths, self._sizes, self._stamps, strict=True):
            after = _stamp(path)
            if not _is_same(before, after, nbytes):
                raise ExecutionError(
                    "the file changed while it was read",
                    where=path,
                    remedy="try again when nobody writes into the checkpoint",
                )


def _stamp(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _is_same(before: _Stamp | None, after: _Stamp | None, nbytes: int) -> bool:
    """Whether nobody wrote into a file, and none took its place, as far as the system tells.

    Some network file systems give a file another number when they look it up again, and a new link
    to it is a change, so neither alone says anything; one that took its place has another of both.
    """
    if before is None or after is None or after[0] != nbytes:
        return False
    return before[:2] == after[:2] and (before[2] == after[2] or before[3] == after[3])


def default_workers() -> int:
    """Threads to use: one for each core that this process may use, up to four."""
    return min(_MOST_WORKERS, core_count())


def default_budget_nbytes() -> int:
    """Memory to use: 512 MiB, or a quarter of what the cgroup allows where that is less."""
    limit = memory_limit_nbytes()
    return _DEFAULT_BUDGET_NBYTES if limit is None else min(_DEFAULT_BUDGET_NBYTES, limit // 4)
