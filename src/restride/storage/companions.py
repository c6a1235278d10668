"""What several processes that write one output leave for each other beside it.

The folder of an unfinished output (see `restride.storage.unfinished`) is all that they share:
there is no network code. Process 0 leads, and has the lock and the journal. For each other one, by
its number ``N``, there are

    hello.N      who wants to be process N: a word that nobody used before, and its job
    welcome.N    what process 0 answers to that word
    lock.N       held by process N while it writes
    journal.N    what of its part is durable, in the form of the journal
    members      held by all of them at once while they write, and by process 0 alone while it
                 deals out anew: one lock, for a process can hold only so many files open
    stop         made by process 0 where nobody shall go on

The word makes sure that both live now: files that an earlier run left say nothing. A process
writes only after the answer, and nobody throws away what it writes while it holds its lock. Lives
are also told by the times of the locks, which their holders change all the time, as not every file
system has locks that work between machines.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec.structs import asdict

from restride.errors import ExecutionError
from restride.frozen import Frozen
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import holder_of, is_held, locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from restride.storage.journal import Record

__all__ = [
    "HELLO",
    "JOURNAL",
    "LOCK",
    "MEMBERS",
    "STOP",
    "WELCOME",
    "Beat",
    "Sign",
    "Team",
    "anybody_in",
    "beat",
    "file_of",
    "head_of",
    "is_of_companions",
    "journals_of",
    "last_team",
    "members_locked",
    "new_word",
    "put_record",
    "remove_all",
    "remove_if_unused",
    "without_others",
]

LOCK: Final = "lock"
MEMBERS: Final = "members"
JOURNAL: Final = "journal"
HELLO: Final = "hello"
WELCOME: Final = "welcome"
STOP: Final = "stop"

_TEAM: Final = "team"
_NEW: Final = ".new"
_NAMES: Final = re.compile(
    r"(stop|members|(lock|journal|hello|welcome)\.[1-9]\d{0,8})(\.new)?", re.ASCII
)
_SECONDS_BETWEEN_BEATS: Final = 1.0
_MOST_SECONDS_BETWEEN_LOOKS: Final = 10.0


class Team(Frozen):
    """Who writes which part: the record of the journal from which on others may write.

    Attributes:
        run: A word that no other team has.
        cuts: Where the parts begin and end, as (region, block); process N has what lies between
            the cuts N and N + 1.
        is_led_only: Whether process 0 has no part, as where the others were started by it.
    """

    run: str
    cuts: tuple[tuple[int, int], ...]
    is_led_only: bool = False

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.cuts) - 1

    @property
    def record(self) -> Record:
        """The team as a record."""
        return {_TEAM: asdict(self)}


def last_team(records: Sequence[Record]) -> tuple[int, Team] | None:
    """The team that the records of a journal name last, and the place of that record."""
    for place in range(len(records) - 1, -1, -1):
        if _TEAM in records[place]:
            with suppress(msgspec.ValidationError):
                team = msgspec.convert(records[place][_TEAM], Team)
                if team.count > 0 and list(team.cuts) == sorted(team.cuts):
                    return place, team
    return None


def new_word() -> str:
    """A word that nobody used before."""
    return os.urandom(8).hex()


def file_of(folder: Path, kind: str, number: int) -> Path:
    """The file of that kind of one process."""
    return folder / f"{kind}.{number}"


def head_of(run: str, number: int) -> Record:
    """First record of the journal of a process of a team."""
    return {"run": run, "process": number}


def is_of_companions(name: str) -> bool:
    """Whether a file of that name is one of those of other processes.

    Examples:
        >>> [name for name in ("lock", "lock.12", "stop", "hello.0", "x") if is_of_companions(name)]
        ['lock.12', 'stop']
    """
    return _NAMES.fullmatch(name) is not None


def journals_of(folder: Path, team: Team) -> list[list[dict[str, object]]]:
    """Records of the journals that the other processes of a team left, without the first ones.

    Raises:
        ExecutionError: The system cannot read them.
    """
    found = []
    for number in range(1, team.count):
        records = read_journal(file_of(folder, JOURNAL, number))
        if records and records[0] == head_of(team.run, number):
            found.append(records[1:])
    return found


def put_record(path: Path, record: Record) -> None:
    """Put a file with one record in the place of one that may be there, at once.

    Raises:
        ExecutionError: The system cannot write it.
        OSError: The folder is not there any more.
    """
    fresh = path.with_name(path.name + _NEW)
    fresh.unlink(missing_ok=True)
    journal = Journal(fresh, durable=False)
    try:
        journal.append([record])
    finally:
        journal.close()
    fresh.rename(path)


def anybody_in(folder: Path) -> bool:
    """Whether a process other than the first one is writing, as far as that can be told."""
    with suppress(OSError):
        names = [entry.name for entry in folder.iterdir()]
        return any(is_held(folder / name) for name in names if name.startswith(f"{LOCK}."))
    return False


@contextmanager
def members_locked(folder: Path, *, what: str, patience_seconds: float) -> Iterator[bool]:
    """Hold what says that a process other than the first one writes, together with others.

    Args:
        folder: The folder.
        what: What the process writes, for errors.
        patience_seconds: How long to wait for a process 0 that keeps everybody out.

    Yields:
        Whether it is held; if not, a process 0 is about to deal out anew.

    Raises:
        FileNotFoundError: The folder is not there any more.
        OSError: The system cannot open the file.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(
                locked(folder / MEMBERS, what=what, patience_seconds=patience_seconds, shared=True)
            )
        except ExecutionError:
            yield False
        else:
            yield True


