"""What is to be written, planned with its digests and blocks within a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.arrays.fingerprint import scratch_nbytes
from restride.errors import BudgetError
from restride.executors.blocks import TABLE_NBYTES, block_count
from restride.executors.footprint import (
    catalog_nbytes,
    finishing_nbytes,
    noting_nbytes,
    opening_nbytes,
    output_nbytes,
    resuming_nbytes,
)
from restride.executors.verifying import digest_rows
from restride.frozen import Frozen
from restride.planning.jobs import plan_conversion
from restride.planning.sizing import LEAST_BUFFERS_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.output import Output
    from restride.planning.jobs import Job
    from restride.planning.plan import Plan

__all__ = ["Task", "plan_writing"]


class Task(Frozen):
    """What is to be written, and in which memory.

    Attributes:
        output: The files.
        plan: What moves.
        digest_rows: Rows that each worker digests at a time.
        digest_nbytes: Memory that digests take, on top of the plan's.
        kept_nbytes: Memory that everything else takes from the beginning to the end: the catalog,
            the description of the output, the table of its blocks, and records of a journal.
        passing_nbytes: Memory that is taken before the first step and after the last one, when
            there are no buffers: to read records back, and for the manifest.
        opening_nbytes: Memory that it took to open the source, before there was anything else.
    """

    output: Output
    plan: Plan
    digest_rows: int
    digest_nbytes: int
    kept_nbytes: int
    passing_nbytes: int
    opening_nbytes: int

    @property
    def projected_nbytes(self) -> int:
        """Upper bound of the memory that a conversion takes."""
        kept = self.plan.objects_nbytes - self.plan.steps_nbytes
        working = self.plan.projected_nbytes - kept + self.digest_nbytes
        return max(self.kept_nbytes + kept + max(working, self.passing_nbytes), self.opening_nbytes)


def plan_writing(
    catalog: Catalog,
    jobs: Sequence[Job],
    output: Output,
    *,
    budget_nbytes: int,
    workers: int,
    has_records: bool = False,
) -> Task:
    """Plan a conversion and all that it takes within a memory budget.

    Args:
        catalog: The source.
        jobs: What to write.
        output: Where to.
        budget_nbytes: Most memory for all of it.
        workers: Most steps to run at one time.
        has_records: Whether there may be records of an earlier run, or of other processes.

    Raises:
        BudgetError, CoverageError, PlanError, UnsupportedError: As for `plan_conversion`.
    """
    frame = _Frame(catalog, output, workers, has_records=has_records)
    rows = digest_rows(budget_nbytes, workers)
    while True:
        room = budget_nbytes - frame.kept_nbytes - frame.digest_nbytes(rows)
        try:
            plan = plan_conversion(jobs, budget_nbytes=room, workers=workers)
        except BudgetError as error:
            # To match all layouts again takes longer than to count what the second try would take.
            needed = frame.needed_nbytes(1, error.needed_nbytes)
            if rows == 1 or needed > budget_nbytes:
                raise BudgetError(needed_nbytes=needed, budget_nbytes=budget_nbytes) from None
        else:
            task = frame.task(plan, rows)
            if task.projected_nbytes <= budget_nbytes:
                return task
            if rows == 1:
                raise BudgetError(needed_nbytes=task.projected_nbytes, budget_nbytes=budget_nbytes)
        rows = 1


class _Frame:
    """What a conversion takes beside its plan."""

    def __init__(
        self, catalog: Catalog, output: Output, workers: int, *, has_records: bool
    ) -> None:
        regions, blocks = _counts(output)
        block_count = sum(blocks)
        records, read_back = 0, 0
        if has_records:
            records, read_back = resuming_nbytes(region_count=sum(regions), block_count=block_count)
        self._output = output
        self._workers = workers
        self._has_records = has_records
        self._read_back_nbytes = read_back
        self._finishing_nbytes = finishing_nbytes(
            output, region_counts=regions, block_counts=blocks
        )
        self._opening_nbytes = opening_nbytes(catalog)
        kept = catalog_nbytes(catalog) + output_nbytes(output) + records
        self.kept_nbytes = kept + TABLE_NBYTES * block_count + noting_nbytes(block_count)

    def digest_nbytes(self, rows: int) -> int:
        """Memory of digests, with so many rows at a time."""
        return self._workers * scratch_nbytes(rows)

    def needed_nbytes(self, rows: int, plan_nbytes: int) -> int:
        """The least that is enough for a plan that takes so much with the smallest buffers."""
        passing = self._passing_nbytes(rows) - LEAST_BUFFERS_NBYTES
        needed = self.kept_nbytes + plan_nbytes + max(self.digest_nbytes(rows), passing)
        return max(needed, self._opening_nbytes)

    def task(self, plan: Plan, rows: int) -> Task:
        """The plan, and what it takes with so many rows that are digested at a time."""
        sizes = self.digest_nbytes(rows), self.kept_nbytes, self._passing_nbytes(rows)
        return Task(self._output, plan, rows, *sizes, self._opening_nbytes)

    def _passing_nbytes(self, rows: int) -> int:
        read_back = self._read_back_nbytes
        if self._has_records:  # digests, and no larger buffers
            read_back += 2 * self.digest_nbytes(rows)
        return max(self._finishing_nbytes, read_back)


def _counts(output: Output) -> tuple[list[int], list[int]]:
    """How many regions a plan of an output has in each file, and how many blocks."""
    regions, blocks = [0] * len(output.files), [0] * len(output.files)
    for tensor in output.tensors:
        for rank, region in enumerate(tensor.regions):
            if region is not None:
                regions[region.file] += 1
                blocks[region.file] += block_count(tensor.shard_nbytes(rank))
    return regions, blocks
