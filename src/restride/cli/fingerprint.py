"""``restride fingerprint``: what the tensors are, in 32 digits each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from restride import api
from restride.checkpoint.fingerprints import fingerprints_to_json
from restride.cli.cut_options import source_options
from restride.cli.exits import ExitCode
from restride.cli.options import PathName, json_option, memory_option, states_option
from restride.cli.output import Column, open_page, write_json
from restride.cli.progress import open_progress
from restride.cli.sizes import format_count
from restride.cli.stage_options import tied_option
from restride.storage.atomic_file import require_place, write_small_file
from restride.storage.fingerprint_files import no_fingerprints

if TYPE_CHECKING:
    from typing import Literal

__all__ = ["command"]

_EXAMPLES: Final = """\b
Examples:
  restride fingerprint CKPT -o before.json   to be kept
  restride check OUT --against before.json   to be compared, later
"""


@click.command("fingerprint", epilog=_EXAMPLES)
@click.argument("checkpoint", type=PathName())
@states_option
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=PathName(),
    help="Write them to FILE, for check --against FILE. Default: print them.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it holds fingerprints.")
@tied_option
@source_options
@memory_option("plan and buffers; the interpreter and the names and places of the checkpoint come")
@json_option
def command(
    checkpoint: str,
    *,
    states: Literal["weights", "all"],
    out: str | None,
    force: bool,
    pp_tied: dict[str, tuple[int, ...]] | None,
    source_config: str | None,
    source_rules: str | None,
    memory: int,
    as_json: bool,
) -> int:
    """Take fingerprints that are the same under every sharding and format.

    One for each tensor and state, over its bits in logical order, its shape and its dtype. Two
    arrays that differ by accident have the same one with a chance below 2^-95; it is no
    protection against forgery.
    """
    if out is not None:
        require_place(out, objection=no_fingerprints, force=force)
    with open_progress("reading") as observer:
        found = api.fingerprint(
            checkpoint,
            states=states,
            budget_nbytes=memory,
            pp_tied=pp_tied,
            source_config=source_config,
            source_rules=source_rules,
            observer=observer,
        )
    content = fingerprints_to_json(found)
    if out is not None:
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_small_file(out, f"{text}\n".encode(), objection=no_fingerprints, force=force)
    if as_json:
        write_json(content)
    elif out is not None:
        count = sum(map(len, found.values()))
        open_page().line(f"{out}: fingerprints of {format_count(count, 'array')}", "good")
    else:
        rows = [
            [digits, name, state]
            for name, states_found in found.items()
            for state, digits in states_found.items()
        ]
        if rows:
            open_page().table([Column("fingerprint"), Column("tensor"), Column("state")], rows)
    return ExitCode.OK
