"""Describe safetensors files before they are written: names, header bytes, place of each tensor."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Region
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.errors import PlanError, UnsupportedError
from restride.formats.safetensors.spelling import (
    DEFAULT_METADATA,
    DTYPE_BY_CODE,
    INDEX_SUFFIX,
    LARGEST_HEADER_NBYTES,
    METADATA_KEY,
    SUFFIX,
    whole_layout,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType

    Wanted: TypeAlias = tuple[str, DType, Shape]

__all__ = ["lay_out"]

_ALIGNMENT_NBYTES: Final = 8
_CODE_BY_DTYPE: Final = {dtype.name: code for code, dtype in DTYPE_BY_CODE.items()}


def lay_out(
    tensors: Iterable[Wanted],
    *,
    stem: str = "model",
    max_shard_nbytes: int | None = None,
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> Output:
    """Describe the files that hold some tensors.

    Args:
        tensors: (name, dtype, shape) of each tensor, in the order in which they shall stand.
        stem: What file names start with.
        max_shard_nbytes: Most bytes of tensors in one file. A larger tensor gets a file of its own.
            None puts everything into one file.
        metadata: Texts to put into each header.

    Returns:
        ``STEM.safetensors``, or ``STEM-00001-of-00003.safetensors`` and so on together with
        ``STEM.safetensors.index.json``. The same input gives the same bytes. `Output.tensors` has
        the order of `tensors`.

    Raises:
        PlanError: A name comes twice, a limit is no limit, or a header is larger than readers
            accept.
        UnsupportedError: A dtype or a name cannot be written.

    Cost:
        O(tensors).

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> wanted = [("a", DTYPES["float32"], (3,)), ("b", DTYPES["int8"], (2, 2))]
        >>> [file.name for file in lay_out(wanted, max_shard_nbytes=12).files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', \
'model.safetensors.index.json']
    """
    wanted = list(tensors)
    _require_writable(wanted)
    if max_shard_nbytes is not None and max_shard_nbytes < 1:
        raise PlanError(f"files of at most {max_shard_nbytes} bytes hold nothing")
    shards = list(_shards(wanted, max_shard_nbytes))
    names = [f"{stem}{SUFFIX}"]
    if len(shards) > 1:
        names = [f"{stem}-{n:05}-of-{len(shards):05}{SUFFIX}" for n in range(1, len(shards) + 1)]
    files: list[OutputFile] = []
    placed: list[OutputTensor] = []
    for name, shard in zip(names, shards, strict=True):
        header = _header(shard, metadata, name)
        at = len(header)
        for key, dtype, shape in shard:
            nbytes = _nbytes(dtype, shape)
            region = Region(len(files), at) if nbytes else None
            placed.append(OutputTensor(key, dtype, whole_layout(shape), (region,)))
            at += nbytes
        files.append(OutputFile(name, at, ((0, header),)))
    if len(shards) > 1:
        index = _index(names, shards)
        files.append(OutputFile(f"{stem}{INDEX_SUFFIX}", len(index), ((0, index),)))
    return Output(tuple(files), tuple(placed))


def _shards(wanted: Sequence[Wanted], max_nbytes: int | None) -> Iterator[list[Wanted]]:
    """Fill one file after the other; an empty model is one empty file."""
    shard: list[Wanted] = []
    used = 0
    for tensor in wanted:
        nbytes = _nbytes(*tensor[1:])
        if max_nbytes is not None and shard and used + nbytes > max_nbytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += nbytes
    yield shard


def _header(shard: Sequence[Wanted], metadata: Mapping[str, str], name: str) -> bytes:
    """Length, JSON, and spaces up to where tensors may start."""
    entries: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape in shard:
        stop = at + _nbytes(dtype, shape)
        entries[key] = {
            "dtype": _CODE_BY_DTYPE[dtype.name],
            "shape": list(shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_NBYTES)
    if len(text) > LARGEST_HEADER_NBYTES:
        raise PlanError(
            f"{len(shard)} tensors need a header of {len(text)} bytes, readers accept "
            f"{LARGEST_HEADER_NBYTES}",
            where=name,
            remedy="write smaller files",
        )
    return len(text).to_bytes(8, "little") + text


def _index(names: Sequence[str], shards: Sequence[Sequence[Wanted]]) -> bytes:
    weight_map = {
        key: name for name, shard in zip(names, shards, strict=True) for key, _, _ in shard
    }
    total = sum(_nbytes(dtype, shape) for shard in shards for _, dtype, shape in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, ensure_ascii=False, indent=2).encode() + b"\n"


def _require_writable(wanted: Sequence[Wanted]) -> None:
    names: set[str] = set()
    for name, dtype, _ in wanted:
        if name in names:
            raise PlanError("two tensors have this name", where=f"tensor {name!r}")
        names.add(name)
        if name == METADATA_KEY:
            raise UnsupportedError(
                "safetensors keeps this name for itself", where=f"tensor {name!r}"
            )
        if dtype.name not in _CODE_BY_DTYPE:
            raise UnsupportedError(
                f"safetensors has no dtype {dtype.name}",
                where=f"tensor {name!r}",
                remedy="cast it or leave it out",
            )


def _nbytes(dtype: DType, shape: Shape) -> int:
    return prod(shape) * dtype.itemsize_nbytes
