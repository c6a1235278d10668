"""Options that say how a checkpoint is cut, and the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

from restride.cli.numbers import Integer
from restride.cli.options import PathName

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cut_options", "source_options"]

_Decorated = TypeVar("_Decorated", bound="Callable[..., object]")


def cut_options(command: _Decorated) -> _Decorated:
    """Add ``--config``, ``--rules``, ``--plan`` and ``--grain`` to a command that has ``--tp``."""
    options = (
        click.option(
            "--config",
            metavar="FILE",
            type=PathName(),
            help="config.json of the model. Default: the one in the folder of the checkpoint, or "
            "beside it.",
        ),
        click.option(
            "--rules",
            metavar="FILE",
            type=PathName(),
            help="Rules of your own, in TOML: which parameters are cut by which layout.",
        ),
        click.option(
            "--plan/--no-plan",
            default=None,
            help="Whether the next run follows transformers' tensor-parallel plan. Default: as the "
            "run did that wrote the checkpoint, whose cut is then kept to.",
        ),
        click.option(
            "--grain",
            type=Integer(min=1),
            metavar="N",
            help="tp_grain_size in DeepSpeed's configuration of the next run. Default: as in that "
            "of CHECKPOINT.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def source_options(command: _Decorated) -> _Decorated:
    """Add ``--source-config`` and ``--source-rules`` to a command that reads a checkpoint."""
    options = (
        click.option(
            "--source-config",
            metavar="FILE",
            type=PathName(),
            help="config.json of the model, where the files do not say how tensor-parallel ranks "
            "cut it: it is read as AutoTP cuts such a model.",
        ),
        click.option(
            "--source-rules",
            metavar="FILE",
            type=PathName(),
            help="The same told by rules of your own, in TOML: which layout cut which parameters.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
