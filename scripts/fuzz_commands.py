"""A target of `fuzz.py`: the command line, with arguments that are right, wrong, or in the way.

Options are those that the commands have, whatever these are; values are right ones of every kind
and wrong ones. Every path is one below a folder of the input.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fuzz_checkpoints import made_once, scratch
from fuzz_choices import ByteRandom
from restride import api
from restride.cli._app import COMMANDS, _root
from restride.exports import _TAKEN
from restride.testing.command_line import SAMPLE, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

__all__ = ["command_seeds", "commands"]

_SIZES = ("1", "64KiB", "1MiB", "2GB", "1e3", "1e400", "nan", "inf", "-1MB", "0x10", "MB", "9" * 40)
_NUMBERS = (
    *("1", "2", "1", "2", "4", "0", "3", "-1", "7.5", "1e9", "9" * 25, "nan", "inf", "\u0663", "x"),
    "",
)
_WORDS = (
    *("", " ", "a", "*", "**", "[", "(", "x=", "=x", "a=b", "a=b=c", "\u00e9" * 300, "\udcff", "-"),
    *("--", "-x", "--no-such", "\x1b[2J", "a\nb", "%s", "{}", "None", "weight=mean", "**=first"),
)
_KNOWN = {
    "mesh": ("tp=2", "tp=2,dp=2", "tp=0", "tp", "tp=2,tp=2", "tp=99999999999", "=2"),
    "shape": ("8x4", "48x4", "8", "0x3", "8x", "8,4", "99999999999x99999999999", "-8x4"),
    "replicas": ("check", "first", "mean", "own", "tp=1", "0", "9", "*.bias=mean", "**=tp=0"),
    "dtype": ("float32", "bfloat16", "float16", "float64", "int8", "float8_e5m2"),
    "executor": ("concurrent.futures:ThreadPoolExecutor", "concurrent.futures", "json:loads", ":"),
    "process": ("0/1", "1/2", "0/2", "2/2", "1/1", "a/b", "0"),
    "rename": ("(.*)=\\1", "(=x", "a=\\9", "transformer.(.*)=model.\\1", "a"),
    "pp_layers": ("1", "0,1", "1,1", "2,1", "a", ","),
    "pp_tied": ("a=0", "a=0,1", "=0", "a=", "0"),
}
_PLACES = (
    *("in", "in", "in", "in", "in", "in", "in/step", "one", "one/model.safetensors", "fused"),
    *("empty", "nothing", "in/latest", "rules.toml", "config.json", "prints.json", "map.json"),
    *("a/b", "x" * 300),
)
_OUTPUTS = (
    "out",
    "out",
    "out",
    "out",
    "out/",
    "a/b/out",
    "empty",
    "one",
    "in",
    "in/step",
    "in/x",
    "prints.json",
)
_RIGHT_PLACES = ("in", "in", "in", "in/step", "one", "one/model.safetensors", "fused")
_RIGHT_ONES = 2
"""So many of the values of an option are right, the first ones."""
_MOST_OPTIONS = 5


def command_seeds() -> list[bytes]:
    """Every command, with decisions of several kinds behind it."""
    return [bytes([kind, *[29 * kind + n & 255] * 48]) for kind in range(24) for n in range(4)]


@made_once
def _base() -> Path:
    """A folder with something of every kind that a command reads."""
    base = scratch() / "commands"
    base.mkdir()
    shutil.copytree(SAMPLE, base / "in")
    api.convert(SAMPLE, base / "one")
    api.convert(SAMPLE, base / "fused", to="universal")
    (base / "empty").mkdir()
    (base / "rules.toml").write_text('format = "restride-rules/1"\nrest = "whole"\n')
    config = {"model_type": "codegen", "n_head": 8, "n_embd": 32, "tie_word_embeddings": False}
    (base / "config.json").write_text(json.dumps(config))
    run("fingerprint", base / "in", "-o", base / "prints.json")
    (base / "map.json").write_bytes(b'{"format": "restride/1", "mesh": {"tp": 2}, "tensors": {}}')
    return base


def commands(content: bytes) -> str:
    """Run a command: an exit code that has a meaning, and one sentence where it refuses."""
    random = ByteRandom(content)
    base = _base()
    place = Path(tempfile.mkdtemp(dir=scratch()))
    before = Path.cwd()
    try:
        # Files are links: what writes into one of its sources is seen below.
        shutil.copytree(base, place, dirs_exist_ok=True, copy_function=os.symlink)
        os.chdir(place)
        arguments = _arguments(random)
        ran = run(*arguments)
        assert _stamps(base) == _base_stamps(), f"{arguments} wrote into what it reads"
        _judge(arguments, ran.code, ran.out, ran.err)
    finally:
        os.chdir(before)
        shutil.rmtree(place, ignore_errors=True)
    return f"{arguments[0] if arguments and arguments[0] in COMMANDS else 'no command'}: {ran.code}"


def _judge(arguments: Sequence[str], code: int, out: str, err: str) -> None:
    assert code in {0, 1, 2, 130}, f"{arguments}: exit code {code}"
    assert "Traceback" not in err, f"{arguments}: {err}"
    assert "\x1b" not in out + err, f"{arguments} gives a terminal orders"
    if code == 2:
        last = err.rstrip("\n").rpartition("\n")[2]
        assert last.startswith("restride: "), f"{arguments}: {err}"
        assert last.removeprefix("restride: ").strip(), f"{arguments}: says nothing"
    if code in {0, 1} and "--json" in arguments and not {"-h", "--help"} & {*arguments} and out:
        json.loads(out)


@lru_cache
def _base_stamps() -> dict[str, int]:
    return _stamps(_base())


def _stamps(base: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(base.rglob("*"))}


@lru_cache
def _all_commands() -> tuple[tuple[tuple[str, ...], click.Command], ...]:
    """Every command by its names; each layout of the catalogue is one, and so is a checkpoint."""
    root = click.Context(_root, info_name="restride")
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name in COMMANDS:
        command: Any = _root.get_command(root, name)
        found.append(((name,), command))
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=root)
            for layout in (*command.list_commands(inner), "in"):
                known = layout if layout != "in" else str(_base() / "in")
                made = command.get_command(inner, known)
                if made is not None:
                    found.append(((name, layout), made))
    return tuple(found)


def _arguments(random: Random) -> list[str]:
    known = _all_commands()
    # Conversions and the like have the most options; each layout has few.
    names, command = random.choice(known if random.randrange(2) else known[: len(COMMANDS)])
    if random.randrange(3) == 0:
        names, command = next(one for one in known if one[0] == ("convert",))
    is_right = random.randrange(2) == 0
    words = _right(random, names, command) if is_right else _any(random, names, command)
    for _ in range(
        random.choice((0, 0, 0, 1, 2)) if not is_right or random.randrange(8) == 0 else 0
    ):
        words = _spoiled(random, words)
    if any(word.startswith("--p") for word in words):  # several processes wait for each other
        words += ["--wait", "0"]
    return words


def _right(random: Random, names: tuple[str, ...], command: click.Command) -> list[str]:
    """A command that a user would give."""
    _, is_there, example = (command.epilog or "").partition("Example: restride ")
    if is_there and names[-1] != "in":
        return [*shlex.split(example), *random.choice(([], ["--json"]))]
    places = [one for one in command.params if isinstance(one, click.Argument)]
    words = [*names]
    if names[0] != "layouts":
        words += ["out" if one.name == "out" else random.choice(_RIGHT_PLACES) for one in places]
    to = random.choice([*_TAKEN])
    left_out = {name for taken in _TAKEN.values() for name in taken} - _TAKEN[to]
    left_out |= {"process", "executor", "parts", "rename", "against", "rules", "to"}
    options = [one for one in command.params if isinstance(one, click.Option)]
    if names == ("convert",):
        words += ["--to", to]
        options = [one for one in options if one.name not in left_out]
    for option in random.sample(options, min(len(options), random.randrange(4))):
        if option.name not in left_out:
            words += _given(random, option, is_right=True)
    return words


def _any(random: Random, names: tuple[str, ...], command: click.Command) -> list[str]:
    words = list(names)
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            words += _positional(random, parameter)
    options = [one for one in command.params if isinstance(one, click.Option)]
    for _ in range(random.randrange(_MOST_OPTIONS) if options else 0):
        words += _given(random, random.choice(options))
    return words


def _positional(random: Random, parameter: click.Parameter) -> Iterable[str]:
    pool = _OUTPUTS if parameter.name == "out" else _PLACES
    return [] if random.randrange(24) == 0 else [random.choice(pool)]


def _given(random: Random, option: click.Option, *, is_right: bool = False) -> Iterable[str]:
    name = random.choice((*option.opts, *option.secondary_opts))
    if option.is_flag:
        return [name]
    value = _right_value(random, option) if is_right else _value(random, option)
    if name.startswith("--") and random.randrange(4) == 0:
        return [f"{name}={value}"]
    return [name, value]


def _right_value(random: Random, option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return str(random.choice(list(option.type.choices)))
    usual = ("1MiB", "2GB") if option.metavar == "SIZE" else ("1", "2")
    pools = {"out": ("out",), "config": ("config.json",), **_KNOWN}
    return random.choice(pools.get(option.name or "", usual)[:_RIGHT_ONES])


def _value(random: Random, option: click.Option) -> str:
    kind, name = option.type, option.name or ""
    if random.randrange(12) == 0:
        return random.choice(_WORDS)
    if isinstance(kind, click.Choice):
        return str(random.choice(list(kind.choices)))
    pools = {"out": _OUTPUTS, **dict.fromkeys(("config", "rules", "against"), _PLACES), **_KNOWN}
    if name in pools:
        return random.choice(pools[name])
    is_number = isinstance(kind, (click.types.IntParamType, click.types.FloatParamType))
    sizes = _SIZES if option.metavar == "SIZE" else (*_NUMBERS, *_WORDS)
    return random.choice(_NUMBERS if is_number else sizes)


def _spoiled(random: Random, words: list[str]) -> list[str]:
    """Leave one out, say one twice, exchange two, put a stranger among them, or cut one off."""
    one, two = random.randrange(len(words) + 1), random.randrange(len(words) + 1)
    kind = random.randrange(5)
    if kind == 0:
        return words[:one] + words[one + 1 :]
    if kind == 1:
        return words[:one] + words[one : one + 1] + words[one:]
    if kind == 2 and max(one, two) < len(words):
        swapped = list(words)
        swapped[one], swapped[two] = words[two], words[one]
        return swapped
    if kind == 3:
        return [*words[:one], random.choice((*_WORDS, *_NUMBERS)), *words[one:]]
    return [word[: len(word) // 2] if n == one else word for n, word in enumerate(words)]
