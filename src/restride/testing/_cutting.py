"""What a partition function is, and the cuts that most of them are made of."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Array",
    "Cut",
    "Partition",
    "evenly",
    "joined",
    "padded",
    "part",
    "sizes",
    "split",
    "together",
    "torch_chunk",
]

Array: TypeAlias = Any
"""A `numpy.ndarray`."""
Cut: TypeAlias = "Callable[[Array, int, int, int], Array]"


class Partition(Frozen):
    """A partition function and what is known of its layout.

    Attributes:
        name: What it is, for test ids.
        shape: Shape of the full tensor for a size (1, 2, 4, ... scale the hidden dimensions).
        cut: Function of (full tensor, size, number of ranks, rank) that returns the shard; padding
            is zero.
        ranks: Numbers of ranks it is made for.
        pieces: Pieces of the whole tensor on all ranks, at any size.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    cut: Cut
    ranks: tuple[int, ...]
    pieces: int

    def shards(self, full: Array, size: int, ranks: int) -> list[Array]:
        """Cut `full` into the shards of all ranks."""
        return [np.ascontiguousarray(self.cut(full, size, ranks, rank)) for rank in range(ranks)]

    def index_maps(self, size: int, ranks: int) -> list[Array]:
        """Full index at each address of each shard; -1 where it is padding."""
        shape = self.shape(size)
        markers = np.arange(1, prod(shape) + 1, dtype=np.int64).reshape(shape)
        return [shard - 1 for shard in self.shards(markers, size, ranks)]


def sizes(total: int, ranks: int, kv_heads: int | None = None) -> list[int]:
    """Cut a dimension as DeepSpeed does: by heads where they divide it, larger shards first."""
    unit = total // kv_heads if kv_heads and total % kv_heads == 0 else 1
    share, rest = divmod(total // unit, ranks)
    return [(share + (rank < rest)) * unit for rank in range(ranks)]


def split(full: Array, widths: Sequence[int], axis: int = 0) -> list[Array]:
    return np.split(full, list(accumulate(widths))[:-1], axis)


def part(full: Array, ranks: int, rank: int, axis: int = 0) -> Array:
    """Even cut; the dimension divides."""
    return np.split(full, ranks, axis)[rank]


def evenly(axis: int = 0) -> Cut:
    """The partition function of an even cut."""

    def cut(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
        return part(full, ranks, rank, axis)

    return cut


def torch_chunk(full: Array, ranks: int, rank: int) -> Array:
    """`torch.chunk` with empty chunks: rounds up, so the last ranks are short."""
    share = -(-full.shape[0] // ranks)
    return full[rank * share : (rank + 1) * share]


def padded(full: Array, rows: int) -> Array:
    return np.pad(full, [(0, rows - full.shape[0])] + [(0, 0)] * (full.ndim - 1))


def joined(parts: Sequence[Array], ranks: int, rank: int, axis: int = 0) -> Array:
    """Cut each part and put this rank's parts next to each other."""
    return np.concatenate([part(block, ranks, rank, axis) for block in parts], axis)


def together(sizes_of: Callable[[int], Sequence[int]]) -> Cut:
    """The partition function that cuts the parts of a fused tensor one by one."""

    def cut(full: Array, size: int, ranks: int, rank: int) -> Array:
        return joined(split(full, sizes_of(size)), ranks, rank)

    return cut
