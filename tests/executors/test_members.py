"""What process 0 believes of another one: what it noted for this run, and that it lives."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.executors import blocks, members
from restride.executors.blocks import Block, BlockTable
from restride.executors.events import ReplicaDrift
from restride.executors.journaled import claim_records, drift_records
from restride.executors.members import Ledger, Member
from restride.executors.parts import Part
from restride.executors.resuming import ReadBack
from restride.layouts import replicated, split
from restride.planning.jobs import plan_conversion
from restride.storage import companions
from restride.storage.companions import Team
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import locked
from restride.testing.moving import job_between, store
from restride.wording import format_size

SIZE = 4096
# Regions of two blocks and a half: process 1 has what lies between the first two cuts.
TEAM = Team("run", ((0, 0), (0, 1), (1, 1), (2, 0)))
OWN = ((0, 1), (0, 2), (1, 0))
OWN_NBYTES = SIZE + SIZE // 2 + SIZE
DRIFT = ReplicaDrift("t", "weight", (0, 1), 100, 3, 1.0)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=time.monotonic())
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", SIZE)
    rows, columns = 2, SIZE // 2 * 5 // 2
    full = np.zeros(rows * columns, "uint16")
    source = store(replicated((rows, columns), mesh={"tp": 1}), DTYPES["uint16"], full)
    target = split((rows, columns), mesh={"tp": 2}, dim=0)
    job, _ = job_between(source, target, DTYPES["uint16"])
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    return BlockTable(plan.regions, digest_rows=1)


class Other:
    """The process that is looked at: what it leaves in the folder."""

    def __init__(self, folder, table, done=()):
        self.folder, self.table = folder, table
        self.member = Member(folder, TEAM, 1, Ledger(table, done))
        self.begin()

    def begin(self, run="run"):
        path = self.member.journal_path
        fresh = path.with_name("fresh")
        journal = Journal(fresh, durable=False)
        journal.append([companions.head_of(run, 1)])
        journal.close()
        fresh.rename(path)

    def note(self, *records):
        journal = Journal(self.member.journal_path, durable=False)
        journal.append(records)
        journal.close()

    def claim(self, *places):
        found = [Block(region, number, 1000 + 10 * region + number) for region, number in places]
        self.note(*claim_records(found, self.table))

    def say(self, word, **options):
        hello = {"word": word, "job": "job", "count": 3, **options}
        companions.put_record(companions.file_of(self.folder, "hello", 1), hello)

    def end(self, word, **failure):
        if failure:
            self.note({"failed": {"word": word, **failure}})
        else:
            self.note({"finished": {"word": word, "read_nbytes": 77, "resumed_nbytes": 88}})

    def works(self):
        return locked(companions.file_of(self.folder, "lock", 1), what="it")

    @property
    def answer(self):
        (record,) = read_journal(companions.file_of(self.folder, "welcome", 1))
        return record

    def look(self):
        return self.member.look(TEAM, "job")


@pytest.fixture
def other(tmp_path, table, monkeypatch):
    """One whose files are seen at once as they are, as on one machine."""
    monkeypatch.setattr(members, "_FREE_SECONDS", 0.0)
    return Other(tmp_path, table)


def state_of(member):
    return member.is_complete, member.is_sound, member.is_done


def test_what_a_process_notes_of_its_own_part_is_counted_once(other, table):
    member = other.member
    assert (member.total_nbytes, member.left_nbytes) == (OWN_NBYTES, OWN_NBYTES)

    other.claim((0, 2))
    other.look()
    assert (member.left_nbytes, member.claimed_nbytes) == (2 * SIZE, SIZE // 2)
    other.claim((0, 0), (0, 2), (1, 0), (1, 1))
    other.look()

    assert member.claimed_nbytes == SIZE + SIZE // 2
    assert [*table.digests(0), *table.digests(1)] == [0, 0, 1002, 1010, 0, 0]


def test_what_was_there_before_the_team_is_nobodys_to_do_or_to_take_back(tmp_path, table):
    table.set_done(Block(0, 1, 5))
    other = Other(tmp_path, table, done=[(0, 1)])
    assert other.member.total_nbytes == OWN_NBYTES - SIZE

    other.claim(*OWN)
    other.look()
    assert other.member.left_nbytes == 0
    assert table.digests(0)[1] == 5
    other.begin()
    other.look()

    assert other.member.left_nbytes == OWN_NBYTES - SIZE
    assert other.member._ledger.left_nbytes(other.member.part) == OWN_NBYTES - SIZE


def test_the_blocks_of_regions_of_any_size_are_claimed_one_by_one(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", SIZE)
    jobs = []
    for count in (1, 3, 2):
        numel = count * SIZE // 2 - 1
        source = store(replicated((numel,), mesh={}), DTYPES["uint16"], np.zeros(numel, "uint16"))
        job, _ = job_between(source, replicated((numel,), mesh={}), DTYPES["uint16"])
        jobs.append(replace(job, target_regions=(Region(len(jobs), 0),)))
    plan = plan_conversion(jobs, budget_nbytes=1 << 20, workers=1)
    ledger = Ledger(BlockTable(plan.regions, digest_rows=1), [(1, 1)])
    part = Part((0, 0), (3, 0))
    places = {(0, 0): SIZE - 2, (1, 0): SIZE, (1, 2): SIZE - 2, (2, 0): SIZE, (2, 1): SIZE - 2}
    assert ledger.left_nbytes(part) == sum(places.values())

    for place, nbytes in places.items():
        before = ledger.left_nbytes(part)
        assert ledger.claim(Block(*place, 9)) == nbytes
        assert ledger.claim(Block(*place, 9)) == 0
        assert ledger.left_nbytes(part) == before - nbytes
    assert ledger.left_nbytes(part) == 0

    ledger.take_back(Part((1, 0), (2, 1)))
    assert ledger.left_nbytes(part) == sum(places[place] for place in [(1, 0), (1, 2), (2, 0)])


def test_the_journal_of_another_run_says_nothing(other):
    other.begin(run="an earlier one")
    other.claim(*OWN)
    other.note(*drift_records([DRIFT]))
    other.look()
    assert (other.member.claimed_nbytes, other.member.rows) == (0, {})

    other.begin()
    other.claim(OWN[0])
    other.look()
    assert other.member.claimed_nbytes == SIZE


def test_a_journal_that_is_begun_anew_takes_back_what_was_noted_and_how_it_ended(other):
    member = other.member
    other.say("a")
    other.look()
    other.claim(*OWN)
    other.note(*drift_records([DRIFT]))
    other.end("a")
    other.look()
    assert member.is_done
    assert member.rows == {("t", "weight", (0, 1)): DRIFT}

    other.begin()
    other.claim(OWN[1])
    other.look()

    assert (member.claimed_nbytes, member.rows) == (SIZE // 2, {})
    assert state_of(member) == (False, False, False)
    other.claim(OWN[0], OWN[2])
    with other.works():
        other.look()
        assert not member.is_complete  # it may still take something back


@pytest.mark.parametrize("at_once", [False, True])
def test_the_last_sum_of_a_difference_counts(other, at_once):
    larger = ReplicaDrift(**{**asdict(DRIFT), "different_numel": 50})
    other.note(*drift_records([DRIFT]))
    if not at_once:
        other.look()
    other.note(*drift_records([larger]))
    other.look()
    assert list(other.member.rows.values()) == [larger]


def test_an_end_that_was_told_to_an_earlier_leader_does_not_count(other):
    member = other.member
    other.claim(*OWN)
    other.end("before")
    other.say("now")
    with other.works():
        other.look()
        assert state_of(member) == (False, False, False)
        other.end("before")
        other.note({"finished": {"word": "now", "read_nbytes": "no number", "resumed_nbytes": 1}})
        other.look()
        assert not member.is_sound
        other.end("now")
        other.look()
        assert member.is_done
    assert (member.read_nbytes, member.resumed_nbytes) == (77, 88)


def test_an_end_counts_for_whoever_was_answered_here_before_it_said_hello_again(other):
    other.claim(*OWN)
    for word in ("a", "b"):
        other.say(word)
        other.look()
    other.end("a")
    other.look()
    assert other.member.is_done


def test_who_ends_before_all_is_there_is_not_done(other):
    other.claim(*OWN[1:])
    other.say("a")
    other.look()
    other.end("a")
    assert other.look() == (
        f"ended before its part was done, {format_size(SIZE)} of {format_size(OWN_NBYTES)} are left"
    )
    assert other.member.is_missing
    assert state_of(other.member) == (False, True, False)


def test_only_what_a_process_says_of_the_failure_of_this_life_counts(other):
    member = other.member
    other.say("a")
    other.look()
    other.end("before", text="old", is_final=True)
    other.look()
    assert (member.failure, member.failed_for_good) == (None, False)

    other.end("a", text="full", is_final=False, problem="p")
    assert other.look() == "failed: full"
    assert member.failure == {"text": "full", "is_final": False, "problem": "p"}
    assert (member.is_missing, member.failed_for_good) == (True, False)
    other.end("a", text="wrong", is_final=True)
    assert other.look() == ""  # told once
    assert member.failed_for_good

    other.say("b")
    other.look()
    assert (member.failure, member.is_missing, member.failed_for_good) == (None, False, False)


def test_a_hello_is_answered_once_with_the_run(other):
    other.member.journal_path.unlink()
    assert other.look() == ""
    assert not other.member.has_joined
    other.say("a")
    assert other.look() == ""
    assert other.answer == {"word": "a", "run": "run", "durable": True}
    assert (other.member.has_joined, other.member.is_missing) == (True, False)
    companions.file_of(other.folder, "welcome", 1).unlink()
    other.look()
    assert not companions.file_of(other.folder, "welcome", 1).exists()
    other.say("b")
    other.look()
    assert other.answer["word"] == "b"


@pytest.mark.parametrize("wrong", [{"job": "other"}, {"count": 2}])
def test_who_means_something_else_is_turned_away_once_and_may_come_again(other, wrong):
    other.say("a", **wrong)
    assert "was turned away" in other.look()
    assert other.answer == {"word": "a", "count": 3}
    assert not other.member.has_joined
    assert other.look() == ""

    other.say("b")
    assert other.look() == ""
    assert other.answer["run"] == "run"
    assert other.member.has_joined


@pytest.mark.parametrize("ours", [True, False])
def test_who_was_told_otherwise_of_the_disk_hears_what_counts(tmp_path, table, ours):
    member = Member(tmp_path, TEAM, 1, Ledger(table, ()), durable=ours)
    other = Other(tmp_path, table)
    other.member = member
    other.say("a", durable=ours)
    assert other.look() == ""
    other.say("b", durable=not ours)
    told = "was told not to wait" if ours else "was told to wait"
    assert other.look().startswith(told)
    assert other.answer["durable"] is ours


def test_who_comes_after_the_end_hears_of_it(other):
    other.member.is_turned_away = True
    other.say("a", job="other")
    assert other.look() == ""
    assert other.answer == {"word": "a", "ended": True}
    assert other.member.has_joined


def test_who_holds_its_lock_is_there_whatever_it_said_and_missing_once_it_lets_go(other, clock):
    member = other.member
    begun = member.missing_since
    other.look()
    assert (member.is_missing, member.words, member.missing_since) == (True, "did not come", begun)
    clock.seconds += 3
    with other.works():  # answered by an earlier leader
        other.look()
        assert not member.is_missing
        clock.seconds += 60
        other.look()
        assert not member.is_missing
    other.claim(OWN[0])  # noted at last

    assert "are left" in other.look()
    assert (member.is_missing, member.missing_since) == (True, clock.seconds)
    assert member.claimed_nbytes == SIZE
    clock.seconds += 1
    assert other.look() == ""
    assert member.missing_since == clock.seconds - 1


def test_who_left_its_lock_is_not_missing_before_what_it_noted_last_can_be_seen(
    tmp_path, table, clock
):
    """The client of a network file system may have an old journal for a second or two."""
    other = Other(tmp_path, table)
    other.say("a")
    with other.works():
        other.look()

    assert other.look() == ""
    assert not other.member.is_missing
    clock.seconds += members._FREE_SECONDS * 0.9
    assert other.look() == ""
    with other.works():  # it is at work again: what was before counts no more
        other.look()
    clock.seconds += members._FREE_SECONDS * 0.9
    assert other.look() == ""
    clock.seconds += members._FREE_SECONDS
    assert other.look().startswith("ended before its part was done")
    assert other.member.is_missing


def test_what_is_noted_between_two_looks_at_the_end_is_seen(other, monkeypatch):
    """A process may note its last blocks and end after its journal was read."""
    other.say("a")
    with other.works():
        other.look()

    def ends(_):
        other.claim(*OWN)
        return False

    monkeypatch.setattr(members, "is_held", ends)

    assert other.look() == ""  # it has done all there was
    assert (other.member.left_nbytes, other.member.is_complete) == (0, True)


def test_who_was_answered_has_time_to_take_its_lock(other, clock):
    for _ in range(3):  # nobody is there, and the lock does not change
        clock.seconds += 9
        other.look()
    other.say("a")
    other.look()
    for _ in range(2):
        clock.seconds += 4
        other.look()
        assert not other.member.is_missing
    clock.seconds += 4
    assert "are left" in other.look()
    assert other.member.is_missing


def test_a_lock_of_the_life_before_does_not_tell_of_this_one(other):
    other.say("a")
    with other.works():
        other.look()
    other.look()
    assert other.member.is_missing
    other.say("b")
    other.look()
    assert not other.member.is_missing


def test_where_there_are_no_locks_only_silence_tells_of_a_death(other, clock, monkeypatch):
    other.say("a")
    with ExitStack() as stack:
        stack.enter_context(other.works())
        monkeypatch.setattr(members, "is_held", lambda _: None)
        for _ in range(4):
            clock.seconds += 9
            companions.beat(companions.file_of(other.folder, "lock", 1))
            other.look()
            assert not other.member.is_missing
        clock.seconds += 9
        other.look()
        assert not other.member.is_missing
        clock.seconds += 9
        other.look()
        assert other.member.is_missing


def test_what_was_read_back_replaces_what_was_noted(other, table):
    member = other.member
    other.claim(*OWN)
    other.note(*drift_records([DRIFT]))
    other.look()
    assert member.is_complete
    assert not member.is_done  # nobody looked

    member.believe_only(ReadBack((Block(1, 0, 9), Block(0, 0, 9)), {}, is_whole=False))
    assert (member.claimed_nbytes, member.resumed_nbytes) == (SIZE, SIZE)
    assert (member.is_sound, member.rows) == (False, {})
    assert table.digests(0)[0] == 0

    rows = {("t", "weight", (0, 1)): DRIFT}
    member.believe_only(ReadBack(tuple(Block(*place, 9) for place in OWN), rows, is_whole=True))
    assert (member.left_nbytes, member.resumed_nbytes) == (0, OWN_NBYTES)
    assert (member.is_done, member.rows) == (True, rows)


def test_who_has_nothing_to_do_is_done_until_it_comes_and_then_when_it_ends(tmp_path, table):
    other = Other(tmp_path, table, done=OWN)
    member = other.member
    other.look()
    assert member.is_done
    assert (member.read_nbytes, member.resumed_nbytes) == (0, 0)
    other.say("a")
    with other.works():
        other.look()
        assert not member.is_done
        other.end("a")
        other.look()
        assert member.is_done
