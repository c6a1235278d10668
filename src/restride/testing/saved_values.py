"""Save values as torch files, and change what a real file says, without torch.

Values are inert ones as the reader gives them, plus `Array` for new tensors. So a test can open a
file of a real framework, tell one lie in it, and save it again.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue, StoredTensor
from restride.frozen import Frozen
from restride.storage.torch_zip import open_torch_zip
from restride.testing import opcodes
from restride.testing.torch_files import torch_file

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Array", "edit_file", "save_file"]

_STORAGES: Final = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "uint8": "Byte",
    "bool": "Bool",
}


class Array(Frozen):
    """A tensor to be saved.

    Attributes:
        dtype: Name of its element type.
        shape: Sizes.
        content: Bytes of its storage. Arrays with the very same object share the storage.
        strides: Strides in elements, by default dense.
        base: Element of the storage where it starts.
    """

    dtype: str
    shape: tuple[int, ...]
    content: bytes
    strides: tuple[int, ...] | None = None
    base: int = 0


def save_file(path: Path, value: Any) -> None:
    """Save a value as a file of ``torch.save``."""
    writer = _Writer()
    pickle = opcodes.stream(writer.spell(value))
    path.write_bytes(torch_file(pickle, writer.storages))


def edit_file(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file says: `change` gets its value, edits it, and may return another one."""
    value: Any = open_torch_zip(path).value
    changed = change(value)
    save_file(path, value if changed is None else changed)


class _Writer:
    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}
        self._known: dict[object, str] = {}
        self._arrays: dict[int, tuple[bytes, str]] = {}  # by identity; the object is kept alive

    def spell(self, value: Any) -> bytes:  # noqa: C901, PLR0911, PLR0912 - one line a type
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return opcodes.integer(value)
            case float():
                return b"G" + struct.pack(">d", value)
            case str():
                return opcodes.text(value)
            case bytes():
                return b"B" + struct.pack("<I", len(value)) + value
            case tuple():
                return opcodes.tuple_of(*map(self.spell, value))
            case list():
                return opcodes.listed(*map(self.spell, value))
            case OrderedDictValue():
                return opcodes.call("collections.OrderedDict") + self._items(value)
            case dict():
                return b"}" + self._items(value)
            case GlobalName():
                return opcodes.name(f"{value.module}.{value.name}")
            case Constructed():
                return self._object(value)
            case StoredTensor():
                return self._stored(value)
            case Array():
                return self._array(value)
            case _:
                raise TypeError(f"{type(value).__name__} cannot be saved")

    def _items(self, value: dict[Any, Any]) -> bytes:
        pairs = b"".join(self.spell(key) + self.spell(entry) for key, entry in value.items())
        return b"(" + pairs + b"u"

    def _object(self, value: Constructed) -> bytes:
        made = self.spell(value.constructor) + self.spell(value.args)
        made += b"\x81" if value.is_new else b"R"
        if value.items:
            made += b"(" + b"".join(map(self.spell, value.items)) + b"e"
        if value.pairs:
            made += (
                b"(" + b"".join(self.spell(part) for pair in value.pairs for part in pair) + b"u"
            )
        return made if value.state is None else made + self.spell(value.state) + b"b"

    def _stored(self, tensor: StoredTensor) -> bytes:
        place = tensor.storage
        key = self._known.get((place.file, place.key))
        if key is None:
            with Path(place.file).open("rb") as file:
                file.seek(place.start_nbytes)
                key = self._keep(file.read(place.nbytes))
            self._known[place.file, place.key] = key
        numel = place.nbytes // place.dtype.itemsize_nbytes
        kind = f"torch.{_STORAGES[place.dtype.name]}Storage"
        return opcodes.tensor(
            opcodes.storage(key, numel, kind),
            tensor.shape,
            tensor.strides,
            base=tensor.storage_base,
        )

    def _array(self, array: Array) -> bytes:
        itemsize = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
        kind = _STORAGES[array.dtype]
        numel = len(array.content) // itemsize.get(kind, 1)
        strides = array.strides or tuple(
            prod(array.shape[dim + 1 :]) for dim in range(len(array.shape))
        )
        known = self._arrays.get(id(array.content))
        if known is None:
            known = self._arrays[id(array.content)] = array.content, self._keep(array.content)
        place = opcodes.storage(known[1], numel, f"torch.{kind}Storage")
        return opcodes.tensor(place, array.shape, strides, base=array.base)

    def _keep(self, content: bytes) -> str:
        key = str(len(self.storages))
        self.storages[key] = content
        return key
