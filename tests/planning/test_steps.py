"""Steps of runs, which are most of all bytes, are those that walks of any form would give."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.walks import Walk
from restride.checkpoint.dtypes import DTYPES
from restride.layouts import split
from restride.planning import plan as planning
from restride.planning.fills import Fill, Pattern, Source
from restride.planning.jobs import plan_conversion, whole_layout
from restride.planning.projection import Projection, project
from restride.testing.moving import job_between, store
from restride.testing.strategies import layout_pairs

DTYPE = DTYPES["uint16"]


def planned(source, target, replicas="check"):
    full = np.arange(source.full_numel, dtype=np.uint16)
    stored = store(source, DTYPE, full)
    job, _ = job_between(stored, target, DTYPE, replicas)
    return plan_conversion([job], budget_nbytes=1 << 22, workers=1)


@given(layout_pairs(with_scales=False), st.sampled_from(["check", "first"]), st.data())
def test_any_part_of_a_region_is_filled_as_its_walks_say(pair, replicas, data):
    target, source = pair
    for region in planned(source, target, replicas).regions:
        if not region.numel:
            continue
        start = data.draw(st.integers(0, region.numel - 1))
        stop = data.draw(st.integers(start + 1, region.numel))
        is_run = region.pattern.run_count == len(region.fills) > 0
        event("runs" if is_run else "walks")

        step = region.step(start, stop)

        assert step == region._step_of_walks(start, stop, region.pattern.reaches)
        if is_run:
            assert step == region._step_of_runs(start, stop, region.pattern.reaches)
        for fill in step.fills:
            for axes in (copy.axes for _, copies in fill.copies for copy in copies):
                assert all(outer[1] >= inner[1] >= 0 for outer, inner in pairwise(axes))


@given(
    numel=st.integers(1, 30), pitch=st.integers(1, 9), ends=st.sets(st.integers(0, 34), max_size=8)
)
def test_every_step_that_meets_something_wanted_comes_once(numel, pitch, ends):
    """As after a run that had done every other block of a step: twice it would be counted twice."""
    places = sorted(ends)
    pairs = zip(places[::2], places[1::2], strict=False)
    wanted = [range(*pair) for pair in pairs if pair[0] < numel]  # the last may end behind it
    (whole,) = planned(whole_layout((numel,)), whole_layout((numel,))).regions
    region = replace(whole, step_numel=pitch)
    assert not region.streamed_numel

    starts = [step.start for step in region.steps(wanted)]

    met = {element - element % pitch for part in wanted for element in part if element < numel}
    assert starts == sorted(met)
    assert [step.start for step in region.steps()] == list(range(0, numel, pitch))


def test_fills_of_several_runs_in_any_order_are_cut_like_others():
    (region,) = planned(whole_layout((12,)), whole_layout((12,))).regions
    runs = [Walk((start, start), ((3, 1, 1),)) for start in (0, 3, 6, 9)]
    fills = tuple(Fill((Source(0, (runs[a], runs[b])),)) for a, b in ((3, 1), (0, 2)))

    pattern = Pattern.of(fills)
    one_by_one = Pattern.of(tuple(Fill((Source(0, (run,)),)) for run in reversed(runs)))

    assert (pattern.run_count, pattern.numel) == (4, 12)
    assert [reach.start for reach in pattern.reaches] == [0, 3]
    whole, apart = (
        [
            {
                (copy.source_start_nbytes, copy.run_nbytes, copy.target_start_nbytes)
                for fill in step.fills
                for _, copies in fill.copies
                for copy in copies
            }
            for step in replace(region, pattern=some, step_numel=5).steps()
        ]
        for some in (pattern, one_by_one)
    )
    assert whole == apart
    assert [len(found) for found in whole] == [2, 3, 1]


@given(
    rows=st.integers(1, 40),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    pitch=st.integers(1, 9),
    chunk=st.integers(1, 12),
    base=st.integers(0, 20),
)
def test_chunks_of_streamed_regions_are_counted_without_their_steps(
    rows, before, after, pitch, chunk, base
):
    layouts = [
        split((rows * before * after,), mesh={"dp": ranks}, dim=0) for ranks in (before, after)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_SHORTEST_RUN_NBYTES", 1)
        patch.setattr(planning, "_STREAMED_NBYTES", pitch * 2)
        patch.setattr(planning, "_CHUNK_NBYTES", chunk)
        plan = planned(*layouts)
        moved = [replace(region, target_start_nbytes=base) for region in plan.regions]
        plan = replace(plan, regions=tuple(moved))
        chunks = [
            part
            for region in plan.regions
            for step in region.steps()
            for part in step.chunks(plan.buffer_nbytes)
        ]
        found = project(plan, most_steps=1)

    assert all(region.streamed_numel for region in plan.regions)
    nbytes = sum(part.nbytes for part in chunks)
    assert found == Projection(nbytes, len(chunks), nbytes, len(chunks), is_exact=True)


def test_a_tensor_of_one_element_is_a_run():
    (region,) = planned(whole_layout(()), whole_layout(())).regions

    assert region.pattern.run_count == 1
    (fill,) = region.step(0, 1).fills
    assert [copy.run_nbytes for _, copies in fill.copies for copy in copies] == [2]
