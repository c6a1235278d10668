"""Write an export without the command and without its journal: the files, then the plan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.running import run_plan
from restride.planning.jobs import Job, plan_conversion

if TYPE_CHECKING:
    from pathlib import Path

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.output import OutputFile
    from restride.checkpoint.selection import Export

__all__ = ["write_export"]

_BUDGET_NBYTES = 64 << 20


def write_export(catalog: Catalog, export: Export, out: Path) -> None:
    """Write the files of `export`, read from `catalog`, into the new folder `out`."""
    jobs = [
        Job(chosen.tensor, chosen.state, chosen.entry, target.layout, target.regions, target.dtype)
        for chosen, target in zip(export.sources, export.output.tensors, strict=True)
    ]
    plan = plan_conversion(jobs, budget_nbytes=_BUDGET_NBYTES, workers=2)
    sink = _Sink()
    try:
        for file in export.output.files:
            sink.create(out / file.name, file)
        run_plan(catalog, plan, sink, DriftTable(NullObserver()))
    finally:
        sink.close()


class _Sink:
    def __init__(self) -> None:
        self._handles: list[int] = []

    def create(self, path: Path, file: OutputFile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._handles.append(handle)
        os.truncate(handle, file.nbytes)
        for start, literal in file.spelled():
            self.write_from(len(self._handles) - 1, start, memoryview(literal))

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._handles[file], buffer[done:], start_nbytes + done)

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)
