"""Run the command line in this process, and keep what it leaves."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from restride import cli
from restride.frozen import Frozen

__all__ = ["SAMPLE", "Ran", "run"]

SAMPLE = Path(cli.__file__).parent / "sample"
"""The checkpoint that ships with the package."""


class Ran(Frozen):
    """What a command left.

    Attributes:
        code: Exit code.
        out: Text on standard output, which is no terminal.
        err: Text on standard error, which is no terminal either.
    """

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        value = json.loads(self.out)
        assert self.out == self.out.splitlines()[0] + "\n"
        assert isinstance(value, dict)
        return value


def run(*arguments: str | Path) -> Ran:
    r"""Run one command.

    Examples:
        >>> run("frob")
        Ran(code=2, out='', err="restride: no such command 'frob'; see restride --help\n")
    """
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([str(argument) for argument in arguments])
    return Ran(int(code), out.getvalue(), err.getvalue())
