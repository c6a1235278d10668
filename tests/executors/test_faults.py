"""What went wrong once: memory above the bound, numbers that depend on the budget, races."""

from __future__ import annotations

import os
import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import restride
from restride.arrays.casts import cast
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.errors import ExecutionError, PlanError, ReplicaError, UnsupportedError
from restride.executors._copying import StepBuffers, fill_step
from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.sources import CatalogReader
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated, split
from restride.planning.jobs import plan_conversion, whole_layout
from restride.planning.plan import BUFFERS_PER_WORKER
from restride.storage.ranges import FilePool
from restride.testing.moving import MemoryFiles, expected_shards, job_between, store
from restride.testing.strategies import layout_pairs

WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
CASTS = ("float64", "float32", "float16", "bfloat16")
SMALLEST = BUFFERS_PER_WORKER * 4096


def random_words(numel, dtype, seed):
    rng = np.random.default_rng(seed)
    nbytes = numel * dtype.itemsize_nbytes
    return rng.integers(0, 256, nbytes, dtype=np.uint8).view(WORDS[dtype.itemsize_nbytes])


def with_contents(state, contents):
    return type(state)(state.entry, state.files, tuple(contents))


def drifted(shape, dtype, *, ranks=2, every=1):
    """Copies of which all but the first differ in every so many elements."""
    full = np.arange(int(np.prod(shape)), dtype=np.uint32).astype(WORDS[dtype.itemsize_nbytes])
    state = store(replicated(shape, mesh={"tp": ranks}), dtype, full)
    other = full.copy()
    other[::every] ^= 1
    front = state.contents[0][:24]
    return with_contents(state, [state.contents[0]] + [front + other.tobytes()] * (ranks - 1))


@given(
    pair=layout_pairs(with_scales=False),
    name=st.sampled_from(sorted(DTYPES)),
    to=st.sampled_from(CASTS),
    seed=st.integers(0, 2**32 - 1),
    step_numel=st.integers(1, 40),
)
def test_steps_of_any_size_in_any_order_twice_give_the_bytes_of_walking(
    pair, name, to, seed, step_numel
):
    target, source = pair
    dtype = DTYPES[name]
    wanted_dtype = DTYPES[to] if name in CASTS else dtype
    full = random_words(source.full_numel, dtype, seed)
    state = store(source, dtype, full)
    job, sizes = job_between(state, target, wanted_dtype)
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    steps = []
    for region in plan.regions:
        cuts = [*range(0, region.numel, step_numel), region.numel]
        steps += [region.step(a, b) for a, b in pairwise(cuts) if a < b]
    out = MemoryFiles([b"\xff" * size for size in sizes])
    buffers, reader = StepBuffers(plan), MemoryFiles(state.contents)

    shuffled = random.Random(seed).sample(steps * 2, 2 * len(steps))  # noqa: S311 - an order
    for step in shuffled:
        filled = fill_step(step, reader, buffers, pytest.fail)
        out.write_from(step.region.target_file, step.target_start_nbytes, filled)

    wanted = [
        bytes(cast(shard.view(np.uint8), dtype, wanted_dtype)) if shard.size else b""
        for shard in expected_shards(target, full)
    ]
    assert [bytes(content) for content in out.contents] == wanted


@pytest.mark.parametrize("policy", ["first", "mean"])
@pytest.mark.parametrize(
    ("name", "to"),
    [("float16", "bfloat16"), ("float16", "float64"), ("float32", "float64"), ("float64",) * 2],
)
def test_differences_means_and_casts_stay_inside_the_projected_memory(name, to, policy):
    state = drifted((256, 256), DTYPES[name], ranks=3)
    layouts = [(state, policy)]
    full = random_words(1 << 17, DTYPES[name], 0)
    layouts.append((store(split((512, 256), mesh={"tp": 4}, dim=1), DTYPES[name], full), "check"))
    for source, replicas in layouts:
        target = whole_layout(source.entry.layout.full_shape)
        job, sizes = job_between(source, target, DTYPES[to], replicas)
        plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
        reader, out = MemoryFiles(source.contents), MemoryFiles([bytes(size) for size in sizes])
        SerialExecutor().execute(plan, reader, out, NullObserver())  # imports and caches are made

        tracemalloc.start()
        SerialExecutor().execute(plan, reader, out, NullObserver())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert peak <= plan.projected_nbytes <= 1 << 20


