"""Arrays of any type with values at its edges, and safetensors files of them, for `fuzz.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from restride.checkpoint.dtypes import DTYPES
from restride.formats.safetensors.spelling import DTYPE_BY_CODE
from restride.testing.hostile_safetensors import safetensors_file

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from restride.checkpoint.dtypes import DType

__all__ = ["CODES", "PLAIN", "SHAPES", "Stored", "some_array", "some_bits", "write_file"]

CODES = {dtype.name: code for code, dtype in DTYPE_BY_CODE.items()}
SHAPES = ((), (1,), (5,), (3, 4), (2, 0), (2, 3, 2), (9000,), (7, 2500))
PLAIN = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex64": "<c8"}
_EDGES = {
    2: (0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0x3C00, 0x3F80, 1, 0xFFFF),
    4: (0, 1 << 31, 0x7F800000, 0x7FC00001, 0xFFC00000, 0x3F800000, 1, 0x7F7FFFFF),
    8: (0, 1 << 63, 0x7FF << 52, (0x7FF << 52) + 1, 0x3FF << 52, (1 << 63) - 1, 1 << 53),
}


@dataclass
class Stored:
    """An array that is to be stored."""

    dtype: DType
    shape: tuple[int, ...]
    content: bytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def element(self, index: int) -> bytes:
        size = self.dtype.itemsize_nbytes
        return self.content[index * size : index * size + size]


def write_file(path: Path, arrays: dict[str, Stored], names: list[str]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name in names:
        array = arrays[name]
        stop = len(data) + len(array.content)
        entry = {"dtype": CODES[array.dtype.name], "shape": array.shape}
        header[name] = {**entry, "data_offsets": [len(data), stop]}
        data += array.content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_file(header, data))


def some_bits(random: Random, dtype: DType) -> bytes:
    size = dtype.itemsize_nbytes
    if dtype.name == "bool":
        return bytes([random.randrange(2)])
    if dtype.kind == "complex":
        half = DTYPES["float32"]
        return some_bits(random, half) + some_bits(random, half)
    kind = random.randrange(3)
    if kind == 0 and dtype.name in PLAIN:
        return np.array(random.randrange(-8, 8) / 4, PLAIN[dtype.name]).tobytes()
    if kind == 0 and dtype.kind in {"int", "uint"}:
        return random.randrange(9).to_bytes(size, "little")
    if kind == 1 and size in _EDGES:
        return random.choice(_EDGES[size]).to_bytes(size, "little")
    return random.randbytes(size)


def some_array(random: Random, dtype: DType, shape: tuple[int, ...]) -> Stored:
    few = [some_bits(random, dtype) for _ in range(7)]
    numel = math.prod(shape)
    return Stored(dtype, shape, b"".join(few[at % 7] for at in range(numel)))
