"""Exit codes."""

from enum import IntEnum
from typing import Final

import click

__all__ = ["ExitCode", "concluded", "conclusion"]

_CONCLUSION: Final = "restride.conclusion"


class ExitCode(IntEnum):
    """Stable: scripts depend on these numbers."""

    OK = 0
    FINDING = 1
    FAILED = 2
    INTERRUPTED = 130


def concluded(*, is_fine: bool) -> ExitCode:
    """The exit code of a command that has its answer, and is about to tell it.

    It is also the one where the reader of the answer leaves before its end.
    """
    code = ExitCode.OK if is_fine else ExitCode.FINDING
    click.get_current_context().meta[_CONCLUSION] = code
    return code


def conclusion(context: click.Context) -> ExitCode:
    """What a command had concluded when it ended; fine where it concludes nothing."""
    code: ExitCode = context.meta.get(_CONCLUSION, ExitCode.OK)
    return code
