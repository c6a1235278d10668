"""How wide the words may be in which the short runs of a strided copy are moved.

Both frameworks take a loop of two elements for a loop, and spend more on starting it than on the
elements. Where the innermost loop of both sides is one run of memory, its elements can be moved in
fewer, wider words, as far as sizes, strides and addresses allow.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORDS", "is_for_threads", "word_nbytes"]

WORDS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""A dtype of each width that both frameworks have and copy as bits."""

_WIDEST_NBYTES: Final = 16
_WIDEST_ALIGNMENT_NBYTES: Final = 8
# Above this, a run is a memcpy, whatever the words.
_LONGEST_RUN_NBYTES: Final = 128
_LONG_RUN_NBYTES: Final = 1 << 10
_LARGE_NBYTES: Final = 1 << 20


def word_nbytes(
    itemsize: int,
    extents: Sequence[int],
    strides: tuple[Sequence[int], Sequence[int]],
    addresses: tuple[int, int],
) -> int:
    """Widest word in which two views of one shape can be copied, in bytes; at least `itemsize`.

    Args:
        itemsize: Bytes of an element.
        extents: Shape of the views.
        strides: Strides of both views, in bytes.
        addresses: Memory address of the first element of both.

    Examples:
        Runs of two halves, at multiples of 4 bytes:

        >>> word_nbytes(2, (100, 2), ((16, 2), (4, 2)), (64, 68))
        4
    """
    if not extents or itemsize not in {1, 2, 4, 8} or not prod(extents):
        return itemsize
    run = extents[-1] * itemsize
    if any(side[-1] != itemsize for side in strides) or run > _LONGEST_RUN_NBYTES:
        return itemsize
    steps = [stride for side in strides for stride in side[:-1]]
    width = gcd(_WIDEST_NBYTES, run, *steps)
    aligned = gcd(_WIDEST_ALIGNMENT_NBYTES, *addresses)
    # Two words of 8 bytes are as good as one of 16 at any address that 8 bytes may have.
    return width if aligned == _WIDEST_ALIGNMENT_NBYTES else gcd(width, aligned)


def is_for_threads(
    itemsize: int, extents: Sequence[int], strides: tuple[Sequence[int], Sequence[int]]
) -> bool:
    """Whether a copy is so large, and in runs so long, that several threads of PyTorch pay.

    The kernel takes one.

    Args:
        itemsize: Bytes of an element.
        extents: Shape of the views.
        strides: Strides of both views, in bytes.
    """
    return (
        bool(extents)
        and extents[-1] * itemsize >= _LONG_RUN_NBYTES
        and prod(extents) * itemsize >= _LARGE_NBYTES
        and all(side[-1] == itemsize for side in strides)
    )
