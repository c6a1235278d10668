"""Take up what earlier processes left of an output: what they noted, if the bytes are there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.executors.blocks import BLOCK_NBYTES, Block, block_count, block_nbytes
from restride.executors.drift import add_drift
from restride.executors.events import ReplicaDrift
from restride.executors.journaled import claim_records, drift_records
from restride.executors.verifying import Extent, find_damage
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.output import Output
    from restride.executors.blocks import BlockTable
    from restride.executors.drift import DriftTable
    from restride.executors.parts import Part
    from restride.planning.plan import RegionPlan
    from restride.storage.journal import Record
    from restride.storage.output_files import OutputFiles

__all__ = ["ReadBack", "noted_blocks", "noted_drift", "read_back"]

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_Row: TypeAlias = tuple[str, str, tuple[int, int]]


class ReadBack(Frozen):
    """What is there of what was noted.

    Attributes:
        blocks: The blocks that are as they were noted, and need not be written again.
        rows: Replicas that differ in the arrays of these blocks.
        is_whole: Whether that is all that was noted.
    """

    blocks: tuple[Block, ...]
    rows: Mapping[_Row, ReplicaDrift]
    is_whole: bool

    def take(self, blocks: BlockTable, table: DriftTable) -> int:
        """Count the blocks as done and the replicas as found; return how many bytes that are."""
        for block in self.blocks:
            blocks.set_done(block)
        for row in self.rows.values():
            table.rows[row.tensor, row.state, row.ranks] = row
        return blocks.nbytes(self.blocks)

    def records(self, blocks: BlockTable) -> Iterator[Record]:
        """The records of a journal that says this and no more."""
        yield from drift_records(self.rows.values())
        yield from claim_records(self.blocks, blocks)


def read_back(
    journals: Sequence[Sequence[Record]],
    place: OutputFiles,
    output: Output,
    regions: Sequence[RegionPlan],
    *,
    part: Part | None = None,
    workers: int,
    rows: int,
    on_read: Callable[[int], None],
) -> ReadBack:
    """Find out which of the blocks that earlier processes noted are as they were noted.

    An array of which replicas drifted and that is not complete starts anew: what was found so far
    depends on how it was cut into steps.

    Args:
        journals: Records of one or several processes.
        place: The folder of the output.
        output: The files.
        regions: What is to be written.
        part: Where an array has to be complete; everywhere by default.
        workers: Threads.
        rows: Rows that each of them digests at a time.
        on_read: Called with the number of bytes that were read.

    Cost:
        Everything that was noted is read once: less than to read and write it again.
    """
    noted: dict[tuple[int, int], Block] = {}
    for records in journals:
        noted |= noted_blocks(records, regions)
    drift = noted_drift(journals)
    count = len(noted)
    paths = [os.path.join(place.path, file.name) for file in output.files]  # noqa: PTH118
    places = list(noted)
    extents = (_extent(block, regions[block.region], paths) for block in list(noted.values()))
    for damage in find_damage(extents, workers=workers, rows=rows, on_read=on_read):
        del noted[places[damage.position]]
    _leave_out_incomplete(noted, drift, regions, part)
    arrays = {(regions[region].tensor, regions[region].state) for region, _ in noted}
    kept = {key: row for key, row in drift.items() if key[:2] in arrays}
    return ReadBack(tuple(noted.values()), kept, len(noted) == count and kept == drift)


def noted_drift(journals: Iterable[Iterable[Record]]) -> dict[_Row, ReplicaDrift]:
    """What was noted of each array and pair of ranks: the last sum of each process, added up."""
    import msgspec  # noqa: PLC0415 - only where a run goes on

    total: dict[_Row, ReplicaDrift] = {}
    for records in journals:
        found: dict[_Row, ReplicaDrift] = {}
        for record in records:
            if "drift" in record:
                with suppress(msgspec.ValidationError):
                    row = msgspec.convert(record["drift"], ReplicaDrift)
                    found[row.tensor, row.state, row.ranks] = row
        for row in found.values():
            add_drift(total, row)
    return total


def noted_blocks(
    records: Iterable[Record], regions: Sequence[RegionPlan]
) -> dict[tuple[int, int], Block]:
    """Blocks that records name, by region and number, if the plan has such blocks."""
    return {(block.region, block.number): block for block in _noted(records, regions)}


def _noted(records: Iterable[Record], regions: Sequence[RegionPlan]) -> Iterator[Block]:
    """Blocks that the records name, if the plan has such blocks."""
    for record in records:
        match record:
            case {"region": int(region), "block": int(first), "digests": list(digests)}:
                if not 0 <= region < len(regions):
                    continue
                numbers = range(block_count(regions[region].nbytes))
                for number, digits in enumerate(digests, first):
                    if number in numbers and _DIGITS.fullmatch(str(digits)):
                        yield Block(region, number, int(digits, 16))
            case _:
                pass


def _leave_out_incomplete(
    noted: dict[tuple[int, int], Block],
    drift: Mapping[_Row, ReplicaDrift],
    regions: Sequence[RegionPlan],
    part: Part | None,
) -> None:
    """Take back the blocks of arrays that drifted and are not complete."""
    drifted = {key[:2] for key in drift}
    of_drifted = [
        (number, region)
        for number, region in enumerate(regions)
        if (region.tensor, region.state) in drifted
    ]
    incomplete = {
        (region.tensor, region.state)
        for number, region in of_drifted
        if any(
            (number, block) not in noted and (part is None or (number, block) in part)
            for block in range(block_count(region.nbytes))
        )
    }
    for number, region in of_drifted:
        if (region.tensor, region.state) in incomplete:
            for block in range(block_count(region.nbytes)):
                noted.pop((number, block), None)


def _extent(block: Block, region: RegionPlan, paths: Sequence[str]) -> Extent:
    base = block.number * BLOCK_NBYTES
    return Extent(
        path=paths[region.target_file],
        start_nbytes=region.target_start_nbytes + base,
        nbytes=block_nbytes(region.nbytes, block.number),
        base_nbytes=base,
        digest=block.digest,
    )
