"""The header of one safetensors file, with every promise it makes checked."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.safetensors.spelling import (
    DTYPE_BY_CODE,
    LARGEST_HEADER_NBYTES,
    METADATA_KEY,
)
from restride.frozen import Frozen
from restride.storage.typed_json import converted, parse_typed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.checkpoint.dtypes import DType
    from restride.storage.ranges import RangeFile

__all__ = ["Header", "HeaderTensor", "read_header"]

_LENGTH_NBYTES: Final = 8
# Key of the metadata in which torch says where each tensor of a process stands in the whole one.
_PLACES_KEY: Final = "DCP_SHARDING_INFO"
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# As many dimensions as a tensor of torch can have.
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as the header spells it."""

    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


class HeaderTensor(Frozen):
    """One tensor of a file.

    Attributes:
        name: Its key.
        dtype: Type of its elements.
        shape: Its shape.
        start_nbytes: Byte of the file where it starts.
        nbytes: Its length.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start_nbytes: int
    nbytes: int


class Header(Frozen):
    """What a file holds.

    Attributes:
        tensors: Tensors in the order of their bytes.
        metadata: Texts that the writer added.
    """

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]


def read_header(file: RangeFile) -> Header:
    """Read and check the header of a safetensors file.

    Returns:
        Tensors that lie one after the other, from the end of the header to the end of the file.

    Raises:
        CorruptError: The file is cut off, its header is no header, or tensors overlap, leave a
            hole, or do not have the length that shape and dtype give.
        UnsupportedError: A dtype is not known, or the tensors are parts of others.
        ExecutionError: The system cannot read the file.
    """
    if file.nbytes < _LENGTH_NBYTES:
        raise CorruptError(f"a file of {file.nbytes} bytes has no room for a header length")
    length = int.from_bytes(file.read(0, _LENGTH_NBYTES), "little")
    if length > file.nbytes - _LENGTH_NBYTES:
        raise CorruptError(f"header length {length} is larger than the file ({file.nbytes} bytes)")
    if length > LARGEST_HEADER_NBYTES:
        raise CorruptError(
            f"header length {length} is larger than the limit of {LARGEST_HEADER_NBYTES} bytes"
        )
    text = file.read(_LENGTH_NBYTES, length)
    if not text.startswith(b"{"):
        raise CorruptError(f"the header starts with {text[:8]!r}, not with '{{'")
    try:
        entries = parse_typed(text, dict[str, object])
        metadata = converted(entries.pop(METADATA_KEY, {}), dict[str, str], METADATA_KEY)
        _require_whole(metadata)
        first = _LENGTH_NBYTES + length
        tensors = [_tensor(name, entry, first) for name, entry in entries.items()]
    except RestrideError as error:
        raise error.located("header") from None
    tensors.sort(key=lambda tensor: (tensor.start_nbytes, tensor.nbytes))
    _require_gapless(tensors, first, file.nbytes)
    return Header(tuple(tensors), metadata)


def _require_whole(metadata: Mapping[str, str]) -> None:
    """Refuse what one of several processes saved: it has no shapes but those of its own parts."""
    if _PLACES_KEY in metadata:
        raise UnsupportedError(
            "holds what one process had of each tensor, as torch.distributed.checkpoint saves it "
            "with save_distributed=True",
            remedy="save it with enable_consolidation=True, which puts those of all together",
        )


def _tensor(name: str, value: object, first: int) -> HeaderTensor:
    where = f"tensor {name!r}"
    entry = converted(value, _Entry, where)
    dtype = DTYPE_BY_CODE.get(entry.dtype)
    if dtype is None:
        raise UnsupportedError(
            f"dtype {entry.dtype!r} is not known",
            where=where,
            remedy=f"known ones are {', '.join(DTYPE_BY_CODE)}",
        )
    start, stop = entry.data_offsets
    nbytes = prod(entry.shape) * dtype.itemsize_nbytes
    if stop - start != nbytes:
        raise CorruptError(
            f"bytes {start} to {stop} are not the {nbytes} bytes that shape {list(entry.shape)} "
            f"of {entry.dtype} takes",
            where=where,
        )
    return HeaderTensor(name, dtype, entry.shape, first + start, nbytes)


def _require_gapless(tensors: list[HeaderTensor], first: int, file_nbytes: int) -> None:
    """Check that tensors in the order of their bytes fill the file: no hole hides anything."""
    end, before = first, "the header"
    for tensor in tensors:
        if tensor.start_nbytes != end:
            kind = "overlaps" if tensor.start_nbytes < end else "leaves a hole after"
            raise CorruptError(
                f"starts at byte {tensor.start_nbytes} and {kind} {before}, which ends at byte "
                f"{end}",
                where=f"tensor {tensor.name!r}",
            )
        end, before = end + tensor.nbytes, f"tensor {tensor.name!r}"
    if end != file_nbytes:
        kind = "was cut off" if end > file_nbytes else "has bytes that belong to no tensor"
        raise CorruptError(f"the file of {file_nbytes} bytes {kind}: {before} ends at byte {end}")
