"""What was appended is read again, and nothing that is torn or damaged ever is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from restride.errors import ExecutionError
from restride.storage.journal import Journal, JournalReader, read_journal
from restride.testing.faults import failing_files

RECORDS = [{"what": "überall"}, {"region": 0, "digests": ["0f"] * 3}, {"nbytes": 4 << 20}]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(st.text(max_size=5), values, max_size=3)


def write(path, records):
    journal = Journal(path)
    journal.append(records)
    journal.close()


def test_no_journal_has_no_records(tmp_path):
    assert read_journal(tmp_path / "journal") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(records, max_size=3), second=st.lists(records, max_size=3))
def test_records_are_read_as_they_were_appended(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("journal") / "journal"

    write(path, first)
    write(path, second)

    assert read_journal(path) == first + second


def test_a_journal_that_ends_anywhere_has_the_records_before_and_is_continued(tmp_path):
    path = tmp_path / "journal"
    write(path, RECORDS)
    content = path.read_bytes()
    ends = [len(b"".join(content.splitlines(keepends=True)[:count])) for count in range(4)]

    for nbytes in range(len(content)):
        path.write_bytes(content[:nbytes])
        left = RECORDS[: sum(end <= nbytes for end in ends) - 1]
        assert read_journal(path) == left
        write(path, [{"more": nbytes}])
        assert read_journal(path) == [*left, {"more": nbytes}]


def test_only_what_is_torn_is_cut(tmp_path, monkeypatch):
    """A file that was cut may have to wait for the disk when it is closed."""
    path = tmp_path / "journal"
    cuts = []
    monkeypatch.setattr(os, "ftruncate", lambda *arguments: cuts.append(arguments[1]))
    write(path, RECORDS[:1])
    write(path, RECORDS[1:])
    assert read_journal(path) == RECORDS
    assert cuts == []

    nbytes = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"torn")
    Journal(path).close()
    assert cuts == [nbytes]


def test_no_bit_can_flip_unnoticed_and_nothing_behind_it_is_believed(tmp_path):
    path = tmp_path / "journal"
    write(path, RECORDS)
    content = path.read_bytes()
    ends = [len(b"".join(content.splitlines(keepends=True)[:count])) for count in range(1, 4)]

    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            assert read_journal(path) == RECORDS[: sum(end <= place for end in ends)]


@pytest.mark.parametrize("payload", [b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_line_that_is_no_record_ends_the_journal(tmp_path, payload):
    import zlib

    path = tmp_path / "journal"
    write(path, RECORDS)
    with path.open("ab") as file:
        file.write(b"%08x %b\n" % (zlib.crc32(payload), payload))
    write(path, [{"behind": 1}])

    assert read_journal(path) == [*RECORDS, {"behind": 1}]


def test_after_a_failure_nothing_is_appended_behind_a_torn_line(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.append(RECORDS[:1])
    with (
        failing_files(tmp_path, at="fdatasync journal", number=28),
        pytest.raises(ExecutionError, match=r"journal: cannot be written \(No space left"),
    ):
        journal.append(RECORDS[1:])

    with pytest.raises(ExecutionError, match="cannot be written"):
        journal.append(RECORDS[1:])


def test_a_journal_is_closed_once_and_then_takes_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.close()
    journal.close()
    with pytest.raises(ExecutionError, match="cannot be written"):
        journal.append(RECORDS)


def test_a_system_that_writes_a_little_at_a_time_gets_all_of_it(tmp_path, monkeypatch):
    write_some = os.write
    monkeypatch.setattr(os, "write", lambda file, left: write_some(file, left[:3]))
    write(tmp_path / "journal", RECORDS)
    assert read_journal(tmp_path / "journal") == RECORDS


@pytest.mark.parametrize(
    "open_it", [read_journal, Journal, lambda path: JournalReader(path).read()]
)
def test_what_cannot_be_opened_is_an_error_that_names_it(tmp_path, open_it):
    path = tmp_path / "journal"
    path.mkdir()
    with pytest.raises(
        ExecutionError, match=r"cannot be (read|opened) \(Is a directory\)"
    ) as error:
        open_it(path)
    assert error.value.where == str(path)


def test_a_link_in_the_place_of_a_journal_is_not_followed(tmp_path):
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ExecutionError, match="cannot be opened"):
        Journal(tmp_path / "journal")

    assert not (tmp_path / "elsewhere").exists()


def test_a_journal_that_is_removed_while_it_is_opened_is_not_kept_open(tmp_path, monkeypatch):
    path = tmp_path / "journal"

    def removed(self, *_):
        self.unlink()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    monkeypatch.setattr(Path, "open", removed)

    with pytest.raises(ExecutionError, match="No such file"):
        Journal(path)

    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if name.startswith(str(path))]
