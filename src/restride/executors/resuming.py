"""Take up what an earlier process left of an output: what it noted, if the bytes are there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from restride.executors.blocks import BLOCK_NBYTES, Block, BlockTable, block_count, block_nbytes
from restride.executors.events import ReplicaDrift
from restride.executors.journaled import claim_records
from restride.executors.verifying import Extent, find_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.output import Output
    from restride.executors.drift import DriftTable
    from restride.planning.plan import RegionPlan
    from restride.storage.journal import Record
    from restride.storage.unfinished import Unfinished

__all__ = ["noted_drift", "take_up"]

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")


def take_up(
    place: Unfinished,
    first: Record,
    output: Output,
    blocks: BlockTable,
    table: DriftTable,
    *,
    workers: int,
    rows: int,
    on_read: Callable[[int], None],
) -> int:
    """Mark the blocks that an earlier process noted as done, after reading them back.

    An array of which replicas drifted and that is not complete starts anew: what was found so far
    depends on how it was cut into steps.

    Args:
        place: The output, with the records.
        first: First record of the journal.
        output: The files.
        blocks: Receives what is done.
        table: Receives the drift of the arrays that are done.
        workers: Threads.
        rows: Rows that each of them digests at a time.
        on_read: Called with the number of bytes that were read.

    Returns:
        Bytes that need not be written again.

    Raises:
        ExecutionError: The journal cannot be written.

    Cost:
        Everything that was noted is read once: less than to read and write it again.
    """
    noted = {(block.region, block.number): block for block in _noted(place.records, blocks.regions)}
    drift = noted_drift(place.records)
    count = len(noted)
    paths = [os.path.join(place.files.path, file.name) for file in output.files]  # noqa: PTH118
    places = list(noted)
    extents = (
        _extent(block, blocks.regions[block.region], paths) for block in list(noted.values())
    )
    for damage in find_damage(extents, workers=workers, rows=rows, on_read=on_read):
        del noted[places[damage.position]]
    _leave_out_incomplete(noted, drift, blocks.regions)
    arrays = set()
    for block in noted.values():
        blocks.set_done(block)
        arrays.add((blocks.regions[block.region].tensor, blocks.regions[block.region].state))
    table.rows.update({key: row for key, row in drift.items() if key[:2] in arrays})
    if len(noted) != count:
        claims = claim_records(list(noted.values()), blocks)
        kept = (record for record in place.records if "drift" in record)
        place.begin([first, *kept, *claims], keeps=True)
    return blocks.nbytes(noted.values())


def noted_drift(records: Iterable[Record]) -> dict[tuple[str, str, tuple[int, int]], ReplicaDrift]:
    """The last sum that was noted of each array and pair of ranks."""
    found = {}
    for record in records:
        if "drift" in record:
            with suppress(msgspec.ValidationError):
                row = msgspec.convert(record["drift"], ReplicaDrift)
                found[row.tensor, row.state, row.ranks] = row
    return found


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
    drift: Mapping[tuple[str, str, tuple[int, int]], ReplicaDrift],
    regions: Sequence[RegionPlan],
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
        if any((number, block) not in noted for block in range(block_count(region.nbytes)))
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
