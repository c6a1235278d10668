"""Blocks are done when all their bytes are, in any order, and have the digest of the bytes."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.arrays.fingerprint import Digester, scratch_nbytes
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.executors import blocks
from restride.executors.blocks import TABLE_NBYTES, Block, BlockTable
from restride.executors.events import NullObserver
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated, split
from restride.planning.fills import Pattern
from restride.planning.jobs import plan_conversion
from restride.testing.moving import MemoryFiles, job_between, store

SIZE = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", SIZE)


def planned(rows=24, columns=1000, ranks=3, dtype="uint16", budget=1 << 20):
    """A matrix cut by columns, written into one file a rank, after an empty region."""
    full = np.random.default_rng(1).integers(0, 1 << 16, rows * columns).astype(dtype)
    source = store(replicated((rows, columns), mesh={"tp": 1}), DTYPES[dtype], full)
    target = split((rows, columns), mesh={"tp": ranks}, dim=0)
    job, sizes = job_between(source, target, DTYPES[dtype])
    plan = plan_conversion([job], budget_nbytes=budget, workers=1)
    return source, plan, sizes


def whole(table, contents):
    """The digest of each block, taken of the finished files."""
    return [
        [
            Digester().digest(
                np.frombuffer(bytes(contents[region.target_file][start : start + SIZE]), np.uint8),
                start,
            )
            for start in range(0, region.nbytes, SIZE)
        ]
        for region in table.regions
    ]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 4, 256]))
def test_pieces_in_any_order_and_size_make_the_digests_of_the_whole(seed, rows):
    _, plan, sizes = planned()
    rng = np.random.default_rng(seed)
    table = BlockTable(plan.regions, digest_rows=rows)
    contents = [rng.integers(0, 256, size, np.uint8).tobytes() for size in sizes]
    pieces = []
    for file, size in enumerate(sizes):
        cuts = sorted({0, size, *map(int, rng.integers(0, size, 7))})
        pieces += [(file, a, b) for a, b in pairwise(cuts)]
    done: list[Block] = []
    left = table.left_nbytes()
    assert left == sum(sizes)
    for file, a, b in rng.permutation(pieces).tolist():
        done += table.add(file, a, memoryview(contents[file][a:b]))

    assert [list(table.digests(number)) for number in range(3)] == whole(table, contents)
    assert sorted((block.region, block.number) for block in done) == [
        (region, number) for region in range(3) for number in range(-(-sizes[region] // SIZE))
    ]
    assert all(table.digests(b.region)[b.number] == b.digest for b in done)
    assert table.nbytes(done) == sum(sizes)
    assert table.left_nbytes() == 0


class Recording(MemoryFiles):
    """Files that are written, and counted."""

    def __init__(self, table, sizes):
        super().__init__([bytes(size) for size in sizes])
        self.table = table

    def write_from(self, file, start_nbytes, buffer, /):
        super().write_from(file, start_nbytes, buffer)
        self.table.add(file, start_nbytes, buffer)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), budget=st.sampled_from([48_000, 100_000, 1 << 20]))
def test_steps_fill_what_is_not_done_and_nothing_is_counted_twice(seed, budget):
    source, plan, sizes = planned(budget=budget)
    complete = Recording(BlockTable(plan.regions, digest_rows=4), sizes)
    reader = MemoryFiles(source.contents)
    StreamingExecutor().execute(plan, reader, complete, NullObserver())
    digests = [list(complete.table.digests(number)) for number in range(3)]
    rng = np.random.default_rng(seed)
    known = [
        Block(region, number, digests[region][number])
        for region in range(3)
        for number in range(len(digests[region]))
        if rng.random() < 0.6
    ]
    table = BlockTable(plan.regions, digest_rows=4)
    for block in known:
        table.set_done(block)
    left = table.left_nbytes()
    again = Recording(table, sizes)

    StreamingExecutor().execute(plan, reader, again, NullObserver(), lanes=table.lanes())

    assert table.left_nbytes() == 0
    assert [list(table.digests(number)) for number in range(3)] == digests
    for block in set(digests_of(digests)) - set(known):
        start = block.number * SIZE
        region = plan.regions[block.region]
        expected = complete.contents[region.target_file][start : start + SIZE]
        assert again.contents[region.target_file][start : start + SIZE] == expected
    step = max(region.step_numel for region in plan.regions) * 2
    written = sum(stop - start for _, start, stop in again.writes)
    assert left <= written <= left + (len(digests_of(digests)) + 1) * 2 * step
    assert bool(left) == bool(written)


def test_steps_that_meet_nothing_that_is_left_are_left_out():
    _, plan, _ = planned(budget=48_000)
    table = BlockTable(plan.regions, digest_rows=4)
    for region in range(3):
        for number in range(len(table.digests(region))):
            if (region, number) != (1, 2):
                table.set_done(Block(region, number, 0))

    steps = [step for lane in table.lanes() for bundle in lane for step in bundle]

    assert steps
    assert table.left_nbytes() == SIZE
    for step in steps:
        assert step.region is plan.regions[1]
        assert step.start * 2 < 3 * SIZE
        assert step.stop * 2 > 2 * SIZE


def digests_of(digests):
    return [
        Block(region, number, digest)
        for region, found in enumerate(digests)
        for number, digest in enumerate(found)
    ]


def test_regions_without_bytes_take_none_of_their_neighbours():
    _, plan, _ = planned(rows=3, columns=5)
    nothing = {"target_file": 1, "target_start_nbytes": 0, "numel": 0, "pattern": Pattern.of(())}
    empty = replace(plan.regions[0], **nothing)
    table = BlockTable([plan.regions[0], empty, *plan.regions[1:]], digest_rows=1)

    (block,) = table.add(1, 0, memoryview(bytes(10)))

    assert block == Block(2, 0, 0)


@pytest.mark.usefixtures("without_kernel")
def test_a_digester_of_few_rows_takes_the_memory_it_says():
    import tracemalloc

    content = np.zeros(1 << 18, np.uint8)
    for rows in (1, 16, 256):
        Digester(rows).digest(content, 0)
        tracemalloc.start()
        Digester(rows).digest(content, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert scratch_nbytes(rows) / 2 < peak <= scratch_nbytes(rows)


@pytest.mark.parametrize("files", [1, 700, 3000])
def test_a_table_of_many_small_regions_takes_the_memory_it_says(files):
    ranks = 3000
    source = store(replicated((ranks,), mesh={"tp": 1}), DTYPES["uint16"], np.arange(ranks) * 7)
    job, _ = job_between(source, split((ranks,), mesh={"tp": ranks}, dim=0), DTYPES["uint16"])
    places = tuple(Region(rank * files // ranks, 2 * rank) for rank in range(ranks))
    job = replace(job, target_regions=places)
    plan = plan_conversion([job], budget_nbytes=1 << 24, workers=1)
    gc.collect()
    tracemalloc.start()
    try:
        table = BlockTable(plan.regions, digest_rows=1)
        for number in range(ranks):
            table.set_done(Block(number, 0, (1 << 126) + number))
        _, taken = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 0 < taken <= TABLE_NBYTES * ranks
    assert table.digests(ranks - 1) == [(1 << 126) + ranks - 1]
    assert table.left_nbytes() == 0
    for number in range(0, ranks, 97):
        file, start = places[number].file, places[number].start_nbytes
        assert [tuple(part) for part in table.parts(file, start, 2)] == [(number, 0, 0, 2)]


def test_files_without_bytes_of_tensors_are_left_out_by_a_table():
    source = store(replicated((12,), mesh={"tp": 1}), DTYPES["uint16"], np.arange(12))
    job, _ = job_between(source, split((12,), mesh={"tp": 4}, dim=0), DTYPES["uint16"])
    places = Region(2, 8), Region(2, 50), Region(5, 0), Region(9, 7)
    jobs = [replace(job, target_regions=places)]
    plan = plan_conversion(jobs, budget_nbytes=1 << 24, workers=1)

    table = BlockTable(plan.regions, digest_rows=1)

    found = [table.parts(place.file, place.start_nbytes, 6) for place in places]
    assert [[tuple(part) for part in parts] for parts in found] == [
        [(number, 0, 0, 6)] for number in range(4)
    ]


def test_a_region_is_found_by_its_first_byte_in_its_own_file():
    source = store(replicated((12,), mesh={"tp": 1}), DTYPES["uint16"], np.arange(12))
    job, _ = job_between(source, split((12,), mesh={"tp": 4}, dim=0), DTYPES["uint16"])
    places = Region(2, 8), Region(2, 50), Region(5, 0), Region(9, 7)
    plan = plan_conversion([replace(job, target_regions=places)], budget_nbytes=1 << 24, workers=1)

    table = BlockTable(plan.regions, digest_rows=1)

    assert [list(table.of_file(file)) for file in range(11)] == [
        *([], [], [0, 1], [], [], [2], [], [], [], [3], [])
    ]
    found = {(file, at): table.find(file, at) for file in range(12) for at in range(60)}
    assert {place: number for place, number in found.items() if number is not None} == {
        (place.file, place.start_nbytes): number for number, place in enumerate(places)
    }
