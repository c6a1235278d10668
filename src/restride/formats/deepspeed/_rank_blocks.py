"""Layouts on some of the ranks of a mesh, of which the others hold nothing.

An expert of DeepSpeed's own layers is on one expert-parallel rank. Where tensor-parallel ranks cut
it, these are neighbours, and the others have none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.canonical import canonicalize
from restride.algebra.compose import chain
from restride.algebra.layout import Layout, shape_runs
from restride.algebra.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["block_of", "chained_in_block", "gathered", "in_block"]


def in_block(layout: Layout, mesh: Mesh, first: int) -> Layout:
    """The same layout on neighbouring ranks of a mesh; the others hold nothing.

    Args:
        layout: What these ranks hold.
        mesh: All ranks.
        first: The first of these.

    Examples:
        >>> from restride.layouts import split
        >>> cut = in_block(split((4,), mesh={"tp": 2}), Mesh((("ep", 2), ("tp", 2))), 2)
        >>> [cut.shard_shape(rank) for rank in range(4)]
        [(0,), (0,), (2,), (2,)]
    """
    count = layout.rank_count
    after = mesh.size - first - count
    return replace(
        layout,
        mesh=mesh,
        shard_shapes=(
            *(((first, (0,)),) if first else ()),
            *layout.shard_shapes,
            *(((after, (0,)),) if after else ()),
        ),
        all_pieces=tuple(
            replace(piece, rank_base=piece.rank_base + first) for piece in layout.all_pieces
        ),
        padding=tuple(
            replace(padding, rank_base=padding.rank_base + first) for padding in layout.padding
        ),
    )


def block_of(layout: Layout, first: int, mesh: Mesh) -> Layout:
    """What neighbouring ranks hold of a layout in which the others hold nothing.

    Args:
        layout: The layout on all ranks.
        first: The first of these.
        mesh: These ranks.
    """
    return gathered(layout, range(first, first + mesh.size), mesh)


def gathered(layout: Layout, ranks: Sequence[int], mesh: Mesh) -> Layout:
    """What some ranks hold of a layout, as the ranks of another mesh, in this order.

    Args:
        layout: The layout.
        ranks: For each rank of the mesh, the one whose shard it has.
        mesh: The ranks of the result.
    """
    return canonicalize(
        Layout(
            mesh,
            layout.full_shape,
            shape_runs(layout.shard_shape(rank) for rank in ranks),
            tuple(
                replace(piece, rank_base=place)
                for place, rank in enumerate(ranks)
                for piece in layout.pieces(rank)
            ),
            tuple(
                replace(padding, rank_base=place)
                for place, rank in enumerate(ranks)
                for padding in layout.paddings(rank)
            ),
            layout.unit_bits,
        )
    )


def chained_in_block(layout: Layout, inner: Mapping[int, Layout], mesh: Mesh, block: int) -> Layout:
    """Cut the shards of a layout once more where the ranks that share them are neighbours.

    Rank ``a * block + b`` of the layout, of which those of one ``a`` alone hold anything, shares
    its shard with the ranks ``b``, ``b + block`` and so on of the ``a``-th part of the mesh.

    Args:
        layout: Cuts the tensor; one block of its ranks holds something.
        inner: For each of its ranks, how the flattened shard is cut.
        mesh: The ranks of the result.
        block: Neighbouring ranks that cut one tensor.
    """
    held = next((rank for rank in range(layout.rank_count) if layout.shard_numel(rank)), 0)
    own, parts = held // block, mesh.size // layout.rank_count
    ranks = Mesh((("part", parts), ("block", block)))
    cut = chain(
        block_of(layout, own * block, Mesh((("block", block),))),
        {rank: inner[own * block + rank] for rank in range(block)},
        mesh=ranks,
        outer_stride=1,
        inner_stride=block,
    )
    return in_block(cut, mesh, own * ranks.size)
