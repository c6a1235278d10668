"""Who holds what: the exact set of ranks of each element, and whether there is a choice."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

from restride.algebra._lattice import compact, numel_of
from restride.algebra._tiling import are_disjoint, full_lattice, located_sweep, tiles_by_fingerprint
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra._lattice import Digits, Lattice
    from restride.algebra.layout import Layout
    from restride.algebra.piece import Piece

__all__ = ["Held", "holders", "replication"]

# Holder sets name every rank; a layout of more visits than this is not from any cluster.
_MOST_VISITS = 1 << 20


class Held(Frozen):
    """Elements of the full tensor that the same ranks hold.

    Attributes:
        full_base: Lowest flat index.
        axes: (extent, full stride), strides falling; no element occurs twice.
        ranks: Every rank that holds these elements, sorted, once each.
    """

    full_base: int
    axes: Digits
    ranks: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of full elements."""
        return numel_of(self.axes)


def holders(layout: Layout) -> tuple[Held, ...]:
    """Find exactly which ranks hold each element of the full tensor.

    Returns:
        Disjoint sets of elements, by lowest element, each with all its ranks. Elements that nobody
        holds are in none.

    Raises:
        UnsupportedError: As for `prove`, or the walks visit more than a million ranks.

    Cost:
        O(pieces * ranks * log). Never walks elements.

    Examples:
        A projection with one key head on each pair of ranks:

        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> heads = Piece((Axis(2, 4, 2, 0), Axis(2, 0, 1, 0), Axis(4, 1, 0, 1)))
        >>> for held in holders(Layout.of({"tp": 4}, (8,), [(4,)] * 4, [heads])):
        ...     print(held.full_base, held.axes, held.ranks)
        0 ((4, 1),) (0, 1)
        4 ((4, 1),) (2, 3)
    """
    visits = sum(prod(axis.extent for axis in piece.rank_axes) for piece in layout.all_pieces)
    if visits > _MOST_VISITS:
        raise UnsupportedError(
            f"pieces visit ranks more than {_MOST_VISITS} times, and holders name every rank"
        )
    walks = (walk for piece in layout.all_pieces for walk in _held_by_rank(piece))
    by_ranks: dict[tuple[int, ...], list[Lattice]] = {}
    for region in located_sweep(walks, layout.full_numel, "full side"):
        ranks = tuple(sorted(set(region.tags)))
        by_ranks.setdefault(ranks, []).append((region.base, region.digits))
    found = [
        Held(base, axes, ranks)
        for ranks, lattices in by_ranks.items()
        for base, axes in compact(lattices)
    ]
    return tuple(sorted(found, key=lambda held: held.full_base))


def replication(layout: Layout) -> bool:
    """Tell whether any full element stands at more than one (rank, shard index).

    An element that one shard holds twice counts: there is a choice where to read it.

    Raises:
        UnsupportedError: As for `prove`.

    Cost:
        As for `prove`; less where an axis says it by itself.
    """
    if any(not axis.full_stride for piece in layout.all_pieces for axis in piece.axes):
        return True
    lattices = [full_lattice(piece) for piece in layout.all_pieces]
    steps = sum(numel_of(digits) for _, digits in lattices)
    if steps > layout.full_numel:
        return True
    if are_disjoint(lattices):
        return False
    if steps == layout.full_numel:
        is_once = tiles_by_fingerprint(lattices, steps)
        if is_once is not None:
            return not is_once
    walks = ((base, digits, number) for number, (base, digits) in enumerate(lattices))
    return any(
        len(region.tags) > 1 for region in located_sweep(walks, layout.full_numel, "full side")
    )


def _held_by_rank(piece: Piece) -> Iterator[tuple[int, Digits, int]]:
    """One walk over the full tensor for each visited rank, with the rank as its tag."""
    digits = tuple((a.extent, a.full_stride) for a in piece.shard_axes if a.full_stride)
    for steps in product(*(range(axis.extent) for axis in piece.rank_axes)):
        moved = list(zip(steps, piece.rank_axes, strict=True))
        yield (
            piece.full_base + sum(step * axis.full_stride for step, axis in moved),
            digits,
            piece.rank_base + sum(step * axis.rank_stride for step, axis in moved),
        )
