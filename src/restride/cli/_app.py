"""The group of commands and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import importlib
import os
import select
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import click

from restride import __version__
from restride.cli.completion import COMPLETE_VARIABLE, answer_shell
from restride.cli.exits import ExitCode, conclusion
from restride.cli.nearest import closest, meant
from restride.cli.output import tell
from restride.cli.signals import sigterm_interrupts
from restride.cli.system_errors import os_sentence, with_remedy
from restride.errors import RestrideError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

# What `restride --help` says of each command. The help of the command itself starts with the same
# words; a test holds them together.
COMMANDS: Final = {
    "info": "What is in a checkpoint, and how is it cut?",
    "check": "Is a checkpoint whole, consistent and intact? Prove it.",
    "convert": "Write another format, or for other ranks, bit for bit.",
    "diff": "Do two checkpoints hold the same tensors?",
    "fingerprint": "Take fingerprints that are the same under every sharding and format.",
    "layouts": "Known layouts, and how other ranks would cut a checkpoint.",
    "demo": "All of it, on a sample that ships with the package.",
}


# Not a code of 1, which Python would end with: that is a finding.
_EXHAUSTED: Final = (
    "the system gives no more memory or threads; raise the limits of this job (ulimit, cgroup), or "
    "give fewer --workers and less --memory"
)


class _LazyGroup(click.Group):
    """A group that imports the module of a command when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            close = closest(cmd_name, COMMANDS)
            raise click.UsageError(f"no such command {cmd_name!r}{meant(close)}", ctx)
        command = importlib.import_module(f"restride.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # Of an option without its value click does not say which command has it.
            name = ctx.invoked_subcommand
            if error.ctx is None and name is not None and (command := self.get_command(ctx, name)):
                error.ctx = click.Context(command, ctx, name)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001 - click calls it so
    del parameter
    if not is_asked or context.resilient_parsing:
        return
    from restride.arrays import _kernel  # noqa: PLC0415 - nothing else here needs NumPy

    kernel = "C kernel in use" if _kernel.is_available else "no C kernel: NumPy instead, slower"
    click.echo(f"restride, version {__version__} ({kernel})")
    context.exit()


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 a finding, 2 refused or failed, 130 stopped by ^C or SIGTERM.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and whether the C kernel is in use, and exit.",
)
@click.pass_context
def _root(context: click.Context) -> None:
    """Describe, prove and move the tensors of distributed training checkpoints."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # The workers are the threads. Those that BLAS would start for the fingerprints, when NumPy is
    # imported, only fight them for the cores.
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    _make_writable()
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return answer_shell(_root, instruction)
    code = ExitCode.FAILED
    try:
        with sigterm_interrupts():
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except click.ClickException as error:
        sentence = _usage_sentence(error)
    except StoppedError as error:
        sentence, code = str(error), ExitCode.INTERRUPTED
    except RestrideError as error:
        sentence = with_remedy(error)
    except OSError as error:
        sentence = os_sentence(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_exhausted(error):
            raise
        sentence = _EXHAUSTED
    except KeyboardInterrupt as error:
        notes: list[str] = getattr(error, "__notes__", [])
        sentence, code = "; ".join(("interrupted", *notes)), ExitCode.INTERRUPTED
    tell(sentence)
    return code


def _is_exhausted(error: MemoryError | RuntimeError) -> bool:
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def _make_writable() -> None:
    """Let no name and no closed stream end a command that has done its work."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as by `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(words: list[str]) -> int:
    context: click.Context | None = None
    try:
        # Not click's own main(): it would decide what a broken pipe and ^C mean.
        with _root.make_context("restride", words) as context:
            result = _root.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise  # of a pipe between processes, say: the work is not done
        # The reader of a pipe has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK if context is None else conclusion(context)
    return result if isinstance(result, int) else ExitCode.OK


def _is_unread(stream: TextIO) -> bool:
    """Whether the reader of a pipe is gone."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _options_like(error: click.NoSuchOption) -> list[str]:
    """Options of the command that may have been meant; the dashes make no two of them alike."""
    options = error.ctx.command.params if error.ctx else ()
    names = [
        name
        for option in options
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    ]
    by_word = {name.lstrip("-"): name for name in names}
    return [by_word[word] for word in closest(error.option_name.lstrip("-"), by_word)]


def _usage_sentence(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption):
        message = f"no such option {error.option_name!r}{meant(_options_like(error))}"
    if context is None:
        return message
    command = context.command_path.removeprefix("restride").strip()
    where = f"{command}: " if command else ""
    return f"{where}{message}; see {context.command_path} --help"
