"""``restride info``: what is in here, and how is it cut?"""

from __future__ import annotations

import click

from restride import api
from restride.cli.contents import catalog_to_json, show_findings, show_summary, show_tensors
from restride.cli.options import json_option
from restride.cli.output import open_page, write_json

__all__ = ["command"]


@click.command("info")
@click.argument("checkpoint")
@json_option
def command(checkpoint: str, *, as_json: bool) -> None:
    """What is in a checkpoint, and how is it cut?

    CHECKPOINT is a folder that a training job saved, or a file or folder of safetensors. Only
    headers and indices are read, no tensor.
    """
    catalog = api.open(checkpoint)
    if as_json:
        write_json(catalog_to_json(catalog))
        return
    page = open_page()
    show_summary(page, checkpoint, catalog)
    show_tensors(page, catalog)
    if catalog.findings:
        page.line()
        show_findings(page, catalog.findings)
