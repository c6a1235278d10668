"""Write inert values as a pickle: the way back of `pickle_vm`, and as little of an actor.

What was read is spelled again as it would have been built: a name by its name, an object by its
call, its items and its state. So a file can be written that holds an object of a framework's class
without the class, the framework or Python's own pickle.

The stream is of protocol 2, which is what ``torch.save`` writes and ``torch.load`` expects; a value
that only protocol 4 can spell makes it one of protocol 4. Sharing is kept: a container that is
referred to twice is written once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    Storage,
    StoredTensor,
)
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from restride.checkpoint.values import Value

__all__ = ["Lowering", "PersistentId", "write_pickle"]

# As many as Python's own pickler puts between two marks.
_BATCH: Final = 1000
_ENCODE: Final = GlobalName("_codecs", "encode")
_ORDERED_DICT: Final = GlobalName("collections", "OrderedDict")
_SIZE: Final = GlobalName("torch", "Size")
_LONGEST_SHORT: Final = 255
_MOST_SHORT_TUPLE: Final = 3


@dataclass(frozen=True, slots=True)
class PersistentId:
    """What the reader of the stream is asked to resolve in place of a storage.

    Attributes:
        value: The id.
    """

    value: Value


_Part: TypeAlias = "Value | PersistentId"
Lowering: TypeAlias = "Callable[[Storage | StoredTensor], Value | PersistentId]"


def _no_tensors(value: Storage | StoredTensor) -> Value:
    kind = "tensor" if isinstance(value, StoredTensor) else "storage"
    raise UnsupportedError(f"a {kind} cannot be written into a pickle without a file around it")


def write_pickle(value: Value, *, lower: Lowering = _no_tensors) -> bytes:
    r"""Spell a value as a pickle; `read_pickle` of it is an equal value.

    Args:
        value: The value. Containers may be shared; nested to any depth.
        lower: Says what stands for a tensor or a storage: a call, or a persistent id.

    Raises:
        UnsupportedError: There is a tensor and no `lower`, or a value of a type that no file of
            values has.

    Cost:
        O(values), each shared one once; no recursion.

    Examples:
        >>> write_pickle([1, True, None])
        b'\x80\x02]q\x00(K\x01\x88Ne.'
    """
    return _Writer(lower).write(value)


class _Writer:
    """One stream being written.

    A composite value is a generator that writes its opcodes and yields its parts in between, so
    that the depth of a value is the length of a list.
    """

    def __init__(self, lower: Lowering) -> None:
        self._lower = lower
        self._out = bytearray()
        self._protocol = 2
        self._shared: dict[int, int] = {}
        self._named: dict[tuple[type, object], int] = {}
        self._count = 0
        # Identities count only while what they belong to is alive.
        self._alive: list[object] = []

    def write(self, root: Value) -> bytes:
        open_parts: list[Iterator[_Part]] = [iter((root,))]
        while open_parts:
            for part in open_parts[-1]:
                inner = self._begin(part)
                if inner is not None:
                    open_parts.append(inner)
                    break
            else:
                open_parts.pop()
        return b"\x80" + bytes([self._protocol]) + bytes(self._out) + b"."

    def _begin(self, part: _Part) -> Iterator[_Part] | None:
        """Write a leaf, or return the parts of a composite."""
        if id(part) in self._shared:
            self._recall(self._shared[id(part)])
            return None
        match part:
            case None:
                self._out += b"N"
            case bool():
                self._out += b"\x88" if part else b"\x89"
            case int():
                self._out += _integer(part)
            case float():
                self._out += b"G" + struct.pack(">d", part)
            case str():
                self._text(part)
            case GlobalName():
                return self._name(part)
            case _:
                return self._composite(part)
        return None

    def _composite(self, part: _Part) -> Iterator[_Part]:
        match part:
            case tuple() if not isinstance(part, SizeValue):
                parts = self._tuple(part)
            case list():
                parts = self._list(part)
            case dict():
                parts = self._dict(part)
            case Constructed():
                parts = self._object(part)
            case Storage() | StoredTensor():
                parts = self._lowered(part)
            case PersistentId():
                parts = self._persistent(part)
            case _:
                parts = self._called(part)
        return parts

    # Scalars.

    def _text(self, text: str) -> None:
        known = self._named.get((str, text))
        if known is not None:
            self._recall(known)
            return
        try:
            content = text.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"a text with half a surrogate pair cannot be written: {text[:80]!r}"
            ) from None
        self._out += b"X" + struct.pack("<L", len(content)) + content
        self._named[str, text] = self._remember()

    def _name(self, name: GlobalName) -> Iterator[_Part]:
        known = self._named.get((GlobalName, name))
        if known is not None:
            self._recall(known)
            return
        if _is_simple(name.module) and _is_simple(name.name) and "." not in name.name:
            self._out += f"c{name.module}\n{name.name}\n".encode()
        else:  # a class inside of a class needs protocol 4
            self._protocol = 4
            yield name.module
            yield name.name
            self._out += b"\x93"
        self._named[GlobalName, name] = self._remember()

    # Containers. Those that can be filled later are remembered before they are.

    def _tuple(self, values: tuple[Value, ...]) -> Iterator[_Part]:
        if not values:
            self._out += b")"
        elif len(values) <= _MOST_SHORT_TUPLE:
            yield from values
            self._out += b"\x85\x86\x87"[len(values) - 1 : len(values)]
            self._share(values)
        else:
            self._out += b"("
            yield from values
            self._out += b"t"
            self._share(values)

    def _list(self, values: list[Value]) -> Iterator[_Part]:
        self._out += b"]"
        self._share(values)
        yield from self._appended(values)

    def _dict(self, values: dict[Value, Value]) -> Iterator[_Part]:
        if isinstance(values, OrderedDictValue):
            yield _ORDERED_DICT
            self._out += b")R"
        else:
            self._out += b"}"
        self._share(values)
        yield from self._set(values.items())
        if isinstance(values, OrderedDictValue) and values.state is not None:
            yield values.state
            self._out += b"b"

    def _object(self, value: Constructed) -> Iterator[_Part]:
        yield value.constructor
        yield value.args
        if value.kwargs:
            self._protocol = 4
            yield value.kwargs
            self._out += b"\x92"
        else:
            self._out += b"\x81" if value.is_new else b"R"
        self._share(value)
        yield from self._appended(value.items)
        yield from self._set(value.pairs)
        if value.state is not None:
            yield value.state
            self._out += b"b"

    def _called(self, value: object) -> Iterator[_Part]:
        """What protocol 2 has no opcode for is the result of a call."""
        args: tuple[Value, ...]
        match value:
            case bytes():
                name, args = _ENCODE, (value.decode("latin-1"), "latin1")
            case bytearray():
                name, args = _builtin("bytearray"), (value.decode("latin-1"), "latin-1")
            case complex():
                name, args = _builtin("complex"), (value.real, value.imag)
            case set():
                name, args = _builtin("set"), (list(value),)
            case frozenset():
                name, args = _builtin("frozenset"), (list(value),)
            case SizeValue():
                name, args = _SIZE, (tuple(value),)
            case _:
                raise UnsupportedError(f"a value of type {type(value).__name__} cannot be written")
        yield name
        yield args
        self._out += b"R"
        self._share(value)

    def _lowered(self, value: Storage | StoredTensor) -> Iterator[_Part]:
        lowered = self._lower(value)
        yield lowered
        known = self._shared.get(id(lowered))
        if known is not None:
            self._shared[id(value)] = known
            self._alive.append(value)

    def _persistent(self, value: PersistentId) -> Iterator[_Part]:
        yield value.value
        self._out += b"Q"

    def _appended(self, values: Iterable[Value]) -> Iterator[_Part]:
        rest = iter(values)
        while batch := list(islice(rest, _BATCH)):
            if len(batch) > 1:
                self._out += b"("
            yield from batch
            self._out += b"e" if len(batch) > 1 else b"a"

    def _set(self, pairs: Iterable[tuple[Value, Value]]) -> Iterator[_Part]:
        rest = iter(pairs)
        while batch := list(islice(rest, _BATCH)):
            if len(batch) > 1:
                self._out += b"("
            for key, value in batch:
                yield key
                yield value
            self._out += b"u" if len(batch) > 1 else b"s"

    # The memo.

    def _share(self, value: object) -> None:
        self._shared[id(value)] = self._remember()
        self._alive.append(value)

    def _remember(self) -> int:
        index = self._count
        self._count += 1
        self._out += _numbered(b"q", b"r", index)
        return index

    def _recall(self, index: int) -> None:
        self._out += _numbered(b"h", b"j", index)


def _builtin(name: str) -> GlobalName:
    # Protocol 2 is older than the module's new name.
    return GlobalName("__builtin__", name)


def _numbered(short: bytes, long: bytes, index: int) -> bytes:
    if index <= _LONGEST_SHORT:
        return short + bytes([index])
    return long + struct.pack("<L", index)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<l", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(content) <= _LONGEST_SHORT:
        return b"\x8a" + bytes([len(content)]) + content
    return b"\x8b" + struct.pack("<l", len(content)) + content


def _is_simple(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text)
