"""The group of commands and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from restride import __version__
from restride.cli.exits import ExitCode
from restride.errors import RestrideError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

# What `restride --help` says of each command. The help of the command itself starts with the same
# words; a test holds them together.
COMMANDS: Final = {
    "info": "What is in a checkpoint, and how is it cut?",
    "check": "Is a checkpoint whole, consistent and intact? Prove it.",
    "convert": "Write a checkpoint in another format, bit for bit.",
    "layouts": "The catalogue of known layouts, drawn as pieces.",
    "demo": "All of it, on a sample that ships with the package.",
}


class _LazyGroup(click.Group):
    """A group that imports the module of a command when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"restride.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 a finding, 2 refused or failed.",
)
@click.version_option(__version__, prog_name="restride")
@click.pass_context
def _root(context: click.Context) -> None:
    """Describe, prove and move the tensors of distributed training checkpoints."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        result = _root.main(args=arguments, prog_name="restride", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except click.ClickException as error:
        return _fail(_usage_sentence(error))
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except RestrideError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(_os_sentence(error))
    return result if isinstance(result, int) else ExitCode.OK


def _fail(sentence: str, code: ExitCode = ExitCode.FAILED) -> ExitCode:
    sys.stderr.write(f"restride: {sentence}\n")
    return code


def _usage_sentence(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    command = context.command_path.removeprefix("restride").strip()
    where = f"{command}: " if command else ""
    return f"{where}{message}; see {context.command_path} --help"


def _os_sentence(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}" if error.filename is not None else reason
