"""Proofs against walking: the verdict, its witness and its count, for whole and spoiled layouts."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from fractions import Fraction
from itertools import product
from random import Random

import islpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra import coverage
from restride.algebra._lattice import normalize, numel_of
from restride.algebra._tiling import tiles_by_fingerprint
from restride.algebra.coverage import (
    Covered,
    Gap,
    Hole,
    Overlap,
    Writer,
    explain,
    holders,
    prove,
    replication,
    require_covered,
)
from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import CoverageError, LayoutError, UnsupportedError
from restride.testing.proofs import (
    holders_by_walking,
    random_layout,
    random_wild_layout,
    relation_by_walking,
    spoil,
    verdict_by_walking,
)
from restride.testing.strategies import layouts, wild_layouts

SIDES = ("both", "shard", "full")


def seeded(seed):
    return Random(seed)  # noqa: S311 - repeatable cases, no secrets


def same_verdict(proved, walked):
    """Equal up to the method, which walking has none of."""
    if isinstance(proved, Covered) and isinstance(walked, Covered):
        return replace(proved, method="structure") == walked
    return proved == walked


def check_against_walking(layout):
    for side in SIDES:
        proved, walked = prove(layout, side=side), verdict_by_walking(layout, side=side)
        assert same_verdict(proved, walked), (side, proved, walked, layout)
    return prove(layout)


# The oracle itself, on examples that can be checked by hand.


def rows(*pieces, shards=((2, 3), (2, 3)), full=(4, 3), padding=()):
    return Layout.of({"tp": len(shards)}, full, shards, pieces, padding)


def test_walking_finds_the_hole_the_gap_and_the_overlap_of_hand_made_layouts():
    first = Piece((Axis(6, 1, 0, 1),))
    second = Piece((Axis(6, 1, 0, 1),), 6, 1)
    shifted = Piece((Axis(3, 1, 0, 1),), 6, 1, 3)
    again = Piece((Axis(3, 1, 0, 1),), 0, 1, 2)

    assert verdict_by_walking(rows(first, second)) == Covered(12, 12)
    assert verdict_by_walking(rows(first)) == Hole(6, (2, 0), 6)
    assert verdict_by_walking(rows(first, shifted), side="shard") == Gap(1, 0, 3)
    assert verdict_by_walking(rows(first, second, again)) == Overlap(
        1, 2, Writer("piece", 1), Writer("piece", 2), 3
    )


# Laws.


@given(st.randoms(use_true_random=False))
def test_a_layout_built_whole_is_proved_whole(random):
    assert isinstance(check_against_walking(random_layout(random)), Covered)


@given(st.randoms(use_true_random=False))
def test_any_layout_gets_the_verdict_of_walking(random):
    check_against_walking(random_wild_layout(random))


@given(layouts())
def test_whole_layouts_drawn_digit_by_digit_are_proved_whole(layout):
    assert isinstance(check_against_walking(layout), Covered)


@given(wild_layouts())
def test_layouts_that_are_just_large_enough_get_the_verdict_of_walking(layout):
    check_against_walking(layout)


def test_four_thousand_spoiled_layouts_get_the_verdict_of_walking():
    random = seeded(2)
    verdicts = Counter()
    for _ in range(800):
        layout = random_layout(random, numel=36)
        for _ in range(5):
            verdicts[type(check_against_walking(spoil(layout, random)))] += 1

    assert sum(verdicts.values()) == 4000
    assert min(verdicts[kind] for kind in (Hole, Gap, Overlap)) > 400
    assert verdicts[Covered] < 400  # padding twice as wide in a wider shard, a replica fewer


def test_three_mistakes_at_once_still_get_the_verdict_of_walking():
    random = seeded(3)
    for _ in range(300):
        layout = random_layout(random)
        for _ in range(3):
            layout = spoil(layout, random)
        check_against_walking(layout)


@given(st.randoms(use_true_random=False), st.sampled_from([random_layout, random_wild_layout]))
def test_holders_are_the_ranks_that_walking_finds(random, draw):
    layout = draw(random)

    found = {}
    for held in holders(layout):
        for steps in product(*(range(extent) for extent, _ in held.axes)):
            element = held.full_base + sum(
                step * stride for step, (_, stride) in zip(steps, held.axes, strict=True)
            )
            assert element not in found
            found[element] = held.ranks
        assert held.numel == numel_of(held.axes)
    assert found == holders_by_walking(layout)


@given(st.randoms(use_true_random=False), st.sampled_from([random_layout, random_wild_layout]))
def test_a_layout_is_replicated_when_an_element_has_two_addresses(random, draw):
    layout = draw(random)

    addresses = Counter()
    for full, *_ in (step for step in relation_by_walking(layout).elements() if len(step) == 4):
        addresses[full] += 1
    assert replication(layout) == any(count > 1 for count in addresses.values())


def test_two_loops_in_the_same_steps_hold_elements_twice():
    for stride in (1, 2):
        loops = (Axis(2, stride, 0, 1), Axis(2, stride, 0, 2))
        assert replication(Layout.of({"tp": 1}, (8,), [(4,)], [Piece(loops)]))


@given(st.randoms(use_true_random=False))
def test_the_fingerprint_alone_tells_tilings_from_others(random):
    layout = random_layout(random)
    if random.random() < 0.7:
        layout = spoil(layout, random)
    lattices = [
        normalize(p.full_base, [(a.extent, a.full_stride) for a in p.axes])
        for p in layout.all_pieces
    ]

    points = Counter(
        base + sum(step * stride for step, (_, stride) in zip(steps, digits, strict=True))
        for base, digits in lattices
        for steps in product(*(range(extent) for extent, _ in digits))
    )
    numel = points.total()
    if numel:
        expected = points.keys() == set(range(numel))
        assert tiles_by_fingerprint(lattices, numel) == expected


# A second, independent oracle.


def islpy_holes(layout):
    """The full elements that nobody holds, as a set of integers in isl."""
    missing = islpy.Set(f"{{ [f] : 0 <= f < {layout.full_numel} }}")
    for piece in layout.all_pieces:
        names = [f"y{place}" for place in range(len(piece.axes))]
        terms = [str(piece.full_base)]
        terms += [f"{a.full_stride}{y}" for a, y in zip(piece.axes, names, strict=True)]
        bounds = [f"0 <= {y} < {a.extent}" for a, y in zip(piece.axes, names, strict=True)]
        where = " and ".join([f"f = {' + '.join(terms)}", *bounds])
        exists = f"exists {', '.join(names)}: {where}" if names else where
        missing = missing.subtract(islpy.Set(f"{{ [f] : {exists} }}"))
    return missing


def check_against_islpy(layout):
    missing = islpy_holes(layout)
    verdict = prove(layout, side="full")
    if missing.is_empty():
        assert isinstance(verdict, Covered)
    else:
        lowest = missing.lexmin().sample_point().get_coordinate_val(islpy.dim_type.set, 0)
        assert isinstance(verdict, Hole)
        assert verdict.element == lowest.to_python()
        assert verdict.count == missing.count_val().to_python()


def test_islpy_agrees_on_coverage_and_on_the_lowest_hole():
    random = seeded(4)
    for _ in range(60):
        layout = random_layout(random)
        check_against_islpy(layout)
        check_against_islpy(spoil(layout, random))
        check_against_islpy(random_wild_layout(random))


def codegen(*, rows=12288, columns=4096, ranks=4, step=4):
    """CodeGen's fused QKV at TP 4 and above is one piece: the blocks of its rows are permuted."""
    block = rows // (12 * ranks) * columns
    axes = (
        Axis(ranks, 12 * block, 1, 0),
        Axis(4, block, 0, 3 * block),
        Axis(3, step * block, 0, block),
        Axis(block, 1, 0, 1),
    )
    return Layout.of(
        {"tp": ranks}, (rows, columns), [(rows // ranks, columns)] * ranks, [Piece(axes)]
    )


def test_islpy_agrees_on_a_real_matrix_with_a_wrong_stride():
    spoiled = codegen(step=2)

    lowest = islpy_holes(spoiled).lexmin().sample_point()
    verdict = prove(spoiled)
    assert isinstance(verdict, Hole)
    assert verdict.element == lowest.get_coordinate_val(islpy.dim_type.set, 0).to_python()
    assert verdict == Hole(8 * 2**20, (2048, 0), 16 * 2**20)


# What the peer accepts (DeepSpeed 0.19.8, checkpoint/affine.py).


def test_overlapping_column_pieces_are_caught():
    # Its shard check looks at dense destinations only: two column pieces of one rank may land on
    # the same columns, and others stay unwritten.
    left = Piece((Axis(4, 4, 0, 4), Axis(2, 1, 0, 1)), 0)
    right = Piece((Axis(4, 4, 0, 4), Axis(2, 1, 0, 1)), 2)
    layout = Layout.of({"tp": 1}, (4, 4), [(4, 4)], [left, right])

    assert prove(layout) == Overlap(0, 0, Writer("piece", 0), Writer("piece", 1), 8)
    assert prove(layout, side="full") == Covered(16, None)


def test_a_strided_destination_outside_the_shard_cannot_be_written_down():
    with pytest.raises(LayoutError, match="shard index 21 of rank 0, whose shard has 16 elements"):
        Layout.of(
            {"tp": 1}, (4, 4), [(4, 4)], [Piece((Axis(4, 4, 0, 5), Axis(4, 1, 0, 1)), 0, 0, 3)]
        )


def test_sizes_that_do_not_add_up_are_a_hole():
    # contiguous_split_map((6, 2), [2, 2], 0); its rebuild returned uninitialised memory.
    pieces = [Piece((Axis(2, 4, 1, 0), Axis(4, 1, 0, 1)))]
    layout = Layout.of({"tp": 2}, (6, 2), [(2, 2)] * 2, pieces)

    assert prove(layout) == Hole(8, (4, 0), 4)


def test_replicas_that_are_cut_differently_are_legal():
    whole = Piece((Axis(4, 1, 0, 1),))
    halves = Piece((Axis(2, 1, 0, 1),), 0, 1), Piece((Axis(2, 1, 0, 1),), 2, 1, 2)
    layout = Layout.of({"tp": 2}, (4,), [(4,), (4,)], [whole, *halves])

    assert prove(layout) == Covered(4, 8)
    assert [(held.full_base, held.axes, held.ranks) for held in holders(layout)] == [
        (0, ((4, 1),), (0, 1))
    ]


def test_undeclared_duplicates_are_holders_like_any_other():
    # Two ranks own the same element though each says it is alone; its rebuild took the last one.
    layout = Layout.of(
        {"tp": 2}, (2,), [(2,), (2,)], [Piece((Axis(2, 1, 0, 1),), 0, rank) for rank in range(2)]
    )

    assert prove(layout) == Covered(2, 4)
    assert [held.ranks for held in holders(layout)] == [(0, 1)]
    assert replication(layout)


def test_a_block_listed_twice_on_one_rank_is_an_overlap():
    twice = Piece((Axis(2, 1, 0, 1),))
    layout = Layout.of({"tp": 1}, (2,), [(2,)], [twice, twice])

    assert prove(layout) == Overlap(0, 0, Writer("piece", 0), Writer("piece", 1), 2)


def test_a_rank_that_does_not_exist_and_a_block_out_of_range_cannot_be_written_down():
    block = (Axis(2, 1, 0, 1),)
    with pytest.raises(LayoutError, match="reaches rank 7, the mesh has 1"):
        Layout.of({"tp": 1}, (2,), [(2,)], [Piece(block, 0, 7)])
    with pytest.raises(LayoutError, match="full index 11, the tensor has 8"):
        Layout.of({"tp": 1}, (8,), [(2,)], [Piece(block, 10)])


def test_a_shard_that_holds_an_element_twice_is_legal():
    # TensorRT-LLM's dup_kv_weight: a full stride of 0 inside one shard.
    layout = Layout.of({"tp": 1}, (2,), [(2, 2)], [Piece((Axis(2, 0, 0, 2), Axis(2, 1, 0, 1)))])

    assert prove(layout) == Covered(2, 4)
    assert [held.ranks for held in holders(layout)] == [(0,)]
    assert replication(layout)


# Shapes and corners.


@pytest.mark.parametrize(
    ("layout", "verdict"),
    [
        pytest.param(
            Layout.of({"tp": 2}, (), [(), ()], [Piece((Axis(2, 0, 1, 0),))]),
            Covered(1, 2),
            id="replicated scalar",
        ),
        pytest.param(
            Layout.of({"tp": 1}, (), [()], []), Hole(0, (), 1), id="scalar without holder"
        ),
        pytest.param(
            Layout.of({"tp": 2}, (), [(), ()], [Piece(())]), Gap(1, 0, 1), id="scalar on one rank"
        ),
        pytest.param(Layout.of({"tp": 2}, (0, 5), [(0, 5)] * 2, []), Covered(0, 0), id="empty"),
        pytest.param(
            Layout.of({"tp": 1}, (0, 5), [(2,)], []), Gap(0, 0, 2), id="empty tensor, full shard"
        ),
        pytest.param(
            Layout.of(
                {"fsdp": 3},
                (2, 3),
                [(1, 3), (1, 3), (0, 3)],
                [Piece((Axis(2, 3, 1, 0), Axis(3, 1, 0, 1)))],
            ),
            Covered(6, 6),
            id="a rank with an empty shard",
        ),
        pytest.param(
            Layout.of({"fsdp": 2}, (2,), [(0,), (2,)], [Piece((Axis(2, 1, 0, 1),), 0, 1)]),
            Covered(2, 2),
            id="the first rank has an empty shard",
        ),
        pytest.param(
            Layout.of(
                {"tp": 2},
                (5,),
                [(3,), (2,)],
                [Piece((Axis(3, 1, 0, 1),)), Piece((Axis(2, 1, 0, 1),), 3, 1)],
            ),
            Covered(5, 5),
            id="uneven shards",
        ),
        pytest.param(
            Layout.of(
                {"tp": 2}, (4,), [(2,), (2,)], [Piece((Axis(2, 3, 1, 0), Axis(2, -0, 0, 1)))]
            ),
            Hole(1, (1,), 2),
            id="an axis that stands still where it should walk",
        ),
        pytest.param(
            Layout.of(
                {"cp": 2},
                (4,),
                [(2,)] * 2,
                [Piece((Axis(2, 1, 1, 0),)), Piece((Axis(2, -1, 1, 0),), 3, 0, 1)],
            ),
            Covered(4, 4),
            id="zigzag: a negative full stride on the rank axis",
        ),
    ],
)
def test_corners(layout, verdict):
    assert prove(layout) == verdict
    assert same_verdict(verdict, verdict_by_walking(layout))


def padded(*paddings):
    data = Piece((Axis(2, 3, 1, 0), Axis(3, 1, 0, 1)))
    return Layout.of({"dp": 2}, (6,), [(4,)] * 2, [data], paddings)


def test_padding_is_never_coverage_but_it_fills_gaps():
    everywhere = Padding((Axis(2, 0, 1, 0),), 0, 3)

    assert prove(padded(everywhere)) == Covered(6, 8)
    assert prove(padded()) == Gap(0, 3, 2)
    assert prove(padded(Padding((), 0, 3))) == Gap(1, 3, 1)
    assert prove(replace(padded(everywhere), full_shape=(8,))) == Hole(6, (6,), 2)


def test_padding_on_top_of_data_or_of_padding_is_an_overlap():
    everywhere = Padding((Axis(2, 0, 1, 0),), 0, 3)

    assert prove(padded(everywhere, Padding((), 1, 2))) == Overlap(
        1, 2, Writer("piece", 0), Writer("padding", 1), 1
    )
    assert prove(padded(everywhere, everywhere)) == Overlap(
        0, 3, Writer("padding", 0), Writer("padding", 1), 2
    )


def test_a_piece_that_returns_to_an_address_overlaps_itself():
    layout = Layout.of({"tp": 1}, (6,), [(4,)], [Piece((Axis(3, 2, 0, 1), Axis(2, 1, 0, 1)))])

    assert prove(layout) == Overlap(0, 1, Writer("piece", 0), Writer("piece", 0), 2)


def test_the_full_side_alone_ignores_what_else_is_in_the_shards():
    flat = Layout.of(
        {"dp": 2}, (6,), [(100,), (100,)], [Piece((Axis(2, 3, 1, 0), Axis(3, 1, 0, 1)))]
    )

    assert prove(flat, side="full") == Covered(6, None)
    assert prove(flat, side="shard") == Gap(0, 3, 194)


def test_an_unknown_side_is_refused():
    with pytest.raises(LayoutError, match="'both', 'full' or 'shard', got 'left'"):
        prove(rows(), side="left")


def test_scale_and_unit_bits_do_not_matter_to_coverage():
    third = Piece((Axis(3, 0, 1, 0), Axis(4, 1, 0, 1)), scale=Fraction(1, 3))
    layout = Layout.of({"tp": 3}, (4,), [(4,)] * 3, [third], unit_bits=4)

    assert prove(layout) == Covered(4, 12)


# Holders of real layouts.


def test_key_value_heads_on_pairs_of_ranks_and_queries_on_one():
    # vLLM's QKVParallelLinear with 8 ranks, 16 query heads and 4 key/value heads of 3 x 2.
    queries = Piece((Axis(8, 12, 1, 0), Axis(12, 1, 0, 1)))
    keys = Piece((Axis(4, 6, 2, 0), Axis(2, 0, 1, 0), Axis(6, 1, 0, 1)), 96, 0, 12)
    values = replace(keys, full_base=120, shard_base=18)
    layout = Layout.of({"tp": 8}, (72, 2), [(12, 2)] * 8, [queries, keys, values])

    assert prove(layout) == Covered(144, 192)
    assert replication(layout)
    found = [(held.full_base, held.axes, held.ranks) for held in holders(layout)]
    assert found[:8] == [(12 * rank, ((12, 1),), (rank,)) for rank in range(8)]
    assert found[8:] == [
        (96 + 6 * head, ((6, 1),), (head % 4 * 2, head % 4 * 2 + 1)) for head in range(8)
    ]


def test_partly_overlapping_replicas_are_told_apart():
    # FP8 block scales: a cut off the grid leaves the boundary row on both ranks.
    layout = Layout.of(
        {"tp": 2}, (3, 4), [(2, 4), (2, 4)], [Piece((Axis(2, 4, 1, 0), Axis(8, 1, 0, 1)))]
    )

    assert [(held.full_base, held.axes, held.ranks) for held in holders(layout)] == [
        (0, ((4, 1),), (0,)),
        (4, ((4, 1),), (0, 1)),
        (8, ((4, 1),), (1,)),
    ]


def test_a_replica_on_512_ranks_is_one_entry():
    layout = Layout.of(
        {"dp": 512}, (4096,), [(4096,)] * 512, [Piece((Axis(512, 0, 1, 0), Axis(4096, 1, 0, 1)))]
    )

    (held,) = holders(layout)
    assert held.ranks == tuple(range(512))
    assert held.numel == 4096


# Sentences.


def test_a_covered_layout_is_explained_with_its_numbers():
    layout = rows(Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1))))

    assert explain(prove(layout), layout) == (
        "each of 12 full elements is held and each of 12 shard addresses of 2 ranks is "
        "written exactly once or declared padding"
    )
    assert explain(prove(layout, side="full"), layout) == "each of 12 full elements is held"
    assert explain(prove(layout, side="shard"), layout).startswith("each of 12 shard addresses of")


