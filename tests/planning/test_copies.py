"""Which copy of an element a target rank reads, where several source ranks hold it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.compose import chain
from restride.algebra.mesh import as_mesh
from restride.checkpoint.catalog import Region, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.layouts import flat_chunks, replicated, zero_group
from restride.planning.jobs import Job, plan_conversion, plan_reading

DTYPE = DTYPES["float32"]
SHAPE = (7,)


def flat(dp, tp, before):
    """A parameter that all tensor-parallel ranks have, behind others of theirs in the buffer."""
    inner = {
        rank: zero_group([(before[rank] + 1,), SHAPE], mesh={"dp": dp}).members[1].layout
        for rank in range(tp)
    }
    return chain(replicated(SHAPE, mesh={"tp": tp}), inner, mesh=as_mesh(f"dp={dp},tp={tp}"))


def entry(layout):
    regions = [Region(rank, 0) for rank in range(layout.rank_count)]
    return StateEntry(DTYPE, layout, tuple(regions))


def planned(source, target, replicas):
    job = Job(
        *("w", "fp32", entry(source), target),
        tuple(Region(rank, 0) for rank in range(target.rank_count)),
        *(DTYPE, replicas),
    )
    return plan_conversion([job], budget_nbytes=1 << 22, workers=1)


def sources(region):
    """Rank that is read for each element of a target shard, and how many copies must agree."""
    found = {}
    for fill in region.fills:
        rank = fill.sources[0].rank
        for element in range(fill.target_range.start, fill.target_range.stop):
            found[element] = rank, fill.agreeing
    return found


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_each_rank_keeps_the_copy_of_the_rank_in_its_place(dp, new_dp, tp, before):
    source, target = flat(dp, tp, before), flat(new_dp, tp, before[::-1])

    plan = planned(source, target, "own")

    assert plan.regions
    for region in plan.regions:
        own = region.target_rank % tp
        for rank, agreeing in sources(region).values():
            assert rank % tp == own
            assert agreeing == 1


@given(st.integers(2, 4), st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_the_first_copy_is_that_of_one_model_parallel_rank_throughout(dp, before):
    source = flat(dp, 2, before)

    (region,) = plan_reading(
        [("w", "fp32", entry(source))], budget_nbytes=1 << 22, workers=1
    ).regions

    assert {rank % 2 for rank, _ in sources(region).values()} == {0}


@pytest.mark.parametrize(("tp", "expected"), [(4, [0, 0, 1, 1]), (1, [0])])
def test_other_numbers_of_ranks_follow_in_proportion(tp, expected):
    source = replicated(SHAPE, mesh={"tp": 2})

    plan = planned(source, replicated(SHAPE, mesh={"tp": tp}), "own")

    found = [{rank for rank, _ in sources(region).values()} for region in plan.regions]
    assert found == [{rank} for rank in expected]


def test_an_output_without_ranks_compares_all_copies():
    """Nothing is in the place of one of them."""
    plan = planned(replicated(SHAPE, mesh={"tp": 2}), replicated(SHAPE, mesh={"whole": 1}), "own")

    assert set(sources(plan.regions[0]).values()) == {(0, 2)}


def test_copies_that_only_another_axis_tells_apart_are_chosen_by_it():
    """Buffers of ZeRO-3: every rank has its own, and every rank goes on with it."""
    mesh = as_mesh("dp=2,tp=2")
    source = replicated(SHAPE, mesh=mesh)

    plan = planned(source, replicated(SHAPE, mesh=mesh), "own")

    found = [{rank for rank, _ in sources(region).values()} for region in plan.regions]
    assert found == [{0}, {1}, {2}, {3}]


def test_chunks_have_no_copies_on_the_axis_that_cuts_them():
    source = chain(
        replicated(SHAPE, mesh={"tp": 2}),
        flat_chunks(SHAPE, mesh={"dp": 2}),
        mesh=as_mesh("dp=2,tp=2"),
    )

    plan = planned(source, flat(3, 2, [1, 5]), "own")

    for region in plan.regions:
        assert {rank % 2 for rank, _ in sources(region).values()} <= {region.target_rank % 2}
