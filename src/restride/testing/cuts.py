"""Read a layout by walking every element: the slow, obvious way to compare it with a real cut."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.layouts.catalogue import Entry

__all__ = ["PADDED", "UNNAMED", "index_maps", "read_example"]

PADDED = -1
"""In an index map: the address is declared padding."""

UNNAMED = -2
"""In an index map: the layout says nothing of the address."""


def index_maps(layout: Layout) -> list[list[int]]:
    """Full index at each shard address of each rank, or `PADDED`, or `UNNAMED`.

    Raises:
        AssertionError: Two steps write the same address, or an address is outside its shard or the
            full tensor.

    Examples:
        >>> from restride.layouts import padded
        >>> index_maps(padded((3,), mesh={"tp": 2}, rows=4))
        [[0, 1], [2, -1]]
    """
    maps = [[UNNAMED] * layout.shard_numel(rank) for rank in range(layout.rank_count)]
    walks = [(piece, True) for piece in layout.all_pieces]
    walks += [(padding.as_piece(), False) for padding in layout.padding]
    for piece, is_element in walks:
        for steps in product(*(range(axis.extent) for axis in piece.axes)):
            full, rank, shard = piece.full_base, piece.rank_base, piece.shard_base
            for step, axis in zip(steps, piece.axes, strict=True):
                full += step * axis.full_stride
                rank += step * axis.rank_stride
                shard += step * axis.shard_stride
            assert 0 <= full < max(1, layout.full_numel)
            assert maps[rank][shard] == UNNAMED, f"rank {rank} writes address {shard} twice"
            maps[rank][shard] = full if is_element else PADDED
    return maps


def read_example(entry: Entry) -> dict[str, object]:
    """The example of a layout of the catalogue, as arguments of its builder."""
    return {
        p.name: p.parse(entry.example[p.name]) for p in entry.parameters if p.name in entry.example
    }
