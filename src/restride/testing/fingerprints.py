"""Fingerprints the slow way: word by word, in integers without end."""

from __future__ import annotations

from restride.arrays.fingerprint import (
    MODULUS,
    ROWS,
    SUMS,
    TOTALS,
    WORDS,
    block_weights,
    row_weights,
    word_weights,
)

__all__ = ["digest_slowly"]


def digest_slowly(content: bytes) -> int:
    """Digest a whole array by its definition: each word times the product of its weights."""
    by_word, by_row = word_weights(), row_weights()
    total = 0
    for place in range(0, len(content), 4):
        word = int.from_bytes(content[place : place + 4].ljust(4, b"\0"), "little")
        if not word:
            continue
        row, column = divmod(place // 4, WORDS)
        block, row = divmod(row, ROWS)
        outer = block_weights(block)
        for inner in range(SUMS):
            for middle in range(TOTALS):
                weight = by_word[inner, column % 2, column // 2] * by_row[row, inner, middle]
                total += word * weight * outer[middle]
    return total % MODULUS
