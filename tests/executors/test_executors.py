"""The contract of every executor: same bytes as walking every element, inside the budget."""

from __future__ import annotations

import threading
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import Axis, Layout, Piece
from restride.algebra.copies import CopyAt
from restride.algebra.mesh import as_mesh
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.errors import (
    BudgetError,
    ExecutionError,
    PlanError,
    ReplicaError,
    UnsupportedError,
)
from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.layouts import permuted, replicated, split
from restride.planning import plan as planning
from restride.planning.jobs import plan_comparison, plan_conversion, whole_layout
from restride.planning.plan import BUFFERS_PER_WORKER, Plan
from restride.planning.projection import project
from restride.testing.moving import MemoryFiles, expected_shards, job_between, store
from restride.testing.oracles import walk_relation
from restride.testing.strategies import layout_pairs
from restride.wording import enough_size

EXECUTORS = [SerialExecutor, StreamingExecutor]
SMALLEST = BUFFERS_PER_WORKER * 4096
BUDGET = 1 << 20
ANY_BUDGET = 8 << 20  # some layouts of fifty elements have a thousand walks


def patterns(numel, dtype="uint32"):
    """Bit patterns that differ from element to element."""
    return (np.arange(numel, dtype=np.uint64) * 2654435761 + 1).astype(dtype)


def convert(executor, source, target, dtype, *, budget=BUDGET, replicas="check", observer=None):
    job, sizes = job_between(source, target, dtype, replicas)
    plan = plan_conversion([job], budget_nbytes=budget, workers=2)
    out = MemoryFiles([b"\xff" * size for size in sizes])
    executor().execute(plan, MemoryFiles(source.contents), out, observer or NullObserver())
    return plan, out


@pytest.mark.parametrize("executor", EXECUTORS)
@given(pair=layout_pairs(with_scales=False), width=st.sampled_from(["uint8", "uint16", "uint32"]))
def test_files_of_any_layout_become_files_of_any_other(executor, pair, width):
    target, source = pair
    full = patterns(source.full_numel, width)
    dtype = DTYPES[width]

    plan, out = convert(executor, store(source, dtype, full), target, dtype, budget=ANY_BUDGET)

    wanted = [shard.tobytes() for shard in expected_shards(target, full)]
    assert [bytes(content) for content in out.contents] == wanted
    assert plan.projected_nbytes <= ANY_BUDGET


