"""What reviews found: costs that grew with fills and ranks, threads that ran on, wrong words."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from restride import Axis, Layout, Piece, api
from restride.checkpoint.catalog import Catalog, TensorEntry
from restride.checkpoint.dtypes import DTYPES
from restride.errors import ExistsError, ReplicaError
from restride.executors import _copying, streaming
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated, split
from restride.planning import jobs
from restride.planning.jobs import plan_comparison, plan_conversion, whole_layout
from restride.planning.plan import BUFFERS_PER_WORKER
from restride.testing.command_line import SAMPLE
from restride.testing.moving import MemoryFiles, job_between, store

FLOAT = DTYPES["float32"]


def numbers(numel):
    return np.arange(1, numel + 1, dtype=np.float32).view(np.uint32)


def twice_in_a_shard():
    """Rank 1 of two holds its two elements twice, and not the same."""
    first = Piece((Axis(2, 1, 0, 1),))
    again = Piece((Axis(2, 0, 0, 2), Axis(2, 1, 0, 1)), full_base=2, rank_base=1)
    layout = Layout.of({"tp": 2}, (4,), [(2,), (4,)], [first, again])
    state = store(layout, FLOAT, numbers(4))
    content = bytearray(state.contents[1])
    content[-4:] = np.float32(9).tobytes()
    return type(state)(state.entry, state.files, (state.contents[0], bytes(content)))


def test_a_rank_that_contradicts_itself_is_not_called_two_ranks():
    source = twice_in_a_shard()
    job, sizes = job_between(source, whole_layout((4,)), FLOAT)
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    out = MemoryFiles([bytes(size) for size in sizes])

    with pytest.raises(ReplicaError, match="rank 1 holds different copies of the same elements"):
        SerialExecutor().execute(plan, MemoryFiles(source.contents), out, NullObserver())


def test_a_rank_that_contradicts_itself_is_one_rank_in_the_table_as_well():
    source = twice_in_a_shard()
    states = [("wte", "weight", source.entry)]
    plan = plan_comparison(states, budget_nbytes=1 << 20, workers=1)
    table = DriftTable(NullObserver())
    SerialExecutor().execute(plan, MemoryFiles(source.contents), None, table)
    layout = source.entry.layout
    tensor = TensorEntry("wte", "parameter", layout, {"weight": source.entry})
    catalog = Catalog("test", "", source.files, layout.mesh, (tensor,), {})

    (finding,) = drift_findings(catalog, table.totals(plan))

    assert "rank 1 (tp=1) holds different copies of 1 of 2 elements" in finding.message
    assert finding.details["ranks"] == [1, 1]


def test_check_tells_its_observer_of_the_end():
    events = []

    class Recorder(NullObserver):
        def on_plan(self, event, /):
            events.append(("plan", event.total_nbytes > 0))

        def on_finish(self, event, /):
            events.append(("finish", event.written_nbytes, event.read_nbytes > 0))

    api.check(SAMPLE, observer=Recorder())

    assert events == [("plan", True), ("finish", 0, True)]


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (streaming, "StepBuffers", MemoryError("no buffers")),
    ],
)
def test_workers_stop_where_another_one_cannot_begin(monkeypatch, place, name, error):
    """The first one is in the middle of its first step when the second cannot be started."""
    source = store(split((1 << 14,), mesh={"tp": 4}), FLOAT, numbers(1 << 14))
    job, sizes = job_between(source, whole_layout((1 << 14,)), FLOAT)
    budget = BUFFERS_PER_WORKER * 4096 * 2 + 24576
    plan = plan_conversion([job], budget_nbytes=budget, workers=2)
    assert plan.workers == 2
    runs, given, waited, reads = [], [], [], threading.Event()
    run_type, give = streaming._Run, getattr(place, name)

    def remember(*arguments):
        runs.append(run_type(*arguments))
        return runs[0]

    def give_one(*arguments):
        given.append(arguments)
        if len(given) > 1:
            assert reads.wait(20)
            raise error
        return give(*arguments)

    class Waiting(MemoryFiles):
        def read_into(self, file, start_nbytes, buffer, /):
            reads.set()
            if not waited:
                waited.append(runs[0].stop.wait(timeout=20))
            super().read_into(file, start_nbytes, buffer)

    monkeypatch.setattr(streaming, "_Run", remember)
    monkeypatch.setattr(place, name, give_one)
    out = MemoryFiles([bytes(size) for size in sizes])

    with pytest.raises(type(error), match=str(error)):
        StreamingExecutor().execute(plan, Waiting(source.contents), out, NullObserver())

    assert waited == [True]
    assert len(out.writes) == 1 < plan.step_count


def test_copies_that_agree_are_compared_in_one_pass_for_all_fills(monkeypatch):
    """Sixteen stripes of two ranks each, in one step of the target."""
    stripes = [
        Piece((Axis(2, 0, 1, 0), Axis(4, 1, 0, 1)), full_base=4 * n, shard_base=4 * (n * 7 % 16))
        for n in range(16)
    ]
    layout = Layout.of({"tp": 2}, (64,), [(64,)] * 2, stripes)
    source = store(layout, FLOAT, numbers(64))
    job, sizes = job_between(source, whole_layout((64,)), FLOAT)
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    (step,) = plan.regions[0].steps()
    assert len(step.fills) > 2
    compared = []
    same = _copying.same_bytes
    monkeypatch.setattr(
        _copying, "same_bytes", lambda a, b: compared.append(a.nbytes) or same(a, b)
    )
    out = MemoryFiles([bytes(size) for size in sizes])

    SerialExecutor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    assert compared == [256]
    assert bytes(out.contents[0]) == numbers(64).tobytes()


def test_the_relation_of_two_layouts_is_made_once_for_all_target_ranks(monkeypatch):
    source = store(replicated((64,), mesh={"tp": 2}), FLOAT, numbers(64))
    job, _ = job_between(source, split((64,), mesh={"tp": 8}), FLOAT)
    made = []
    compose = jobs.compose
    monkeypatch.setattr(jobs, "compose", lambda *pair: made.append(pair) or compose(*pair))

    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)

    assert len(plan.regions) == 8
    assert len(made) == 1


def test_a_folder_that_holds_the_linked_files_of_the_source_is_not_replaced(tmp_path):
    """`--force` means the old output; a source of links may have its bytes in there."""
    real, linked = tmp_path / "real", tmp_path / "linked"
    shutil.copytree(SAMPLE, real)
    shutil.copytree(SAMPLE, linked)
    for path in sorted(linked.rglob("*.pt")):
        path.unlink()
        path.symlink_to(real / path.relative_to(linked))
    before = sorted(path for path in real.rglob("*") if path.is_file())

    for force in (False, True):
        with pytest.raises(ExistsError) as error:
            api.convert(linked, real, force=force)
        assert str(real) in str(error.value)

    assert sorted(path for path in real.rglob("*") if path.is_file()) == before
    assert api.check(linked).verdict == "ok"
    assert Path(api.convert(linked, tmp_path / "out").out).is_dir()
