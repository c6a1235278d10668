"""Options that commands share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

import click

from restride.cli.completion import files
from restride.cli.numbers import Integer
from restride.cli.sizes import parse_size
from restride.errors import UnsupportedError
from restride.storage.paths import as_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

__all__ = [
    "PathName",
    "as_nbytes",
    "as_replica_rules",
    "as_rules",
    "json_option",
    "memory_option",
    "states_option",
    "workers_option",
]


class PathName(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """A file or folder."""

    name = "path"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Read what was given; click calls this."""
        try:
            return as_path(str(value))
        except UnsupportedError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names of files, for a shell."""
        del ctx, param
        return files(incomplete)


_COORDINATES: Final = re.compile(r"\w+=\d+(,\w+=\d+)*", re.ASCII)
_MOST_WORKERS: Final = 256
_Decorated = TypeVar("_Decorated", bound="Callable[..., object]")


def as_nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Callback of an option that is a size, such as ``512MB``.

    Raises:
        click.BadParameter: The text is no size; the error says how to write it.
    """
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx=context, param=parameter) from None


def _as_budget(context: click.Context, parameter: click.Parameter, text: str | None) -> int:
    nbytes = as_nbytes(context, parameter, text)
    if nbytes is not None:
        return nbytes
    from restride.executors.sources import default_budget_nbytes  # noqa: PLC0415 - only to work

    return default_budget_nbytes()


def as_rules(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Callback of an option that holds rules ``OLD=NEW``; the last sign of equality counts.

    Raises:
        click.BadParameter: There is none, or nothing in front of it.
    """
    rules = []
    for text in texts:
        old, _, new = text.rpartition("=")
        if not old:
            raise click.BadParameter(f"{text!r} is no rule OLD=NEW", ctx=context, param=parameter)
        rules.append((old, new))
    return tuple(rules)


def as_replica_rules(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Callback of an option ``[PATTERN=]COPY``: (pattern, copy), ``*`` where there is no pattern.

    ``tp=1`` is a copy, and ``*.bias=tp=1`` a pattern with one: names of tensors have dots in them,
    axes have none.

    Raises:
        click.BadParameter: There is nothing on one side of a sign of equality.
    """
    rules = []
    for text in texts:
        pattern, sign, copy = text.partition("=")
        if _COORDINATES.fullmatch(text) or not sign:
            pattern, copy = "*", text
        if not pattern or not copy:
            raise click.BadParameter(
                f"{text!r} is no rule [PATTERN=]COPY", ctx=context, param=parameter
            )
        rules.append((pattern, copy))
    return tuple(rules)


def json_option(command: _Decorated) -> _Decorated:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, for machines."
    )(command)


def memory_option(bounded: str) -> Callable[[_Decorated], _Decorated]:
    """Add ``--memory`` to a command, in bytes; the help says what is bounded, and what is not."""
    return click.option(
        "--memory",
        metavar="SIZE",
        callback=_as_budget,
        help=f"Most memory for {bounded} on top. Default: 512MiB, or a quarter of what the cgroup "
        "allows where that is less.",
    )


def workers_option(command: _Decorated) -> _Decorated:
    """Add ``--workers`` to a command; None is the default of the machine."""
    return click.option(
        "--workers",
        metavar="N",
        type=Integer(1, _MOST_WORKERS),
        help="Threads. Default: one for each core that affinity and cgroup allow, up to four.",
    )(command)


def states_option(command: _Decorated) -> _Decorated:
    """Add ``--states`` to a command that looks at every state unless told not to."""
    return click.option(
        "--states",
        type=click.Choice(["weights", "all"]),
        default="all",
        help="Everything (default), or the weights alone.",
    )(command)
