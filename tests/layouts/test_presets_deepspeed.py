"""Presets against AutoTP itself: the real code replaces the layers of tiny models, in one process.

DeepSpeed publishes for each parameter the map of all ranks, so one rank of a group that is not
there is enough: a stub answers the two questions about the group. That rank's shards are compared
too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from types import SimpleNamespace

import pytest

from restride.algebra.signature import same_layout
from restride.arrays.extract import extract
from restride.checkpoint.retarget import retarget, stated_grain
from restride.deepspeed import from_affine_map, from_affine_maps
from restride.errors import RuleError
from restride.layouts.presets import autotp_layouts, nearest_models
from restride.storage.torch_zip import open_torch_zip
from restride.testing.catalogs import catalog_of

pytestmark = pytest.mark.interop

GEOMETRIES = ((96, 8, 4), (96, 12, 3), (192, 16, 16))
"""Hidden size, query heads, key/value heads: dividing by the ranks, or not."""

PLANNED = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "codegen")
"""Families whose plan DeepSpeed follows."""

REFUSED_PLANS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "phi3", "glm")
"""Families whose plan has a style that DeepSpeed does not know."""

WITHOUT_PLAN = ("falcon", "bloom", "opt", "mpt", "gpt_bigcode")

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gpt_neox": "GPTNeoX",
    "codegen": "CodeGen",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "phi3": "Phi3",
    "glm": "Glm",
    "falcon": "Falcon",
    "bloom": "Bloom",
    "opt": "OPT",
    "mpt": "Mpt",
    "gpt_bigcode": "GPTBigCode",
}

_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "topk_group": 1,
    "num_hidden_layers": 2,
}
MORE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": _MOE | {"num_experts": 4, "head_dim": 8},
    "deepseek_v2": _MOE | _LATENT | {"n_group": 1},
    "deepseek_v3": _MOE | _LATENT | {"n_group": 2},
    "phi3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0, "head_dim": 8},
    "falcon": {"new_decoder_architecture": True},
    "gpt_bigcode": {"multi_query": True},
}


@pytest.fixture(scope="module")
def peer():
    """The modules of DeepSpeed and transformers that are needed, imported quietly."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.comm.comm
        import torch
        import transformers
        from deepspeed.module_inject import layers
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.tensor_parallel.config import get_tensor_parallel_config
        from deepspeed.utils import groups

    transformers.logging.set_verbosity_error()
    return SimpleNamespace(
        torch=torch,
        transformers=transformers,
        comm=deepspeed.comm.comm,
        layers=layers,
        groups=groups,
        engine=DeepSpeedEngine,
        read_config=get_tensor_parallel_config,
    )


