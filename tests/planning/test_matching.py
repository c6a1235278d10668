"""Tensors that are cut alike are matched once, and are planned as if each stood alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.catalog import Region, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.selection import select_optimizer, select_weights
from restride.formats.deepspeed import read_catalog
from restride.layouts import replicated, split
from restride.planning import jobs
from restride.planning.jobs import Job, plan_conversion, whole_layout
from restride.testing.command_line import SAMPLE

DTYPE = DTYPES["float32"]
SHARD_NBYTES = 1 << 10


def layouts(ranks):
    """Made anew for each tensor, as readers do."""
    return [
        split((12, 6), dim=0, mesh={"tp": ranks}),
        split((12, 6), dim=1, mesh={"tp": ranks}),
        replicated((12, 6), mesh={"tp": ranks}),
    ]


def job(number, source, target):
    regions = [Region(rank, number * SHARD_NBYTES) for rank in range(source.rank_count)]
    targets = [Region(rank, number * SHARD_NBYTES) for rank in range(target.rank_count)]
    entry = StateEntry(DTYPE, source, tuple(regions))
    return Job(f"t{number}", "weight", entry, target, tuple(targets), DTYPE)


def planned(jobs):
    return plan_conversion(jobs, budget_nbytes=1 << 24, workers=1).regions


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6))
def test_a_plan_of_many_tensors_is_the_plans_of_each(cuts):
    jobs = [
        job(number, layouts(2)[source], layouts(3)[target])
        for number, (source, target) in enumerate(cuts)
    ]

    alone = [region for one in jobs for region in planned([one])]

    assert planned(jobs) == tuple(
        sorted(alone, key=lambda region: (region.target_file, region.target_start_nbytes))
    )


@pytest.fixture
def composed(monkeypatch):
    """How often each pair of layouts was matched."""
    found = Counter()
    compose = jobs.compose

    def counted(target, source):
        found[target, source] += 1
        return compose(target, source)

    monkeypatch.setattr(jobs, "compose", counted)
    return found


def test_each_two_layouts_are_matched_once(composed):
    catalog = read_catalog(SAMPLE)
    selected = [*select_weights(catalog), *select_optimizer(catalog)]
    jobs = [
        Job(
            *(item.tensor, item.state, item.entry, whole_layout(item.entry.layout.full_shape)),
            (Region(number, 0),),
            item.entry.dtype,
        )
        for number, item in enumerate(selected)
    ]

    plan_conversion(jobs, budget_nbytes=1 << 24, workers=1)

    assert composed == Counter({(job.target_layout, job.source.layout) for job in jobs})
    assert len(composed) < len(jobs) / 2
