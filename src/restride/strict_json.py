"""JSON that nobody vouches for: strict, limited, and every refusal says where.

`json` of the standard library parses, since it alone shows repeated keys.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Final, NoReturn

from restride.errors import FormatError, UnsupportedError

__all__ = ["LARGEST_LIST_NBYTES", "kind_of", "member_of", "parse", "parse_object"]

# A map of DeepSeek-V3 on 256 ranks has 51 kB. Python needs some twenty bytes for each byte of JSON.
_MOST_CHARACTERS: Final = 16 * 2**20
LARGEST_LIST_NBYTES: Final = 256 * 2**20
"""What lists every array of a checkpoint: 723 parameters of ZeRO-3 on 128 ranks take 59 MB."""
_MOST_SHOWN: Final = 80


def parse_object(text: str | bytes, *, most_nbytes: int = _MOST_CHARACTERS) -> dict[str, object]:
    """Parse a JSON object, and refuse what two readers could understand differently.

    Args:
        text: The JSON; bytes are UTF-8.
        most_nbytes: How long it may be; 16 MiB by default.

    Raises:
        FormatError: It is no JSON object, or has a key twice, NaN, or half of a surrogate pair.
        UnsupportedError: It is longer.

    Examples:
        >>> parse_object('{"tp": {"a": 1, "a": 2}}')
        Traceback (most recent call last):
        restride.errors.FormatError: $.tp: the key 'a' comes twice
    """
    if len(text) > most_nbytes:
        raise UnsupportedError(
            f"the JSON has {len(text)} bytes, more than the {most_nbytes} that are read"
        )
    value = parse(text)
    if not isinstance(value, dict):
        raise FormatError(f"this should be an object, it is {kind_of(value)}", where="$")
    return value


def kind_of(value: object) -> str:
    """What JSON calls a value that was parsed.

    Examples:
        >>> kind_of(None), kind_of(True), kind_of(1), kind_of("a"), kind_of([])
        ('null', 'true or false', 'a number', 'a text', 'a list')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case _:
            return "an object" if isinstance(value, dict) else "a list"


def parse(text: str | bytes) -> object:
    """Parse JSON of any kind and length, as `parse_object` does.

    Raises:
        FormatError: It is no JSON, or has a key twice, NaN, or half of a surrogate pair.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        else:
            text.encode()
        repeated: list[_Repeated] = []
        value: object = json.loads(
            text,
            object_pairs_hook=partial(_unrepeated, repeated),
            parse_constant=_refuse_constant,
        )
        if "\\u" in text:
            # Escapes can spell half of a surrogate pair, which cannot be written again.
            json.dumps(value, ensure_ascii=False).encode()
        if repeated:
            _refuse_repeated(value, "$")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise FormatError(f"it is no UTF-8 text ({error.reason})") from None
    except RecursionError:
        raise FormatError("the JSON is nested too deep") from None
    except FormatError:
        raise
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg.lower()}"
        raise FormatError(f"it is no JSON ({place if text else 'it is empty'})") from None
    except ValueError as error:
        raise FormatError(f"it is no JSON ({error})") from None
    return value


class _Repeated(dict[str, object]):
    """An object in which a key comes twice; where it stands is known when all is parsed."""


def _unrepeated(repeated: list[_Repeated], pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeated.append(_Repeated(Counter(key for key, _ in pairs)))
    return repeated[-1]


def _refuse_repeated(value: object, where: str) -> None:
    if isinstance(value, _Repeated):
        key = next(key for key, count in value.items() if count != 1)
        raise FormatError(f"the key {key[:_MOST_SHOWN]!r} comes twice", where=where)
    if isinstance(value, dict):
        for key, member in value.items():
            _refuse_repeated(member, member_of(where, key))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            _refuse_repeated(member, f"{where}[{number}]")


def _refuse_constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is no JSON", where="$")


def member_of(where: str, name: str) -> str:
    """The place of one member of an object.

    Examples:
        >>> member_of(member_of("$", "tensors"), "h.0.attn")
        "$.tensors['h.0.attn']"
    """
    return f"{where}.{name}" if name.isidentifier() else f"{where}[{name[:_MOST_SHOWN]!r}]"
