"""The source files of a plan: those that a catalog numbers, read through a pool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.storage.ranges import FilePool

__all__ = ["CatalogReader", "default_workers"]

_MOST_WORKERS: Final = 4


class CatalogReader:
    """Source files by the number that the catalog gives them."""

    def __init__(self, catalog: Catalog, pool: FilePool) -> None:
        self._paths = [os.path.join(catalog.root, file.name) for file in catalog.files]  # noqa: PTH118
        self._pool = pool

    def read_into(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Fill `buffer` with the bytes of a file that start there.

        Raises:
            ExecutionError: The file cannot be read, or ends before.
        """
        self._pool.read_exact(self._paths[file], start_nbytes, buffer)


def default_workers() -> int:
    """Threads to use: one for each core that this process may use, up to four."""
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
