"""What an entry of the catalogue says of a builder."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from restride.errors import LayoutError
from restride.frozen import Frozen
from restride.layouts._text import READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from restride.algebra.layout import Layout
    from restride.layouts._text import Kind

__all__ = ["Build", "Entry", "Parameter"]

Build: TypeAlias = "Callable[..., Layout]"


class Parameter(Frozen):
    """One argument of a builder, as a command line can give it.

    Attributes:
        name: Keyword of the builder.
        kind: How its text is written: see `restride.layouts._text`.
        help: One phrase.
        is_required: Whether the builder has no default for it.
    """

    name: str
    kind: Kind
    help: str
    is_required: bool = False

    @property
    def option(self) -> str:
        """The name as a command line writes it, such as ``--query-heads``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> object:
        """Read the value from text.

        Raises:
            LayoutError: The text is no such value; the error says how to write it.
        """
        try:
            return READERS[self.kind](text)
        except LayoutError as error:
            raise error.located(self.option) from None


class Entry(Frozen):
    """One layout of the catalogue.

    Attributes:
        name: Name in kebab-case, such as ``codegen-qkv``.
        builder: The function of `restride.layouts`.
        summary: One line.
        topic: Heading under which it is listed.
        parameters: Its arguments, required ones first.
        example: Text of each argument of a small case that draws well, by parameter name.
    """

    name: str
    builder: Build
    summary: str
    topic: str
    parameters: tuple[Parameter, ...]
    example: Mapping[str, str]
