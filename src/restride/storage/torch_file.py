"""Describe a file of ``torch.save`` before its first byte is written: the way back of `torch_zip`.

The pickle and the directory of the file are fixed bytes; the storages between them are regions that
somebody else fills, in any order. Records stand where torch puts them: in its order, each content
on a multiple of 64 bytes, sizes after the content, with 64-bit numbers where 32 bits do not do.

A zip file states a CRC-32 of each record, in the record's descriptor and in the directory. That of
a streamed storage is not known up front, and is written as 0, as ``torch.save`` does where
``torch.serialization.set_crc32_options(False)`` is set. Torch's zip reader is built without the
check (``MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS``), so ``torch.load`` never looks at it, with `mmap`
or without; ``unzip -t`` and Python's `zipfile` do, and complain of the storages. Every other record
has its real CRC.
"""

from __future__ import annotations

import struct
import zlib
from math import prod
from typing import TYPE_CHECKING, Final

from restride.checkpoint.output import OutputFile
from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    Storage,
    StoredTensor,
)
from restride.errors import PlanError, RestrideError
from restride.frozen import Frozen
from restride.storage.pickle_writer import PersistentId, write_pickle
from restride.storage.torch_values import STORAGE_DTYPES
from restride.storage.zip_end import ALL_ONES

if TYPE_CHECKING:
    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Value

__all__ = [
    "TorchContent",
    "TorchFileLayout",
    "lay_out_torch_file",
    "name_inside",
    "new_tensor",
    "place_torch_content",
    "torch_content",
]

_UNNAMED: Final = "archive"
_ALIGNMENT: Final = 64
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR: Final = struct.Struct("<4s3L")
_WIDE_DESCRIPTOR: Final = struct.Struct("<4sL2Q")
_WIDE_END: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END: Final = struct.Struct("<4s4H2LH")
_EXTRA_NBYTES: Final = 4
_UTF8: Final = 1 << 11
_HAS_DESCRIPTOR: Final = 1 << 3
_MADE_BY: Final = 0x031E
_NEEDS_64_BITS: Final = 45
_MOST_NARROW: Final = 0xFFFF

_REBUILD: Final = GlobalName("torch._utils", "_rebuild_tensor_v2")
_REBUILD_TYPED: Final = GlobalName("torch._utils", "_rebuild_tensor_v3")
_UNTYPED: Final = GlobalName("torch.storage", "UntypedStorage")
# Several classes hold bytes; the first one is the plain one.
_CLASSES: Final = {
    dtype: GlobalName("torch", name) for name, dtype in reversed(STORAGE_DTYPES.items())
}


class TorchContent(Frozen):
    """What a file is to hold, whatever it is called.

    Attributes:
        pickle: Its value.
        storages: Those that the pickle refers to by number, in order of first use.
    """

    pickle: bytes
    storages: tuple[Storage, ...]


class TorchFileLayout(Frozen):
    """A file that is about to be written.

    Attributes:
        file: Its name, its size, and all that is not a tensor.
        storages: Each storage of the value in order of first use, and the byte of the file where
            it is to stand.
    """

    file: OutputFile
    storages: tuple[tuple[Storage, int], ...]


def new_tensor(key: str, dtype: DType, shape: Shape) -> StoredTensor:
    """A tensor that is in no file yet: dense, in a storage of its own.

    Args:
        key: Name of the storage, the same for no two of one file.
        dtype: Type of the elements.
        shape: Sizes.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> new_tensor("0", DTYPES["float32"], (2, 3)).strides
        (3, 1)
    """
    strides = tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    storage = Storage("", key, dtype, 0, prod(shape) * dtype.itemsize_nbytes)
    return StoredTensor(storage, 0, tuple(shape), strides)


