"""Options of a conversion, kept as JSON values, in the words in which a user gives them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from restride.checkpoint.decisions import DEFAULT, EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_kept", "changed_options", "option_name"]

_MOST_SHOWN: Final = 3
_LONGEST: Final = 60
_SIZE: Final = "max_shard_nbytes"
_UNITS: Final = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}


def as_kept(options: Mapping[str, object]) -> dict[str, object]:
    """Options as a journal keeps them: the same, whichever way they were said.

    Examples:
        >>> as_kept({"replicas": "first", "pp_layers": (0, 3)})
        {'replicas': [['*', 'first']], 'pp_layers': '0,3'}
        >>> as_kept({"replicas": "check"})
        {'replicas': []}
    """
    kept = dict(options)
    replicas, layers = kept.get("replicas"), kept.get("pp_layers")
    if isinstance(replicas, str | int):
        replicas = [(EVERYTHING, replicas)]
    if isinstance(replicas, list | tuple):
        rules = [[pattern, str(copy)] for pattern, copy in replicas]
        kept["replicas"] = [] if rules == [[EVERYTHING, DEFAULT]] else rules
    if isinstance(layers, list | tuple):
        kept["pp_layers"] = ",".join(map(str, layers))
    return kept


def option_name(name: str) -> str:
    """An option of a function as the command line has it.

    Examples:
        >>> option_name("pp_layers"), option_name("max_shard_nbytes")
        ('--pp-layers', '--max-shard-size')
    """
    return "--" + {_SIZE: "max_shard_size"}.get(name, name).replace("_", "-")


def changed_options(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[str]:
    """Say with which other options somebody else was started.

    Args:
        ours: The options of this conversion.
        theirs: Those of the other one.

    Examples:
        >>> list(changed_options({"to": "universal", "stage": 3}, {"to": "safetensors"}))
        ['with --to safetensors, not universal', 'without --stage 3']
    """
    for name in {**theirs, **ours}:
        then, now = theirs.get(name), ours.get(name)
        if then == now:
            continue
        if _is_left_out(then):
            yield f"without {_given(name, now)}"
        elif _is_left_out(now):
            yield f"with {_given(name, then)}"
        else:
            other = _given(name, now)
            yield f"with {_given(name, then)}, not {other.removeprefix(option_name(name) + ' ')}"


def _is_left_out(value: object) -> bool:
    return value is None or value == []  # not {}: no layers of a pipeline that are tied


def _given(name: str, value: object) -> str:
    option = option_name(name)
    if value is True:
        return option
    if value is False:
        return option.replace("--", "--no-", 1)
    try:
        arguments = [*_arguments(name, value)]
    except (TypeError, ValueError):  # a file may hold anything
        arguments = [str(value)]
    return " ".join(f"{option} {_short(shlex.quote(text))}" for text in arguments[:_MOST_SHOWN])


def _short(text: str) -> str:
    """The beginning and the end: paths are the same at the beginning."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 4]}...{text[-3 * _LONGEST // 4 :]}"


def _arguments(name: str, value: object) -> Iterator[str]:
    """What follows the option each time that it is given."""
    if name == "replicas" and isinstance(value, list):
        for pattern, copy in value:
            yield str(copy) if pattern == EVERYTHING else f"{pattern}={copy}"
    elif name == "pp_tied" and isinstance(value, dict):
        for key, layers in value.items():
            yield f"{key}={','.join(map(str, layers))}"
        if not value:
            yield "none"
    elif name == _SIZE and isinstance(value, int):
        yield _size(value)
    else:
        yield str(value)


def _size(nbytes: int) -> str:
    """A size as short as it can be given, and exact."""
    spelled = [f"{nbytes // unit}{name}" for name, unit in _UNITS.items() if nbytes % unit == 0]
    return min([*spelled, str(nbytes)], key=len)
