"""Presets and rule files without any framework: what they take, and what they refuse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import layouts
from restride.algebra.coverage import Covered, prove
from restride.errors import LayoutError, RuleError
from restride.layouts.presets import autotp_layouts, known_models, read_rules, rule_layouts
from restride.layouts.presets._match import NamePattern

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": (130, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.11.self_attn.o_proj.weight": (64, 64),
    "model.layers.11.self_attn.o_proj.bias": (64,),
    "model.layers.0.mlp.down_proj.weight": (64, 130),
    "model.norm.weight": (64,),
    "lm_head.weight": (130, 64),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def refused(words, config=LLAMA, shapes=SHAPES, **options):
    with pytest.raises(RuleError) as caught:
        autotp_layouts(config, shapes, **{"mesh": {"tp": 4}, **options})
    for word in words.split("|"):
        assert word in str(caught.value)


def test_every_parameter_gets_a_layout_in_order():
    found = autotp_layouts(LLAMA, SHAPES, mesh={"tp": 4})

    assert list(found) == list(SHAPES)
    assert {name: layout.shard_shape(0) for name, layout in found.items()} == {
        "model.embed_tokens.weight": (130, 64),
        "model.layers.0.self_attn.q_proj.weight": (16, 64),
        "model.layers.0.self_attn.q_proj.bias": (16,),
        "model.layers.11.self_attn.o_proj.weight": (64, 16),
        "model.layers.11.self_attn.o_proj.bias": (64,),
        "model.layers.0.mlp.down_proj.weight": (64, 33),
        "model.norm.weight": (64,),
        "lm_head.weight": (33, 64),
    }


@given(st.integers(1, 9), st.integers(1, 7), st.sampled_from((1, 4, 16)))
def test_layouts_are_whole_on_any_number_of_ranks(ranks, kv_heads, grain):
    config = LLAMA | {"num_key_value_heads": kv_heads}
    mesh = {"dp": 2, "tp": ranks}

    for layout in autotp_layouts(config, SHAPES, mesh=mesh, axis="tp", grain=grain).values():
        assert isinstance(prove(layout), Covered)
        assert layout.rank_count == 2 * ranks
        assert layout.pieces(0) == tuple(
            piece.at_rank(0)[0] for piece in layout.all_pieces if piece.at_rank(0)
        )


def test_one_rank_holds_everything_whole():
    for model_type in known_models():
        found = autotp_layouts({"model_type": model_type}, SHAPES, mesh={"tp": 1})

        assert found == {n: layouts.replicated(s, mesh={"tp": 1}) for n, s in SHAPES.items()}


def test_no_parameters_are_no_error():
    assert autotp_layouts(LLAMA, {}, mesh={"tp": 4}) == {}


def test_a_tied_vocabulary_is_cut_where_the_plan_is_followed():
    tied = {name: SHAPES[name] for name in SHAPES if name != HEAD}
    config = {key: LLAMA[key] for key in LLAMA if key != "tie_word_embeddings"}

    # The config says so, or there is no head.
    said = autotp_layouts(LLAMA | {"tie_word_embeddings": True}, SHAPES, mesh={"tp": 4})
    silent = autotp_layouts(config, tied, mesh={"tp": 4})
    by_name = autotp_layouts(config, tied, mesh={"tp": 4}, plan=False)

    assert said[EMBEDDING] == said[HEAD] == silent[EMBEDDING]
    assert [said[HEAD].shard_shape(rank)[0] for rank in range(4)] == [33, 33, 32, 32]
    assert by_name[EMBEDDING].shard_shape(0) == (130, 64)


def test_an_expert_of_the_third_dimension_is_whole():
    config = LLAMA | {"model_type": "mixtral"}
    name = "model.layers.0.mlp.experts.gate_up_proj"

    found = autotp_layouts(
        config, {name: (4, 96, 64), "model.layers.0.self_attn.o_proj.weight": (64, 64)}, mesh="tp=2"
    )

    assert found[name].shard_shape(0) == (4, 96, 64)


def test_heads_are_read_from_the_text_part_of_a_config():
    config = {"model_type": "llama", "text_config": LLAMA, "num_attention_heads": 5}
    name = "model.layers.0.self_attn.q_proj.weight"

    assert autotp_layouts(config, SHAPES, mesh={"tp": 2})[name].shard_shape(0) == (32, 64)


def test_multi_query_attention_has_one_head_where_the_config_does_not_say():
    name = "transformer.h.0.attn.c_attn.weight"
    config = {"model_type": "gpt_bigcode", "n_head": 8, "n_embd": 64}

    found = autotp_layouts(config, {name: (80, 64)}, mesh={"tp": 2})

    assert [found[name].shard_shape(rank)[0] for rank in range(2)] == [80, 16]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names no 'model_type';"),
        ({"model_type": 5}, "names no 'model_type', found 5"),
        ({"model_type": "lama2"}, "'lama2'; that of llama, mistral, qwen2 or 6 more|[{match"),
        ({"model_type": "gpt_oss"}, "for model type 'gpt_oss'; that of llama, mistral, qwen2 or"),
        ({"model_type": "gpt2"}, "refuses GPT-2|rule file"),
        (LLAMA | {"num_key_value_heads": "4"}, "'num_key_value_heads' is '4'"),
        (LLAMA | {"num_key_value_heads": 0}, "is 0, a positive integer"),
        ({"model_type": "mistral"}, "no 'num_key_value_heads'|default of its own"),
    ],
)
def test_a_config_that_is_refused(config, words):
    refused(words, config=config)


def test_parameters_that_no_row_of_the_preset_cuts():
    refused(
        "none of 1 parameter|'wte.3.weight'|match = \"wte.*.weight\"",
        shapes={"wte.3.weight": (4, 4)},
    )


def test_a_plan_that_there_is_not():
    refused("no tensor-parallel plan for bloom", config={"model_type": "bloom"}, plan=True)
    refused("'moe_tp_experts'|plan=False", config=LLAMA | {"model_type": "qwen3_moe"}, plan=True)


def test_a_layout_that_refuses_names_the_parameter():
    refused(
        "parameter 'h.0.attn.qkv_proj.weight': layout codegen-qkv: 10 heads",
        config={"model_type": "codegen", "n_head": 10},
        shapes={"h.0.attn.qkv_proj.weight": (96, 32)},
        plan=False,
    )


def test_heads_that_nothing_says_are_asked_for():
    refused(
        "parameter 'h.0.attn.qkv_proj.weight'|heads is not given",
        config={"model_type": "codegen"},
        shapes={"h.0.attn.qkv_proj.weight": (96, 32)},
        plan=False,
    )


def test_a_mesh_without_the_axis():
    refused("has no axis 'ep'", axis="ep")


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("a", ["a"], ["b", "a.a", ""]),
        ("*", ["a", ""], ["a.b"]),
        ("**", ["a", "a.b", ""], []),
        ("**.a", ["a", "b.a", "c.b.a"], ["a.b", "ba"]),
        ("a.**.b", ["a.b", "a.c.b", "a.b.b"], ["a", "b.a"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["b.a"]),
        ("**.{q,k}_{proj,p}.*", ["q_proj.w", "x.k_p.w"], ["v_p.w", "q_proj"]),
        ("x{,_y}", ["x", "x_y"], ["xy"]),
        ("{a.b,c}", ["c"], ["a.b"]),
        ("a[0-9]+", ["a[0-9]+"], ["a0"]),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern, names, others):
    assert all(NamePattern(pattern).matches(name) for name in names)
    assert not any(NamePattern(pattern).matches(name) for name in others)


def stands_for(pattern, parts):
    """The meaning of a pattern, tried out."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(stands_for(pattern[1:], parts[taken:]) for taken in range(len(parts) + 1))
    return bool(parts) and pattern[0] in {"*", parts[0]} and stands_for(pattern[1:], parts[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=6),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
)
def test_a_pattern_matches_what_it_stands_for(pattern, parts):
    assert NamePattern(".".join(pattern)).matches(".".join(parts)) == stands_for(pattern, parts)


