"""What process 0 does for the others: it answers them, sees what they note, and misses them.

Everything goes through files beside the output (`restride.storage.companions`). A thread answers
those that say hello, reads what they note, and looks whether they live. A process that dies is told
of at once; it may be started again meanwhile, and goes on from its own journal. Process 0 gives up
when nobody else works and one that is missing did not come back for a while.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Condition
from typing import TYPE_CHECKING, Final, Protocol, Self

from restride.errors import ExecutionError, MissingProcessError, RestrideError, StoppedError
from restride.executors.events import Notice
from restride.executors.members import Member
from restride.frozen import Frozen
from restride.storage import companions
from restride.storage.background import Background
from restride.storage.companions import HELLO, LOCK, STOP, WELCOME, Beat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from restride.executors.members import Ledger
    from restride.executors.progress import Continued
    from restride.executors.resuming import ReadBack
    from restride.executors.stopping import StopsWith
    from restride.storage.companions import Team
    from restride.storage.unfinished import Unfinished

__all__ = ["WAIT_SECONDS", "Host", "Lead", "Started"]

WAIT_SECONDS: Final = 120.0
_FIRST_SECONDS: Final = 0.02
_MOST_SECONDS: Final = 0.25
_SECONDS_TO_STOP: Final = 15.0
_SECONDS_TO_COME: Final = 2.0
_SECONDS_PER_MEMBER: Final = 0.01


class Started(Protocol):
    """What an executor returns for a part: a future."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """What it failed with."""

    def result(self) -> object:
        """What it returned."""

    def cancel(self) -> bool:
        """Do not start it, if it was not started."""


class Lead(Frozen):
    """That this process leads others.

    Attributes:
        count: Number of processes, with this one.
        job: Digest of what is written; the others must have the same.
        wait_seconds: How long to wait for a process that is not there.
        start: Starts the others, by their numbers from 1; None where they come by themselves. Only
            without it, this process has a part of its own.
    """

    count: int
    job: str
    wait_seconds: float
    start: Callable[[], Mapping[int, Started]] | None = None


class Host:
    """Leads other processes, in a ``with`` block; nobody is answered before `open`.

    Args:
        place: The output.
        lead: What to lead.
        progress: Is told what others do.
        stop: Set where it makes no sense to go on; `wait` says why.
    """

    def __init__(self, place: Unfinished, lead: Lead, progress: Continued, stop: StopsWith) -> None:
        self._place = place
        self._lead = lead
        self._progress = progress
        self._stop = stop
        self._team: Team | None = None
        self._members: list[Member] = []
        self._tasks: Mapping[int, Started] = {}
        self._changed = Condition()
        self._is_ending = False
        self._problem: BaseException | None = None
        self._told_nbytes = 0
        self._opened = time.monotonic()
        self._is_late_told = False
        # On its own: an observer that keeps this process waiting does not make it look dead.
        self._beat = Beat(place.folder / LOCK)
        self._looking: Background | None = None

    def __enter__(self) -> Self:
        for path in list(self._place.folder.iterdir()):
            # Whoever lives says it again.
            if path.name.partition(".")[0] in {HELLO, WELCOME, STOP}:
                path.unlink(missing_ok=True)
        self._beat.__enter__()
        self._looking = Background("restride-host", self._keep_looking)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._looking is not None:
            self._looking.wait()
        self._beat.__exit__()

    @property
    def members(self) -> Sequence[Member]:
        """The other processes, by their numbers."""
        return self._members

    def open(self, team: Team, ledger: Ledger) -> None:
        """Let the others begin: the journal names the team, and all files are there.

        Raises:
            ExecutionError: The executor takes no parts.
        """
        place = self._place
        members = [
            Member(place.folder, team, number, ledger, durable=place.is_durable)
            for number in range(1, team.count)
        ]
        with self._changed:
            self._members, self._team = members, team
            self._opened = time.monotonic()
        if self._lead.start is not None:
            try:
                self._tasks = self._lead.start()
            except RestrideError:
                raise
            except Exception as error:  # it was shut down, its processes died, or it is foreign
                told = f"{type(error).__name__}: {error}"
                raise ExecutionError(f"the executor takes no more parts ({told})") from error

    def require_sound(self) -> None:
        """Say why the run was stopped, if it was because of another process.

        Raises:
            RestrideError: A process failed, and would fail again.
            ExecutionError: What the others do cannot be seen.
            Exception: The observer raised it where it was told of that.
        """
        with self._changed:
            if self._problem is not None:
                raise self._problem
            for member in self._failed():
                raise _failure_of(member, self._named([member]))

    def wait(self, look_into: Callable[[Member], ReadBack]) -> None:
        """Return when all parts are there.

        Args:
            look_into: Reads back what a process noted that has done its part and did not say so:
                it had done it before this process began, or died at the very end.

        Raises:
            MissingProcessError: A process is missing, and nobody else works.
            RestrideError: A process failed, and would fail again.
            StoppedError: The run was asked to stop.
        """
        while True:
            self.require_sound()
            with self._changed:
                self._require_nobody_lost()  # which looks at those whose task is over
                if all(member.is_done for member in self._members):
                    self._team = None  # who comes now finds the output
                    return
                unsure = [m for m in self._members if m.is_complete and not m.is_sound]
                waited_for = self._waited_for()  # here: the next moment all may be done
            if unsure and not self._tasks:
                found = look_into(unsure[0])
                with self._changed:
                    if unsure[0].is_complete:  # if it has come meanwhile, it looks itself
                        unsure[0].believe_only(found)
                continue
            if self._stop.is_set():
                raise StoppedError("stopped")
            self._progress.skip(0, waited_for)
            with self._changed:
                self._changed.wait(_MOST_SECONDS)

    def dismiss(self) -> None:
        """Ask the others to stop, and wait a while until they did."""
        for task in self._tasks.values():
            task.cancel()
        with suppress(OSError, ExecutionError):
            companions.put_record(self._place.folder / STOP, {})
        with self._changed:
            for member in self._members:
                member.is_turned_away = True
        begun = time.monotonic()
        while time.monotonic() < begun + _SECONDS_TO_STOP and not self._are_idle():
            time.sleep(_FIRST_SECONDS)
        # Those that are just about to come would wait for a long time.
        while time.monotonic() < begun + _SECONDS_TO_COME and not self._tasks:
            with self._changed:
                if all(member.has_joined for member in self._members):
                    return
            time.sleep(_FIRST_SECONDS)

    def _are_idle(self) -> bool:
        tasks = self._tasks.values()
        return all(task.done() for task in tasks) and not companions.anybody_in(self._place.folder)

    def _keep_looking(self) -> None:
        """What the thread does until the end."""
        pause = _FIRST_SECONDS
        while True:
            with self._changed:
                if self._is_ending:
                    return
                try:
                    is_news = self._look()
                except BaseException as error:
                    self._problem = error  # raised by `require_sound`
                    self._stop.set()
                    self._changed.notify_all()
                    raise
                most = max(_MOST_SECONDS, _SECONDS_PER_MEMBER * len(self._members))
                pause = _FIRST_SECONDS if is_news else min(most, pause * 1.2)
                self._changed.wait(pause)

    def _look(self) -> bool:
        """See what is new of everybody; return whether there is anything."""
        if self._team is None:
            return False
        before = [(m.claimed_nbytes, m.has_joined, m.is_done) for m in self._members]
        for member in self._members:
            told = member.look(self._team, self._lead.job)
            if told and not (self._tasks and member.failure):
                self._say(f"{self._named([member])} {told}")
        after = [(m.claimed_nbytes, m.has_joined, m.is_done) for m in self._members]
        nbytes = sum(member.claimed_nbytes for member in self._members)
        self._place.done_elsewhere_nbytes = nbytes
        if nbytes:
            self._place.keeps = True
        if nbytes > self._told_nbytes:
            self._progress.skip(nbytes - self._told_nbytes, "what other processes write")
            self._told_nbytes = nbytes
        late = [m for m in self._members if m.is_missing and not (m.has_joined or m.is_complete)]
        waited = time.monotonic() - self._opened
        if late and waited > self._lead.wait_seconds and not self._is_late_told:
            self._is_late_told = True
            self._say(f"{self._named(late)} did not come within {waited:.0f} s")
        if self._failed():
            self._stop.set()
        if before != after:
            self._changed.notify_all()
        return before != after

    def _failed(self) -> list[Member]:
        """Processes that would fail again. Of a task the executor has the error itself."""
        if self._lead.start is not None:
            return []
        return [member for member in self._members if member.failed_for_good]

    def _say(self, message: str) -> None:
        self._progress.on_notice(Notice(message))

    def _require_nobody_lost(self) -> None:
        """Raise where what is missing will not come any more."""
        for number, task in self._tasks.items():
            if task.done() and not self._members[number - 1].is_done:
                self._raise_error_of(task, self._members[number - 1])
        if not all(member.is_missing for member in self._members):
            return
        missing = [member for member in self._members if not member.is_done]
        if not self._tasks:  # what is complete and not sure is read back, and nobody has to come
            missing = [member for member in missing if not member.is_complete]
        # A part that an executor has not begun may have waited for any other one to end.
        waited_for = self._members if self._tasks else missing
        since = max((member.missing_since for member in waited_for), default=0.0)
        waited = time.monotonic() - max(since, self._opened)
        if missing and waited > self._lead.wait_seconds:
            if self._look():  # what was seen may be as old as that: this process may have slept
                return
            raise self._lost(missing)

    def _raise_error_of(self, task: Started, member: Member) -> None:
        from concurrent.futures import CancelledError  # noqa: PLC0415 - takes long

        try:
            error = task.exception()
        except CancelledError as cancelled:
            error = cancelled
        if isinstance(error, RestrideError):
            raise error
        if error is not None:
            raise MissingProcessError(
                f"part {member.number} failed in the executor ({type(error).__name__}: {error})",
                missing=(member.number,),
                where=str(self._place.folder),
            ) from error
        if self._team is not None:
            member.look(self._team, self._lead.job)
        if not member.is_done:
            raise self._lost([member])

    def _lost(self, missing: Sequence[Member]) -> MissingProcessError:
        first = missing[0]
        words = first.words if len(missing) == 1 else "are missing"
        task = self._tasks.get(first.number)
        if task is not None and task.done() and not first.has_joined:
            words = "ended in the executor before it began"
        elif all(not member.has_joined for member in missing):
            words = f"did not come within {self._lead.wait_seconds:.0f} s"
        return MissingProcessError(
            f"{self._named(missing)} {words}",
            missing=tuple(member.number for member in missing),
            where=str(self._place.folder),
        )

    def _named(self, members: Sequence[Member]) -> str:
        one, several, count = "process", "processes", self._lead.count
        if self._lead.start is not None:
            one, several, count = "part", "parts", self._lead.count - 1
        numbers = [member.number for member in members]
        name = f"{one} {numbers[0]}"
        if len(numbers) > 1:
            name = f"{several} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:  # noqa: PLR2004
            name = f"{several} {numbers[0]} to {numbers[-1]}"
        return f"{name} of {count}"

    def _waited_for(self) -> str:
        return f"(waiting for {self._named([m for m in self._members if not m.is_done])})"


def _failure_of(member: Member, name: str) -> RestrideError:
    failure = member.failure or {}
    where, problem, remedy = (str(failure.get(key, "")) for key in ("where", "problem", "remedy"))
    error = RestrideError(problem, where=where, remedy=remedy)
    return error.located(name)
