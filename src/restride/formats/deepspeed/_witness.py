"""What a few elements of a tensor tell of which parameter it is.

A master weight rounds to the weight that the model has: that is how the optimizer makes it
(deepspeed 0.19.8 `runtime/fp16/unfused_optimizer.py`, `step`). So one can be recognised by the
other, and a few thousand elements do: two parameters that agree in all of them are, to our
knowledge, both still what they were initialised with.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from restride.arrays.casts import cast, storage_dtype, to_comparable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import StoredTensor
    from restride.storage.ranges import FilePool

__all__ = ["Token", "Witness"]

Token: TypeAlias = tuple["Shape", str, bytes]
"""Shape, name of the dtype, digest of the elements that were looked at."""

_MOST_READ_NUMEL: Final = 4096
_RUN_NUMEL: Final = 1024
_DIGEST_NBYTES: Final = 16


class Witness:
    """Reads samples of tensors.

    Args:
        pool: The files.
    """

    def __init__(self, pool: FilePool) -> None:
        self._pool = pool

    def token(self, tensor: StoredTensor) -> Token:
        """Digest a sample of a tensor.

        Args:
            tensor: The tensor, of a floating-point type that others can be rounded to.

        Cost:
            All elements of tensors up to 4096, three runs of 1024 of larger ones.
        """
        (token,) = self.rounded_tokens(tensor, [tensor.storage.dtype])
        return token

    def is_varied(self, tensor: StoredTensor) -> bool:
        """Whether a sample of a tensor has more than one value."""
        sample = self._read(tensor, _indices(prod(tensor.shape)))
        elements = sample.view(storage_dtype(tensor.storage.dtype))
        return bool((elements[1:] != elements[:-1]).any())

    def rounded_tokens(self, tensor: StoredTensor, dtypes: Iterable[DType]) -> frozenset[Token]:
        """Digest a sample of a master weight, rounded to each of some dtypes."""
        sample = self._read(tensor, _indices(prod(tensor.shape)))
        own = tensor.storage.dtype
        return frozenset(_token(tensor.shape, sample, own, dtype) for dtype in dtypes)

    def heads(self, tensor: StoredTensor, numel: int, dtypes: Iterable[DType]) -> frozenset[Token]:
        """Digest the first elements of a tensor, rounded to each of some dtypes.

        Args:
            tensor: The tensor.
            numel: How many, if it has so many.
            dtypes: Types that it can be rounded to.
        """
        count = min(numel, prod(tensor.shape))
        sample = self._read(tensor, range(count))
        own = tensor.storage.dtype
        return frozenset(_token((count,), sample, own, dtype) for dtype in dtypes)

    def stacked_token(self, tensors: Sequence[StoredTensor]) -> Token:
        """Do the same for a tensor that is stored in parts, one for each index of its first axis.

        Args:
            tensors: The parts, at least one, of one shape and dtype.
        """
        numel = prod(tensors[0].shape)
        indices: list[list[int]] = [[] for _ in tensors]
        for index in _indices(numel * len(tensors)):
            indices[index // numel].append(index % numel)
        parts = [self._read(part, own) for part, own in zip(tensors, indices, strict=True)]
        dtype = tensors[0].storage.dtype
        return _token((len(tensors), *tensors[0].shape), np.concatenate(parts), dtype, dtype)

    def _read(self, tensor: StoredTensor, indices: Sequence[int]) -> NDArray[np.uint8]:
        itemsize = storage_dtype(tensor.storage.dtype).itemsize
        addresses = _addresses(tensor, indices)
        buffer = bytearray(itemsize * len(indices))
        view = memoryview(buffer)
        done = 0
        for first, count in _contiguous(addresses):
            nbytes = count * itemsize
            self._pool.read_exact(
                tensor.storage.file,
                tensor.start_nbytes + first * itemsize,
                view[done : done + nbytes],
            )
            done += nbytes
        return np.frombuffer(buffer, np.uint8)


def _token(shape: Shape, elements: NDArray[np.uint8], own: DType, rounded: DType) -> Token:
    values = to_comparable(cast(elements, own, rounded), rounded)
    # The bits of a NaN are nobody's promise.
    values = np.where(np.isnan(values), np.nan, values)
    digest = blake2b(values.tobytes(), digest_size=_DIGEST_NBYTES).digest()
    return shape, rounded.name, digest


def _indices(numel: int) -> list[int]:
    """Logical indices to look at: they depend on the size alone."""
    if numel <= _MOST_READ_NUMEL:
        return list(range(numel))
    starts = (0, (numel - _RUN_NUMEL) // 2, numel - _RUN_NUMEL)
    return [index for start in starts for index in range(start, start + _RUN_NUMEL)]


def _addresses(tensor: StoredTensor, indices: Sequence[int]) -> list[int]:
    """Distance of each element from the first, in elements."""
    left = np.asarray(indices, dtype=np.int64)
    found = np.zeros(len(indices), dtype=np.int64)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        found += (left % size) * stride
        left //= size
    return [int(address) for address in found]


def _contiguous(addresses: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring addresses, as first and count."""
    for _, run in groupby(enumerate(addresses), lambda pair: pair[1] - pair[0]):
        members = [address for _, address in run]
        yield members[0], len(members)
