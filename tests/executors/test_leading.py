"""Process 0 waits for the others, whatever they do while it looks elsewhere."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from restride.errors import ExecutionError, MissingProcessError, RestrideError, StoppedError
from restride.executors import leading
from restride.executors.leading import Host, Lead
from restride.executors.stopping import StopsWith
from restride.storage import companions
from restride.storage.companions import Team
from restride.storage.locks import locked

WAIT = 30.0


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr(
        leading, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    )
    return now


class Other:
    """What `Member` says of a process."""

    def __init__(self, number, **known):
        self.number = number
        self.is_done = self.is_complete = self.has_joined = self.failed_for_good = False
        self.is_sound = self.is_missing = True
        self.is_turned_away = False
        self.missing_since = 0.0
        self.claimed_nbytes = 0
        self.words = "ended before its part was done"
        self.failure = None
        self.looks = []
        self.__dict__.update(known)

    def look(self, team, job):
        assert (team, job) == ("team", "job")
        found = self.looks.pop(0) if self.looks else {}
        if isinstance(found, BaseException):
            raise found
        told = found.pop("told", "")
        self.__dict__.update(found)
        return told


class Told:
    def __init__(self):
        self.skipped = []
        self.notices = []

    def skip(self, nbytes, text):
        self.skipped.append((nbytes, text))

    def on_notice(self, event):
        self.notices.append(event.message)


@pytest.fixture
def host_of(tmp_path, clock):  # noqa: ARG001 - it starts with this clock
    """A host of some processes; its thread does not run."""

    def make(*others, start=None, tasks=None):
        host = Host(
            SimpleNamespace(folder=tmp_path, is_durable=True, done_elsewhere_nbytes=0, keeps=False),
            Lead(len(others) + 1, "job", WAIT, start),
            Told(),
            StopsWith(None),
        )
        host._members, host._team, host._tasks = list(others), "team", tasks or {}
        return host

    return make


def look(host):
    with host._changed:
        return host._look()


def require_nobody_lost(host):
    with host._changed:
        host._require_nobody_lost()


def unexpected(*_):
    raise AssertionError


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


def ended():
    future = Future()
    future.set_result(None)
    return future


def cancelled():
    future = Future()
    future.cancel()
    future.set_running_or_notify_cancel()
    return future


def test_a_process_that_is_done_while_the_first_looks_elsewhere_is_waited_for_no_more(host_of):
    """A thread sees what others do, at any moment between two looks of the one that waits."""
    member = Other(1, is_missing=False)
    host = host_of(member)

    def is_set():
        member.is_done = True
        return False

    host._stop = SimpleNamespace(is_set=is_set)

    host.wait(unexpected)

    assert host._progress.skipped == [(0, "(waiting for process 1 of 2)")]
    member.looks = [{"claimed_nbytes": 5}]
    assert not look(host)  # who comes now finds the output


def test_what_others_note_is_told_once_and_kept(host_of):
    host = host_of(Other(1), Other(2))
    assert not look(host)
    assert not host._place.keeps
    host.members[0].looks = [{"claimed_nbytes": 5}, {"claimed_nbytes": 0}]
    host.members[1].looks = [{"claimed_nbytes": 7}, {}]
    assert [look(host) for _ in range(3)] == [True, True, False]
    host.members[0].looks = [{"claimed_nbytes": 6}, {"has_joined": True}, {"is_done": True}]
    assert [look(host) for _ in range(4)] == [True, True, True, False]

    assert [nbytes for nbytes, _ in host._progress.skipped] == [12, 1]
    assert (host._place.done_elsewhere_nbytes, host._place.keeps) == (13, True)


@pytest.mark.parametrize(
    ("late", "named"),
    [
        ([2], "process 2 of 5"),
        ([2, 4], "processes 2 and 4 of 5"),
        ([1, 2, 4], "processes 1, 2 and 4 of 5"),
        ([2, 3, 4], "processes 2 to 4 of 5"),
        ([1, 2], "processes 1 and 2 of 5"),
    ],
)
def test_those_that_are_late_are_named_once(host_of, clock, late, named):
    others = [Other(n, has_joined=n == 1, is_complete=n == 3) for n in range(1, 5)]
    for other in others:
        if other.number in late:
            other.has_joined = other.is_complete = False
        elif other.number % 2 == 0:
            other.is_missing = False  # it holds its lock
    host = host_of(*others)
    clock.seconds += WAIT
    look(host)
    assert host._progress.notices == []
    for _ in range(2):
        clock.seconds += 1
        look(host)
    assert host._progress.notices == [f"{named} did not come within {WAIT + 1:.0f} s"]


def test_what_a_process_is_told_of_is_said_with_its_name(host_of):
    host = host_of(Other(1), Other(2))
    host.members[1].looks = [{"told": "was told otherwise"}, {}]
    look(host)
    look(host)
    assert host._progress.notices == ["process 2 of 3 was told otherwise"]


@pytest.mark.parametrize("starts", [False, True])
def test_a_process_that_would_fail_again_ends_the_run_with_what_it_said(host_of, starts):
    said = {"where": "its place", "problem": "is wrong", "remedy": "do it right"}
    other = Other(1, failed_for_good=True, failure=said)
    host = host_of(Other(2), other, start=dict if starts else None)
    look(host)
    assert host._stop.is_set() is not starts
    if starts:  # of which the executor has the error itself
        host.require_sound()
        return
    with pytest.raises(RestrideError, match="process 1 of 3") as caught:
        host.require_sound()
    assert (caught.value.problem, caught.value.remedy) == ("is wrong", "do it right")
    assert caught.value.where.endswith("its place")


def test_what_went_wrong_while_others_were_looked_at_ends_the_run(host_of):
    other = Other(1, is_missing=False)
    other.looks = [ExecutionError("cannot be read")]
    host = host_of(other)
    with pytest.raises(ExecutionError, match="cannot be read"):
        host._keep_looking()
    assert host._stop.is_set()
    with pytest.raises(ExecutionError, match="cannot be read"):
        host.wait(unexpected)


def test_nobody_is_given_up_while_somebody_works_or_may_still_come(host_of, clock):
    missing, works = Other(1), Other(2, is_missing=False)
    host = host_of(missing, works)
    clock.seconds += 10 * WAIT
    require_nobody_lost(host)
    works.is_missing, works.missing_since = True, clock.seconds
    clock.seconds += WAIT
    require_nobody_lost(host)
    clock.seconds += 1

    with pytest.raises(MissingProcessError, match=r"processes 1 and 2 of 3 did not") as caught:
        require_nobody_lost(host)

    assert caught.value.missing == (1, 2)
    assert caught.value.where == str(host._place.folder)


def test_the_time_counts_from_when_the_others_could_begin(host_of, clock):
    host = host_of()
    clock.seconds += 10 * WAIT
    team = Team("run", ((0, 0), (0, 0), (0, 0)))
    ledger = SimpleNamespace(left_nbytes=lambda _: 5)
    host.open(team, ledger)
    assert [(m.number, m.total_nbytes) for m in host.members] == [(1, 5)]
    clock.seconds += WAIT
    require_nobody_lost(host)
    host._members = [Other(1)]
    host._team = "team"
    clock.seconds += 1
    with pytest.raises(MissingProcessError):
        require_nobody_lost(host)


def test_who_is_done_or_complete_is_not_missed(host_of, clock):
    host = host_of(Other(1, is_done=True), Other(2, is_complete=True), Other(3, has_joined=True))
    clock.seconds += 10 * WAIT
    with pytest.raises(MissingProcessError, match=r"process 3 of 4 ended before") as caught:
        require_nobody_lost(host)
    assert caught.value.missing == (3,)
    host.members[2].is_complete = True
    require_nobody_lost(host)


def test_who_came_while_this_process_slept_is_not_given_up(host_of, clock):
    other = Other(1)
    other.looks = [{"has_joined": True, "is_missing": False}]
    host = host_of(other)
    clock.seconds += 10 * WAIT
    require_nobody_lost(host)
    assert not other.is_missing


def test_a_part_that_waits_for_another_one_in_the_executor_is_not_missed(host_of, clock):
    done, waits = Other(1, is_done=True, is_complete=True), Other(2, is_complete=True)
    host = host_of(done, waits, start=dict, tasks={1: ended(), 2: Future()})
    clock.seconds += 10 * WAIT
    done.missing_since = clock.seconds - 1
    require_nobody_lost(host)
    clock.seconds += WAIT
    with pytest.raises(MissingProcessError, match="part 2 of 2 did not come") as caught:
        require_nobody_lost(host)
    assert caught.value.missing == (2,)


@pytest.mark.parametrize(
    ("task", "joined", "kind", "message"),
    [
        (failed(StoppedError("of the part")), True, StoppedError, "of the part"),
        (failed(ValueError("x")), True, MissingProcessError, r"part 2 failed .*\(ValueError: x\)"),
        (cancelled(), False, MissingProcessError, r"part 2 failed .*\(CancelledError"),
        (ended(), False, MissingProcessError, "part 2 of 2 ended in the executor before it began"),
        (ended(), True, MissingProcessError, "part 2 of 2 ended before its part was done"),
    ],
)
def test_a_task_that_is_over_without_its_part_is_the_error(host_of, task, joined, kind, message):
    host = host_of(
        *(Other(1, is_missing=False), Other(2, has_joined=joined, is_missing=False)),
        start=dict,
        tasks={1: Future(), 2: task},
    )
    with pytest.raises(kind, match=message) as caught:
        require_nobody_lost(host)
    if kind is MissingProcessError:
        assert caught.value.missing == (2,)
        assert caught.value.where == str(host._place.folder)


def test_a_part_that_is_seen_to_be_done_when_its_task_is_over_is_no_error(host_of):
    other = Other(1, is_missing=False)
    other.looks = [{"is_done": True}]
    host = host_of(other, start=dict, tasks={1: ended()})
    host.wait(unexpected)


def test_what_is_complete_and_was_not_looked_at_is_read_back(host_of):
    host = host_of(Other(1, is_done=True), Other(2, is_complete=True, is_sound=False))
    unsure, found = host.members[1], []

    def believe_only(what):
        found.append(what)
        unsure.is_sound = unsure.is_done = True

    unsure.believe_only = believe_only
    host.wait(lambda member: f"what there is of {member.number}")
    assert found == ["what there is of 2"]


def test_who_comes_while_its_part_is_read_back_looks_itself(host_of):
    unsure = Other(1, is_complete=True, is_sound=False, believe_only=unexpected)
    host = host_of(unsure)

    def look_into(_):
        unsure.is_complete = unsure.is_missing = False
        host._stop.set()

    with pytest.raises(StoppedError):
        host.wait(look_into)


def test_only_a_process_that_was_not_sound_is_read_back_and_none_of_a_task(host_of):
    host = host_of(
        Other(1, is_complete=True, is_sound=False, is_missing=False),
        start=dict,
        tasks={1: Future()},
    )
    host._stop.set()
    with pytest.raises(StoppedError):
        host.wait(unexpected)


def test_only_what_was_said_before_is_removed_when_the_first_begins(host_of):
    host = host_of()
    folder = host._place.folder
    kept = {"lock", "journal", "journal.1", "lock.1", "members", "files"}
    for name in kept | {"hello.1", "welcome.2", "stop"}:
        (folder / name).touch()
    with host:
        assert {path.name for path in folder.iterdir()} == kept


def test_the_others_see_that_the_first_lives_while_it_leads(host_of, monkeypatch):
    monkeypatch.setattr(companions, "_SECONDS_BETWEEN_BEATS", 0.01)
    host = host_of()
    lock = host._place.folder / "lock"
    lock.touch()
    with host:
        os.utime(lock, (1, 1))
        end = time.monotonic() + 30
        while lock.stat().st_mtime == 1 and time.monotonic() < end:
            time.sleep(0.005)
    assert lock.stat().st_mtime > 1


def test_an_executor_that_takes_no_parts_is_an_error(host_of):
    team, ledger = Team("run", ((0, 0), (0, 0))), SimpleNamespace(left_nbytes=lambda _: 0)
    ours = ExecutionError("ours")
    for error, told in (
        (ours, "ours"),
        (RuntimeError("shut down"), r"\(RuntimeError: shut down\)"),
    ):

        def start(error=error):
            raise error

        with pytest.raises(ExecutionError, match=told):
            host_of(start=start).open(team, ledger)


def test_who_is_dismissed_is_waited_for_until_it_stops(host_of, clock):
    host = host_of(Other(1, has_joined=True), Other(2, has_joined=True))
    folder = host._place.folder
    begun = clock.seconds
    host.dismiss()
    assert (folder / "stop").exists()
    assert all(member.is_turned_away for member in host.members)
    assert clock.seconds - begun < 1
    with locked(folder / "lock.1", what="it"):
        host.dismiss()
    assert 15 <= clock.seconds - begun < 17


def test_who_is_just_about_to_come_is_waited_for_a_moment(host_of, clock):
    host = host_of(Other(1, has_joined=True), Other(2))
    begun = clock.seconds
    host.dismiss()
    assert 2 <= clock.seconds - begun < 3


def test_tasks_are_cancelled_and_waited_for_when_they_are_dismissed(host_of, clock):
    tasks = {1: Future(), 2: Future()}
    tasks[2].set_running_or_notify_cancel()
    host = host_of(Other(1), Other(2), start=dict, tasks=tasks)
    begun = clock.seconds
    host.dismiss()
    assert tasks[1].cancelled()
    assert 15 <= clock.seconds - begun < 16
    tasks[2].set_result(None)
    host.dismiss()
    assert clock.seconds - begun < 16
