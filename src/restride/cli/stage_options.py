"""Options that say how the layers of a pipeline are dealt out to its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import click

from restride.cli.numbers import Integer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["stage_options", "tied_option"]

_NONE: Final = "none"
_Decorated = TypeVar("_Decorated", bound="Callable[..., object]")


def stage_options(command: _Decorated) -> _Decorated:
    """Add ``--pp``, ``--pp-layers`` and ``--pp-tied`` to a command."""
    options = (
        click.option(
            "--pp",
            type=Integer(min=1),
            metavar="N",
            help="Stages of a pipeline. Default: those of CHECKPOINT, with the same layers.",
        ),
        click.option(
            "--pp-layers",
            metavar="CUT",
            help="Which layers each stage has: the first of each stage, such as 0,3,6, or as "
            "PipelineModule would deal them out, by parameters (default) or uniform; uniform:9 "
            "says how many layers there are. The model that resumes must have the same.",
        ),
        tied_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def tied_option(command: _Decorated) -> _Decorated:
    """Add ``--pp-tied`` to a command that reads a checkpoint."""
    return click.option(
        "--pp-tied",
        multiple=True,
        metavar="KEY=LAYERS",
        callback=_as_tied,
        help="Layers of a pipeline that share one module, such as embed=0,8, where the files do "
        "not tell; none, if none do. May be repeated.",
    )(command)


def _as_tied(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[int, ...]] | None:
    found: dict[str, tuple[int, ...]] = {}
    if values == (_NONE,):
        return found
    for value in values:
        key, _, numbers = value.rpartition("=")
        parts = [part.strip() for part in numbers.split(",")]
        if not key or not all(part.isdecimal() and len(part) <= 9 for part in parts):  # noqa: PLR2004
            raise click.BadParameter(
                f"{value!r} does not say which layers use a tied module: as embed=0,8, or none "
                "alone"
            )
        found[key] = (*found.get(key, ()), *map(int, parts))
    return found or None
