"""JSON of files that nobody vouches for, of the types that it must have."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from restride.errors import CorruptError, FormatError
from restride.strict_json import parse

__all__ = ["converted", "parse_typed"]

T = TypeVar("T")


def parse_typed(text: bytes, kind: type[T]) -> T:
    """Parse JSON of a given type.

    Args:
        text: The JSON, in UTF-8.
        kind: What it must be, as msgspec understands it.

    Raises:
        CorruptError: The text is something else, or two readers could understand it differently.

    Examples:
        >>> parse_typed(b'{"a": 1, "b": 2}', dict[str, int])
        {'a': 1, 'b': 2}
    """
    try:
        value = parse(text)
    except FormatError as error:
        place = error.where if error.where != "$" else ""
        raise CorruptError(error.problem, where=place) from None
    return converted(value, kind)


def converted(value: object, kind: type[T], where: str = "") -> T:
    """Check that parsed JSON has a given type: no number for a text, no fraction for a size.

    Raises:
        CorruptError: It has another one.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise CorruptError(str(error), where=where) from None
