"""Steps between files, in calls of the kernel: the same files and digests, the same errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.arrays import _kernel
from restride.arrays.program import Program
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile
from restride.errors import CorruptError, ReplicaError
from restride.executors import blocks, direct, journaled, streaming
from restride.executors.blocks import BlockTable
from restride.executors.direct import Direct, direct_between
from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.journaled import JournaledWriter
from restride.executors.sources import CatalogReader
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated, split
from restride.planning import plan as planning
from restride.planning.jobs import plan_conversion, whole_layout
from restride.storage.output_files import OutputFiles
from restride.storage.ranges import FilePool
from restride.testing.moving import MemoryFiles, expected_shards, job_between, store
from restride.testing.strategies import layout_pairs

pytestmark = pytest.mark.skipif(_kernel.KERNEL is None, reason="installed without a kernel")

BUDGET = 1 << 20


@contextmanager
def small_sizes(block_nbytes=64, streamed_nbytes=40):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_NBYTES", block_nbytes)
        patch.setattr(planning, "_SHORTEST_RUN_NBYTES", 8)
        patch.setattr(planning, "_STREAMED_NBYTES", streamed_nbytes)
        yield


def write_sources(folder, stored):
    folder.mkdir()
    for file, content in zip(stored.files, stored.contents, strict=True):
        (folder / file.name).write_bytes(content)
    return SimpleNamespace(root=str(folder), files=stored.files)


def run(
    folder,
    catalog,
    plan,
    sizes,
    *,
    pool=None,
    is_durable=False,
    note=lambda _: None,
    sync_nbytes=1 << 30,
    observer=None,
    stop=None,
):
    """Carry out a plan between files; return their contents and digests, and bytes read."""
    output = Output(tuple(OutputFile(f"{n}", size) for n, size in enumerate(sizes)), ())
    table = BlockTable(plan.regions, digest_rows=4)
    (folder / "out").mkdir()
    with OutputFiles(folder / "out", durable=is_durable) as files, pool or FilePool() as sources:
        files.create(output)
        place = SimpleNamespace(files=files, note=note, keeps=False)
        writer = JournaledWriter(
            *(place, output, table, DriftTable(NullObserver()), lambda: None),
            sync_nbytes=sync_nbytes,
        )
        with writer:
            read_nbytes = StreamingExecutor().execute(
                plan,
                CatalogReader(catalog, sources),
                writer,
                observer or NullObserver(),
                lanes=table.lanes(),
                stop=stop,
            )
    contents = [(folder / "out" / file.name).read_bytes() for file in output.files]
    digests = [tuple(table.digests(number)) for number in range(len(plan.regions))]
    return contents, digests, read_nbytes, table.left_nbytes()


@pytest.fixture
def carried_out(monkeypatch):
    """What `Direct.carry_out` said of each batch."""
    said = []
    real = Direct.carry_out

    def carry_out(self, batch):
        said.append(real(self, batch))
        return said[-1]

    monkeypatch.setattr(Direct, "carry_out", carry_out)
    return said


@given(
    pair=layout_pairs(with_scales=False),
    width=st.sampled_from(["uint8", "uint16", "uint32"]),
    most=st.sampled_from([2, 512]),
    workers=st.integers(1, 2),
)
def test_any_layout_becomes_any_other_with_the_bytes_and_digests_of_single_steps(
    pair, width, most, workers
):
    target, source = pair
    full = (np.arange(source.full_numel, dtype=np.uint64) * 2654435761 + 1).astype(width)
    stored = store(source, DTYPES[width], full)
    results = []
    with TemporaryDirectory() as folder, small_sizes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_MOST_MOVES", most)
        catalog = write_sources(Path(folder, "source"), stored)
        job, sizes = job_between(stored, target, DTYPES[width])
        plan = plan_conversion([job], budget_nbytes=BUDGET, workers=workers)
        said = []
        real = Direct.carry_out
        for carry_out in (lambda *a: said.append(real(*a)) or said[-1], lambda *_: False):
            patch.setattr(Direct, "carry_out", carry_out)
            at = Path(folder, str(len(results)))
            at.mkdir()
            results.append(run(at, catalog, plan, sizes))

    assert results[0] == results[1]
    assert results[0][0] == [shard.tobytes() for shard in expected_shards(target, full)]
    assert results[0][3] == 0
    event(f"direct: {sum(said)} of {len(said)} batches")


def wide(tmp_path, *, ranks=2, rows=512, columns=512, dim=1):
    """A matrix that is cut over some files, to be put together."""
    full = np.arange(rows * columns, dtype=np.uint32)
    stored = store(split((rows, columns), mesh={"tp": ranks}, dim=dim), DTYPES["uint32"], full)
    job, sizes = job_between(stored, whole_layout((rows, columns)), DTYPES["uint32"])
    plan = plan_conversion([job], budget_nbytes=8 << 20, workers=1)
    return write_sources(tmp_path / "source", stored), plan, sizes, full


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_take_the_short_way(tmp_path, carried_out, dim):
    catalog, plan, sizes, full = wide(tmp_path, dim=dim)

    contents, _, read_nbytes, left = run(tmp_path, catalog, plan, sizes)

    assert contents == [full.tobytes()]
    assert set(carried_out) == {True}
    assert (read_nbytes, left) == (full.nbytes, 0)


def test_what_comes_after_shared_rows_is_read_by_itself(tmp_path, carried_out):
    full = np.arange(96 * 512, dtype=np.uint32)
    stored = store(whole_layout((96, 512)), DTYPES["uint32"], full)
    columns = split((96, 512), mesh={"tp": 4}, dim=1)
    job, sizes = job_between(stored, columns, DTYPES["uint32"])
    row = whole_layout((512,))
    other = replace(
        job,
        tensor="bias",
        source=replace(stored.entry, layout=row),  # the first row of the same file
        target_layout=row,
        target_regions=(Region(4, 0),),
    )
    plan = plan_conversion([job, other], budget_nbytes=BUDGET, workers=1)
    catalog = write_sources(tmp_path / "source", stored)

    contents, *_ = run(tmp_path, catalog, plan, [*sizes, 2048])

    assert contents == [
        *(shard.tobytes() for shard in expected_shards(columns, full)),
        full[:512].tobytes(),
    ]
    assert set(carried_out) == {True}


def test_steps_that_cast_take_the_long_way(tmp_path, carried_out):
    full = np.arange(4096, dtype=np.float32).view(np.uint32)
    stored = store(whole_layout((4096,)), DTYPES["float32"], full)
    job, sizes = job_between(stored, whole_layout((4096,)), DTYPES["float64"])
    plan = plan_conversion([job], budget_nbytes=BUDGET, workers=1)

    contents, *_ = run(tmp_path, write_sources(tmp_path / "source", stored), plan, sizes)

    assert contents == [np.arange(4096, dtype=np.float64).tobytes()]
    assert set(carried_out) == {False}


def copies(tmp_path, *, ranks=3, numel=4096, drifted=None, replicas="check"):
    """A vector that all ranks hold, one of them perhaps with another element."""
    full = np.arange(numel, dtype=np.uint32)
    stored = store(replicated((numel,), mesh={"tp": ranks}), DTYPES["uint32"], full)
    source = write_sources(tmp_path / "source", stored)
    if drifted is not None:
        with (tmp_path / "source" / stored.files[-1].name).open("r+b") as file:
            file.seek(stored.files[-1].nbytes - 4 * (numel - drifted))
            file.write(b"\xa5")
    job, sizes = job_between(stored, whole_layout((numel,)), DTYPES["uint32"])
    jobs = [replace(job, replicas=replicas)]
    plan = plan_conversion(jobs, budget_nbytes=BUDGET, workers=1)
    return source, plan, sizes, full


@pytest.mark.parametrize("most", [2, 512])
def test_copies_that_agree_are_read_and_compared_on_the_short_way(
    tmp_path, carried_out, monkeypatch, most
):
    monkeypatch.setattr(direct, "_MOST_MOVES", most)
    catalog, plan, sizes, full = copies(tmp_path)

    contents, _, read_nbytes, left = run(tmp_path, catalog, plan, sizes)

    assert (contents, left) == ([full.tobytes()], 0)
    assert set(carried_out) == {True}
    assert read_nbytes == 3 * full.nbytes


@pytest.mark.parametrize("drifted", [0, 2047, 4095])
def test_copies_that_differ_are_told_of_on_the_long_way(tmp_path, carried_out, drifted):
    catalog, plan, sizes, _ = copies(tmp_path, drifted=drifted)

    with pytest.raises(ReplicaError, match=f"ranks 0 and 2 hold .* element {drifted} ") as caught:
        run(tmp_path, catalog, plan, sizes)

    assert caught.value.different_numel == 1
    assert carried_out[-1] is False


def striped(tmp_path, drifted):
    """Six stripes in one step: one rank holds all, the other one every second, in another order."""
    both = [
        Piece((Axis(2, 0, 1, 0), Axis(64, 1, 0, 1)), full_base=start, shard_base=place)
        for start, place in ((64, 128), (192, 0), (320, 64))
    ]
    own = [
        Piece((Axis(64, 1, 0, 1),), full_base=start, shard_base=place)
        for start, place in ((0, 256), (128, 192), (256, 320))
    ]
    layout = Layout.of({"tp": 2}, (384,), [(384,), (192,)], [*both, *own])
    full = np.arange(384, dtype=np.uint32)
    stored = store(layout, DTYPES["uint32"], full)
    source = write_sources(tmp_path / "source", stored)
    if drifted is not None:
        with (tmp_path / "source" / "rank1").open("r+b") as file:
            file.seek(stored.files[1].nbytes - 4 * (192 - drifted))
            file.write(b"\xa5")
    job, sizes = job_between(stored, whole_layout((384,)), DTYPES["uint32"])
    plan = plan_conversion([job], budget_nbytes=BUDGET, workers=1)
    return source, plan, sizes, full


def test_a_step_of_which_only_parts_have_copies_takes_the_short_way(tmp_path, carried_out):
    catalog, plan, sizes, full = striped(tmp_path, None)

    contents, *_ = run(tmp_path, catalog, plan, sizes)

    assert contents == [full.tobytes()]
    assert carried_out == [True]


@pytest.mark.parametrize(("drifted", "element"), [(0, 192), (63, 255), (64, 320), (191, 127)])
def test_every_part_of_a_step_that_has_copies_is_compared(tmp_path, drifted, element):
    catalog, plan, sizes, _ = striped(tmp_path, drifted)

    with pytest.raises(ReplicaError, match=f" element {element} "):
        run(tmp_path, catalog, plan, sizes)


def test_copies_that_may_differ_are_written_as_the_first_one_has_them(tmp_path, carried_out):
    catalog, plan, sizes, full = copies(tmp_path, drifted=5, replicas="first")

    contents, *_ = run(tmp_path, catalog, plan, sizes)

    assert contents == [full.tobytes()]
    assert False in carried_out


def test_small_steps_are_done_together_and_large_ones_alone(tmp_path, carried_out, monkeypatch):
    steps = 1 << 6
    with small_sizes(block_nbytes=1 << 14, streamed_nbytes=1 << 14):
        catalog, plan, sizes, full = wide(tmp_path, dim=0)
        contents, *_ = run(tmp_path, catalog, plan, sizes)
        few = len(carried_out)
        monkeypatch.setattr(streaming, "_BATCH_NBYTES", 1 << 14)
        again = tmp_path / "again"
        again.mkdir()
        run(again, catalog, plan, sizes)

    assert plan.step_count == steps
    assert contents == [full.tobytes()]
    assert few == steps / streaming._MOST_BUNDLES
    assert len(carried_out) - few == steps


def test_of_steps_that_are_done_together_only_those_with_a_fault_take_the_long_way(
    tmp_path, carried_out
):
    catalog, plan, sizes, full = copies(tmp_path, numel=1 << 18, drifted=99_999, replicas="first")
    steps, most = plan.step_count, streaming._MOST_BUNDLES

    contents, _, read_nbytes, left = run(tmp_path, catalog, plan, sizes)

    assert contents == [full.tobytes()]
    assert (read_nbytes, left) == (3 * full.nbytes, 0)
    assert steps > 2 * most
    assert carried_out.count(False) == 2, "its batch, and itself"
    assert carried_out.count(True) == -(-steps // most) - 1 + most - 1


def test_nothing_more_of_what_was_taken_up_together_is_begun_after_a_stop(tmp_path):
    full = np.arange(1 << 16, dtype=np.float32).view(np.uint32)
    stored = store(whole_layout((1 << 16,)), DTYPES["float32"], full)
    job, sizes = job_between(stored, whole_layout((1 << 16,)), DTYPES["float64"])
    plan = plan_conversion([job], budget_nbytes=BUDGET, workers=1)
    stop, seen = threading.Event(), []

    class Stopping(NullObserver):
        def on_step(self, event):
            seen.append(event)
            stop.set()

    source = write_sources(tmp_path / "source", stored)
    contents, *_ = run(tmp_path, source, plan, sizes, observer=Stopping(), stop=stop)

    assert plan.step_count > 1
    done = [event.done_nbytes for event in seen]
    assert len(done) == 1
    assert any(contents[0][: done[0]])
    assert not any(contents[0][done[0] :])


def test_files_in_memory_take_the_long_way():
    buffers = SimpleNamespace()
    assert direct_between(MemoryFiles([]), MemoryFiles([]), buffers) is None


def test_more_files_than_may_be_open_are_read_one_after_the_other(tmp_path, carried_out):
    """Who holds one and waits for the next could wait for ever."""
    catalog, plan, sizes, full = wide(tmp_path, ranks=4)

    contents, *_ = run(tmp_path, catalog, plan, sizes, pool=FilePool(max_open=2))

    assert contents == [full.tobytes()]
    assert set(carried_out) == {False}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_source_that_ends_early_is_the_error_of_the_step(tmp_path, carried_out, dim):
    catalog, plan, sizes, _ = wide(tmp_path, dim=dim)
    path = tmp_path / "source" / "rank1"
    os.truncate(path, path.stat().st_size - 4)

    with pytest.raises(CorruptError, match=r"rank1: the file ends at byte \d+, yet"):
        run(tmp_path, catalog, plan, sizes)

    assert carried_out[-1] is False


@pytest.mark.parametrize("dim", [0, 1])
def test_a_program_has_no_more_moves_than_are_allowed(tmp_path, carried_out, monkeypatch, dim):
    """A step of many short runs would have a program that the memory budget knows nothing of."""
    sizes_of_programs = []
    really_run = Program.run

    def counted_run(self):
        sizes_of_programs.append(len(self._parts))
        return really_run(self)

    monkeypatch.setattr(Program, "run", counted_run)
    monkeypatch.setattr(direct, "_MOST_MOVES", 4)
    with small_sizes(block_nbytes=1 << 12, streamed_nbytes=1 << 18):
        catalog, plan, sizes, full = wide(tmp_path, ranks=32, dim=dim)
        contents, _, _, left = run(tmp_path, catalog, plan, sizes)

    assert (contents, left) == ([full.tobytes()], 0)
    assert set(carried_out) == {True}
    assert max(sizes_of_programs) <= 2 * 4  # a move and the weights of its digest


def test_a_full_disk_is_the_error_of_the_step(tmp_path):
    """In a process of its own, in which files may not get larger than a megabyte."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.stdout.startswith(f"{tmp_path}/out/0: cannot write "), done.stderr
    assert "(File too large)" in done.stdout
    assert "False" in done.stdout