@pytest.mark.parametrize("pattern", ["", "a..b", "a*", "***", "{a", "a}", "{a,{b}}", "{a}" * 9])
def test_a_pattern_that_is_none(pattern):
    with pytest.raises(RuleError, match="name pattern"):
        NamePattern(pattern)


def test_a_pattern_takes_no_longer_for_a_hostile_name():
    pattern = NamePattern("**." * 40 + "b")

    assert not pattern.matches("a." * 2000 + "a")


HEADER = 'format = "restride-rules/1"\n'


def rule(match="**", layout="row", **arguments):
    lines = [f"{key} = {json.dumps(value)}" for key, value in arguments.items()]
    return "\n".join(["[[rules]]", f'match = "{match}"', f'layout = "{layout}"', *lines, ""])


def test_a_rule_file_names_layouts_of_the_catalogue():
    text = HEADER + 'rest = "whole"\n'
    text += rule("**.qkv.weight", "codegen-qkv", heads="config:n_head")
    text += rule("**.kv.weight", "sub-params", sizes=[4, 8], widths=[[3, 1], [4, 4]])
    text += rule("**.up.{weight,bias}", "column")
    text += rule("**.down.{weight,bias}", "row", heads=3)
    text += rule("*.experts", "experts", placement="0,2;1,3")
    shapes = {
        "h.0.qkv.weight": (48, 4),
        "h.0.kv.weight": (12, 2),
        "h.0.up.bias": (7,),
        "h.0.down.weight": (4, 12),
        "h.0.down.bias": (4,),
        "h.experts": (4, 6),
        "norm": (4,),
    }

    found = rule_layouts(read_rules(text), shapes, mesh={"tp": 2}, config={"n_head": 16})

    mesh = {"tp": 2}
    assert found == {
        "h.0.qkv.weight": layouts.codegen_qkv((48, 4), mesh=mesh, heads=16),
        "h.0.kv.weight": layouts.sub_params(
            (12, 2), mesh=mesh, sizes=[4, 8], widths=[[3, 1], [4, 4]]
        ),
        # Seven rows do not divide by sixteen heads of the config: near-even.
        "h.0.up.bias": layouts.split((7,), mesh=mesh, sizes=[4, 3]),
        "h.0.down.weight": layouts.split((4, 12), mesh=mesh, dim=1, sizes=[8, 4]),
        "h.0.down.bias": layouts.replicated((4,), mesh=mesh),
        "h.experts": layouts.experts((4, 6), mesh=mesh, placement=[[0, 2], [1, 3]]),
        "norm": layouts.replicated((4,), mesh=mesh),
    }