@pytest.mark.parametrize("executor", EXECUTORS)
@given(
    pair=layout_pairs(with_scales=False),
    width=st.sampled_from(["uint8", "uint32"]),
    step_nbytes=st.integers(4, 24),
    chunk_nbytes=st.integers(4, 16),
)
def test_runs_go_through_in_chunks_with_the_same_bytes(
    executor, pair, width, step_nbytes, chunk_nbytes
):
    target, source = pair
    full = patterns(source.full_numel, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_SHORTEST_RUN_NBYTES", 1)
        patch.setattr(planning, "_STREAMED_NBYTES", step_nbytes)
        patch.setattr(planning, "_CHUNK_NBYTES", chunk_nbytes)
        stored, dtype = store(source, DTYPES[width], full), DTYPES[width]
        plan, out = convert(executor, stored, target, dtype, budget=ANY_BUDGET)
        counted = project(plan)

    assert [bytes(c) for c in out.contents] == [s.tobytes() for s in expected_shards(target, full)]
    streamed = {region.target_file for region in plan.regions if region.streamed_numel}
    assert all(b - a <= chunk_nbytes for file, a, b in out.writes if file in streamed)
    assert counted.write_count == len(out.writes)
    event(f"{len(streamed)} of {len(plan.regions)} regions are streamed")


def test_long_runs_are_streamed_and_all_else_is_put_together():
    """Rows of another number of ranks are runs; columns, casts and replicas are not."""
    full = patterns(256 * 1024)
    rows, columns = (split((256, 1024), mesh={"tp": 2}, dim=dim) for dim in (0, 1))

    def streamed(source, target, dtype="float32"):
        stored = store(source, DTYPES["float32"], full)
        job, _ = job_between(stored, target, DTYPES[dtype])
        plan = plan_conversion([job], budget_nbytes=BUDGET, workers=1)
        return [bool(region.streamed_numel) for region in plan.regions]

    whole = whole_layout((256, 1024))
    assert streamed(rows, whole) == [True]
    assert streamed(rows, split((256, 1024), mesh={"tp": 4})) == [True] * 4
    assert streamed(columns, whole) == [False]
    assert streamed(rows, whole, "bfloat16") == [False]
    assert streamed(replicated((256, 1024), mesh=as_mesh("tp=2")), whole) == [False]


@pytest.mark.parametrize("file_count", [1, 2])
def test_workers_have_files_of_their_own_and_share_one_where_there_is_no_other(file_count):
    """A system lets one thread at a time write into a file."""
    full = patterns(64 * 64)
    layout = whole_layout((64, 64))
    source = store(layout, DTYPES["float32"], full)
    job, _ = job_between(source, layout, DTYPES["float32"])
    jobs = [replace(job, target_regions=(Region(number, 0),)) for number in range(file_count)]
    budget = 2 * SMALLEST + 16_000
    plan = plan_conversion(jobs, budget_nbytes=budget, workers=2)
    together = threading.Barrier(2)
    seen: list[tuple[int, int]] = []

    class Meeting(MemoryFiles):
        def write_from(self, file, start_nbytes, buffer, /):
            seen.append((threading.get_ident(), file))
            if len(seen) <= 2:
                together.wait(30)  # each of the workers has a step of its own now
            super().write_from(file, start_nbytes, buffer)

    out = Meeting([bytes(full.nbytes)] * file_count)
    StreamingExecutor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    assert len({thread for thread, _ in seen[:2]}) == 2
    assert {file for _, file in seen[:2]} == set(range(file_count))
    assert [bytes(content) for content in out.contents] == [full.tobytes()] * file_count
    assert len(seen) == plan.step_count > 2


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("source_axis", [0, 1])
@pytest.mark.parametrize("target_axis", [0, 1])
def test_tensors_larger_than_the_budget_are_cut_into_steps(executor, source_axis, target_axis):
    shape = (96, 512)
    source = split(shape, mesh={"tp": 4}, dim=source_axis)
    target = split(shape, mesh={"tp": 3 if target_axis == 0 else 2}, dim=target_axis)
    full = patterns(96 * 512)
    budget = SMALLEST + 64 * 2048

    plan, out = convert(
        executor, store(source, DTYPES["int32"], full), target, DTYPES["int32"], budget=budget
    )

    assert [bytes(c) for c in out.contents] == [s.tobytes() for s in expected_shards(target, full)]
    assert plan.step_count >= 24
    assert plan.projected_nbytes <= budget < full.nbytes
    spans = sorted(out.writes)
    assert all(a[0] != b[0] or a[2] == b[1] for a, b in pairwise(spans))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_transpose_is_read_in_bounded_parts(executor):
    stored = permuted(split((256, 192), mesh={"tp": 2}, dim=0), (1, 0))
    full = patterns(256 * 192)

    plan, out = convert(
        executor,
        store(stored, DTYPES["float32"], full),
        whole_layout((192, 256)),
        DTYPES["float32"],
        budget=SMALLEST + 8 * 2048,
    )

    assert bytes(out.contents[0]) == full.tobytes()
    assert plan.buffer_nbytes == 4096


def test_the_smallest_budget_that_works_is_named_before_the_first_byte_moves():
    source = store(split((64,), mesh={"tp": 2}), DTYPES["int8"], patterns(64, "uint8"))
    job, _ = job_between(source, whole_layout((64,)), DTYPES["int8"])

    with pytest.raises(BudgetError) as error:
        plan_conversion([job], budget_nbytes=10_000, workers=4)

    needed = error.value.needed_nbytes
    plan = plan_conversion([job], budget_nbytes=needed, workers=4)
    assert plan.projected_nbytes == needed
    assert plan.workers == 1
    with pytest.raises(BudgetError, match=f"--memory {enough_size(needed)} or more"):
        plan_conversion([job], budget_nbytes=needed - 1, workers=4)


def drifted(dtype="float32"):
    """Two whole copies, the second with three other elements."""
    values = np.array([1.0, np.nan, -0.0, 4.0, 5.0, 6.0], np.float32)
    other = values.copy()
    other[[0, 3, 5]] = [1.5, 4.25, 6.0625]
    layout = replicated((6,), mesh=as_mesh("tp=2"))
    state = store(layout, DTYPES[dtype], values.view(np.uint32))
    front = state.contents[1][:24]
    contents = (state.contents[0], front + other.tobytes())
    return type(state)(state.entry, state.files, contents), values, other


@pytest.mark.parametrize("executor", EXECUTORS)
def test_replicas_that_drifted_are_refused_with_the_place_and_the_size(executor):
    source, _, _ = drifted()

    with pytest.raises(
        ReplicaError, match=r"'wte', state 'weight': ranks 0 and 1 .*element 0 \(1 and 1.5\)"
    ) as error:
        convert(executor, source, whole_layout((6,)), DTYPES["float32"])

    assert error.value.different_numel == 3
    assert error.value.largest == 0.5


@pytest.mark.parametrize("executor", EXECUTORS)
def test_first_takes_the_lowest_rank_and_tells_of_the_drift(executor):
    source, values, _ = drifted()
    table = DriftTable(NullObserver())

    _, out = convert(
        executor, source, whole_layout((6,)), DTYPES["float32"], replicas="first", observer=table
    )

    assert bytes(out.contents[0]) == values.tobytes()
    (row,) = table.rows.values()
    assert (row.ranks, row.numel, row.different_numel, row.largest) == ((0, 1), 6, 3, 0.5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_mean_changes_only_the_elements_that_differ(executor):
    source, values, other = drifted()

    _, out = convert(executor, source, whole_layout((6,)), DTYPES["float32"], replicas="mean")

    written = np.frombuffer(bytes(out.contents[0]), np.float32)
    changed = [0, 3, 5]
    assert np.array_equal(written[changed], (values[changed] + other[changed]) / 2)
    kept = [1, 2, 4]
    assert written[kept].tobytes() == values[kept].tobytes()


@pytest.mark.parametrize("executor", EXECUTORS)
@given(pair=layout_pairs(with_scales=False), data=st.data())
def test_a_chosen_rank_gives_its_copies_and_has_to_agree_with_itself_alone(executor, pair, data):
    """Against a walk over every copy of every element, in files of any layout to any other."""
    target, source = pair
    draw = data.draw(st.randoms(use_true_random=False))
    state = store(source, DTYPES["uint8"], np.zeros(source.full_numel, np.uint8))
    contents = [
        content[:24] + bytes(draw.choice([1, 1, 1, 2]) for _ in content[24:])
        for content in state.contents
    ]
    state = type(state)(state.entry, state.files, tuple(contents))
    rank = data.draw(st.integers(0, source.rank_count - 1))
    axes = list(source.mesh.coordinates(rank).items())
    at = CopyAt(tuple(data.draw(st.lists(st.sampled_from(axes), unique=True))) if axes else ())
    held = defaultdict(list)
    for element, holder, place, _ in walk_relation(source):
        held[element].append((holder, contents[holder][24 + place]))
    full = np.zeros(source.full_numel, np.uint8)
    is_refused = is_torn = False
    for element, copies in held.items():
        chosen = [value for holder, value in copies if at.is_at(source.mesh, holder)]
        is_refused |= not chosen and len({holder for holder, _ in copies}) > 1
        counted = chosen or [value for _, value in copies]
        is_torn |= len(set(counted)) > 1
        full[element] = counted[0]

    def run():
        return convert(executor, state, target, DTYPES["uint8"], replicas=at)[1]

    if is_refused:
        event("no copy")
        with pytest.raises(PlanError, match=r"state 'weight': .*has no copy of"):
            run()
    elif is_torn:
        event("chosen copies differ")
        with pytest.raises(ReplicaError):
            run()
    else:
        event("chosen")
        wanted = [shard.tobytes() for shard in expected_shards(target, full)]
        assert [bytes(content) for content in run().contents] == wanted


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_drift_of_a_chosen_rank_is_told_from_its_side(executor):
    source, _, other = drifted()
    table = DriftTable(NullObserver())
    last = CopyAt((("tp", 1),))

    _, out = convert(
        executor, source, whole_layout((6,)), DTYPES["float32"], replicas=last, observer=table
    )

    assert bytes(out.contents[0]) == other.tobytes()
    (row,) = table.rows.values()
    assert (row.ranks, row.numel, row.different_numel) == ((1, 0), 6, 3)


def test_only_a_scaled_copy_of_a_chosen_rank_cannot_be_read_as_it_is():
    exact = Piece((Axis(2, 1, 0, 1),))
    halved = Piece((Axis(2, 1, 0, 1),), rank_base=1, scale=Fraction(1, 2))
    layout = Layout.of({"tp": 2}, (2,), [(2,)] * 2, [exact, halved])
    source = store(layout, DTYPES["uint8"], patterns(2, "uint8"))
    last = CopyAt((("tp", 1),))

    with pytest.raises(PlanError, match="tp=1 has no copy that can be read as it is"):
        convert(SerialExecutor, source, whole_layout((2,)), DTYPES["uint8"], replicas=last)


def test_a_mean_of_integers_is_refused():
    source, _, _ = drifted("int32")

    with pytest.raises(UnsupportedError, match="mean of int32"):
        convert(SerialExecutor, source, whole_layout((6,)), DTYPES["int32"], replicas="mean")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_comparison_reads_every_replica_and_writes_nothing(executor):
    source, _, _ = drifted()
    table = DriftTable(NullObserver())
    plan = plan_comparison([("wte", "weight", source.entry)], budget_nbytes=BUDGET, workers=2)

    read = executor().execute(plan, MemoryFiles(source.contents), None, table)

    assert read == 2 * 6 * 4
    assert [row.different_numel for row in table.rows.values()] == [3]


def test_a_comparison_skips_what_only_one_rank_holds():
    source = store(split((64,), mesh={"tp": 2}), DTYPES["int8"], patterns(64, "uint8"))

    plan = plan_comparison([("wte", "weight", source.entry)], budget_nbytes=BUDGET, workers=2)

    assert plan.regions == ()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_cast_is_a_step_of_the_plan(executor):
    values = np.linspace(-3, 3, 100, dtype=np.float32)
    source = store(split((100,), mesh={"tp": 4}), DTYPES["float32"], values.view(np.uint32))

    _, out = convert(executor, source, whole_layout((100,)), DTYPES["float16"])

    assert bytes(out.contents[0]) == values.astype(np.float16).tobytes()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_of_a_read_stops_the_run_and_reaches_the_caller(executor):
    source = store(split((4096,), mesh={"tp": 4}), DTYPES["int32"], patterns(4096))
    job, sizes = job_between(source, whole_layout((4096,)), DTYPES["int32"])
    plan = plan_conversion([job], budget_nbytes=SMALLEST * 2 + 16384, workers=2)
    out = MemoryFiles([bytes(size) for size in sizes])

    class Failing(MemoryFiles):
        def read_into(self, file, start_nbytes, buffer, /):
            if file == 1:
                raise ExecutionError("the disk is gone", where="rank1")
            super().read_into(file, start_nbytes, buffer)

    with pytest.raises(ExecutionError, match="rank1: the disk is gone"):
        executor().execute(plan, Failing(source.contents), out, NullObserver())

    assert len(out.writes) < plan.step_count


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_step_is_told_to_the_observer(executor):
    source = store(split((4096,), mesh={"tp": 4}), DTYPES["int32"], patterns(4096))
    events = []

    class Recorder(NullObserver):
        def on_step(self, event, /):
            events.append(event)

    plan, _ = convert(
        executor,
        source,
        whole_layout((4096,)),
        DTYPES["int32"],
        budget=SMALLEST + 16384,
        observer=Recorder(),
    )

    assert [event.done_steps for event in events] == list(range(1, plan.step_count + 1))
    assert events[-1].done_nbytes == plan.total_nbytes == 4096 * 4
    assert events[-1].read_nbytes == 4096 * 4


def test_an_empty_plan_has_nothing_to_do():
    plan = Plan((), 4096, 1)

    assert StreamingExecutor().execute(plan, MemoryFiles([]), None, NullObserver()) == 0
    assert (plan.step_count, plan.total_nbytes) == (0, 0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_number_against_no_number_is_infinitely_far(executor):
    values = np.array([1.0, np.nan], np.float32)
    state = store(replicated((2,), mesh={"tp": 2}), DTYPES["float32"], values.view(np.uint32))
    other = np.array([np.nan, np.nan], np.float32).tobytes()
    source = type(state)(state.entry, state.files, (state.contents[0], bytes(24) + other))

    with pytest.raises(ReplicaError) as error:
        convert(executor, source, whole_layout((2,)), DTYPES["float32"])

    assert (error.value.different_numel, error.value.largest) == (1, np.inf)
    assert error.value.first_index == 0
