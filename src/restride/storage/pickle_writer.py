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
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from restride.checkpoint.values import Value

__all__ = ["Lowering", "PersistentId", "write_pickle"]

# As many as Python's own pickler puts between two marks.
_BATCH: Final = 1000
_ENCODE: Final = GlobalName("_codecs", "encode")
_ORDERED_DICT: Final = GlobalName("collections", "OrderedDict")
_SIZE: Final = GlobalName("torch", "Size")
_LONGEST_SHORT: Final = 255
_UINT32: Final = struct.Struct("<L").pack
_INT32: Final = struct.Struct("<l").pack
_DEEPEST_SETS: Final = 32
_MOST_ORDERED_NBYTES: Final = 64 << 20
_WITHOUT_SETS: Final = "save it with lists or dicts in their place"
_MOST_SHORT_TUPLE: Final = 3
_SHORT_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
_INTS: Final = frozenset({int})
_SMALL_INTS: Final = tuple(b"K" + bytes((value,)) for value in range(256))


class PersistentId(Frozen):
    """What the reader of the stream is asked to resolve in place of a storage.

    Attributes:
        value: The id.
    """

    value: Value


Lowering: TypeAlias = "Callable[[Storage | StoredTensor], Value | PersistentId]"


def _no_tensors(value: Storage | StoredTensor) -> Value:
    kind = "tensor" if isinstance(value, StoredTensor) else "storage"
    raise UnsupportedError(f"a {kind} cannot be written into a pickle without a file around it")


def _identified(value: Storage | StoredTensor) -> Value:
    """What tells a storage or a tensor from every other, in the order of sets."""
    if isinstance(value, StoredTensor):
        return (value.storage, value.storage_base, value.shape, value.strides)
    return (value.file, value.key, value.dtype.name, value.start_nbytes, value.nbytes)


def write_pickle(value: Value, *, lower: Lowering = _no_tensors) -> bytes:
    r"""Spell a value as a pickle; `read_pickle` of it is an equal value.

    What is in a set is written in an order of its own, so that equal values are spelled alike: the
    order that Python keeps it in is another in every process.

    Args:
        value: The value. Containers may be shared; nested to any depth.
        lower: Says what stands for a tensor or a storage: a call, or a persistent id.

    Raises:
        UnsupportedError: There is a tensor and no `lower`, or a value of a type that no file of
            values has; or sets are nested deeper than 32 levels, or what is in them takes more than
            64 MiB to be put in order: a long text may be in millions of them.

    Cost:
        O(values), each shared one once; no recursion. Sets are sorted, those inside others once a
        level.

    Examples:
        >>> write_pickle([1, True, None])
        b'\x80\x02]q\x00(K\x01\x88Ne.'
    """
    return _Writer(lower).write(value)


class _Then:
    """What is written when everything that stands above it on the stack has been.

    Attributes:
        code: The opcodes.
        made: What they made, which is remembered; None where that was done before, or is of no use.
        same: A value that is written as that, too.
    """

    __slots__ = ("code", "made", "same")

    def __init__(self, code: bytes, made: object = None, same: object = None) -> None:
        self.code = code
        self.made = made
        self.same = same


_MARK: Final = _Then(b"(")
_APPEND: Final = _Then(b"a")
_APPENDS: Final = _Then(b"e")
_SET_ITEM: Final = _Then(b"s")
_SET_ITEMS: Final = _Then(b"u")
_BUILD: Final = _Then(b"b")
_PERSISTENT: Final = _Then(b"Q")


class _Orders:
    """The order of each set, which is found once: one inside n others would be put so 2**n times.

    Attributes:
        known: What is in a set, in order, by its identity.
        left_nbytes: What may still be spelled for that.
    """

    __slots__ = ("known", "left_nbytes")

    def __init__(self) -> None:
        self.known: dict[int, list[Value]] = {}
        self.left_nbytes = _MOST_ORDERED_NBYTES


