"""Slow, obvious definitions of what the algebra says: every function walks every element.

A law test compares a function of `restride.algebra` with its oracle here, as multisets, so that
sizes are compared too: a result that forgets steps or has them twice is caught.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from fractions import Fraction

    from restride.algebra.layout import Layout
    from restride.algebra.piece import Piece
    from restride.algebra.transfer import Transfer
    from restride.algebra.walks import Walk

__all__ = [
    "chain_by_walking",
    "compose_by_walking",
    "join_by_walking",
    "walk_addresses",
    "walk_padding",
    "walk_piece",
    "walk_relation",
    "walk_transfers",
]

Held: TypeAlias = "tuple[int, int, int, Fraction]"
"""(full index, rank, shard index, scale)."""
Moved: TypeAlias = "tuple[int, int, int, int, int, Fraction]"
"""(full index, source rank, source shard index, target rank, target shard index, scale)."""


def walk_addresses(walk: Walk) -> Iterator[tuple[int, ...]]:
    """Yield the addresses of each step of a walk, outermost loop first.

    Examples:
        >>> from restride.algebra.walks import Walk
        >>> list(walk_addresses(Walk((5, 0), ((2, 10, 1), (2, 1, 2)))))
        [(5, 0), (6, 2), (15, 1), (16, 3)]
    """
    for steps in product(*(range(digit[0]) for digit in walk.digits)):
        addresses = list(walk.bases)
        for step, digit in zip(steps, walk.digits, strict=True):
            for place, stride in enumerate(digit[1:]):
                addresses[place] += step * stride
        yield tuple(addresses)


def walk_piece(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield (full index, rank, shard index) of each step of a piece, outermost loop first.

    Examples:
        >>> from restride.algebra.piece import Axis, Piece
        >>> list(walk_piece(Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)))))
        [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    """
    for steps in product(*(range(axis.extent) for axis in piece.axes)):
        full, rank, shard = piece.full_base, piece.rank_base, piece.shard_base
        for step, axis in zip(steps, piece.axes, strict=True):
            full += step * axis.full_stride
            rank += step * axis.rank_stride
            shard += step * axis.shard_stride
        yield full, rank, shard


def walk_relation(layout: Layout) -> Counter[Held]:
    """Everything that a layout says of elements, and how often it says it.

    Examples:
        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> halves = Piece((Axis(2, 1, 1, 0),))
        >>> for held in walk_relation(Layout.of({"tp": 2}, (2,), [(1,), (1,)], [halves])):
        ...     print(*held)
        0 0 0 1
        1 1 0 1
    """
    return Counter(
        (*held, piece.scale) for piece in layout.all_pieces for held in walk_piece(piece)
    )


def walk_padding(layout: Layout) -> Counter[tuple[int, int, str]]:
    """(rank, shard index, fill) of everything that a layout declares to be padding."""
    return Counter(
        (rank, shard, padding.fill)
        for padding in layout.padding
        for _, rank, shard in walk_piece(padding.as_piece())
    )


def walk_transfers(transfers: Iterable[Transfer]) -> Counter[Moved]:
    """Everything that transfers move, and how often."""
    moved: Counter[Moved] = Counter()
    for transfer in transfers:
        for full, from_rank, from_shard, to_rank, to_shard in walk_addresses(transfer.as_walk()):
            moved[full, from_rank, from_shard, to_rank, to_shard, transfer.scale] += 1
    return moved


def join_by_walking(a: Walk, b: Walk) -> Counter[tuple[int, ...]]:
    """What `join` must visit: each pair of steps with equal first addresses, once.

    Examples:
        >>> from restride.algebra.walks import Walk
        >>> join_by_walking(Walk((0, 7), ((3, 2, 1),)), Walk((1, 9), ((4, 1, 1),)))
        Counter({(2, 8, 10): 1, (4, 9, 12): 1})
    """
    met: dict[int, list[tuple[int, ...]]] = {}
    for first, *others in walk_addresses(b):
        met.setdefault(first, []).append(tuple(others))
    return Counter(
        (first, *others, *more)
        for first, *others in walk_addresses(a)
        for more in met.get(first, ())
    )


def compose_by_walking(target: Layout, source: Layout) -> Counter[Moved]:
    """What `compose` must say: every pair of holders of the same element."""
    held: dict[int, list[tuple[tuple[int, int, Fraction], int]]] = {}
    for (full, rank, shard, scale), count in walk_relation(source).items():
        held.setdefault(full, []).append(((rank, shard, scale), count))
    moved: Counter[Moved] = Counter()
    for (full, to_rank, to_shard, to_scale), to_count in walk_relation(target).items():
        for (from_rank, from_shard, from_scale), from_count in held.get(full, ()):
            pair = full, from_rank, from_shard, to_rank, to_shard, to_scale / from_scale
            moved[pair] += to_count * from_count
    return moved


def chain_by_walking(
    outer: Layout, inner: Mapping[int, Layout], *, outer_stride: int, inner_stride: int
) -> tuple[Counter[Held], Counter[tuple[int, int, str]]]:
    """What `chain` must say of elements and of padding, one inner layout for each outer rank."""
    relation: Counter[Held] = Counter()
    padding: Counter[tuple[int, int, str]] = Counter()
    parts = {rank: list(walk_relation(layout).elements()) for rank, layout in inner.items()}
    for full, rank, place, outer_scale in walk_relation(outer).elements():
        for address, part, shard, scale in parts[rank]:
            if address == place:
                holder = rank * outer_stride + part * inner_stride
                relation[full, holder, shard, outer_scale * scale] += 1
    for rank, place, fill in walk_padding(outer).elements():
        for address, part, shard, _ in parts[rank]:
            if address == place:
                padding[rank * outer_stride + part * inner_stride, shard, fill] += 1
    for rank, layout in inner.items():
        for part, shard, fill in walk_padding(layout).elements():
            padding[rank * outer_stride + part * inner_stride, shard, fill] += 1
    return relation, padding
