"""How fast a machine is is said of a sample that is spread over all that a plan reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.errors import ExecutionError
from restride.executors import probing
from restride.executors.probing import probe_rate

PIECE, MOST, LEAST = 4096, 16 * 4096, 3 * 4096


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PIECE", PIECE), ("MOST", MOST), ("LEAST", LEAST)):
            patch.setattr(probing, f"_{name}_NBYTES", value)
        patch.setattr(probing, "time", SimpleNamespace(perf_counter=iter(range(10**9)).__next__))
        patch.setattr(probing, "_MOST_SECONDS", 10**9)
        yield


class Sources:
    """Files of some sizes; notes which pieces of them are read, by their number in all files."""

    def __init__(self, sizes):
        self.sizes, self.read = sizes, []

    def read_into(self, file, start, buffer):
        assert start % PIECE == 0
        assert start + len(buffer) <= self.sizes[file]
        passed = sum(size // PIECE for size in self.sizes[:file])
        self.read.append(passed + start // PIECE)


@given(st.lists(st.integers(0, 40 * PIECE), max_size=5))
def test_a_sample_is_spread_evenly_and_has_a_bound(sizes):
    sources, count = Sources(sizes), sum(size // PIECE for size in sizes)

    rate = probe_rate(sources, sizes)

    every = max(1, count * PIECE // MOST)
    assert sources.read == [*range(0, count, every)]
    assert len(sources.read) * PIECE < 2 * MOST + PIECE
    seconds = len(sources.read) + 1
    done = len(sources.read) * PIECE
    assert rate == (done / seconds if done >= LEAST else None)


def test_a_slow_machine_is_not_kept_at_it():
    sources = Sources([16 * PIECE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "_MOST_SECONDS", 3)
        rate = probe_rate(sources, sources.sizes)

    assert sources.read == [0, 1, 2, 3]
    assert rate == 4 * PIECE / 5


def test_what_cannot_be_read_is_an_error_and_no_file_stays_open():
    class Broken(Sources):
        def read_into(self, *_):
            raise ExecutionError("cannot be read")

    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(ExecutionError, match="cannot be read"):
        probe_rate(Broken([10 * PIECE]), [10 * PIECE])

    assert len([*Path("/proc/self/fd").iterdir()]) == before
