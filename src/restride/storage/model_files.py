"""Two small files that a user has beside a checkpoint: the model's ``config.json``, and rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, FormatError
from restride.layouts.presets import Rules, read_rules
from restride.storage.ranges import RangeFile
from restride.storage.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["find_model_config", "read_model_config", "read_rules_file"]

_CONFIG: Final = "config.json"
# A config lists the labels of a classifier at most; a rule file has some lines a layer.
_LARGEST_CONFIG_NBYTES: Final = 16 << 20
_LARGEST_RULES_NBYTES: Final = 1 << 20


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
    with RangeFile(path) as file:
        return parse_object(_content(file, _LARGEST_CONFIG_NBYTES), dict[str, object])


def read_rules_file(path: str | PathLike[str]) -> Rules:
    """Read a rule file.

    Raises:
        RuleError: It is no TOML, or has no rules in it.
        CorruptError: It is no text, or far too large.
        FormatError: It is no regular file.
        ExecutionError: The system cannot read it.
    """
    with RangeFile(path) as file:
        content = _content(file, _LARGEST_RULES_NBYTES)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"is no UTF-8 text ({error.reason})") from None
    return read_rules(text, where=str(path))


def _content(file: RangeFile, largest_nbytes: int) -> bytes:
    if file.nbytes > largest_nbytes:
        raise CorruptError(
            f"{file.nbytes} bytes are larger than the limit of {largest_nbytes} bytes"
        )
    return file.read(0, file.nbytes)
