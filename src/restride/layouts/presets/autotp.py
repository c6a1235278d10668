"""The AutoTP layout of every parameter of a model, from its ``config.json`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.errors import LayoutError, RuleError
from restride.layouts._arguments import MeshAxis, as_shape, find_mesh_axis
from restride.layouts.presets._config import read_settings
from restride.layouts.presets._models import choose_rules, find_family, knows_none
from restride.layouts.presets._rules import AUTOTP_CUTS, apply_rules
from restride.layouts.replicated import replicated
from restride.layouts.sizes import autotp_sizes
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike
    from restride.layouts.presets._config import Settings
    from restride.layouts.presets._families import Family

__all__ = ["autotp_cuts", "autotp_layouts", "fused_layout", "is_head"]

_HEADS = ("lm_head", "embed_out")


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
        raise knows_none(find_family(config), shapes)
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
    family = find_family(config, sizes)
    if target.size == 1:
        return {}
    rules = choose_rules(family, plan=plan)
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
    for rule in choose_rules(find_family(config), plan=False):
        if rule.pattern.matches(name):
            return None if rule.layout in AUTOTP_CUTS else rule.layout
    return None


def is_head(name: str) -> bool:
    """Whether a parameter is the weight of an output head."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.rpartition(".")[2] in _HEADS


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
    said = config.get("tie_word_embeddings")
    is_tied = said if isinstance(said, bool) else not any(map(is_head, heads))
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
