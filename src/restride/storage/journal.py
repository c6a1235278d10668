"""A journal: records that are appended, each with a checksum, and durable when `append` returns.

A line is the CRC-32 of a record in eight hexadecimal digits, a space, and the record as JSON. A
process that dies while it appends leaves a torn line at the end, which is left out when the journal
is read and cut off when it is continued; so is everything behind a damaged line.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import ExecutionError
from restride.storage.stale import again_while_stale

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Journal", "JournalReader", "Record", "read_journal"]

Record: TypeAlias = "Mapping[str, object]"

_DIGITS: Final = 8


def read_journal(path: Path) -> list[dict[str, object]]:
    """Records of a journal up to the first one that is torn or damaged; none without a file.

    Raises:
        ExecutionError: The system cannot read it.
    """

    def records() -> list[dict[str, object]]:
        with path.open("rb") as file:
            return [record for record, _ in _valid(file)]

    with _translated("cannot be read", path):
        try:
            return again_while_stale(records)
        except FileNotFoundError:
            return []


class Journal:
    """An open journal. Calls may come from any thread, one at a time.

    Args:
        path: The file. What is valid in it is continued.
        durable: Whether `append` waits until the disk has the records.

    Raises:
        ExecutionError: The system cannot open it.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        self._is_durable = durable
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with _translated("cannot be opened", path):
            self._descriptor = os.open(path, flags, 0o666)
            try:
                with path.open("rb") as file:
                    valid_nbytes = sum(nbytes for _, nbytes in _valid(file))
                # Only where it is needed: ext4 has a file that was cut to nothing wait for the disk
                # when it is closed.
                if os.fstat(self._descriptor).st_size != valid_nbytes:
                    os.ftruncate(self._descriptor, valid_nbytes)
            except BaseException:
                self.close()  # such as that somebody has just removed it
                raise

    def append(self, records: Iterable[Record]) -> None:
        """Write records, and make them durable. After an error, nothing more can be appended.

        Raises:
            ExecutionError: The system cannot write.
        """
        left = memoryview(b"".join(map(_line, records)))
        with _translated("cannot be written", self._path):
            try:
                while left.nbytes:
                    left = left[os.write(self._descriptor, left) :]
                if self._is_durable:
                    os.fdatasync(self._descriptor)
            except BaseException:
                # Behind a torn line nothing would be read.
                self.close()
                raise

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class JournalReader:
    """Reads on where it stopped, in a journal that another process appends to.

    Args:
        path: The file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[object, ...] = ()
        self._done_nbytes = 0

    def read(self) -> tuple[bool, list[dict[str, object]]]:
        """Records that are there since the last call, up to one that is torn or damaged.

        Returns:
            Whether it is another journal than it was, or a shorter one, or none any more: all that
            came before then means nothing. And the records.

        Raises:
            ExecutionError: The system cannot read it.
        """
        with _translated("cannot be read", self._path):
            try:
                identity, start_nbytes, found = again_while_stale(self._found)
            except FileNotFoundError:
                identity, start_nbytes, found = (), 0, []
        is_new = start_nbytes < self._done_nbytes
        self._identity = identity
        self._done_nbytes = start_nbytes + sum(nbytes for _, nbytes in found)
        return is_new, [record for record, _ in found]

    def _found(self) -> tuple[tuple[object, ...], int, list[tuple[dict[str, object], int]]]:
        """What file is there, where what was not read of it begins, and that."""
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            # A file may get the number of one that was removed.
            identity = status.st_dev, status.st_ino, file.readline()
            is_same = identity == self._identity and status.st_size >= self._done_nbytes
            file.seek(self._done_nbytes if is_same else 0)
            start_nbytes = file.tell()
            return identity, start_nbytes, list(_valid(file))


def _line(record: Record) -> bytes:
    payload = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def _valid(lines: Iterable[bytes]) -> Iterator[tuple[dict[str, object], int]]:
    """Yield the records up to the first line that is damaged, each with the bytes of its line."""
    for line in lines:
        payload = line[_DIGITS + 1 : -1]
        if line != b"%08x %b\n" % (zlib.crc32(payload), payload):
            return
        # The checksum is right, so this is what `_line` wrote, or what somebody wants us to read.
        try:
            record = json.loads(payload)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        yield record, len(line)


@contextmanager
def _translated(problem: str, path: Path) -> Iterator[None]:
    try:
        yield
    except ExecutionError:
        raise
    except OSError as error:
        raise ExecutionError(f"{problem} ({error.strerror})", where=str(path)) from error
