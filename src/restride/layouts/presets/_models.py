"""Which model a config names, and which models parameters may be of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.errors import RuleError
from restride.layouts.presets._families import FAMILIES, Family
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from restride.layouts.presets._rules import Rule

__all__ = [
    "choose_rules",
    "count_kinds",
    "find_family",
    "how_to_write",
    "known_models",
    "knows_none",
    "name_pattern",
    "nearest_models",
    "shown_models",
]

_MOST_SHOWN = 3


def known_models() -> tuple[str, ...]:
    """Name the model types that have a preset.

    Examples:
        >>> "llama" in known_models()
        True
    """
    return tuple(FAMILIES)


def find_family(config: Mapping[str, object], names: Collection[str] = ()) -> Family:
    """Find the preset for the model that a config names; names of parameters tell what is like it.

    The name of a model tells nothing of the kind: GPT-OSS has the layers of Llama, and not those of
    GPT-NeoX.
    """
    model_type = config.get("model_type")
    if type(model_type) is not str:
        found = "" if model_type is None else f", found {model_type!r}"
        raise RuleError(
            f"the config names no 'model_type'{found}",
            remedy="give the config.json that was saved with the model",
        )
    family = FAMILIES.get(model_type.lower())
    if family is None:
        raise RuleError(
            f"there is no preset for model type {model_type!r}{_known_of(names)}",
            remedy=how_to_write("model.layers.0.self_attn.o_proj.weight"),
        )
    return family


def choose_rules(family: Family, *, plan: bool | None) -> tuple[Rule, ...]:
    if family.names is None:
        raise RuleError(
            f"{family.refused} on two and more tensor-parallel ranks",
            remedy="write a rule file with the layouts conv1d-column and conv1d-row, or your own",
        )
    if plan and family.plan is None:
        raise RuleError(
            family.refused or f"transformers has no tensor-parallel plan for {family.model_type}",
            remedy="choose --no-plan (plan=False) for the cut by class and name",
        )
    return family.names if family.plan is None or plan is False else family.plan


def nearest_models(names: Iterable[str]) -> tuple[str, ...]:
    """Name the model types whose presets know the most of these parameters.

    Returns:
        One, or several whose layers have the same names; none where no preset knows any.

    Examples:
        >>> nearest_models(["transformer.h.0.attn.qkv_proj.weight", "transformer.ln_f.weight"])
        ('codegen',)
        >>> nearest_models(["transformer.h.0.mlp.dense_h_to_4h.weight"])
        ('chatglm', 'falcon', 'bloom', 'gpt_neox')
    """
    scores = count_kinds(names)
    most = max(scores.values())
    return tuple(model for model, score in scores.items() if score == most) if most else ()


def _known_of(names: Collection[str]) -> str:
    """How much of a model the presets know that know the most of it."""
    nearest = nearest_models(names)
    if not nearest:
        return ""
    kinds = {name_pattern(name) for name in names}
    return (
        f"; that of {shown_models(nearest)} cuts {count_kinds(names)[nearest[0]]} of its "
        f"{counted(len(kinds), 'kind')} of parameters"
    )


def shown_models(models: Sequence[str]) -> str:
    """A few model types in words.

    Examples:
        >>> shown_models(("chatglm", "falcon", "bloom", "gpt_neox"))
        'chatglm, falcon, bloom or one more'
    """
    *first, last = models[:_MOST_SHOWN]
    left = len(models) - _MOST_SHOWN
    if left > 0:
        first, last = [*first, last], "one more" if left == 1 else f"{left} more"
    return f"{', '.join(first)} or {last}" if first else last


def count_kinds(names: Iterable[str]) -> dict[str, int]:
    """How many kinds of parameters each preset cuts."""
    # Layers repeat; one of a kind is enough.
    kinds = {name_pattern(name).replace("*", "0") for name in names}
    return {
        model_type: sum(any(rule.pattern.matches(kind) for rule in family.names) for kind in kinds)
        for model_type, family in FAMILIES.items()
        if family.names is not None
    }


def name_pattern(name: str) -> str:
    """Pattern that stands for a parameter and for the same one of all other layers.

    Examples:
        >>> name_pattern("model.layers.11.mlp.up_proj.weight")
        'model.layers.*.mlp.up_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def how_to_write(name: str, *, layout: str = "row") -> str:
    """Say how a rule is written, with one for a parameter that can be pasted."""
    return (
        "write a rule file, with one entry for each kind of parameter: "
        f'rules = [{{match = "{name_pattern(name)}", layout = "{layout}"}}]'
    )


def knows_none(family: Family, names: Collection[str]) -> RuleError:
    some = next(iter(names))
    return RuleError(
        f"none of {counted(len(names), 'parameter')}, such as {some!r}, is one that the preset "
        f"{family.model_type} cuts",
        remedy=how_to_write(some),
    )
