"""Fused weights that are cut against their heads train another function, and nobody says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import layouts
from restride.api import check
from restride.checkpoint.fused_cuts import fused_findings, wrong_cuts
from restride.layouts.fused_names import find_split_head
from restride.layouts.presets import autotp_layouts
from restride.testing.catalogs import catalog_of
from restride.testing.cuts import index_maps

QKV = "transformer.h.0.attn.qkv_proj.weight"
BLOOM = "transformer.h.0.self_attention.query_key_value"


def test_every_layer_of_a_kind_is_told_once_with_what_goes_wrong():
    cut = {f"h.{n}.attn.qkv_proj.weight": layouts.split((96, 32), mesh="tp=2") for n in range(3)}

    (finding,) = fused_findings(catalog_of(cut))

    assert (finding.severity, finding.kind) == ("warning", "fused-cut")
    assert finding.where == "tensor 'h.0.attn.qkv_proj.weight'"
    for words in (
        "tensor 'h.0.attn.qkv_proj.weight' and 2 more of 'h.*.attn.qkv_proj.weight': CodeGen's",
        "fused and cut against its heads",
        "a rank takes rows of one part for another",
        "since its first step the run has computed another function than on one rank",
        "right on 2 ranks that are cut this way only",
    ):
        assert words in finding.message
    assert finding.details == {
        "pattern": "h.*.attn.qkv_proj.weight",
        "tensors": list(cut),
        "ranks": 2,
    }


def roles(rows, blocks):
    """Of which part each row is, where a layer takes them apart: CodeGen's blocks of q, v, k."""
    return np.repeat(np.tile(np.arange(3), blocks), rows // (3 * blocks))


@given(st.sampled_from((2, 4)), st.sampled_from(("codegen-qkv", "rows", "whole")))
def test_a_cut_of_codegen_is_wrong_where_a_row_changes_its_part(ranks, cut):
    """The layer takes its shard apart into four blocks of three parts, however many rows it has."""
    shape = (96, 2)
    layout = {
        "codegen-qkv": layouts.codegen_qkv(shape, mesh={"tp": ranks}, heads=16),
        "rows": layouts.split(shape, mesh={"tp": ranks}),
        "whole": layouts.replicated(shape, mesh={"tp": ranks}),
    }[cut]
    named = layouts.split((96, 32), mesh={"tp": ranks}) if cut == "rows" else None
    full = roles(96, 4)

    keeps = all(
        (full[np.array(held[::2]) // 2] == roles(len(held) // 2, 4)).all()
        for held in index_maps(layout)
    )

    assert keeps == (cut != "rows")
    if named is not None:
        assert QKV in wrong_cuts({QKV: named})


@given(st.integers(1, 12), st.integers(1, 6), st.integers(2, 4), st.data())
def test_a_head_is_split_where_a_rank_begins_inside_it(heads, rows, ranks, data):
    total = heads * rows
    bounds = sorted(
        data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
    )
    sizes = [b - a for a, b in zip([0, *bounds], [*bounds, total], strict=True)]
    layout = layouts.split((total, 2), mesh={"tp": ranks}, sizes=sizes)

    # A rank that holds nothing begins nowhere; one that holds all does not cut.
    starts = [a for a, size in zip([0, *bounds], sizes, strict=True) if size]
    is_split = any(start % rows for start in starts)

    assert (find_split_head(layout, heads) is not None) == is_split


def config(model_type, heads, **more):
    return {"model_type": model_type, "n_head": heads, "num_attention_heads": heads, **more}


def test_interleaved_heads_are_judged_by_the_config():
    cut = {
        f"{BLOOM}.weight": layouts.split((36, 4), mesh={"tp": 2}),
        f"{BLOOM}.bias": layouts.split((36,), mesh={"tp": 2}, sizes=[24, 12]),
    }

    assert wrong_cuts(cut) == {}
    assert wrong_cuts(cut, config("bloom", 2)) == {
        f"{BLOOM}.bias": (
            "query_key_value interleaves q, k and v by heads and is cut against them: "
            "rank 1 begins at row 24, inside head 1 of 18 rows"
        )
    }
    assert list(wrong_cuts(cut, config("bloom", 3))) == [f"{BLOOM}.weight"]
    # Rows that are not that many heads say nothing.
    assert wrong_cuts(cut, config("bloom", 7)) == {}


def test_a_model_that_has_no_such_fused_weight_is_not_warned_of_by_name():
    cut = {QKV: layouts.split((96, 32), mesh={"tp": 2})}

    assert wrong_cuts(cut, config("codegen", 16))
    assert wrong_cuts(cut, config("llama", 16)) == {}
    # Of a model that no preset knows the name is all there is.
    assert wrong_cuts(cut, config("mine", 16))
    assert wrong_cuts(cut, {"model_type": "codegen", "n_head": "16"})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (config("codegen", 16), {QKV: (192, 64)}),
        (config("bloom", 8), {f"{BLOOM}.weight": (192, 64), f"{BLOOM}.bias": (192,)}),
        (config("gpt_bigcode", 8, n_embd=64), {"transformer.h.0.attn.c_attn.weight": (80, 64)}),
        (config("mpt", 8), {"transformer.blocks.0.attn.Wqkv.weight": (192, 64)}),
        (
            config("phi3", 8, num_key_value_heads=4, hidden_size=64),
            {
                "model.layers.0.self_attn.qkv_proj.weight": (128, 64),
                "model.layers.0.mlp.gate_up_proj.weight": (96, 64),
            },
        ),
    ],
)
def test_what_the_fused_layers_of_autotp_cut_is_never_warned_of(model, shapes, ranks):
    cut = autotp_layouts(model, shapes, mesh={"tp": ranks}, plan=False)

    assert all(cut[name].shard_shape(1) != shape for name, shape in shapes.items())
    assert wrong_cuts(cut) == {}
    assert wrong_cuts(cut, model) == {}


WARNED = {
    "codegen_rowcut_tp2_z1": config("codegen", 8),
    "codegen_fused_tp2_z1": config("codegen", 16),
    "codegen_fused_tp2dp2_z1": config("codegen", 16),
    "bloom_tp2_z1": config("bloom", 8),
    "opt_tp2_z1": config("opt", 8),
    "llama_tp2_z1": config("llama", 8, num_key_value_heads=4),
    "llama_tp2_z3": config("llama", 8, num_key_value_heads=4),
    "gpt2_tp1dp2_z1": config("gpt2", 8),
    "mixtral_tp2_z1": config("mixtral", 8, num_key_value_heads=4),
}


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("name", WARNED)
def test_only_the_checkpoint_that_trained_wrongly_is_warned_of(
    name, has_config, shared, tmp_path, copied
):
    """Llama, OPT and Bloom are cut at their heads, CodeGen's plan is not."""
    path = shared / "checkpoints" / name
    if has_config:
        path = copied(path, tmp_path / "ckpt")
        (path / "config.json").write_text(json.dumps(WARNED[name]))

    found = [f for f in check(path).findings if f.kind in {"fused-cut", "model-config"}]

    if name != "codegen_rowcut_tp2_z1":
        assert found == []
        return
    assert [finding.kind for finding in found] == ["model-config"] * has_config + ["fused-cut"]
    assert "and 1 more of 'transformer.h.*.attn.qkv_proj.weight'" in found[-1].message


def test_a_damaged_config_beside_a_checkpoint_does_not_stop_a_check(shared, tmp_path, copied):
    path = copied(shared / "checkpoints" / "codegen_rowcut_tp2_z1", tmp_path / "ckpt")
    (path / "config.json").write_text("{")

    found = [f for f in check(path).findings if f.kind in {"fused-cut", "model-config"}]

    assert [finding.severity for finding in found] == ["note", "warning"]
    assert "config.json: it is no JSON" in found[0].message
