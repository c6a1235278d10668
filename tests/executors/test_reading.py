"""Fingerprints and comparisons of files of any layout, within any budget."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.arrays.differences import Tolerance
from restride.arrays.fingerprint import SCRATCH_NBYTES, Digester
from restride.checkpoint.dtypes import DTYPES
from restride.errors import CoverageError
from restride.executors.comparing import CompareWriter
from restride.executors.digesting import DigestWriter
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.layouts import permuted, replicated, split
from restride.planning.jobs import plan_reading, whole_layout
from restride.planning.plan import BUFFERS_PER_WORKER
from restride.testing.fingerprints import digest_slowly
from restride.testing.moving import MemoryFiles, store
from restride.testing.strategies import layout_pairs, layouts

EXECUTORS = [SerialExecutor, StreamingExecutor]
SMALLEST = BUFFERS_PER_WORKER * 4096
BUDGET = 1 << 20


def patterns(numel, dtype="uint32"):
    return (np.arange(numel, dtype=np.uint64) * 2654435761 + 1).astype(dtype)


def reading(*states, budget=BUDGET, workers=2):
    """A plan that reads stored states, each of them in files of its own, and those files."""
    contents, arrays = [], []
    for number, state in enumerate(states):
        regions = tuple(
            region and type(region)(region.file + len(contents), region.start_nbytes)
            for region in state.entry.regions
        )
        entry = type(state.entry)(state.entry.dtype, state.entry.layout, regions)
        arrays.append((f"t{number}", "weight", entry))
        contents += state.contents
    plan = plan_reading(arrays, budget_nbytes=budget, workers=workers)
    return plan, MemoryFiles(contents)


def digests(executor, *states, budget=BUDGET):
    plan, files = reading(*states, budget=budget)
    writer = DigestWriter(len(states))
    executor().execute(plan, files, writer, NullObserver())
    return list(writer.totals)


@pytest.mark.parametrize("executor", EXECUTORS)
@given(layout=layouts(with_scales=False), width=st.sampled_from(["uint8", "uint16", "uint64"]))
def test_a_digest_of_any_layout_is_that_of_the_full_tensor(executor, layout, width):
    full = patterns(layout.full_numel, width)

    # Some layouts of fifty elements have a thousand walks.
    (found,) = digests(executor, store(layout, DTYPES[width], full), budget=8 << 20)

    assert found == digest_slowly(full.tobytes())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("spare", [0, 64, 4096, 1 << 16, 1 << 20])
def test_a_digest_does_not_depend_on_how_much_is_read_at_one_time(executor, spare):
    full = patterns(301 * 129, "uint16")
    layout = permuted(split((129, 301), mesh={"tp": 3}, dim=0), (1, 0))
    states = [
        store(layout, DTYPES["int16"], full),
        store(whole_layout((full.size,)), DTYPES["int16"], full),
    ]
    # The smallest budget that works, for steps of any number of elements.
    budget = SMALLEST + 16 * 1024 + BUFFERS_PER_WORKER * spare

    found = digests(executor, *states, budget=budget)

    assert found == [digest_slowly(full.tobytes())] * 2


def test_replicas_are_read_once_whatever_the_others_hold():
    full = patterns(64)
    stored = store(replicated((64,), mesh={"dp": 3}), DTYPES["float32"], full)
    drifted = type(stored)(
        stored.entry, stored.files, (stored.contents[0], b"", bytes(len(stored.contents[2])))
    )
    plan, files = reading(drifted)

    writer = DigestWriter(1)
    read_nbytes = SerialExecutor().execute(plan, files, writer, NullObserver())

    assert read_nbytes == 64 * 4
    assert list(writer.totals) == [digest_slowly(full.tobytes())]


def test_an_element_that_nobody_holds_is_refused_with_the_name_of_the_array():
    stored = store(split((8,), mesh={"tp": 2}), DTYPES["int8"], patterns(8, "uint8"))
    layout = stored.entry.layout
    entry = type(stored.entry)(
        stored.entry.dtype,
        type(layout)(layout.mesh, (9,), layout.shard_shapes, layout.all_pieces),
        stored.entry.regions,
    )

    with pytest.raises(CoverageError, match="tensor 'wte', state 'fp32'"):
        plan_reading([("wte", "fp32", entry)], budget_nbytes=BUDGET, workers=1)


def compared(executor, ours, theirs, tolerance=None, budget=BUDGET):
    plan, files = reading(ours, budget=budget)
    other, other_files = reading(theirs, budget=budget)
    step_numel = min(plan.regions[0].step_numel, other.regions[0].step_numel)
    region = replace(plan.regions[0], step_numel=step_numel)
    plan = replace(plan, regions=(region,))
    writer = CompareWriter(plan, other, other_files, tolerance or Tolerance())
    executor().execute(plan, files, writer, NullObserver())
    return writer


@pytest.mark.parametrize("executor", EXECUTORS)
@given(pair=layout_pairs(with_scales=False), data=st.data())
def test_one_other_element_is_found_between_any_two_layouts(executor, pair, data):
    ours, theirs = pair
    full = patterns(ours.full_numel)
    a = store(ours, DTYPES["uint32"], full)
    same = compared(executor, a, store(theirs, DTYPES["uint32"], full))

    assert dict(same.found) == {}
    if full.size:
        index = data.draw(st.integers(0, full.size - 1))
        changed = full.copy()
        changed[index] ^= 5
        found = compared(executor, a, store(theirs, DTYPES["uint32"], changed)).found[0]
        assert (found.different_numel, found.first_index) == (1, index)
        assert found.first_values == (int(full[index]), int(changed[index]))
        assert found.largest == abs(int(full[index]) - int(changed[index]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_differences_of_many_steps_are_one_difference(executor):
    values = np.arange(96 * 128, dtype=np.float32)
    changed = values.copy()
    changed[[77, 5_000, 12_000]] += np.float32([1, 8, 2])
    ours = store(split((96, 128), mesh={"tp": 4}), DTYPES["float32"], values.view(np.uint32))
    theirs = store(
        split((96, 128), mesh={"tp": 2}, dim=1), DTYPES["float32"], changed.view(np.uint32)
    )

    writer = compared(executor, ours, theirs, budget=SMALLEST + 256 * 1024)

    found = writer.found[0]
    assert (found.different_numel, found.first_index, found.largest) == (3, 77, 8.0)
    assert found.first_values == (float(values[77]), float(changed[77]))
    assert writer.read_nbytes == values.nbytes
    near = compared(executor, ours, theirs, Tolerance(atol=4.0))
    assert (near.found[0].different_numel, near.found[0].first_index) == (1, 5_000)


@pytest.mark.usefixtures("without_kernel")
def test_a_digester_takes_no_more_memory_than_is_set_aside_for_it():
    content = np.ones(1 << 20, np.uint8)
    Digester().digest(content, 0)  # the weights are made once

    tracemalloc.start()
    Digester().digest(content, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert SCRATCH_NBYTES / 2 < peak <= SCRATCH_NBYTES