def test_the_first_rule_that_matches_is_taken():
    rules = read_rules(HEADER + rule("a", "column") + rule("**", "row"))

    found = rule_layouts(rules, {"a": (4, 4), "b": (4, 4)}, mesh={"tp": 2})

    assert found["a"].shard_shape(0) == (2, 4)
    assert found["b"].shard_shape(0) == (4, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER + "rest = =", "my.toml: is no TOML|line 2, column 8"),
        ("", "names nothing as its format|restride-rules/1"),
        ('format = "restride-rules/2"', "'restride-rules/2'"),
        (HEADER, "has no rules"),
        (HEADER + "rules = 5", "has no rules"),
        (HEADER + "rules = [5]", "rule 1: is 5, a table"),
        (HEADER + "rule = 5\n" + rule(), "unknown key 'rule'"),
        (HEADER + 'rest = "split"\n' + rule(), "'split' becomes of the rest"),
        (HEADER + rule() + rule(layout="rows"), "my.toml: rule 2 (line 5)|no layout 'rows'"),
        (HEADER + rule(layout="zero-flat"), "no layout 'zero-flat'"),
        (HEADER + rule(match="a*"), "rule 1 (line 2)|'a*'"),
        (HEADER + "[[rules]]\nmatch = 5", "match is 5, a text"),
        (HEADER + '[[rules]]\nmatch = "a"', "has no layout, a text"),
        (HEADER + rule(sizes=[1]), "row takes no 'sizes'|heads, grain"),
        (HEADER + rule(layout="whole", dim=1), "whole takes no 'dim'|nothing"),
        (HEADER + rule(layout="sub-params"), "sub-params needs sizes"),
        (HEADER + rule(heads=1.5), 'heads is 1.5|write a whole number, or "config:NAME"'),
        (HEADER + rule(heads=True), "heads is True"),
        (HEADER + rule(heads="two"), "'two' is no integer"),
        (HEADER + rule(layout="split", sizes=[1, "2"]), "sizes is [1, '2']"),
        (HEADER + rule(layout="experts", placement=[0, 1]), "placement is [0, 1]"),
    ],
)
def test_a_rule_file_that_is_none(text, words):
    with pytest.raises(LayoutError) as caught:
        read_rules(text, where="my.toml")
    assert str(caught.value).startswith("my.toml: ")
    for word in words.split("|"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        (rule("b"), None, "my.toml: rule 1 (line 2): 'b' matches none of 2 parameters|'a.0'"),
        (rule("a.*"), None, "my.toml: parameter 'c' has no rule"),
        (rule(heads="config:n"), None, "heads is looked for under 'n', and no config"),
        (rule(heads="config:n"), {"m": 1}, "under 'n', and the config has none"),
        (rule(heads="config:n"), {"n": "1"}, "the config says '1'"),
        (rule(heads=0), None, "my.toml: rule 1 (line 2): parameter 'a.0': layout row: heads"),
        (rule(layout="codegen-qkv"), None, "layout codegen-qkv: heads is not given"),
        (rule(layout="split", sizes=[3, 2]), None, "sizes [3, 2] add up to 5, not to 4"),
    ],
)
def test_rules_that_do_not_fit(text, config, words):
    rules = read_rules(HEADER + text, where="my.toml")

    with pytest.raises(LayoutError) as caught:
        rule_layouts(rules, {"a.0": (4, 4), "c": (4, 4)}, mesh={"tp": 2}, config=config)
    for word in words.split("|"):
        assert word in str(caught.value)


def test_a_tensor_that_is_no_weight_is_not_cut_as_one():
    rules = read_rules(HEADER + rule(layout="column"))

    with pytest.raises(RuleError, match="a weight of 2 dimensions or a bias"):
        rule_layouts(rules, {"experts": (4, 4, 4)}, mesh={"tp": 2})
