"""Count what a plan will read and write, without opening a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.frozen import Frozen
from restride.planning.plan import chunk_nbytes
from restride.planning.sharing import (
    bundles,
    families,
    is_dense,
    shared_span,
    span_nbytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.planning.plan import Copy, Plan, RegionPlan, Step

__all__ = ["Projection", "project"]

# A terabyte has a million steps, and those of a region are much alike.
_MOST_STEPS: Final = 20_000


class Projection(Frozen):
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

    def some_steps(number: int) -> Iterator[Step]:
        return _some_steps(plan.regions[number], share)

    for family in families(plan.regions):
        first = plan.regions[family[0]]
        count = first.step_count  # the same for all
        if first.streamed_numel:
            reads = _streamed_reads(first, plan.buffer_nbytes)
            total = [total[0] + first.nbytes, total[1] + reads, total[2] + reads]
            continue
        some = bundles([family], some_steps)
        counts = [_counts(bundle, plan.buffer_nbytes) for bundle in some]
        of_family = [sum(column) for column in zip(*counts, strict=True)]
        if len(counts) < count:
            is_exact = False
            of_family = [value * count // len(counts) for value in of_family]
        total = [a + b for a, b in zip(total, of_family or [0, 0, 0], strict=True)]
    read_nbytes, read_count, write_count = total
    return Projection(read_nbytes, read_count, plan.total_nbytes, write_count, is_exact)


def _some_steps(region: RegionPlan, share: int) -> Iterator[Step]:
    """Every so many steps of a region, at least two where it has them."""
    count = region.step_count
    every = max(1, min(share, count // 2))
    first = range(0, region.numel, region.pitch_numel * every)
    return region.steps(range(start, start + 1) for start in first)


def _streamed_reads(region: RegionPlan, buffer_nbytes: int) -> int:
    """Chunks of all steps of a region that is streamed, as `Step.chunks` cuts them."""
    itemsize = region.target_dtype.itemsize_nbytes
    base, pitch = region.target_start_nbytes, region.pitch_numel
    most = chunk_nbytes(buffer_nbytes)
    reads = 0
    runs = [walk.reach() for fill in region.fills for walk in fill.sources[0].walks]
    for run in runs:
        for start in range(run.start - run.start % pitch, run.stop, pitch):
            first = base + max(start, run.start) * itemsize
            stop = base + min(start + pitch, run.stop) * itemsize
            reads += (stop - 1) // most - first // most + 1
    return reads


def _counts(bundle: Sequence[Step], buffer_nbytes: int) -> tuple[int, int, int]:
    """Bytes read, reads and writes of one bundle."""
    shared = shared_span(bundle, buffer_nbytes)
    if shared is not None:
        return shared.stop_nbytes - shared.start_nbytes, 1, len(bundle)
    reads = [_reads(copy, buffer_nbytes) for copy in _copies(bundle)]
    return sum(size for _, size in reads), sum(count for count, _ in reads), len(bundle)


def _copies(bundle: Sequence[Step]) -> Iterator[Copy]:
    """All copies that are read: every replica is, to be compared."""
    for step in bundle:
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
    span = span_nbytes(axes, run_nbytes)
    is_one = is_dense(axes, run_nbytes)
    if is_one and span <= buffer_nbytes:
        return 1, span
    (extent, stride), inner = axes[0], axes[1:]
    inner_span = span_nbytes(inner, run_nbytes)
    count = 1
    if is_one and inner_span <= buffer_nbytes:
        count = max(1, (buffer_nbytes - inner_span) // stride + 1)
    whole, rest = divmod(extent, count)
    reads = nbytes = 0
    for times, part in ((whole, count), (1, rest)):
        if times and part:
            outer = ((part, stride),) if part > 1 else ()
            found = _block_reads((*outer, *inner), run_nbytes, buffer_nbytes)
            reads, nbytes = reads + times * found[0], nbytes + times * found[1]
    return reads, nbytes
