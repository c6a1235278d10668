"""``restride layouts``: the catalogue of known layouts, as pieces."""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click

from restride.algebra.coverage import Covered, explain, prove
from restride.algebra.serial import layout_to_json
from restride.algebra.signature import signature
from restride.cli.completion import files
from restride.cli.exits import ExitCode, concluded
from restride.cli.nearest import closest, meant
from restride.cli.options import json_option
from restride.cli.output import Column, open_page, write_json
from restride.cli.picture import draw_layout
from restride.layouts.catalogue import CATALOGUE, build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click.shell_completion import CompletionItem

    from restride.algebra.coverage import Verdict
    from restride.algebra.layout import Layout
    from restride.layouts.catalogue import Entry, Parameter

__all__ = ["command"]

_EXAMPLES: Final = """\b
Examples:
  restride layouts codegen-qkv --shape 96x32 --mesh tp=4 --heads 16
  restride layouts CKPT --tp 4   how 4 ranks would cut a checkpoint
"""


class _Catalogue(click.Group):
    """A group with one command for each layout of the catalogue, and one for a checkpoint."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(CATALOGUE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = CATALOGUE.get(cmd_name)
        if entry is not None:
            return _command_of(entry)
        if os.sep not in cmd_name and not os.path.lexists(cmd_name):
            close = closest(cmd_name, CATALOGUE)
            raise click.UsageError(
                f"no layout and no checkpoint is called {cmd_name!r}{meant(close)}", ctx
            )
        from restride.cli.cuts import command_for  # noqa: PLC0415 - the catalogue reads no files

        return command_for(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return super().shell_complete(ctx, incomplete) or files(incomplete)


@click.group(
    "layouts",
    cls=_Catalogue,
    invoke_without_command=True,
    subcommand_metavar="[NAME | CHECKPOINT] [OPTIONS]...",
    epilog=_EXAMPLES,
)
@json_option
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> None:
    """Known layouts, and how other ranks would cut a checkpoint.

    Without NAME, lists them. With NAME alone, draws a small example; with the options of that
    layout, draws, proves and prints yours. With a CHECKPOINT, shows which layouts its cuts are;
    with --tp, how another number of tensor-parallel ranks would cut it, and what decides that.
    """
    if context.invoked_subcommand is not None:
        if as_json:  # in front of the name, it is meant for what comes
            context.default_map = {context.invoked_subcommand: {"as_json": True}}
        return
    if as_json:
        write_json({"layouts": {name: _entry_to_json(e) for name, e in CATALOGUE.items()}})
        return
    page = open_page()
    width = max(map(len, CATALOGUE))
    for topic, entries in groupby(CATALOGUE.values(), key=lambda entry: entry.topic):
        page.line(topic, "bold")
        rows = [[f"  {entry.name:<{width}}", entry.summary] for entry in entries]
        page.table([Column(""), Column("")], rows)
        page.line()
    page.line("restride layouts NAME               draws a small example")
    page.line("restride layouts NAME --help        lists its options")
    page.line("restride layouts CHECKPOINT --tp N  shows how N ranks would cut it")


def _command_of(entry: Entry) -> click.Command:
    def run(*, as_json: bool, **given: str | None) -> int:
        texts = {name: text for name, text in given.items() if text is not None}
        return _show(entry, texts, as_json=as_json)

    options = [_option(parameter, entry.example) for parameter in entry.parameters]
    built = click.Command(
        entry.name,
        params=list(options),
        callback=run,
        help=entry.summary,
        short_help=entry.summary,
        epilog=f"Example: restride layouts {entry.name} {_as_options(entry, entry.example)}",
    )
    return json_option(built)


def _option(parameter: Parameter, example: Mapping[str, str]) -> click.Option:
    if parameter.kind == "flag":
        return click.Option(
            [parameter.option, parameter.name], flag_value="yes", help=f"{parameter.help}."
        )
    shown = f", such as {example[parameter.name]}" if parameter.name in example else ""
    return click.Option(
        [parameter.option, parameter.name],
        metavar=parameter.kind.upper(),
        help=f"{parameter.help[:1].upper()}{parameter.help[1:]}{shown}.",
    )


def _show(entry: Entry, texts: Mapping[str, str], *, as_json: bool) -> int:
    is_example = not texts
    layout = build(entry.name, texts or entry.example)
    verdict = prove(layout)
    code = concluded(is_fine=isinstance(verdict, Covered))
    if as_json:
        write_json(_to_json(entry, layout, verdict))
        return code
    page = open_page()
    page.line(f"{entry.name}: {entry.summary}", "bold")
    if is_example:
        page.line(f"an example: {_as_options(entry, entry.example)}")
    page.line()
    draw_layout(page, layout)
    page.line()
    word = type(verdict).__name__.lower()
    page.line(f"{word}: {explain(verdict, layout)}", "good" if code == ExitCode.OK else "bad")
    return code


def _as_options(entry: Entry, texts: Mapping[str, str]) -> str:
    parts = []
    for parameter in entry.parameters:
        text = texts.get(parameter.name)
        if text is not None:
            quoted = f"'{text}'" if ";" in text else text
            parts.append(
                parameter.option if parameter.kind == "flag" else f"{parameter.option} {quoted}"
            )
    return " ".join(parts)


def _to_json(entry: Entry, layout: Layout, verdict: Verdict) -> dict[str, object]:
    return {
        "name": entry.name,
        "layout": layout_to_json(layout),
        "signature": signature(layout),
        "pieces_per_rank": {
            str(rank): len(layout.pieces(rank)) for rank in range(layout.rank_count)
        },
        "verdict": type(verdict).__name__.lower(),
        "explanation": explain(verdict, layout),
    }


def _entry_to_json(entry: Entry) -> dict[str, object]:
    return {
        "summary": entry.summary,
        "topic": entry.topic,
        "parameters": {
            parameter.name: {
                "kind": parameter.kind,
                "help": parameter.help,
                "required": parameter.is_required,
            }
            for parameter in entry.parameters
        },
        "example": dict(entry.example),
    }
