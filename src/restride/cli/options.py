"""What the commands accept: types of arguments that click does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

from restride.cli.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SIZE", "json_option"]

_Decorated = TypeVar("_Decorated", bound="Callable[..., object]")


class _Size(click.ParamType):
    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


def json_option(command: _Decorated) -> _Decorated:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, for machines."
    )(command)
