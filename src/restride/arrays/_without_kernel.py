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
    MODULUS,
    ROW_NBYTES,
    ROWS,
    SUMS,
    TOTALS,
    WORDS,
    block_weights,
    row_weights,
    word_weights,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer
    from numpy.typing import NDArray

__all__ = ["SlowDigester", "copy_slowly", "same_bytes"]

_LARGEST_WORD_NBYTES: Final = 8
# A word of 32 bits times 12 of a weight, 256 times, is below 2^53; so are 26 bits of a sum times 14
# of a weight, 1024 times.
_WORD_LIMBS: Final = (0, 12)
_SUM_LIMBS: Final = (0, 26)
_ROW_LIMBS: Final = (0, 14, 28, 42)


def _limbs(weights: NDArray[np.uint64], starts: Sequence[int]) -> NDArray[np.float64]:
    """Columns of weights, cut at some bits: first all that start at the first of them."""
    width = starts[1] - starts[0]
    return np.hstack([weights >> start & ((1 << width) - 1) for start in starts]).astype(float)


_WORD_WEIGHTS: Final = _limbs(
    np.asarray(word_weights()).transpose(2, 1, 0).reshape(WORDS, SUMS), _WORD_LIMBS
)
_ROW_WEIGHTS: Final = _limbs(np.asarray(row_weights()).reshape(ROWS * SUMS, TOTALS), _ROW_LIMBS)
# What each number of the product of both counts for: by limb of a sum of rows, and of a weight.
_SHIFTS: Final = [
    [of_words + of_sum + of_row for of_row in _ROW_LIMBS]
    for of_sum in _SUM_LIMBS
    for of_words in _WORD_LIMBS
]


class SlowDigester:
    """Does the same in memory of its own, and holds the interpreter half of the time."""

    def __init__(self, rows: int) -> None:
        self._words = np.empty((rows, WORDS))
        self._edge = np.zeros(ROW_NBYTES, np.uint8)
        self._sums = np.empty((ROWS, len(_WORD_LIMBS) * SUMS))
        self._limbs = np.empty(len(_SHIFTS) * ROWS * SUMS)

    def digest(self, buffer: memoryview, start_nbytes: int) -> int:
        """See `Digester.digest`; at least one byte."""
        content = np.frombuffer(buffer, np.uint8)
        total = 0
        stop_nbytes = start_nbytes + content.nbytes
        for block in range(start_nbytes // BLOCK_NBYTES, -(-stop_nbytes // BLOCK_NBYTES)):
            first = block * BLOCK_NBYTES
            low = max(start_nbytes, first)
            high = min(stop_nbytes, first + BLOCK_NBYTES)
            totals = self._block(content[low - start_nbytes : high - start_nbytes], low - first)
            total += sum(
                weight * value for weight, value in zip(block_weights(block), totals, strict=True)
            )
        return total % MODULUS

    def _block(self, part: NDArray[np.uint8], base: int) -> list[int]:
        """Totals of one block of which only some bytes, from `base` on, are given."""
        first = base // ROW_NBYTES
        count = -(-(base + part.nbytes) // ROW_NBYTES) - first
        # Rows of which a part is given stand at the edges; those between are whole.
        head = min(part.nbytes, -base % ROW_NBYTES)
        tail = (part.nbytes - head) % ROW_NBYTES
        if head:
            self._sum_edge(part[:head], base % ROW_NBYTES, 0)
        if tail:
            self._sum_edge(part[part.nbytes - tail :], 0, count - 1)
        rows = part[head : part.nbytes - tail].view("<u4").reshape(-1, WORDS)
        place = 1 if head else 0
        for at in range(0, len(rows), len(self._words)):
            some = rows[at : at + len(self._words)]
            words = self._words[: len(some)]
            np.copyto(words, some)
            into = self._sums[place + at : place + at + len(some)]
            np.matmul(words, _WORD_WEIGHTS, out=into)
        return self._totals(first, count)

    def _sum_edge(self, part: NDArray[np.uint8], base: int, place: int) -> None:
        """Sums of a row that is zero but for some bytes."""
        self._edge[base : base + part.nbytes] = part
        np.copyto(self._words[0], self._edge.view("<u4"))
        self._edge[base : base + part.nbytes] = 0
        np.matmul(self._words[:1], _WORD_WEIGHTS, out=self._sums[place : place + 1])

    def _totals(self, first: int, count: int) -> list[int]:
        """Totals of the sums of so many rows of a block."""
        sums = self._sums[:count].reshape(count, len(_WORD_LIMBS), SUMS).swapaxes(0, 1)
        limbs = self._limbs[: len(_SHIFTS) * count * SUMS]
        low, high = limbs.reshape(len(_SUM_LIMBS), len(_WORD_LIMBS), count, SUMS)
        np.multiply(sums, 0.5 ** _SUM_LIMBS[1], out=high)
        np.floor(high, out=high)
        np.multiply(high, 2.0 ** _SUM_LIMBS[1], out=low)
        np.subtract(sums, low, out=low)
        weights = _ROW_WEIGHTS[first * SUMS : (first + count) * SUMS]
        products = (limbs.reshape(len(_SHIFTS), -1) @ weights).reshape(
            len(_SHIFTS), len(_ROW_LIMBS), TOTALS
        )
        totals = [0] * TOTALS
        for by_row, shifts in zip(products.tolist(), _SHIFTS, strict=True):
            for values, shift in zip(by_row, shifts, strict=True):
                for place, value in enumerate(values):
                    totals[place] += int(value) << shift
        return totals


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
