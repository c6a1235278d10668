"""Read a part of a file once for all the targets that share it.

Where a tensor is cut into columns, the row of a source has a part of the row of several target
ranks. Each of them would read over the parts of the others, which is faster than a read for each
part, and so every rank would read all rows. A *family* are the regions of such ranks; the steps of
a family that fill the same rows are a *bundle*, whose span is read once.
"""

from __future__ import annotations

from array import array
from heapq import merge
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from restride.planning.fills import Row
    from restride.planning.plan import Copy, RegionPlan, Step

__all__ = [
    "Span",
    "bundles",
    "families",
    "is_dense",
    "lanes",
    "shared_span",
    "span_nbytes",
]

# Reading over a gap costs its bytes at memory speed, skipping it costs a system call.
_WORTHWHILE_GAP_NBYTES: Final = 8192


class Span(NamedTuple):
    """A run of bytes of a source file.

    Attributes:
        file: Index of the file.
        start_nbytes: First byte.
        stop_nbytes: Byte after the last one.
    """

    file: int
    start_nbytes: int
    stop_nbytes: int


def span_nbytes(axes: Iterable[tuple[int, int]], run_nbytes: int) -> int:
    """Bytes from the first to the last that a strided block reads.

    Examples:
        >>> span_nbytes([(3, 100)], 10)
        210
    """
    return run_nbytes + sum((extent - 1) * stride for extent, stride in axes)


def is_dense(axes: Sequence[tuple[int, int]], run_nbytes: int) -> bool:
    """Whether one read over the gaps of a strided block is faster than one for each run."""
    runs = prod(extent for extent, _ in axes)
    return span_nbytes(axes, run_nbytes) <= runs * (run_nbytes + _WORTHWHILE_GAP_NBYTES)


def families(regions: Sequence[RegionPlan]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of all regions, those of one family together, in the order of the first.

    Cost:
        O(regions).
    """
    found: dict[tuple[object, ...], array[int]] = {}
    for number, region in enumerate(regions):
        if region.pattern.row is not None:
            found.setdefault(_key(region, region.pattern.row), array("q")).append(number)
    for number, region in enumerate(regions):
        if region.pattern.row is None:
            yield (number,)
        elif (members := found[_key(region, region.pattern.row)])[0] == number:
            yield tuple(members)


def _key(region: RegionPlan, row: Row) -> tuple[object, ...]:
    place = region.place(row.rank)
    return (
        *(region.tensor, region.state, place.file, place.start_nbytes),
        *(region.numel, region.step_numel),
    )


def bundles(
    numbers: Iterable[tuple[int, ...]], steps_of: Callable[[int], Iterator[Step]]
) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of all regions, those together that fill the same rows of a family.

    Args:
        numbers: Families, as of `families`.
        steps_of: Steps of the region of a number, in target order.
    """
    for family in numbers:
        if len(family) == 1:
            for step in steps_of(family[0]):
                yield (step,)
        else:
            steps = merge(*map(steps_of, family), key=attrgetter("start"))
            for _, some in groupby(steps, attrgetter("start")):
                yield tuple(some)


def lanes(
    regions: Sequence[RegionPlan], steps_of: Callable[[int], Iterator[Step]]
) -> Iterator[Iterator[tuple[Step, ...]]]:
    """Yield the bundles of one target file after the other.

    A system lets one thread at a time write into a file, so that workers had better have files of
    their own. The other files of a family are written along with its first.

    Args:
        regions: Regions of a plan, in target order.
        steps_of: Steps of the region of a number, in target order.
    """
    by_file = groupby(families(regions), lambda family: regions[family[0]].target_file)
    for _, numbers in by_file:
        yield bundles(tuple(numbers), steps_of)


def shared_span(steps: Sequence[Step], buffer_nbytes: int) -> Span | None:
    """What to read once for all steps of a bundle; None where each reads for itself.

    Args:
        steps: The steps.
        buffer_nbytes: Size of the buffer for it.
    """
    if len(steps) < 2:  # noqa: PLR2004 - it takes two to share
        return None
    fills = [fill for step in steps for fill in step.fills]
    if any(len(fill.copies) > 1 for fill in fills):
        return None  # what is compared needs the buffer in between
    copies = [copy for fill in fills for copy in fill.copies[0][1]]
    spans = [_span(copy) for copy in copies]
    files = {span.file for span in spans}
    if len(files) != 1 or not all(is_dense(_axes(copy), copy.run_nbytes) for copy in copies):
        return None
    start = min(span.start_nbytes for span in spans)
    stop = max(span.stop_nbytes for span in spans)
    alone = sum(span.stop_nbytes - span.start_nbytes for span in spans)
    if stop - start > min(buffer_nbytes, alone):
        return None
    return Span(files.pop(), start, stop)


def _span(copy: Copy) -> Span:
    nbytes = span_nbytes(_axes(copy), copy.run_nbytes)
    return Span(copy.file, copy.source_start_nbytes, copy.source_start_nbytes + nbytes)


def _axes(copy: Copy) -> list[tuple[int, int]]:
    return [(extent, stride) for extent, stride, _ in copy.axes]
