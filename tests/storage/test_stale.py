"""Files that another machine replaces while they are looked at."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from pathlib import Path

import pytest

from restride.errors import ExecutionError
from restride.storage.journal import Journal, JournalReader, read_journal
from restride.storage.locks import is_held, locked
from restride.storage.stale import again_while_stale

RECORDS = [{"number": number} for number in range(3)]


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that were slept."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def stale(path="it"):
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal"
    written = Journal(path, durable=False)
    written.append(RECORDS)
    written.close()
    return path


class _Stale(io.BytesIO):
    """The open file of a name that has another file by now."""

    def __init__(self, real):
        super().__init__()
        self._real = real

    def fileno(self):
        return self._real.fileno()

    def __next__(self):
        raise stale()

    def close(self):
        self._real.close()
        super().close()


@pytest.fixture
def stale_reads(monkeypatch):
    """Open a file whose reading fails, as often as the number in it says."""
    left = [0]
    real = Path.open

    def opened(self, *options):
        file = real(self, *options)
        if not left[0]:
            return file
        left[0] -= 1
        return _Stale(file)

    monkeypatch.setattr(Path, "open", opened)
    return left


def test_what_is_stale_is_looked_at_again_for_three_seconds(pauses):
    calls = []

    def look():
        calls.append(1)
        raise stale()

    with pytest.raises(OSError, match="Stale"):
        again_while_stale(look)

    assert sum(pauses) == pytest.approx(3.0)
    assert len(calls) == len(pauses) + 1


def test_another_error_is_not_waited_for(pauses):
    def look():
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        again_while_stale(look)
    assert not pauses


@pytest.mark.usefixtures("pauses")
def test_a_journal_that_was_replaced_while_it_was_read_is_read_anew(journal, stale_reads):
    stale_reads[0] = 2
    assert read_journal(journal) == RECORDS
    assert stale_reads == [0]


@pytest.mark.usefixtures("pauses")
def test_a_reader_misses_and_repeats_nothing_where_a_look_was_stale(journal, stale_reads):
    reader = JournalReader(journal)
    stale_reads[0] = 1
    assert reader.read() == (False, RECORDS)

    more = Journal(journal, durable=False)
    more.append([{"number": 3}])
    more.close()
    stale_reads[0] = 1
    assert reader.read() == (False, [{"number": 3}])
    stale_reads[0] = 1
    assert reader.read() == (False, [])


@pytest.mark.usefixtures("pauses")
def test_a_journal_that_stays_stale_is_an_error_that_names_it(journal, stale_reads):
    stale_reads[0] = 100
    with pytest.raises(ExecutionError, match="Stale") as error:
        read_journal(journal)
    assert error.value.where == str(journal)


@pytest.mark.usefixtures("pauses")
def test_the_lock_of_a_file_that_was_replaced_is_looked_at_again(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    real, calls = fcntl.flock, []

    def flock(descriptor, what):
        calls.append(what)
        if len(calls) % 2:
            raise stale(path)
        real(descriptor, what)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path, what="x"):
        assert is_held(path) is True
    assert is_held(path) is False
    assert len(calls) == 6