def name_inside(name: str) -> str:
    """What ``torch.save`` calls a file inside: the folder that all records are in.

    It is the name of the file up to the last dot, and tells files apart that were exchanged. Torch
    gives none to a file whose path is not ASCII, and refuses one with nothing before that dot.

    Args:
        name: Name of the file below the root of the output.

    Examples:
        >>> name_inside("step/mp_rank_00_model_states.pt"), name_inside("zero/é/fp32.pt")
        ('mp_rank_00_model_states', 'archive')
    """
    last = name.rpartition("/")[2]
    stem = last.rpartition(".")[0] if "." in last else last
    return stem if stem and name.isascii() else _UNNAMED


def lay_out_torch_file(name: str, value: Value) -> TorchFileLayout:
    """Describe the file that ``torch.load`` reads as `value`.

    Args:
        name: Name of the file below the root of the output.
        value: What it shall hold. Its tensors may be views of storages of any files (then the bytes
            of these storages are to be copied) or new ones. Views of one storage stay views of
            one storage.

    Raises:
        PlanError: Two storages of one key have different sizes.
        UnsupportedError: The value has a part that no file can have.

    Cost:
        O(values), no tensor is touched.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> tensor = new_tensor("w", DTYPES["bfloat16"], (4, 4))
        >>> layout = lay_out_torch_file("w.pt", {"param": tensor})
        >>> [start % 64 for _, start in layout.storages]
        [0]
    """
    return place_torch_content(name, torch_content(name, value))


def torch_content(name: str, value: Value) -> TorchContent:
    """Spell out what a file holds: the part of `lay_out_torch_file` that does not know its name.

    Args:
        name: What errors call the file.
        value: As for `lay_out_torch_file`.

    Raises:
        PlanError, UnsupportedError: As for `lay_out_torch_file`.

    Cost:
        O(values).
    """
    table = _StorageTable()
    try:
        pickle = write_pickle(value, lower=table.lower)
    except RestrideError as error:
        raise error.located(name) from None
    return TorchContent(pickle, tuple(table.storages))


def place_torch_content(name: str, content: TorchContent) -> TorchFileLayout:
    """Describe the file of a name that holds what was spelled out.

    Cost:
        O(storages).
    """
    zipped = _Zip(name_inside(name))
    zipped.add("data.pkl", content.pickle)
    zipped.add(".format_version", b"1")
    zipped.add(".storage_alignment", str(_ALIGNMENT).encode())
    zipped.add("byteorder", b"little")
    placed = tuple(
        (storage, zipped.reserve(f"data/{number}", storage.nbytes))
        for number, storage in enumerate(content.storages)
    )
    zipped.add("version", b"3\n")
    return TorchFileLayout(zipped.file(name), placed)