def test_a_hole_is_explained_with_its_place_and_its_neighbour():
    layout = rows(Piece((Axis(2, 6, 1, 0), Axis(2, 1, 0, 1))))

    assert explain(prove(layout), layout) == (
        "no rank holds full element 2 at (0, 2), 8 of 12 in all; "
        "the element before it is on rank 0 (piece 0)"
    )
    assert (
        explain(prove(rows()), rows()) == "no rank holds full element 0 at (0, 0), 12 of 12 in all"
    )


def test_an_overlap_is_explained_with_both_writers_and_their_elements():
    split = Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))
    layout = rows(split, Piece((Axis(2, 3, 0, 3),), 1, 1, 2))

    assert explain(prove(layout), layout) == (
        "piece 0 and piece 1 both write shard index 2 at (0, 2) of rank 1 "
        "(full elements 8 at (2, 2) and 1 at (0, 1)); 2 in all"
    )


def test_a_piece_over_itself_is_explained_with_both_of_its_elements():
    layout = Layout.of({"tp": 1}, (2, 3), [(4,)], [Piece((Axis(3, 2, 0, 1), Axis(2, 1, 0, 1)))])

    assert explain(prove(layout), layout) == (
        "piece 0 writes shard index 1 at (1,) of rank 0 more than once "
        "(full elements 1 at (0, 1) and 2 at (0, 2)); 2 in all"
    )


