"""Small files that a user has beside a checkpoint: the model's ``config.json``, rules, settings."""

from __future__ import annotations

import os
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, FormatError
from restride.storage.ranges import RangeFile
from restride.storage.typed_json import parse_typed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from restride.checkpoint.values import Value
    from restride.layouts.presets import Rules

__all__ = [
    "find_model_config",
    "read_hyperparameters",
    "read_model_config",
    "read_rules_file",
]

_CONFIG: Final = "config.json"
# A config lists the labels of a classifier at most; a rule file has some lines a layer.
_LARGEST_CONFIG_NBYTES: Final = 16 << 20
_LARGEST_RULES_NBYTES: Final = 1 << 20
_LARGEST_SETTINGS_NBYTES: Final = 1 << 20
_ONE_OF_ALL: Final = "one object for each parameter group, of names and plain values"


def find_model_config(root: str | PathLike[str]) -> Path | None:
    """Find the ``config.json`` of a checkpoint: in its folder, or beside it.

    ``Trainer`` writes it into the folder that the checkpoint is in; a tag of a checkpoint may be
    opened by itself.

    Args:
        root: Folder or file of the checkpoint.

    Returns:
        None where there is none.
    """
    place = Path(root)
    # Not resolved: beside a link is where the user sees the checkpoint.
    folders = [place, place.parent] if place.is_dir() else [place.parent]
    return next((f / _CONFIG for f in folders if os.path.lexists(f / _CONFIG)), None)


def read_model_config(path: str | PathLike[str]) -> Mapping[str, object]:
    """Read a ``config.json``.

    Raises:
        CorruptError: It is no JSON object that all readers understand alike, or far too large.
        FormatError: It is no regular file.
        ExecutionError: The system cannot read it.
    """
    if os.path.isfile(inside := os.path.join(path, _CONFIG)):  # noqa: PTH113, PTH118 - quick
        raise FormatError("is a folder", where=str(path), remedy=f"name {inside!r}")
    with RangeFile(path) as file:
        return parse_typed(_content(file, _LARGEST_CONFIG_NBYTES), dict[str, object])


def read_rules_file(path: str | PathLike[str]) -> Rules:
    """Read a rule file.

    Raises:
        RuleError: It is no TOML, or has no rules in it.
        CorruptError: It is no text, or far too large.
        FormatError: It is no regular file.
        ExecutionError: The system cannot read it.
    """
    from restride.layouts.presets import read_rules  # noqa: PLC0415 - most conversions need none

    with RangeFile(path) as file:
        content = _content(file, _LARGEST_RULES_NBYTES)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"is no UTF-8 text ({error.reason})") from None
    return read_rules(text, where=str(path))


def read_hyperparameters(path: str | PathLike[str]) -> tuple[Mapping[str, Value], ...]:
    """Read the settings of parameter groups: a JSON list of objects, one for each group.

    A list among the values is a tuple in a training: JSON knows no other.

    Raises:
        CorruptError: It is something else, or far too large.
        FormatError: It is no regular file.
        ExecutionError: The system cannot read it.

    Examples:
        A file of two groups::

            [{"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1},
             {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.0}]
    """
    with RangeFile(path) as file:
        content = _content(file, _LARGEST_SETTINGS_NBYTES)
        try:
            listed = parse_typed(content, list[dict[str, object]])
        except FormatError as error:
            error.remedy = "give a JSON list with one object for each parameter group"
            raise
        return tuple(
            {key: _setting(value, f"group {number}: {key!r}") for key, value in group.items()}
            for number, group in enumerate(listed)
        )


def _setting(value: object, where: str) -> Value:
    if isinstance(value, list):
        return tuple(_setting(item, where) for item in value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and isfinite(value):
        return value
    raise CorruptError(f"is {value!r:.80}, where {_ONE_OF_ALL} are expected", where=where)


def _content(file: RangeFile, largest_nbytes: int) -> bytes:
    if file.nbytes > largest_nbytes:
        raise CorruptError(
            f"{file.nbytes} bytes are larger than the limit of {largest_nbytes} bytes"
        )
    return file.read(0, file.nbytes)
