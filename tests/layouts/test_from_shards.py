"""Layouts that are found from the shapes of shards are those that made the shards, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.signature import same_layout
from restride.errors import RuleError
from restride.layouts.presets import ShardCuts, autotp_layouts, read_rules, rule_layouts
from restride.testing.cuts import index_maps

RULES = 'format = "restride-rules/1"\n'


def llama(heads, grouped, width, vocabulary):
    hidden = heads * width
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "model.layers.0.self_attn.k_proj.weight": (grouped * width, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "model.layers.0.mlp.up_proj.weight": (3 * hidden, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, 3 * hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    config = {"model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads}
    return config | {"num_key_value_heads": grouped, "vocab_size": vocabulary}, shapes


def bigcode(heads, width, vocabulary):
    hidden = heads * width
    shapes = {
        "transformer.wte.weight": (vocabulary, hidden),
        "transformer.h.0.attn.c_attn.weight": (hidden + 2 * width, hidden),
        "transformer.h.0.attn.c_attn.bias": (hidden + 2 * width,),
        "transformer.h.0.attn.c_proj.weight": (hidden, hidden),
        "transformer.h.0.mlp.c_fc.weight": (4 * hidden, hidden),
        "transformer.ln_f.weight": (hidden,),
    }
    config = {"model_type": "gpt_bigcode", "n_embd": hidden, "n_head": heads}
    return config | {"multi_query": True, "vocab_size": vocabulary}, shapes


def shards(layout):
    return [layout.shard_shape(rank) for rank in range(layout.rank_count)]


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.integers(7, 40)
)
def test_a_preset_finds_the_layouts_that_it_makes(grouped, times, width, ranks, vocabulary):
    heads = grouped * times
    for config, shapes in (
        llama(heads, grouped, width, vocabulary),
        bigcode(heads, width, vocabulary),
    ):
        for plan in (None, False):
            try:
                made = autotp_layouts(config, shapes, mesh={"tp": ranks}, plan=plan)
            except RuleError:
                continue
            cuts = ShardCuts(shapes, mesh={"tp": ranks}, config=config)
            for name, layout in made.items():
                try:
                    found = cuts.find(name, shards(layout)).layout
                except RuleError as error:
                    assert "in 2 ways" in error.problem  # noqa: PT017
                else:
                    assert index_maps(found) == index_maps(layout)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 4), st.data())
def test_a_rule_finds_the_layout_that_it_makes(rows, columns, ranks, data):
    layout = data.draw(st.sampled_from(["column", "row", "whole", "codegen-qkv", "gate-up"]))
    shape = (12 * rows * ranks, ranks * columns)
    more = f"heads = {4 * ranks}\n" if layout == "codegen-qkv" else ""
    text = f'{RULES}[[rules]]\nmatch = "w"\nlayout = "{layout}"\n{more}'
    rules = read_rules(text)
    try:
        made = rule_layouts(rules, {"w": shape}, mesh={"tp": ranks})["w"]
    except RuleError:
        return

    found = ShardCuts(["w"], mesh={"tp": ranks}, rules=rules).find("w", shards(made))

    assert same_layout(found.layout, made)
    assert found.pattern == 'rule "w"'


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(4, 6), (4, 5)], "makes no shards of shapes"),
        ([(4, 6), (4,)], "makes no shards of shapes"),
        ([(5, 6), (3, 6)], "makes no shards of shapes"),
    ],
)
def test_shards_that_a_rule_does_not_make_are_refused(shapes, says):
    rules = read_rules(f'{RULES}[[rules]]\nmatch = "w"\nlayout = "column"\n')

    with pytest.raises(RuleError, match=says):
        ShardCuts(["w"], mesh={"tp": 2}, rules=rules).find("w", shapes)


def test_two_sizes_of_one_vocabulary_are_told_apart_by_the_config():
    config, shapes = llama(4, 2, 2, 24)
    cuts = ShardCuts(shapes, mesh={"tp": 2}, config=config)

    assert cuts.find("lm_head.weight", [(12, 8), (12, 8)]).layout.full_shape == (24, 8)
    assert cuts.find("lm_head.weight", [(24, 8), (24, 8)]).layout.full_shape == (24, 8)
    with pytest.raises(RuleError, match=r"in 2 ways, of tensors of shapes \(20, 8\), \(40, 8\)"):
        cuts.find("lm_head.weight", [(20, 8), (20, 8)])


def test_a_rule_may_go_by_the_number_of_a_layer():
    text = 'rest = "whole"\n[[rules]]\nmatch = "h.0.w"\nlayout = "column"\n'
    last = '[[rules]]\nmatch = "h.2.w"\nlayout = "row"\n'
    rules = read_rules(RULES + text + last)
    cuts = ShardCuts(["h.0.w", "h.1.w", "h.2.w"], mesh={"tp": 2}, rules=rules)

    found = [cuts.find(f"h.{n}.w", [(4, 6), (4, 6)]).layout.full_shape for n in range(3)]

    assert found == [(8, 6), (4, 6), (4, 12)]
