"""Count what a plan will read and write, without opening a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.planning.plan import Copy, Plan, RegionPlan, Step

__all__ = ["WORTHWHILE_GAP_NBYTES", "Projection", "project"]

# Reading over a gap costs its bytes at memory speed, skipping it costs a system call.
WORTHWHILE_GAP_NBYTES: Final = 8192
# A terabyte has a million steps, and those of a region are much alike.
_MOST_STEPS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Projection:
    """What a plan will do, if no replica differs from another.

    Attributes:
        read_nbytes: Bytes read from the sources.
        read_count: Reads.
        written_nbytes: Bytes written by its steps.
        write_count: Writes.
        is_exact: Whether every step was counted; otherwise reads are those of a part of the steps
            of each region, scaled up.
    """

    read_nbytes: int
    read_count: int
    written_nbytes: int
    write_count: int
    is_exact: bool


def project(plan: Plan, *, most_steps: int = _MOST_STEPS) -> Projection:
    """Count the reads and writes of a plan.

    Args:
        plan: The plan.
        most_steps: Steps to look at, about; of a plan with more, some of each region.

    Cost:
        O(steps * fills), for so many steps. Never walks elements.
    """
    share = max(1, -(-plan.step_count // most_steps))
    total = [0, 0, 0]
    is_exact = True
    for region in plan.regions:
        counts = [_counts(step, plan.buffer_nbytes) for step in _some_steps(region, share)]
        of_region = [sum(column) for column in zip(*counts, strict=True)]
        if len(counts) < region.step_count:
            is_exact = False
            of_region = [count * region.step_count // len(counts) for count in of_region]
        total = [a + b for a, b in zip(total, of_region or [0, 0, 0], strict=True)]
    read_nbytes, read_count, write_count = total
    return Projection(read_nbytes, read_count, plan.total_nbytes, write_count, is_exact)


def _some_steps(region: RegionPlan, share: int) -> Iterator[Step]:
    """Every so many steps of a region, at least two where it has them."""
    count = region.step_count
    every = max(1, min(share, count // 2))
    first = range(0, region.numel, region.pitch_numel * every)
    return region.steps(range(start, start + 1) for start in first)


def _counts(step: Step, buffer_nbytes: int) -> tuple[int, int, int]:
    """Bytes read, reads and writes of one step."""
    if step.region.streamed_numel:
        chunks = list(step.chunks(buffer_nbytes))
        return sum(chunk.nbytes for chunk in chunks), len(chunks), len(chunks)
    reads = [_reads(copy, buffer_nbytes) for copy in _copies(step)]
    return sum(nbytes for _, nbytes in reads), sum(count for count, _ in reads), 1


def _copies(step: Step) -> Iterator[Copy]:
    """All copies that are read: every replica is, to be compared."""
    for fill in step.fills:
        for _, copies in fill.copies:
            yield from copies


def _reads(copy: Copy, buffer_nbytes: int) -> tuple[int, int]:
    """Reads, and bytes read, of one strided block; as `executors._copying` cuts it."""
    axes = tuple((extent, stride) for extent, stride, _ in copy.axes)
    return _block_reads(axes, copy.run_nbytes, buffer_nbytes)


def _block_reads(
    axes: tuple[tuple[int, int], ...], run_nbytes: int, buffer_nbytes: int
) -> tuple[int, int]:
    if not axes:
        return 1, run_nbytes
    span = _span(axes, run_nbytes)
    runs = prod(extent for extent, _ in axes)
    is_dense = span <= runs * (run_nbytes + WORTHWHILE_GAP_NBYTES)
    if is_dense and span <= buffer_nbytes:
        return 1, span
    (extent, stride), inner = axes[0], axes[1:]
    inner_span = _span(inner, run_nbytes)
    count = 1
    if is_dense and inner_span <= buffer_nbytes:
        count = max(1, (buffer_nbytes - inner_span) // stride + 1)
    whole, rest = divmod(extent, count)
    reads = nbytes = 0
    for times, part in ((whole, count), (1, rest)):
        if times and part:
            outer = ((part, stride),) if part > 1 else ()
            found = _block_reads((*outer, *inner), run_nbytes, buffer_nbytes)
            reads, nbytes = reads + times * found[0], nbytes + times * found[1]
    return reads, nbytes


def _span(axes: tuple[tuple[int, int], ...], run_nbytes: int) -> int:
    return run_nbytes + sum((extent - 1) * stride for extent, stride in axes)
