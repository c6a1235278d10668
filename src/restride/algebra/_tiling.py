"""The sides of a layout as lattices on one address, and whether lattices tile it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from restride.algebra._field import MOST_BITS, PRIME, Fingerprint, field_point, points_needed
from restride.algebra._lattice import compact, normalize, reach_of, unroll, whole
from restride.algebra._sweep import Region, sweep
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from restride.algebra._lattice import Digits, Lattice
    from restride.algebra.piece import Piece

__all__ = [
    "are_disjoint",
    "full_lattice",
    "located_sweep",
    "shard_lattice",
    "tiles_by_fingerprint",
    "tiles_by_structure",
]

T = TypeVar("T", bound="Hashable")


def full_lattice(piece: Piece) -> Lattice:
    """Full indices of a piece; loops that stand still are dropped."""
    return normalize(piece.full_base, [(a.extent, a.full_stride) for a in piece.axes])


def shard_lattice(piece: Piece, width: int) -> Lattice:
    """(rank, shard index) as one address: all shards side by side, each `width` wide."""
    return normalize(
        piece.rank_base * width + piece.shard_base,
        [(a.extent, a.rank_stride * width or a.shard_stride) for a in piece.axes],
    )


def are_disjoint(lattices: list[Lattice]) -> bool:
    """Whether structure alone says that no point occurs twice."""
    joined = compact(lattices)
    intervals = joined if all(map(_is_interval, joined)) else unroll(joined)
    if intervals is None:
        return False
    intervals.sort()
    reach = -1
    for base, digits in intervals:
        if base <= reach:
            return False
        reach = base + reach_of(digits)
    return True


def _is_interval(lattice: Lattice) -> bool:
    digits = lattice[1]
    # Two loops in steps of 1 stand on their common addresses more than once.
    return not digits or (len(digits) == 1 and digits[0][1] == 1)


def tiles_by_structure(lattices: Iterable[Lattice], numel: int, *, union: bool = False) -> bool:
    """Whether structure alone says that lattices hold each address below `numel` once.

    With `union`, at least once. False says nothing.
    """
    goal = whole(numel)
    joined = compact(lattices, union=union)
    if goal in joined:
        return union or len(joined) == 1
    unrolled = unroll(joined)
    if unrolled is None:
        return False
    joined = compact(unrolled, union=union)
    return goal in joined and (union or len(joined) == 1)


def tiles_by_fingerprint(lattices: Collection[Lattice], numel: int) -> bool | None:
    """Whether lattices of `numel` points in all hold each address below `numel` once.

    None where the numbers are too large to tell. The count matters: it keeps every multiplicity
    below the prime.
    """
    if numel.bit_length() > MOST_BITS:
        return None
    seed = repr((numel, sorted(lattices))).encode()
    _, all_digits = whole(numel)
    for number in range(points_needed(numel)):
        sums = Fingerprint((field_point(seed, number),))
        if sum(sums.walk((base,), digits) for base, digits in lattices) % PRIME != sums.walk(
            (0,), all_digits
        ):
            return False
    return True


def located_sweep(
    walks: Iterable[tuple[int, Digits, T]], numel: int, where: str
) -> tuple[Region[T], ...]:
    """Sweep, and say where where that is refused."""
    try:
        return sweep(walks, numel)
    except UnsupportedError as error:
        raise error.located(where) from None
