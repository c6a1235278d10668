"""The page about the commands has every option of every command, and no other."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from restride.cli import _app
from restride.cli.cuts import command_for
from restride.cli.exits import ExitCode
from restride.testing.documents import links_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
SECTIONS = re.split(r"^## `(.*)`$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
BY_HEADING = dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True))
SAID_DEFAULT = re.compile(r"Default: (\w+)[.,]|(\w+)(?: alone| and refuse)? \(default\)")


def command_of(heading: str) -> click.Command:
    """The command that a section is about."""
    name, *arguments = [*heading.split(), ""][1:]
    if not name:
        return _app._root
    if name == "layouts" and arguments != [""]:
        return command_for("CKPT")
    command = importlib.import_module(f"restride.cli.{name}").command
    assert isinstance(command, click.Command)
    return command


def options_of(command: click.Command) -> set[str]:
    options = (each for each in command.params if isinstance(each, click.Option))
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def options_in(text: str) -> set[str]:
    cells = re.findall(r"^\| (`-[^|]*?) \| ", text.replace(r"\|", "/"), re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(--?[a-z-]+)", cell)}


def defaults_in(text: str) -> dict[str, str]:
    """Default of each option whose row says a value, not words."""
    return dict(
        re.findall(r"^\| `(--[a-z-]+)[^|]*` \| `?(\d+|(?<=`)\w+)`? \| ", text, re.MULTILINE)
    )


def test_every_command_has_a_section() -> None:
    named = {[*heading.split(), ""][1] for heading in BY_HEADING}

    assert named == {"", *_app.COMMANDS}


@pytest.mark.parametrize("heading", BY_HEADING)
def test_a_section_has_each_option_of_its_command(heading: str) -> None:
    shown = options_in(BY_HEADING[heading]) - {"-h", "--help"}

    assert shown == options_of(command_of(heading))


def test_a_default_is_the_one_that_the_help_of_the_command_says() -> None:
    compared = set()
    for heading, text in BY_HEADING.items():
        options = {
            name: option
            for option in command_of(heading).params
            if isinstance(option, click.Option)
            for name in option.opts
        }
        for name, default in defaults_in(text).items():
            known = options[name].default
            if isinstance(known, str | float):
                assert default in (known, f"{known:g}" if isinstance(known, float) else known)
            else:
                said = SAID_DEFAULT.findall(options[name].help or "")
                assert default in {word for pair in said for word in pair}, (heading, name)
            compared.add(name)

    assert compared >= {"--max-shard-size", "--wait", "--to", "--replicas", "--rtol", "--states"}


@pytest.mark.parametrize("heading", BY_HEADING)
def test_the_examples_of_a_section_are_understood(heading: str) -> None:
    for line in re.findall(r"^    restride (.*)$", BY_HEADING[heading], re.MULTILINE):
        name, *words = shlex.split(line, comments=True)
        command = importlib.import_module(f"restride.cli.{name}").command

        # Parsed to the end, without running: a click command does so when its context is made. What
        # it is told of help the first time it keeps.
        names = _app._root.context_settings["help_option_names"]
        with command.make_context(name, words, help_option_names=names) as context:
            assert context.command is command


def test_every_exit_code_is_listed() -> None:
    listed = re.findall(r"^\| (\d+) \|", SECTIONS[0], re.MULTILINE)

    assert [int(code) for code in listed] == [code.value for code in ExitCode]


def test_every_link_resolves() -> None:
    for target in links_of(PAGE):
        assert (PAGE.parent / target).exists(), target
