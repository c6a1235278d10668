"""Files that say the same: what one of them holds, with the storages of another in their places.

The ranks of a run save the same structure. Byte for byte it is the same pickle in most of their
files, for hundreds of ranks; only where the storages stand differs. So it is read once, and what
refers to no storage is one value for all of them.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    Storage,
    StoredTensor,
)
from restride.errors import RestrideError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from restride.checkpoint.values import Value
    from restride.storage.torch_values import StorageTable

__all__ = ["Twin", "Twins"]

# What refers to no storage, by its type alone.
_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, bytearray, type(None), GlobalName, SizeValue}
)
# Headers of real files are nested some ten levels deep.
_DEEPEST: Final = 50


class Twins:
    """Values of files that were read, by their pickles."""

    def __init__(self) -> None:
        self._known: dict[bytes, Twin] = {}

    def value(self, stream: bytes, table: StorageTable, read: Callable[[], Value]) -> Value:
        """What a file holds.

        Args:
            stream: Its pickle.
            table: Its storages. Those that the value refers to are put into it.
            read: Reads the pickle, where no other file has the same. So is one that is nested
                strangely deep, and one of a file that does not have the storages of the other: what
                is wrong is said there.
        """
        digest = blake2b(stream, digest_size=32).digest()
        known = self._known.get(digest)
        if known is not None:
            with suppress(RestrideError):
                return known.moved_to(table)
        value = read()
        self._known[digest] = Twin(value, table.storages)
        return value


class Twin:
    """What one file holds.

    Args:
        value: Its value.
        storages: The storages that the value refers to, by key.
    """

    def __init__(self, value: Value, storages: Mapping[str, Storage]) -> None:
        self._value = value
        self._storages = storages
        self._holders: Collection[int] | None = None

    def moved_to(self, table: StorageTable) -> Value:
        """The value, with the storages of another file, which are put into its table.

        Raises:
            CorruptError: It does not have them.
            UnsupportedError: The value is nested too deep for this.
        """
        places = {
            key: table.storage(storage.dtype, key, storage.nbytes // storage.dtype.itemsize_nbytes)
            for key, storage in self._storages.items()
        }
        if self._holders is None:
            self._holders = _holders(self._value)
        return _Moving(self._holders, places).moved(self._value)


class _Moving:
    def __init__(self, holders: Collection[int], places: Mapping[str, Storage]) -> None:
        self._holders = holders
        self._places = places
        self._made: dict[int, Value] = {}

    def moved(self, value: Value) -> Value:
        """The same value where it refers to no storage; what is shared stays shared."""
        if not isinstance(value, (Storage, StoredTensor)) and id(value) not in self._holders:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Value) -> Value:
        moved = self.moved
        copy: Value
        match value:
            case StoredTensor():
                copy = replace(value, storage=self._place(value.storage))
            case Storage():
                copy = self._place(value)
            case OrderedDictValue():
                copy = OrderedDictValue()
                copy.update((moved(key), moved(part)) for key, part in value.items())
                copy.state = moved(value.state)
            case dict():
                copy = {moved(key): moved(part) for key, part in value.items()}
            case list():
                copy = [moved(part) for part in value]
            case tuple():
                copy = tuple([moved(part) for part in value])
            case set():
                copy = {moved(part) for part in value}
            case frozenset():
                copy = frozenset([moved(part) for part in value])
            case Constructed():
                names = ("constructor", "args", "kwargs", "state", "items")
                parts = {name: moved(getattr(value, name)) for name in names}
                pairs = [(moved(key), moved(part)) for key, part in value.pairs]
                copy = replace(value, pairs=pairs, **parts)
            case _:
                copy = value
        return copy

    def _place(self, storage: Storage) -> Storage:
        """Where it stands now; a tensor may read it as another type than its storage says."""
        place = self._places[storage.key]
        return place if place.dtype == storage.dtype else replace(place, dtype=storage.dtype)


def _holders(root: Value) -> Collection[int]:
    """Identities of the containers that refer to a storage, at whatever depth; there is no cycle.

    Raises:
        UnsupportedError: They are nested so deep that a recursion may not follow them.
    """
    known: dict[int, int] = {}

    def levels(value: Value, depth: int) -> int:
        """How far down its storages go, by whatever way; 0 where it refers to none."""
        if isinstance(value, (Storage, StoredTensor)):
            return 1
        if id(value) not in known:
            if depth > _DEEPEST:
                raise _too_deep()
            parts = _parts(value)
            inner = () if _PLAIN.issuperset(map(type, parts)) else parts
            # Each of them is looked into, also behind one that does.
            found = [levels(part, depth + 1) for part in inner if type(part) not in _PLAIN]
            deepest = max(found, default=0)
            # What is shared may have been met first where it is not as deep as elsewhere.
            if deepest > _DEEPEST:
                raise _too_deep()
            known[id(value)] = deepest + 1 if deepest else 0
        return known[id(value)]

    levels(root, 0)
    return {number for number, deepest in known.items() if deepest}


def _too_deep() -> UnsupportedError:
    return UnsupportedError(f"values are nested deeper than {_DEEPEST} levels")


def _parts(value: Value) -> Collection[Value]:
    match value:
        case OrderedDictValue():
            return [*value, *value.values(), value.state]
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set() | frozenset():
            return value
        case Constructed():
            flat = [part for pair in value.pairs for part in pair]
            return [value.constructor, value.args, value.kwargs, value.state, value.items, *flat]
        case _:
            return ()
