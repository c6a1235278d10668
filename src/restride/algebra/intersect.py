"""The elements that two pieces of one tensor have in common, for all pairs of their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.algebra.transfer import PURE, Transfer
from restride.algebra.walks import Walk, join, merge

if TYPE_CHECKING:
    from restride.algebra.piece import Piece

__all__ = ["intersect", "join_pieces"]

# Radices that do not divide each other give a walk for every residue. Beyond so many, one target
# rank at a time often gives half of them (of 183 random pairs of mixed radices with more than 64
# walks, 88 got fewer, 40,000 walks became 32,000 in all; below 64 it never paid for its time).
_MOST_JOINT: Final = 64


def intersect(target: Piece, source: Piece, /) -> tuple[Transfer, ...]:
    """Find the elements that two pieces have in common, for all their ranks together.

    Args:
        target: Piece of the layout that is wanted.
        source: Piece of the layout that is there, in the same full tensor.

    Returns:
        Transfers that visit each pair of steps at the same full index exactly once, and no other.

    Raises:
        UnsupportedError: The axes of a piece reach over each other in too many ways.

    Cost:
        Independent of extents; constant in number where strides divide each other.

    Examples:
        >>> from restride.algebra.piece import Axis, Piece
        >>> intersect(Piece((Axis(6, 1, 0, 1),)), Piece((Axis(6, 1, 0, 1),), full_base=4))[0].numel
        2
    """
    scale = target.scale / source.scale
    return tuple(Transfer.of_walk(walk, scale) for walk in join_pieces(target, source))


def join_pieces(target: Piece, source: Piece) -> list[Walk]:
    """Walks over (full, source rank, source shard, target rank, target shard) addresses."""
    there = _by_full(source)
    found = join(there, _by_full(target), pure=PURE)
    if len(found) <= _MOST_JOINT:
        return found
    ranks = sorted(set(target.ranks()))
    if len(ranks) >= len(found):
        return found
    each = [
        walk
        for rank in ranks
        for part in target.at_rank(rank)
        for walk in join(there, _by_full(part), pure=PURE)
    ]
    return min(found, merge(each, pure=PURE), key=len)


def _by_full(piece: Piece) -> Walk:
    """The walk of a piece with the full address first."""
    return Walk(
        (piece.full_base, piece.rank_base, piece.shard_base),
        tuple([(a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in piece.axes]),
    )
