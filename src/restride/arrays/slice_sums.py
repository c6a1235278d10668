"""Whether one array has the rows or columns of another in another order: by a sum for each."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

__all__ = ["Moves", "SliceSums", "find_moves"]

_CHUNK_NUMEL: Final = 1 << 14
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_AGAIN: Final = np.uint64(0xBF58476D1CE4E5B9)
_HALF: Final = np.uint64(31)
_LARGEST_WORD_NBYTES: Final = 8
# Of a row or column: its sum, its factor, and what finding it takes for a moment.
_SLICE_NBYTES: Final = 96
_MOST: Final = 4096


class Moves(Frozen):
    """Where the slices of one array are in another one.

    Attributes:
        along: What moved: rows are the slices along the first dimension, columns those along all
            others together; or rows of the one are columns of the other; or all of it, which two
            tensors have exchanged.
        block: What divides every place and every length: slices moved in blocks of so many.
        run_count: Number of runs of slices that moved together.
        runs: (first here, first there, how many) of the first few thousand of them, by the first
            here.
        tensor: Which one has it there, of a tensor that was exchanged.
    """

    along: Literal["rows", "columns", "transposed", "tensor"]
    block: int = 1
    run_count: int = 0
    runs: tuple[tuple[int, int, int], ...] = ()
    tensor: str = ""


class SliceSums:
    """A sum of 64 bits for each row and for each column of an array.

    Two rows with the same sum have the same elements in the same order, but for a chance of 2^-58
    a pair; it is no protection against forgery.

    Attributes:
        rows: Sum of each row, modulo 2^64.
        columns: Sum of each column.
    """

    def __init__(self, shape: Sequence[int], itemsize_nbytes: int) -> None:
        """Begin with zeros.

        Args:
            shape: Of the array, which has at least one element.
            itemsize_nbytes: 1, 2, 4 or 8.
        """
        self._word = np.dtype(f"<u{itemsize_nbytes}")
        self._width = prod(shape[1:])
        self.rows = np.zeros(shape[0] if shape else 1, np.uint64)
        self.columns = np.zeros(self._width, np.uint64)
        self._factors = _mixed(np.arange(1, max(self.rows.size, self._width) + 1, dtype=np.uint64))

    @staticmethod
    def nbytes(shape: Sequence[int]) -> int:
        """Memory that the sums of an array of that shape take."""
        slices = (shape[0] if shape else 1) + prod(shape[1:])
        return _SLICE_NBYTES * slices + 8 * 4 * _CHUNK_NUMEL

    @staticmethod
    def can_sum(itemsize_nbytes: int) -> bool:
        """Whether elements of that size are words that can be summed."""
        return itemsize_nbytes <= _LARGEST_WORD_NBYTES

    def add(self, start: int, buffer: ReadableBuffer) -> None:
        """Add elements that follow each other, from a flat index on; each element once.

        Cost:
            O(elements), and temporaries of half a megabyte.
        """
        words = np.frombuffer(memoryview(buffer), self._word)
        while words.size:
            row, column = divmod(start, self._width)
            height, count = 1, min(words.size, self._width - column, _CHUNK_NUMEL)
            if count == self._width:
                height = max(1, min(words.size, _CHUNK_NUMEL) // count)
            part = _mixed(words[: height * count].reshape(height, count).astype(np.uint64))
            below, beside = slice(row, row + height), slice(column, column + count)
            self.rows[below] += (part * self._factors[beside]).sum(axis=1, dtype=np.uint64)
            part *= self._factors[below, np.newaxis]
            self.columns[beside] += part.sum(axis=0, dtype=np.uint64)
            words, start = words[height * count :], start + height * count


def find_moves(a: SliceSums, b: SliceSums) -> Moves | None:
    """Say how `b` has the slices of `a`, where it has the same ones in another order.

    Examples:
        >>> a, b = SliceSums((4, 2), 2), SliceSums((4, 2), 2)
        >>> a.add(0, np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.uint16))
        >>> b.add(0, np.array([[5, 6], [7, 8], [3, 4], [1, 2]], np.uint16))
        >>> find_moves(a, b).runs
        ((0, 2, 2), (2, 1, 1), (3, 0, 1))
    """
    found = _moved("rows", a.rows, b.rows) or _moved("columns", a.columns, b.columns)
    if found is not None:
        return found
    is_transposed = np.array_equal(a.rows, b.columns) and np.array_equal(a.columns, b.rows)
    return Moves("transposed") if is_transposed else None


def _moved(
    along: Literal["rows", "columns"], ours: NDArray[np.uint64], theirs: NDArray[np.uint64]
) -> Moves | None:
    there = np.flatnonzero(ours != theirs)
    # Slices that are alike are paired in their order.
    sources = there[np.argsort(ours[there], kind="stable")]
    targets = there[np.argsort(theirs[there], kind="stable")]
    if not there.size or not np.array_equal(ours[sources], theirs[targets]):
        return None
    source_of = np.empty(ours.size, np.int64)
    source_of[targets] = sources
    moved = source_of[there]
    is_first = np.ones(there.size, np.bool_)
    is_first[1:] = (np.diff(there) != 1) | (np.diff(moved) != 1)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, there.size))
    runs = np.stack([there[firsts], moved[firsts], counts], axis=1)
    few = tuple((int(target), int(source), int(count)) for target, source, count in runs[:_MOST])
    return Moves(along, int(np.gcd.reduce(runs, axis=None)), len(runs), few)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that have nothing to do with each other, whatever the words are."""
    words = words * _MIX
    words ^= words >> _HALF
    words *= _MIX_AGAIN
    words ^= words >> _HALF
    return words
