"""A command with so many options that its help needs headings."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SectionedCommand"]

_REST: Final = "Options"


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings.

    Attributes:
        sections: Names of parameters by heading, in the order of the help. What is under none
            comes last, under ``Options``.
    """

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options for each heading; click calls this."""
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option))
        by_name = {option.name: option for option in options}
        listed = {name for names in self.sections.values() for name in names}
        rest = [name for name in by_name if name not in listed]
        for heading, names in (*self.sections.items(), (_REST, rest)):
            records = [by_name[name].get_help_record(ctx) for name in names]
            shown = [record for record in records if record is not None]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
