"""Fused weights that are cut against their heads: a run that computes another function, silently.

A layer takes its shard of a fused weight apart as if it were a smaller layer: so many queries, keys
and values, or so many heads. Where the cut is another one, a rank takes rows of one part for
another. Nothing fails, the loss falls, and the weights mean what they were trained to mean on ranks
that are cut this way and nowhere else: not on one rank, not on another number, not in a serving
engine. With transformers' own plan for CodeGen, DeepSpeed 0.19.8 cuts so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint.catalog import Finding
from restride.errors import RuleError
from restride.layouts.fused_names import find_split_head, find_wrong_cut
from restride.layouts.presets import fused_layout, name_pattern, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog

__all__ = ["FUSED_CUT", "fused_findings", "wrong_cuts"]

FUSED_CUT = "fused-cut"
"""Kind of the findings."""

_INTERLEAVED = "bloom-qkv"


def fused_findings(
    catalog: Catalog, config: Mapping[str, object] | None = None
) -> Iterator[Finding]:
    """Yield one warning for each kind of fused weight that is cut against its heads.

    Args:
        catalog: The checkpoint.
        config: Content of the model's ``config.json``; without it, weights are known to be fused by
            name and shape, and those that interleave heads are not judged.

    Cost:
        O(pieces * ranks) for each different weight. Never walks elements.
    """
    layouts = {
        tensor.name: tensor.layout for tensor in catalog.tensors if tensor.kind == "parameter"
    }
    kinds: dict[tuple[str, Layout], list[str]] = {}
    wrong = wrong_cuts(layouts, config)
    for name in wrong:
        kinds.setdefault((name_pattern(name), layouts[name]), []).append(name)
    for (pattern, layout), names in kinds.items():
        more = f" and {len(names) - 1} more of {pattern!r}" if len(names) > 1 else ""
        where = f"tensor {names[0]!r}"
        yield Finding(
            "warning",
            FUSED_CUT,
            f"{where}{more}: {wrong[names[0]]}; a rank takes rows of one part for another, so that "
            f"since its first step the run has computed another function than on one rank, and its "
            f"weights are right on {layout.rank_count} ranks that are cut this way only",
            where,
            {"pattern": pattern, "tensors": names, "ranks": layout.rank_count},
        )


def wrong_cuts(
    layouts: Mapping[str, Layout], config: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Say of each fused weight that is cut against its heads what is wrong, by name.

    Args:
        layouts: How the tensor-parallel ranks cut each parameter.
        config: Content of the model's ``config.json``, where it is known.
    """
    # Layers repeat: what differs is the number of the layer.
    known: dict[tuple[str, Layout], str | None] = {}
    found: dict[str, str] = {}
    for name, layout in layouts.items():
        key = name_pattern(name), layout
        if key not in known:
            known[key] = _fault(name, layout, config)
        fault = known[key]
        if fault is not None:
            found[name] = fault
    return found


def _fault(name: str, layout: Layout, config: Mapping[str, object] | None) -> str | None:
    if config is None:
        return find_wrong_cut(name, layout)
    try:
        fused = fused_layout(config, name)
        heads = read_settings(config).heads
    except RuleError:
        # A model that no preset knows: what its weights are called still tells.
        return find_wrong_cut(name, layout)
    if fused != _INTERLEAVED:
        return None if fused is None else find_wrong_cut(name, layout)
    split = None if heads is None else find_split_head(layout, heads)
    if split is None:
        return None
    layer = name.split(".")[-2:][0]
    return f"{layer} interleaves q, k and v by heads and is cut against them: {split}"