@contextmanager
def without_others(folder: Path, team: Team | None, *, what: str) -> Iterator[None]:
    """Keep the other processes of an earlier team out while its journal is replaced.

    Whoever has looked into that journal before holds the lock that is taken here, and whoever takes
    it later finds the new journal. At the end, what they noted is removed.

    Args:
        folder: The folder.
        team: The team that the journal names.
        what: What is protected, for the error.

    Raises:
        ExecutionError: One of them is still writing.
        OSError: The system cannot open a lock.

    Cost:
        One open file, for any number of processes.
    """
    path = folder / MEMBERS
    with ExitStack() as stack:
        if team or os.path.lexists(path):
            try:
                stack.enter_context(locked(path, what=what))
            except ExecutionError as error:
                raise ExecutionError(
                    f"{_somebody_in(folder, team)} is writing it",
                    where=error.where,
                    remedy=error.remedy,
                ) from None
        yield
        for path in folder.glob(f"{JOURNAL}.*"):
            if is_of_companions(path.name):
                path.unlink(missing_ok=True)


def _somebody_in(folder: Path, team: Team | None) -> str:
    """Who of a team is writing, for an error."""
    for number in range(1, team.count if team else 1):
        with suppress(OSError):
            if holder := holder_of(file_of(folder, LOCK, number)):
                return holder
    return "another process"


def remove_all(folder: Path) -> None:
    """Remove the files of other processes.

    Raises:
        OSError: The system cannot do it.
    """
    for path in list(folder.iterdir()):
        if is_of_companions(path.name):
            path.unlink(missing_ok=True)


def remove_if_unused(folder: Path) -> None:
    """Remove the folder if it is empty: whoever uses it has a lock in it, or makes it again."""
    with suppress(OSError):
        folder.rmdir()


class Beat:
    """Shows that this process lives: changes the time of a file now and then, in a ``with`` block.

    Args:
        path: The file. It may be missing.
        also: Called after each time, from the same thread; must not raise.
    """

    def __init__(self, path: Path, also: Callable[[], None] | None = None) -> None:
        self._path = path
        self._also = also
        self._end = Event()
        self._thread = Thread(target=self._beat, name="restride-beat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_BEATS):
            beat(self._path)
            if self._also is not None:
                self._also()


def beat(path: Path) -> None:
    """Change the time of a file, if it is there."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)


class Sign:
    """Tells whether a file changes: its holder lives then, whatever time its clock has.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[int, int] | None = None
        self._looked = time.monotonic()
        self._silent_seconds = 0.0

    def silent_seconds(self) -> float:
        """How long the file has been what it is, as far as this process looked.

        A long time between two looks was not the file's: this process was stopped, or its whole
        machine, and may have been the only one to hear nothing.
        """
        found = None
        with suppress(OSError):
            # Opening it is what makes network file systems ask for its time anew.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            found = status.st_ino, status.st_mtime_ns
        now = time.monotonic()
        self._silent_seconds += min(now - self._looked, _MOST_SECONDS_BETWEEN_LOOKS)
        self._looked = now
        if found != self._last:
            self._last, self._silent_seconds = found, 0.0
        return self._silent_seconds
