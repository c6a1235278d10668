"""``restride layouts CHECKPOINT``: what its cuts are called, and how the next run would cut it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click
from msgspec import field

from restride import api
from restride.algebra.serial import layout_to_json
from restride.cli.contents import show_headline
from restride.cli.cut_options import cut_options, source_options
from restride.cli.exits import ExitCode
from restride.cli.families import show_families
from restride.cli.findings import finding_to_json, show_findings
from restride.cli.numbers import Integer
from restride.cli.options import json_option
from restride.cli.output import Column, open_page, write_json
from restride.cli.picture import format_shape
from restride.cli.sizes import format_count
from restride.cli.waiting import Waiting
from restride.cli.words import describe_layout
from restride.frozen import Frozen
from restride.layouts.presets import name_pattern
from restride.targets import Cut, find_cut

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.retarget import Retargeted
    from restride.cli.output import Page

__all__ = ["command_for"]


def command_for(checkpoint: str) -> click.Command:
    """The command that shows how a checkpoint would be cut."""

    @click.command(checkpoint, epilog=f"Example: restride layouts {checkpoint} --tp 4")
    @click.option(
        "--tp",
        type=Integer(min=1),
        metavar="N",
        help="Tensor-parallel ranks of the next run. Default: show what the cuts that there are "
        "belong to.",
    )
    @cut_options
    @source_options
    @json_option
    def command(
        *,
        tp: int | None,
        config: str | None,
        rules: str | None,
        plan: bool | None,
        grain: int | None,
        source_config: str | None,
        source_rules: str | None,
        as_json: bool,
    ) -> int:
        """How the next run cuts this checkpoint, and who says so.

        Nothing is converted. One line stands for the same parameter of all layers. Without --tp,
        shows the families of layouts that each cut belongs to: what the checkpoint alone says of
        other ranks.
        """
        with Waiting("reading headers"):
            catalog = api.open(checkpoint, source_config=source_config, source_rules=source_rules)
        if tp is None:
            if (config, rules, plan, grain) != (None,) * 4:
                raise click.UsageError("say how many ranks the next run has: --tp")
            return show_families(checkpoint, catalog, as_json=as_json)
        cut = Cut(tp, source_config if config is None else config, rules, plan, grain)
        _show_cut(checkpoint, catalog, cut, as_json=as_json)
        return ExitCode.OK

    return command


def _show_cut(checkpoint: str, catalog: Catalog, cut: Cut, *, as_json: bool) -> None:
    """Find out how the next run cuts it, and write that."""
    found = find_cut(catalog, cut)
    kinds = _kinds(catalog, found)
    if as_json:
        write_json(
            {
                "tp": cut.tp,
                "kinds": [kind.to_json() for kind in kinds],
                "findings": [finding_to_json(finding) for finding in found.findings],
            }
        )
    else:
        _show(open_page(), checkpoint, catalog, kinds, cut.tp)
        show_findings(open_page(), found.findings)


class _Kind(Frozen):
    """The same parameter of all layers, cut alike.

    Attributes:
        pattern: Name with a ``*`` for the number of the layer.
        before: How the checkpoint has it.
        after: How the next run has it.
        how: What decided.
        names: The tensors.
    """

    pattern: str
    before: Layout
    after: Layout
    how: str
    names: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """The line of the table."""
        return [
            self.names[0] if len(self.names) == 1 else self.pattern,
            str(len(self.names)),
            format_shape(self.after.full_shape),
            describe_layout(self.before),
            describe_layout(self.after),
            _shards(self.after),
            self.how,
        ]

    def to_json(self) -> dict[str, object]:
        """The same for machines."""
        return {
            "pattern": self.pattern,
            "tensors": self.names,
            "shape": list(self.after.full_shape),
            "before": describe_layout(self.before),
            "after": describe_layout(self.after),
            "shards": [list(self.after.shard_shape(r)) for r in range(self.after.rank_count)],
            "how": self.how,
            "layout": layout_to_json(self.after),
        }


def _kinds(catalog: Catalog, found: Retargeted) -> list[_Kind]:
    kinds: dict[tuple[str, Layout, Layout, str], _Kind] = {}
    for tensor in catalog.tensors:
        after, how = found.layouts[tensor.name], found.how[tensor.name]
        key = name_pattern(tensor.name), tensor.layout, after, how
        kinds.setdefault(key, _Kind(*key)).names.append(tensor.name)
    return list(kinds.values())


def _show(page: Page, path: str, catalog: Catalog, kinds: list[_Kind], tp: int) -> None:
    show_headline(page, path, catalog)
    page.line(f"for {format_count(tp, 'tensor-parallel rank')}:")
    page.line()
    columns = [
        Column("tensor"),
        Column("count", is_number=True),
        Column("shape"),
        Column("is"),
        Column("becomes"),
        Column("shards"),
        Column("how"),
    ]
    page.table(columns, [kind.cells() for kind in kinds])


def _shards(layout: Layout) -> str:
    """Shapes of the shards in rank order, equal neighbours together."""
    shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]
    runs = [(shape, len(list(ranks))) for shape, ranks in groupby(shapes)]
    if len(runs) == 1:
        return format_shape(runs[0][0])
    return ", ".join(
        (f"{count} of " if count > 1 else "") + format_shape(shape) for shape, count in runs
    )