def build(peer, family, geometry, **more):
    hidden, heads, kv_heads = geometry
    config_class = getattr(peer.transformers, CLASSES[family] + "Config")
    numbers = {"vocab_size": 130, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if family in {"codegen", "gpt_bigcode"}:
        numbers |= {"n_embd": hidden, "n_head": heads, "n_layer": 1, "n_positions": 16}
        numbers.pop("num_hidden_layers")
        if family == "codegen":
            numbers |= {"rotary_dim": 4, "n_ctx": 16}
    elif family == "mpt":
        numbers |= {"d_model": hidden, "n_heads": heads, "n_layers": 1, "expansion_ratio": 2}
        numbers.pop("num_hidden_layers")
    elif family == "bloom":
        numbers |= {"hidden_size": hidden, "n_head": heads}
    elif family == "opt":
        numbers |= {"hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 2 * hidden}
        numbers |= {"word_embed_proj_dim": hidden}
    else:
        numbers |= {"hidden_size": hidden, "num_attention_heads": heads}
        numbers |= {"intermediate_size": 2 * hidden}
        grouped = "num_kv_heads" if family == "falcon" else "num_key_value_heads"
        latent = family.startswith("deepseek")
        numbers |= {} if family == "gpt_neox" else {grouped: heads if latent else kv_heads}
        numbers |= {"ffn_hidden_size": 2 * hidden} if family == "falcon" else {}
    numbers |= MORE.get(family, {}) | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(**numbers)
        return getattr(peer.transformers, CLASSES[family] + "ForCausalLM")(config)


class _Group:
    """A group of ranks of which this is the last: no more is asked of it."""

    def __init__(self, ranks):
        self.ranks = ranks

    def is_initialized(self):
        return True

    def get_rank(self, group=None):  # noqa: ARG002
        return self.ranks - 1

    def get_world_size(self, group=None):  # noqa: ARG002
        return self.ranks

    def broadcast(self, *_, **__):
        return None

    barrier = all_reduce = broadcast


def cut(peer, monkeypatch, model, ranks, *, plan, grain=1):
    """Let the engine's own code replace the layers; return the maps that it publishes."""
    if not plan:
        model.config.base_model_tp_plan = None
        model.__class__ = type(type(model).__name__, (type(model),), {"_tp_plan": {}})
        for module in model.modules():
            if hasattr(module, "_tp_plan"):
                module._tp_plan = {}
    stated = {"autotp_size": ranks, "tensor_parallel": {"tp_size": ranks, "tp_grain_size": grain}}
    config = peer.read_config({"tensor_parallel": stated})
    group = config.tensor_parallel.tp_group = object()
    monkeypatch.setattr(peer.comm, "cdb", _Group(ranks))
    monkeypatch.setattr(peer.layers, "DEEPSPEED_AUTOTP_MODE", peer.layers.AUTOTP_MODE.TRAINING)
    monkeypatch.setattr(peer.groups, "get_tensor_model_parallel_group", lambda: group)
    monkeypatch.setattr(peer.groups, "get_tensor_model_parallel_world_size", lambda: ranks)
    engine = SimpleNamespace(
        local_rank=-1,
        autotp_size=lambda: ranks,
        is_deepcompile_enabled=lambda: False,
        compile_autotp=lambda: False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.engine._apply_autotp_partitioning(engine, model, config)
        info = peer.layers.collect_autotp_universal_checkpoint_info(model)
    return info["affine_map"]["params"]


def shapes_of(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def config_of(model):
    return json.loads(model.config.to_json_string())


def assert_agree(peer, monkeypatch, model, ranks, *, plan, grain=1, unmapped=()):
    """Both cut every parameter alike, or both refuse; whether any is cut.

    DeepSpeed publishes no map of those with one of the ends in `unmapped`.
    """
    shapes, config = shapes_of(model), config_of(model)
    full = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    try:
        maps = cut(peer, monkeypatch, model, ranks, plan=plan, grain=grain)
    except (AssertionError, ValueError):
        with pytest.raises(RuleError):
            autotp_layouts(config, shapes, mesh={"tp": ranks}, grain=grain, plan=plan)
        return False
    layouts = autotp_layouts(config, shapes, mesh={"tp": ranks}, grain=grain, plan=plan)
    assert list(layouts) == list(shapes)
    known = {}
    for name, layout in layouts.items():
        stored = maps.get(f"^{re.escape(name)}$")
        assert (stored is None) == name.endswith(tuple(unmapped)), name
        if stored is not None:
            key = json.dumps(stored, sort_keys=True)
            known[key] = known.get(key) or from_affine_map(stored)
            assert same_layout(layout, known[key]), name
        shard = model.get_parameter(name).detach()
        assert peer.torch.equal(shard, extract(layout, full[name], ranks - 1)), name
    return any(layout.shard_shape(0) != layout.full_shape for layout in layouts.values())


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (6, 1), (6, 2), (8, 0), (8, 2)],
)
@pytest.mark.parametrize("family", [*PLANNED, *REFUSED_PLANS, *WITHOUT_PLAN])
def test_layers_are_cut_by_class_and_name(peer, monkeypatch, family, number, ranks):
    model = build(peer, family, GEOMETRIES[number])

    was_cut = assert_agree(peer, monkeypatch, model, ranks, plan=False)

    assert was_cut or family == "codegen"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", PLANNED)
def test_layers_are_cut_by_the_plan(peer, monkeypatch, family, is_tied, ranks):
    model = build(peer, family, GEOMETRIES[ranks % 2], tie_word_embeddings=is_tied)
    default = autotp_layouts(config_of(model), shapes_of(model), mesh={"tp": ranks})

    assert autotp_layouts(config_of(model), shapes_of(model), mesh={"tp": ranks}, plan=True) == (
        default
    )
    assert assert_agree(peer, monkeypatch, model, ranks, plan=True)


@pytest.mark.parametrize("section", ["tp", "tensor_parallel"])
def test_the_grain_in_the_files_is_where_the_engine_looks_for_it(peer, section):
    config = {"tensor_parallel": {"autotp_size": 2, section: {"tp_grain_size": 40}}}

    assert peer.read_config(config).tensor_parallel.tp_grain_size == 40
    assert stated_grain({"model": {"ds_config": config}}) == 40
    with pytest.raises(ValueError, match="tp_grain_size"):
        peer.read_config({"tensor_parallel": {"autotp_size": 2, "tp_grain_size": 40}})


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "glm", "phi3", "bloom", "codegen"])
@pytest.mark.parametrize(("ranks", "grain"), [(3, 16), (3, 64), (4, 32), (8, 16)])
def test_grains_are_kept_together(peer, monkeypatch, family, ranks, grain):
    model = build(peer, family, GEOMETRIES[2])

    assert_agree(peer, monkeypatch, model, ranks, plan=False, grain=grain)


