"""The command line: parse, call the library, render. No arithmetic, no file formats.

One module a command. A command's module is imported when the command is run, so that
``restride --help`` loads neither NumPy nor a single format.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


# Collections of garbage look at all objects, of which a command makes some ten thousand, and few
# that refer to each other: with Python's 700 they take 7 % of the time until it copies.
_OBJECTS_BETWEEN_COLLECTIONS: Final = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: Its words. Without them they are those of the process, which is taken to do
            nothing else: its garbage collector is made to wait, and at the end to leave everything
            to the system.
    """
    if arguments is not None:
        return _run(arguments)
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    try:
        return _run(None)
    finally:
        gc.freeze()


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not above: what is interrupted while it is imported would end in a traceback.
        from restride.cli._app import main as run  # noqa: PLC0415

        return run(arguments)
    except KeyboardInterrupt:
        from restride.cli.exits import ExitCode  # noqa: PLC0415
        from restride.cli.output import tell  # noqa: PLC0415

        tell("interrupted")
        return ExitCode.INTERRUPTED
