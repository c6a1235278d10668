"""What processes that write one output leave for each other means what it says, or nothing."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from restride.errors import ExecutionError
from restride.storage import companions
from restride.storage.companions import Beat, Sign, Team
from restride.storage.journal import Journal, JournalReader, read_journal
from restride.storage.locks import is_held, locked

TEAM = Team("word", ((0, 0), (1, 2), (4, 0)))


def write(path, *records):
    journal = Journal(path, durable=False)
    journal.append(records)
    journal.close()


def test_a_reader_gets_each_record_once_as_they_come_and_none_that_is_torn(tmp_path):
    path = tmp_path / "journal.1"
    reader = JournalReader(path)
    assert reader.read() == (False, [])
    write(path, {"a": 1}, {"a": 2})
    assert reader.read() == (False, [{"a": 1}, {"a": 2}])
    assert reader.read() == (False, [])
    write(path, {"a": 3})
    whole = path.read_bytes()
    torn = path.stat().st_size - 5
    os.truncate(path, torn)
    assert reader.read() == (False, [])
    with path.open("r+b") as file:
        file.seek(torn)
        file.write(whole[torn:])
    assert reader.read() == (False, [{"a": 3}])


@pytest.mark.parametrize("is_same_file", [False, True])
def test_a_reader_tells_that_a_journal_was_begun_anew(tmp_path, is_same_file):
    path = tmp_path / "journal.1"
    reader = JournalReader(path)
    write(path, {"run": "a"}, {"a": 2})
    reader.read()
    if is_same_file:  # as where the number of a file that was removed is given to a new one
        path.write_bytes(b"")
    else:
        fresh = tmp_path / "journal.1.new"
        write(fresh, {"run": "b"})
        fresh.rename(path)
    if is_same_file:
        write(path, {"run": "b"})

    assert reader.read() == (True, [{"run": "b"}])
    assert reader.read() == (False, [])
    path.unlink()
    assert reader.read() == (True, [])
    assert reader.read() == (False, [])


@pytest.mark.parametrize("is_same_file", [False, True])
def test_a_journal_that_was_begun_anew_is_not_read_on_where_it_is_the_longer_one(
    tmp_path, is_same_file
):
    path, fresh = tmp_path / "journal.1", tmp_path / "journal.1.new"
    records = [{"run": "b"}, {"b": 1}, {"b": 2}]
    reader = JournalReader(path)
    write(path, {"run": "a"}, {"a": 1})
    reader.read()

    write(fresh, *records)
    if is_same_file:
        path.write_bytes(fresh.read_bytes())
    else:
        fresh.rename(path)

    assert reader.read() == (True, records)
    assert reader.read() == (False, [])


def test_a_journal_that_lost_its_end_is_read_from_the_start(tmp_path):
    path = tmp_path / "journal.1"
    reader = JournalReader(path)
    write(path, {"run": "a"})
    nbytes = path.stat().st_size
    write(path, {"a": 1}, {"a": 2})
    reader.read()

    os.truncate(path, nbytes)

    assert reader.read() == (True, [{"run": "a"}])
    write(path, {"a": 3})
    assert reader.read() == (False, [{"a": 3}])


def test_a_lock_is_told_from_one_that_is_free_and_waited_for(tmp_path):
    path = tmp_path / "lock.1"
    assert is_held(path) is False
    with locked(path, what="it"):
        assert is_held(path) is True
        with pytest.raises(ExecutionError), locked(path, what="it", patience_seconds=0.1):
            pass
    assert is_held(path) is False
    with locked(path, what="it", patience_seconds=5):
        assert is_held(path) is True


def test_the_last_team_that_makes_sense_counts():
    other = Team("other", ((0, 0), (0, 0), (4, 0)), is_led_only=True)
    records = [
        {"region": 0},
        TEAM.record,
        {"region": 1},
        other.record,
        {"team": 3},
        {"team": {"run": "x", "cuts": [[2, 0], [1, 0]]}},
        {"team": {"run": "x", "cuts": [[0, 0]]}},
        {"team": {"run": "x", "cuts": [[0, "0"], [1, 0]]}},
    ]

    assert companions.last_team(records) == (3, other)
    assert companions.last_team(records[:3]) == (1, TEAM)
    assert companions.last_team(records[:1]) is None
    assert (TEAM.count, other.count) == (2, 2)


def test_journals_of_another_run_or_without_a_head_are_not_believed(tmp_path):
    team = Team("word", ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0)))
    write(tmp_path / "journal.1", companions.head_of("word", 1), {"a": 1})
    write(tmp_path / "journal.2", companions.head_of("another", 2), {"a": 2})
    write(tmp_path / "journal.3", companions.head_of("word", 1), {"a": 3})

    assert companions.journals_of(tmp_path, team) == [[{"a": 1}]]


def test_what_others_noted_goes_only_when_none_of_them_writes(tmp_path):
    write(tmp_path / "journal.1", companions.head_of("word", 1))
    (tmp_path / "journal.new").touch()
    with (
        locked(tmp_path / "lock.1", what="it"),
        companions.members_locked(tmp_path, what="it", patience_seconds=0) as is_let_in,
        pytest.raises(ExecutionError, match=r"out: process \d+ on .* is writing it"),
        companions.without_others(tmp_path, TEAM, what="out"),
    ):
        pytest.fail("somebody writes")
    assert is_let_in
    assert companions.anybody_in(tmp_path) is False
    assert read_journal(tmp_path / "journal.1")

    with companions.without_others(tmp_path, TEAM, what="out"):
        with companions.members_locked(tmp_path, what="it", patience_seconds=0) as is_let_in:
            assert not is_let_in
        assert read_journal(tmp_path / "journal.1")

    assert not (tmp_path / "journal.1").exists()
    assert (tmp_path / "journal.new").exists()


def test_who_comes_while_a_team_is_replaced_that_had_no_lock_yet_is_kept_out(tmp_path):
    with companions.without_others(tmp_path, TEAM, what="out"):
        with companions.members_locked(tmp_path, what="it", patience_seconds=0) as is_let_in:
            pass
        assert not is_let_in


def test_nobody_is_in_a_folder_that_is_not_there(tmp_path):
    assert companions.anybody_in(tmp_path / "nothing") is False


def test_any_number_writes_at_once_and_each_of_them_keeps_who_deals_out_anew_away(tmp_path):
    with companions.members_locked(tmp_path, what="1", patience_seconds=0):
        with companions.members_locked(tmp_path, what="2", patience_seconds=0) as is_let_in:
            assert is_let_in
        with (
            pytest.raises(ExecutionError, match="out: another process is writing it"),
            companions.without_others(tmp_path, None, what="out"),
        ):
            pytest.fail("somebody writes")
    with companions.without_others(tmp_path, None, what="out"):
        pass


def test_a_team_may_have_more_processes_than_a_process_may_have_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = sum(1 for _ in Path("/proc/self/fd").iterdir()) + 20
    team = Team("word", ((0, 0),) * 3 * count)
    write(tmp_path / "journal.7", companions.head_of("word", 7), {"a": 1})
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        with companions.without_others(tmp_path, team, what="out"):
            assert companions.journals_of(tmp_path, team) == [[{"a": 1}]]
        with (
            locked(tmp_path / f"lock.{team.count - 1}", what="it"),
            companions.members_locked(tmp_path, what="it", patience_seconds=0),
            pytest.raises(ExecutionError, match=r"out: process \d+ on .* is writing it"),
            companions.without_others(tmp_path, team, what="out"),
        ):
            pytest.fail("the last of them writes")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert not (tmp_path / "journal.7").exists()


def test_all_files_of_others_are_removed_and_nothing_else(tmp_path):
    ours = {"lock.1", "journal.12", "journal.3.new", "hello.2", "welcome.2", "stop", "stop.new"}
    ours |= {"members"}
    theirs = {"lock", "journal", "journal.new", "lock.0", "lock.01", "hello.x", "hello.1.txt"}
    for name in ours | theirs:
        (tmp_path / name).touch()

    companions.remove_all(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == theirs


def test_a_beat_is_a_sign_of_life_and_silence_is_measured_by_the_clock_of_who_looks(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(companions, "_SECONDS_BETWEEN_BEATS", 0.01)
    path, beats, now = tmp_path / "lock.1", [], time.monotonic()
    monkeypatch.setattr(companions.time, "monotonic", lambda: now)
    sign = Sign(path)
    path.touch()
    os.utime(path, (1, 1))  # the clock of another machine
    assert sign.silent_seconds() == 0
    for later in range(0, 31, 5):
        monkeypatch.setattr(companions.time, "monotonic", lambda later=later: now + later)
        silent = sign.silent_seconds()
    assert silent == pytest.approx(30)
    with Beat(path, also=lambda: beats.append(1)):
        while not beats:
            pass
    assert sign.silent_seconds() == 0


def test_a_process_that_was_stopped_itself_takes_nobody_for_dead(tmp_path, monkeypatch):
    path = tmp_path / "lock.1"
    path.touch()
    sign = Sign(path)
    assert sign.silent_seconds() == 0
    now = time.monotonic()
    monkeypatch.setattr(companions.time, "monotonic", lambda: now + 3600)

    assert 5 < sign.silent_seconds() < 15
    assert sign.silent_seconds() < 15


def test_a_record_takes_the_place_of_another_one_at_once(tmp_path):
    path = tmp_path / "hello.1"
    for word in ("a", "b"):
        companions.put_record(path, {"word": word})
        assert read_journal(path) == [{"word": word}]
        write(tmp_path / "hello.1.new", {"word": "of a process that was killed"})
    (tmp_path / "hello.1.new").unlink()
    assert [found.name for found in tmp_path.iterdir()] == ["hello.1"]