class _StorageTable:
    """Numbers the storages of a value, and spells tensors as calls of torch's own functions."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def lower(self, value: Storage | StoredTensor) -> Value | PersistentId:
        if isinstance(value, Storage):
            is_bytes = value.dtype.name == "uint8"
            return self._id(value, _UNTYPED if is_bytes else _CLASSES.get(value.dtype.name))
        dtype = value.storage.dtype.name
        kind = _CLASSES.get(dtype)
        args: tuple[object, ...] = (
            self._id(value.storage, kind),
            value.storage_base,
            value.shape,
            value.strides,
            False,
            OrderedDictValue(),
        )
        if kind is not None:
            return Constructed(_REBUILD, args)  # type: ignore[arg-type]  # an id is no value
        named = GlobalName("torch", dtype)
        return Constructed(_REBUILD_TYPED, (*args, named))  # type: ignore[arg-type]

    def _id(self, storage: Storage, kind: GlobalName | None) -> PersistentId:
        number = self._numbers.setdefault((storage.file, storage.key), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        elif self.storages[number].nbytes != storage.nbytes:
            raise PlanError(
                f"storage {storage.key!r} of {storage.nbytes} bytes has the key of one of "
                f"{self.storages[number].nbytes} bytes"
            )
        itemsize = 1 if kind is None else storage.dtype.itemsize_nbytes
        numel = storage.nbytes // itemsize
        return PersistentId(("storage", kind or _UNTYPED, str(number), "cpu", numel))


class _Zip:
    """A zip file of stored records, some of whose contents come later.

    Args:
        label: The folder that all records are in; blank in what is fixed.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._blank = bytes(len(label))
        self._places: list[tuple[int, ...]] = []
        self._pending_places: list[int] = []
        self._directory_places: list[int] = []
        self._literals: list[tuple[int, bytes]] = []
        self._pending = bytearray()
        self._start = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, content: bytes) -> None:
        """Add a record whose content is known."""
        start, wide = self._header(name, len(content))
        self._pending += content
        self._end_record(name, start, len(content), zlib.crc32(content), wide)

    def reserve(self, name: str, nbytes: int) -> int:
        """Add a record whose content comes later; return where it has to start."""
        start, wide = self._header(name, nbytes)
        content_start = self._at
        self._end_literal()
        self._start = content_start + nbytes
        self._end_record(name, start, nbytes, 0, wide)
        return content_start

    def file(self, name: str) -> OutputFile:
        """End the file."""
        start, nbytes = self._at, len(self._directory)
        stop = start + nbytes
        count = self._count
        before = len(self._pending)
        self._pending_places += [before + place for place in self._directory_places]
        self._pending += self._directory
        self._pending += _WIDE_END.pack(
            b"PK\6\6",
            _WIDE_END.size - 12,
            *(_MADE_BY, _NEEDS_64_BITS, 0, 0),
            *(count, count, nbytes, start),
        )
        self._pending += _LOCATOR.pack(b"PK\6\7", 0, stop, 1)
        narrow = min(count, _MOST_NARROW)
        self._pending += _END.pack(
            b"PK\5\6", 0, 0, narrow, narrow, min(nbytes, ALL_ONES), min(start, ALL_ONES), 0
        )
        size = self._at
        self._end_literal()
        return OutputFile(name, size, tuple(self._literals), self._label, tuple(self._places))

    def _end_literal(self) -> None:
        self._literals.append((self._start, bytes(self._pending)))
        self._places.append(tuple(self._pending_places))
        self._pending.clear()
        self._pending_places.clear()

    @property
    def _at(self) -> int:
        return self._start + len(self._pending)

    def _header(self, name: str, nbytes: int) -> tuple[int, bytes]:
        """Write the header of a record, padded so that its content starts where torch maps it."""
        start = self._at
        encoded = self._blank + f"/{name}".encode()
        wide = _wide_extra([n for n in (nbytes, nbytes, start) if n >= ALL_ONES])
        # What is stored is not known yet where torch writes this: the descriptor has it.
        early = _wide_extra(
            [n for n, size in ((nbytes, nbytes), (0, nbytes), (start, start)) if size >= ALL_ONES]
        )
        used = start + _LOCAL.size + len(encoded) + len(wide) + _EXTRA_NBYTES
        padding = -used % _ALIGNMENT
        extra = early + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self._pending += _LOCAL.pack(
            b"PK\3\4", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(encoded), len(extra)
        )
        self._pending_places.append(len(self._pending))
        self._pending += encoded + extra
        return start, wide

    def _end_record(self, name: str, start: int, nbytes: int, crc32: int, wide: bytes) -> None:
        """Write what stands after the content, and the entry of the directory."""
        if nbytes:
            form = _WIDE_DESCRIPTOR if wide else _DESCRIPTOR
            self._pending += form.pack(b"PK\7\10", crc32, nbytes, nbytes)
        encoded = self._blank + f"/{name}".encode()
        narrow = min(nbytes, ALL_ONES)
        self._directory += _CENTRAL.pack(
            b"PK\1\2",
            *(0, 0, _flags(nbytes), 0, 0, 0),
            *(crc32, narrow, narrow),
            *(len(encoded), len(wide), 0, 0, 0, 0, min(start, ALL_ONES)),
        )
        self._directory_places.append(len(self._directory))
        self._directory += encoded + wide
        self._count += 1


def _flags(nbytes: int) -> int:
    # An empty record has nothing to describe after it.
    return _UTF8 | _HAS_DESCRIPTOR if nbytes else _UTF8


def _wide_extra(words: list[int]) -> bytes:
    return struct.pack(f"<2H{len(words)}Q", 1, 8 * len(words), *words) if words else b""