def test_an_overlap_without_elements_is_explained_by_its_writers():
    layout = padded(Padding((Axis(2, 0, 1, 0),), 0, 3), Padding((), 1, 3))

    assert explain(prove(layout), layout) == (
        "padding 0 and padding 1 both write shard index 3 at (3,) of rank 1; 1 in all"
    )


def test_the_neighbour_of_a_hole_is_found_on_axes_that_run_backwards():
    layout = Layout.of(
        {"cp": 3}, (7,), [(2,)] * 3, [Piece((Axis(3, -2, 1, 0), Axis(2, 1, 0, 1)), 4)]
    )

    assert prove(layout) == Hole(6, (6,), 1)
    assert explain(prove(layout), layout) == (
        "no rank holds full element 6 at (6,), 1 of 7 in all; "
        "the element before it is on rank 0 (piece 0)"
    )


def test_every_verdict_of_spoiled_layouts_can_be_explained():
    random = seeded(5)
    for _ in range(300):
        layout = spoil(random_layout(random), random)
        verdict = prove(layout)

        sentence = explain(verdict, layout)
        match verdict:
            case Hole(element, coordinates, count):
                assert f"element {element} at {coordinates}, {count} of" in sentence
            case Gap(rank, shard_index, count) | Overlap(rank, shard_index, _, _, count):
                assert f"shard index {shard_index} at" in sentence
                assert f"of rank {rank}" in sentence
                assert sentence.endswith(f"; {count} in all")
            case Covered():
                assert sentence.startswith("each of")


