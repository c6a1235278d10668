"""The command line: parse, call the library, render. No arithmetic, no file formats.

One module a command. A command's module is imported when the command is run, so that
``restride --help`` loads neither NumPy nor a single format.
"""

from restride.cli._app import main

__all__ = ["main"]
