"""Weights known to be fused are recognised by name and shape, and wrong cuts of them are found."""

from __future__ import annotations

import pytest

from restride import layouts
from restride.layouts.catalogue import CATALOGUE
from restride.layouts.fused_names import FUSED_WEIGHTS, find_fused, find_wrong_cut

CODEGEN = "transformer.h.11.attn.qkv_proj.weight"
GPT2 = "transformer.h.0.attn.c_attn.weight"
PHI3 = "model.layers.0.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
CHATGLM = "transformer.encoder.layers.0.self_attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (CODEGEN, (96, 32), "codegen-qkv"),
        ("h.0.attn.qkv_proj.weight", (96, 32), "codegen-qkv"),
        (GPT2, (32, 96), "sub-params"),
        (GPT2, (48, 32), "bigcode-qkv"),
        (PHI3, (64, 32), "phi3-qkv"),
        (GATE_UP, (64, 32), "gate-up"),
        ("model.layers.0.self_attn.W_pack.weight", (96, 32), "glm-qkv"),
        ("transformer.blocks.0.attn.Wqkv.weight", (96, 32), "glm-qkv"),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", (64, 32), "phi3-qkv"),
        (CHATGLM, (48, 32), "chatglm-qkv"),
        ("transformer.encoder.layers.0.mlp.dense_h_to_4h.weight", (96, 32), "gate-up"),
        # A name without its shape, or a shape without its name, is no evidence.
        (CODEGEN, (96, 31), None),
        (CODEGEN, (96,), None),
        (GPT2, (96, 32), None),
        (PHI3, (65, 32), None),
        (GATE_UP, (4, 64, 32), None),
        ("model.layers.0.self_attn.q_proj.weight", (96, 32), None),
        ("transformer.h.0.self_attention.query_key_value.weight", (96, 32), None),
        ("transformer.h.0.attn.qkv_proj.weight.extra", (96, 32), None),
    ],
)
def test_a_fused_weight_is_known_by_name_and_shape(name, shape, expected):
    found = find_fused(name, shape)

    assert (found.layout if found else None) == expected


def test_every_fused_weight_names_a_layout_of_the_catalogue():
    assert all(weight.layout in CATALOGUE for weight in FUSED_WEIGHTS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_cut_of_a_fused_weight_is_against_its_heads(ranks):
    mesh, rows = {"tp": ranks}, {CODEGEN: 96, PHI3: 64, GATE_UP: 64, CHATGLM: 48}
    for name, size in rows.items():
        fault = find_wrong_cut(name, layouts.split((size, 32), mesh=mesh))

        assert fault is not None
        assert "cut against its heads" in fault
        assert find_fused(name, (size, 32)).layout in fault
    assert find_wrong_cut(GPT2, layouts.split((32, 96), mesh=mesh, dim=1)) is not None
    assert find_wrong_cut(GPT2, layouts.split((48, 32), mesh=mesh)) is not None


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 1}])
def test_the_right_cut_of_a_fused_weight_is_not_reported(mesh):
    tp = {"mesh": mesh, "axis": "tp"}
    whole = layouts.replicated((96, 32), mesh=mesh)

    assert find_wrong_cut(CODEGEN, layouts.codegen_qkv((96, 32), heads=16, **tp)) is None
    assert find_wrong_cut(CODEGEN, whole) is None
    assert find_wrong_cut(PHI3, layouts.phi3_qkv((64, 32), query_heads=8, heads=4, **tp)) is None
    assert find_wrong_cut(GATE_UP, layouts.gate_up((64, 32), **tp)) is None
    assert find_wrong_cut(CHATGLM, layouts.chatglm_qkv((48, 32), hidden=32, **tp)) is None
    bigcode = layouts.bigcode_qkv((48, 32), hidden=32, heads=1, **tp)
    assert find_wrong_cut(GPT2, bigcode) is None
    conv1d = layouts.sub_params((32, 96), sizes=[32] * 3, dim=1, **tp)
    assert find_wrong_cut(GPT2, conv1d) is None
    plain = layouts.split((96, 32), **tp)
    assert find_wrong_cut("model.layers.0.self_attn.q_proj.weight", plain) is None


@pytest.mark.parametrize(("query_heads", "heads", "ranks"), [(6, 3, 2), (10, 5, 3), (8, 2, 4)])
def test_uneven_right_cuts_are_not_reported(query_heads, heads, ranks):
    shape = (4 * (query_heads + 2 * heads), 4 * query_heads)
    layout = layouts.phi3_qkv(shape, mesh={"tp": ranks}, query_heads=query_heads, heads=heads)

    assert len(layout.shard_shapes) == 2
    assert find_wrong_cut(PHI3, layout) is None
    assert find_wrong_cut(PHI3, layouts.chunked(shape, mesh={"tp": ranks})) is not None


def test_uneven_halves_and_flat_shards_are_not_reported():
    assert find_wrong_cut(GATE_UP, layouts.flat_chunks((66, 32), mesh={"dp": 4})) is None
    assert find_wrong_cut(GATE_UP, layouts.gate_up((66, 32), mesh={"tp": 4})) is None


def test_a_codegen_cut_that_is_permuted_for_other_ranks_is_reported():
    """Shards of the right size with the rows of another degree: only an exact test tells."""
    permuted = layouts.permuted(layouts.split((48, 2, 32), mesh={"tp": 2}), (0, 1, 2))
    wrong = type(permuted)(permuted.mesh, (96, 32), ((2, (48, 32)),), permuted.all_pieces)

    assert "four blocks of q, k and v" in find_wrong_cut(CODEGEN, wrong)
