"""Write an export without the command: what a format lays out, carried out and renamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.running import run_plan
from restride.planning.conversion import Job, plan_conversion
from restride.storage.atomic import atomic_directory

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.output import Output
    from restride.checkpoint.selection import Export
    from restride.storage.atomic import AtomicDirectory

__all__ = ["write_export"]

_BUDGET_NBYTES = 64 << 20


def write_export(catalog: Catalog, export: Export, out: Path) -> None:
    """Write the files of `export`, read from `catalog`, into the folder `out`."""
    jobs = [
        Job(chosen.tensor, chosen.state, chosen.entry, target.layout, target.regions, target.dtype)
        for chosen, target in zip(export.sources, export.output.tensors, strict=True)
    ]
    plan = plan_conversion(catalog.files, jobs, budget_nbytes=_BUDGET_NBYTES, workers=2)
    table = DriftTable(NullObserver(), {})
    with atomic_directory(out, inputs=[Path(catalog.root)]) as directory:
        directory.create(export.output)
        run_plan(catalog, plan, _Sink(directory, export.output), table)


class _Sink:
    def __init__(self, directory: AtomicDirectory, output: Output) -> None:
        self._directory = directory
        self._names = [file.name for file in output.files]

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        self._directory.write_exact(self._names[file], start_nbytes, buffer)
