"""What process 0 knows of the others: what they noted of their parts, and whether they live."""

from __future__ import annotations

import math
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from restride.executors.blocks import block_count, block_nbytes
from restride.executors.parts import Part
from restride.executors.resuming import noted_blocks, noted_drift
from restride.storage import companions
from restride.storage.companions import HELLO, JOURNAL, LOCK, WELCOME, Sign
from restride.storage.journal import JournalReader, read_journal
from restride.storage.locks import is_held
from restride.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from restride.executors.blocks import Block, BlockTable
    from restride.executors.events import ReplicaDrift
    from restride.executors.resuming import ReadBack
    from restride.storage.companions import Team
    from restride.storage.journal import Record

__all__ = ["Ledger", "Member"]

# A process changes the time of its lock every second.
_SILENT_SECONDS: Final = 10.0
# Another machine may see the lock free before it sees what was noted last.
_FREE_SECONDS: Final = 2.0
_BEFORE, _CLAIMED = 1, 2


class Ledger:
    """Which blocks are there, of all processes together.

    Args:
        table: Receives the digests of what others wrote.
        done: Blocks that were there before the team began.
    """

    def __init__(self, table: BlockTable, done: Iterable[tuple[int, int]]) -> None:
        self.table = table
        self.regions = table.regions
        counts = [block_count(region.nbytes) for region in self.regions]
        self._first = [0, *accumulate(counts)]
        self._marks = bytearray(self._first[-1])
        for block in done:
            self._marks[self._place(block)] = _BEFORE

    def left_nbytes(self, part: Part) -> int:
        """Bytes of a part that are not there."""
        return sum(
            self.nbytes(block)
            for block in part.blocks(self.regions)
            if not self._marks[self._place(block)]
        )

    def claim(self, block: Block) -> int:
        """Mark a block as there; return by how many bytes less is left."""
        place = self._place((block.region, block.number))
        if self._marks[place]:
            return 0
        self._marks[place] = _CLAIMED
        self.table.set_done(block)
        return self.nbytes((block.region, block.number))

    def take_back(self, part: Part) -> None:
        """Unmark what was claimed of a part."""
        for block in part.blocks(self.regions):
            if self._marks[self._place(block)] == _CLAIMED:
                self._marks[self._place(block)] = 0

    def nbytes(self, block: tuple[int, int]) -> int:
        """Size of a block."""
        return block_nbytes(self.regions[block[0]].nbytes, block[1])

    def _place(self, block: tuple[int, int]) -> int:
        return self._first[block[0]] + block[1]