def test_a_tied_vocabulary_that_leaves_a_rank_without_rows_is_whole(peer, monkeypatch):
    model = build(peer, "llama", GEOMETRIES[0], vocab_size=3, tie_word_embeddings=True)

    assert assert_agree(peer, monkeypatch, model, 4, plan=True)
    embedding = "model.embed_tokens.weight"
    layouts = autotp_layouts(config_of(model), shapes_of(model), mesh={"tp": 4})
    assert layouts[embedding].shard_shape(0) == (3, 96)


@pytest.mark.parametrize(
    ("family", "is_planned"),
    [(family, True) for family in PLANNED]
    + [(family, False) for family in (*PLANNED, *REFUSED_PLANS, *WITHOUT_PLAN)],
)
def test_what_two_ranks_wrote_is_cut_as_the_layers_of_four_are(
    peer, monkeypatch, family, is_planned
):
    """The config alone, and the cut that there is, tell what the engine does on other ranks."""
    geometry = GEOMETRIES[2]
    stored = {
        ranks: cut(peer, monkeypatch, build(peer, family, geometry), ranks, plan=is_planned)
        for ranks in (2, 4)
    }
    model = build(peer, family, geometry)
    names = list(shapes_of(model))
    before = {name: from_affine_map(stored[2][f"^{re.escape(name)}$"]) for name in names}

    found = retarget(catalog_of(before), tp=4, config=config_of(model))

    for name in names:
        wanted = from_affine_map(stored[4][f"^{re.escape(name)}$"])
        assert same_layout(found.layouts[name], wanted), name
    assert family in nearest_models(names)
    kinds = {finding.kind for finding in found.findings}
    assert kinds <= {"without-plan", "fused-cut"}
    assert ("fused-cut" in kinds) == (family == "codegen" and is_planned)


@pytest.mark.parametrize("family", REFUSED_PLANS)
def test_a_plan_that_the_engine_refuses_is_refused(peer, monkeypatch, family):
    model = build(peer, family, GEOMETRIES[0])

    assert not assert_agree(peer, monkeypatch, model, 2, plan=True)


def test_gpt2_is_refused_as_the_engine_refuses_it(peer, monkeypatch):
    transformers = peer.transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4))

    assert not assert_agree(peer, monkeypatch, model, 2, plan=None)


@functools.cache
def class_called(name):
    import torch

    return type(name, (torch.nn.Module,), {})


def tree(peer, name, children):
    """A module of a class called `name`: linear layers by their two sizes, lists, and trees."""
    nn = peer.torch.nn
    module = class_called(name)()
    for key, child in children.items():
        if isinstance(child, tuple) and isinstance(child[0], int):
            child = nn.Linear(child[1], child[0], bias=False)  # noqa: PLW2901
        elif isinstance(child, tuple):
            child = tree(peer, *child)  # noqa: PLW2901
        elif isinstance(child, list):
            child = nn.ModuleList(tree(peer, *entry) for entry in child)  # noqa: PLW2901
        elif isinstance(child, int):
            child = nn.LayerNorm(child)  # noqa: PLW2901
        setattr(module, key, child)
    return module


def custom(peer, name, model_type, layer, *, block="DecoderLayer", **config):
    """A model of custom code, as far as AutoTP looks at one."""
    body = tree(peer, f"{name}Model", {"layers": [(f"{name}{block}", layer)] * 2, "norm": 48})
    model = tree(peer, f"{name}ForCausalLM", {"model": body, "lm_head": (130, 48)})
    numbers = {"model_type": model_type, "hidden_size": 48, "num_attention_heads": 12, **config}
    model.config = SimpleNamespace(
        **numbers, base_model_tp_plan=None, to_json_string=lambda: json.dumps(numbers)
    )
    return model


ATTENTION = {"q_proj": (48, 48), "k_proj": (48, 48), "v_proj": (48, 48), "o_proj": (48, 48)}
MLP = {"gate_proj": (70, 48), "up_proj": (70, 48), "down_proj": (48, 70)}
LATENT = {
    "q_a_proj": (16, 48),
    "q_b_proj": (48, 16),
    "kv_a_proj_with_mqa": (24, 48),
    "kv_b_proj": (96, 16),
    "o_proj": (48, 48),
}


@pytest.mark.parametrize(("ranks", "heads"), [(2, 12), (3, 12), (4, 16), (6, 12), (8, 16)])
def test_yuan_is_cut_by_its_heads(peer, monkeypatch, ranks, heads):
    layer = {
        "self_attn": ("YuanAttention", ATTENTION),
        "mlp": ("YuanMLP", MLP),
        "input_layernorm": 48,
    }
    model = custom(peer, "Yuan", "yuan", layer, num_attention_heads=heads)

    assert assert_agree(peer, monkeypatch, model, ranks, plan=False)


