"""Decisions that are read off the bytes of an input, and values that are changed by them.

Targets of `fuzz.py` build structures (a checkpoint with some lies, two layouts) by asking a
`ByteRandom`. A fuzzer that changes bytes changes decisions, so coverage guides these targets too.
"""

from __future__ import annotations

import zlib
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    StoredTensor,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ByteRandom", "changed", "changed_bytes", "parts_of", "renamed"]

_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 64, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1),
    *((1 << 62) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) + 1, 10**30, 1 << 1000),
)
_FLOATS = (0.0, -0.0, 1.5, -1e300, 1e-320, float("inf"), float("nan"), 2.0**63)
_TEXTS = ("", "a", "weight", "../x", "/", "\0", "\ud800", "é" * 300, "1", "-1", "None", "**", "(")
_DTYPES = ("float32", "bfloat16", "float16", "int64", "uint8", "bool", "float64")


class ByteRandom(Random):
    """A source of decisions that takes them from bytes, and from a seed when these are used up."""

    def __init__(self, content: bytes) -> None:
        super().__init__(0)
        self._content = content
        self._at = 0
        self._rest = Random(zlib.crc32(content))  # noqa: S311 - no secret

    def getrandbits(self, k: int, /) -> int:
        nbytes = -(-k // 8)
        chunk = self._content[self._at : self._at + nbytes]
        self._at += nbytes
        if len(chunk) < nbytes:
            return self._rest.getrandbits(k)
        return int.from_bytes(chunk, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(24) / (1 << 24)


def changed(random: Random, root: Any, *, is_json: bool = False) -> Any:
    """A copy of a value with one change somewhere in it; what did not change is shared."""
    return _changed(random, root, root, is_json=is_json)


def changed_bytes(random: Random, content: bytes) -> bytes:
    """Bytes with one change somewhere."""
    at = random.randrange(len(content) + 1)
    before, after = content[:at], content[at:]
    length = random.choice((1, 1, 4, 8, 60))
    return random.choice(
        (
            before + bytes([random.randrange(256)]) + after[1:],
            before + after[length:],
            before + after[:length] + after,
            before + random.choice((b"\0", b"\xff", b"0", b"9", b"{", b'"')) * length + after,
            before,
        )
    )


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A copy of a value in which some texts are others, as keys and as values."""
    match value:
        case str():
            return names.get(value, value)
        case dict():
            return _dict_like(
                value, [(renamed(k, names), renamed(v, names)) for k, v in value.items()]
            )
        case Constructed():
            parts = {"args": value.args, "state": value.state, "items": value.items}
            pairs = [(renamed(k, names), renamed(v, names)) for k, v in value.pairs]
            return replace(value, **{k: renamed(v, names) for k, v in parts.items()}, pairs=pairs)
        case list():
            return [renamed(part, names) for part in value]
        case tuple() if not isinstance(value, SizeValue):
            return tuple(renamed(part, names) for part in value)
        case _:
            return value


def _changed(random: Random, value: Any, root: Any, *, is_json: bool) -> Any:
    parts = parts_of(value)
    if parts and random.randrange(8):
        place = random.randrange(len(parts))
        return _with_part(value, place, _changed(random, parts[place], root, is_json=is_json))
    kind = random.randrange(6)
    if kind == 0:
        return _other(random, is_json=is_json)
    if kind == 1:
        return _some_part(random, root)
    return _near(random, value, root, is_json=is_json)


def parts_of(value: Any) -> list[Any]:
    """What a value is made of, for those whose parts can be changed one by one."""
    match value:
        case dict():
            return list(value.values())
        case list() | tuple():
            return list(value)
        case Constructed():
            return [value.args, value.state, value.items, value.pairs]
        case _:
            return []


def _with_part(value: Any, place: int, part: Any) -> Any:
    match value:
        case dict():
            return _dict_like(value, [(k, part if n == place else v) for n, (k, v) in _at(value)])
        case list():
            return [*value[:place], part, *value[place + 1 :]]
        case tuple():
            return (*value[:place], part, *value[place + 1 :])
        case _:
            name = ("args", "state", "items", "pairs")[place]
            kind = {"args": tuple, "items": list, "pairs": list}.get(name)
            return value if kind and not isinstance(part, kind) else replace(value, **{name: part})


def _at(value: dict[Any, Any]) -> list[tuple[int, tuple[Any, Any]]]:
    return list(enumerate(value.items()))


def _dict_like(value: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made: dict[Any, Any] = OrderedDictValue() if isinstance(value, OrderedDictValue) else {}
    made.update(pairs)
    if isinstance(made, OrderedDictValue) and isinstance(value, OrderedDictValue):
        made.state = value.state
    return made


def _some_part(random: Random, root: Any) -> Any:
    value = root
    while (parts := parts_of(value)) and random.randrange(5):
        value = random.choice(parts)
    return value


def _other(random: Random, *, is_json: bool) -> Any:
    """A value of another type, or at the edge of one."""
    plain: tuple[Any, ...] = (
        None,
        True,
        False,
        [],
        {},
        [[]],
        [0],
        {"": 0},
        {"a": {}},
        random.choice(_TEXTS),
    )
    inert = ((), (1, 2), b"\0", GlobalName("builtins", "eval"), OrderedDictValue(), {1: 2}, {-1: 0})
    kinds = (random.choice(_NUMBERS), random.choice(_FLOATS), random.choice(plain))
    return random.choice(kinds if is_json else (*kinds, random.choice(inert)))


def _near(  # noqa: C901, PLR0911 - one line a type
    random: Random, value: Any, root: Any, *, is_json: bool
) -> Any:
    """A value of the same type that is a little wrong."""
    match value:
        case bool():
            return not value
        case int():
            near = (value + 1, value - 1, -value, 2 * value, value // 2, random.choice(_NUMBERS))
            return random.choice(near)
        case float():
            return random.choice((*_FLOATS, -value, value * 2, int(abs(value) < 9)))
        case str():
            return _near_text(random, value, root)
        case dict():
            return _near_dict(random, value, root, is_json=is_json)
        case list():
            return _near_list(random, value, root)
        case tuple():
            return tuple(_near_list(random, list(value), root))
        case StoredTensor():
            return _near_tensor(random, value)
        case GlobalName():
            return replace(value, **{random.choice(("module", "name")): random.choice(_TEXTS[1:])})
        case Constructed():
            state = random.choice((None, value.state, _some_part(random, root)))
            return replace(value, state=state, is_new=bool(random.randrange(2)))
        case _:
            return _other(random, is_json=is_json)


def _near_text(random: Random, value: str, root: Any) -> str:
    other = _some_part(random, root)
    names = [key for key in other if isinstance(key, str)] if isinstance(other, dict) else []
    return random.choice((random.choice(_TEXTS), value + "x", value[:-1], *names, *names))


def _near_dict(random: Random, value: dict[Any, Any], root: Any, *, is_json: bool) -> Any:
    pairs = list(value.items())
    if not pairs:
        return _dict_like(value, [(random.choice(_TEXTS), _other(random, is_json=is_json))])
    one, two = random.randrange(len(pairs)), random.randrange(len(pairs))
    key, entry = pairs[one]
    kind = random.randrange(7)
    if kind == 0:
        del pairs[one]
    elif kind == 1:
        pairs[one] = (_near_text(random, key, root) if isinstance(key, str) else key + 1, entry)
    elif kind == 2:
        pairs[one], pairs[two] = (key, pairs[two][1]), (pairs[two][0], entry)
    elif kind == 3:
        pairs[one], pairs[two] = pairs[two], pairs[one]
    elif kind == 4:
        pairs.append((f"{key}x", entry))
    elif kind == 5:
        texts = isinstance(key, str)
        pairs.append((random.choice(_TEXTS) if texts or is_json else random.choice(_NUMBERS), 0))
    else:
        pairs = pairs[:one]
    return _dict_like(value, pairs)


def _near_list(random: Random, value: list[Any], root: Any) -> list[Any]:
    if not value:
        return [_some_part(random, root)]
    one, two = random.randrange(len(value)), random.randrange(len(value))
    return random.choice(
        (
            [*value[:one], *value[one + 1 :]],
            [*value[:one], value[one], *value[one:]],
            [value[{one: two, two: one}.get(place, place)] for place in range(len(value))],
            value[::-1],
            value[:one],
            value * random.choice((2, 40)) if len(value) < 1000 else [],
        )
    )


def _near_tensor(random: Random, value: StoredTensor) -> StoredTensor:
    kind = random.randrange(5)
    if kind == 0:
        dtype = DTYPES[random.choice(_DTYPES)]
        return replace(value, storage=replace(value.storage, dtype=dtype))
    if kind == 1:
        return replace(value, storage_base=random.choice((0, 1, *_NUMBERS)))
    if kind == 2:
        shape = tuple(_near_list(random, list(value.shape), 1))
        return replace(value, shape=shape, strides=(*value.strides, 1, 1, 1)[: len(shape)])
    if kind == 3 and value.shape:
        place = random.randrange(len(value.shape))
        size = value.shape[place]
        size = random.choice((0, 1, max(0, size - 1), size + 1, random.choice(_NUMBERS)))
        return replace(value, shape=_with_part(value.shape, place, size))
    return replace(value, strides=tuple(_near_list(random, list(value.strides) or [1], 1)))
