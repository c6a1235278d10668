"""Numbers as options take them: what is none is refused in words of this program."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Integer", "Number"]


class Integer(click.IntRange):
    """A whole number within limits."""

    name = "integer"


class Number(click.FloatRange):
    """A number within limits, which NaN is not: it compares with none of them."""

    name = "number"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read what was given; click calls this."""
        read: Callable[..., float] = super().convert
        number = read(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number
