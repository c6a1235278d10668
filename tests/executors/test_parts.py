"""Parts of a plan: every block once, in order, balanced, and steps that stay inside."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.dtypes import DTYPES
from restride.executors import blocks
from restride.executors.blocks import BlockTable, block_nbytes
from restride.executors.events import NullObserver
from restride.executors.parts import Part, cut_parts
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated, split
from restride.planning.jobs import plan_conversion
from restride.testing.moving import MemoryFiles, job_between, store

SIZE = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", SIZE)


@cache
def planned(rows=24, columns=1000, ranks=3, budget=1 << 20):
    full = np.random.default_rng(1).integers(0, 1 << 16, rows * columns).astype("uint16")
    source = store(replicated((rows, columns), mesh={"tp": 1}), DTYPES["uint16"], full)
    target = split((rows, columns), mesh={"tp": ranks}, dim=0)
    job, sizes = job_between(source, target, DTYPES["uint16"])
    plan = plan_conversion([job], budget_nbytes=budget, workers=1)
    return source, plan, sizes


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_every_block_that_is_left_is_in_one_part_and_parts_differ_by_a_block(count, seed, share):
    _, plan, _ = planned()
    rng = np.random.default_rng(seed)
    every = list(Part((0, 0), (len(plan.regions), 0)).blocks(plan.regions))
    left = {block for block in every if rng.random() < share}

    cuts = cut_parts(plan.regions, lambda *block: block in left, count)

    assert len(cuts) == count + 1
    assert list(cuts) == sorted(cuts)
    parts = [Part(*cuts[n : n + 2]) for n in range(count)]
    assert Counter(b for part in parts for b in part.blocks(plan.regions)) == Counter(every)
    sizes = [
        sum(
            block_nbytes(plan.regions[r].nbytes, n)
            for r, n in part.blocks(plan.regions)
            if (r, n) in left
        )
        for part in parts
    ]
    mean = sum(sizes) / count
    assert all(abs(size - mean) <= SIZE for size in sizes)


@given(count=st.integers(1, 9), budget=st.sampled_from([70_000, 1 << 17, 1 << 20]))
def test_the_parts_together_write_every_byte_once_and_leave_others_alone(count, budget):
    source, plan, sizes = planned(budget=budget)
    whole = MemoryFiles([bytes(size) for size in sizes])
    StreamingExecutor().execute(plan, MemoryFiles(source.contents), whole, NullObserver())
    cuts = cut_parts(plan.regions, lambda *_: True, count)
    out = MemoryFiles([bytes(size) for size in sizes])
    counts = [np.zeros(size, np.int64) for size in sizes]

    class Counting:
        def write_from(self, file, start_nbytes, buffer, /):
            counts[file][start_nbytes : start_nbytes + len(buffer)] += 1
            out.write_from(file, start_nbytes, buffer)

    for number in range(count):
        part = Part(*cuts[number : number + 2])
        table = BlockTable(plan.regions, digest_rows=4)
        part.leave_others(table)
        lanes = part.clip(table.lanes(), plan.regions)
        StreamingExecutor().execute(
            plan, MemoryFiles(source.contents), Counting(), NullObserver(), lanes=lanes
        )

    assert out.contents == whole.contents
    for region in plan.regions:
        start = region.target_start_nbytes
        assert (counts[region.target_file][start : start + region.nbytes] == 1).all()
    assert sum(count.sum() for count in counts) == plan.total_nbytes


def test_others_are_left_but_what_was_done_before_keeps_its_digest():
    _, plan, _ = planned()
    table = BlockTable(plan.regions, digest_rows=4)
    table.set_done(blocks.Block(2, 1, 77))
    part = Part((0, 1), (1, 2))

    part.leave_others(table, {(2, 1)})

    assert table.digests(2)[1] == 77
    assert table.left_nbytes() == sum(
        block_nbytes(plan.regions[r].nbytes, n) for r, n in part.blocks(plan.regions)
    )
