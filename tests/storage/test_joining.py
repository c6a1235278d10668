"""A process is let in by process 0 alone, and by the one that lives now."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event

import pytest

from restride.errors import ExecutionError, ExistsError, MissingProcessError, StoppedError
from restride.storage import companions, joining, unfinished
from restride.storage.companions import Team
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import is_held, locked
from restride.storage.unfinished import Purpose, partial_folder
from restride.testing.contents import sign

TEAM = Team("run", ((0, 0), (1, 0), (2, 0)))
FIRST = {"what": "it"}
SAID = {"word": "", "count": 2, "job": "job", "durable": True}
WELCOME = {"run": "run", "durable": False}


def purpose_of(*, differs="", written=lambda _: False):
    return Purpose(FIRST, lambda first: differs if first == FIRST else "no record", written)


def joined_output(out, purpose=None, *, stop=None, wait_seconds=30, **options):
    return joining.joined_output(
        *(out, purpose or purpose_of(), "job", 1, 2),
        **{"stop": stop or Event(), "wait_seconds": wait_seconds, **options},
    )


class Leader:
    """What a process 0 leaves, and its answers, in the order of the words that it hears."""

    def __init__(self, out):
        self.folder = partial_folder(out)
        self.words = []

    def begin(self, *records):
        (self.folder / "files").mkdir(parents=True, exist_ok=True)
        (self.folder / "journal").unlink(missing_ok=True)
        journal = Journal(self.folder / "journal", durable=False)
        journal.append([FIRST, *records])
        journal.close()
        return locked(self.folder / "lock", what="out")

    @contextmanager
    def answering(self, *answers):
        """Give the answers to new words, the last one to all others; functions are called."""
        left, end = list(answers), Event()

        def answer():
            while not end.wait(0.01):
                for hello in read_journal(self.folder / "hello.1"):
                    if hello["word"] in self.words:
                        continue
                    self.words.append(hello["word"])
                    assert {**hello, "word": ""} == SAID
                    record = left.pop(0) if len(left) > 1 else left[0]
                    record = record() if callable(record) else record
                    welcome = {"word": hello["word"], **record}
                    companions.put_record(self.folder / "welcome.1", welcome)

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(answer)
            try:
                yield
            finally:
                end.set()
                found.result()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def leader(out):
    return Leader(out)


def own_journal(leader, *records):
    journal = Journal(leader.folder / "journal.1", durable=False)
    journal.append(records)
    journal.close()


def test_a_process_that_was_answered_and_is_kept_out_by_a_new_leader_asks_that_one(
    out, leader, monkeypatch
):
    """The first leader answered and died; the next one reads back what there is, and then deals."""
    monkeypatch.setattr(joining, "LOCK_SECONDS", 0.05)

    def joins():
        with joined_output(out, resume=True) as joined:
            return joined.word, joined.place.is_durable

    with ThreadPoolExecutor(1) as pool, leader.begin(TEAM.record), leader.answering(WELCOME):
        with locked(leader.folder / "members", what="out"):
            found = pool.submit(joins)
            deadline = time.monotonic() + 30
            while len(leader.words) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not found.done()

        assert found.result(30) == (leader.words[-1], False)
    assert len(leader.words) > 1


@pytest.mark.parametrize("durable", [True, False])
def test_who_is_let_in_has_its_part_and_its_locks_and_what_was_done_before(
    out, leader, durable, monkeypatch
):
    before, synced = {"region": 0}, []
    monkeypatch.setattr(unfinished, "sync_path", synced.append)
    with (
        leader.begin(before, TEAM.record, {"later": 1}),
        leader.answering({**WELCOME, "durable": durable}),
        joined_output(out) as joined,
    ):
        assert (joined.team, joined.before, joined.number) == (TEAM, (before,), 1)
        assert joined.head == companions.head_of("run", 1)
        assert joined.place.is_durable is durable
        assert joined.place.files.path == leader.folder / "files"
        assert read_journal(leader.folder / "journal.1") == [joined.head]
        assert synced == ([leader.folder] if durable else [])
        assert is_held(leader.folder / "lock.1")
        with pytest.raises(ExecutionError), locked(leader.folder / "members", what="all"):
            pytest.fail("it writes")
        joined.place.note([{"done": 1}])
        left = {path.name for path in leader.folder.glob("*.1")}
        assert left == {"journal.1", "lock.1"}
    assert not is_held(leader.folder / "lock.1")
    assert read_journal(leader.folder / "journal.1") == [joined.head, {"done": 1}]


def test_an_answer_that_does_not_speak_of_the_disk_has_everybody_wait_for_it(out, leader):
    with leader.begin(TEAM.record), leader.answering({"run": "run"}), joined_output(out) as joined:
        assert joined.place.is_durable


def test_who_comes_back_in_the_same_run_goes_on_with_what_it_noted(out, leader):
    with leader.begin(TEAM.record), leader.answering(WELCOME):
        own_journal(leader, companions.head_of("run", 1), {"done": 1})
        with joined_output(out) as joined:
            assert joined.place.records == ({"done": 1},)
            assert joined.place.is_resumed


@pytest.mark.parametrize("head", [companions.head_of("other", 1), companions.head_of("run", 2)])
def test_what_was_noted_in_another_run_is_thrown_away(out, leader, head):
    with leader.begin(TEAM.record), leader.answering(WELCOME):
        own_journal(leader, head, {"done": 1})
        with joined_output(out) as joined:
            assert joined.place.records == ()
            assert read_journal(leader.folder / "journal.1") == [joined.head]


def test_an_answer_of_a_run_that_is_over_is_not_gone_by(out, leader):
    """The leader that gave it died, and the next one has begun anew."""
    anew = Team("anew", TEAM.cuts)
    with ExitStack() as stack:
        stack.enter_context(leader.begin(anew.record))
        stack.enter_context(leader.answering(WELCOME, {"run": "anew"}))
        joined = stack.enter_context(joined_output(out))
        assert (joined.team.run, joined.word) == ("anew", leader.words[1])


def test_an_answer_before_there_is_a_team_is_not_gone_by(out, leader):
    with ExitStack() as stack:

        def deals():
            leader.begin(TEAM.record)
            return WELCOME

        stack.enter_context(leader.begin())
        stack.enter_context(leader.answering(WELCOME, deals))
        joined = stack.enter_context(joined_output(out))
        assert joined.word == leader.words[1]


def test_who_was_answered_by_a_leader_that_ended_then_asks_the_next_one(out, leader, monkeypatch):
    with ExitStack() as stack:

        @contextmanager
        def too_late(path, **options):
            monkeypatch.undo()
            shutil.rmtree(leader.folder)
            try:
                with locked(path, **options):
                    yield
            finally:
                stack.enter_context(leader.begin(TEAM.record))

        monkeypatch.setattr(joining, "locked", too_late)
        stack.enter_context(leader.begin(TEAM.record))
        stack.enter_context(leader.answering(WELCOME))
        joined = stack.enter_context(joined_output(out))
        assert joined.word == leader.words[1]


@pytest.mark.parametrize(
    ("answer", "differs", "kind", "message"),
    [
        ({"count": 3}, "", ExistsError, "it is one of 3 processes, this one of 2"),
        ({"count": 2}, "an option is", ExistsError, "process 0 writes something else: an option"),
        ({"ended": True}, "", ExecutionError, "process 0 has ended with an error"),
        (WELCOME, "an option is", ExistsError, "process 0 writes something else: an option"),
    ],
)
def test_who_is_turned_away_hears_why_and_leaves_nothing(
    out, leader, answer, differs, kind, message
):
    with leader.begin(TEAM.record), leader.answering(answer):
        with (
            pytest.raises(kind, match=message),
            joined_output(out, purpose_of(differs=differs)),
        ):
            pytest.fail("it was let in")
        left = {path.name for path in leader.folder.iterdir()}
    assert left <= {"files", "journal", "lock", "lock.1", "members"}
    assert len(leader.words) == 1


def test_a_number_is_held_by_one_process(out, leader, monkeypatch):
    monkeypatch.setattr(joining, "LOCK_SECONDS", 0.05)
    with (
        leader.begin(TEAM.record),
        leader.answering(WELCOME),
        locked(leader.folder / "lock.1", what="part"),
        pytest.raises(ExecutionError, match=r"part 1 of 2 of .*out: process \d+"),
        joined_output(out),
    ):
        pytest.fail("two have one number")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_where_nobody_leads_that_is_said_and_nothing_is_left(out, tmp_path, force, before):
    if before:  # what a leader left that was killed
        partial_folder(out).mkdir()
        (partial_folder(out) / "journal").touch()
    begun = time.monotonic()
    with (
        pytest.raises(MissingProcessError, match="process 0 of 2 gave no sign for 0 s") as caught,
        joined_output(out, wait_seconds=0.2, force=force),
    ):
        pytest.fail("it was let in")
    assert caught.value.missing == (0,)
    assert time.monotonic() - begun > 0.15
    assert [path.name for path in tmp_path.rglob("*")] == (
        ["out.partial", "journal"] if before else []
    )


def test_what_was_made_while_process_0_removed_its_folder_goes_with_who_asks(out, tmp_path):
    folder = partial_folder(out)
    folder.mkdir()
    for name in ("lock.1", "journal.1", "members"):
        (folder / name).touch()

    with pytest.raises(MissingProcessError), joined_output(out, wait_seconds=0):
        pytest.fail("it was let in")

    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("left", ["lock", "journal"])
def test_locks_that_others_may_hold_are_left_where_process_0_may_come_again(out, left):
    folder = partial_folder(out)
    folder.mkdir()
    names = {left, "lock.1", "journal.1", "members"}
    for name in names:
        (folder / name).touch()

    with pytest.raises(MissingProcessError), joined_output(out, wait_seconds=0):
        pytest.fail("it was let in")

    assert {path.name for path in folder.iterdir()} == names


def test_a_leader_that_has_gone_is_waited_for_less_long(out, leader, monkeypatch):
    monkeypatch.setattr(joining, "_GONE_SECONDS", 0.2)
    stop = Event()
    with ThreadPoolExecutor(1) as pool:

        def joins():
            with joined_output(out, stop=stop, wait_seconds=600):
                pytest.fail("it was let in")

        with leader.begin():
            found = pool.submit(joins)
            while not (leader.folder / "hello.1").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            assert not found.done()
            (leader.folder / "lock").unlink()
        try:
            assert isinstance(found.exception(30), MissingProcessError)
        finally:
            stop.set()


def test_a_leader_that_was_never_there_is_waited_for_as_long_as_was_asked(out, monkeypatch):
    monkeypatch.setattr(joining, "_GONE_SECONDS", 0.05)
    began = time.monotonic()

    with (
        pytest.raises(MissingProcessError, match="no sign for 1 s"),
        joined_output(out, wait_seconds=0.6),
    ):
        pytest.fail("it was let in")
    assert time.monotonic() - began >= 0.6


def test_who_is_asked_to_stop_while_it_waits_takes_back_what_it_said(out, leader):
    stop = Event()

    def stops():
        stop.set()
        return {"nothing": 1}

    with leader.begin(), leader.answering(stops):
        with pytest.raises(StoppedError), joined_output(out, stop=stop):
            pytest.fail("it was let in")
        assert not list(leader.folder.glob("hello*"))


def test_an_output_that_is_there_is_not_waited_for(out):
    out.mkdir()
    (out / "done").touch()
    with joined_output(out, purpose_of(written=lambda path: path == out)) as joined:
        assert joined is None
    assert not partial_folder(out).exists()


def test_with_force_an_output_that_is_there_may_be_the_one_to_replace(out):
    """Only at the end of the waiting is it taken for the one that process 0 has written."""
    out.mkdir()
    begun = time.monotonic()
    purpose = purpose_of(written=lambda _: True)
    with joined_output(out, purpose, force=True, wait_seconds=0.2) as joined:
        assert joined is None
    assert time.monotonic() - begun > 0.15


def test_an_output_that_appears_while_a_process_waits_is_the_one_that_is_meant(out, leader):
    out.mkdir()
    with ThreadPoolExecutor(1) as pool:

        def joins():
            purpose = purpose_of(written=lambda _: True)
            with joined_output(out, purpose, force=True, wait_seconds=600) as joined:
                return joined

        with leader.begin():
            found = pool.submit(joins)
            while not (leader.folder / "hello.1").exists():
                time.sleep(0.01)
            assert not found.done()
            (leader.folder / "lock").unlink()
        assert found.result(30) is None


@pytest.mark.parametrize("said", [{}, {"force": True}, {"resume": True}])
@pytest.mark.parametrize("is_ours", [False, True])
def test_what_is_in_the_way_is_refused_at_once_unless_process_0_may_replace_it(out, said, is_ours):
    out.mkdir()
    (out / "mine").touch()
    if is_ours:
        sign(out)
    waits = "resume" in said or ("force" in said and is_ours)
    kind = MissingProcessError if waits else ExistsError
    with pytest.raises(kind), joined_output(out, wait_seconds=0.05, **said):
        pytest.fail("it was let in")
    assert (out / "mine").exists()


@pytest.mark.parametrize("gone", ["stop", "journal.1"])
def test_who_writes_is_told_to_stop(out, leader, gone, monkeypatch):
    monkeypatch.setattr(companions, "_SECONDS_BETWEEN_BEATS", 0.01)
    stop = Event()
    with (
        leader.begin(TEAM.record),
        leader.answering(WELCOME),
        joined_output(out, stop=stop),
    ):
        assert not stop.wait(0.1)
        if gone == "stop":
            (leader.folder / gone).touch()
        else:
            (leader.folder / gone).unlink()
        assert stop.wait(30)


def test_the_last_one_that_writes_takes_an_empty_folder_with_it(out, leader):
    """Process 0 has published and removed all but the folder, in which this one had its lock."""
    with leader.begin(TEAM.record), leader.answering(WELCOME), joined_output(out):
        for name in ("journal", "journal.1", "lock", "lock.1", "members"):
            (leader.folder / name).unlink()
        (leader.folder / "files").rmdir()
    assert not leader.folder.exists()
