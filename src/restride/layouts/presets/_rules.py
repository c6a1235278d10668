"""Rules: which parameters are cut by which layout, with which numbers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import field

from restride.errors import LayoutError, RuleError
from restride.frozen import Frozen
from restride.layouts.catalogue import CATALOGUE, Parameter
from restride.layouts.replicated import replicated
from restride.layouts.sizes import autotp_sizes
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout, Shape
    from restride.layouts._arguments import MeshAxis
    from restride.layouts.presets._config import Settings
    from restride.layouts.presets._match import NamePattern

__all__ = [
    "AUTOTP_CUTS",
    "LAYOUTS",
    "SETTINGS",
    "Rule",
    "apply_rules",
    "build_rule",
    "check_rule",
    "parameters_of",
]

SETTINGS: Final = ("heads", "query_heads", "hidden", "grain")
"""Parameters that the config of the model gives where a rule does not."""

AUTOTP_CUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "column": "dimension 0 by AutoTP's rule of sizes, weight and bias",
        "row": "dimension 1 by AutoTP's rule of sizes; a vector is whole",
        "whole": "whole on every rank",
    }
)
"""Layouts of a rule that are not in the catalogue, since their sizes come from the name."""

_AUTOTP_PARAMETERS: Final = MappingProxyType(
    {
        "heads": Parameter("heads", "int", "key/value heads, where they are known"),
        "grain": Parameter("grain", "int", "DeepSpeed's tp_grain_size, 1 by default"),
    }
)

LAYOUTS: Final = (*AUTOTP_CUTS, *(n for n in CATALOGUE if n not in {"zero-flat", "replicated"}))
"""Layouts that a rule may name."""


class Rule(Frozen):
    """One line of a table.

    Attributes:
        pattern: Names of the parameters.
        layout: One of `LAYOUTS`.
        arguments: Parameters of the layout; heads and the like default to the config's.
        where: Where the rule is written, for errors.
    """

    pattern: NamePattern
    layout: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    where: str = ""


def check_rule(layout: str, arguments: Mapping[str, object]) -> None:
    """Refuse a layout that there is not, and parameters that it does not take.

    Raises:
        RuleError: Either.
    """
    if layout not in LAYOUTS:
        raise RuleError(
            f"there is no layout {layout!r} for a rule", remedy=f"known are {', '.join(LAYOUTS)}"
        )
    known = parameters_of(layout)
    for name in arguments:
        if name not in known:
            raise RuleError(
                f"{layout} takes no {name!r}", remedy=f"it takes {', '.join(known) or 'nothing'}"
            )


def apply_rules(
    rules: tuple[Rule, ...], name: str, shape: Shape, target: MeshAxis, settings: Settings
) -> Layout | None:
    """Build the layout of a parameter by the first rule that matches its name.

    Returns:
        None where no rule does.

    Raises:
        LayoutError: The layout refuses this shape or these ranks, located at the rule and the name.
    """
    for rule in rules:
        if rule.pattern.matches(name):
            return build_rule(rule, name, shape, target, settings)
    return None


def build_rule(rule: Rule, name: str, shape: Shape, target: MeshAxis, settings: Settings) -> Layout:
    """Build the layout of a parameter by a rule that matches its name.

    Raises:
        LayoutError: The layout refuses this shape or these ranks, located at the rule and the name.
    """
    try:
        return _build(rule, name, shape, target, settings)
    except LayoutError as error:
        places = (rule.where, f"parameter {name!r}", f"layout {rule.layout}")
        raise error.located(": ".join(place for place in places if place)) from None


def parameters_of(layout: str) -> Mapping[str, Parameter]:
    """Parameters that a rule may give to a layout, by name."""
    if layout == "whole":
        return {}
    if layout in AUTOTP_CUTS:
        return _AUTOTP_PARAMETERS
    skipped = {"shape", "mesh", "axis"}
    return {p.name: p for p in CATALOGUE[layout].parameters if p.name not in skipped}


def _build(rule: Rule, name: str, shape: Shape, target: MeshAxis, settings: Settings) -> Layout:
    mesh, axis = target.mesh, target.name
    known = parameters_of(rule.layout)
    given = {key: getattr(settings, key) for key in SETTINGS if key in known}
    # What a builder cannot do without is passed as None: its error says why it is needed.
    arguments: dict[str, Any] = {
        key: value for key, value in given.items() if value is not None or known[key].is_required
    }
    arguments |= rule.arguments
    if rule.layout == "whole" or target.size == 1:
        return replicated(shape, mesh=mesh)
    if rule.layout not in AUTOTP_CUTS:
        return CATALOGUE[rule.layout].builder(shape=shape, mesh=mesh, axis=axis, **arguments)
    dim = 0 if rule.layout == "column" else 1
    if len(shape) not in {1, 2}:
        raise RuleError(f"a weight of 2 dimensions or a bias is cut this way, got shape {shape}")
    if dim == len(shape):
        return replicated(shape, mesh=mesh)
    sizes = autotp_sizes(shape[dim], target.size, name=_layer_name(name), **arguments)
    return split(shape, mesh=mesh, dim=dim, sizes=sizes, axis=axis)


def _layer_name(name: str) -> str:
    """Name of the layer as the framework's rule of sizes sees it: without ``.weight``."""
    return name.rpartition(".")[0]
