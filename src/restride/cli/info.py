"""``restride info``: what is in here, and how is it cut?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from restride import api
from restride.cli.contents import (
    catalog_to_json,
    show_headline,
    show_summary,
    show_tensors,
)
from restride.cli.cut_options import source_options
from restride.cli.findings import show_findings
from restride.cli.options import PathName, json_option
from restride.cli.output import open_page, write_json
from restride.cli.stage_options import tied_option
from restride.cli.waiting import Waiting

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.cli.output import Page

__all__ = ["command", "show_catalog"]

_EXAMPLES: Final = """\b
Examples:
  restride info global_step500             what a training job saved
  restride info model.safetensors --json   for a script
"""


@click.command("info", epilog=_EXAMPLES)
@click.argument("checkpoint", type=PathName())
@tied_option
@source_options
@json_option
def command(
    checkpoint: str,
    *,
    pp_tied: dict[str, tuple[int, ...]] | None,
    source_config: str | None,
    source_rules: str | None,
    as_json: bool,
) -> None:
    """What is in a checkpoint, and how is it cut?

    CHECKPOINT is a folder that a training job saved, or a file or folder of safetensors. Only
    headers and indices are read, no tensor.
    """
    with Waiting("reading headers"):
        catalog = api.open(
            checkpoint, pp_tied=pp_tied, source_config=source_config, source_rules=source_rules
        )
    if as_json:
        write_json(catalog_to_json(catalog))
        return
    page = open_page()
    show_catalog(page, checkpoint, catalog)
    if catalog.findings:
        page.line()
        show_findings(page, catalog.findings)


def show_catalog(page: Page, path: str, catalog: Catalog) -> None:
    """Write what is in the checkpoint at `path`, and how it is cut."""
    show_headline(page, path, catalog)
    show_summary(page, catalog)
    show_tensors(page, catalog)
