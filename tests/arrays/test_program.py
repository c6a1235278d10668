"""Programs do what `Digester`, `copy_strided` and positioned reads and writes do."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays.fingerprint import Digester
from restride.arrays.program import CHUNK_NBYTES, Program, start_writing
from restride.arrays.strided import copy_strided
from restride.errors import LayoutError

SIZE = 3 * CHUNK_NBYTES + 999
MEMORY = memoryview(bytearray(10))  # it has to stay until a program has run


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "source"
    path.write_bytes(np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
    return path


@pytest.fixture
def files(source, tmp_path):
    """The source, to be read, and an empty file, to be written."""
    read, written = os.open(source, os.O_RDONLY), os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    yield read, written
    os.close(read)
    os.close(written)


@given(
    first=st.integers(0, SIZE),
    stop=st.integers(0, SIZE),
    at=st.one_of(st.integers(0, 9000), st.integers(CHUNK_NBYTES - 9, CHUNK_NBYTES + 9)),
    start=st.one_of(st.integers(0, 5000), st.integers((1 << 40) - 9, (1 << 40) + 9)),
    buffer_nbytes=st.sampled_from([1000, 4096, 70_001, CHUNK_NBYTES, 2 * CHUNK_NBYTES]),
)
def test_what_is_moved_arrives_whole_and_has_the_digest_of_its_bytes(
    kernels, use, source, tmp_path_factory, first, stop, at, start, buffer_nbytes
):
    first, stop = sorted((first, stop))
    wanted = source.read_bytes()[first:stop]
    digest = Digester().digest(np.frombuffer(wanted, np.uint8), start)
    target = tmp_path_factory.getbasetemp() / "moved"
    for kernel in kernels:
        target.write_bytes(b"\xa5" * (at + 5))
        read, written = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR)
        program = Program()
        buffer = memoryview(bytearray(buffer_nbytes))
        program.move((read, first), (written, at), stop - first, buffer, start)
        with use(kernel):
            digests = program.run()
        os.close(read)
        os.close(written)

        assert digests == [digest]
        found = target.read_bytes()
        assert found[:at] == b"\xa5" * at
        assert found[at : at + len(wanted)] == wanted
        assert found[at + len(wanted) :] == b"\xa5" * max(0, 5 - len(wanted))


def test_steps_follow_one_another_in_their_order(kernels, use, files):
    """A buffer is read into, spread, written, and used again."""
    read, written = files
    content = np.fromfile(f"/proc/self/fd/{read}", np.uint8)
    for kernel in kernels:
        scratch, main = np.zeros(600, np.uint8), np.zeros(1200, np.uint8)
        program = Program()
        expected = []
        for turn in range(3):
            program.read(read, 100 * turn, scratch.data)
            assert program.copy(scratch, main, [(2, 300, 600), (150, 2, 2)], 1, target_start=turn)
            copied = main.copy() if turn == 0 else expected[-1].copy()
            some = content[100 * turn :][:600].copy()
            copy_strided(some, copied, [(2, 300, 600), (150, 2, 2)], 1, target_start=turn)
            expected.append(copied)
            program.write(written, 5000 * turn, main.data, 7)
            program.move((read, turn), (written, 5000 * turn + 2000), 500, scratch.data, 1 << 20)

        with use(kernel):
            digests = program.run()

        wanted = []
        for turn, copied in enumerate(expected):
            moved = content[turn : turn + 500]
            wanted += [Digester().digest(copied, 7), Digester().digest(moved, 1 << 20)]
            assert os.pread(written, 1200, 5000 * turn) == copied.tobytes()
            assert os.pread(written, 500, 5000 * turn + 2000) == moved.tobytes()
        assert digests == wanted


def test_a_program_is_forgotten_once_it_has_run(kernels, use, files):
    read, written = files
    program = Program()
    program.move((read, 0), (written, 0), 10, MEMORY, 0)
    with use(kernels[-1]):
        assert len(program.run()) == 1
        assert program.run() == []


@pytest.mark.parametrize("kind", ["end of the file", "read", "written"])
def test_what_the_system_does_not_do_is_no_success(kernels, use, files, kind):
    read, written = files
    program = Program()
    source = {"end of the file": (read, SIZE - 9), "read": (-1, 0), "written": (read, 0)}[kind]
    target = read if kind == "written" else written  # which is open for reading only
    program.move(source, (target, 0), 10, MEMORY, 0)

    with use(kernels[-1]):
        assert program.run() is None
        assert program.run() == []


def test_reads_and_writes_of_arrays_can_fail_likewise(kernels, use, files):
    read, written = files
    array = memoryview(bytearray(10))
    with use(kernels[-1]):
        program = Program()
        program.read(read, SIZE - 9, array)
        assert program.run() is None
        program.write(read, 0, array, 0)
        assert program.run() is None
        zeros = memoryview(bytes(10))
        program.write(written, 0, zeros, 0)
        assert program.run() == [0]


def test_without_the_kernel_nothing_is_done(use, files):
    read, written = files
    program = Program()
    program.move((read, 0), (written, 0), 10, MEMORY, 0)
    with use(None):
        assert program.run() is None
    assert os.fstat(written).st_size == 0


def test_memory_that_a_program_must_not_touch_is_refused():
    program = Program()
    strewn = memoryview(bytearray(20))[::2]
    for array in (memoryview(bytes(10)), strewn):
        with pytest.raises(LayoutError, match="memory"):
            program.read(0, 0, array)
        with pytest.raises(LayoutError, match="memory"):
            program.move((0, 0), (0, 0), 10, array, 0)
    with pytest.raises(LayoutError, match="memory"):
        program.write(0, 0, strewn, 0)
    with pytest.raises(LayoutError, match="to byte 0 through 0 bytes"):
        program.move((0, 0), (0, 0), 10, MEMORY[:0], 0)
    with pytest.raises(LayoutError, match="to byte -1 through 10 bytes"):
        program.move((0, 0), (0, -1), 10, MEMORY, 0)
    assert program.run() == []


def test_nothing_is_done_after_bytes_that_differ(kernels, use, files):
    _, written = files
    content, same = bytearray(b"some bytes, and some more"), b"some bytes, and some more"
    for kernel in kernels:
        for place in (None, 0, 24):
            os.ftruncate(written, 0)
            other = bytearray(same)
            if place is not None:
                other[place] ^= 0x80
            program = Program()
            program.write(written, 0, memoryview(content)[:4], 0)
            program.require_same(memoryview(content), memoryview(other))
            program.write(written, 4, memoryview(content)[4:], 0)

            with use(kernel):
                digests = program.run()

            assert (digests is None) == (place is not None)
            assert os.pread(written, 99, 0) == (same if place is None else same[:4])


def test_what_is_compared_is_as_many_bytes_next_to_one_another():
    program, some = Program(), memoryview(bytearray(8))
    with pytest.raises(LayoutError, match="8 bytes are never the same as 7"):
        program.require_same(some, some[1:])
    with pytest.raises(LayoutError, match="7 bytes are never the same as 8"):
        program.require_same(some[1:], some)
    with pytest.raises(LayoutError, match="not contiguous"):
        program.require_same(some[:4], some[::2])
    assert program.run() == []


def test_copies_whose_order_matters_are_not_for_programs():
    array = np.zeros(100, np.uint8)
    program = Program()
    assert not program.copy(array, array, [(3, 10, 10)], 8, target_start=5)
    assert not program.copy(array, np.zeros(100, np.uint8), [(3, 10, 4)], 8)
    assert program.copy(array, np.zeros(100, np.uint8), [(3, 10, 10)], 0)
    assert program.run() == []


def test_a_file_can_be_handed_to_the_disk_and_what_is_none_does_no_harm(kernels, use, files):
    _, written = files
    os.pwrite(written, b"x" * 9000, 0)
    for kernel in (None, kernels[-1]):
        with use(kernel):
            start_writing(written, 0, 9000)
            start_writing(-1, 0, 9000)
    assert os.pread(written, 9001, 0) == b"x" * 9000
