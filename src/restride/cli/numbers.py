"""Numbers as options take them: what is none is refused in words of this program."""

from __future__ import annotations

import math
import re
from typing import Final

import click

__all__ = ["Integer", "Number"]

_WHOLE: Final = re.compile(r"[+-]?\d{1,4000}", re.ASCII)


class Integer(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """A whole number within limits."""

    name = "integer"

    def __init__(self, min: int | None = None, max: int | None = None) -> None:  # noqa: A002 - as click calls them
        self._least, self._most = min, max

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read what was given; click calls this."""
        if not _WHOLE.fullmatch(str(value)):
            self.fail(f"{value!r} is no whole number", param, ctx)
        number = int(str(value))
        if not _is_between(number, self._least, self._most):
            self.fail(f"{number} is not {_between(self._least, self._most)}", param, ctx)
        return number


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """A number within limits, which NaN is not: it compares with none of them."""

    name = "number"

    def __init__(self, min: float | None = None, max: float | None = None) -> None:  # noqa: A002 - as click calls them
        self._least, self._most = min, max

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read what was given; click calls this."""
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        if not _is_between(number, self._least, self._most):
            self.fail(f"{value} is not {_between(self._least, self._most)}", param, ctx)
        return number


def _is_between(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)


def _between(least: float | None, most: float | None) -> str:
    if least is None:
        return f"at most {most}"
    return f"at least {least}" if most is None else f"from {least} to {most}"