class Member:
    """What process 0 knows of another one.

    Args:
        folder: Where they meet.
        team: Who writes which part.
        number: Its number.
        ledger: What is there of all parts.
        durable: Whether process 0 waits for the disk, and all others with it.

    Attributes:
        number: Its number.
        part: Its blocks.
        rows: Replicas that differ, as it noted them last.
        read_nbytes: What it read from the sources.
        resumed_nbytes: What it found of its part, and is as it was noted.
        total_nbytes: Bytes of its part, without what was there before.
        left_nbytes: Bytes of them that it did not note yet.
        has_joined: Whether it was answered.
        is_sound: Whether what it noted may be believed: it looked and finished, or process 0
            looked.
        is_missing: Whether it is not there, as far as that can be told.
        missing_since: Since when, by the clock of this process.
        failure: What it says of its end, if it said something.
        is_turned_away: Whether the next answer is that process 0 has ended.
    """

    def __init__(
        self, folder: Path, team: Team, number: int, ledger: Ledger, *, durable: bool = True
    ) -> None:
        self.number = number
        self.part = Part(*team.cuts[number : number + 2])
        self.rows: dict[tuple[str, str, tuple[int, int]], ReplicaDrift] = {}
        self.read_nbytes = self.resumed_nbytes = 0
        self.total_nbytes = self.left_nbytes = ledger.left_nbytes(self.part)
        self.has_joined = self.is_sound = False
        self.is_missing = True
        self.missing_since = time.monotonic()
        self.failure: Record | None = None
        self.is_turned_away = False
        self.journal_path = companions.file_of(folder, JOURNAL, number)
        self._ledger = ledger
        self._is_durable = durable
        self._folder = folder
        self._head = companions.head_of(team.run, number)
        self._lock = companions.file_of(folder, LOCK, number)
        self._sign = Sign(self._lock)
        self._was_held = self._has_finished = False
        self._free_since = math.inf
        self._word: object = None
        self._words: set[object] = set()
        self._reader = JournalReader(self.journal_path)
        self._is_ours: bool | None = None

    @property
    def claimed_nbytes(self) -> int:
        """Bytes of its part that it noted."""
        return self.total_nbytes - self.left_nbytes

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left, and it has said the last that it will say."""
        return not self.left_nbytes and (self._has_finished or self.is_missing)

    @property
    def is_done(self) -> bool:
        """Whether all of its part is there, and it needs the files no more."""
        if not self.total_nbytes and not self.has_joined:
            return True
        return self.is_complete and self.is_sound

    @property
    def failed_for_good(self) -> bool:
        """Whether it would fail again."""
        return self.failure is not None and self.failure.get("is_final") is True

    @property
    def words(self) -> str:
        """What is the matter with it, for a sentence that begins with its name."""
        if self.failure is not None:
            return f"failed: {self.failure.get('text')}"
        if not self.has_joined and not self._was_held:
            return "did not come"
        return (
            f"ended before its part was done, {format_size(self.left_nbytes)} of "
            f"{format_size(self.total_nbytes)} are left"
        )

    def look(self, team: Team, job: str) -> str:
        """See what is new; return what a user should know of it.

        Args:
            team: Who writes which part.
            job: Digest of what is written; who has another one is turned away.

        Raises:
            ExecutionError: A file cannot be read or written.
            OSError: A lock cannot be looked at.
        """
        self._read()
        was_missing = self.is_missing
        told = self._answer(team, job)
        held = is_held(self._lock)
        silent = self._sign.silent_seconds()
        self._was_held = self._was_held or held is True
        # A lock that was seen to be held is one that works between the two machines.
        if held is not False or not self._was_held:
            self._free_since = math.inf
        elif self._free_since == math.inf:
            self._free_since = time.monotonic()
        is_free = time.monotonic() - self._free_since >= _FREE_SECONDS
        is_gone = is_free or self.failure is not None or silent > _SILENT_SECONDS
        # Who was answered by an earlier process 0 holds its lock too, and may be at work.
        self.is_missing = not held and (not self.has_joined or is_gone or self._has_finished)
        if self.is_missing and not was_missing:
            self._read()  # what it noted at last
            self.missing_since = time.monotonic()
            if self.left_nbytes:
                told = self.words
        return told

    def believe_only(self, found: ReadBack) -> None:
        """What it noted was read back, and this is what there is of it."""
        self._forget()
        self._claim(found.blocks)
        self.rows = dict(found.rows)
        self.is_sound = not self.left_nbytes
        self.resumed_nbytes = self.claimed_nbytes

    def _forget(self) -> None:
        self.rows = {}
        self._ledger.take_back(self.part)
        self.left_nbytes = self.total_nbytes

    def _claim(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if (block.region, block.number) in self.part:
                self.left_nbytes -= self._ledger.claim(block)

    def _read(self) -> None:
        is_new, records = self._reader.read()
        if is_new:
            self._is_ours, self._has_finished, self.is_sound = None, False, False
            self._forget()
        if self._is_ours is None and records:
            self._is_ours = records[0] == self._head
        if not self._is_ours:
            return
        self._claim(noted_blocks(records, self._ledger.regions).values())
        self.rows |= noted_drift([records])
        for record in records:
            self._hear(record)

    def _hear(self, record: Record) -> None:
        """Hear how it ended; what it said to an earlier process 0 counts no more."""
        match record:
            case {"finished": {"word": word, "read_nbytes": int(read), "resumed_nbytes": int(old)}}:
                if word in self._words:
                    self.read_nbytes, self.resumed_nbytes = read, old
                    self._has_finished = self.is_sound = True
            case {"failed": {"word": word, **failure}}:
                if word == self._word:
                    self.failure = {str(key): value for key, value in failure.items()}
            case _:
                pass

    def _answer(self, team: Team, job: str) -> str:
        """Answer a hello that was not answered yet."""
        said = read_journal(companions.file_of(self._folder, HELLO, self.number))
        if not said or said[0].get("word") == self._word:
            return ""
        hello, word = said[0], said[0].get("word")
        welcome = companions.file_of(self._folder, WELCOME, self.number)
        if self.is_turned_away:
            companions.put_record(welcome, {"word": word, "ended": True})
            self._word, self.has_joined = word, True
            return ""
        if (hello.get("job"), hello.get("count")) != (job, team.count):
            companions.put_record(welcome, {"word": word, "count": team.count})
            self._word = word
            return "has other options or sees another source, and was turned away"
        self._word = word
        self._words.add(word)
        self.has_joined = True
        self.is_missing = self.is_sound = self._was_held = self._has_finished = False
        self.failure = None
        self._sign = Sign(self._lock)
        durable = self._is_durable
        companions.put_record(welcome, {"word": word, "run": team.run, "durable": durable})
        if hello.get("durable", durable) is durable:
            return ""
        if durable:
            return "was told not to wait for the disk (--no-sync), and does, as process 0 does"
        return "was told to wait for the disk, and does not, as process 0 does not (--no-sync)"
