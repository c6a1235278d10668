"""Write the regions of a plan so that another process can go on: blocks, synced, then noted.

The journal of an unfinished output has a first record that says what is written, and then

    {"region": 3, "block": 0, "digests": ["..."], "nbytes": 4194304}    durable blocks of a region
    {"drift": {"tensor": ..., ...}}            replicas that differ, summed up as of then

A block is noted when its bytes are durable: a thread of its own syncs the files that blocks were
finished in, in batches, while the workers go on. Without a sync the thread has the system begin to
write them, so that the workers need not wait for the disk so soon.
"""

from __future__ import annotations

import time
from itertools import chain, groupby, islice
from threading import Condition, Lock
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import asdict

from restride.executors.blocks import BLOCK_NBYTES
from restride.storage.background import Background
from restride.storage.machine import available_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from restride.checkpoint.output import Output
    from restride.executors.blocks import Block, BlockPart, BlockTable
    from restride.executors.drift import DriftTable
    from restride.executors.events import ReplicaDrift
    from restride.storage.journal import Record
    from restride.storage.ranges import Lease
    from restride.storage.unfinished import Unfinished

__all__ = [
    "MOST_WAITING",
    "RECORDS_AT_ONE_TIME",
    "SYNC_NBYTES",
    "JournaledWriter",
    "claim_records",
    "drift_records",
]

# What a kill may cost: so many bytes are written again, or what was written in so many seconds.
SYNC_NBYTES: Final = 256 << 20
_SYNC_SECONDS: Final = 5.0
MOST_WAITING: Final = 1 << 14
"""Blocks that may wait to be noted; workers wait then. Half as many are noted at one time."""
RECORDS_AT_ONE_TIME: Final = 1024
"""Records of them that are made and written at one time."""
# A worker that waits for room looks whether the thread that makes it is still there.
_LOOKED_AFTER_SECONDS: Final = 0.1
# Without a sync, so many bytes are handed to the disk at one time.
_STARTED_NBYTES: Final = 64 << 20
# Less is not worth a call, and so many small files are not opened again for it.
_LEAST_STARTED_NBYTES: Final = 1 << 20
# The disk does not hold up so many bytes at the end: most systems let them wait in any case, and a
# call may take a tenth of a second where the disk is busy.
_UNSTARTED_NBYTES: Final = 512 << 20
# Nor an output that may wait as a whole: Linux lets a seventh of the memory that is available. Of a
# larger one the disk is told from the start.
_WAITING_SHARE: Final = 8


