"""What a conversion would do: planned as for the real one, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from restride.checkpoint.decisions import DEFAULT
from restride.checkpoint.selection import COPIED
from restride.executors.probing import probe_rate
from restride.frozen import Frozen
from restride.planning.projection import project
from restride.preparation import prepare
from restride.storage.machine import free_nbytes
from restride.storage.paths import as_path
from restride.storage.ranges import FilePool
from restride.storage.unfinished import require_startable

if TYPE_CHECKING:
    from os import PathLike

    from restride.checkpoint.catalog import Finding
    from restride.checkpoint.decisions import Saying
    from restride.exports import Wanted
    from restride.planning.projection import Projection

__all__ = ["ConvertProjection", "dry_run"]


class ConvertProjection(Frozen):
    """What a conversion would do.

    Attributes:
        out: Folder that would be written.
        files: Name and size of each file, without the manifest.
        tensor_count: Number of arrays to write.
        moved: What is read and written of tensors, if no replica differs from another.
        projected_nbytes: Upper bound of the memory that it takes, beside the program itself.
        workers: Threads.
        rate: Bytes a second at which one thread of this machine read, digested and wrote a sample
            of the sources just now, the disk left out; None where there is too little to tell.
        free_nbytes: Bytes that are free where the output goes.
        findings: What the user should know before.
    """

    out: Path
    files: tuple[tuple[str, int], ...]
    tensor_count: int
    moved: Projection
    projected_nbytes: int
    workers: int
    rate: float | None
    free_nbytes: int
    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(nbytes for _, nbytes in self.files)

    @property
    def seconds(self) -> float | None:
        """Time that moving the bytes takes at least: with every thread at that rate."""
        if self.rate is None:
            return None
        most = max(self.moved.read_nbytes, self.moved.written_nbytes)
        return most / (self.rate * self.workers)


def dry_run(
    path: str | PathLike[str],
    out: str | PathLike[str],
    wanted: Wanted,
    *,
    budget_nbytes: int | None = None,
    workers: int | None = None,
    replicas: Saying = DEFAULT,
    force: bool = False,
    resume: bool = False,
) -> ConvertProjection:
    """Plan a conversion, and say what it would do. Nothing is written.

    Args:
        path: As for `convert`, like everything that follows.
        out: Folder that would be written.
        wanted: Format and options.
        budget_nbytes: Most memory.
        workers: Threads.
        replicas: What to do where ranks hold different copies; they are not read.
        force: Replace a folder of which restride wrote all.
        resume: Go on where an earlier run stopped. What it left is not looked at: the numbers are
            those of the whole conversion.

    Raises:
        RestrideError: As for `convert`, as far as it can be said without reading tensors.

    Cost:
        Headers, the plan, and up to 32 MiB of the tensors, read to see how fast that is.
    """
    out = as_path(out)
    with FilePool() as pool:
        prepared = prepare(
            *(path, wanted, pool),
            budget_nbytes=budget_nbytes,
            workers=workers,
            replicas=replicas,
            has_records=resume,
        )
        require_startable(out, force=force, resume=resume, inputs=prepared.inputs)
        catalog, export, task = prepared.catalog, prepared.export, prepared.task
        rate = probe_rate(prepared.reader, [file.nbytes for file in catalog.files])
    return ConvertProjection(
        out=Path(out),
        files=tuple((file.name, file.nbytes) for file in export.output.files),
        tensor_count=sum(chosen.state != COPIED for chosen in export.sources),
        moved=project(task.plan),
        projected_nbytes=task.projected_nbytes,
        workers=task.plan.workers,
        rate=rate,
        free_nbytes=free_nbytes(out),
        findings=(*catalog.findings, *export.findings, *prepared.memory),
    )