FULL = f"""
import resource, signal, sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import test_direct as here
from restride.errors import ExecutionError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
catalog, plan, sizes, _ = here.wide(folder, rows=1024, columns=1024, dim=0)
said, real = [], here.Direct.carry_out
here.Direct.carry_out = lambda *a: said.append(real(*a)) or said[-1]
create = here.OutputFiles.create
def limited(*arguments):
    create(*arguments)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
here.OutputFiles.create = limited
try:
    here.run(folder, catalog, plan, sizes)
except ExecutionError as error:
    print(error, said)
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_noted_was_written_before_the_sync_began(tmp_path, carried_out, monkeypatch, dim):
    """Whatever the power leaves then is as it was noted."""
    monkeypatch.setattr(planning, "_STREAMED_NBYTES", 1 << 17)
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 1 << 16)
    catalog, plan, sizes, full = wide(tmp_path, dim=dim)
    synced, noted = [], set()
    begun = threading.Event()
    really_sync, really_count = OutputFiles.sync_files, JournaledWriter.count

    def sync_files(self, names):
        (name,) = names
        synced.append((self.path / name).read_bytes())
        begun.set()
        really_sync(self, [name])

    def count(*arguments):
        really_count(*arguments)
        assert begun.wait(30)  # so that there is more than one

    monkeypatch.setattr(OutputFiles, "sync_files", sync_files)
    monkeypatch.setattr(JournaledWriter, "count", count)

    def note(records):
        for record in records:
            start = record["block"] << 16
            stop = start + record["nbytes"]
            noted.update(range(start, stop, 1 << 16))
            assert synced[-1][start:stop] == full.tobytes()[start:stop]

    run(tmp_path, catalog, plan, sizes, is_durable=True, note=note, sync_nbytes=1)

    assert set(carried_out) == {True}
    assert noted == set(range(0, full.nbytes, 1 << 16))
    assert len(synced) > 1


@pytest.mark.parametrize(
    ("is_durable", "least_nbytes", "unstarted_nbytes", "available_nbytes"),
    [
        (True, 0, 0, 0),
        (False, 1 << 16, 0, 0),
        (False, (1 << 16) + 1, 0, 0),
        (False, 1 << 16, 1 << 18, 0),
        (False, 1 << 16, 1 << 30, 0),
        (False, 1 << 16, 0, 1 << 21),
        (False, 1 << 16, 0, 1 << 33),
    ],
)
def test_without_a_sync_the_disk_is_told_to_begin_with_every_large_block_of_a_large_output(
    tmp_path, monkeypatch, is_durable, least_nbytes, unstarted_nbytes, available_nbytes
):
    monkeypatch.setattr(journaled, "_UNSTARTED_NBYTES", unstarted_nbytes)
    monkeypatch.setattr(journaled, "available_nbytes", lambda: available_nbytes)
    catalog, plan, sizes, full = wide(tmp_path, dim=0)
    is_large = full.nbytes > max(2 * unstarted_nbytes, available_nbytes // 8)
    is_told = not is_durable and least_nbytes <= 1 << 16 and is_large
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 1 << 16)
    monkeypatch.setattr(journaled, "BLOCK_NBYTES", 1 << 16)
    monkeypatch.setattr(journaled, "_STARTED_NBYTES", 1)
    monkeypatch.setattr(journaled, "_LEAST_STARTED_NBYTES", least_nbytes)
    monkeypatch.setattr(journaled, "_SYNC_SECONDS", 3600.0)
    started = set()
    begun = threading.Event()

    def start_writing(_, name, start_nbytes, nbytes):
        started.add((name, start_nbytes, nbytes))
        begun.set()

    def count(*arguments):
        really_count(*arguments)
        if is_told:
            assert begun.wait(30)  # before the writing goes on

    really_count = JournaledWriter.count
    monkeypatch.setattr(JournaledWriter, "count", count)

    monkeypatch.setattr(OutputFiles, "start_writing", start_writing)
    notes = []

    contents, *_ = run(tmp_path, catalog, plan, sizes, is_durable=is_durable, note=notes.append)

    assert contents == [full.tobytes()]
    assert len(notes) == 1  # as often as with a sync: before each, all sources are looked at
    every = {("0", start, 1 << 16) for start in range(0, full.nbytes, 1 << 16)}
    assert started <= every  # what is done when the writing ends needs no hint
    assert len(started) << 16 <= full.nbytes - min(unstarted_nbytes, full.nbytes)
    assert bool(started) is is_told
