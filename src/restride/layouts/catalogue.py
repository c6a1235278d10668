"""The catalogue of known layouts: what each is called, what it takes, and an example.

The command `restride layouts` reads nothing but this table, so a builder that is added to it can be
listed, explained and drawn.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from restride.errors import RuleError
from restride.layouts._entries import ENTRIES
from restride.layouts._entry import Entry, Parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout

__all__ = ["CATALOGUE", "Entry", "Parameter", "build"]

CATALOGUE: Final[Mapping[str, Entry]] = MappingProxyType({e.name: e for e in ENTRIES})
"""Every known layout by name."""


def build(name: str, texts: Mapping[str, str]) -> Layout:
    """Build a layout of the catalogue from the text of its arguments.

    Raises:
        RuleError: The catalogue has no such layout, an argument is unknown, missing or badly
            written, or the builder refuses.
        LayoutError: The builder was given nonsense.

    Examples:
        >>> build("codegen-qkv", {"shape": "48x2", "mesh": "tp=4", "heads": "16"}).shard_shape(0)
        (12, 2)
    """
    if name not in CATALOGUE:
        raise RuleError(
            f"there is no layout {name!r} in the catalogue",
            remedy=f"known are {', '.join(CATALOGUE)}",
        )
    entry = CATALOGUE[name]
    known = {parameter.name: parameter for parameter in entry.parameters}
    for given in texts:
        if given not in known:
            options = ", ".join(parameter.option for parameter in entry.parameters)
            raise RuleError(f"{name} takes no {given!r}", remedy=f"it takes {options}")
    for parameter in entry.parameters:
        if parameter.is_required and parameter.name not in texts:
            raise RuleError(
                f"{name} needs {parameter.option}: {parameter.help}",
                remedy=f"for example {parameter.option} {entry.example[parameter.name]}",
            )
    return entry.builder(**{given: known[given].parse(text) for given, text in texts.items()})