class JournaledWriter:
    """Target files by the number that the output gives them. Used in a ``with`` block.

    The end of the block, by an error or not, syncs and notes what is done.

    Args:
        place: Where to write, and the journal.
        output: The files.
        blocks: What is done already; it is kept up to date.
        table: Replicas that differed so far, which are noted with the blocks.
        require_unchanged: Raises where a source file is not what it was; what was read of it may
            be anything then, and is not noted.
        sync_nbytes: Bytes after which blocks are synced and noted.
    """

    def __init__(
        self,
        place: Unfinished,
        output: Output,
        blocks: BlockTable,
        table: DriftTable,
        require_unchanged: Callable[[], None],
        *,
        sync_nbytes: int = SYNC_NBYTES,
    ) -> None:
        self._place = place
        self._names = [file.name for file in output.files]
        self._blocks = blocks
        self._table = table
        self._require_unchanged = require_unchanged
        self._noted = dict(table.rows)
        self._is_durable = place.files.is_durable
        self._sync_nbytes = sync_nbytes
        self._left_nbytes = blocks.left_nbytes()
        waiting = max(2 * _UNSTARTED_NBYTES, available_nbytes() // _WAITING_SHARE)
        starts = not self._is_durable and self._left_nbytes > waiting
        self._starting_nbytes = _UNSTARTED_NBYTES if starts else self._left_nbytes
        self._waking_nbytes = min(sync_nbytes, _STARTED_NBYTES) if starts else sync_nbytes
        self._done: list[Block] = []
        self._done_nbytes = 0
        lock = Lock()
        self._changed = Condition(lock)
        self._has_room = Condition(lock)
        self._is_ending = False
        self._syncing: Background | None = None

    def __enter__(self) -> Self:
        self._syncing = Background("restride-sync", self._keep_durable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note what is done; an error of that is raised unless there is one already."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._syncing is not None:
            self._syncing.wait()
            if error is None:
                self._syncing.require_success()

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Write bytes into a target file, and count them. Any thread may call it."""
        self._require_syncing()
        self._place.files.write_exact(self._names[file], start_nbytes, buffer)
        self._note(self._blocks.add(file, start_nbytes, buffer))

    def hold(self, file: int) -> Lease | None:
        """Keep a target file open for somebody who writes into it himself, as `FilePool.hold` does.

        He says so with `count`.
        """
        self._require_syncing()
        return self._place.files.hold(self._names[file])

    def parts(self, file: int, start_nbytes: int, nbytes: int) -> list[BlockPart]:
        """What is digested apart of some bytes of a target file."""
        return self._blocks.parts(file, start_nbytes, nbytes)

    def count(self, file: int, parts: Iterable[BlockPart], digests: Iterable[int]) -> None:
        """Count parts of a target file that were written, with their digests."""
        self._place.files.set_written(self._names[file])
        self._note(self._blocks.count(parts, digests))

    def _require_syncing(self) -> None:
        """Wait until there is room for more blocks that wait; raise what keeps them from it."""
        syncing = self._syncing
        if syncing is None:
            return
        while not syncing.is_ended:
            with self._changed:
                if len(self._done) < MOST_WAITING:
                    return
                self._changed.notify()
                self._has_room.wait(_LOOKED_AFTER_SECONDS)
        syncing.require_success()  # it failed, as nobody asked it to end

    def _note(self, done: Sequence[Block]) -> None:
        """Hand blocks that are done to the thread that syncs."""
        if done:
            with self._changed:
                nbytes = self._blocks.nbytes(done)
                self._done += done
                self._done_nbytes += nbytes
                self._left_nbytes -= nbytes
                # Waking a thread for every block takes longer than writing it.
                if self._is_much():
                    self._changed.notify()

    def _keep_durable(self) -> None:
        """What the thread does until the end."""
        while self._note_batch():
            pass

    def _note_batch(self) -> bool:
        """Wait until there is enough to note, and note it; False at the end."""
        end = time.monotonic() + _SYNC_SECONDS
        batch: list[Block] = []
        is_enough = is_ending = False
        while not (is_enough or is_ending):
            with self._changed:
                is_late = not self._changed.wait_for(self._is_woken, end - time.monotonic())
                is_ending, done = self._is_ending, self._done
                self._done, self._done_nbytes = [], 0
                self._has_room.notify_all()
            self._start_writing(done)
            batch += done
            is_enough = (
                is_late
                or len(batch) >= MOST_WAITING // 2
                or self._blocks.nbytes(batch) >= self._sync_nbytes
            )
        if batch:
            files = {self._blocks.regions[block.region].target_file for block in batch}
            self._place.files.sync_files(self._names[file] for file in sorted(files))
            self._place.files.sync_folders()
            self._require_unchanged()
            records = chain(self._drift_records(), claim_records(batch, self._blocks))
            while some := list(islice(records, RECORDS_AT_ONE_TIME)):
                self._place.note(some)
            self._place.keeps = True
        return not is_ending

    def _is_woken(self) -> bool:
        return self._is_ending or self._is_much()

    def _is_much(self) -> bool:
        return self._done_nbytes >= self._waking_nbytes or len(self._done) >= MOST_WAITING // 2

    def _start_writing(self, blocks: Iterable[Block]) -> None:
        """Without a sync, let the disk begin early; nobody waits for it."""
        for block in blocks:
            if self._is_ending or self._left_nbytes <= self._starting_nbytes:
                return
            region = self._blocks.regions[block.region]
            start = region.target_start_nbytes + block.number * BLOCK_NBYTES
            nbytes = self._blocks.nbytes([block])
            if nbytes >= _LEAST_STARTED_NBYTES:
                self._place.files.start_writing(self._names[region.target_file], start, nbytes)

    def _drift_records(self) -> Iterator[Record]:
        rows = dict(self._table.rows)
        yield from drift_records(row for key, row in rows.items() if self._noted.get(key) != row)
        self._noted = rows


def drift_records(rows: Iterable[ReplicaDrift]) -> Iterator[Record]:
    """Records that say what replicas differ."""
    for row in rows:
        yield {"drift": asdict(row)}


def claim_records(blocks: Sequence[Block], table: BlockTable) -> Iterator[Record]:
    """Records that say which blocks are durable: one for each run of blocks of a region."""
    ordered = sorted(blocks, key=lambda block: (block.region, block.number))
    places = ((block.region, block.number - place) for place, block in enumerate(ordered))
    for (region, _), run in groupby(zip(places, ordered, strict=True), key=lambda pair: pair[0]):
        found = [block for _, block in run]
        yield {
            "region": region,
            "block": found[0].number,
            "digests": [f"{block.digest:032x}" for block in found],
            "nbytes": table.nbytes(found),
        }
