"""Every builder against the cut that it describes, restated with NumPy on markers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import layouts
from restride.algebra.coverage import Covered, prove
from restride.testing.cuts import index_maps


def markers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def assert_cuts(layout, shards) -> None:
    assert [layout.shard_shape(rank) for rank in range(layout.rank_count)] == [
        shard.shape for shard in shards
    ]
    assert index_maps(layout) == [shard.reshape(-1).tolist() for shard in shards]
    assert isinstance(prove(layout), Covered)


def parts(array: np.ndarray, sizes, dim: int = 0) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)
widths = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(shape=shapes, sizes=widths, data=st.data())
def test_a_split_gives_each_rank_its_run_of_rows(shape, sizes, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(sizes)

    layout = layouts.split(shape, mesh={"tp": len(sizes)}, dim=dim, sizes=sizes)

    assert_cuts(layout, parts(markers(*shape), sizes, dim))
    assert layout == layouts.split(
        shape, mesh={"tp": len(sizes)}, dim=dim - len(shape), sizes=sizes
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_even_split_is_one_piece_along_any_dimension(dim):
    layout = layouts.split((4, 4, 4), mesh={"tp": 4}, dim=dim)

    assert_cuts(layout, parts(markers(4, 4, 4), [1] * 4, dim))
    assert len(layout.all_pieces) == 1


@given(rows=st.integers(0, 12), ranks=st.integers(1, 6), dim=st.integers(0, 1))
def test_chunks_are_rounded_up_and_the_last_ranks_go_short(rows, ranks, dim):
    shape = (rows, 2) if dim == 0 else (2, rows)
    full, width = markers(*shape), -(-rows // ranks)
    index = [slice(rank * width, (rank + 1) * width) for rank in range(ranks)]

    layout = layouts.chunked(shape, mesh={"dp": ranks}, dim=dim)

    assert_cuts(layout, [full[i] if dim == 0 else full[:, i] for i in index])


@given(rows=st.integers(0, 9), more=st.integers(0, 9), ranks=st.integers(1, 5), data=st.data())
def test_padding_fills_up_the_last_ranks_and_is_declared(rows, more, ranks, data):
    dim, width = data.draw(st.integers(0, 1)), -(-(rows + more) // ranks)
    shape = [3, 3]
    shape[dim] = rows
    spare = [(0, 0), (0, 0)]
    spare[dim] = (0, width * ranks - rows)
    whole = np.pad(markers(*shape), spare, constant_values=-1)

    layout = layouts.padded(shape, mesh={"tp": ranks}, rows=width * ranks, dim=dim)

    assert_cuts(layout, np.split(whole, ranks, axis=dim))


@given(table=st.lists(st.tuples(widths, st.booleans()), min_size=1, max_size=4), data=st.data())
def test_segments_are_cut_or_held_whole_each_on_its_own(table, data):
    ranks = data.draw(st.integers(1, 4))
    segments = [
        (sum(w := (row + [1] * ranks)[:ranks]), None if is_whole else w) for row, is_whole in table
    ]
    dim = data.draw(st.integers(0, 1))
    rows = sum(size for size, _ in segments)
    full = markers(*((rows, 2) if dim == 0 else (2, rows)))
    pieces = [
        [part] * ranks if cut is None else parts(part, cut, dim)
        for part, (_, cut) in zip(
            parts(full, [size for size, _ in segments], dim), segments, strict=True
        )
    ]

    layout = layouts.segmented(full.shape, mesh={"tp": ranks}, segments=segments, dim=dim)

    assert_cuts(
        layout,
        [np.concatenate([piece[rank] for piece in pieces], axis=dim) for rank in range(ranks)],
    )


def test_sub_parameters_are_cut_evenly_where_no_widths_are_given():
    q, k, v = parts(markers(16, 2), [8, 4, 4])

    layout = layouts.sub_params((16, 2), mesh={"tp": 2}, sizes=[8, 4, 4])

    assert_cuts(layout, [np.concatenate([q[s], k[h], v[h]]) for s, h in _HALVES])


_HALVES = ((slice(4), slice(2)), (slice(4, 8), slice(2, 4)))


@given(data=st.data(), ranks=st.integers(1, 4), count=st.integers(1, 9))
def test_blocks_go_where_the_table_says(data, ranks, count):
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.integers(0, count)) for _ in range(ranks - 1))
    ids = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    dim, block = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 2))
    full = markers(*((count * block, 2) if dim == 0 else (2, count * block)))
    blocks = np.split(full, count, axis=dim)
    empty = full[:0] if dim == 0 else full[:, :0]

    layout = layouts.block_gather(full.shape, mesh={"tp": ranks}, ids=ids, block=block, dim=dim)

    assert_cuts(
        layout,
        [np.concatenate([empty, *(blocks[i] for i in of_rank)], axis=dim) for of_rank in ids],
    )


@given(data=st.data(), ranks=st.integers(1, 4), count=st.integers(1, 6))
def test_experts_may_be_on_several_ranks(data, ranks, count):
    some = st.lists(st.integers(0, count - 1), unique=True)
    placement = [data.draw(some) for _ in range(ranks - 1)]
    missing = set(range(count)) - {number for ids in placement for number in ids}
    placement.append(sorted(missing | set(data.draw(some)), reverse=True))
    full = markers(count, 2, 2)

    layout = layouts.experts((count, 2, 2), mesh={"ep": ranks}, placement=placement)

    assert_cuts(layout, [full[np.array(ids, dtype=int)] for ids in placement])


def test_neighbouring_experts_are_one_piece_and_so_are_experts_dealt_in_turn():
    neighbours = layouts.experts((8, 2), mesh={"ep": 4})
    in_turn = layouts.experts((8, 2), mesh={"ep": 4}, placement=[[r, r + 4] for r in range(4)])

    assert len(neighbours.all_pieces) == len(in_turn.all_pieces) == 1
    assert neighbours == layouts.split((8, 2), mesh={"ep": 4})


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("block", [1, 2])
def test_codegen_permutes_the_rows_and_cuts_them_evenly(ranks, block):
    shape = (12 * ranks * block, 2)
    stored = markers(*shape).reshape(4, 3, ranks, block, 2)

    layout = layouts.codegen_qkv(shape, mesh={"tp": ranks}, heads=4 * ranks)

    assert_cuts(layout, np.split(stored.transpose(0, 2, 1, 3, 4).reshape(shape), ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_codegen_is_one_piece_for_all_ranks_whatever_its_size(ranks):
    for hidden in (1024 * ranks, 5120):
        layout = layouts.codegen_qkv((3 * hidden, hidden), mesh={"tp": ranks}, heads=4 * ranks)

        assert len(layout.all_pieces) == 1
        assert all(len(layout.pieces(rank)) == 1 for rank in range(ranks))


@pytest.mark.parametrize("ranks", [3, 6, 12])
def test_codegen_costs_few_pieces_where_the_ranks_and_four_do_not_divide(ranks):
    cuts = [
        layouts.codegen_qkv((12 * ranks * n, 64), mesh={"tp": ranks}, heads=4 * ranks)
        for n in (1, 7, 100)
    ]

    assert len({len(layout.all_pieces) for layout in cuts}) == 1
    assert len(cuts[0].all_pieces) <= 6


def test_codegen_at_two_ranks_is_the_piece_of_the_design():
    block, columns = 2, 5

    layout = layouts.codegen_qkv((24 * block, columns), mesh={"tp": 2}, heads=16)

    unit = block * columns
    assert [
        (a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in layout.all_pieces[0].axes
    ] == [
        (2, 12 * unit, 1, 0),
        (2, 6 * unit, 0, 6 * unit),
        (2, unit, 0, 3 * unit),
        (3, 2 * unit, 0, unit),
        (unit, 1, 0, 1),
    ]


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (12, 4), (6, 2), (9, 3), (15, 3), (15, 5)])
def test_yuans_value_heads_follow_the_query_heads(heads, ranks):
    each = heads // ranks
    first = [[(rank * each + i) // 2 for i in range(0, each, 2)] for rank in range(ranks)]
    ids = [[*of_rank, *(head + heads // 2 for head in of_rank)] for of_rank in first]
    rows, columns = markers(heads * 2, 3), markers(3, heads * 2)

    value = layouts.yuan_value(rows.shape, mesh={"tp": ranks}, heads=heads)
    output = layouts.yuan_output(columns.shape, mesh={"tp": ranks}, heads=heads)

    blocks = np.split(rows, heads)
    assert_cuts(value, [np.concatenate([blocks[i] for i in of_rank]) for of_rank in ids])
    blocks = np.split(columns, heads, axis=1)
    assert_cuts(output, [np.concatenate([blocks[i] for i in of_rank], axis=1) for of_rank in ids])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_thirds_are_one_piece_and_unequal_parts_two(ranks):
    hidden = 8 * ranks
    q, k, v = np.split(markers(3 * hidden, 2), 3)

    thirds = layouts.glm_qkv((3 * hidden, 2), mesh={"tp": ranks}, heads=2 * ranks * 2)
    grouped = layouts.phi3_qkv(
        (2 * hidden, hidden), mesh={"tp": ranks}, query_heads=2 * ranks, heads=ranks
    )

    assert_cuts(
        thirds,
        [np.concatenate([np.split(x, ranks)[rank] for x in (q, k, v)]) for rank in range(ranks)],
    )
    assert len(thirds.all_pieces) == 1
    assert len(grouped.all_pieces) == 2


def test_bigcode_keeps_the_cut_and_the_whole_part_apart():
    layout = layouts.bigcode_qkv((20, 4), mesh={"tp": 4}, hidden=16)
    full = markers(20, 4)

    assert_cuts(layout, [np.concatenate([q, full[16:]]) for q in np.split(full[:16], 4)])
    assert len(layout.all_pieces) == 2


@given(shape=shapes, data=st.data())
def test_a_permuted_layout_cuts_the_permuted_copy(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    dim = data.draw(st.integers(0, len(shape) - 1))
    copy = markers(*shape).transpose(order)
    ranks = data.draw(st.integers(1, 4))

    layout = layouts.permuted(layouts.chunked(copy.shape, mesh={"tp": ranks}, dim=dim), order)

    width = -(-copy.shape[dim] // ranks)
    cuts = [min(width * rank, copy.shape[dim]) for rank in range(1, ranks)]
    assert layout.full_shape == tuple(shape)
    assert_cuts(layout, np.split(copy, cuts, axis=dim))


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=3), data=st.data())
def test_a_flat_cut_of_a_permuted_copy_is_exact_too(shape, data):
    """The cuts fall anywhere in the rows of the copy, so that parts follow each other backwards."""
    order = data.draw(st.permutations(range(len(shape))))
    ranks = data.draw(st.integers(1, 5))
    copy = markers(*shape).transpose(order)
    width = -(-copy.size // ranks)
    whole = [*copy.reshape(-1).tolist(), *[-1] * (width * ranks - copy.size)]

    layout = layouts.permuted(layouts.flat_chunks(copy.shape, mesh={"dp": ranks}), order)

    assert index_maps(layout) == [whole[r * width : (r + 1) * width] for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpt2s_fused_weight_is_a_transposed_third(ranks):
    thirds = np.split(markers(8, 24).T, 3)

    layout = layouts.transposed(layouts.glm_qkv((24, 8), mesh={"tp": ranks}, heads=8))

    assert_cuts(
        layout,
        [np.concatenate([np.split(x, ranks)[rank] for x in thirds]) for rank in range(ranks)],
    )
    assert len(layout.all_pieces) == 1


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        (layouts.codegen_qkv((12288, 4096), mesh={"tp": 4}, heads=32), 1),
        (layouts.glm_qkv((3 * 8192, 8192), mesh={"dp": 8, "tp": 64}, heads=64, axis="tp"), 1),
        (layouts.phi3_qkv((10240, 8192), mesh={"tp": 8}, query_heads=64, heads=8), 2),
        (layouts.bigcode_qkv((6400, 6144), mesh={"tp": 8}, hidden=6144), 2),
        (layouts.yuan_value((8192, 8192), mesh={"tp": 8}, heads=64), 1),
        (layouts.yuan_value((6144, 2048), mesh={"tp": 16}, heads=48), 1),
        (layouts.gate_up((57344, 8192), mesh={"tp": 8}), 1),
        (layouts.experts((256, 4096, 7168), mesh={"ep": 64}), 1),
        (layouts.transposed(layouts.glm_qkv((4800, 1600), mesh={"tp": 5}, heads=25)), 1),
        (layouts.padded((50257, 1600), mesh={"tp": 8}, rows=50304), 2),
    ],
    ids=lambda value: "x".join(map(str, value.full_shape)) if hasattr(value, "mesh") else "",
)
def test_weights_of_real_models_are_a_few_pieces_and_proved_whole(layout, pieces):
    assert len(layout.all_pieces) == pieces
    assert isinstance(prove(layout), Covered)
