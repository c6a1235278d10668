"""What a plan is said to read and write is what it reads and writes."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from restride.checkpoint.dtypes import DTYPES
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.layouts import permuted, replicated, split
from restride.planning.jobs import plan_conversion, whole_layout
from restride.planning.projection import Projection, project
from restride.testing.moving import MemoryFiles, job_between, store
from restride.testing.strategies import layout_pairs

SMALLEST = 8 * 4096


class CountingFiles(MemoryFiles):
    """Counts reads as well."""

    def __init__(self, contents):
        super().__init__(contents)
        self.reads = []

    def read_into(self, file, start_nbytes, buffer, /):
        super().read_into(file, start_nbytes, buffer)
        self.reads.append(buffer.nbytes)


def carried_out(source, target, dtype, budget):
    job, sizes = job_between(source, target, dtype)
    plan = plan_conversion([job], budget_nbytes=budget, workers=1, **POLICY)
    reader, out = CountingFiles(source.contents), MemoryFiles([bytes(size) for size in sizes])
    SerialExecutor().execute(plan, reader, out, NullObserver())
    written = sum(stop - start for _, start, stop in out.writes)
    return plan, Projection(
        sum(reader.reads), len(reader.reads), written, len(out.writes), is_exact=True
    )


POLICY: dict[str, object] = {}


@given(pair=layout_pairs(with_scales=False), width=st.sampled_from(["uint8", "uint32"]))
def test_every_read_and_write_is_counted_for_any_layouts(pair, width):
    target, source = pair
    full = np.arange(source.full_numel, dtype=np.uint64).astype(width)
    state = store(source, DTYPES[width], full)

    plan, found = carried_out(state, target, DTYPES[width], 1 << 20)

    event(f"reads: {min(found.read_count, 9)}")
    assert project(plan) == found


def test_reads_that_are_cut_by_small_buffers_are_counted():
    layouts = [
        (permuted(split((64, 48), mesh={"tp": 2}, dim=0), (1, 0)), whole_layout((48, 64))),
        (split((64, 4096), mesh={"tp": 4}, dim=1), whole_layout((64, 4096))),
        (whole_layout((64, 8192)), split((64, 8192), mesh={"tp": 2}, dim=1)),
        (replicated((64, 1024), mesh={"tp": 3}), split((64, 1024), mesh={"tp": 2}, dim=1)),
        (whole_layout((60, 4096)), split((60, 4096), mesh={"tp": 2}, dim=1, sizes=[1536, 2560])),
        (whole_layout((8, 16384)), split((8, 16384), mesh={"tp": 32}, dim=1)),
    ]
    counts = set()
    for source, target in layouts:
        full = np.arange(source.full_numel, dtype=np.uint32)
        state = store(source, DTYPES["float32"], full)
        for budget in (SMALLEST + 163840, 4 * SMALLEST + 98304, 4 << 20):
            plan, found = carried_out(state, target, DTYPES["float32"], budget)
            assert project(plan) == found
            counts.add(found.read_count)
    assert len(counts) > 6


def test_of_many_steps_some_are_counted_and_the_rest_is_like_them():
    source, target = whole_layout((128, 4096)), split((128, 4096), mesh={"tp": 2}, dim=1)
    state = store(source, DTYPES["float32"], np.arange(128 * 4096, dtype=np.uint32))
    plan, found = carried_out(state, target, DTYPES["float32"], SMALLEST + 131072)
    assert plan.step_count > 200

    some = project(plan, most_steps=100)

    assert not some.is_exact
    assert abs(some.read_nbytes - found.read_nbytes) <= 0.02 * found.read_nbytes
    assert abs(some.read_count - found.read_count) <= 0.02 * found.read_count
    assert some.written_nbytes == found.written_nbytes
    assert some.write_count == found.write_count
