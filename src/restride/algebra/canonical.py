"""The canonical way of writing a layout: few pieces, in one order.

Extents are at least 2, loops that continue each other on all three addresses are one, rank axes
come first by falling rank stride, then data axes by falling shard stride, equal pieces in
progression are one piece, and pieces are sorted by where they start on the (rank, shard) side.
Structure is presentation: two layouts with the same meaning may still look different, and
`signature` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.layout import Padding
from restride.algebra.piece import Axis, Piece
from restride.algebra.walks import Walk, merge

if TYPE_CHECKING:
    from collections.abc import Iterable
    from fractions import Fraction

    from restride.algebra.layout import Fill, Layout

__all__ = ["canonicalize", "canonicalize_pieces", "piece_of_walk", "walk_of_piece"]


def canonicalize(layout: Layout) -> Layout:
    """Write a layout in canonical form. It means the same: same elements, holders and scales.

    Cost:
        O(pieces log pieces). Never walks elements.
    """
    by_fill: dict[Fill, list[Piece]] = {}
    for padding in layout.padding:
        by_fill.setdefault(padding.fill, []).append(padding.as_piece())
    return replace(
        layout,
        all_pieces=canonicalize_pieces(layout.all_pieces),
        padding=tuple(
            Padding(piece.axes, piece.rank_base, piece.shard_base, fill)
            for fill, pieces in sorted(by_fill.items())
            for piece in canonicalize_pieces(pieces)
        ),
    )


def canonicalize_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Merge and sort pieces as `canonicalize` does; pieces of different scale stay apart.

    Examples:
        One piece a rank becomes one piece over the ranks:

        >>> rows = Axis(6, 1, 0, 1)
        >>> canonicalize_pieces([Piece((rows,)), Piece((rows,), 6, 1)])[0].axes[0]
        Axis(extent=2, full_stride=6, rank_stride=1, shard_stride=0)
    """
    by_scale: dict[Fraction, list[Walk]] = {}
    for piece in pieces:
        by_scale.setdefault(piece.scale, []).append(walk_of_piece(piece))
    merged = [
        piece_of_walk(walk, scale)
        for scale, walks in by_scale.items()
        for walk in merge(walks, is_legal=_is_axis)
    ]
    return tuple(sorted(merged, key=_place))


def walk_of_piece(piece: Piece) -> Walk:
    """The walk of a piece over (rank, shard, full) addresses."""
    return Walk(
        (piece.rank_base, piece.shard_base, piece.full_base),
        tuple((a.extent, a.rank_stride, a.shard_stride, a.full_stride) for a in piece.axes),
    )


def piece_of_walk(walk: Walk, scale: Fraction) -> Piece:
    """The piece of a walk over (rank, shard, full) addresses.

    A loop that runs over the ranks or the shard backwards is turned round.

    Raises:
        LayoutError: A loop is no axis: it moves rank and shard together, or stands still on both.
    """
    bases = list(walk.bases)
    axes: list[Axis] = []
    for extent, *strides in walk.digits:
        if extent == 1:
            continue
        if strides[0] < 0 or strides[1] < 0:
            bases = [
                base + (extent - 1) * stride for base, stride in zip(bases, strides, strict=True)
            ]
            strides = [-stride for stride in strides]  # noqa: PLW2901 - the loop turned round
        rank, shard, full = strides
        axes.append(Axis(extent, full, rank, shard))
    rank_base, shard_base, full_base = bases
    return Piece(tuple(axes), full_base, rank_base, shard_base, scale)


def _is_axis(step: tuple[int, ...]) -> bool:
    """Whether strides over (rank, shard, full) make an axis."""
    rank, shard, full = step
    if rank:
        return rank > 0 and not shard
    return shard > 0 and full >= 0


def _place(piece: Piece) -> tuple[int, int, int, Fraction]:
    return piece.rank_base, piece.shard_base, piece.full_base, piece.scale
