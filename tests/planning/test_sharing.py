"""Rows that several targets have a part of are read once for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.layouts import split
from restride.planning.jobs import plan_conversion, whole_layout
from restride.planning.plan import BUFFERS_PER_WORKER
from restride.planning.projection import project
from restride.planning.sharing import families, is_dense
from restride.testing.moving import MemoryFiles, expected_shards, job_between, store

SHAPE = (96, 512)
FULL = (np.arange(96 * 512, dtype=np.uint64) * 2654435761 + 1).astype(np.uint32)
DTYPE = DTYPES["float32"]


def columns(tp, **axes):
    return split(SHAPE, mesh={**axes, "tp": tp}, dim=1, axis="tp")


def converted(source, target, *, budget=1 << 20, executor=SerialExecutor, replicas="check"):
    job, sizes = job_between(source, target, DTYPE, replicas)
    plan = plan_conversion([job], budget_nbytes=budget, workers=2)
    out = MemoryFiles([b"\xff" * size for size in sizes])
    read = executor().execute(plan, MemoryFiles(source.contents), out, NullObserver())
    assert [bytes(c) for c in out.contents] == [s.tobytes() for s in expected_shards(target, FULL)]
    return plan, read


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
@pytest.mark.parametrize("budget", [BUFFERS_PER_WORKER * 4096 * 2 + 32768, 1 << 20, 64 << 20])
@pytest.mark.parametrize(("before", "after"), [(1, 8), (2, 4), (2, 16), (4, 8)])
def test_columns_for_more_ranks_are_read_once(executor, budget, before, after):
    plan, read = converted(
        store(columns(before), DTYPE, FULL), columns(after), budget=budget, executor=executor
    )

    assert FULL.nbytes * 0.98 <= read <= FULL.nbytes
    assert project(plan).read_nbytes == read
    assert len(list(families(plan.regions))) == before


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
@pytest.mark.parametrize("budget", [200_000, 64 << 20])
def test_rows_of_several_files_are_not_read_as_those_of_one(executor, budget):
    """Their places in the files are the same, and a step has rows of both."""
    rows = split(SHAPE, mesh={"dp": 2}, dim=0)
    plan, read = converted(store(rows, DTYPE, FULL), columns(4), executor=executor, budget=budget)
    assert len(list(families(plan.regions))) == 1
    assert FULL.nbytes * 0.98 <= read


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
def test_rows_that_no_buffer_takes_are_read_in_parts(executor):
    shape = (6, 8192)
    source = store(whole_layout(shape), DTYPE, FULL[: 6 * 8192])
    target = split(shape, mesh={"tp": 16}, dim=1)
    job, sizes = job_between(source, target, DTYPE)
    plan = plan_conversion([job], budget_nbytes=120_000, workers=1)
    assert plan.buffer_nbytes < 8192 * 4
    out = MemoryFiles([b"\xff" * size for size in sizes])

    executor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    expected = expected_shards(target, FULL[: 6 * 8192])
    assert [bytes(c) for c in out.contents] == [s.tobytes() for s in expected]


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
def test_what_comes_after_shared_rows_is_read_by_itself(executor):
    source = store(columns(1), DTYPE, FULL)
    job, sizes = job_between(source, columns(4), DTYPE)
    row = whole_layout((SHAPE[1],))
    other = replace(
        job,
        tensor="bias",
        source=replace(source.entry, layout=row),  # the first row of the same file
        target_layout=row,
        target_regions=(Region(len(sizes), 0),),
    )
    plan = plan_conversion([job, other], budget_nbytes=1 << 20, workers=1)
    out = MemoryFiles([b"\xff" * size for size in [*sizes, SHAPE[1] * 4]])

    executor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    assert bytes(out.contents[-1]) == FULL[: SHAPE[1]].tobytes()


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 2), (3, 2), (4, 4)])
def test_columns_for_other_ranks_are_the_same_bytes(before, after):
    shape_of = {3: (64, 384), 2: (64, 384)}.get(before, SHAPE)
    full = FULL[: shape_of[0] * shape_of[1]]
    source, target = (split(shape_of, mesh={"tp": tp}, dim=1) for tp in (before, after))
    stored = store(source, DTYPE, full)
    job, sizes = job_between(stored, target, DTYPE)
    plan = plan_conversion([job], budget_nbytes=100_000, workers=1)
    out = MemoryFiles([bytes(size) for size in sizes])

    read = SerialExecutor().execute(plan, MemoryFiles(stored.contents), out, NullObserver())

    assert [bytes(c) for c in out.contents] == [s.tobytes() for s in expected_shards(target, full)]
    assert project(plan).read_nbytes == read


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
def test_replicas_of_shared_rows_are_each_compared(executor):
    source = store(columns(2, dp=2), DTYPE, FULL)

    _, read = converted(source, columns(4), executor=executor, budget=200_000)

    # The copy to compare with goes through the same buffer, so that each target reads for itself.
    assert read > 2 * FULL.nbytes


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
@pytest.mark.parametrize("budget", [200_000, 4 << 20])
def test_rows_of_which_some_have_a_copy_are_read_by_each_target_for_itself(executor, budget):
    numel = SHAPE[0] * SHAPE[1]
    whole, half = (Axis(numel, 1, 0, 1),), (Axis(numel // 2, 1, 0, 1),)
    pieces = Piece(whole, 0, 0, 0), Piece(half, 0, 1, 0)
    source = Layout.of({"dp": 2}, SHAPE, [SHAPE, (SHAPE[0] // 2, SHAPE[1])], pieces)

    plan, read = converted(store(source, DTYPE, FULL), columns(4), executor=executor, budget=budget)

    assert read >= 1.5 * FULL.nbytes
    assert project(plan).read_nbytes == read


def test_a_drift_in_shared_rows_is_averaged_at_its_place():
    source = store(columns(2, dp=2), DTYPE, FULL)
    front = len(source.contents[0]) - FULL.nbytes // 2
    drifted = np.frombuffer(source.contents[2][front:], np.float32).copy()
    one = np.nonzero(np.isfinite(drifted) & (np.abs(drifted) < 1e30))[0][-1]
    drifted[one] += 2.0
    contents = list(source.contents)
    contents[2] = contents[2][:front] + drifted.tobytes()
    other = type(source)(source.entry, source.files, tuple(contents))
    job, sizes = job_between(other, columns(4), DTYPE, "mean")
    plan = plan_conversion([job], budget_nbytes=200_000, workers=1)
    out = MemoryFiles([bytes(size) for size in sizes])

    SerialExecutor().execute(plan, MemoryFiles(other.contents), out, NullObserver())

    wanted = FULL.view(np.float32).reshape(SHAPE).copy()
    row, column = divmod(int(one), SHAPE[1] // 2)
    wanted[row, column] = np.float32((np.float64(wanted[row, column]) + drifted[one]) / 2)
    shards = expected_shards(columns(4), wanted.reshape(-1).view(np.uint32))
    assert [bytes(content) for content in out.contents] == [shard.tobytes() for shard in shards]


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": "another"},
        {"state": "another"},
        {"numel": 64},
        {"step_numel": 64},
        {"places": (Region(0, 8), Region(1, 0))},
        {"places": (Region(1, 0), Region(0, 0))},
    ],
    ids=str,
)
def test_a_family_reads_one_shard_in_steps_of_one_size(other):
    source = store(columns(2), DTYPE, FULL)
    job, _ = job_between(source, columns(8), DTYPE)
    plan = plan_conversion([job], budget_nbytes=100_000, workers=1)
    first, second = (
        replace(r, array=replace(r.array, places=(Region(0, 0), Region(1, 0))))
        for r in plan.regions[:2]
    )

    assert list(families([first, second])) == [(0, 1)]
    if hasattr(second.array, next(iter(other))):
        other = {"array": replace(second.array, **other)}
    assert list(families([first, replace(second, **other)])) == [(0,), (1,)]


def test_every_step_is_in_one_bundle_and_siblings_stand_together():
    job, _ = job_between(store(columns(2), DTYPE, FULL), columns(8), DTYPE)
    plan = plan_conversion([job], budget_nbytes=100_000, workers=1)

    found = [bundle for lane in plan.lanes() for bundle in lane]

    steps = [(id(step.region), step.start, step.stop) for bundle in found for step in bundle]
    assert len(steps) == len(set(steps)) == plan.step_count
    assert {len(bundle) for bundle in found} == {4}
    assert all(len({step.start for step in bundle}) == 1 for bundle in found)


def test_gaps_are_read_over_where_they_are_short_on_average():
    assert is_dense([(100, 10 + 8192)], 10)
    assert is_dense([(4, 1 << 16), (64, 1024)], 512)
    assert not is_dense([(100, 10 + 8400)], 10)
    assert not is_dense([(4, 1 << 20), (64, 1024)], 512)


def test_rows_and_whole_tensors_have_no_families():
    for source, target in [
        (split(SHAPE, mesh={"tp": 2}, dim=0), split(SHAPE, mesh={"tp": 4}, dim=0)),
        (columns(4), whole_layout(SHAPE)),
    ]:
        stored = store(source, DTYPE, FULL)
        job, _ = job_between(stored, target, DTYPE)
        plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
        assert all(len(family) == 1 for family in families(plan.regions))


def test_ranks_that_read_other_files_than_their_neighbours_are_no_family_with_them():
    stored = store(columns(2), DTYPE, FULL)
    job, _ = job_between(stored, columns(4), DTYPE)
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)

    assert list(families(plan.regions)) == [(0, 1), (2, 3)]
