"""The tables: what DeepSpeed's AutoTP does with the parameters of each model family.

DeepSpeed 0.19.8 goes one of two ways. Where transformers brings a tensor-parallel plan with the
model it follows that (`plan`); else it goes by the classes and names of layers (`names`). A plan
with a style that it does not know is an error of the engine, so such a family has the second way
only, for engines whose plan was taken away. The plans are those of transformers 5.24. Every row is
held against the layers that the real code builds (`tests/layouts/test_presets.py`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.frozen import Frozen
from restride.layouts.presets._match import NamePattern
from restride.layouts.presets._rules import Rule, check_rule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "Family"]

_Row: TypeAlias = tuple[str, str]


class Family(Frozen):
    """A model family.

    Attributes:
        model_type: As in ``config.json``.
        names: Rules where layers are taken by class and name, or None where DeepSpeed refuses.
        plan: Rules where transformers' plan is followed, or None where there is none that DeepSpeed
            accepts.
        refused: Why there is no plan, or no rules at all; empty where there is simply no plan.
        required: Keys without which the class of the model has a default of its own.
        embedding: Pattern of the input embedding, which is cut where the plan ties it to the head.
    """

    model_type: str
    names: tuple[Rule, ...] | None
    plan: tuple[Rule, ...] | None = None
    refused: str = ""
    required: tuple[str, ...] = ()
    embedding: NamePattern | None = None


_BOTH: Final = ".{weight,bias}"


def _rules(*rows: _Row) -> tuple[Rule, ...]:
    for _, layout in rows:
        check_rule(layout, {})
    return tuple(Rule(NamePattern(pattern + _BOTH), layout) for pattern, layout in rows)


# What goes into attention and MLP is cut by columns, what comes out by rows.
_LLAMA: Final = (
    ("**.self_attn.{q_proj,k_proj,v_proj}", "column"),
    ("**.self_attn.o_proj", "row"),
    ("**.mlp.{gate_proj,up_proj}", "column"),
    ("**.mlp.down_proj", "row"),
)
_ATTENTION: Final = _LLAMA[:2]
_HEAD: Final[_Row] = ("**.{lm_head,embed_out}", "column")
_SEPARATE_EXPERTS: Final = (
    ("**.experts.*.{gate_proj,up_proj}", "column"),
    ("**.experts.*.down_proj", "row"),
)
_SHARED_EXPERTS: Final = (
    ("**.shared_experts.{gate_proj,up_proj}", "column"),
    ("**.shared_experts.down_proj", "row"),
)
_LATENT: Final = (
    ("**.self_attn.{q_proj,q_b_proj,kv_b_proj}", "column"),
    ("**.self_attn.o_proj", "row"),
)
_FUSED_ATTENTION: Final = (
    ("**.{self_attention,attention}.query_key_value", "bloom-qkv"),
    ("**.{self_attention,attention}.dense", "row"),
    ("**.mlp.dense_h_to_4h", "column"),
    ("**.mlp.dense_4h_to_h", "row"),
)
_CODEGEN_REST: Final = (
    ("**.attn.out_proj", "row"),
    ("**.mlp.fc_in", "column"),
    ("**.mlp.fc_out", "row"),
)
_GROUPED: Final = ("num_key_value_heads",)
_EMBED_TOKENS: Final = NamePattern("**.embed_tokens.weight")


def _llama_like(model_type: str, *, required: tuple[str, ...] = ()) -> Family:
    return Family(
        model_type,
        _rules(*_LLAMA),
        _rules(*_LLAMA, _HEAD),
        required=required,
        embedding=_EMBED_TOKENS,
    )


def _without_plan(
    model_type: str, style: str, *rows: _Row, required: tuple[str, ...] = ()
) -> Family:
    refused = (
        f"transformers' plan for {model_type} has the style {style!r}, which DeepSpeed refuses"
    )
    return Family(model_type, _rules(*rows), refused=refused, required=required)


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            _llama_like("llama"),
            _llama_like("mistral", required=_GROUPED),
            _llama_like("qwen2", required=_GROUPED),
            _llama_like("qwen3", required=_GROUPED),
            _without_plan(
                "mixtral",
                "moe_tp_experts",
                *_ATTENTION,
                required=_GROUPED,
            ),
            _without_plan(
                "qwen3_moe", "moe_tp_experts", *_LLAMA, *_SEPARATE_EXPERTS, required=_GROUPED
            ),
            _without_plan(
                "deepseek_v2",
                "mla_kv_a_proj",
                *_LATENT,
                *_LLAMA[2:],
                *_SHARED_EXPERTS,
                *_SEPARATE_EXPERTS,
                required=_GROUPED,
            ),
            _without_plan(
                "deepseek_v3",
                "moe_tp_experts",
                *_LATENT,
                *_LLAMA[2:],
                *_SHARED_EXPERTS,
                *_SEPARATE_EXPERTS,
                required=_GROUPED,
            ),
            _without_plan(
                "phi3",
                "rowwise_split_input",
                ("**.self_attn.qkv_proj", "phi3-qkv"),
                ("**.self_attn.o_proj", "row"),
                ("**.mlp.gate_up_proj", "gate-up"),
                ("**.mlp.down_proj", "row"),
            ),
            _without_plan(
                "glm",
                "rowwise_split_input",
                *_ATTENTION,
                ("**.mlp.gate_up_proj", "gate-up"),
                ("**.mlp.down_proj", "row"),
                required=_GROUPED,
            ),
            Family(
                "chatglm",
                _rules(
                    ("**.self_attention.query_key_value", "glm-qkv"),
                    ("**.self_attention.dense", "row"),
                    ("**.mlp.dense_h_to_4h", "gate-up"),
                    ("**.mlp.dense_4h_to_h", "row"),
                ),
                required=("multi_query_group_num",),
            ),
            Family("falcon", _rules(*_FUSED_ATTENTION)),
            Family("bloom", _rules(*_FUSED_ATTENTION)),
            Family(
                "gpt_neox",
                _rules(*_FUSED_ATTENTION),
                _rules(("**.attention.query_key_value", "column"), *_FUSED_ATTENTION[1:], _HEAD),
                embedding=NamePattern("**.embed_in.weight"),
            ),
            Family(
                "opt",
                _rules(
                    ("**.self_attn.{q_proj,k_proj,v_proj}", "column"),
                    ("**.self_attn.out_proj", "row"),
                    ("**.layers.*.fc1", "column"),
                    ("**.layers.*.fc2", "row"),
                ),
            ),
            Family(
                "mpt",
                _rules(
                    ("**.attn.Wqkv", "glm-qkv"),
                    ("**.attn.out_proj", "row"),
                    ("**.ffn.up_proj", "column"),
                    ("**.ffn.down_proj", "row"),
                ),
            ),
            Family(
                "gpt_bigcode",
                _rules(
                    ("**.attn.c_attn", "bigcode-qkv"),
                    ("**.attn.c_proj", "row"),
                    ("**.mlp.c_fc", "column"),
                    ("**.mlp.c_proj", "row"),
                ),
            ),
            Family(
                "codegen",
                _rules(("**.attn.qkv_proj", "codegen-qkv"), *_CODEGEN_REST),
                _rules(("**.attn.qkv_proj", "column"), *_CODEGEN_REST, _HEAD),
                embedding=NamePattern("**.wte.weight"),
            ),
            Family(
                "yuan",
                _rules(
                    ("**.self_attn.{q_proj,k_proj}", "column"),
                    ("**.self_attn.v_proj", "yuan-value"),
                    ("**.self_attn.o_proj", "yuan-output"),
                    *_LLAMA[2:],
                ),
            ),
            Family("gpt2", None, refused="DeepSpeed's AutoTP refuses GPT-2: 'not supported'"),
        )
    }
)
"""Every known family by its model type."""
