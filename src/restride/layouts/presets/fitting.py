"""Whether a config is that of the model whose parameters there are, and of its size.

Presets share names, and sizes share cuts: the config of another model, or of a smaller one, may
explain what two ranks hold and be wrong about eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from restride.errors import RuleError
from restride.layouts.presets._config import read_settings
from restride.layouts.presets._models import (
    count_kinds,
    find_family,
    how_to_write,
    knows_none,
    nearest_models,
    shown_models,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.layouts.presets._config import Settings
    from restride.layouts.presets._families import Family

__all__ = ["require_model_of", "require_no_other_model"]

_MATRIX = 2
_VOCABULARIES = frozenset(
    {"embed_in", "embed_out", "embed_tokens", "lm_head", "word_embeddings", "wte"}
)


def require_model_of(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a config that is not of the model that has these parameters.

    Args:
        config: Content of ``config.json``.
        shapes: Shape of each full parameter, by name.

    Raises:
        RuleError: The preset of another model cuts more of them, the preset cuts none, or the
            sizes in the config are not theirs; or the config names no model that is known.
    """
    family = find_family(config, shapes)
    nearest = nearest_models(shapes) if family.names is not None and shapes else ()
    if family.names is not None and shapes and not nearest:
        raise knows_none(family, shapes)
    _require_no_other(config, family, nearest, shapes)


def require_no_other_model(
    config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Refuse a config of which it can be seen that it is of another model, or of another size.

    Of a model that is not known nothing can be seen.

    Args:
        config: Content of ``config.json``.
        shapes: Shape of each full parameter, by name.

    Raises:
        RuleError: The preset of another model cuts more of them, or the sizes in the config are
            not theirs.
    """
    try:
        family = find_family(config)
    except RuleError:
        return
    nearest = nearest_models(shapes) if family.names is not None and shapes else ()
    _require_no_other(config, family, nearest, shapes)


def _require_no_other(
    config: Mapping[str, object],
    family: Family,
    nearest: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    if not nearest:
        return
    some = next(iter(shapes))
    if family.model_type not in nearest:
        counts = count_kinds(shapes)
        raise RuleError(
            f"the preset {family.model_type} cuts {counts[family.model_type]} kinds of parameters, "
            f"the preset {shown_models(nearest)} {counts[nearest[0]]}: the config is of another "
            "model",
            remedy=f"give the config of the model that has parameters such as {some!r}, or "
            + how_to_write(some),
        )
    settings = read_settings(config)
    for name, shape in shapes.items():
        if len(shape) == _MATRIX:
            problem = _other_size(config, settings, family, name, shapes)
            if problem:
                raise RuleError(
                    f"{problem}: the config is of another size of the model",
                    remedy="give the config.json that the checkpoint was trained with, or "
                    + how_to_write(some),
                )


def _other_size(
    config: Mapping[str, object],
    settings: Settings,
    family: Family,
    name: str,
    shapes: Mapping[str, Sequence[int]],
) -> str:
    """What the config says of sizes and a matrix denies."""
    rule = next((r for r in family.names or () if r.pattern.matches(name)), None)
    rows, _ = shapes[name]
    if rule is not None and rule.layout == "row" and settings.hidden not in {None, rows}:
        return f"the config says a hidden size of {settings.hidden}, and {name!r} has {rows} rows"
    module = name.removesuffix(".weight").rpartition(".")[2]
    words = _text(config).get("vocab_size")
    if module in _VOCABULARIES and type(words) is int and rows < words:
        # More rows than words are padding.
        return f"the config says a vocabulary of {words}, and {name!r} has {rows} rows"
    keys = name.removesuffix("q_proj.weight") + "k_proj.weight"
    if not name.endswith(".q_proj.weight") or len(shapes.get(keys, ())) != _MATRIX:
        return ""
    heads, grouped = settings.query_heads, settings.heads
    if heads is None or grouped is None or rows * grouped == shapes[keys][0] * heads:
        return ""
    return (
        f"the config says {heads} heads and {grouped} key/value heads, and {name!r} has {rows} "
        f"rows, {keys!r} has {shapes[keys][0]}"
    )


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config that is of the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