def test_the_numbers_of_a_drift_do_not_depend_on_the_budget():
    source = drifted((64, 64), DTYPES["float32"], every=4096)
    job, sizes = job_between(source, whole_layout((64, 64)), DTYPES["float32"], "first")
    found = []
    for budget in (SMALLEST + 8192, 1 << 20):
        plan = plan_conversion([job], budget_nbytes=budget, workers=1)
        table = DriftTable(NullObserver())
        out = MemoryFiles([bytes(size) for size in sizes])
        StreamingExecutor().execute(plan, MemoryFiles(source.contents), out, table)
        found.append(list(table.totals(plan)))

    assert found[0] == found[1]
    assert [(row.numel, row.different_numel) for row in found[0]] == [(4096, 1)]


def test_a_refusal_names_the_coordinates_of_the_tensor_also_for_a_target_that_is_cut():
    source = drifted((4, 6), DTYPES["float32"], every=24)
    front, values = source.contents[0][:24], bytearray(source.contents[0][24:])
    values[4 * 16] ^= 1
    source = with_contents(source, [source.contents[0], front + bytes(values)])
    target = split((4, 6), mesh={"tp": 2}, dim=1)
    job, sizes = job_between(source, target, DTYPES["float32"])
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    out = MemoryFiles([bytes(size) for size in sizes])

    with pytest.raises(ReplicaError, match=r"element 16 \(\[2, 4\] of the tensor\)") as error:
        SerialExecutor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    assert error.value.first_index == 16


def test_a_mean_of_integers_that_agree_is_what_they_are():
    source = store(replicated((8,), mesh={"tp": 3}), DTYPES["int32"], np.arange(8, dtype="u4"))
    job, sizes = job_between(source, whole_layout((8,)), DTYPES["int32"], "mean")
    plan = plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    out = MemoryFiles([bytes(size) for size in sizes])

    SerialExecutor().execute(plan, MemoryFiles(source.contents), out, NullObserver())

    assert bytes(out.contents[0]) == source.contents[0][24:]


def test_target_regions_that_overlap_or_are_missing_are_refused():
    source = store(split((8,), mesh={"tp": 2}), DTYPES["int32"], np.arange(8, dtype="u4"))
    target = split((8,), mesh={"tp": 2})
    job, _ = job_between(source, target, DTYPES["int32"])

    for regions, problem in [
        ((Region(0, 0), Region(0, 12)), "byte 12 of target file 0 belongs to"),
        ((Region(0, 0), None), "rank 1 of the target holds elements"),
    ]:
        wrong = type(job)("wte", "weight", job.source, target, regions, job.target_dtype)
        with pytest.raises(PlanError, match=problem):
            plan_conversion([wrong], budget_nbytes=1 << 20, workers=1)


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
def test_an_observer_that_raises_ends_the_run_with_its_error(executor):
    source = store(split((4096,), mesh={"tp": 4}), DTYPES["int32"], np.arange(4096, dtype="u4"))
    job, sizes = job_between(source, whole_layout((4096,)), DTYPES["int32"])
    plan = plan_conversion([job], budget_nbytes=2 * SMALLEST + 9999, workers=2)

    class Raising(NullObserver):
        def on_step(self, event, /):
            raise KeyboardInterrupt(event)

    out = MemoryFiles([bytes(size) for size in sizes])
    with pytest.raises(KeyboardInterrupt):
        executor().execute(plan, MemoryFiles(source.contents), out, Raising())


@pytest.mark.parametrize("change", ["append", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read_is_told_of(tmp_path, change):
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    catalog = restride.open(tmp_path)
    with FilePool() as pool:
        reader = CatalogReader(catalog, pool)
        reader.require_unchanged()
        if change == "append":
            path.write_bytes(path.read_bytes() + b"e")
        elif change == "replace":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()

        with pytest.raises(ExecutionError, match="changed while it was read"):
            reader.require_unchanged()


def test_a_file_that_takes_the_place_of_one_with_its_time_is_told_of(tmp_path):
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    other.write_bytes(path.read_bytes()[:-1] + b"x")
    status = path.stat()
    with FilePool() as pool:
        reader = CatalogReader(restride.open(path), pool)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)

        with pytest.raises(ExecutionError, match="changed while it was read"):
            reader.require_unchanged()


@pytest.mark.parametrize("change", [(0, 0, 1), (0, 1, 0)])
def test_a_file_with_another_number_or_another_link_is_the_same(tmp_path, change):
    """Network file systems number files anew, and backups link to them."""
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    catalog = restride.open(path)
    (file,) = catalog.files
    assert file.stamp is not None
    stamp = tuple(now + more for now, more in zip(file.stamp, change, strict=True))
    with FilePool() as pool:
        before = replace(catalog, files=(replace(file, stamp=stamp),))

        CatalogReader(before, pool).require_unchanged()


def test_a_dtype_nobody_can_cast_to_is_refused_with_those_that_can(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")

    with pytest.raises(UnsupportedError, match=r"choose float32, bfloat16, float16, float64$"):
        restride.convert(tmp_path, tmp_path / "out", dtype="float31")
