"""Folding reproduces index maps exactly, with few pieces."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride.algebra._nests import Nest, fold_points
from restride.algebra.canonical import canonicalize
from restride.algebra.coverage import Covered, prove
from restride.algebra.fold import fold
from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.algebra.signature import same_layout
from restride.errors import LayoutError
from restride.testing.partitions import PARTITIONS
from restride.testing.proofs import random_layout, relation_by_walking, walk

CASES = [(partition, ranks) for partition in PARTITIONS for ranks in partition.ranks]


def index_maps(layout: Layout) -> list[list[int]]:
    """Walk every element: what stands at each address of each shard, -1 for padding."""
    maps = [[-1] * layout.shard_numel(rank) for rank in range(layout.rank_count)]
    for piece in layout.all_pieces:
        for full, rank, shard in walk(piece):
            assert maps[rank][shard] == -1
            maps[rank][shard] = full
    return maps


def fold_arrays(maps: list[np.ndarray], full_shape, **options) -> Layout:
    return fold(
        [entries.reshape(-1).tolist() for entries in maps],
        mesh={"rank": len(maps)},
        full_shape=full_shape,
        shard_shapes=[entries.shape for entries in maps],
        **options,
    )


@given(st.randoms(use_true_random=False))
def test_folding_the_index_maps_of_a_layout_gives_that_layout(random):
    layout = random_layout(random)
    shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]

    folded = fold(
        index_maps(layout), mesh=layout.mesh, full_shape=layout.full_shape, shard_shapes=shapes
    )

    filled = {(padding.fill, layout.mesh) for padding in layout.padding}
    if ("undefined", layout.mesh) not in filled:
        assert relation_by_walking(folded) == relation_by_walking(layout)
        assert same_layout(folded, layout)
    assert index_maps(folded) == index_maps(layout)
    assert isinstance(prove(folded), Covered)
    event(f"{len(folded.all_pieces)} pieces")


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 12))
def test_any_table_folds_to_itself(random, ranks, length):
    numel = random.choice([3, 8, 40])
    maps = [[random.randint(-2, numel - 1) for _ in range(length)] for _ in range(ranks)]
    if random.random() < 0.5:
        maps = [entries[: random.randint(0, length)] for entries in maps]

    folded = fold(
        maps,
        mesh={"rank": ranks},
        full_shape=(numel,),
        shard_shapes=[(len(entries),) for entries in maps],
    )

    assert index_maps(folded) == [[max(entry, -1) for entry in entries] for entries in maps]
    assert isinstance(prove(folded, side="shard"), Covered)


@pytest.mark.parametrize(
    ("partition", "ranks"), CASES, ids=lambda case: getattr(case, "name", case)
)
def test_layouts_of_frameworks_fold_to_as_few_pieces_as_they_have_at_every_size(partition, ranks):
    for size in (1, 2, 4):
        maps = partition.index_maps(size, ranks)

        folded = fold_arrays(maps, partition.shape(size))

        got = [np.array(entries) for entries in index_maps_by_strides(folded)]
        for entries, expected in zip(got, maps, strict=True):
            np.testing.assert_array_equal(entries, expected.reshape(-1))
        assert len(folded.all_pieces) == partition.pieces


def index_maps_by_strides(layout: Layout) -> list[np.ndarray]:
    """`index_maps` for shards that are too large to walk."""
    maps = [np.full(layout.shard_numel(rank), -1) for rank in range(layout.rank_count)]
    for rank, entries in enumerate(maps):
        for piece in layout.pieces(rank):
            full, shard = np.array([piece.full_base]), np.array([piece.shard_base])
            for axis in piece.axes:
                steps = np.arange(axis.extent)
                full = (full[:, None] + steps * axis.full_stride).reshape(-1)
                shard = (shard[:, None] + steps * axis.shard_stride).reshape(-1)
            assert (entries[shard] == -1).all()
            entries[shard] = full
    return maps


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_codegen_is_one_piece_for_the_whole_tensor_on_all_ranks(ranks):
    partition = next(case for case in PARTITIONS if case.name == "deepspeed codegen")

    (piece,) = fold_arrays(partition.index_maps(1, ranks), partition.shape(1)).all_pieces

    block = 384 * 8 // (12 * ranks)
    over_ranks = {
        2: [Axis(2, 12 * block, 1, 0)],
        4: [Axis(4, 12 * block, 1, 0)],
        8: [Axis(4, 24 * block, 2, 0), Axis(2, 4 * block, 1, 0)],
    }
    assert piece.rank_axes == tuple(over_ranks[ranks])


def test_bigcode_keeps_what_is_split_apart_from_what_is_replicated():
    partition = next(case for case in PARTITIONS if case.name == "deepspeed bigcode")

    query, key_value = fold_arrays(partition.index_maps(1, 4), partition.shape(1)).all_pieces

    assert query.rank_axes == (Axis(4, 16 * 8, 1, 0),)
    assert key_value.rank_axes == (Axis(4, 0, 1, 0),)
    assert key_value.numel == 4 * 16 * 8


def test_uneven_shards_are_one_piece_for_each_run_of_ranks():
    rows = [range(9), range(9, 18), range(18, 24), range(24, 30)]

    folded = fold(
        rows, mesh={"tp": 4}, full_shape=(10, 3), shard_shapes=[(3, 3)] * 2 + [(2, 3)] * 2
    )

    assert folded.all_pieces == (
        Piece((Axis(2, 9, 1, 0), Axis(9, 1, 0, 1))),
        Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)), 18, 2),
    )


def test_torch_chunks_of_19_rows_for_7_ranks_are_two_pieces_and_of_10_rows_one():
    def chunks(rows):
        share = -(-rows // 7)
        return [
            np.arange(min(rank * share, rows), min((rank + 1) * share, rows)) for rank in range(7)
        ]

    assert [len(fold_arrays(chunks(rows), (rows,)).all_pieces) for rows in (10, 19, 37)] == [
        1,
        2,
        2,
    ]


def test_a_split_over_one_mesh_axis_is_replicated_over_the_others():
    maps = [list(range(4 * (rank // 2 % 2), 4 * (rank // 2 % 2) + 4)) for rank in range(8)]

    (piece,) = fold(
        maps, mesh="dp=2,tp=2,sp=2", full_shape=(8,), shard_shapes=[(4,)] * 8
    ).all_pieces

    assert piece.rank_axes == (Axis(2, 0, 4, 0), Axis(2, 4, 2, 0), Axis(2, 0, 1, 0))


def test_a_table_that_follows_no_arithmetic_costs_no_more_than_its_entries():
    table = Random(7).sample(range(64), 64)  # noqa: S311

    folded = fold(
        [table[at : at + 16] for at in range(0, 64, 16)],
        mesh={"ep": 4},
        full_shape=(64,),
        shard_shapes=[(16,)] * 4,
    )

    assert 16 < len(folded.all_pieces) <= 32


def test_ranks_with_unrelated_tables_are_folded_apart():
    shuffled = Random(1).sample(range(12), 12)  # noqa: S311

    folded = fold(
        [list(range(12)), list(range(12, 24)), [24 + entry for entry in shuffled]],
        mesh={"ep": 3},
        full_shape=(36,),
        shard_shapes=[(12,)] * 3,
    )

    assert folded.all_pieces[0] == Piece((Axis(2, 12, 1, 0), Axis(12, 1, 0, 1)))


def test_padding_is_declared_and_not_covered():
    folded = fold(
        [[0, 1, 2], [3, 4, -1], [-1, -7, -1]],
        mesh={"dp": 3},
        full_shape=(5,),
        shard_shapes=[(3,)] * 3,
        fill="undefined",
    )

    assert index_maps(folded) == [[0, 1, 2], [3, 4, -1], [-1, -1, -1]]
    assert {padding.fill for padding in folded.padding} == {"undefined"}
    assert isinstance(prove(folded), Covered)


def test_empty_shards_and_an_empty_tensor_have_no_pieces():
    nothing = fold([[], []], mesh={"tp": 2}, full_shape=(0, 4), shard_shapes=[(0, 4)] * 2)
    one = fold([[], [0, 1]], mesh={"tp": 2}, full_shape=(2,), shard_shapes=[(0,), (2,)])

    assert nothing.all_pieces == ()
    assert one.all_pieces == (Piece((Axis(2, 1, 0, 1),), 0, 1),)


@pytest.mark.parametrize(
    ("partition", "ranks"), CASES[::7], ids=lambda case: getattr(case, "name", case)
)
def test_inner_loops_may_be_taken_out_before(partition, ranks):
    maps = partition.index_maps(1, ranks)
    width = 2 if all((np.diff(m.reshape(-1, 2)) == 1).all() for m in maps) else 1

    whole = fold_arrays(maps, partition.shape(1))
    short = fold(
        [entries.reshape(-1)[::width].tolist() for entries in maps],
        mesh={"rank": ranks},
        full_shape=partition.shape(1),
        shard_shapes=[entries.shape for entries in maps],
        inner=[(width, 1)],
    )

    assert short == whole


def test_inner_loops_stand_for_a_dense_block_of_the_shard():
    folded = fold(
        [[0, 2], [1, -1]],
        mesh={"tp": 2},
        full_shape=(4, 6),
        shard_shapes=[(2, 6)] * 2,
        inner=[(3, 4), (2, 12)],
    )

    expected = [
        [base + 4 * i + 12 * j for i, j in product(range(3), range(2))] for base in (0, 2, 1)
    ]
    assert index_maps(folded) == [expected[0] + expected[1], expected[2] + [-1] * 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_maps": [[0, 1]]}, "1 index maps and 2 shard shapes"),
        ({"index_maps": [[0, 1], [2]]}, "rank 1: the index map has 1 entry"),
        ({"index_maps": [[0, 1], [2, 3.0]]}, "rank 1: .*something else than integers"),
        ({"index_maps": [[0, 1], [2, 4]]}, "full index 4, the tensor has 4"),
        ({"inner": [(2, -1)]}, "full stride of an inner loop"),
        ({"inner": [(0, 1)]}, "extent of an inner loop"),
        ({"inner": [(2, 1)]}, "2 entries for blocks of 2"),
        ({"mesh": "tp=3"}, "has 3 ranks"),
        ({"fill": "ones"}, "padding is filled with"),
    ],
)
def test_maps_that_do_not_fit_are_refused(options, message):
    arguments = {
        "index_maps": [[0, -1], [2, 3]],
        "mesh": {"tp": 2},
        "full_shape": (4,),
        "shard_shapes": [(2,), (2,)],
        **options,
    }

    with pytest.raises(LayoutError, match=message):
        fold(arguments.pop("index_maps"), **arguments)


def test_numpy_integers_are_integers():
    folded = fold(np.arange(4).reshape(2, 2), mesh="tp=2", full_shape=(4,), shard_shapes=[(2,)] * 2)

    assert folded == canonicalize(
        Layout.of({"tp": 2}, (4,), [(2,)] * 2, [Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)))])
    )


# --- the kernel


def points_of(nest: Nest) -> list[tuple[int, int]]:
    return [
        (
            nest.first
            + sum(i * first for i, (_, first, _) in zip(steps, nest.digits, strict=True)),
            nest.second
            + sum(i * second for i, (*_, second) in zip(steps, nest.digits, strict=True)),
        )
        for steps in product(*(range(extent) for extent, _, _ in nest.digits))
    ]


@given(st.randoms(use_true_random=False), st.integers(0, 40), st.booleans())
def test_nests_visit_each_point_once(random, count, may_descend):
    firsts = sorted(random.sample(range(2 * count + 1), count))
    seconds = [random.randint(0, random.choice([1, 4, 30])) for _ in range(count)]

    nests = fold_points(firsts, seconds, may_descend=may_descend)

    visited = sorted(point for nest in nests for point in points_of(nest))
    assert visited == list(zip(firsts, seconds, strict=True))
    assert all(first > 0 for nest in nests for _, first, _ in nest.digits)
    assert may_descend or all(second >= 0 for nest in nests for *_, second in nest.digits)


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_nest_folds_to_one_nest(loops):
    seconds = [0]
    for extent, stride in loops:
        seconds = [second + step * stride for second in seconds for step in range(extent)]

    assert len(fold_points(range(len(seconds)), seconds)) == 1


def fewest_nests(seconds: list[int]) -> int:
    """Try every way to cover a short sequence, whatever the order in which nests lie."""
    points = {point: number for number, point in enumerate(enumerate(seconds))}
    everything = (1 << len(seconds)) - 1
    starting: dict[int, set[int]] = {}
    for start, number in points.items():
        grown: set[frozenset[tuple[int, int]]] = set()
        _grow(frozenset([start]), start, points, grown)
        starting[number] = {sum(1 << points[point] for point in nest) for nest in grown}
    best = {0: 0}
    for _ in seconds:
        reached = dict(best)
        for covered, cost in best.items():
            lowest = next((i for i in range(len(seconds)) if not covered >> i & 1), None)
            for nest in starting.get(lowest, ()):
                if not nest & covered:
                    reached[covered | nest] = min(reached.get(covered | nest, 99), cost + 1)
        best = reached
    return best[everything]


def _grow(nest, start, points, grown) -> None:
    if nest in grown:
        return
    grown.add(nest)
    for first, second in points:
        step = first - start[0], second - start[1]
        whole, times = nest, 1
        while step[0] > 0 and step[1] >= 0:
            moved = {(a + times * step[0], b + times * step[1]) for a, b in nest}
            if moved & whole or not moved <= points.keys():
                break
            whole, times = whole | moved, times + 1
            _grow(whole, start, points, grown)


def test_sequences_of_loops_are_folded_to_the_fewest_nests_almost_always():
    random = Random(2)  # noqa: S311
    excess = 0
    for _ in range(100):
        seconds: list[int] = []
        base = 0
        while len(seconds) < 8:
            extents = random.choice([(2,), (3,), (4,), (2, 2), (3, 2), (2, 3)])
            loops = [0]
            for extent in extents:
                stride = random.randint(0, 9)
                loops = [value + step * stride for step in range(extent) for value in loops]
            seconds += [base + value for value in loops]
            base = max(seconds) + random.randint(1, 6)
        seconds = seconds[:9]
        excess += len(fold_points(range(len(seconds)), seconds)) - fewest_nests(seconds)

    assert excess <= 4


def test_interleaved_heads_stay_few_however_many_there_are():
    for heads in (4, 16, 64, 256):
        query = np.arange(heads * 6).reshape(heads, 6)
        key, value = heads * 6 + np.arange(heads * 6).reshape(2, heads, 3)
        fused = np.concatenate([query, key, value], 1).reshape(-1).tolist()

        assert len(fold_points(range(len(fused)), fused)) == 2
        assert len(fold_points(range(len(fused) - 8), fused[5:-3])) <= 6


def test_long_runs_of_uneven_length_are_one_nest_each():
    lengths, starts = (30_001, 20_011, 9_973), (0, 100_000, 200_000)
    seconds = [
        start + i for length, start in zip(lengths, starts, strict=True) for i in range(length)
    ]

    nests = fold_points(range(len(seconds)), seconds)

    assert [nest.digits for nest in nests] == [((length, 1, 1),) for length in lengths]


def test_a_touch_by_chance_does_not_hide_that_blocks_are_equal():
    seconds = [*range(4), *range(10, 14), *range(20, 24), *range(24, 29), *range(40, 45)]

    nests = fold_points(range(len(seconds)), seconds)

    assert len(nests) == 2


def test_equal_blocks_in_falling_order_are_nests_of_their_own():
    # A loop of a shard cannot walk the full tensor backwards, but one over the ranks can.
    seconds = [10, 11, 12, 0, 1, 2, 30, 31]

    assert len(fold_points(range(8), seconds)) == 3
    assert len(fold_points(range(8), seconds, may_descend=True)) == 2


def test_a_table_too_long_for_free_cuts_is_still_cut_near_its_changes():
    seconds: list[int] = []
    for block in range(60):
        start = 1000 * (block // 3 * 7 % 20) + 10 * (block % 3)
        seconds += range(start, start + 5)
    seconds += [99_000]

    nests = fold_points(range(len(seconds)), seconds)

    assert len(seconds) > 256
    assert len(nests) <= 21


def test_a_long_table_without_structure_is_folded_in_linear_time():
    table = Random(0).sample(range(6_000), 6_000)  # noqa: S311

    nests = fold_points(range(len(table)), table)

    assert len(nests) < 3_000
