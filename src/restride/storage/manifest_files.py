"""Open manifests of outputs."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from restride.checkpoint.manifest_reading import manifest_of
from restride.errors import ExecutionError
from restride.storage.ranges import RangeFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from restride.checkpoint.manifest import Manifest

__all__ = ["read_manifest"]


def read_manifest(path: str | PathLike[str], *, where: str) -> Manifest:
    """Read a manifest; its files one by one, when they are asked for.

    Args:
        path: The file.
        where: What to call it in errors.

    Raises:
        FormatError, UnsupportedError: As of `restride.checkpoint.manifest_reading.manifest_of`.
        ExecutionError: It cannot be read. So does what is asked for later, if another one has taken
            its place.

    Cost:
        As of that function.
    """
    return manifest_of(_SameFile(path), where=where)


class _SameFile:
    """The bytes of one file, which has to be the one that was opened first."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._stamp: tuple[int, ...] | None = None

    @contextmanager
    def __call__(self) -> Iterator[RangeFile]:
        file = RangeFile(self._path)
        try:
            stamp = (*file.stamp, file.nbytes)
            if stamp != (self._stamp or stamp):
                raise ExecutionError("was changed while it was read", where=self._path)
            self._stamp = stamp
            yield file
        finally:
            file.close()
