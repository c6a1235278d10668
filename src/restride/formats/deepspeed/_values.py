"""What is not a tensor, as plain JSON values: nothing is lost, nothing can run, nothing explodes.

| inert value | JSON |
|---|---|
| numbers, text, lists, dicts with text keys | themselves; tuples become lists |
| a dict with other keys | ``{"pairs": [[key, value], ...]}`` |
| NaN and infinities, integers beyond 64 bits | ``{"float": "nan"}``, ``{"int": "0x..."}`` |
| bytes, sets, complex numbers | ``{"bytes": base64}``, ``{"set": [...]}``, ``{"complex": [...]}`` |
| a name, an object | ``{"global": "module.name"}``, ``{"object": {"constructor": ...}}`` |
| a small tensor (a random state) | ``{"tensor": {"dtype": ..., "shape": ..., "data": base64}}`` |
| a large tensor | the same with its place in the file instead of the data |
"""

from __future__ import annotations

import json
from base64 import b64encode
from math import isfinite, prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._fields import Field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from restride.checkpoint.values import Value
    from restride.storage.ranges import FilePool

__all__ = ["Json", "JsonWriter", "read_bytes"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# A pickle shares what it refers to twice, JSON does not: without a bound, a file of a few hundred
# bytes unfolds into terabytes.
_MOST_NODES: Final = 1 << 20
_CHARACTERS_PER_NODE: Final = 32
_DEEPEST: Final = 100
_MOST_LEFT_BEHIND: Final = 8
_LARGEST_EMBEDDED_NBYTES: Final = 64 << 10
_INT64: Final = range(-(1 << 63), 1 << 63)


class JsonWriter:
    """Turns the inert values of one file into JSON values, within a bound.

    Args:
        read: Reads the bytes of a small tensor.
        skipped_keys: Keys of dicts that are left out, at any depth.

    Attributes:
        left_behind: Paths of what was too large to carry.
    """

    def __init__(
        self,
        read: Callable[[StoredTensor], bytes],
        *,
        skipped_keys: frozenset[str] = frozenset(),
    ) -> None:
        self._read = read
        self._skipped_keys = skipped_keys
        self._left = _MOST_NODES
        self.left_behind: list[str] = []

    def of(self, field: Field) -> Json:
        """Return the JSON form of a value.

        Raises:
            CorruptError: It is nested deeper, or unfolds into more values, than any checkpoint
                needs.
        """
        return self._of(field.value, field.where, 0)

    def entries(self, fields: Mapping[str, Field]) -> dict[str, Json]:
        """Return the JSON form of each value; the few that have no room are left behind.

        A script may save what it likes with a model, such as the order of all its samples.

        Raises:
            CorruptError: As for `of`, or many values have no room.
        """
        written: dict[str, Json] = {}
        tries = _MOST_LEFT_BEHIND
        for key, field in fields.items():
            room, known = self._left, len(self.left_behind)
            try:
                written[key] = self.of(field)
            except CorruptError:
                if self._left >= 0 or not tries:
                    raise
                tries -= 1
                self._left = room
                self.left_behind[known:] = [field.where]
        return written

    def _of(self, value: Value, where: str, depth: int) -> Json:
        self._charge(1, where)
        if depth > _DEEPEST:
            raise CorruptError(f"is nested deeper than {_DEEPEST} levels", where=where)
        if isinstance(value, (list, tuple, dict)) and len(value) > self._left:
            self._charge(len(value), where)  # there is no room for it: do not begin
        match value:
            case list() | tuple():
                return [self._of(v, f"{where}[{n}]", depth + 1) for n, v in enumerate(value)]
            case set() | frozenset():
                members = [self._of(v, where, depth + 1) for v in value]
                return {"set": sorted(members, key=json.dumps)}
            case dict():
                return self._dict(list(value.items()), where, depth)
            case Constructed():
                return self._object(value, where, depth)
            case _:
                return self._leaf(value, where)

    def _leaf(self, value: Value, where: str) -> Json:
        leaf: Json = None
        match value:
            case bool():
                leaf = value
            case int():
                leaf = value if value in _INT64 else {"int": hex(value)}
            case float():
                leaf = value if isfinite(value) else {"float": repr(value)}
            case complex():
                leaf = {"complex": [repr(value.real), repr(value.imag)]}
            case str():
                self._charge(len(value) // _CHARACTERS_PER_NODE, where)
                # A lone surrogate is legal in a pickle and in no UTF-8 file.
                leaf = value.encode("utf-8", "backslashreplace").decode()
            case bytes() | bytearray():
                self._charge(len(value) // _CHARACTERS_PER_NODE, where)
                leaf = {"bytes": b64encode(bytes(value)).decode()}
            case StoredTensor():
                leaf = self._tensor(value, where)
            case Storage():
                leaf = {"storage": {"dtype": value.dtype.name, "nbytes": value.nbytes}}
            case GlobalName():
                leaf = {"global": str(value)}
            case _:  # None
                pass
        return leaf

    def _object(self, value: Constructed, where: str, depth: int) -> Json:
        field = Field(value, where)
        if field.is_mapping:
            return self._dict(value.pairs, where, depth)
        if field.is_sequence:
            return [self._of(v.value, v.where, depth + 1) for v in field.elements()]
        parts: dict[str, Value] = {
            "constructor": value.constructor,
            "args": value.args,
            "kwargs": value.kwargs,
            "state": value.state,
            "items": value.items,
            "pairs": [[key, entry] for key, entry in value.pairs],
        }
        return {
            "object": {
                name: self._of(part, f"{where}.{name}", depth + 1)
                for name, part in parts.items()
                if part not in (None, (), [], {})
            }
        }

    def _dict(self, pairs: list[tuple[Value, Value]], where: str, depth: int) -> Json:
        if all(type(key) is str for key, _ in pairs):
            return {
                str(self._of(key, where, depth + 1)): self._of(v, f"{where}[{key!r}]", depth + 1)
                for key, v in pairs
                if key not in self._skipped_keys
            }
        return {
            "pairs": [
                [self._of(key, where, depth + 1), self._of(v, where, depth + 1)] for key, v in pairs
            ]
        }

    def _tensor(self, tensor: StoredTensor, where: str) -> Json:
        itemsize = tensor.storage.dtype.itemsize_nbytes
        nbytes = prod(tensor.shape) * itemsize
        entry: dict[str, Json] = {
            "dtype": tensor.storage.dtype.name,
            "shape": list(tensor.shape),
        }
        if nbytes <= _LARGEST_EMBEDDED_NBYTES and tensor.is_dense:
            self._charge(nbytes // _CHARACTERS_PER_NODE, where)
            entry["data"] = b64encode(self._read(tensor) if nbytes else b"").decode()
        else:
            self.left_behind.append(where)
            entry["strides"] = list(tensor.strides)
            entry["start_nbytes"] = tensor.start_nbytes
        return {"tensor": entry}

    def _charge(self, nodes: int, where: str) -> None:
        self._left -= nodes
        if self._left < 0:
            raise CorruptError(
                f"the values of the file unfold into more than {_MOST_NODES} items", where=where
            )


def read_bytes(pool: FilePool, tensor: StoredTensor) -> bytes:
    """Read all bytes of a tensor that is stored in one piece: a small one, for a `JsonWriter`.

    Raises:
        CorruptError: The file ends before.
        ExecutionError: The system cannot read it.
    """
    buffer = bytearray(prod(tensor.shape) * tensor.storage.dtype.itemsize_nbytes)
    pool.read_exact(tensor.storage.file, tensor.start_nbytes, buffer)
    return bytes(buffer)
