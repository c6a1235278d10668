"""Files that say the same: what one of them holds, with the storages of another in their places.

The ranks of a run save the same structure. Byte for byte it is the same pickle in most of their
files, for hundreds of ranks; only where the storages stand differs. So it is read once, and what
refers to no storage is one value for all of them.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.checkpoint.values import Constructed, OrderedDictValue, Storage, StoredTensor
from restride.errors import RestrideError
from restride.storage.holders import holders_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from restride.checkpoint.values import Value
    from restride.storage.torch_values import StorageTable

__all__ = ["Twin", "Twins"]


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
            self._holders = holders_in(self._value)
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
