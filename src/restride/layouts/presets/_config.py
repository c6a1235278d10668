"""What a Hugging Face ``config.json`` says about heads, as DeepSpeed's AutoTP reads it.

DeepSpeed asks the configuration object for a list of attributes and takes the first that is not
None (deepspeed 0.19.8 `module_inject/tp_shard.py`, `AutoTPMeta`). The file has other names for some
of them: the classes of CodeGen, Bloom and GPT-2 map ``num_attention_heads`` to ``n_head``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from restride.errors import RuleError
from restride.frozen import Frozen

__all__ = ["Settings", "read_settings"]

_GROUPED_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "kv_n_heads",
)
_HEADS: Final = ("num_attention_heads", "n_heads", "attention_heads", "n_head")
_QUERY_HEADS: Final = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_HIDDEN: Final = ("n_embd", "hidden_size", "d_model")


class Settings(Frozen):
    """Numbers of a model that decide how AutoTP cuts it.

    Attributes:
        heads: Key/value heads (DeepSpeed's `num_kv_heads`), or None where the config has none.
        query_heads: Attention heads.
        hidden: Hidden size (DeepSpeed's `n_embd`).
        grain: DeepSpeed's `tp_grain_size`.
    """

    heads: int | None = None
    query_heads: int | None = None
    hidden: int | None = None
    grain: int = 1


def read_settings(
    config: Mapping[str, object], *, grain: int = 1, required: tuple[str, ...] = ()
) -> Settings:
    """Read the numbers of a config.

    Args:
        config: Content of ``config.json``. A multimodal one is read at its ``text_config``.
        grain: DeepSpeed's `tp_grain_size`.
        required: Keys without which the class of the model has a default of its own.

    Raises:
        RuleError: A key is missing, or a value is no positive integer.

    Examples:
        >>> read_settings({"n_head": 16, "n_embd": 64})
        Settings(heads=16, query_heads=16, hidden=64, grain=1)
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    for key in required:
        if text.get(key) is None:
            raise RuleError(
                f"the config has no {key!r}, and the model class has a default of its own for it",
                remedy=f"add {key!r} to the config as the model was built",
            )
    grouped = _first(text, _GROUPED_HEADS)
    if grouped is None and text.get("model_type") == "gpt_bigcode":
        grouped = 1 if text.get("multi_query", True) else None
    heads = _first(text, _HEADS) if grouped is None else grouped
    return Settings(heads, _first(text, _QUERY_HEADS), _first(text, _HIDDEN), grain)


def _first(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise RuleError(f"the config says {key!r} is {value!r}, a positive integer is expected")
        return value
    return None
