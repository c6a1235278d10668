"""Turn shards of one layout into shards of another, by a plan."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.canonical import piece_of_walk
from restride.algebra.coverage import require_covered
from restride.algebra.walks import Walk
from restride.arrays._blocks import Block, Side
from restride.arrays._checks import (
    admit_out,
    admit_shards,
    fill_padding,
    require_unscaled_state,
    scales_of,
)
from restride.arrays._parts import Part, Parts, copy_parts
from restride.errors import CoverageError, LayoutError, PlanError
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.algebra.layout import Layout
    from restride.algebra.transfer import Transfer, Transfers
    from restride.arrays._frameworks import Array, Framework

__all__ = ["move"]


def move(
    transfers: Transfers,
    shards: Mapping[int, Array],
    *,
    state: str = "weight",
    out: Mapping[int, Array] | None = None,
) -> dict[int, Array]:
    """Carry out the transfers between all ranks in this process.

    Args:
        transfers: What moves; `restride.plan_transfer` makes them.
        shards: Shard of each source rank, all NumPy arrays or all PyTorch tensors. A rank that no
            transfer reads may be missing.
        state: What the tensor holds of its parameter. Only transfers with scales ask.
        out: Where to write the shards of some or all target ranks: contiguous arrays of their
            shapes and the shards' kind, dtype and device, without memory in common with them or
            each other.

    Returns:
        The shard of each target rank: that of `out`, or new and contiguous, of the shards' kind,
        dtype and device. Elements are copied bit for bit, but for scales as in `extract`; padding
        is zero.

    Raises:
        LayoutError: No shards are given, or one for a rank that is not on the source's mesh, or
            an `out` for a rank that is not on the target's.
        ShapeMismatchError: A shard has another shape than the source layout says.
        UnsupportedError: Shards differ in dtype or device, or cannot be scaled, or an array of
            `out` is not what it must be.
        CoverageError: The transfers do not write every target address exactly once.
        PlanError: The shard of a rank that is read was not given.

    Cost:
        One pass over the target shards. Memory for the target shards of all ranks.

    Examples:
        >>> import numpy as np
        >>> from restride import Axis, Layout, Piece, plan_transfer
        >>> rows = Layout.of({"tp": 2}, (2, 2), [(1, 2)] * 2,
        ...                  [Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)))])
        >>> columns = Layout.of({"tp": 2}, (2, 2), [(2, 1)] * 2,
        ...                     [Piece((Axis(2, 1, 1, 0), Axis(2, 2, 0, 1)))])
        >>> shards = {0: np.array([[0, 1]]), 1: np.array([[2, 3]])}
        >>> move(plan_transfer(columns, rows), shards)[1].tolist()
        [[1], [3]]
    """
    framework, admitted = admit_shards(transfers.source, shards, "source shard")
    require_unscaled_state(scales_of(transfers), state)
    _require_each_once(transfers)
    moved = _targets(framework, transfers.target, admitted, out or {})
    for rank, shard in moved.items():
        fill_padding(framework, transfers.target, rank, shard)
        read, parts = _received(transfers, rank)
        for source_rank in read:
            if source_rank not in admitted:
                raise PlanError(
                    f"target rank {rank} reads source rank {source_rank}, which is not given",
                    remedy="hand in its shard, or plan with a source without that rank",
                )
        copy_parts(framework, admitted, shard, parts)
    return {rank: (out or {}).get(rank, shard) for rank, shard in moved.items()}


def _targets(
    framework: Framework,
    target: Layout,
    admitted: Mapping[int, Array],
    out: Mapping[int, Array],
) -> dict[int, Array]:
    """Memory for the shard of each target rank."""
    strangers = [rank for rank in out if not 0 <= rank < target.rank_count]
    if strangers:
        raise LayoutError(
            f"out has an array for rank {strangers[0]}, the target has "
            f"{counted(target.rank_count, 'rank')}"
        )
    like, taken = next(iter(admitted.values())), list(map(framework.reach, admitted.values()))
    targets: dict[int, Array] = {}
    for rank in range(target.rank_count):
        given = out.get(rank)
        where = f"out of rank {rank}"
        targets[rank] = admit_out(framework, given, target.shard_shape(rank), like, taken, where)
        if given is not None:
            taken.append(framework.reach(targets[rank]))
    return targets


@lru_cache(maxsize=64)
def _require_each_once(transfers: Transfers) -> None:
    written = []
    for transfer in transfers.descriptors:
        digits = [
            (axis.extent, axis.target_rank_stride, axis.target_shard_stride, 0)
            for axis in transfer.axes
        ]
        if any(not rank and not shard for _, rank, shard, _ in digits):
            raise PlanError(
                "the transfers name every source rank that holds an element",
                remedy="let plan_transfer choose one of them",
            )
        bases = (transfer.target_rank_base, transfer.target_shard_base, 0)
        written.append(piece_of_walk(Walk(bases, tuple(digits)), Fraction(1)))
    try:
        require_covered(replace(transfers.target, all_pieces=tuple(written)), side="shard")
    except CoverageError as error:
        raise error.located("transfers") from None


@lru_cache(maxsize=256)
def _received(transfers: Transfers, rank: int) -> tuple[tuple[int, ...], Parts]:
    """All that one target rank receives, and from which source ranks."""
    parts = [
        Part(source_rank, block.forwards(), transfer.scale)
        for transfer in transfers.at_target(rank)
        for source_rank, block in _by_source(transfer)
    ]
    return tuple(dict.fromkeys(part.rank for part in parts)), Parts(tuple(parts))


def _by_source(transfer: Transfer) -> Iterator[tuple[int, Block]]:
    """Fix the source rank of a transfer whose target rank is fixed."""
    over_ranks = [axis for axis in transfer.axes if axis.source_rank_stride]
    axes = [axis for axis in transfer.axes if not axis.source_rank_stride]
    extents = tuple(axis.extent for axis in axes)
    source_strides = tuple(axis.source_shard_stride for axis in axes)
    target_strides = tuple(axis.target_shard_stride for axis in axes)
    for steps in product(*(range(axis.extent) for axis in over_ranks)):
        moved = list(zip(steps, over_ranks, strict=True))
        target_base = sum(step * axis.target_shard_stride for step, axis in moved)
        yield (
            transfer.source_rank_base + sum(step * a.source_rank_stride for step, a in moved),
            Block(
                extents,
                Side(transfer.source_shard_base, source_strides),
                Side(transfer.target_shard_base + target_base, target_strides),
            ),
        )
