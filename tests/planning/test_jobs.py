"""What a plan is made of: the fills that are needed, places, buffers, and where steps begin."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from restride.algebra.copies import CopyAt
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.errors import BudgetError, LayoutError, PlanError
from restride.layouts import permuted, replicated, split
from restride.planning.jobs import (
    plan_comparison,
    plan_conversion,
    plan_reading,
    whole_layout,
)
from restride.planning.plan import BUFFERS_PER_WORKER
from restride.testing.moving import job_between, store

FLOAT32 = DTYPES["float32"]
SMALLEST = 4096
BUDGET = 1 << 20


def stored(layout, dtype=FLOAT32):
    width = np.dtype(f"u{dtype.itemsize_nbytes}")
    return store(layout, dtype, np.arange(layout.full_numel).astype(width))


def planned(
    source, target, *, buffer=None, dtype=FLOAT32, target_dtype=None, replicas="first", **changes
):
    """A plan with buffers of a size, or of the largest that fit the budget."""
    state = stored(source, dtype)
    job, _ = job_between(state, target, target_dtype or dtype, replicas)
    jobs = [replace(job, **changes)]
    if buffer is None:
        return plan_conversion(jobs, budget_nbytes=BUDGET, workers=1)
    with pytest.raises(BudgetError) as refused:
        plan_conversion(jobs, budget_nbytes=0, workers=1)
    budget = refused.value.needed_nbytes + BUFFERS_PER_WORKER * (buffer - SMALLEST)
    plan = plan_conversion(jobs, budget_nbytes=budget, workers=1)
    assert plan.buffer_nbytes == buffer
    return plan


def columns(shape, tp):
    return split(shape, mesh={"tp": tp}, dim=1)


# Two ranks have the first half of it, and one the second.
HALF_HELD_TWICE = replace(
    replicated((8,), mesh={"tp": 2}),
    all_pieces=(
        Piece((Axis(2, 0, 1, 0), Axis(4, 1, 0, 1)), 0, 0, 0),
        Piece((Axis(4, 1, 0, 1),), 4, 0, 4),
    ),
    shard_shapes=((1, (8,)), (1, (4,))),
)


def test_only_what_more_than_one_rank_holds_is_compared():
    state, lone = stored(HALF_HELD_TWICE), stored(split((8,), mesh={"tp": 2}, dim=0))

    plan = plan_comparison(
        [("lone", "weight", lone.entry), ("shared", "weight", state.entry)],
        budget_nbytes=BUDGET,
        workers=1,
    )

    (region,) = plan.regions
    (fill,) = region.fills
    assert (region.tensor, fill.target_range) == ("shared", range(4))
    assert [source.rank for source in fill.sources] == [0, 1]


def test_one_copy_is_read_where_nothing_is_compared():
    state = stored(HALF_HELD_TWICE)

    plan = plan_reading([("shared", "weight", state.entry)], budget_nbytes=BUDGET, workers=1)

    (region,) = plan.regions
    assert [[source.rank for source in fill.sources] for fill in region.fills] == [[0], [0]]
    assert region.pattern.is_moved


@pytest.mark.parametrize("lost", [0, 1])
def test_a_copy_that_is_nowhere_is_found_before_anything_is_read(lost):
    """Whether or not it is the one that counts: what else is wrong nobody knows."""
    state = stored(replicated((8,), mesh={"tp": 2}))
    regions = tuple(None if rank == lost else state.entry.regions[rank] for rank in range(2))
    entry = replace(state.entry, regions=regions)
    job, _ = job_between(replace(state, entry=entry), whole_layout((8,)), FLOAT32, "first")
    budget = {"budget_nbytes": BUDGET, "workers": 1}
    words = (
        f"tensor 'wte', state 'weight': rank {lost} holds elements, but the catalog has no place"
    )

    with pytest.raises(LayoutError, match=words):
        plan_conversion([job], **budget)
    with pytest.raises(LayoutError, match=words):
        plan_reading([("wte", "weight", entry)], **budget)


def test_a_rank_of_the_target_with_elements_needs_a_place():
    target = split((8,), mesh={"tp": 2}, dim=0)

    with pytest.raises(PlanError, match="rank 1 of the target holds elements, but has no place"):
        planned(whole_layout((8,)), target, target_regions=(Region(0, 0), None))
    (region,) = planned(
        whole_layout((8,)),
        split((8,), mesh={"tp": 1}, dim=0),
        target_regions=(Region(0, 0),),
    ).regions
    assert region.numel == 8


def test_regions_overlap_where_they_share_a_byte_whatever_is_empty_between_them():
    state, nothing = stored(whole_layout((8,))), stored(whole_layout((0,)))
    job, _ = job_between(state, whole_layout((8,)), FLOAT32)
    empty, _ = job_between(nothing, whole_layout((0,)), FLOAT32)

    def plan(second_start):
        jobs = [
            replace(job, target_regions=(Region(0, 0),)),
            replace(empty, target_regions=(Region(0, 8),)),
            replace(job, tensor="second", target_regions=(Region(0, second_start),)),
        ]
        return plan_conversion(jobs, budget_nbytes=BUDGET, workers=1)

    assert [region.numel for region in plan(32).regions] == [8, 0, 8]
    with pytest.raises(PlanError, match=r"tensor 'second'.* byte 28 of target file 0 belongs to"):
        plan(28)


def test_regions_of_one_file_are_held_against_each_other_whatever_is_in_other_files():
    state = stored(whole_layout((8,)))
    job, _ = job_between(state, whole_layout((8,)), FLOAT32)
    places = {"first": Region(0, 0), "other": Region(1, 8), "second": Region(0, 16)}
    jobs = [replace(job, tensor=name, target_regions=(at,)) for name, at in places.items()]

    with pytest.raises(PlanError, match=r"tensor 'second'.* belongs to .* tensor 'first'"):
        plan_conversion(jobs, budget_nbytes=BUDGET, workers=1)
    jobs[2] = replace(jobs[2], target_regions=(Region(0, 32),))
    regions = plan_conversion(jobs, budget_nbytes=BUDGET, workers=1).regions
    assert [region.tensor for region in regions] == ["first", "second", "other"]


def test_what_is_decided_for_one_tensor_is_not_decided_for_another_that_is_cut_alike():
    state = stored(replicated((8,), mesh={"tp": 2}))
    job, _ = job_between(state, whole_layout((8,)), FLOAT32)
    decisions = ("check", "first", CopyAt((("tp", 1),)), "check")
    jobs = [
        replace(job, replicas=decision, target_regions=(Region(number, 0),))
        for number, decision in enumerate(decisions)
    ]

    regions = plan_conversion(jobs, budget_nbytes=BUDGET, workers=1).regions

    fills = [fill for region in regions for fill in region.fills]
    assert [fill.agreeing for fill in fills] == [2, 1, 1, 2]
    assert [[source.rank for source in fill.sources] for fill in fills] == [[0, 1]] * 2 + [
        [1, 0],
        [0, 1],
    ]
    assert regions[0].pattern is regions[3].pattern


def test_states_and_types_that_are_cut_alike_share_what_fills_them():
    state, other = (stored(columns((8, 8), 2), DTYPES[name]) for name in ("float32", "bfloat16"))
    job, _ = job_between(state, columns((8, 8), 4), FLOAT32)
    jobs = [
        replace(job, state=name, source=source, target_regions=regions)
        for name, source, regions in (
            ("fp32", state.entry, [Region(rank, 0) for rank in range(4)]),
            ("exp_avg", state.entry, [Region(rank, 1 << 10) for rank in range(4)]),
            ("weight", other.entry, [Region(rank, 1 << 11) for rank in range(4)]),
        )
    ]

    regions = plan_conversion(jobs, budget_nbytes=BUDGET, workers=1).regions

    assert len(regions) == 12
    assert len({id(region.pattern) for region in regions}) == 4
    for region in regions:
        assert [fill.sources[0].rank for fill in region.fills] == [region.target_rank // 2]


def test_a_copy_is_chosen_where_there_are_several():
    state = stored(HALF_HELD_TWICE)
    job, _ = job_between(state, whole_layout((8,)), FLOAT32, CopyAt((("tp", 1),)))

    (region,) = plan_conversion([job], budget_nbytes=BUDGET, workers=1).regions

    found = {fill.target_range: fill for fill in region.fills}
    assert [source.rank for source in found[range(4)].sources] == [1, 0]
    assert [source.rank for source in found[range(4, 8)].sources] == [0]


@pytest.mark.parametrize("more", [0, 1, 4095, 4096, 100_000])
def test_buffers_are_whole_pages(more):
    """Reads that a buffer takes end at multiples of its size, and files are kept in pages."""
    budget = 8 * SMALLEST + 10_000 + more * BUFFERS_PER_WORKER
    state = stored(whole_layout((8,)))
    job, _ = job_between(state, whole_layout((8,)), FLOAT32)

    plan = plan_conversion([job], budget_nbytes=budget, workers=1)

    assert plan.buffer_nbytes % SMALLEST == 0
    assert plan.buffer_nbytes >= SMALLEST
    assert plan.projected_nbytes <= budget < plan.projected_nbytes + 8 * SMALLEST + 10_000


@pytest.mark.parametrize("workers", [1, 3])
def test_a_plan_has_the_workers_that_were_asked_for_and_fewer_where_they_do_not_fit(workers):
    state = stored(whole_layout((8,)))
    job, _ = job_between(state, whole_layout((8,)), FLOAT32)
    with pytest.raises(BudgetError) as refused:
        plan_conversion([job], budget_nbytes=0, workers=workers)
    least = refused.value.needed_nbytes

    small, large = (
        plan_conversion([job], budget_nbytes=budget, workers=workers)
        for budget in (least, 4 * least)
    )

    assert (small.workers, large.workers) == (1, workers)


@pytest.mark.parametrize(
    ("row", "buffer", "step"),
    [
        (512, 4096, 1024),  # two rows
        (1024, 4096, 1024),  # one that just fits
        (700, 4096, 700),  # the second one would not be whole
        (1026, 4096, 1024),  # longer than the buffer: nothing to keep together
        (512, 12288, 3072),
    ],
)
def test_steps_are_whole_rows_where_a_buffer_takes_one(row, buffer, step):
    plan = planned(columns((6, row), 2), whole_layout((6, row)), buffer=buffer)

    assert [region.step_numel for region in plan.regions] == [step]


def test_the_longest_rows_count_where_there_are_rows_in_rows():
    turned = permuted(whole_layout((10, 100, 4)), (2, 1, 0))

    plan = planned(turned, whole_layout((4, 100, 10)), buffer=4096)

    assert [set(region.pattern.pitches) for region in plan.regions] == [{1, 10, 1000}]
    assert [region.step_numel for region in plan.regions] == [1000]


def test_a_row_that_just_fits_counts_before_the_rows_in_it():
    """Of each row of 1,024 elements the first thousand is turned."""
    turned = replace(
        whole_layout((4, 1024)),
        all_pieces=(
            Piece((Axis(4, 1024, 0, 1024), Axis(10, 1, 0, 100), Axis(100, 10, 0, 1)), 0, 0, 0),
            Piece((Axis(4, 1024, 0, 1024), Axis(24, 1, 0, 1)), 1000, 0, 1000),
        ),
    )

    plan = planned(turned, whole_layout((4, 1024)), buffer=4096)

    assert [set(region.pattern.pitches) for region in plan.regions] == [{1, 10, 1024}]
    assert [region.step_numel for region in plan.regions] == [1024]


@pytest.mark.parametrize(
    ("types", "replicas", "held"),
    [
        (("float32", "float32"), "first", 4),
        (("float16", "float32"), "first", 4),
        (("float32", "float16"), "first", 4),
        (("float16", "bfloat16"), "first", 4),
        (("float64", "float16"), "first", 8),
        (("float16", "float64"), "first", 8),
        (("float16", "float16"), "first", 2),
        (("uint8", "uint8"), "first", 1),
    ],
)
def test_a_step_fits_its_buffers_in_the_type_that_takes_most(types, replicas, held):
    """Casts between types of 16 bits go by way of float32."""
    source, target = (DTYPES[name] for name in types)

    plan = planned(
        columns((4, 8192), 2),
        whole_layout((4, 8192)),
        buffer=4096,
        dtype=source,
        target_dtype=target,
        replicas=replicas,
    )

    assert [region.step_numel for region in plan.regions] == [4096 // held]


@pytest.mark.parametrize("replicas", ["check", "first", "mean", "own", CopyAt((("dp", 1),))])
def test_a_step_that_is_compared_leaves_room_for_doubles(replicas):
    source = replicated((8192,), mesh=as_mesh("dp=2"))

    plan = planned(source, whole_layout((8192,)), buffer=4096, replicas=replicas)

    assert [region.step_numel for region in plan.regions] == [256]
    assert plan.regions[0].replicas == ("check" if replicas == "own" else replicas)


@pytest.mark.parametrize("row", [64, 8192])
@pytest.mark.parametrize(
    "types", [("float32", "float32"), ("float16", "float32"), ("uint8", "float64")]
)
def test_steps_of_regions_that_share_rows_fit_buffers_of_rows_and_their_own(row, types):
    source, target = (DTYPES[name] for name in types)
    parts = 4

    plan = planned(
        whole_layout((8, row)),
        columns((8, row), parts),
        buffer=4096,
        dtype=source,
        target_dtype=target,
    )

    assert len(plan.regions) == parts
    for region in plan.regions:
        own = max(4, target.itemsize_nbytes) if source != target else 4
        assert 0 < region.step_numel * own <= 4096
        rows = region.step_numel / (row // parts)
        assert rows <= max(1, 4096 // (row * source.itemsize_nbytes))
        assert rows < 1 or rows == int(rows)


def test_a_region_that_shares_rows_with_nobody_has_buffers_to_itself():
    """Of a source whose ranks have other columns each region reads alone: more rows at a time."""
    shape = (64, 192)
    ranks = split(shape, mesh={"tp": 3}, dim=1)
    state = stored(whole_layout(shape))
    job, _ = job_between(state, ranks, FLOAT32)
    least = 20_000 + BUFFERS_PER_WORKER * SMALLEST

    lone = replace(job, target_layout=only_rank(ranks), target_regions=(Region(0, 0),))

    shared, alone = (
        plan_conversion([one], budget_nbytes=least, workers=1).regions for one in (job, lone)
    )

    assert all(region.pattern.row is not None for region in (*shared, *alone))
    assert [region.step_numel for region in shared] == [320] * 3
    assert [region.step_numel for region in alone] == [1024]


def only_rank(layout):
    """What the first rank of a layout holds, as the layout of one rank."""
    pieces = tuple(
        Piece(
            tuple(Axis(a.extent, a.full_stride, 0, a.shard_stride) for a in piece.axes),
            piece.full_base,
            0,
            piece.shard_base,
        )
        for piece in layout.pieces(0)
    )
    return replace(
        whole_layout(layout.full_shape),
        all_pieces=pieces,
        shard_shapes=((1, (layout.shard_numel(0),)),),
    )