def test_require_covered_raises_the_verdict_and_survives_pickling():
    whole = rows(Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1))))
    require_covered(whole)
    with pytest.raises(CoverageError, match="no rank holds full element 0") as caught:
        require_covered(rows())

    assert caught.value.verdict == Hole(0, (0, 0), 12)
    assert pickle.loads(pickle.dumps(caught.value)).verdict == caught.value.verdict  # noqa: S301


# Size does not matter.


def best_seconds(work, repeat=20):
    def once():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(repeat))


def experts(ranks=256):
    size = 7168 * 4096
    axes = Axis(ranks, size, 1, 0), Axis(size, 1, 0, 1)
    return Layout.of({"ep": ranks}, (ranks, 7168, 4096), [(1, 7168, 4096)] * ranks, [Piece(axes)])


def columns_2_to_the_60(width=2**20):
    axes = Axis(1024, 2**20, 1, 0), Axis(2**30, 2**30, 0, 2**20), Axis(width, 1, 0, 1)
    return Layout.of({"tp": 1024}, (2**30, 2**30), [(2**30, 2**20)] * 1024, [Piece(axes)])


@pytest.mark.parametrize(
    "layout", [codegen(), experts(), columns_2_to_the_60()], ids=["codegen", "7.5e9", "2^60"]
)
def test_a_proof_takes_microseconds_at_any_size(layout):
    verdict = prove(layout)

    assert verdict == Covered(layout.full_numel, layout.full_numel)
    assert best_seconds(lambda: prove(layout)) < 200e-6


