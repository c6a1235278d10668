"""The command line: parse, call the library, render. No arithmetic, no file formats.

One module a command. A command's module is imported when the command is run, so that
``restride --help`` loads neither NumPy nor a single format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        # Not above: what is interrupted while it is imported would end in a traceback.
        from restride.cli._app import main as run  # noqa: PLC0415

        return run(arguments)
    except KeyboardInterrupt:
        from restride.cli.exits import ExitCode  # noqa: PLC0415
        from restride.cli.output import tell  # noqa: PLC0415

        tell("interrupted")
        return ExitCode.INTERRUPTED
