"""The families of layouts that the cuts of a checkpoint belong to, and what tells them apart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.cli.contents import show_headline
from restride.cli.exits import ExitCode
from restride.cli.output import Column, open_page, write_json
from restride.cli.picture import format_shape
from restride.layouts.presets import name_pattern
from restride.layouts.recognition import recognize

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.cli.output import Page
    from restride.layouts.recognition import Recognized

__all__ = ["show_families"]

_DIMENSION: Final = re.compile(r" of dimension \d+")
_Kinds: TypeAlias = "dict[tuple[str, Layout], list[str]]"
_Known: TypeAlias = "dict[Layout, tuple[Recognized, ...]]"


def show_families(path: str, catalog: Catalog, *, as_json: bool) -> ExitCode:
    """Write one line for each kind of tensor with every family that its cut belongs to."""
    kinds: _Kinds = {}
    for tensor in catalog.tensors:
        kinds.setdefault((name_pattern(tensor.name), tensor.layout), []).append(tensor.name)
    known = {layout: recognize(layout) for _, layout in kinds}
    if as_json:
        write_json({"kinds": _kinds_to_json(kinds, known)})
    else:
        page = open_page()
        show_headline(page, path, catalog)
        _show(page, kinds, known)
    return ExitCode.OK


def _kinds_to_json(kinds: _Kinds, known: _Known) -> list[dict[str, object]]:
    return [
        {
            "pattern": pattern,
            "tensors": names,
            "shape": list(layout.full_shape),
            "families": [_to_json(family) for family in known[layout]],
        }
        for (pattern, layout), names in kinds.items()
    ]


def _show(page: Page, kinds: _Kinds, known: _Known) -> None:
    """Write the table, and under it what tells families apart."""
    columns = [Column("tensor"), Column("count", is_number=True), Column("shape"), Column("cut")]
    rows = [
        [
            names[0] if len(names) == 1 else pattern,
            str(len(names)),
            format_shape(layout.full_shape),
            _in_words(known[layout]),
        ]
        for (pattern, layout), names in kinds.items()
    ]
    page.line()
    page.table(columns, rows)
    apart = {
        f"{_rule(family)}: {family.apart}"
        for families in known.values()
        for family in families
        if family.apart
    }
    if apart:
        page.line()
    for line in sorted(apart):
        page.line(line)


def _in_words(families: tuple[Recognized, ...]) -> str:
    return ", or ".join(family.text for family in families) or "of no family that is known"


def _rule(family: Recognized) -> str:
    """A family without its numbers, and without the dimension: that tells nothing apart."""
    return _DIMENSION.sub("", family.text.partition(":")[0])


def _to_json(family: Recognized) -> dict[str, object]:
    return {
        "name": family.name,
        "also": list(family.also),
        "text": family.text,
        "apart": family.apart,
    }