def test_five_hundred_separate_pieces_take_milliseconds():
    pieces = [
        Piece((Axis(8192, 8192, 0, 16), Axis(16, 1, 0, 1)), rank * 16, rank) for rank in range(512)
    ]
    layout = Layout.of({"tp": 512}, (8192, 8192), [(8192, 16)] * 512, pieces)

    assert prove(layout) == Covered(2**26, 2**26)
    assert best_seconds(lambda: prove(layout), 5) < 20e-3


def test_a_fault_in_a_huge_tensor_is_found_and_counted():
    assert prove(columns_2_to_the_60(2**20 - 1)) == Hole(2**20 - 1, (0, 2**20 - 1), 2**40)
    assert prove(columns_2_to_the_60(2**20 - 1), side="shard") == Gap(0, 2**20 - 1, 2**40)


def even_and_odd_rows(rows=2**20, columns=8, *, shift=0):
    """Even rows on one rank; odd ones on two others, of which one has the upper half."""
    half, quarter = rows // 2, rows // 4
    row = Axis(columns, 1, 0, 1)
    odd = Axis(quarter, 2 * columns, 0, columns), row
    pieces = [
        Piece((Axis(half, 2 * columns, 0, columns), row)),
        Piece(odd, columns, 1),
        Piece(odd, columns + half * columns - shift, 2),
    ]
    shapes = [(half, columns), (quarter, columns), (quarter, columns)]
    return Layout.of({"tp": 3}, (rows, columns), shapes, pieces)


