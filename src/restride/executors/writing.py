"""Write an output from end to end: take up what is there, the plan, the manifest, the name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from restride.arrays.fingerprint import scratch_nbytes
from restride.checkpoint.manifest import MANIFEST_NAME, manifest_to_json
from restride.errors import BudgetError, ReplicaError, RestrideError, StoppedError
from restride.executors.blocks import TABLE_NBYTES, BlockTable, block_count
from restride.executors.identity import job_digest, package_version
from restride.executors.journaled import JournaledWriter
from restride.executors.manifests import describe_files, fingerprints_of
from restride.executors.resuming import noted_drift, take_up
from restride.executors.streaming import StreamingExecutor
from restride.executors.verifying import digest_rows
from restride.formats._registry import open_catalog
from restride.planning.conversion import plan_conversion

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

    from restride.checkpoint.catalog import FileEntry
    from restride.checkpoint.output import Output
    from restride.executors.drift import DriftTable
    from restride.executors.progress import Continued
    from restride.executors.sources import CatalogReader
    from restride.planning.conversion import Job
    from restride.planning.plan import Plan
    from restride.storage.journal import Record
    from restride.storage.unfinished import Unfinished

__all__ = ["Task", "Written", "plan_writing", "write_output"]


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be written, and in which memory.

    Attributes:
        output: The files.
        plan: What moves.
        digest_rows: Rows that each worker digests at a time.
        digest_nbytes: Memory that digests take, on top of the plan's.
    """

    output: Output
    plan: Plan
    digest_rows: int
    digest_nbytes: int

    @property
    def projected_nbytes(self) -> int:
        """Upper bound of the memory that plan, buffers and digests take."""
        return self.plan.projected_nbytes + self.digest_nbytes


@dataclass(frozen=True, slots=True)
class Written:
    """What was done of an output.

    Attributes:
        read_nbytes: Bytes read from the sources.
        resumed_nbytes: Bytes of tensors that were there already.
    """

    read_nbytes: int
    resumed_nbytes: int


def plan_writing(
    files: Sequence[FileEntry],
    jobs: Sequence[Job],
    output: Output,
    *,
    budget_nbytes: int,
    workers: int,
) -> Task:
    """Plan a conversion, its digests and the table of its blocks within a memory budget.

    Args:
        files: Source files, as the catalog numbers them.
        jobs: What to write.
        output: Where to.
        budget_nbytes: Most memory for all of it.
        workers: Most steps to run at one time.

    Raises:
        BudgetError, CoverageError, PlanError, UnsupportedError: As for `plan_conversion`.
    """
    rows = digest_rows(budget_nbytes, workers)
    blocks = sum(
        block_count(tensor.shard_nbytes(rank))
        for tensor in output.tensors
        for rank, region in enumerate(tensor.regions)
        if region is not None
    )
    reserved = workers * scratch_nbytes(rows) + TABLE_NBYTES * blocks
    try:
        plan = plan_conversion(
            files,
            jobs,
            budget_nbytes=budget_nbytes - reserved,
            workers=workers,
        )
    except BudgetError as error:
        needed = error.needed_nbytes + reserved
        raise BudgetError(needed_nbytes=needed, budget_nbytes=budget_nbytes) from None
    return Task(output, plan, rows, reserved)


def write_output(
    task: Task,
    place: Unfinished,
    first: Record,
    reader: CatalogReader,
    table: DriftTable,
    progress: Continued,
    *,
    sync_nbytes: int,
    stop: Event | None = None,
) -> Written:
    """Write what is not there yet, and publish the output with its manifest.

    Args:
        task: What to write.
        place: Where to.
        first: First record of the journal.
        reader: The sources.
        table: Observer of the run, and of what replicas drifted.
        progress: What `table` hands events to.
        sync_nbytes: Bytes after which they are made durable and noted.
        stop: When it is set, no further step is started.

    Returns:
        What was done.

    Raises:
        StoppedError: `stop` was set before everything was written; nothing was published.
        ExecutionError: A file cannot be read or written, or a source changed.
        ReplicaError: Replicas differ and the plan says to check.
    """
    if place.is_published:
        # An earlier run had done everything, but for cleaning up at the most.
        table.rows.update(noted_drift(place.records))
        return Written(0, task.plan.total_nbytes)
    plan, output = task.plan, task.output
    blocks = BlockTable(plan.regions, digest_rows=task.digest_rows)
    place.files.create(output, resume=place.is_resumed)
    place.files.sync_folders()
    resumed = 0

    def on_read(nbytes: int) -> None:
        progress.skip(nbytes, "what is there already")
        if stop is not None and stop.is_set():
            raise StoppedError("stopped")

    if place.is_resumed:
        resumed = take_up(
            place,
            first,
            output,
            blocks,
            table,
            workers=plan.workers,
            rows=task.digest_rows,
            on_read=on_read,
        )
        progress.start_from(resumed)
    writer = JournaledWriter(
        place, output, blocks, table, reader.require_unchanged, sync_nbytes=sync_nbytes
    )
    try:
        with writer:
            read_nbytes = StreamingExecutor().execute(
                plan, reader, writer, table, steps=blocks.steps(), stop=stop
            )
    except ReplicaError:
        # Replicas that are just being written to differ as well, and that is another story.
        reader.require_unchanged()
        raise
    if blocks.left_nbytes():
        raise StoppedError("stopped")
    reader.require_unchanged()
    _add_manifest(place, output, blocks, job_digest(first))
    place.publish()
    return Written(read_nbytes, resumed)


def _add_manifest(place: Unfinished, output: Output, blocks: BlockTable, job: str) -> None:
    """Write the manifest among the files; fingerprints are under the names that a reader finds."""
    manifest = describe_files(output, blocks, package_version(), job)
    try:
        catalog = open_catalog(place.files.path)
    except RestrideError:
        pass  # it is a form that is written but not read
    else:
        manifest = replace(manifest, tensors=fingerprints_of(catalog, manifest.files))
    content = manifest_to_json(manifest)
    place.files.preallocate(MANIFEST_NAME, len(content), resume=True)
    place.files.write_exact(MANIFEST_NAME, 0, content)
