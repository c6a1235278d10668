"""A layout in a few words, for one column of a table."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from restride.algebra.signature import signature
from restride.cli.sizes import format_count
from restride.errors import LayoutError
from restride.layouts.codegen import codegen_qkv
from restride.layouts.replicated import replicated
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout

__all__ = ["describe_layout"]

# The permutation does not depend on the head count; its builder only checks that heads stay whole.
_CODEGEN_HEADS_PER_RANK = 4


@lru_cache(maxsize=512)
def describe_layout(layout: Layout) -> str:
    """Name the cut where it is a known one, and count the pieces where it is not.

    A name is proved: the layout means the same as what the builder of that name makes.

    Examples:
        >>> describe_layout(split((4, 6), mesh={"tp": 2}, dim=1))
        'dim 1 over tp'
        >>> describe_layout(codegen_qkv((48, 8), mesh={"tp": 2}, heads=16))
        'codegen-qkv over tp'
        >>> describe_layout(split((4, 6), mesh={"ep": 2}, sizes=[0, 4]))
        'whole on ep 1'
    """
    if layout.rank_count == 1:
        return "whole"
    holders = [rank for rank in range(layout.rank_count) if layout.shard_numel(rank)]
    if len(holders) == 1 and _is_whole(layout, holders[0]):
        place = layout.mesh.coordinates(holders[0])
        return f"whole on {', '.join(f'{name} {index}' for name, index in place.items())}"
    found = signature(layout)
    for words, candidate in _candidates(layout):
        if signature(candidate) == found:
            return words
    held = sum(count * prod(shape) for count, shape in layout.shard_shapes)
    partly = "partly replicated, " if held > layout.full_numel and not layout.padding else ""
    most = max(len(layout.pieces(rank)) for rank in range(layout.rank_count))
    return f"{partly}{format_count(most, 'piece')} per rank"


def _is_whole(layout: Layout, rank: int) -> bool:
    """Whether a rank holds the tensor as it is: what it holds is in its order, and all of it."""
    pieces = layout.pieces(rank)
    return layout.shard_shape(rank) == layout.full_shape and all(
        piece.full_base == piece.shard_base
        and piece.scale == 1
        and all(axis.full_stride == axis.shard_stride for axis in piece.axes)
        for piece in pieces
    )


def _candidates(layout: Layout) -> Iterator[tuple[str, Layout]]:
    shape, mesh = layout.full_shape, layout.mesh
    yield "replicated", replicated(shape, mesh=mesh)
    for name, size in mesh.axes:
        if size < 2:  # noqa: PLR2004 - nothing is cut over one rank
            continue
        ranks = [index * mesh.axis_stride(name) for index in range(size)]
        for dim in range(len(shape)):
            shapes = [layout.shard_shape(rank) for rank in ranks]
            if any(len(sizes) != len(shape) for sizes in shapes):
                continue
            sizes = [sizes[dim] for sizes in shapes]
            if sum(sizes) == shape[dim]:
                uneven = "" if len(set(sizes)) == 1 else ", uneven"
                cut = split(shape, mesh=mesh, dim=dim, sizes=sizes, axis=name)
                yield f"dim {dim} over {name}{uneven}", cut
        try:
            heads = _CODEGEN_HEADS_PER_RANK * size
            yield f"codegen-qkv over {name}", codegen_qkv(shape, mesh=mesh, heads=heads, axis=name)
        except LayoutError:
            continue
