"""Put a full tensor together from the shards of its ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from restride.algebra.copies import CopyAt, as_replicas, require_copies
from restride.algebra.coverage import Covered, explain, prove, replication
from restride.arrays._checks import (
    admit_out,
    admit_shards,
    block_of,
    require_unscaled_state,
    require_written_once,
    scales_of,
)
from restride.arrays._parts import Part, Parts, copy_parts
from restride.arrays._replicas import Holding, average, find_drift
from restride.errors import CoverageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

    from restride.algebra.layout import Layout
    from restride.arrays._blocks import Block, Side
    from restride.arrays._frameworks import Array

__all__ = ["rebuild"]


def rebuild(
    layout: Layout,
    shards: Mapping[int, Array],
    *,
    replicas: str | int = "check",
    state: str = "weight",
    out: Array | None = None,
) -> Array:
    """Put a full tensor together from the shards of its ranks.

    Args:
        layout: How the tensor is cut.
        shards: Shard of each rank, all NumPy arrays or all PyTorch tensors. A rank may be missing
            where the others hold all it has.
        replicas: What to do where several shards hold an element: ``"check"`` compares all copies
            bit for bit, so that equal NaNs are equal and +0.0 and -0.0 are not; ``"first"`` takes
            the one of the lowest rank; ``"mean"`` averages copies that differ, in float64, rounded
            once. An exact copy is preferred to a scaled one. A rank, by number or by coordinates
            such as ``"tp=1"``, takes its copies of whatever several ranks hold; where coordinates
            leave several ranks, their copies must be the same.
        state: What the tensor holds of its parameter. Only a layout with scales asks.
        out: Where to write: a contiguous array of the full shape and the shards' kind, dtype and
            device, without memory in common with them. It is written before copies are compared.

    Returns:
        `out`, or a new contiguous array of the shards' kind, dtype and device, without gradient.
        A scaled copy is scaled back, which is exact only for powers of two.

    Raises:
        LayoutError: No shards are given, or one for a rank that is not on the mesh.
        PlanError: `replicas` is nothing of that, or a rank that has no copy of something.
        ShapeMismatchError: A shard has another shape than the layout says.
        UnsupportedError: Shards differ in dtype or device, their dtype cannot be scaled back or
            averaged as asked, or `out` is not what it must be.
        CoverageError: The shards that are given leave a hole, or the layout writes a shard address
            twice or not at all.
        ReplicaError: Copies differ that must be the same.

    Cost:
        One pass over the shards, a second one where elements are replicated and compared. Memory
        for the result alone, unless copies differ.

    Examples:
        >>> import numpy as np
        >>> from restride import Axis, Layout, Piece
        >>> everywhere = Layout.of({"tp": 2}, (3,), [(3,)] * 2,
        ...                        [Piece((Axis(2, 0, 1, 0), Axis(3, 1, 0, 1)))])
        >>> shards = {0: np.array([1.0, 2.0, 3.0]), 1: np.array([1.0, 2.5, 3.0])}
        >>> rebuild(everywhere, shards, replicas="mean")
        array([1.  , 2.25, 3.  ])
        >>> rebuild(everywhere, shards, replicas="tp=1")
        array([1. , 2.5, 3. ])
        >>> rebuild(everywhere, shards)
        Traceback (most recent call last):
        ...
        restride.errors.ReplicaError: ranks 0, 1 hold different copies of 1 of 3 elements, the \
first at (1,): 2.0 on rank 0 and 2.5 on rank 1, the largest difference is 0.5; decide with \
replicas='first', 'mean' or the rank that counts
    """
    decided = as_replicas(replicas, layout.mesh)
    framework, admitted = admit_shards(layout, shards, "shard")
    require_unscaled_state((1 / scale for scale in scales_of(layout)), state)
    ranks = tuple(admitted)
    supplied = _supplied(layout, ranks)
    chosen = decided if isinstance(decided, CopyAt) else None
    if chosen is not None:
        require_copies(chosen, supplied)
    like, taken = next(iter(admitted.values())), list(map(framework.reach, admitted.values()))
    full = admit_out(framework, out, layout.full_shape, like, taken, "out")
    copy_parts(framework, admitted, full, _written(layout, ranks, chosen))
    if decided != "first" and _is_replicated(supplied):
        holdings = [
            Holding(rank, admitted[rank], block, scale, is_overruled)
            for rank, block, scale, is_overruled in _held(layout, ranks, chosen)
        ]
        drift = find_drift(framework, holdings, full, is_checked=decided != "mean")
        if drift is not None:
            if decided != "mean":
                raise drift.as_error(layout.full_shape)
            average(framework, holdings, full, drift)
    return full if out is None else out


_Held: TypeAlias = tuple[int, "Block", "Fraction", bool]
"""Rank, from its shard into the full tensor, scale, and whether another rank was chosen."""


def _held(layout: Layout, ranks: tuple[int, ...], chosen: CopyAt | None) -> list[_Held]:
    """What all ranks hold, copies that are preferred first."""
    held = [
        (
            rank,
            block_of(piece).turned(),
            piece.scale,
            chosen is not None and not chosen.is_at(layout.mesh, rank),
        )
        for rank in ranks
        for piece in layout.pieces(rank)
    ]
    # Sorting is stable: lower ranks come first.
    held.sort(key=lambda one: (one[3], one[2] != 1))
    return held


@lru_cache(maxsize=64)
def _written(layout: Layout, ranks: tuple[int, ...], chosen: CopyAt | None) -> Parts:
    """What to copy, preferred copies last. What another of the same cut would cover is left out."""
    outermost: dict[tuple[tuple[int, ...], Side], Part] = {}
    for rank, block, scale, _ in _held(layout, ranks, chosen):
        outermost.setdefault((block.extents, block.target), Part(rank, block, 1 / scale))
    return Parts(tuple(outermost.values())[::-1], is_each_once=False)


@lru_cache(maxsize=64)
def _is_replicated(supplied: Layout) -> bool:
    return bool(replication(supplied))


@lru_cache(maxsize=64)
def _supplied(layout: Layout, ranks: tuple[int, ...]) -> Layout:
    """The layout as far as the given ranks hold it, proved to cover the tensor."""
    require_written_once(layout)
    given = set(ranks)
    missing = [rank for rank in range(layout.rank_count) if rank not in given]
    supplied = layout
    if missing:
        held = (piece for rank in sorted(given) for piece in layout.pieces(rank))
        supplied = replace(layout, all_pieces=tuple(held))
    verdict = prove(supplied, side="full")
    if not isinstance(verdict, Covered):
        named = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
        raise CoverageError(
            explain(verdict, supplied),
            verdict=verdict,
            remedy=f"supply the shards of ranks {named} too" if missing else "",
        )
    return supplied
