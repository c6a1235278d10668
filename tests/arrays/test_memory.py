"""Memory that the kernel is given the address of."""

from __future__ import annotations

import ctypes
import tracemalloc
from array import array
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays import memory
from restride.arrays.memory import address_of, allocate, clear, same_bytes


@pytest.mark.parametrize(
    "kept",
    [
        b"some bytes",
        bytearray(b"some bytes"),
        memoryview(b"and some bytes")[4:],
        memoryview(bytearray(b"and some bytes"))[4:],
        np.frombuffer(b"some bytes", np.uint8),
        np.arange(6, dtype=np.float32).reshape(2, 3)[1:],
        array("d", [1, 2, 3]),
    ],
    ids=lambda kept: f"{type(kept).__name__}, {memoryview(kept).readonly}",
)
def test_bytes_stand_at_their_address_whatever_holds_them(kept):
    view = memoryview(kept)

    assert ctypes.string_at(address_of(kept), view.nbytes) == view.tobytes()


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b""), np.zeros(0, np.uint8)])
def test_no_bytes_have_some_address(empty):
    assert address_of(empty) >= 0


@pytest.mark.parametrize("strewn", [memoryview(bytearray(8))[::2], memoryview(bytes(8))[::2]])
def test_bytes_with_gaps_have_no_address(strewn):
    with pytest.raises((BufferError, TypeError, ValueError)):
        address_of(strewn)


def test_memory_is_cleared_in_its_bounds_and_without_as_much_beside_it():
    around = bytearray(b"x") * (1 << 20)
    inside = memoryview(around)[3:-5]

    tracemalloc.start()
    clear(inside)
    clear(inside[:0])
    _, most_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert around == b"xxx" + bytes(inside.nbytes) + b"xxxxx"
    assert most_nbytes < 1 << 14


@pytest.mark.parametrize("kept", [memoryview(bytes(8)), memoryview(bytearray(8))[::2]])
def test_memory_that_cannot_be_cleared_is_refused(kept):
    with pytest.raises((BufferError, TypeError, ValueError)):
        clear(kept)


def test_memory_is_of_zeros_may_be_written_and_begins_with_a_page():
    got = allocate(3 * PAGESIZE + 5)

    assert got.nbytes == 3 * PAGESIZE + 5
    assert not any(got)
    assert address_of(got) % PAGESIZE == 0
    got[-5:] = b"write"
    assert bytes(got[-5:]) == b"write"
    assert allocate(0).nbytes == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say it")
def test_pages_are_there_when_they_are_touched_and_not_before():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident()
    got = allocate(4000 * PAGESIZE)
    untouched = resident() - before
    got[::PAGESIZE] = bytes(4000)

    assert untouched < 1000
    assert resident() - before > 3000


def test_memory_that_the_system_does_not_give_is_an_error_of_memory():
    with pytest.raises(MemoryError, match="the system gives no"):
        allocate(1 << 62)


def test_memory_that_processes_are_made_of_is_their_own(monkeypatch):
    """Shared memory counts for every process, and comes from another store."""
    asked = []
    monkeypatch.setattr(memory, "mmap", lambda *_, flags: asked.append(flags) or bytearray(1))
    allocate(1)

    assert asked == [memory.MAP_PRIVATE | memory.MAP_ANONYMOUS]


@given(content=st.binary(max_size=70), place=st.integers(0, 69), bit=st.integers(0, 7))
def test_one_bit_makes_a_difference_and_nothing_else_does(each_way, content, place, bit):
    other = bytearray(content)
    assert all(each_way(lambda: same_bytes(content, memoryview(other))))
    if place < len(content):
        other[place] ^= 1 << bit
        assert not any(each_way(lambda: same_bytes(content, other)))
        assert not any(each_way(lambda: same_bytes(other, content)))


def test_bytes_of_other_sizes_are_not_the_same(each_way):
    assert not any(each_way(lambda: same_bytes(bytes(8), bytes(9))))
    assert not any(each_way(lambda: same_bytes(bytes(9), bytes(8))))
    assert all(each_way(lambda: same_bytes(b"", bytearray())))


def test_floats_are_the_same_by_their_bits(each_way):
    nan, zeros = np.float32([np.nan, 1]), np.float32([0.0, -0.0])

    assert all(each_way(lambda: same_bytes(nan, nan.copy())))
    assert not any(each_way(lambda: same_bytes(zeros[:1], zeros[1:])))
