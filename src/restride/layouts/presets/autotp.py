"""The AutoTP layout of every parameter of a model, from its ``config.json`` alone."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from restride.errors import LayoutError, RuleError
from restride.layouts._arguments import MeshAxis, as_shape, find_mesh_axis
from restride.layouts.presets._config import read_settings
from restride.layouts.presets._families import FAMILIES, Family
from restride.layouts.presets._rules import AUTOTP_CUTS, Rule, apply_rules
from restride.layouts.replicated import replicated
from restride.layouts.sizes import autotp_sizes
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike
    from restride.layouts.presets._config import Settings

__all__ = [
    "autotp_cuts",
    "autotp_layouts",
    "fused_layout",
    "how_to_write",
    "known_models",
    "name_pattern",
    "nearest_models",
    "require_model_of",
    "shown_models",
]

_HEADS = ("lm_head", "embed_out")
_MOST_SHOWN = 3


def known_models() -> tuple[str, ...]:
    """Name the model types that have a preset.

    Examples:
        >>> "llama" in known_models()
        True
    """
    return tuple(FAMILIES)


def autotp_layouts(
    config: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    *,
    mesh: MeshLike,
    axis: str | None = None,
    grain: int = 1,
    plan: bool | None = None,
) -> dict[str, Layout]:
    """Find how DeepSpeed's AutoTP cuts every parameter of a model.

    Args:
        config: Content of the model's ``config.json``.
        shapes: Shape of each full parameter, by name.
        mesh: The ranks.
        axis: Mesh axis that is cut, by default the only one.
        grain: DeepSpeed's `tp_grain_size`.
        plan: Whether transformers' tensor-parallel plan is followed; by default it is where there
            is one that DeepSpeed accepts, as the engine does. CodeGen's plan cuts its fused weight
            against its heads: an engine that trains it rightly has had the plan taken away.

    Returns:
        A layout for every name of `shapes`, in its order. What AutoTP does not touch is whole on
        every rank, and so is everything on one rank.

    Raises:
        RuleError: The model type is unknown or refused by AutoTP, the config lacks a number, no
            parameter is one that the preset cuts, or a layout refuses its shape or these ranks.
        LayoutError: A shape or a number is none.

    Examples:
        >>> config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}
        >>> k = autotp_layouts(config, {"model.layers.0.self_attn.k_proj.weight": (12, 16)},
        ...                    mesh={"tp": 2})["model.layers.0.self_attn.k_proj.weight"]
        >>> k.shard_shape(0), k.shard_shape(1)
        ((8, 16), (4, 16))
    """
    target = find_mesh_axis(mesh, axis)
    cut = autotp_cuts(config, shapes, mesh=mesh, axis=axis, grain=grain, plan=plan)
    if shapes and not cut and target.size > 1:
        raise _knows_none(_find_family(config), shapes)
    return {
        name: cut[name] if name in cut else replicated(shape, mesh=target.mesh)
        for name, shape in shapes.items()
    }


def autotp_cuts(
    config: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    *,
    mesh: MeshLike,
    axis: str | None = None,
    grain: int = 1,
    plan: bool | None = None,
) -> dict[str, Layout]:
    """Find the layouts of the parameters that a preset speaks of, as `autotp_layouts` does.

    Returns:
        A layout for each of them; nothing on one rank. The others are whole, or are not of this
        model.

    Raises:
        RuleError, LayoutError: As for `autotp_layouts`.
    """
    target = find_mesh_axis(mesh, axis)
    sizes = {name: as_shape(shape) for name, shape in shapes.items()}
    family = _find_family(config)
    if target.size == 1:
        return {}
    rules = _choose_rules(family, plan=plan)
    settings = read_settings(config, grain=grain, required=family.required)
    cut: dict[str, Layout] = {}
    if rules is family.plan:
        cut |= _tied(config, family, sizes, target, settings)
    known: dict[tuple[str, Shape], Layout | None] = {}
    for name, shape in sizes.items():
        if name in cut:
            continue
        # Layers repeat: what differs is the number of the layer.
        key = ".".join("#" if part.isdecimal() else part for part in name.split(".")), shape
        if key not in known:
            known[key] = apply_rules(rules, name, shape, target, settings)
        found = known[key]
        if found is not None:
            cut[name] = found
    return cut


def require_model_of(config: Mapping[str, object], names: Collection[str]) -> None:
    """Refuse a config whose preset knows fewer of some parameters than that of another model.

    Presets share names: OPT's would cut the attention of a Llama and leave the rest whole.

    Raises:
        RuleError: The config is of another model, of none that is known, or of one whose parameters
            these are not.
    """
    family = _find_family(config)
    if family.names is None or not names:
        return
    scores = _scores(names)
    nearest = nearest_models(names)
    if family.model_type in nearest:
        return
    some = next(iter(names))
    if not nearest:
        raise _knows_none(family, names)
    raise RuleError(
        f"the preset {family.model_type} cuts {scores[family.model_type]} kinds of parameters, the "
        f"preset {shown_models(nearest)} {scores[nearest[0]]}: the config is of another model",
        remedy=f"give the config of the model that has parameters such as {some!r}, or "
        + how_to_write(some),
    )


def fused_layout(config: Mapping[str, object], name: str) -> str | None:
    """Name the layout by which the model's own fused layer is cut, plan or no plan.

    Returns:
        A layout of the catalogue; None where the parameter is not fused.

    Raises:
        RuleError: The model is not known, or AutoTP has no cut of it.

    Examples:
        >>> fused_layout({"model_type": "codegen"}, "transformer.h.0.attn.qkv_proj.weight")
        'codegen-qkv'
    """
    for rule in _choose_rules(_find_family(config), plan=False):
        if rule.pattern.matches(name):
            return None if rule.layout in AUTOTP_CUTS else rule.layout
    return None


def _knows_none(family: Family, names: Collection[str]) -> RuleError:
    some = next(iter(names))
    return RuleError(
        f"none of the {len(names)} parameters, such as {some!r}, is one that the preset "
        f"{family.model_type} cuts",
        remedy=how_to_write(some),
    )


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
    scores = _scores(names)
    most = max(scores.values())
    return tuple(model for model, score in scores.items() if score == most) if most else ()


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


def _scores(names: Iterable[str]) -> dict[str, int]:
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
        "write a rule file, with one table for each kind of parameter: "
        f'[[rules]] match = "{name_pattern(name)}" layout = "{layout}"'
    )


def _find_family(config: Mapping[str, object]) -> Family:
    model_type = config.get("model_type")
    if type(model_type) is not str:
        raise RuleError(
            f"the config names no 'model_type', found {model_type!r}",
            remedy=f"known are {', '.join(FAMILIES)}",
        )
    family = FAMILIES.get(model_type.lower())
    if family is None:
        near = get_close_matches(model_type.lower(), FAMILIES, n=1, cutoff=0)
        raise RuleError(
            f"there is no preset for model type {model_type!r}, the nearest is {near[0]!r}",
            remedy=how_to_write("model.layers.0.self_attn.o_proj.weight")
            + f"; known are {', '.join(FAMILIES)}",
        )
    return family


def _choose_rules(family: Family, *, plan: bool | None) -> tuple[Rule, ...]:
    if family.names is None:
        raise RuleError(
            f"{family.refused} on two and more tensor-parallel ranks",
            remedy="write a rule file with the layouts conv1d-column and conv1d-row, or your own",
        )
    if plan and family.plan is None:
        raise RuleError(
            family.refused or f"transformers has no tensor-parallel plan for {family.model_type}",
            remedy="pass plan=False for the cut by class and name",
        )
    return family.names if family.plan is None or plan is False else family.plan


def _tied(
    config: Mapping[str, object],
    family: Family,
    shapes: Mapping[str, Shape],
    target: MeshAxis,
    settings: Settings,
) -> dict[str, Layout]:
    """Cut an embedding that shares its weight with the output head along the vocabulary.

    DeepSpeed does that wherever transformers' plan is followed, and leaves both whole where a rank
    would get no row.
    """
    heads = [name for name in shapes if name.split(".")[-2:-1] and name.split(".")[-2] in _HEADS]
    embeddings = [n for n in shapes if family.embedding and family.embedding.matches(n)]
    weights = [name for name in heads if name.endswith(".weight")]
    said = config.get("tie_word_embeddings")
    is_tied = said if isinstance(said, bool) else not weights
    if not is_tied or len(embeddings) != 1:
        return {}
    rows = shapes[embeddings[0]][0]
    try:
        widths = autotp_sizes(
            rows, target.size, heads=settings.heads, grain=settings.grain, name=_HEADS[0]
        )
        if 0 in widths:
            raise RuleError("a rank would get no row")
    except LayoutError:
        widths = None
    layouts: dict[str, Layout] = {}
    for name in (*embeddings, *heads):
        whole = replicated(shapes[name], mesh=target.mesh)
        layouts[name] = (
            split(shapes[name], mesh=target.mesh, sizes=widths, axis=target.name)
            if widths and shapes[name][:1] == (rows,)
            else whole
        )
    return layouts
