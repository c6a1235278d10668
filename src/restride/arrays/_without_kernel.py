"""What the kernel does, done by NumPy: the oracle of its tests, and what there is without it.

Imported when something is to be done, since NumPy takes longer to import than most conversions
take besides.
"""

from __future__ import annotations

from itertools import chain
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np

from restride.arrays.fingerprint import (
    BLOCK_NBYTES,
    LIMB,
    MODULUS,
    ROW_NBYTES,
    ROWS,
    SUMS,
    WORDS,
    block_weights,
    row_weights,
    word_weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer
    from numpy.typing import NDArray

__all__ = ["SlowDigester", "copy_slowly", "same_bytes"]

_LARGEST_WORD_NBYTES: Final = 8
_WORD_WEIGHTS: Final = np.asarray(word_weights())
_ROW_WEIGHTS: Final = np.asarray(row_weights())


class SlowDigester:
    """Does the same in memory of its own, and holds the interpreter half of the time."""

    def __init__(self, rows: int) -> None:
        self._words = np.empty((rows, WORDS))
        self._edge = np.zeros(ROW_NBYTES, np.uint8)
        self._sums = np.empty((ROWS, SUMS))
        self._limbs = np.empty((2, ROWS * SUMS))

    def digest(self, buffer: memoryview, start_nbytes: int) -> int:
        """See `Digester.digest`; at least one byte."""
        content = np.frombuffer(buffer, np.uint8)
        total = 0
        stop_nbytes = start_nbytes + content.nbytes
        for block in range(start_nbytes // BLOCK_NBYTES, -(-stop_nbytes // BLOCK_NBYTES)):
            first = block * BLOCK_NBYTES
            low = max(start_nbytes, first)
            high = min(stop_nbytes, first + BLOCK_NBYTES)
            sums = self._block(content[low - start_nbytes : high - start_nbytes], low - first)
            total += sum(
                weight * value for weight, value in zip(block_weights(block), sums, strict=True)
            )
        return total % MODULUS

    def _block(self, part: NDArray[np.uint8], base: int) -> Iterable[int]:
        """Sums of one block of which only some bytes, from `base` on, are given."""
        first = base // ROW_NBYTES
        count = -(-(base + part.nbytes) // ROW_NBYTES) - first
        # Rows of which a part is given stand at the edges; those between are whole.
        head = min(part.nbytes, -base % ROW_NBYTES)
        tail = (part.nbytes - head) % ROW_NBYTES
        if head:
            self._sum_edge(part[:head], base % ROW_NBYTES, 0)
        if tail:
            self._sum_edge(part[part.nbytes - tail :], 0, count - 1)
        rows = part[head : part.nbytes - tail].view("<i4").reshape(-1, WORDS)
        place = 1 if head else 0
        for at in range(0, len(rows), len(self._words)):
            some = rows[at : at + len(self._words)]
            words = self._words[: len(some)]
            np.copyto(words, some)
            into = self._sums[place + at : place + at + len(some)]
            np.matmul(words, _WORD_WEIGHTS, out=into)
        return self._sums_of_sums(first, count)

    def _sum_edge(self, part: NDArray[np.uint8], base: int, place: int) -> None:
        """Sums of a row that is zero but for some bytes."""
        self._edge[base : base + part.nbytes] = part
        np.copyto(self._words[0], self._edge.view("<i4"))
        self._edge[base : base + part.nbytes] = 0
        np.matmul(self._words[:1], _WORD_WEIGHTS, out=self._sums[place : place + 1])

    def _sums_of_sums(self, first: int, count: int) -> Iterable[int]:
        """Sums of the sums of so many rows of a block, as integers."""
        sums = self._sums[:count].reshape(-1)
        high, low = self._limbs[:, : sums.size]
        np.multiply(sums, 1.0 / LIMB, out=high)
        np.floor(high, out=high)
        np.multiply(high, LIMB, out=low)
        np.subtract(sums, low, out=low)
        weights = _ROW_WEIGHTS[first * SUMS : (first + count) * SUMS]
        above, below = (self._limbs[:, : sums.size] @ weights).tolist()
        return [int(a) * LIMB + int(b) for a, b in zip(above, below, strict=True)]


def copy_slowly(
    source: tuple[ReadableBuffer, int],
    target: tuple[WriteableBuffer, int],
    steps: Sequence[tuple[int, int, int]],
    run_nbytes: int,
) -> None:
    """Copy runs as `copy_strided` does, in the widest words that all strides share.

    Args:
        source: Memory, and where in it the first run is.
        target: The same of the other side.
        steps: Loops of more than one turn, all inside both.
        run_nbytes: Bytes of a run, at least one.
    """
    strides = chain.from_iterable(step[1:] for step in steps)
    word = gcd(_LARGEST_WORD_NBYTES, run_nbytes, *strides)
    shape = (*(step[0] for step in steps), run_nbytes // word)
    source_view, target_view = (
        np.ndarray(
            shape, f"u{word}", memoryview(memory), start, (*(step[side] for step in steps), word)
        )
        for side, (memory, start) in enumerate((source, target), 1)
    )
    np.copyto(target_view, source_view)


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two runs of as many bytes are the same."""
    first, second = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    wide = first.nbytes - first.nbytes % _LARGEST_WORD_NBYTES
    return bool(
        np.array_equal(first[:wide].view(np.uint64), second[:wide].view(np.uint64))
        and np.array_equal(first[wide:], second[wide:])
    )
