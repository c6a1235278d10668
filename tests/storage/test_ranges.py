"""Positioned reads and writes say which file failed, and keep few files open."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.errors import CorruptError, ExecutionError, FormatError
from restride.storage.ranges import FilePool, RangeFile, read_exact


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    path = tmp_path / "digits"
    path.write_bytes(b"0123456789")
    return path


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_read_fills_the_buffer_from_its_place(digits: Path) -> None:
    buffer = bytearray(4)

    read_exact(digits, 3, buffer)

    assert buffer == b"3456"


def test_a_buffer_of_any_element_size_is_filled(digits: Path) -> None:
    words = memoryview(bytearray(8)).cast("H")

    read_exact(digits, 1, words)

    assert words.tobytes() == b"12345678"


@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 9_000)), max_size=12))
def test_parts_of_a_file_are_its_bytes_in_any_order(places: list[tuple[int, int]]) -> None:
    content = bytes(number * 7 % 251 for number in range(30_000))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        with RangeFile(path) as file:
            for start, nbytes in places:
                part = min(nbytes, len(content) - start)
                assert file.read(start, part) == content[start : start + part]


def test_the_parts_of_a_header_are_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)) * 10)
    reads: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: tuple[memoryview], at: int) -> int:
        reads.append(at)
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", counted)
    with RangeFile(path) as file:
        parts = [file.read(start, 40) for start in range(0, 2000, 40)]

    assert b"".join(parts) == path.read_bytes()
    assert reads == [0]


def test_no_more_of_a_header_is_kept_than_some_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    with RangeFile(path) as file:
        for page in range(64):
            assert file.read(page * 4096 + 7, 2) == b"\0\0"
            assert sum(map(len, file._pages.values())) <= 4 * 4096


def test_a_read_past_the_end_names_the_file_and_the_numbers(digits: Path) -> None:
    with pytest.raises(CorruptError) as caught:
        read_exact(digits, 8, bytearray(4))

    assert str(caught.value) == (
        f"{digits}: the file ends at byte 10, yet 4 bytes are expected at byte 8"
    )


def test_a_length_beyond_the_file_is_refused_before_it_is_allocated(digits: Path) -> None:
    with RangeFile(digits) as file:
        assert file.read(9, 1) == b"9"
        assert file.read(10, 0) == b""
        for start, nbytes in ((0, 1 << 62), (9, 2), (11, 0), (-1, 1), (0, -1)):
            with pytest.raises(CorruptError, match="the file has 10 bytes"):
                file.read(start, nbytes)


@pytest.mark.parametrize("start", [1 << 63, 1 << 64])
def test_a_place_that_no_file_has_is_an_error_that_names_it(digits: Path, start: int) -> None:
    with pytest.raises(ExecutionError, match=f"digits: cannot read 1 bytes at byte {start}"):
        read_exact(digits, start, bytearray(1))


def test_a_negative_place_is_not_taken_for_the_current_one(digits: Path) -> None:
    with pytest.raises(CorruptError, match="digits: 1 bytes are expected at byte -1"):
        read_exact(digits, -1, bytearray(1))
    with (
        RangeFile(digits, writable=True) as file,
        pytest.raises(ExecutionError, match="digits: cannot write 1 bytes at byte -1"),
    ):
        file.write_exact(-1, b"x")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="absent: cannot be opened"):
        RangeFile(tmp_path / "absent")


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FormatError, match=r"is (not a regular file|a folder)$"):
            RangeFile(path)


def test_an_error_that_leaves_the_block_is_located_in_the_file(digits: Path) -> None:
    with pytest.raises(FormatError) as caught, RangeFile(digits):
        raise FormatError("is odd", where="record 'a'")

    assert str(caught.value) == f"{digits}: record 'a': is odd"


def test_writes_land_in_their_place(digits: Path) -> None:
    with RangeFile(digits, writable=True) as file:
        file.write_exact(2, b"ab")
        file.write_exact(9, memoryview(b"xyz"))

    assert digits.read_bytes() == b"01ab45678xyz"


def test_a_write_to_a_file_that_is_only_read_is_an_error_that_names_it(digits: Path) -> None:
    with (
        RangeFile(digits) as file,
        pytest.raises(ExecutionError, match="digits: cannot write 1 bytes at byte 5"),
    ):
        file.write_exact(5, b"x")


def test_a_pool_holds_no_more_files_open_than_it_may(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 4)
    before = open_descriptors()

    with FilePool(max_open=3) as pool:
        for number, path in enumerate(paths * 2):
            buffer = bytearray(2)
            pool.read_exact(path, 1, buffer)
            assert buffer == bytes([number % 20]) * 2
            assert open_descriptors() <= before + 3
        assert pool.nbytes(paths[0]) == 4

    assert open_descriptors() == before


def test_a_pool_keeps_the_file_that_was_used_last(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"x")

    with FilePool(max_open=2) as pool:
        pool.nbytes(paths[0])
        pool.nbytes(paths[1])
        pool.nbytes(paths[0])
        pool.nbytes(paths[2])
        # The first one is still open, so replacing the file is not noticed; the second one is not.
        for path in paths[:2]:
            path.unlink()
        assert pool.nbytes(paths[0]) == 1
        with pytest.raises(ExecutionError, match="b: cannot be opened"):
            pool.nbytes(paths[1])


@pytest.mark.parametrize("max_open", [1, 2, 7])
def test_threads_share_a_pool_that_is_smaller_than_they_are_many(
    tmp_path: Path, max_open: int
) -> None:
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        path.write_bytes(bytes(1000))
    start = threading.Barrier(6)

    def work(worker: int) -> None:
        start.wait()
        for round_ in range(40):
            path = paths[(worker + round_) % 5]
            pool.write_exact(path, worker * 100, bytes([worker]) * 100)
            buffer = bytearray(100)
            pool.read_exact(path, worker * 100, buffer)
            assert buffer == bytes([worker]) * 100

    with FilePool(max_open=max_open, writable=True) as pool, ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, worker) for worker in range(6)]:
            future.result()

    assert all(
        path.read_bytes()[:600] == b"".join(bytes([w]) * 100 for w in range(6)) for path in paths
    )


def test_a_file_that_cannot_be_opened_leaves_its_room_to_the_next_who_waits(
    tmp_path: Path,
) -> None:
    for name in ("held", "there"):
        (tmp_path / name).write_bytes(b"0")
    with FilePool(max_open=1) as pool, ThreadPoolExecutor(2) as threads:
        with pool._lease(str(tmp_path / "held")):
            waiting = []
            for count, name in enumerate(("missing", "there"), 1):
                waiting.append(threads.submit(pool.read_exact, tmp_path / name, 0, bytearray(1)))
                while pool._waiting < count:
                    time.sleep(0.001)

        with pytest.raises(ExecutionError, match="cannot be opened"):
            waiting[0].result(30)
        try:
            waiting[1].result(30)
        finally:
            pool.nbytes(tmp_path / "there")  # wakes who was forgotten, so that the test ends


def test_a_file_that_is_held_stays_open_and_nobody_is_made_to_wait_for_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    with FilePool(max_open=2) as pool, ThreadPoolExecutor(1) as threads:
        first, second = pool.hold(tmp_path / "a"), pool.hold(tmp_path / "b")
        again = pool.hold(tmp_path / "a")
        assert again is first is not second
        with second:
            with first as file:
                with again:
                    assert pool.hold(tmp_path / "c") is None
                # One of two who hold it has gone, so there is room for nobody yet.
                assert pool.hold(tmp_path / "c") is None
                waiting = threads.submit(pool.nbytes, tmp_path / "c")
                while not pool._waiting:
                    time.sleep(0.001)
                assert os.pread(file.descriptor, 1, 0) == b"a"
            assert waiting.result(30) == 1
            assert file.descriptor == -1  # closed for the one who waited
            assert os.pread(second.file.descriptor, 1, 0) == b"b"


def test_a_file_that_cannot_be_held_is_an_error_and_takes_no_room(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"0")
    with FilePool(max_open=1) as pool:
        with pytest.raises(ExecutionError, match="missing: cannot be opened"):
            pool.hold(tmp_path / "missing")
        with pool.hold(tmp_path / "there") as file:
            assert file.nbytes == 1


@pytest.mark.parametrize("start", [0, 5, (128 << 10) - 1, 128 << 10])
def test_long_writes_end_where_the_page_cache_takes_them_best(
    digits: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    content = bytes(range(251)) * 1300
    ends = []
    real = os.pwrite

    def pwrite(descriptor: int, some: memoryview, at: int) -> int:
        count = real(descriptor, some[: len(some) // 2 + 1], at)  # as a system may
        ends.append((at, at + len(some)))
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with RangeFile(digits, writable=True) as file:
        file.write_exact(start, content)

    assert digits.read_bytes()[start:] == content
    for first, end in ends:
        assert end - first <= 128 << 10
        assert end % (128 << 10) == 0 or end == start + len(content)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_open=0"):
        FilePool(max_open=0)
