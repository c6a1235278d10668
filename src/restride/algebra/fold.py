"""Fold index maps into few pieces, jointly over the ranks.

An index map says for each address of a shard which element of the full tensor stands there. It is
what running a partition function on markers gives. Folding finds the loops that it was made of.

Ranks are folded together. The *profile* of a shard address is how the full index there differs
from rank to rank; a loop inside the shard is legal only among addresses of one profile, so what
happens to touch on one rank alone is never joined, and what is split and what is replicated
separate by themselves. Every profile is a table of ranks and distances, which is folded in turn.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod
from operator import index, sub
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra._checks import require_int
from restride.algebra._nests import Nest, fold_points
from restride.algebra.canonical import canonicalize
from restride.algebra.layout import Fill, Layout, Padding
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.algebra.layout import Shape
    from restride.algebra.mesh import Mesh, MeshLike

__all__ = ["fold"]

# Far below every index, and the same for every padded address: no step from here is a step.
_PADDED: Final = -(1 << 62)

_Maps: TypeAlias = "dict[int, list[int]]"


def fold(
    index_maps: Sequence[Sequence[int]],
    *,
    mesh: MeshLike,
    full_shape: Iterable[int],
    shard_shapes: Iterable[Iterable[int]],
    inner: Iterable[tuple[int, int]] = (),
    fill: Fill = "zero",
) -> Layout:
    """Find the layout that a partition function had in mind from the index maps it made.

    Args:
        index_maps: For each rank, the full index at each address of its shard, in row-major order;
            negative where the address is padding.
        mesh: Names of the ranks.
        full_shape: Shape of the full tensor.
        shard_shapes: Shape of each rank's shard, in rank order.
        inner: Innermost loops (extent, full stride), outermost first, that have been taken out of
            every index map already: an entry then stands for a whole block of them, dense in the
            shard. Callers that have a fast way to find them save most of the work.
        fill: What the padding holds.

    Returns:
        A layout in canonical form that reproduces the index maps exactly. Whatever follows an
        arithmetic costs one piece for each arithmetic and run of ranks; a table that follows none
        costs what it is.

    Raises:
        LayoutError: The maps do not fit the mesh or the shapes, or hold something else than
            integers inside the full tensor.

    Cost:
        O(entries) for maps without padding that a single nest of loops describes; with the search
        for cuts, up to O(entries squared) for a few hundred entries without structure.

    Examples:
        Four rows of three columns, dealt to two ranks in turn:

        >>> layout = fold([[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]],
        ...               mesh={"tp": 2}, full_shape=(4, 3), shard_shapes=[(2, 3)] * 2)
        >>> for axis in layout.all_pieces[0].axes:
        ...     print(axis)
        Axis(extent=2, full_stride=3, rank_stride=1, shard_stride=0)
        Axis(extent=2, full_stride=6, rank_stride=0, shard_stride=3)
        Axis(extent=3, full_stride=1, rank_stride=0, shard_stride=1)
    """
    mesh = as_mesh(mesh)
    shapes = [tuple(shape) for shape in shard_shapes]
    loops = _checked_inner(inner)
    maps = _checked_maps(index_maps, mesh, shapes, prod(extent for extent, _ in loops))
    loops = [*_strip(maps), *loops]
    pieces: list[Piece] = []
    padding: list[Padding] = []
    for ranks in _by_length(maps):
        for rank_nest, nest in _fold_ranks(ranks):
            pieces.append(_piece(rank_nest, nest, loops))
        for rank_nest, nest in _fold_padding(ranks):
            padded = _piece(rank_nest, nest, [(extent, 0) for extent, _ in loops])
            padding.append(Padding(padded.axes, padded.rank_base, padded.shard_base, fill))
    return canonicalize(Layout.of(mesh, full_shape, shapes, pieces, padding))


def _checked_inner(inner: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    loops = list(inner)
    for extent, stride in loops:
        require_int("extent of an inner loop", extent, at_least=1)
        require_int("full stride of an inner loop", stride, at_least=0)
    return [(extent, stride) for extent, stride in loops if extent > 1]


def _checked_maps(
    index_maps: Sequence[Sequence[int]], mesh: Mesh, shapes: list[Shape], block: int
) -> _Maps:
    """Index maps by rank, as plain integers, with one and the same number for padding."""
    if not len(index_maps) == len(shapes) == mesh.size:
        raise LayoutError(
            f"{len(index_maps)} index maps and {len(shapes)} shard shapes are given, "
            f"the mesh {mesh} has {counted(mesh.size, 'rank')}"
        )
    maps: _Maps = {}
    for rank, (entries, shape) in enumerate(zip(index_maps, shapes, strict=True)):
        if len(entries) * block != prod(shape):
            raise LayoutError(
                f"the index map has {counted(len(entries), 'entry')} for blocks of {block}, "
                f"the shard of shape {shape} has {prod(shape)} elements",
                where=f"rank {rank}",
            )
        try:
            integers = [*map(index, entries)]
        except TypeError as error:
            raise LayoutError(
                f"the index map holds something else than integers: {error}", where=f"rank {rank}"
            ) from error
        if integers and min(integers) < 0:
            integers = [entry if entry >= 0 else _PADDED for entry in integers]
        maps[rank] = integers
    return maps


def _strip(maps: _Maps) -> list[tuple[int, int]]:
    """Take the innermost loops that all ranks share out of the maps, and return them."""
    loops: list[tuple[int, int]] = []
    while True:
        extent, step = _inner_loop(maps.values())
        if extent == 1:
            return loops
        loops.insert(0, (extent, step))
        for rank, entries in maps.items():
            maps[rank] = entries[::extent]


def _inner_loop(maps: Iterable[list[int]]) -> tuple[int, int]:
    step: int | None = None
    extent = 0
    for entries in maps:
        if not entries:
            continue
        extent = gcd(extent, len(entries))
        if step is None:
            step = next((b - a for a, b in pairwise(entries) if a >= 0), None)
        for at, difference in enumerate(map(sub, entries[1:], entries), 1):
            if difference != step and (entries[at] >= 0 or entries[at - 1] >= 0):
                extent = gcd(extent, at)
                if extent == 1:
                    break
    # A negative step is no loop of a shard, and padding alone has nothing to walk.
    return (1, 0) if step is None or step < 0 else (extent, step)


def _by_length(maps: _Maps) -> list[_Maps]:
    """Ranks with shards of equal size, which alone can share loops."""
    alike: dict[int, _Maps] = {}
    for rank, entries in maps.items():
        alike.setdefault(len(entries), {})[rank] = entries
    return list(alike.values())


def _fold_ranks(maps: _Maps) -> list[tuple[Nest, Nest]]:
    """Fold ranks jointly, or those that are alike apart from the others where that is less."""
    together = _fold_jointly(maps)
    groups = _translated(maps)
    if len(together) <= len(groups):
        return together
    apart = [fragment for group in groups for fragment in _fold_jointly(group)]
    return apart if len(apart) < len(together) else together


def _translated(maps: _Maps) -> list[_Maps]:
    """Ranks whose maps differ by a constant."""
    alike: dict[tuple[int | None, ...], _Maps] = {}
    for rank, entries in maps.items():
        alike.setdefault(_profile(entries), {})[rank] = entries
    return list(alike.values())


def _fold_jointly(maps: _Maps) -> list[tuple[Nest, Nest]]:
    """Fold ranks with one structure: pairs of a nest over ranks and a nest over the shard."""
    profiles: dict[tuple[int | None, ...], tuple[list[int], list[int]]] = {}
    for position, column in enumerate(zip(*maps.values(), strict=True)):
        first = next((entry for entry in column if entry >= 0), None)
        if first is None:
            continue
        positions, values = profiles.setdefault(_profile(column), ([], []))
        positions.append(position)
        values.append(first)
    fragments: list[tuple[Nest, Nest]] = []
    for profile, (positions, values) in profiles.items():
        live = [(rank, gap) for rank, gap in zip(maps, profile, strict=True) if gap is not None]
        rank_nests = fold_points(
            [rank for rank, _ in live], [gap for _, gap in live], may_descend=True
        )
        nests = fold_points(positions, values)
        fragments.extend((rank_nest, nest) for rank_nest in rank_nests for nest in nests)
    return fragments


def _profile(entries: Iterable[int]) -> tuple[int | None, ...]:
    """Distances to the first entry that is not padding."""
    entries = tuple(entries)
    first = next((entry for entry in entries if entry >= 0), 0)
    return tuple([entry - first if entry >= 0 else None for entry in entries])


def _fold_padding(maps: _Maps) -> list[tuple[Nest, Nest]]:
    padded: dict[tuple[int, ...], list[int]] = {}
    for position, column in enumerate(zip(*maps.values(), strict=True)):
        ranks = tuple(rank for rank, entry in zip(maps, column, strict=True) if entry < 0)
        if ranks:
            padded.setdefault(ranks, []).append(position)
    return [
        (rank_nest, nest)
        for ranks, positions in padded.items()
        for rank_nest in fold_points(ranks, [0] * len(ranks))
        for nest in fold_points(positions, [0] * len(positions))
    ]


def _piece(rank_nest: Nest, nest: Nest, loops: Sequence[tuple[int, int]]) -> Piece:
    block = prod(extent for extent, _ in loops)
    axes = [Axis(extent, full, rank, 0) for extent, rank, full in rank_nest.digits]
    axes.extend(Axis(extent, full, 0, shard * block) for extent, shard, full in nest.digits)
    shard = block
    for extent, full in loops:
        shard //= extent
        axes.append(Axis(extent, full, 0, shard))
    return Piece(tuple(axes), nest.second + rank_nest.second, rank_nest.first, nest.first * block)