def test_what_no_structure_joins_is_proved_by_fingerprint():
    layout = even_and_odd_rows()

    assert prove(layout) == Covered(2**23, 2**23, method="fingerprint")
    assert prove(layout, side="shard") == Covered(None, 2**23)
    assert not replication(layout)
    assert best_seconds(lambda: prove(layout)) < 5e-3


def test_shards_that_no_structure_joins_are_proved_by_fingerprint():
    layout = even_and_odd_rows()
    numel = layout.full_numel
    turned = [
        Piece(
            tuple(Axis(a.extent, a.shard_stride, 0, a.full_stride) for a in piece.axes),
            [0, numel // 2, numel // 4 * 3][number],
            0,
            piece.full_base,
        )
        for number, piece in enumerate(layout.all_pieces)
    ]

    assert prove(Layout.of({"tp": 1}, (numel,), [(numel,)], turned), side="shard") == Covered(
        None, numel, method="fingerprint"
    )


def test_what_the_fingerprint_denies_is_swept():
    spoiled = even_and_odd_rows(shift=8)  # one row up: over even rows

    assert prove(spoiled) == Hole(2**22 + 8, (2**19 + 1, 0), 2**21)
    assert explain(prove(spoiled), spoiled).endswith("before it is on rank 0 (piece 0)")
    assert replication(spoiled)
    whole = replace(spoiled, full_shape=(2**20 + 1, 8))
    assert prove(whole) == Hole(2**22 + 8, (2**19 + 1, 0), 2**21 + 8)


def test_replicas_are_told_from_holes_where_there_are_both():
    layout = even_and_odd_rows()
    holes = replace(layout, all_pieces=layout.all_pieces[1:])
    replicas = replace(holes, all_pieces=(*holes.all_pieces, Piece((), 8, 0)))

    assert not replication(holes)
    assert replication(replicas)
    assert not replication(rows(Piece((Axis(4, 1, 0, 1),)), Piece((Axis(2, 1, 0, 1),), 7, 1)))
    assert replication(rows(Piece((Axis(4, 1, 0, 1),)), Piece((Axis(2, 1, 0, 1),), 3, 1)))


@pytest.mark.parametrize(
    "layers", [("tiles_by_structure",), ("tiles_by_structure", "tiles_by_fingerprint")]
)
def test_each_argument_alone_gives_the_verdict_of_walking(monkeypatch, layers):
    for layer in layers:
        monkeypatch.setattr(coverage, layer, lambda *_, **__: False)
    random = seeded(7)
    methods = Counter()
    for _ in range(300):
        layout = random_layout(random, numel=30)
        for tried in (layout, spoil(layout, random)):
            verdict = check_against_walking(tried)
            methods[getattr(verdict, "method", None)] += 1

    assert methods["structure"] < 10  # empty tensors
    assert methods["sweep" if len(layers) == 2 else "fingerprint"] > 100


# Hostile layouts are refused in bounded time, never judged wrongly.


def test_strides_without_a_common_multiple_are_refused_with_the_place():
    prime, other = 2**31 - 1, 2**31 - 19
    pieces = [
        Piece((Axis(2**20, prime, 0, 1),)),
        Piece((Axis(2**20, other, 0, 1),), 0, 0, 2**20),
    ]
    layout = Layout.of({"tp": 1}, (2**60,), [(2**21,)], pieces)

    start = time.perf_counter()
    with pytest.raises(UnsupportedError, match="full side: the strides have so little in common"):
        prove(layout)
    assert time.perf_counter() - start < 10
    assert prove(layout, side="shard") == Covered(None, 2**21)


def test_numbers_beyond_the_field_are_still_proved_by_structure_and_sweep():
    far = 10**60
    whole = Layout.of(
        {"tp": 2}, (2 * far,), [(far,)] * 2, [Piece((Axis(2, far, 1, 0), Axis(far, 1, 0, 1)))]
    )
    spoiled = replace(whole, all_pieces=(Piece((Axis(2, far, 1, 0), Axis(far - 1, 1, 0, 1))),))

    assert prove(whole) == Covered(2 * far, 2 * far)
    assert prove(spoiled) == Hole(far - 1, (far - 1,), 2)
    assert not replication(whole)
    assert prove(even_and_odd_rows(2**60, 2**50)) == Covered(2**110, 2**110, method="sweep")
    assert not replication(even_and_odd_rows(2**60, 2**50))


def test_holders_of_a_million_visits_are_refused():
    everywhere = Piece((Axis(2**20, 0, 1, 0),))
    layout = Layout(
        Mesh((("dp", 2**20),)),
        (2,),
        ((2**20, (2,)),),
        (everywhere, replace(everywhere, full_base=1, shard_base=1)),
    )

    assert prove(layout) == Covered(2, 2**21)
    with pytest.raises(UnsupportedError, match="visit ranks more than 1048576 times"):
        holders(layout)