def test_yuan_with_odd_heads_on_each_rank_has_a_layout_where_deepspeed_has_no_map(
    peer, monkeypatch
):
    layer = {"self_attn": ("YuanAttention", ATTENTION)}
    model = custom(peer, "Yuan", "yuan", layer)
    ends = ("v_proj.weight", "o_proj.weight")

    assert assert_agree(peer, monkeypatch, model, 4, plan=False, unmapped=ends)


def test_yuan_whose_ranks_do_not_divide_the_heads_is_refused(peer, monkeypatch):
    model = custom(peer, "Yuan", "yuan", {"self_attn": ("YuanAttention", ATTENTION)})

    assert not assert_agree(peer, monkeypatch, model, 8, plan=False)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("groups", [2, 12])
def test_chatglm_is_cut_by_its_query_groups(peer, monkeypatch, groups, ranks):
    """Two groups of k and v beside twelve queries of four rows each, or as many as there are."""
    layer = {
        "input_layernorm": 48,
        "self_attention": (
            "SelfAttention",
            {"query_key_value": (48 + 8 * groups, 48), "dense": (48, 48)},
        ),
        "post_attention_layernorm": 48,
        "mlp": ("MLP", {"dense_h_to_4h": (140, 48), "dense_4h_to_h": (48, 70)}),
    }
    model = custom(
        peer, "ChatGLM", "chatglm", layer, block="GLMBlock", multi_query_group_num=groups
    )

    assert assert_agree(peer, monkeypatch, model, ranks, plan=False)


EXPERTS = {
    "qwen3_moe": ("Qwen3Moe", ATTENTION, "mlp", {"gate": (4, 48), "experts": [("E", MLP)] * 4}),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT,
        "mlp",
        {"gate": (4, 48), "experts": [("E", MLP)] * 4, "shared_experts": ("S", MLP)},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT,
        "mlp",
        {"gate": (4, 48), "experts": [("E", MLP)] * 4, "shared_experts": ("S", MLP)},
    ),
}


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_are_modules_of_their_own(peer, monkeypatch, family, ranks):
    """As older versions of transformers, and the authors' own code, build them."""
    name, attention, place, block = EXPERTS[family]
    layer = {"self_attn": (f"{name}Attention", attention), place: (f"{name}Moe", block), "ln": 48}
    model = custom(peer, name, family, layer, num_key_value_heads=12)

    assert assert_agree(peer, monkeypatch, model, ranks, plan=False)


def gpt(model_type, **more):
    return {"model_type": model_type, "n_head": 8, "n_embd": 64, **more}


def grouped(model_type, *, heads=8, kv_heads=4, **more):
    return {
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        **more,
    }


CHECKPOINTS = {
    "bloom_tp2_z1": (gpt("bloom"), None),
    "codegen_fused_tp2_z0": (gpt("codegen", tie_word_embeddings=False), False),
    "codegen_fused_tp2_z1": (gpt("codegen", tie_word_embeddings=False), False),
    "codegen_fused_tp2dp2_z1": (gpt("codegen", tie_word_embeddings=False), False),
    "codegen_rowcut_tp2_z1": (gpt("codegen", tie_word_embeddings=False), None),
    "gptbigcode_tp2_z1": (gpt("gpt_bigcode", multi_query=True), None),
    "llama_tied_tp2_z1": (grouped("llama", tie_word_embeddings=True), None),
    "llama_tp2_z1": (grouped("llama"), None),
    "llama_tp2_z1_fp32": (grouped("llama"), None),
    "llama_tp2_z3": (grouped("llama"), None),
    "llama_unevenkv_tp2_z1": (grouped("llama", heads=6, kv_heads=3), None),
    "mixtral_tp2_z1": (grouped("mixtral"), None),
    "opt_tp2_z1": ({"model_type": "opt", "num_attention_heads": 8}, None),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_maps_of_real_checkpoints_are_the_presets(name, shared):
    (file, *_) = sorted(
        (shared / "checkpoints" / name / "step").glob("*mp_rank_00_model_states.pt")
    )
    stored = from_affine_maps(open_torch_zip(file).value["universal_checkpoint_info"]["affine_map"])
    config, plan = CHECKPOINTS[name]

    layouts = autotp_layouts(
        config, {n: layout.full_shape for n, layout in stored.items()}, mesh={"tp": 2}, plan=plan
    )

    assert [n for n in stored if not same_layout(stored[n], layouts[n])] == []
