"""Every builder against the framework's own partition function, element for element, on markers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from restride import layouts
from restride.algebra.fold import fold
from restride.algebra.signature import same_layout
from restride.errors import LayoutError
from restride.testing.cuts import PADDED, index_maps

pytestmark = pytest.mark.interop

RANKS = (2, 3, 4, 6, 8)
_SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def agree(frameworks, kind, shape, ranks, **arguments) -> bool:
    """Whether both cut, and then the same; False where both refuse."""
    builder = getattr(layouts, kind)
    given = arguments if "shapes" in arguments else {"shape": shape, **arguments}
    try:
        shards = frameworks.cut(kind, shape, ranks, arguments)
    except frameworks.Refused:
        with pytest.raises(LayoutError):
            builder(mesh={"tp": ranks}, **given)
        return False

    layout = builder(mesh={"tp": ranks}, **given)

    assert [layout.shard_shape(rank) for rank in range(ranks)] == [tuple(s.shape) for s in shards]
    maps = [[max(full, PADDED) for full in shard.reshape(-1).tolist()] for shard in shards]
    assert index_maps(layout) == maps
    probed = fold(
        maps,
        mesh=layout.mesh,
        full_shape=layout.full_shape,
        shard_shapes=[shard.shape for shard in shards],
    )
    assert same_layout(layout, probed)
    return True


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("per_rank", [4, 8])
def test_codegen_is_cut_as_the_framework_cuts_it(frameworks, ranks, block, per_rank):
    rows = 12 * ranks * block

    assert agree(frameworks, "codegen_qkv", (rows, 2), ranks, heads=per_rank * ranks)


@pytest.mark.parametrize(
    ("shape", "ranks", "heads"),
    [
        ((48, 2), 2, None),
        ((48, 2), 2, 12),
        ((48, 2), 1, 16),
        ((60, 2), 2, 16),
        ((48,), 2, 16),
        ((48, 2, 2), 2, 16),
        ((0, 2), 2, 16),
        ((48, 0), 2, 16),
    ],
)
def test_codegen_is_refused_where_the_framework_refuses(frameworks, shape, ranks, heads):
    assert not agree(frameworks, "codegen_qkv", shape, ranks, heads=heads)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("hidden", [24, 48])
@pytest.mark.parametrize("heads", [8, 3, 5, None])
@pytest.mark.parametrize("kind", ["bloom_qkv", "glm_qkv", "qwen_qkv"])
def test_thirds_are_cut_as_the_framework_cuts_them(frameworks, kind, hidden, heads, ranks):
    cut = agree(frameworks, kind, (3 * hidden, 2), ranks, heads=heads)
    agree(frameworks, kind, (3 * hidden,), ranks, heads=heads)

    assert cut or (kind == "qwen_qkv" and heads is not None and heads < ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("hidden", "size"), [(16, 2), (24, 4)])
def test_chatglm_is_cut_as_the_framework_cuts_it(frameworks, hidden, size, ranks):
    assert agree(frameworks, "chatglm_qkv", (hidden + 4 * size, 2), ranks, hidden=hidden)
    assert agree(frameworks, "glm_qkv", (hidden + 4 * size,), ranks, hidden=hidden, heads=2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("query_heads", "heads"), [(8, 4), (6, 3), (8, 8), (10, 5)])
@pytest.mark.parametrize("size", [2, 4])
def test_phi3_is_cut_as_the_framework_cuts_it(frameworks, query_heads, heads, size, ranks):
    shape = ((query_heads + 2 * heads) * size, query_heads * size)

    assert agree(frameworks, "phi3_qkv", shape, ranks, query_heads=query_heads, heads=heads)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("heads", [1, 6, 8, None])
@pytest.mark.parametrize("hidden", [24, 48])
def test_bigcode_is_cut_as_the_framework_cuts_it(frameworks, hidden, heads, ranks):
    assert agree(frameworks, "bigcode_qkv", (hidden + 6, 2), ranks, hidden=hidden, heads=heads)
    assert agree(frameworks, "bigcode_qkv", (hidden + 6,), ranks, hidden=hidden, heads=heads)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("per_rank", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 3])
def test_yuan_is_cut_as_the_framework_cuts_it(frameworks, per_rank, size, ranks):
    heads = per_rank * ranks

    assert agree(frameworks, "yuan_value", (heads * size, 2), ranks, heads=heads)
    assert agree(frameworks, "yuan_value", (heads * size,), ranks, heads=heads)
    assert agree(frameworks, "yuan_output", (2, heads * size), ranks, heads=heads)


@pytest.mark.parametrize(
    ("rows", "ranks", "heads"), [(16, 3, 8), (16, 8, 8), (18, 2, 8), (16, 2, None), (3, 1, 3)]
)
def test_yuan_is_refused_where_the_framework_refuses_or_loses_rows(frameworks, rows, ranks, heads):
    assert not agree(frameworks, "yuan_value", (rows, 2), ranks, heads=heads)
    assert not agree(frameworks, "yuan_output", (2, rows), ranks, heads=heads)


def test_the_framework_means_to_divide_the_bias_of_yuans_output_and_fails_to(frameworks):
    weight, bias = frameworks.markers((4, 8)).double(), frameworks.markers((4,)).double()
    meta = frameworks.real().tp_shard.AutoTPMeta(num_kv_heads=8)
    layout = layouts.yuan_output((4,), mesh={"tp": 2}, heads=8)

    with pytest.raises(AttributeError, match="detach"):
        frameworks.real().fused.shard_value_with_share_qk(
            weight, bias, 0, 2, shard_value=False, meta=meta
        )
    assert layout.pieces(0)[0].scale == layout.pieces(1)[0].scale == 1 / 2


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("grain", [1, 4])
@pytest.mark.parametrize("shape", [(24, 2), (52,), (7, 2)])
def test_gate_and_up_are_cut_as_the_framework_cuts_them(frameworks, shape, grain, ranks):
    assert agree(frameworks, "gate_up", shape, ranks, grain=grain) == (shape[0] % 2 == 0)


@pytest.mark.parametrize("kind", ["conv1d_column", "conv1d_row"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(8, 8), (6, 6), (6, 8)])
def test_conv1d_is_cut_only_when_square_as_in_the_framework(frameworks, shape, ranks, kind):
    assert agree(frameworks, kind, shape, ranks, heads=3) == (shape[0] == shape[1])


@pytest.mark.parametrize(
    "placement",
    [
        [[0, 1, 2], [3, 4, 5]],
        [[0, 2, 4], [1, 3, 5]],
        [[5, 0], [1, 2, 3, 4], []],
        [[0, 1, 2, 3], [2, 3, 4, 5]],
        [[0, 1, 2], [3, 4]],
        [[0, 1, 2, 0], [3, 4, 5]],
        [[0, 1, 2], [3, 4, 6]],
        [[0, 1, 2], [3, 4, -1]],
        [[0, 1, 2], [3, 4, True]],
    ],
)
def test_experts_are_placed_as_the_framework_places_them(frameworks, placement):
    agree(frameworks, "experts", (6, 2, 3), len(placement), placement=placement)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_are_those_of_fsdp2(frameworks, ranks, dim):
    assert agree(frameworks, "chunked", (5, 6), ranks, dim=dim)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("align", [1, 4, 8])
@pytest.mark.parametrize("shapes", [[[4, 5], [3], [2, 4]], [[1]], [[17], [1], [1], [30]]])
def test_a_flat_group_is_that_of_zero_1(frameworks, shapes, align, ranks):
    assert agree(frameworks, "zero_flat", (), ranks, shapes=shapes, parameter_alignment=align)


@pytest.mark.parametrize("name", [None, "mlp.fc", "lm_head", "lm_head_proj", "h.w1", "q_proj"])
def test_sizes_are_those_of_the_framework(frameworks, name):
    rule, meta = frameworks.real().tp_shard.get_shard_size_list, frameworks._meta
    for total, ranks, heads, grain in product(
        (0, 1, 7, 24, 96), (1, 2, 3, 4, 8), (None, 2, 3, 8), (1, 4, 16, 64)
    ):
        ours = layouts.autotp_sizes(total, ranks, heads=heads, grain=grain, name=name)

        assert list(ours) == rule(total, ranks, meta({"heads": heads, "grain": grain}), name)


_NUMBERS = {
    "bloom_qkv": ("heads", "grain"),
    "glm_qkv": ("heads", "hidden", "grain"),
    "qwen_qkv": ("heads", "hidden", "grain"),
    "chatglm_qkv": ("hidden", "grain"),
    "bigcode_qkv": ("heads", "hidden", "grain"),
    "phi3_qkv": ("heads", "query_heads", "grain"),
    "codegen_qkv": ("heads",),
    "yuan_value": ("heads",),
    "gate_up": ("grain",),
}


@given(data=st.data(), kind=st.sampled_from(sorted(_NUMBERS)))
@_SETTINGS
def test_any_numbers_are_cut_or_refused_as_by_the_framework(frameworks, data, kind):
    draw = data.draw
    ranks = draw(st.integers(2, 6), label="ranks")  # the framework fuses nothing on one rank
    unit = draw(st.sampled_from([1, 3, 6, 12 * ranks]), label="unit")
    shape = (
        unit * draw(st.integers(1, 8), label="units"),
        *draw(st.sampled_from([(), (6,), (8,)])),
    )
    counts = {"grain": st.integers(1, 9), "hidden": st.integers(1, 30)}
    heads = st.one_of(st.none(), st.integers(1, 9), st.just(4 * ranks))
    arguments = {n: draw(counts.get(n, heads), label=n) for n in _NUMBERS[kind]}

    agree(frameworks, kind, shape, ranks, **arguments)
