"""Fingerprints: the same number for the same elements, however they are cut, stored or read.

An array is seen as its bytes in logical order (element 0 first, little-endian), and those as 32-bit
words. Its fingerprint is a *linear* function of the words, so parts of an array may be digested
anywhere, in any order, in runs of any length, and their digests add up. No part needs to know
another: what is not there counts as zero.

The weight of a word is a product over three levels. 256 words are a row, 256 rows a block of
256 KiB. A row becomes 4 sums of words times fixed weights of 24 bits, below 2^64, which is what a
register holds; a block becomes 2 totals of those sums times fixed weights of 54 bits, below 2^128;
blocks are added up modulo the prime 2^127 - 1, times weights of 127 bits. Without the kernel, words
and weights are cut into limbs so short that every sum of their products is an integer below 2^53,
where a float64 is exact: BLAS does them, with the same result.

How much can go unnoticed? Take any two different arrays of one shape and dtype, chosen without
looking at the weights. In some row some word differs; whatever the other words are, at most one of
the 2^24 values of that word's weight makes a sum come out the same, and the 4 sums are independent:
2^-96. The same holds for a sum and the 2^54 values of its weight in each of 2 totals, and for a
total and one value in 2^127 - 1. Together the fingerprints agree with probability below 2^-95,
whether one bit flipped, rows or heads were swapped, a piece was shifted or everything is different.
The weights are public, so whoever wants to can construct two arrays with one fingerprint: this
finds accidents, not forgeries.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from array import array
from math import prod
from typing import TYPE_CHECKING, Final

from restride.arrays import _kernel
from restride.arrays.memory import address_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from restride.arrays._without_kernel import SlowDigester

__all__ = [
    "BLOCK_NBYTES",
    "MODULUS",
    "ROWS",
    "ROW_NBYTES",
    "SCRATCH_NBYTES",
    "SUMS",
    "TOTALS",
    "WORDS",
    "Digester",
    "block_weights",
    "finish",
    "row_weights",
    "scratch_nbytes",
    "weight_addresses",
    "weights_of_run",
    "word_weights",
]

MODULUS: Final = (1 << 127) - 1

WORDS: Final = 256  # of a row
ROWS: Final = 256  # of a block
_ROWS_AT_ONCE: Final = 128
SUMS: Final = 4  # of a row
TOTALS: Final = 2  # of a block
_WORD_BITS: Final = 24
_ROW_BITS: Final = 54
ROW_NBYTES: Final = 4 * WORDS
BLOCK_NBYTES: Final = ROWS * ROW_NBYTES
_SEED: Final = b"restride-fingerprint/2"
_SUMS_NBYTES: Final = 72 << 10
_WEIGHT_NBYTES: Final = 16
_VECTOR_NBYTES: Final = 64
# Weights of the blocks of 1 GiB are kept: every array has these blocks, and making them takes a
# tenth of the time that digesting does.
_KEPT_BLOCKS: Final = 4096
_kept: dict[int, bytes] = {}


def scratch_nbytes(rows: int) -> int:
    """Memory of a `Digester` that digests so many rows at a time.

    Their words as float64, sums of the rows of a block, and the limbs that are made of those.
    The kernel needs none of it, but what is planned shall not depend on whether there is one.
    """
    return 2 * rows * ROW_NBYTES + _SUMS_NBYTES


SCRATCH_NBYTES: Final = scratch_nbytes(_ROWS_AT_ONCE)


def _weights(level: bytes, bits: int, shape: tuple[int, ...]) -> memoryview[int]:
    count = prod(shape)
    stream = array("Q", hashlib.shake_256(_SEED + b" " + level).digest(8 * count))
    if sys.byteorder == "big":
        stream.byteswap()
    # Vectors of the kernel are loaded from addresses that are multiples of their size.
    memory = array("Q", bytes(8 * count + _VECTOR_NBYTES))
    start = -memory.buffer_info()[0] % _VECTOR_NBYTES // 8
    below = (1 << bits) - 1
    memory[start : start + count] = array("Q", [number & below for number in stream])
    flat = memoryview(memory)[start : start + count].cast("B")
    return flat.cast("Q", shape)


# Made when the module is imported, once: the kernel is given their addresses, and of two threads
# that each made them at the first digest one would be given those of memory that is free again.
_WORD_WEIGHTS: Final = _weights(b"words", _WORD_BITS, (SUMS, 2, WORDS // 2))
_ROW_WEIGHTS: Final = _weights(b"rows", _ROW_BITS, (ROWS, SUMS, TOTALS))
_ADDRESSES: Final = (address_of(_WORD_WEIGHTS), address_of(_ROW_WEIGHTS))


def word_weights() -> memoryview[int]:
    """Weights of the words of a row: of each sum those of its even words, and of its odd ones.

    Two words lie in each lane of a vector, and are multiplied one after the other.
    """
    return _WORD_WEIGHTS.toreadonly()


def row_weights() -> memoryview[int]:
    """Weights of the sums of the rows of a block: of each row, sum and total."""
    return _ROW_WEIGHTS.toreadonly()


def weight_addresses() -> tuple[int, int]:
    """Where the kernel finds the weights of words and of rows."""
    return _ADDRESSES


def block_weights(block: int) -> tuple[int, ...]:
    """Weights of the totals of one block, modulo `MODULUS`."""
    stream = _block_stream(block)
    return tuple(
        int.from_bytes(stream[at : at + _WEIGHT_NBYTES], "little") % MODULUS
        for at in range(0, len(stream), _WEIGHT_NBYTES)
    )


def _block_stream(block: int) -> bytes:
    """The weights of a block before they are reduced."""
    stream = _kept.get(block)
    if stream is None:
        shake = hashlib.shake_256(_SEED + b" block %d" % block)
        stream = shake.digest(_WEIGHT_NBYTES * TOTALS)
        if block < _KEPT_BLOCKS:
            _kept[block] = stream
    return stream


def weights_of_run(start_nbytes: int, nbytes: int) -> tuple[int, int, bytes]:
    """What the kernel needs to know of a run that it digests.

    Args:
        start_nbytes: Where the run starts in the array.
        nbytes: Its size.

    Returns:
        Where it starts in its first block, how many blocks it touches, and their weights.
    """
    first, start = divmod(start_nbytes, BLOCK_NBYTES)
    count = -(-(start + nbytes) // BLOCK_NBYTES)
    return start, count, b"".join(map(_block_stream, range(first, first + count)))


class Digester:
    """Digests runs of bytes with memory that is allocated once. One for each thread.

    Args:
        rows: Rows of 1 KiB to digest at one time. Fewer take less memory and more time, and give
            the same digests. The kernel does not ask.
    """

    def __init__(self, rows: int = _ROWS_AT_ONCE) -> None:
        self._rows = rows
        self._slow: SlowDigester | None = None
        self._halves = (ctypes.c_uint64 * 2)()

    def digest(self, buffer: ReadableBuffer, start_nbytes: int) -> int:
        """Digest a run of an array's bytes.

        Args:
            buffer: Contiguous bytes.
            start_nbytes: Where the run starts in the array, counted in logical order.

        Returns:
            A number modulo `MODULUS`. Those of disjoint runs add up to that of the whole.

        Raises:
            ValueError: The bytes are not contiguous.

        Cost:
            O(bytes), at 16 GB/s on one core of a current server, and at 3 GB/s without the kernel;
            1 KiB at least.

        Examples:
            >>> content = bytes(range(256)) * 64
            >>> digester = Digester()
            >>> parts = digester.digest(content[:4099], 0) + digester.digest(content[4099:], 4099)
            >>> parts % MODULUS == digester.digest(content, 0)
            True
        """
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError("bytes that are digested have to be contiguous")
        nbytes, kernel = view.nbytes, _kernel.KERNEL
        if not nbytes:
            return 0
        if kernel is None:
            return self._without_kernel().digest(view, start_nbytes)
        start, _, weights = weights_of_run(start_nbytes, nbytes)
        halves = self._halves
        kernel.digest(address_of(buffer), nbytes, start, weights, *weight_addresses(), halves)
        return int(halves[0] | halves[1] << 64)

    def _without_kernel(self) -> SlowDigester:
        if self._slow is None:
            from restride.arrays._without_kernel import SlowDigester  # noqa: PLC0415 - NumPy

            self._slow = SlowDigester(self._rows)
        return self._slow


def finish(total: int, dtype: str, shape: tuple[int, ...]) -> str:
    """Turn the sum of the digests of an array into its fingerprint.

    Shape and dtype are part of it: the digest alone does not see zeros at the end, nor that a
    matrix was folded differently.

    Args:
        total: Sum of the digests of all parts, each element in exactly one of them.
        dtype: Name of the element type.
        shape: Shape of the full array.

    Returns:
        32 hexadecimal digits.
    """
    meaning = f"{dtype} {'x'.join(map(str, shape))}".encode()
    stream = hashlib.shake_256(_SEED + b" array " + meaning).digest(32)
    return f"{(total + int.from_bytes(stream, 'little')) % MODULUS:032x}"
