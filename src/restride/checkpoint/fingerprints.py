"""Files of fingerprints (`restride-fingerprint/2`): JSON that `grep` and `diff` work on."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import FormatError, RestrideError, UnsupportedError
from restride.strict_json import LARGEST_LIST_NBYTES, kind_of, member_of, parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Fingerprints", "fingerprints_from_json", "fingerprints_to_json"]

Fingerprints: TypeAlias = "Mapping[str, Mapping[str, str]]"

_FORMAT: Final = "restride-fingerprint/2"
_FAMILY: Final = re.compile(r"restride-fingerprint/\d+")
_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_MOST_SHOWN: Final = 80


def fingerprints_to_json(fingerprints: Fingerprints) -> dict[str, object]:
    """The content of a file, as plain values."""
    tensors = {name: dict(states) for name, states in fingerprints.items()}
    return {"format": _FORMAT, "tensors": tensors}


def fingerprints_from_json(content: str | bytes, *, where: str) -> Fingerprints:
    """Read the content of a file.

    Args:
        content: Its bytes.
        where: Name of the file, for errors.

    Returns:
        Fingerprints by tensor and state.

    Raises:
        FormatError: It is no file of fingerprints, or a damaged one.
        UnsupportedError: A later version wrote it.

    Examples:
        >>> text = '{"format": "restride-fingerprint/2", "tensors": {"wte": {"weight": "0a"}}}'
        >>> fingerprints_from_json(text, where="f.json")
        Traceback (most recent call last):
        restride.errors.FormatError: f.json: $.tensors.wte.weight: '0a' is not 32 hexadecimal digits
    """
    try:
        return _parsed(parse_object(content, most_nbytes=LARGEST_LIST_NBYTES))
    except RestrideError as error:
        raise error.located(where) from error.__cause__


def _parsed(value: dict[str, object]) -> Fingerprints:
    found = value.get("format")
    if found != _FORMAT:
        if isinstance(found, str) and _FAMILY.fullmatch(found):
            raise UnsupportedError(
                f"the format is {found[:_MOST_SHOWN]!r}, this version reads {_FORMAT!r}",
                where="$.format",
            )
        raise FormatError(
            f"it is no file of fingerprints: those have the format {_FORMAT!r}", where="$.format"
        )
    unknown = next((key for key in value if key not in {"format", "tensors"}), None)
    if unknown is not None:
        raise FormatError("this member is not known", where=member_of("$", unknown))
    result: dict[str, dict[str, str]] = {}
    for name, states in _object(value.get("tensors"), "$.tensors").items():
        where = member_of("$.tensors", name)
        result[name] = {
            state: _digits(digits, member_of(where, state))
            for state, digits in _object(states, where).items()
        }
    return result


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"this should be an object, it is {kind_of(value)}", where=where)
    return value


def _digits(value: object, where: str) -> str:
    if not isinstance(value, str) or not _DIGITS.fullmatch(value):
        shown = json.dumps(value)[:_MOST_SHOWN].replace('"', "'")
        raise FormatError(f"{shown} is not 32 hexadecimal digits", where=where)
    return value
