"""JSON of files that nobody vouches for."""

from __future__ import annotations

import json
from typing import Final, NoReturn, TypeVar

import msgspec

from restride.errors import CorruptError

__all__ = ["converted", "parse_object"]

T = TypeVar("T")
_SHOWN_LEN: Final = 80


def parse_object(text: bytes, kind: type[T]) -> T:
    """Parse a JSON object of a given type.

    Two readers may disagree on a key that comes twice, on NaN, and on text that is no Unicode; none
    of them is accepted.

    Args:
        text: The JSON, in UTF-8.
        kind: What it must be, as msgspec understands it.

    Raises:
        CorruptError: The text is something else.

    Examples:
        >>> parse_object(b'{"a": 1, "b": 2}', dict[str, int])
        {'a': 1, 'b': 2}
    """
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if b"\\u" in text:
            # Escapes can spell half of a surrogate pair, which no other text could hold.
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise CorruptError(f"the JSON is no UTF-8 ({error.reason})") from None
    except RecursionError:
        raise CorruptError("the JSON is nested too deep") from None
    except ValueError as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"the JSON is damaged ({error})") from None
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptError(f"the JSON has the key {key[:_SHOWN_LEN]!r} twice")
            seen.add(key)
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise CorruptError(f"the JSON has {name}, which is no JSON")
