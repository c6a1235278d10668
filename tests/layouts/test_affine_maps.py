"""Our layouts against the maps that DeepSpeed itself publishes, and what its builders let pass."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest

from restride import layouts
from restride.errors import LayoutError
from restride.testing.cuts import index_maps

pytestmark = pytest.mark.interop


def relation_of_map(affine_map) -> list[list[int]]:
    """Full index at each shard address of each rank."""
    maps = []
    for rank, pieces in sorted(affine_map.pieces_by_rank.items()):
        numel = 1
        for size in affine_map.shard_shapes[rank]:
            numel *= size
        addresses = [-2] * numel
        for piece in pieces:
            shard = piece._offsets(piece.dest_offset, piece.dest_strides)
            for full, address in zip(piece.source_offsets(), shard, strict=True):
                assert addresses[address] == -2
                addresses[address] = full
        maps.append(addresses)
    return maps


def assert_same(layout, affine_map):
    affine_map.validate()
    assert layout.full_shape == tuple(affine_map.logical_shape)
    assert [layout.shard_shape(rank) for rank in range(layout.rank_count)] == [
        tuple(shape) for _, shape in sorted(affine_map.shard_shapes.items())
    ]
    assert index_maps(layout) == relation_of_map(affine_map)


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 11), (4, 12), (8, 12)])
@pytest.mark.parametrize("block", [1, 2])
def test_one_piece_says_what_the_peer_says_in_twelve(frameworks, ranks, pieces, block):
    real, shape = frameworks.real(), (12 * ranks * block, 2)
    block_rows, ids = real.fused.codegen_block_layout(shape[0], ranks, 8 * ranks)
    published = real.affine.block_gather_map(shape, ids, block_rows, 0)

    layout = layouts.codegen_qkv(shape, mesh={"tp": ranks}, heads=8 * ranks)

    assert max(len(of_rank) for of_rank in published.pieces_by_rank.values()) == pieces
    assert len(layout.all_pieces) == 1
    assert all(len(layout.pieces(rank)) == 1 for rank in range(ranks))
    assert_same(layout, published)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bigcode_says_what_the_published_segments_say(frameworks, ranks):
    widths = layouts.autotp_sizes(24, ranks, heads=3)
    published = frameworks.real().affine.segmented_map(
        (30, 2), [(24, False), (6, True)], 0, ranks, split_widths=[list(widths)]
    )

    assert_same(layouts.bigcode_qkv((30, 2), mesh={"tp": ranks}, hidden=24, heads=3), published)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_split_says_what_the_published_split_says(frameworks, dim):
    published = frameworks.real().affine.contiguous_split_map((7, 7), [3, 0, 4], dim)

    assert_same(layouts.split((7, 7), mesh={"tp": 3}, dim=dim, sizes=[3, 0, 4]), published)


def test_sub_parameters_say_what_the_published_ones_say(frameworks):
    sizes, widths = [6, 3, 3], [[4, 2], [2, 1], [1, 2]]
    published = frameworks.real().affine.sub_param_map((2, 12, 3), sizes, widths, 1)

    assert_same(
        layouts.sub_params((2, 12, 3), mesh={"tp": 2}, sizes=sizes, widths=widths, dim=1),
        published,
    )


def test_yuan_says_what_the_published_blocks_say(frameworks):
    real = frameworks.real()
    ids = {rank: real.fused.shared_qk_value_head_ids(12, 3, rank) for rank in range(3)}

    assert_same(
        layouts.yuan_value((24, 2), mesh={"tp": 3}, heads=12),
        real.affine.block_gather_map((24, 2), ids, 2, 0),
    )
    assert_same(
        layouts.yuan_output((2, 24), mesh={"tp": 3}, heads=12),
        real.affine.block_gather_map((2, 24), ids, 2, 1),
    )


def test_a_scaled_replica_says_what_the_published_one_says(frameworks):
    published = frameworks.real().affine.replicated_map((5,), 4, scale=0.25)
    layout = layouts.replicated((5,), mesh={"tp": 4}, scale=Fraction(1, 4))

    assert_same(layout, published)
    assert layout.all_pieces[0].scale == published.pieces_by_rank[0][0].scale


@pytest.mark.parametrize(
    ("peer", "ours"),
    [
        pytest.param(
            lambda a: a.contiguous_split_map((8, 2), [3, 4], 0),
            lambda: layouts.split((8, 2), mesh={"tp": 2}, sizes=[3, 4]),
            id="sizes that are too short",
        ),
        pytest.param(
            lambda a: a.contiguous_split_map((8, 2), [5, 4], 0),
            lambda: layouts.split((8, 2), mesh={"tp": 2}, sizes=[5, 4]),
            id="sizes that are too long",
        ),
        pytest.param(
            lambda a: a.contiguous_split_map((8, 2), [4.0, 4.9], 0),
            lambda: layouts.split((8, 2), mesh={"tp": 2}, sizes=[4.0, 4.9]),
            id="sizes with a fraction",
        ),
        pytest.param(
            lambda a: a.sub_param_map((8, 2), [4, 2], [[2, 2], [1, 1]], 0),
            lambda: layouts.sub_params((8, 2), mesh={"tp": 2}, sizes=[4, 2]),
            id="sub-parameters that do not fill the dimension",
        ),
        pytest.param(
            lambda a: a.sub_param_map((8, 2), [4, 4], [[2, 2], [1, 2]], 0),
            lambda: layouts.sub_params(
                (8, 2), mesh={"tp": 2}, sizes=[4, 4], widths=[[2, 2], [1, 2]]
            ),
            id="widths that do not fill the sub-parameter",
        ),
        pytest.param(
            lambda a: a.segmented_map((8, 2), [(4, False), (2, True)], 0, 2, [[2, 2]]),
            lambda: layouts.segmented((8, 2), mesh={"tp": 2}, segments=[(4, [2, 2]), (2, None)]),
            id="segments that do not fill the dimension",
        ),
        pytest.param(
            lambda a: a.block_gather_map((8, 2), {0: [0, 1], 1: [1, 3]}, 2, 0),
            lambda: layouts.block_gather((8, 2), mesh={"tp": 2}, ids=[[0, 1], [1, 3]], block=2),
            id="a block on two ranks and one on none",
        ),
        pytest.param(
            lambda a: a.block_gather_map((8, 2), {0: [0, 1], 1: [2, 9]}, 2, 0),
            lambda: layouts.block_gather((8, 2), mesh={"tp": 2}, ids=[[0, 1], [2, 9]], block=2),
            id="a block that is not there",
        ),
        pytest.param(
            lambda a: a.replicated_map((8, 2), 2, scale=nan),
            lambda: layouts.replicated((8, 2), mesh={"tp": 2}, scale=nan),
            id="a scale of NaN",
        ),
        pytest.param(
            lambda a: a.replicated_map((8, 2), 2, scale=inf),
            lambda: layouts.replicated((8, 2), mesh={"tp": 2}, scale=inf),
            id="an infinite scale",
        ),
        pytest.param(
            lambda a: a.replicated_map((8.5, True), 2),
            lambda: layouts.replicated((8.5, True), mesh={"tp": 2}),
            id="a shape of floats and bools",
        ),
    ],
)
def test_what_the_peers_builders_let_pass_is_refused(frameworks, peer, ours):
    assert peer(frameworks.real().affine).pieces_by_rank

    with pytest.raises(LayoutError):
        ours()
