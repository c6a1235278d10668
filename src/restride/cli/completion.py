"""Completion of commands, options and files in the shell, by what click knows of them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from restride.cli.exits import ExitCode
from restride.cli.output import tell
from restride.errors import RestrideError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["COMPLETE_VARIABLE", "answer_shell", "files"]

COMPLETE_VARIABLE: Final = "_RESTRIDE_COMPLETE"


def answer_shell(group: click.Group, instruction: str) -> int:
    """Print the script of a shell, or what may follow a line that is being typed.

    Args:
        group: All commands.
        instruction: What the script asks, such as ``bash_source`` or ``bash_complete``.

    Returns:
        The exit code. A line that makes no sense so far is completed with nothing.
    """
    from click.shell_completion import shell_complete  # noqa: PLC0415 - only where a shell asks

    # Nor has somebody a line who asks by hand, without what the script gives.
    with suppress(click.ClickException, RestrideError, OSError, KeyError, ValueError):
        if shell_complete(group, {}, "restride", COMPLETE_VARIABLE, instruction):
            known = "bash_source, zsh_source or fish_source"
            tell(f"{COMPLETE_VARIABLE} is {instruction!r}; say {known}")
            return ExitCode.FAILED
    return ExitCode.OK


def files(incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell, which knows its files."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - likewise

    return [CompletionItem(incomplete, type="file")]
