"""What builders refuse: what no partition would cut, and what is no description at all."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import numpy as np
import pytest

from restride import layouts
from restride.errors import LayoutError, RuleError
from restride.layouts.catalogue import CATALOGUE
from restride.testing.cuts import read_example

TP2 = {"tp": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": None}, "heads is not given"),
        ({"heads": 12}, r"12 heads are no multiple of 4 \* 2 ranks; 12 heads are cut over 3 ranks"),
        ({"heads": 10}, r"10 heads are no multiple .*; no number of ranks would do"),
        ({"heads": 24, "mesh": {"tp": 4}}, "24 heads are cut over 2 or 3 or 6 ranks"),
        ({"heads": 16, "mesh": {"tp": 1}}, "use replicated"),
        ({"heads": 16, "shape": (40, 2)}, "24 equal blocks"),
        ({"heads": 16, "shape": (48,)}, "2 dimensions"),
        ({"heads": 16, "shape": (0, 2)}, "24 equal blocks"),
        ({"heads": 16.0}, "must be an integer"),
        ({"heads": True}, "must be an integer"),
        ({"heads": 0}, "at least 1"),
    ],
)
def test_codegen_says_why_it_refuses_and_what_would_work(arguments, words):
    with pytest.raises(LayoutError, match=words):
        layouts.codegen_qkv(**{"shape": (48, 2), "mesh": TP2, **arguments})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layouts.split((7, 2), mesh=TP2), "7 rows do not cut into 2 equal parts; give"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes=[8]), "1 numbers for 2 ranks"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes=[5, 4]), "add up to 9, not to 8"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes=[9, -1]), "at least 0"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes=[4.0, 4.0]), "must be an integer"),
        (lambda: layouts.split((2, 2), mesh=TP2, sizes=[True, True]), "must be an integer"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes={4: 1, 5: 1}), "sequence of integers"),
        (lambda: layouts.split((8, 2), mesh=TP2, sizes="44"), "sequence of integers"),
        (lambda: layouts.split((8, 2), mesh=TP2, dim=2), "no dimension 2; dim runs from 0 to 1"),
        (lambda: layouts.split((8, 2), mesh=TP2, dim=-3), "no dimension -3"),
        (lambda: layouts.split((8, 2), mesh=TP2, dim=True), "must be an integer"),
        (lambda: layouts.split((), mesh=TP2), "a scalar is replicated"),
        (lambda: layouts.split((8, -2), mesh=TP2), "at least 0"),
        (lambda: layouts.split((np.int64(8), 2), mesh=TP2), "must be an integer"),
        (lambda: layouts.padded((8, 2), mesh=TP2, rows=6), "fewer than the 8"),
        (lambda: layouts.padded((8, 2), mesh=TP2, rows=9), "9 rows do not cut"),
        (lambda: layouts.padded((8, 2), mesh=TP2, rows=8.0), "must be an integer"),
        (lambda: layouts.padded((7, 2), mesh=TP2, rows=8, fill="repeat"), "'zero' or 'undefined'"),
        (
            lambda: layouts.segmented((8, 2), mesh=TP2, segments=[(4, [2, 2]), (3, None)]),
            r"\[4, 3\] add up to 7, dimension 0 of shape \(8, 2\) has 8",
        ),
        (
            lambda: layouts.segmented((8, 2), mesh=TP2, segments=[(8, [4, 3])]),
            "widths of segment 0 .* add up to 7",
        ),
        (lambda: layouts.segmented((8, 2), mesh=TP2, segments=[8]), "is a pair"),
        (lambda: layouts.segmented((8, 2), mesh=TP2, segments=[(8.0, None)]), "must be an integer"),
        (
            lambda: layouts.sub_params((8, 2), mesh=TP2, sizes=[6, 2], widths=[[3, 3]]),
            "given for 1 of 2",
        ),
        (lambda: layouts.sub_params((8, 2), mesh=TP2, sizes=[5, 3]), "5 rows do not cut"),
        (lambda: layouts.gate_up((7, 2), mesh=TP2), "7 rows do not cut into a gate and an up"),
        (lambda: layouts.gate_up((8, 2), mesh=TP2, grain=0), "at least 1"),
        (lambda: layouts.glm_qkv((8, 2), mesh=TP2, heads=4), "equal thirds q, k, v; with fewer"),
        (lambda: layouts.glm_qkv((9, 2), mesh=TP2, heads=2), "hidden is not given"),
        (lambda: layouts.chatglm_qkv((8, 2), mesh=TP2, hidden=9), "do not leave k and v"),
        (lambda: layouts.chatglm_qkv((8, 2), mesh=TP2, hidden=5), "of equal size"),
        (lambda: layouts.bigcode_qkv((8, 2), mesh=TP2, hidden=None), "hidden is not given"),
        (lambda: layouts.bigcode_qkv((8, 2), mesh=TP2, hidden=8), "leave no rows for k and v"),
        (lambda: layouts.qwen_qkv((9, 2), mesh={"tp": 4}, heads=3), "rank 3 would get no query"),
        (
            lambda: layouts.phi3_qkv((8, 8), mesh=TP2, query_heads=2, heads=2),
            "fewer than k and v need",
        ),
        (lambda: layouts.phi3_qkv((8,), mesh=TP2, query_heads=2, heads=1), "2 dimensions"),
        (
            lambda: layouts.phi3_qkv((8, 8), mesh=TP2, query_heads=None, heads=1),
            "query_heads is not given",
        ),
        (lambda: layouts.bloom_qkv((), mesh=TP2), "a scalar is no fused weight"),
        (lambda: layouts.yuan_value((16, 2), mesh={"tp": 3}, heads=8), "3 ranks do not divide 8"),
        (lambda: layouts.yuan_value((8, 2), mesh={"tp": 8}, heads=8), "use at most 4 ranks"),
        (lambda: layouts.yuan_value((9, 2), mesh=TP2, heads=8), "would drop 1 rows"),
        (lambda: layouts.yuan_value((3, 2), mesh={"tp": 1}, heads=3), "middle one of 3"),
        (lambda: layouts.yuan_output((2,), mesh={"tp": 3}, heads=8), "do not divide"),
        (lambda: layouts.yuan_output((2, 2, 2), mesh=TP2, heads=8), "1 or 2 dimensions"),
        (lambda: layouts.conv1d_row((4, 6), mesh=TP2), "is not square"),
        (lambda: layouts.conv1d_column((4,), mesh=TP2), "2 dimensions"),
        (lambda: layouts.flat_chunks((4,), mesh=TP2, alignment=0), "at least 1"),
        (lambda: layouts.zero_group([], mesh=TP2), "has no parameter"),
        (lambda: layouts.zero_group([(4,)], mesh=TP2, alignment=3), "use a multiple of 2"),
        (lambda: layouts.zero_group([(4.0,)], mesh=TP2), "must be an integer"),
        (lambda: layouts.zero_group([4], mesh=TP2), "sequence of integers"),
        (
            lambda: layouts.permuted(layouts.split((4, 2), mesh=TP2), (0, 0)),
            "each of the 2 dimensions",
        ),
        (lambda: layouts.transposed(layouts.split((4,), mesh=TP2)), "no two dimensions"),
    ],
)
def test_a_builder_says_what_is_wrong_with_the_numbers(call, words):
    with pytest.raises(LayoutError, match=words):
        call()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[0, 1], [2]], r"no rank holds block 3 \(1 of 4\)"),
        ([[0, 1, 1], [2, 3]], "rank 0 holds block 1 more than once"),
        ([[0, 1], [1, 2, 3]], "block 1 is on rank 0 and on rank 1; pass allow_shared=True"),
        ([[0, 1], [2, 4]], "rank 1 holds block 4, there are 4"),
        ([[0, 1], [2, -1]], "rank 1 holds block -1"),
        ([[0, 1, 2, 3]], "given for 1 rank, the mesh axis has 2"),
        ([[0, 1], [2, 3], []], "given for 3 ranks"),
        ([[0, 1], [2, 3.0]], "must be an integer"),
        ([[0, True], [2, 3]], "must be an integer"),
        ([[0, 1], 2], "sequence of integers"),
    ],
)
def test_a_table_of_blocks_holds_every_block_once(ids, words):
    with pytest.raises(LayoutError, match=words):
        layouts.block_gather((8, 2), mesh=TP2, ids=ids, block=2)


def test_ranks_may_share_a_block_only_where_it_is_said_and_no_rank_holds_one_twice():
    shared = layouts.block_gather(
        (8, 2), mesh=TP2, ids=[[0, 1, 2], [2, 3]], block=2, allow_shared=True
    )

    assert [shared.shard_shape(rank) for rank in range(2)] == [(6, 2), (4, 2)]
    with pytest.raises(RuleError, match="more than once"):
        layouts.block_gather(
            (8, 2), mesh=TP2, ids=[[0, 1, 2, 3], [3, 3]], block=2, allow_shared=True
        )
    with pytest.raises(RuleError, match="more than once"):
        layouts.experts((3, 2), mesh=TP2, placement=[[0, 1, 2], [1, 1]])


def test_blocks_must_divide_the_rows():
    with pytest.raises(RuleError, match="8 rows do not cut into blocks of 3"):
        layouts.block_gather((8, 2), mesh=TP2, ids=[[0], [1]], block=3)
    with pytest.raises(LayoutError, match="at least 1"):
        layouts.block_gather((8, 2), mesh=TP2, ids=[[0], [1]], block=0)


@pytest.mark.parametrize(
    "scale", [nan, inf, -inf, 0, 0.0, 1.0, 0.5, True, Fraction(0), "1/2", None, np.float32(1), 1j]
)
def test_a_scale_is_exact_and_not_zero(scale):
    with pytest.raises(RuleError, match="a scale is an exact number"):
        layouts.replicated((4,), mesh=TP2, scale=scale)


def test_a_whole_number_is_an_exact_scale():
    assert layouts.replicated((4,), mesh=TP2, scale=-3).pieces(1)[0].scale == Fraction(-3)
    assert not layouts.replicated((4,), mesh=TP2, scale=2).is_exact
    assert layouts.replicated((4,), mesh=TP2).is_exact


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_builder_refuses_a_mesh_that_does_not_fit(name):
    entry = CATALOGUE[name]
    arguments = read_example(entry)

    for mesh in ("tp", "tp=0", "tp=-2", {"tp": 2.0}, {"tp": True}, {"": 2}, 4, None):
        with pytest.raises(LayoutError):
            entry.builder(**{**arguments, "mesh": mesh})
    if name == "replicated":
        return
    with pytest.raises(RuleError, match="has no axis 'ep'; give as axis one of tp, dp"):
        entry.builder(**{**arguments, "mesh": {"tp": 2, "dp": 2}, "axis": "ep"})
    with pytest.raises(RuleError, match="2 axes and none is named"):
        entry.builder(**{**arguments, "mesh": {"tp": 2, "dp": 2}})
    with pytest.raises(RuleError, match="0 axes"):
        entry.builder(**{**arguments, "mesh": {}})


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "zero-flat"])
@pytest.mark.parametrize("size", [1.0, True, "8", None, np.int32(8), -8])
def test_every_builder_refuses_a_shape_of_anything_but_sizes(name, size):
    entry = CATALOGUE[name]
    arguments = read_example(entry)
    first, *rest = arguments["shape"]

    with pytest.raises(LayoutError):
        entry.builder(**{**arguments, "shape": (size, *rest)})
    with pytest.raises(LayoutError):
        entry.builder(**{**arguments, "shape": first})
