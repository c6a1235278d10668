"""How a process that is not the first one gets at its part of an output: it asks, and waits.

See `restride.storage.companions` for the files. Nothing is made before process 0 has answered: it
alone decides whether what is there is gone on with, thrown away, or refused.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError, ExistsError, MissingProcessError, StoppedError
from restride.frozen import Frozen
from restride.storage import companions
from restride.storage._places import require_free
from restride.storage.companions import (
    HELLO,
    JOURNAL,
    LOCK,
    MEMBERS,
    STOP,
    WELCOME,
    Beat,
    Sign,
    members_locked,
)
from restride.storage.journal import read_journal
from restride.storage.locks import locked
from restride.storage.unfinished import Unfinished, partial_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike
    from threading import Event

    from restride.storage.companions import Team
    from restride.storage.journal import Record
    from restride.storage.unfinished import Purpose

__all__ = ["LOCK_SECONDS", "Joined", "joined_output"]

# A process that was just killed holds its lock for a moment, and process 0 looks at locks.
LOCK_SECONDS: Final = 10.0
# A process 0 that ends takes the folder with it, and one that is started again comes soon.
_GONE_SECONDS: Final = 5.0
_FIRST_SECONDS: Final = 0.02
_MOST_SECONDS: Final = 0.2


class Joined(Frozen):
    """The part of an output that this process has to write.

    Attributes:
        place: Where to write and note it. Its records are those of this process alone.
        team: Who writes which part.
        before: What was durable before the team began, as process 0 noted it.
        head: First record of the journal of this process.
        word: What this process said hello with; what it says of its end has it as well.
        number: Of this process.
    """

    place: Unfinished
    team: Team
    before: tuple[Record, ...]
    head: Record
    word: str
    number: int


@contextmanager
def joined_output(
    final: str | PathLike[str],
    purpose: Purpose,
    job: str,
    number: int,
    count: int,
    *,
    stop: Event,
    wait_seconds: float,
    force: bool = False,
    resume: bool = False,
    durable: bool = True,
) -> Iterator[Joined | None]:
    """Take part in writing an output that process 0 leads.

    Args:
        final: Where the output shall be.
        purpose: What it will be.
        job: Digest of that, which all processes have to share.
        number: Of this process, above 0.
        count: How many there are.
        stop: Ends the waiting; set where process 0 wants everybody to stop.
        wait_seconds: How long to wait for a sign of life of process 0.
        force: Whether process 0 may replace an output that is there.
        resume: Whether it goes on with what is there.
        durable: Whether this process was asked to wait for the disk. What process 0 does counts,
            which has to answer for the whole output; it tells of the difference.

    Yields:
        What to write; None where the output is finished.

    Raises:
        MissingProcessError: Process 0 gives no sign.
        ExistsError: Process 0 writes something else, or something is in the way.
        ExecutionError: Another process has that number, or the system cannot write.
        StoppedError: `stop` was set.
    """
    target = Path(os.path.realpath(final))
    folder = partial_folder(target)
    if not (resume or os.path.lexists(folder) or purpose.is_written(target)):
        require_free(target, force=force, inputs=())
    hello = {"count": count, "job": job, "durable": durable}
    asking = _Asking(folder, target, number, hello, stop)
    while True:
        answer = asking.ask(purpose, wait_seconds, is_final=not force)
        if answer is None:
            yield None
            return
        lock = companions.file_of(folder, LOCK, number)
        what = f"part {number} of {count} of {target}"
        with ExitStack() as stack:
            # When the locks are closed: until then process 0 may not have been able to.
            stack.callback(companions.remove_if_unused, folder)
            try:
                stack.enter_context(locked(lock, what=what, patience_seconds=LOCK_SECONDS))
                is_let_in = stack.enter_context(
                    members_locked(folder, what=what, patience_seconds=LOCK_SECONDS)
                )
            except FileNotFoundError:
                continue  # process 0 has ended meanwhile; another one may come
            if not is_let_in:
                continue
            joined = _enter(folder, target, purpose, answer, number)
            if joined is None:
                continue
            stack.callback(joined.place.close)
            with Beat(lock, also=lambda: _stop_if_asked(folder, number, stop)):
                yield joined
            return


def _stop_if_asked(folder: Path, number: int, stop: Event) -> None:
    """Stop where process 0 wants it, or where another one began anew in spite of this one.

    The latter can only happen on a file system without locks.
    """
    journal = companions.file_of(folder, JOURNAL, number)
    if os.path.lexists(folder / STOP) or not os.path.lexists(journal):
        stop.set()


class _Answer(Frozen):
    """What process 0 answered.

    Attributes:
        run: The team to be one of.
        word: What it was an answer to.
        durable: Whether everybody waits for the disk.
    """

    run: str
    word: str
    durable: bool


def _enter(
    folder: Path, target: Path, purpose: Purpose, answer: _Answer, number: int
) -> Joined | None:
    """Begin the part, or go on with it; None where another team has begun meanwhile."""
    records = read_journal(folder / JOURNAL)
    found = companions.last_team(records)
    if found is None or found[1].run != answer.run:
        return None
    difference = purpose.differs(records[0])
    if difference:
        raise ExistsError(f"process 0 writes something else: {difference}", where=str(target))
    place = Unfinished(folder, target, force=False, durable=answer.durable, number=number)
    head = companions.head_of(answer.run, number)
    own = read_journal(companions.file_of(folder, JOURNAL, number))
    if own and own[0] == head:
        place.resume(own)
    else:
        place.begin_part([head])
    return Joined(place, found[1], tuple(records[1 : found[0]]), head, answer.word, number)


class _Leader:
    """What a process sees of process 0 while it waits.

    Attributes:
        is_there: Whether there is the lock of an unfinished output.
        was_there: Whether there was one since this process began to look.
    """

    def __init__(self, folder: Path, wait_seconds: float) -> None:
        self.is_there = self.was_there = False
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._sign = Sign(folder / LOCK)

    def is_late(self) -> bool:
        """Whether there was no sign of it for too long."""
        # The lock is the last thing that goes: a folder without it is one that is left.
        self.is_there = os.path.lexists(self._folder / LOCK)
        self.was_there = self.was_there or self.is_there
        has_gone = self.was_there and not self.is_there
        limit = min(self._wait_seconds, _GONE_SECONDS) if has_gone else self._wait_seconds
        return self._sign.silent_seconds() > limit


class _Asking:
    """Says hello, and waits for the answer."""

    def __init__(self, folder: Path, target: Path, number: int, hello: Record, stop: Event) -> None:
        self._folder = folder
        self._target = target
        self._number = number
        self._hello = hello
        self._stop = stop

    def ask(self, purpose: Purpose, wait_seconds: float, *, is_final: bool) -> _Answer | None:
        """The run to take part in; None where the output is there already.

        Args:
            purpose: What the output will be.
            wait_seconds: How long to wait for a sign.
            is_final: Whether an output that is there is the one that is meant. If not, only one
                that appeared since, or that is still there at the end of the waiting.
        """
        word = companions.new_word()
        hello = {"word": word, **self._hello}
        answer_path = companions.file_of(self._folder, WELCOME, self._number)
        leader, pause = _Leader(self._folder, wait_seconds), _FIRST_SECONDS
        try:
            while not self._stop.is_set():
                self._say(hello)
                for answer in read_journal(answer_path)[:1]:
                    if answer.get("word") == word:
                        return self._understood(answer, word, purpose)
                is_late = leader.is_late()
                if (
                    not leader.is_there
                    and (is_final or leader.was_there or is_late)
                    and purpose.is_written(self._target)
                ):
                    return None
                if is_late:
                    raise MissingProcessError(
                        f"process 0 of {hello['count']} gave no sign for {wait_seconds:.0f} s",
                        missing=(0,),
                        where=str(self._target),
                    )
                time.sleep(pause)
                pause = min(_MOST_SECONDS, pause * 1.2)
        finally:
            self._leave()
        raise StoppedError("stopped")

    def _say(self, hello: Record) -> None:
        """Say hello, once there is somewhere to say it, and again where it was removed."""
        path = companions.file_of(self._folder, HELLO, self._number)
        if (self._folder / LOCK).is_file() and read_journal(path)[:1] != [hello]:
            with suppress(OSError, ExecutionError):  # the folder may go at any time
                companions.put_record(path, hello)

    def _leave(self) -> None:
        """Take back what was said; the folder goes as well if nobody else uses it."""
        kinds = [HELLO, WELCOME]
        if not any(os.path.lexists(self._folder / name) for name in (LOCK, JOURNAL)):
            kinds += [LOCK, JOURNAL]  # made while process 0 removed the folder
            with suppress(OSError):
                (self._folder / MEMBERS).unlink()
        for kind in kinds:
            with suppress(OSError):
                companions.file_of(self._folder, kind, self._number).unlink()
        companions.remove_if_unused(self._folder)

    def _understood(self, answer: Record, word: str, purpose: Purpose) -> _Answer:
        run = answer.get("run")
        if isinstance(run, str):
            return _Answer(run, word, answer.get("durable") is not False)
        if answer.get("ended"):
            raise ExecutionError("process 0 has ended with an error", where=str(self._target))
        records: Sequence[Record] = read_journal(self._folder / JOURNAL)
        difference = purpose.differs(records[0]) if records else ""
        if not difference:
            counts = answer.get("count"), self._hello["count"]
            difference = "it is one of {} processes, this one of {}".format(*counts)
        raise ExistsError(
            f"process 0 writes something else: {difference}",
            where=str(self._target),
            remedy="start all processes with the same options",
        )
