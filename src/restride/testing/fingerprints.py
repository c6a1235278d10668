"""Fingerprints the slow way: word by word, in integers without end."""

from __future__ import annotations

from restride.arrays.fingerprint import (
    MODULUS,
    ROWS,
    SUMS,
    WORDS,
    block_weights,
    row_weights,
    word_weights,
)

__all__ = ["digest_slowly"]


def digest_slowly(content: bytes) -> int:
    """Digest a whole array by its definition: each word times the product of its weights."""
    by_word = [[int(word_weights()[row, place]) for place in range(SUMS)] for row in range(WORDS)]
    by_row = [
        [int(row_weights()[row, place]) for place in range(SUMS)] for row in range(ROWS * SUMS)
    ]
    total = 0
    for place in range(0, len(content), 4):
        word = int.from_bytes(content[place : place + 4].ljust(4, b"\0"), "little", signed=True)
        if not word:
            continue
        row, column = divmod(place // 4, 256)
        block, row = divmod(row, 256)
        outer = block_weights(block)
        for inner in range(8):
            for middle in range(8):
                weight = by_word[column][inner] * by_row[row * 8 + inner][middle]
                total += word * weight * outer[middle]
    return total % MODULUS
