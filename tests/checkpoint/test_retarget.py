"""How each tensor is cut over another number of ranks: who decides, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import Axis, Layout, Piece, layouts
from restride.algebra.coverage import Covered, prove
from restride.algebra.signature import same_layout
from restride.api import open as open_checkpoint
from restride.checkpoint.retarget import retarget
from restride.errors import LayoutError, RuleError, UnsupportedError
from restride.layouts.presets import autotp_layouts, read_rules
from restride.testing._cutting import sizes, split
from restride.testing.catalogs import catalog_of
from restride.testing.cuts import index_maps
from restride.testing.partitions import codegen_rows

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
CODEGEN = {"model_type": "codegen", "n_head": 16, "n_embd": 64, "tie_word_embeddings": False}
SHAPES = {
    "model.embed_tokens.weight": (26, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.up_proj.weight": (26, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 26),
    "model.layers.1.self_attn.k_proj.weight": (8, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (26, 16),
}
K, K1, HEAD = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "lm_head.weight",
)
QKV = "transformer.h.0.attn.qkv_proj.weight"
HEADER = 'format = "restride-rules/1"\n'


def model(kv_heads):
    """A config and the shapes of a model with so many key/value heads of two rows."""
    shapes = SHAPES | dict.fromkeys((K, K1), (2 * kv_heads, 16))
    return LLAMA | {"num_key_value_heads": kv_heads}, shapes


def llama(ranks, config=LLAMA, **more):
    """A checkpoint that AutoTP would write."""
    return catalog_of(autotp_layouts(config, SHAPES, mesh={"tp": ranks}), **more)


def rules(*tables, rest="refuse"):
    text = HEADER + f'rest = "{rest}"\n'
    for match, layout, *more in tables:
        text += f'[[rules]]\nmatch = "{match}"\nlayout = "{layout}"\n' + "\n".join(more) + "\n"
    return read_rules(text, where="my.toml")


def refused(words, catalog, kind=RuleError, **options):
    with pytest.raises(kind) as caught:
        retarget(catalog, **options)
    for word in words.split("|"):
        assert word in str(caught.value), str(caught.value)


def assert_same(found, wanted):
    assert list(found) == list(wanted)
    assert [name for name in wanted if not same_layout(found[name], wanted[name])] == []


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_a_preset_gives_what_it_would_have_given_at_once(before, after, kv_heads):
    config, shapes = model(kv_heads)
    catalog = catalog_of(autotp_layouts(config, shapes, mesh={"tp": before}))

    found = retarget(catalog, tp=after, config=config)

    assert_same(found.layouts, autotp_layouts(config, shapes, mesh={"tp": after}))
    assert found.findings == ()
    for layout in found.layouts.values():
        assert isinstance(prove(layout), Covered)


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from((1, 4)))
def test_ranks_that_stay_keep_every_cut_exactly(ranks, kv_heads, grain):
    config = LLAMA | {"num_key_value_heads": kv_heads}
    catalog = catalog_of(autotp_layouts(config, SHAPES, mesh={"tp": ranks}, grain=grain))

    found = retarget(catalog, tp=ranks)

    assert found.layouts == {tensor.name: tensor.layout for tensor in catalog.tensors}
    assert set(found.how.values()) == {"kept"}


@given(st.integers(2, 6))
def test_one_rank_holds_everything_whole(ranks):
    found = retarget(llama(ranks), tp=1)

    whole = {name: layouts.replicated(shape, mesh={"tp": 1}) for name, shape in SHAPES.items()}
    assert found.layouts == whole
    assert set(found.how.values()) == {"whole"}


@given(st.sampled_from((2, 4)))
def test_recognition_gives_what_the_preset_gives_wherever_it_gives_one_answer(after):
    """Twelve heads on four ranks are six on two; rows that divide are the same by any rule."""
    shapes = {"h.0.attn.qkv_proj.weight": (384, 4), "h.0.attn.norm.weight": (4,)}
    config = {"model_type": "codegen", "n_head": 32}
    catalog = catalog_of(autotp_layouts(config, shapes, mesh={"tp": 8}, plan=False))

    found = retarget(catalog, tp=after)

    assert_same(found.layouts, autotp_layouts(config, shapes, mesh={"tp": after}, plan=False))
    assert found.how == {
        "h.0.attn.qkv_proj.weight": "recognized as codegen-qkv",
        "h.0.attn.norm.weight": "recognized as replicated",
    }


def test_uneven_heads_are_built_again_from_the_cut_alone():
    """Three heads on two ranks can only be three: the widths say so."""
    catalog = catalog_of({K: layouts.split((12, 4), mesh={"tp": 2}, sizes=[8, 4])})

    found = retarget(catalog, tp=3)

    assert found.layouts[K] == layouts.split((12, 4), mesh={"tp": 3}, sizes=[4, 4, 4])
    assert found.how[K] == "recognized as split"


def test_families_that_differ_on_the_new_ranks_are_refused_with_what_decides():
    refused(
        f"tensor {K.replace('k_proj', 'q_proj')!r} and 6 more: the cut of 2 ranks leaves open "
        "that of 4: split evenly, split by heads or chunked rounded up; give the config.json of "
        "the model with --config",
        llama(2),
        tp=4,
    )


def test_what_no_family_explains_is_refused():
    odd = layouts.split((48, 2), mesh={"tp": 2}, sizes=[11, 37])

    refused("split (the widths follow no rule that is known)", catalog_of({K: odd}), tp=4)


def test_a_number_of_heads_that_does_not_fit_rules_a_family_out():
    """The preset says nothing of the name; the config still says that there are five heads."""
    config, shapes = model(5)
    shapes |= {"model.layers.0.lora.weight": (8, 16)}
    cut = autotp_layouts(config, shapes, mesh={"tp": 2})
    cut["model.layers.0.lora.weight"] = layouts.split((8, 16), mesh={"tp": 2})

    found = retarget(catalog_of(cut), tp=4, config=config)

    assert found.how["model.layers.0.lora.weight"] == "recognized as split"
    assert [finding.kind for finding in found.findings] == ["preset-differs"]
    assert found.layouts["model.layers.0.lora.weight"] == layouts.split((8, 16), mesh={"tp": 4})


def test_whole_tensors_need_a_model_or_rules():
    refused(
        "CHECKPOINT: the tensors are whole, and nothing in the checkpoint says how 4 ranks cut its "
        "9 parameters|; give the config.json of the model with --config",
        llama(1),
        tp=4,
    )


def test_the_example_of_what_nothing_says_is_a_matrix_that_every_layer_has():
    shapes = {"model.norm.0.weight": (16,), "lm_head.weight": (26, 16)} | SHAPES

    refused(
        "such as 'model.layers.0.self_attn.q_proj.weight'",
        catalog_of({n: layouts.replicated(s, mesh={"tp": 1}) for n, s in shapes.items()}),
        tp=4,
    )


def test_a_model_that_is_not_known_is_refused_with_presets_that_know_its_parameters():
    refused(
        "'lama2'; that of llama, mistral, qwen2 or 3 more cuts 5 of its 8 kinds of parameters;",
        llama(1),
        tp=2,
        config={"model_type": "lama2"},
    )
    refused(
        "the config does not decide it (there is no preset for model type 'lama2'; that of llama, "
        "mistral, qwen2 or 3 more cuts 5 of its 8 kinds of parameters)|write a rule (--rules): "
        "rules = [{match",
        llama(2),
        tp=4,
        config={"model_type": "lama2"},
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_of_a_model_that_is_not_known_is_refused(ranks):
    """The cut that there is may be that of a plan, and does not say so."""
    config = LLAMA | {"model_type": "lama2"}

    refused("'lama2'; that of llama", llama(ranks), tp=2, config=config, plan=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_of_another_model_are_refused(ranks):
    refused(
        "the preset opt cuts 2 kinds of parameters, the preset llama, mistral, qwen2 or 3 more 5:"
        " the config is of another model|rules = [{match",
        llama(ranks),
        tp=8,
        config={"model_type": "opt", "num_attention_heads": 8},
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("sizes_of_another", "words"),
    [
        (
            {"hidden_size": 32},
            "hidden size of 32, and 'model.layers.0.self_attn.o_proj.weight' has 16 rows",
        ),
        (
            {"num_key_value_heads": 8},
            "8 heads and 8 key/value heads, and 'model.layers.0.self_attn.q_proj",
        ),
        ({"num_attention_heads": 4}, f"has 16 rows, {K!r} has 8"),
        ({"vocab_size": 27}, "a vocabulary of 27, and 'model.embed_tokens.weight' has 26 rows"),
    ],
)
def test_a_config_of_another_size_of_the_model_is_refused(ranks, sizes_of_another, words):
    """It may well explain two ranks: eight heads and four are the same there."""
    refused(
        f"the config says|{words}|the config is of another size of the model",
        llama(ranks),
        tp=4,
        config=LLAMA | sizes_of_another,
    )


@pytest.mark.parametrize(
    ("another", "words"),
    [
        ({"num_key_value_heads": 8}, "another size of the model"),
        ({"model_type": "opt", "num_attention_heads": 8}, "another model"),
    ],
)
def test_heads_of_another_model_do_not_decide_where_every_size_is_even(another, words):
    """Eight heads on eight ranks are cut evenly, four leave ranks without any."""
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    shapes = {f"model.layers.0.self_attn.{name}.weight": (n, 64) for name, n in rows.items()}
    catalog = catalog_of(autotp_layouts(LLAMA, shapes, mesh={"tp": 2}))

    refused(f"the config is of {words}", catalog, tp=8, config=LLAMA | another)

    right = retarget(catalog, tp=8, config=LLAMA)
    assert [right.layouts[K].shard_shape(n)[0] for n in range(8)] == [8] * 4 + [0] * 4


def test_a_config_that_says_its_size_rightly_is_taken():
    config = LLAMA | {"hidden_size": 16, "vocab_size": 25}  # the rest is padding

    assert retarget(llama(2), tp=4, config=config).how[K] == "preset llama"


def codegen(*, plan, ranks=2, heads=16):
    shapes = {QKV: (192, 64), "transformer.h.0.mlp.fc_in.weight": (256, 64), HEAD: (128, 64)}
    config = CODEGEN | {"n_head": heads}
    return catalog_of(autotp_layouts(config, shapes, mesh={"tp": ranks}, plan=plan)), shapes


@pytest.mark.parametrize("plan", [True, False])
def test_the_plan_is_followed_as_the_run_did_that_wrote_the_checkpoint(plan):
    catalog, shapes = codegen(plan=plan)

    found = retarget(catalog, tp=4, config=CODEGEN)

    assert_same(found.layouts, autotp_layouts(CODEGEN, shapes, mesh={"tp": 4}, plan=plan))
    name = "preset codegen" if plan else "preset codegen without its plan"
    assert set(found.how.values()) == {name}
    # Following it cuts the fused weight against its heads, and that is said.
    (finding,) = found.findings
    assert finding.kind == ("fused-cut" if plan else "without-plan")
    assert ("codegen-qkv would keep them together; an engine that does" in finding.message) == plan


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", [True, False])
def test_a_user_who_speaks_of_the_plan_is_followed_against_the_checkpoint(plan, ranks):
    catalog, shapes = codegen(plan=not plan)

    found = retarget(catalog, tp=ranks, config=CODEGEN, plan=plan)

    assert_same(found.layouts, autotp_layouts(CODEGEN, shapes, mesh={"tp": ranks}, plan=plan))
    differing = [f for f in found.findings if f.kind == "preset-differs"]
    assert [f.where for f in differing] == [f"tensor {QKV!r}", f"tensor {HEAD!r}"]
    assert "the preset is followed, as was asked for" in differing[0].message
    assert ("fused-cut" in [f.kind for f in found.findings]) == plan


def test_a_run_that_was_cut_otherwise_than_its_model_says_keeps_its_cut():
    """The head follows the plan, the fused weight does not: no variant of the preset explains."""
    planned, _ = codegen(plan=True)
    fused, _ = codegen(plan=False)
    cut = {t.name: t.layout for t in planned.tensors}
    cut[QKV] = fused.tensors[0].layout

    found = retarget(catalog_of(cut), tp=4, config=CODEGEN)

    assert found.how[QKV] == "recognized as codegen-qkv"
    assert found.how[HEAD] == "preset codegen"
    (finding,) = found.findings
    assert (finding.severity, finding.kind) == ("warning", "preset-differs")
    assert "cut it as codegen-qkv with a multiple of 8 heads" in finding.message
    assert "preset codegen says split of dimension 0" in finding.message
    assert "if the next run cuts as the preset, give --plan or --no-plan" in finding.message


def test_a_deviation_is_said_once_for_all_layers():
    cut = autotp_layouts(LLAMA, SHAPES, mesh={"tp": 4})
    for name in (K, K1):
        cut[name] = layouts.split((8, 16), mesh={"tp": 4}, dim=1)

    found = retarget(catalog_of(cut), tp=2, config=LLAMA)

    assert found.layouts[K] == layouts.split((8, 16), mesh={"tp": 2}, dim=1)
    (finding,) = found.findings
    assert f"tensor {K!r} and 1 more of 'model.layers.*" in finding.message
    assert finding.details == {
        "pattern": "model.layers.*.self_attn.k_proj.weight",
        "tensors": [K, K1],
    }


def test_a_deviation_that_leaves_several_answers_is_refused_with_the_preset():
    cut = autotp_layouts(LLAMA, SHAPES, mesh={"tp": 4})
    cut[K] = layouts.split((8, 16), mesh={"tp": 4}, sizes=[3, 3, 1, 1])

    refused(
        f"tensor {K!r}: the cut of 4 ranks leaves open that of 2: "
        "|; the preset llama would have cut it otherwise; write a rule (--rules): rules = [{match",
        catalog_of(cut),
        tp=2,
        config=LLAMA,
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rule_decides_before_anything_else(ranks):
    table = (K, "split", "sizes = [6, 2]" if ranks == 2 else "sizes = [5, 1, 1, 1]")

    found = retarget(llama(2), tp=ranks, config=LLAMA, rules=rules(table))

    assert found.layouts[K].shard_shape(0) == (6 if ranks == 2 else 5, 16)
    assert found.how[K] == f'rule "{K}"'
    assert set(found.how.values()) == {found.how[K], "kept" if ranks == 2 else "preset llama"}


def test_rules_can_say_everything_without_a_config():
    tables = (
        ("**.{q_proj,k_proj}.weight", "column", "heads = 4"),
        ("**.up_proj.weight", "column"),
        ("**.{o_proj,down_proj}.weight", "row"),
        ("lm_head.weight", "column"),
    )

    found = retarget(llama(1), tp=4, rules=rules(*tables, rest="whole"))

    assert_same(found.layouts, autotp_layouts(LLAMA, SHAPES, mesh={"tp": 4}))
    assert found.how["model.norm.weight"] == "whole, as the rules say of the rest"


def test_what_rules_leave_open_is_refused_as_without_them():
    refused(
        "nothing in the checkpoint says how 4 ranks cut its 8 parameters",
        llama(1),
        tp=4,
        rules=rules((K, "column")),
    )


def test_a_rule_may_name_a_tied_weight_by_either_name():
    shapes = {name: shape for name, shape in SHAPES.items() if name != HEAD}
    embedding = "model.embed_tokens.weight"
    whole = {n: layouts.replicated(s, mesh={"tp": 1}) for n, s in shapes.items()}
    catalog = catalog_of(whole, aliases={embedding: (HEAD,)})

    found = retarget(catalog, tp=2, rules=rules((HEAD, "column"), rest="whole"))

    assert found.layouts[embedding].shard_shape(0) == (13, 16)
    refused(
        "my.toml|cuts 'lm_head.weight' otherwise than|one tied weight",
        catalog,
        tp=2,
        rules=rules((HEAD, "column"), (embedding, "row")),
    )


def test_a_tied_vocabulary_is_cut_where_the_plan_is_followed():
    shapes = {name: shape for name, shape in SHAPES.items() if name != HEAD}
    config = {key: LLAMA[key] for key in LLAMA if key != "tie_word_embeddings"}
    embedding = "model.embed_tokens.weight"
    catalog = catalog_of(
        autotp_layouts(config, shapes, mesh={"tp": 2}), aliases={embedding: (HEAD,)}
    )

    found = retarget(catalog, tp=4, config=config)

    assert [found.layouts[embedding].shard_shape(rank)[0] for rank in range(4)] == [7, 7, 6, 6]
    # A head of its own: the config is silent, and the model is not tied.
    apart = retarget(llama(2), tp=4, config=config)
    assert apart.layouts[embedding].shard_shape(0) == (26, 16)


def test_a_head_that_a_rule_decides_still_says_that_the_model_is_not_tied():
    config = {key: LLAMA[key] for key in LLAMA if key != "tie_word_embeddings"}

    found = retarget(llama(1), tp=4, config=config, rules=rules((HEAD, "row")))

    assert found.layouts["model.embed_tokens.weight"].shard_shape(0) == (26, 16)


def test_a_preset_says_nothing_of_what_is_packed():
    """Its cut is in elements, of which a byte has two; the cut that there is says enough."""
    packed = replace(layouts.split((16, 16), mesh={"tp": 2}), unit_bits=4)
    catalog = catalog_of(autotp_layouts(LLAMA, SHAPES, mesh={"tp": 2}) | {K: packed})

    found = retarget(catalog, tp=4, config=LLAMA, plan=True)

    assert (found.how[K], found.how[K1]) == ("recognized as split", "preset llama")
    assert [found.layouts[K].shard_shape(rank)[0] for rank in range(4)] == [4, 4, 4, 4]


def test_a_rule_that_refuses_or_matches_nothing_says_where_it_stands():
    refused(
        "my.toml: rule 1|'*.nothing' matches none of 9",
        llama(2),
        tp=4,
        rules=rules(("*.nothing", "row")),
    )
    refused(
        "my.toml: rule 1|codegen-qkv: heads is not given",
        llama(2),
        tp=4,
        rules=rules((K, "codegen-qkv")),
    )


def test_buffers_are_whole_whatever_a_rule_says():
    name = "model.rotary.inv_freq"
    shapes = SHAPES | {name: (16,)}
    catalog = catalog_of(autotp_layouts(LLAMA, shapes, mesh={"tp": 2}), buffers={name})

    found = retarget(catalog, tp=4, rules=rules(("**", "column")))

    assert found.layouts[name] == layouts.replicated((16,), mesh={"tp": 4})
    assert found.how[name] == "whole"


def test_buffers_of_ranks_that_stay_are_kept_whatever_the_plan_and_the_grain():
    name = "model.rotary.inv_freq"
    cut = autotp_layouts(LLAMA, SHAPES, mesh={"tp": 2}) | {
        name: layouts.split((16,), mesh={"tp": 2})
    }
    catalog = catalog_of(cut, buffers={name})

    found = retarget(catalog, tp=2, config=LLAMA, plan=False, grain=2)

    assert (found.layouts[name], found.how[name]) == (cut[name], "kept")


def test_experts_over_ranks_of_their_own_stay_where_they_are():
    experts = layouts.split((4, 8, 8), mesh={"ep": 2})
    whole = {n: layouts.replicated(s, mesh={"tp": 1}) for n, s in SHAPES.items()}
    catalog = catalog_of(whole | {"experts.w1": experts})

    for tp in (1, 2):  # which AutoEP folds, and which cut no expert
        found = retarget(catalog, tp=tp, config=LLAMA)

        assert found.layouts["experts.w1"] == experts
        assert found.how["experts.w1"] == "kept"


def test_a_whole_tensor_may_be_over_one_rank_of_any_name():
    catalog = catalog_of({name: layouts.replicated(s, mesh={}) for name, s in SHAPES.items()})

    found = retarget(catalog, tp=4, config=LLAMA)

    assert_same(found.layouts, autotp_layouts(LLAMA, SHAPES, mesh={"tp": 4}))
    kept = retarget(catalog, tp=1)
    assert kept.layouts[K] == layouts.replicated((8, 16), mesh={"tp": 1})


def test_a_tensor_over_other_ranks_is_refused():
    catalog = catalog_of({K: layouts.split((8, 4), mesh={"dp": 2})})

    refused(f"tensor {K!r}: is cut over the mesh 'dp=2'", catalog, UnsupportedError, tp=4)


@pytest.mark.parametrize(
    "section",
    [
        {"tp_grain_size": 4},
        {"autotp_size": 3, "tp": {"tp_grain_size": 4}},
        {"autotp_size": 3, "tensor_parallel": {"tp_size": 3, "tp_grain_size": 4}},
    ],
)
def test_a_grain_is_that_of_the_checkpoint_unless_another_is_given(section):
    stated = {"optimizer": {"ds_config": {"tensor_parallel": section}}}
    config, shapes = model(3)
    before = autotp_layouts(config, shapes, mesh={"tp": 3}, grain=4)
    catalog = catalog_of(before, values=stated)

    assert_same(
        retarget(catalog, tp=5, config=config).layouts,
        autotp_layouts(config, shapes, mesh={"tp": 5}, grain=4),
    )
    assert_same(
        retarget(catalog, tp=5, config=config, grain=1).layouts,
        autotp_layouts(config, shapes, mesh={"tp": 5}),
    )


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 8)])
def test_another_grain_cuts_the_same_ranks_anew(before, after):
    config, shapes = model(3)
    catalog = catalog_of(
        autotp_layouts(config, shapes, mesh={"tp": 3}, grain=before),
        values={"optimizer": {"ds_config": {"tensor_parallel": {"tp_grain_size": before}}}},
    )

    found = retarget(catalog, tp=3, config=config, grain=after)

    assert_same(found.layouts, autotp_layouts(config, shapes, mesh={"tp": 3}, grain=after))
    assert set(found.how.values()) == {"preset llama"}
    refused(f"in grains of {after} where they were of {before}|give", catalog, tp=3, grain=after)


def test_the_fused_weight_of_codegen_is_cut_by_grains_too():
    """A grain of 16 makes 16 and 8 rows of 24 for two ranks: the permuted cut does not say it."""
    catalog, _ = codegen(plan=False)

    refused("in grains of 16 where they were of 1", catalog, tp=4, grain=16)

    assert retarget(catalog, tp=4, config=CODEGEN, grain=16).how[QKV].startswith("preset codegen")


def test_an_even_cut_says_nothing_of_grains():
    """Grains of 64 leave two of four ranks without rows, where two have the halves."""
    catalog = catalog_of(
        {"h.0.mlp.up.weight": layouts.split((128, 4), mesh={"tp": 2})},
        values={"optimizer": {"ds_config": {"tensor_parallel": {"tp_grain_size": 64}}}},
    )
    unknown = {"model_type": "mine", "num_attention_heads": 64}

    refused("in grains of 64|write a rule (--rules)", catalog, tp=4, config=unknown)

    column = rules(("h.*.mlp.up.weight", "column"))
    found = retarget(catalog, tp=4, config=unknown, rules=column).layouts["h.0.mlp.up.weight"]
    assert [found.shard_shape(rank)[0] for rank in range(4)] == [64, 64, 0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": True}, "tp"),
        ({"tp": 2, "grain": 0}, "grain"),
        ({"tp": 2, "plan": True}, "--plan says|give the config.json"),
    ],
)
def test_a_request_that_is_none(options, words):
    refused(words, llama(2), LayoutError, **options)


def test_one_rank_is_whole_by_rules_too():
    found = retarget(llama(2), tp=1, rules=rules((K, "column", "heads = 4")))

    assert found.layouts[K] == layouts.replicated((8, 16), mesh={"tp": 1})
    assert (found.how[K], found.how[K1]) == (f'rule "{K}"', "whole")


def test_a_model_that_autotp_refuses_is_refused_with_what_works():
    whole = {"transformer.h.0.attn.c_attn.weight": layouts.replicated((16, 48), mesh={"tp": 1})}

    refused(
        "AutoTP refuses GPT-2|rule file with the layouts conv1d-column",
        catalog_of(whole),
        tp=2,
        config={"model_type": "gpt2"},
    )


def test_names_that_no_preset_knows_are_refused_with_how_a_rule_is_written():
    whole = {"tower.0.wi.weight": layouts.replicated((8, 8), mesh={"tp": 1})}

    refused(
        "none of 1 parameter, such as 'tower.0.wi.weight', is one that the preset llama cuts"
        '|match = "tower.*.wi.weight"',
        catalog_of(whole),
        tp=2,
        config=LLAMA,
    )
    refused(
        'cut its 1 parameter|; write a rule file|match = "tower.*.wi.weight"',
        catalog_of(whole),
        tp=2,
    )


def test_a_cut_of_no_family_is_refused_or_followed_by_the_preset():
    halves = [Piece((Axis(64, 1, 0, 1),), 64 * n, n, 0, Fraction(n + 1)) for n in range(2)]
    odd = Layout.of({"tp": 2}, (8, 16), [(4, 16)] * 2, halves)
    cut = autotp_layouts(LLAMA, SHAPES, mesh={"tp": 2}) | {K: odd}

    refused(f"tensor {K!r}|it is of no family that is known", catalog_of(cut), tp=4, config=LLAMA)
    # A preset that knows none of the names has no variant that would have cut it otherwise.
    refused(
        "the config does not decide it (none of 1 parameter, such as 'tower.0.wi.weight'",
        catalog_of({"tower.0.wi.weight": odd}),
        tp=4,
        config=LLAMA,
    )
    found = retarget(catalog_of(cut), tp=4, config=LLAMA, plan=True)

    assert found.how[K] == "preset llama"
    (finding,) = found.findings
    assert "cut it as no family that is known" in finding.message


def grouped(model_type, heads=8, kv_heads=4, **more):
    return LLAMA | {
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


CHECKPOINTS = {
    "bloom_tp2_z1": ({"model_type": "bloom", "n_head": 8}, 8),
    "codegen_fused_tp2_z1": (CODEGEN, 16),
    "codegen_fused_tp2dp2_z1": (CODEGEN, 16),
    "codegen_rowcut_tp2_z1": (CODEGEN | {"n_head": 8}, 8),
    "gptbigcode_tp2_z1": ({"model_type": "gpt_bigcode", "n_head": 8, "n_embd": 64}, 1),
    "llama_tied_tp2_z1": (grouped("llama", tie_word_embeddings=True), 4),
    "llama_tp1dp2_z1": (grouped("llama"), 4),
    "llama_tp2_z1": (grouped("llama"), 4),
    "llama_tp2_z3": (grouped("llama"), 4),
    "llama_unevenkv_tp2_z1": (grouped("llama", 6, 3), 3),
    "mixtral_tp2_z1": (grouped("mixtral"), 4),
    "opt_tp2_z1": ({"model_type": "opt", "num_attention_heads": 8}, 8),
}
_COLUMN = ("q_proj", "k_proj", "v_proj", "fc1", "query_key_value", "dense_h_to_4h", "c_fc", "fc_in")
_ROW = ("o_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj", "fc_out")
_MLP = ("gate_proj", "up_proj", "lm_head")


def expected_shards(name, full, ranks, heads, *, is_cut_head, is_fused):
    """What AutoTP keeps of a tensor on each rank, by its own words: the slow oracle."""
    layer, kind = name.split(".")[-2:]
    near_even = "mlp" in name.split(".") or layer in _MLP
    count = None if near_even else heads
    if layer == "qkv_proj" and is_fused:
        return [codegen_rows(full, ranks, rank) for rank in range(ranks)]
    if layer == "c_attn":
        cut = split(full[:64], sizes(64, ranks, heads))
        return [np.concatenate([part, full[64:]]) for part in cut]
    if layer in {"lm_head", "embed_tokens"} and not is_cut_head:
        return [full] * ranks
    if layer in {*_COLUMN, *_MLP, "qkv_proj"} or layer == "embed_tokens":
        count = None if layer == "embed_tokens" else count
        return split(full, sizes(full.shape[0], ranks, count))
    if ((layer in _ROW and kind == "weight") or layer == "down_proj") and full.ndim == 2:
        return split(full, sizes(full.shape[1], ranks, count), 1)
    return [full] * ranks


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_real_checkpoint_is_cut_for_four_ranks_as_autotp_cuts_it(name, shared):
    config, heads = CHECKPOINTS[name]
    catalog = open_checkpoint(shared / "checkpoints" / name)

    found = retarget(catalog, tp=4, config=config)

    is_fused = name.startswith("codegen_fused")
    is_cut_head = name.startswith(("llama", "codegen_rowcut"))
    known = {}
    for tensor in catalog.tensors:
        layout = found.layouts[tensor.name]
        is_embedding = tensor.name.split(".")[-2:-1] == ["embed_tokens"]
        full = np.arange(prod(layout.full_shape)).reshape(layout.full_shape)
        shards = expected_shards(
            tensor.name,
            full,
            4,
            heads,
            is_cut_head=is_cut_head and (not is_embedding or bool(tensor.aliases)),
            is_fused=is_fused,
        )
        if layout not in known:
            known[layout] = index_maps(layout)
        assert known[layout] == [shard.reshape(-1).tolist() for shard in shards], tensor.name
    kinds = {"codegen_rowcut_tp2_z1": ["fused-cut"]}.get(name, ["without-plan"] * is_fused)
    assert [finding.kind for finding in found.findings] == kinds


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_real_checkpoint_whose_ranks_stay_is_kept(name, shared):
    catalog = open_checkpoint(shared / "checkpoints" / name)
    ranks = catalog.tensors[0].layout.rank_count

    found = retarget(catalog, tp=ranks, config=CHECKPOINTS[name][0])

    assert list(found.layouts.values()) == [tensor.layout for tensor in catalog.tensors]


def test_the_rule_that_a_refusal_shows_can_be_put_into_a_file_as_it_is():
    name = "tower.0.wi.weight"
    cut = {name: layouts.split((8, 8), mesh={"tp": 2})}
    with pytest.raises(RuleError) as caught:
        retarget(catalog_of(cut), tp=4)
    rule = caught.value.remedy.removeprefix("write a rule (--rules): ").replace("N", "4")

    found = retarget(catalog_of(cut), tp=4, rules=read_rules(HEADER + rule))

    assert found.layouts[name] == layouts.split((8, 8), mesh={"tp": 4})
