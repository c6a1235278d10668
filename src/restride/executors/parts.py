"""Which process writes which blocks: contiguous parts of a plan, in target order.

A part begins and ends at a block, so processes touch few files, and none of the same bytes. Where
a step of the plan reaches into the part of a neighbour it is cut there: what both would find of
copies that differ would be counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.executors import blocks as counting
from restride.executors.blocks import Block, block_count, block_nbytes
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from restride.executors.blocks import BlockTable
    from restride.planning.plan import RegionPlan, Step

__all__ = ["Part", "cut_parts"]


def cut_parts(
    regions: Sequence[RegionPlan], left: Callable[[int, int], bool], count: int
) -> tuple[tuple[int, int], ...]:
    """Cut the blocks that are left into parts of nearly the same number of bytes.

    Args:
        regions: What is to be written, in target order.
        left: Whether a block, by region and number, is to be written.
        count: Number of parts.

    Returns:
        Where each part begins, as (region, block), and where the last one ends. Parts differ by
        less than a block and a byte; where there are fewer blocks than parts, some are empty.

    Cost:
        O(blocks).
    """
    wanted = [
        (region, number, block_nbytes(regions[region].nbytes, number))
        for region, number in _all(regions)
        if left(region, number)
    ]
    total = sum(nbytes for _, _, nbytes in wanted)
    cuts, before = [(0, 0)], 0
    for region, number, nbytes in wanted:
        # A block belongs to the part that its middle is in.
        part = (2 * before + nbytes) * count // (2 * total)
        cuts += [(region, number)] * (part + 1 - len(cuts))
        before += nbytes
    return (*cuts, *[(len(regions), 0)] * (count + 1 - len(cuts)))


class Part(Frozen):
    """The blocks of one process.

    Attributes:
        start: First block, as (region, block).
        stop: The block after the last one.
    """

    start: tuple[int, int]
    stop: tuple[int, int]

    def __contains__(self, block: object) -> bool:
        """Whether the part has a block, as (region, block)."""
        return isinstance(block, tuple) and self.start <= block < self.stop

    def blocks(self, regions: Sequence[RegionPlan]) -> Iterator[tuple[int, int]]:
        """All its blocks, in target order.

        Cost:
            O(regions and blocks of the part).
        """
        for region in range(self.start[0], min(self.stop[0] + 1, len(regions))):
            count = block_count(regions[region].nbytes)
            first = self.start[1] if region == self.start[0] else 0
            last = min(self.stop[1], count) if region == self.stop[0] else count
            for number in range(first, last):
                yield region, number

    def leave_others(self, table: BlockTable, done: Collection[tuple[int, int]] = ()) -> None:
        """Count all blocks of other parts as done, so that nobody here writes them.

        Args:
            table: The table, in which `done` are done already.
            done: Blocks whose digests stay as they are.
        """
        for region, number in _all(table.regions):
            if (region, number) not in self and (region, number) not in done:
                table.set_done(Block(region, number, 0))

    def clip(
        self, lanes: Iterable[Iterable[Sequence[Step]]], regions: Sequence[RegionPlan]
    ) -> Iterator[Iterator[Sequence[Step]]]:
        """The bundles of steps of every lane, without what they do for other parts."""
        numbers = {id(region): number for number, region in enumerate(regions)}
        for lane in lanes:
            yield self._kept(lane, numbers)

    def _kept(
        self, lane: Iterable[Sequence[Step]], numbers: Mapping[int, int]
    ) -> Iterator[Sequence[Step]]:
        for bundle in lane:
            kept = [part for step in bundle for part in self._clipped(step, numbers)]
            if kept:
                yield kept

    def _clipped(self, step: Step, numbers: Mapping[int, int]) -> Iterator[Step]:
        low, high = self._elements(numbers[id(step.region)], step.region)
        if step.start >= low and step.stop <= high:
            yield step
        elif max(step.start, low) < min(step.stop, high):
            yield step.region.step(max(step.start, low), min(step.stop, high))

    def _elements(self, number: int, region: RegionPlan) -> tuple[int, int]:
        """Which elements of a region the part has."""
        pitch = counting.BLOCK_NBYTES // region.target_dtype.itemsize_nbytes
        low = self.start[1] * pitch if number == self.start[0] else 0
        return low, self.stop[1] * pitch if number == self.stop[0] else region.numel


def _all(regions: Sequence[RegionPlan]) -> Iterator[tuple[int, int]]:
    for number, region in enumerate(regions):
        for block in range(block_count(region.nbytes)):
            yield number, block
