"""What is to be written, planned with its digests and blocks within a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.arrays.fingerprint import scratch_nbytes
from restride.errors import BudgetError
from restride.executors.blocks import TABLE_NBYTES, block_count
from restride.executors.verifying import digest_rows
from restride.frozen import Frozen
from restride.planning.conversion import plan_conversion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.catalog import FileEntry
    from restride.checkpoint.output import Output
    from restride.planning.conversion import Job
    from restride.planning.plan import Plan

__all__ = ["Task", "plan_writing"]


class Task(Frozen):
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