class _Writer:
    """One stream being written.

    What is left to write is on a stack, the next on top, so that the depth of a value is the length
    of a list.
    """

    def __init__(self, lower: Lowering, *, sets: int = 0, orders: _Orders | None = None) -> None:
        self._lower = lower
        self._sets = sets  # how many this stands in
        self._orders = _Orders() if orders is None else orders
        self._out = bytearray()
        self._protocol = 2
        self._stack: list[object] = []
        self._texts: dict[str, int] = {}
        self._names: dict[GlobalName, int] = {}
        self._shared: dict[int, int] = {}
        self._count = 0
        # Identities count only while what they belong to is alive.
        self._alive: list[object] = []

    def write(self, root: Value) -> bytes:
        out, stack, shared = self._out, self._stack, self._shared
        texts, names = self._texts, self._names
        stack.append(root)
        while stack:
            part = stack.pop()
            # The exact types of almost all parts; the others, and what is derived of these, below.
            if type(part) is _Then:
                out += part.code
                if part.made is not None:
                    self._end(part)
            elif type(part) is str:
                known = texts.get(part)
                out += self._text(part) if known is None else _recall(known)
            elif type(part) is int:
                out += _integer(part)
            elif type(part) is GlobalName:
                known = names.get(part)
                self._name(part) if known is None else out.extend(_recall(known))
            elif (known := shared.get(id(part))) is not None:
                out += _recall(known)
            else:
                self._begin(part)
        return b"\x80" + bytes([self._protocol]) + bytes(out) + b"."

    def _begin(self, part: object) -> None:  # noqa: C901 - one line a type
        """Write a leaf, or put the parts of a composite on the stack."""
        match part:
            case list():
                self._list(part)
            case tuple() if not isinstance(part, SizeValue):
                self._tuple(part)
            case dict():
                self._dict(part)
            case Constructed():
                self._object(part)
            case None:
                self._out += b"N"
            case bool():
                self._out += b"\x88" if part else b"\x89"
            case int():
                self._out += _integer(part)
            case float():
                self._out += b"G" + struct.pack(">d", part)
            case Storage() | StoredTensor():
                lowered = self._lower(part)
                self._stack += (_Then(b"", lowered, part), lowered)
            case PersistentId():
                self._stack += (_PERSISTENT, part.value)
            case _:
                self._called(part)

    def _end(self, then: _Then) -> None:
        """Remember what has been made."""
        if then.same is None:
            self._share(then.made)
        elif id(then.made) in self._shared:
            self._shared[id(then.same)] = self._shared[id(then.made)]
            self._alive.append(then.same)

    # Scalars.

    def _text(self, text: str) -> bytes:
        try:
            content = text.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"a text with half a surrogate pair cannot be written: {text[:80]!r}"
            ) from None
        self._texts[text] = self._count
        return b"X" + _UINT32(len(content)) + content + self._put()

    def _name(self, name: GlobalName) -> None:
        if _is_simple(name.module) and _is_simple(name.name) and "." not in name.name:
            self._out += f"c{name.module}\n{name.name}\n".encode()
            self._share(name)
        else:  # a class inside of a class needs protocol 4
            self._protocol = 4
            self._stack += (_Then(b"\x93", name), name.name, name.module)

    # Containers. Those that can be filled later are remembered before they are.

    def _tuple(self, values: tuple[Value, ...]) -> None:
        if not values:
            self._out += b")"
        elif _INTS.issuperset(map(type, values)):  # most are shapes and strides
            numbers = b"".join(map(_integer, values))  # type: ignore[arg-type]  # just checked
            short = len(values) <= _MOST_SHORT_TUPLE
            self._out += numbers + _SHORT_TUPLES[len(values)] if short else b"(" + numbers + b"t"
            self._share(values)
        elif len(values) <= _MOST_SHORT_TUPLE:
            self._stack += (_Then(_SHORT_TUPLES[len(values)], values), *reversed(values))
        else:
            self._out += b"("
            self._stack += (_Then(b"t", values), *reversed(values))

    def _list(self, values: list[Value]) -> None:
        self._out += b"]"
        self._share(values)
        self._append(values)

    def _dict(self, values: dict[Value, Value]) -> None:
        if not isinstance(values, OrderedDictValue):
            self._out += b"}"
            self._share(values)
            self._set(values.items())
            return
        if values.state is not None:
            self._stack += (_BUILD, values.state)
        self._set(values.items())
        self._stack += (_Then(b")R", values), _ORDERED_DICT)

    def _object(self, value: Constructed) -> None:
        if value.state is not None:
            self._stack += (_BUILD, value.state)
        self._set(value.pairs)
        self._append(value.items)
        if value.kwargs:
            self._protocol = 4
            self._stack += (_Then(b"\x92", value), value.kwargs)
        else:
            self._stack.append(_Then(b"\x81" if value.is_new else b"R", value))
        self._stack += (value.args, value.constructor)

    def _called(self, value: object) -> None:
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
                name, args = _builtin("set"), (self._in_order(value),)
            case frozenset():
                name, args = _builtin("frozenset"), (self._in_order(value),)
            case SizeValue():
                name, args = _SIZE, (tuple(value),)
            case _:
                raise UnsupportedError(f"a value of type {type(value).__name__} cannot be written")
        self._stack += (_Then(b"R", value), args, name)

    def _in_order(self, members: set[Value] | frozenset[Value]) -> list[Value]:
        if len(members) < 2:  # noqa: PLR2004 - in one order only
            return list(members)
        known = self._orders.known.get(id(members))
        if known is None:
            if self._sets == _DEEPEST_SETS:
                raise UnsupportedError(
                    f"sets nested deeper than {_DEEPEST_SETS} levels", remedy=_WITHOUT_SETS
                )
            known = sorted(members, key=self._spelled)
            self._orders.known[id(members)] = known
        return known

    def _spelled(self, member: Value) -> bytes:
        """A member of a set by itself."""
        spelled = _Writer(_identified, sets=self._sets + 1, orders=self._orders).write(member)
        self._orders.left_nbytes -= len(spelled)
        if self._orders.left_nbytes < 0:
            raise UnsupportedError(
                f"sets of more than {_MOST_ORDERED_NBYTES >> 20} MiB that would have to be put in "
                "order",
                remedy=_WITHOUT_SETS,
            )
        return spelled

    def _append(self, values: Sequence[Value]) -> None:
        for start in reversed(range(0, len(values), _BATCH)):
            batch = values[start : start + _BATCH]
            if len(batch) > 1:
                self._stack += (_APPENDS, *reversed(batch), _MARK)
            else:
                self._stack += (_APPEND, *batch)

    def _set(self, pairs: Collection[tuple[Value, Value]]) -> None:
        flat = [part for pair in pairs for part in pair]
        for start in reversed(range(0, len(flat), 2 * _BATCH)):
            batch = flat[start : start + 2 * _BATCH]
            if len(batch) > 2:  # noqa: PLR2004 - one pair
                self._stack += (_SET_ITEMS, *reversed(batch), _MARK)
            else:
                self._stack += (_SET_ITEM, *reversed(batch))

    # The memo.

    def _share(self, value: object) -> None:
        """Remember what has been made, by what it is or, where it can be filled, by identity."""
        if type(value) is GlobalName:
            self._names[value] = self._count
        else:
            self._shared[id(value)] = self._count
            self._alive.append(value)
        self._out += self._put()

    def _put(self) -> bytes:
        index = self._count
        self._count = index + 1
        if index <= _LONGEST_SHORT:
            return b"q" + bytes((index,))
        return b"r" + _UINT32(index)


def _recall(index: int) -> bytes:
    if index <= _LONGEST_SHORT:
        return b"h" + bytes((index,))
    return b"j" + _UINT32(index)


def _builtin(name: str) -> GlobalName:
    # Protocol 2 is older than the module's new name.
    return GlobalName("__builtin__", name)


def _integer(value: int) -> bytes:
    if 0 <= value < len(_SMALL_INTS):
        return _SMALL_INTS[value]
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _INT32(value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(content) <= _LONGEST_SHORT:
        return b"\x8a" + bytes([len(content)]) + content
    return b"\x8b" + struct.pack("<l", len(content)) + content


def _is_simple(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text)
