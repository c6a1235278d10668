"""Decide what moves between two layouts: every target address once, from a chosen replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from restride.algebra.compose import compose
from restride.algebra.coverage import Gap, Hole, Overlap, explain, prove, replication
from restride.algebra.transfer import Transfer, Transfers
from restride.algebra.walks import Walk, merge
from restride.errors import CoverageError, PlanError
from restride.frozen import Frozen
from restride.planning.replicas import Block, blocks_of_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from fractions import Fraction

    from restride.algebra.layout import Layout

__all__ = ["ReplicaChoice", "ReplicaPolicy", "plan_transfer"]


class ReplicaChoice(Frozen):
    """A question to a replica policy: which source rank should send this block?

    Attributes:
        target_rank: Rank that receives.
        source_ranks: Ranks that hold the block, sorted; the answer must be one of them.
        numel: Elements in the block.
        loads: Elements that each source rank sends already.
    """

    target_rank: int
    source_ranks: Sequence[int]
    numel: int
    loads: Mapping[int, int]


ReplicaPolicy: TypeAlias = "Callable[[ReplicaChoice], int]"


def plan_transfer(
    target: Layout,
    source: Layout,
    *,
    prefer: ReplicaPolicy | None = None,
    colocated: Mapping[int, int] | None = None,
) -> Transfers:
    """Plan the transfers of all rank pairs that turn shards of `source` into shards of `target`.

    Source and target ranks are two namespaces. Which replica is read is a policy: by default the
    rank that shares a process with the target rank, then the rank that has least to send so far.

    Args:
        target: Layout to produce. May hold only part of the tensor.
        source: Layout that is there. Must hold everything that `target` needs.
        prefer: Replaces the policy; called once for each block that several ranks hold.
        colocated: Target rank to the source rank in the same process. By default rank r is rank r.

    Returns:
        Transfers in which every target address that holds an element appears exactly once.
        Without replicas in the source they are as few as `compose` finds, for all ranks at once.

    Raises:
        ShapeMismatchError: The layouts describe tensors of different shape.
        CoverageError: The source lacks an element that the target needs, or a shard address of the
            target is written twice or by nobody.
        PlanError: `prefer` named a rank that does not hold the block.

    Cost:
        O(pieces * pieces) where the source has no replicas; O(target ranks * pieces) where it has.
        Never walks elements.
    """
    _require_writable(target)
    relation = compose(target, source)
    needed = sum(piece.numel for piece in target.all_pieces)
    if not replication(source):
        if sum(transfer.numel for transfer in relation.descriptors) != needed:
            _raise_missing(target, source)
        return relation
    policy = prefer if prefer is not None else _LocalThenBalanced(colocated)
    chosen: list[tuple[Fraction, Walk]] = []
    covered = 0
    loads: dict[int, int] = dict.fromkeys(range(source.rank_count), 0)
    for rank in range(target.rank_count):
        blocks = [_prefer_exact(block) for block in blocks_of_target(relation, rank)]
        # Blocks without a choice come first, so that the choices see the load they cause.
        for block in sorted(blocks, key=lambda block: len(block.holders) > 1):
            covered += block.numel
            chosen.extend(_choose(block, rank, policy, loads))
    if covered != needed:
        _raise_missing(target, source)
    return Transfers(source, target, _merged(chosen))


class _LocalThenBalanced(Struct):
    colocated: Mapping[int, int] | None

    def __call__(self, choice: ReplicaChoice) -> int:
        here = choice.target_rank
        local = here if self.colocated is None else self.colocated.get(here)
        if local is not None and local in choice.source_ranks:
            return local
        return min(choice.source_ranks, key=lambda rank: (choice.loads[rank], rank))


def _require_writable(target: Layout) -> None:
    verdict = prove(target, side="shard")
    if isinstance(verdict, Hole | Gap | Overlap):
        raise CoverageError(explain(verdict, target), verdict=verdict, where="target layout")


def _raise_missing(target: Layout, source: Layout) -> None:
    verdict = prove(source, side="full")
    if isinstance(verdict, Hole):
        raise CoverageError(explain(verdict, source), verdict=verdict, where="source layout")
    raise PlanError(
        f"the source of shape {source.full_shape} and the target of shape {target.full_shape} "
        "do not meet in every element"
    )


def _prefer_exact(block: Block) -> Block:
    """Leave out scaled replicas where an exact one holds the same elements."""
    exact = tuple(way for way in block.ways if way.scale == 1)
    return replace(block, ways=exact) if exact else block


def _choose(
    block: Block, target_rank: int, policy: ReplicaPolicy, loads: dict[int, int]
) -> Iterator[tuple[Fraction, Walk]]:
    holders = block.holders
    rank = holders[0]
    if len(holders) > 1:
        rank = policy(ReplicaChoice(target_rank, holders, block.numel, loads))
        if rank not in holders:
            raise PlanError(
                f"the replica policy chose source rank {rank!r} for target rank {target_rank}",
                remedy=f"choose one of {', '.join(map(str, holders))}",
            )
    loads[rank] += block.numel
    way = next(way for way in block.ways if rank in way.ranks)
    for walk in way.walks:
        yield way.scale, _with_ranks(walk, rank, target_rank)


def _with_ranks(walk: Walk, source_rank: int, target_rank: int) -> Walk:
    """(target shard, source shard, full) -> full, source rank, shard, target rank, shard."""
    target_shard, source_shard, full = walk.bases
    return Walk(
        (full, source_rank, source_shard, target_rank, target_shard),
        tuple((n, full, 0, source, 0, target) for n, target, source, full in walk.digits),
    )


def _merged(chosen: Iterable[tuple[Fraction, Walk]]) -> tuple[Transfer, ...]:
    by_scale: dict[Fraction, list[Walk]] = {}
    for scale, walk in chosen:
        by_scale.setdefault(scale, []).append(walk)
    return tuple(
        Transfer.of_walk(walk, scale)
        for scale, walks in by_scale.items()
        for walk in merge(walks, pure=((1, 2), (3, 4)))
    )
