"""The space of a file is reserved before anything is written, where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import pytest

from restride.storage import reserving
from restride.storage.reserving import fallocate, reserve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORD = b"what is there"


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(WORD)
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


class System:
    """The call of the system; it answers with these errors, one after the other, and then well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: int) -> None:
        self.errors, self.asked = list(errors), list[tuple[int, ...]]()
        monkeypatch.setattr(reserving, "_function", lambda: self)

    def __call__(self, *numbers: int) -> int:
        self.asked.append(numbers[1:])
        ctypes.set_errno(self.errors[0] if self.errors else 0)
        return -1 if self.errors and self.errors.pop(0) else 0


@pytest.mark.parametrize("nbytes", [0, 5, len(WORD), 100_000])
def test_a_file_gets_its_size_and_keeps_what_is_in_it(descriptor: int, nbytes: int) -> None:
    if nbytes:
        reserve(descriptor, nbytes)
    else:
        os.ftruncate(descriptor, 0)
        reserve(descriptor, 0)

    assert os.pread(descriptor, 1 << 20, 0) == WORD[:nbytes].ljust(nbytes, b"\0")


def test_room_is_taken_for_all_of_a_file_and_not_when_it_is_written(descriptor: int) -> None:
    try:
        fallocate(descriptor, 1 << 20)
    except OSError as error:
        pytest.skip(f"this file system cannot reserve: {error}")
    os.ftruncate(descriptor, 0)

    reserve(descriptor, 1 << 20)

    status = os.fstat(descriptor)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_nothing_can_be_reserved_a_file_has_its_size_all_the_same(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    System(monkeypatch, number)

    reserve(descriptor, 100_000)

    assert os.fstat(descriptor).st_size == 100_000


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_that_there_is_no_room_is_an_error_and_the_file_is_as_it_was(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    System(monkeypatch, number)

    with pytest.raises(OSError, match=os.strerror(number)) as found:
        reserve(descriptor, 100_000)

    assert found.value.errno == number
    assert os.fstat(descriptor).st_size == len(WORD)


def test_who_is_interrupted_asks_again_for_the_first_bytes_on(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(monkeypatch, errno.EINTR, errno.EINTR)

    fallocate(descriptor, 1 << 40)

    assert system.asked == [(0, 0, 1 << 40)] * 3


def test_a_system_without_the_call_cannot_reserve(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserving, "_function", lambda: None)

    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        fallocate(descriptor, 100)
    reserve(descriptor, 100)
    assert os.fstat(descriptor).st_size == 100
