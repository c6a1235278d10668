"""Which ranks of a target hold the shards of a tensor, and which of them share each shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra.compose import chain
from restride.formats.deepspeed._rank_blocks import chained_in_block
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["Spread", "spread_cut_experts", "spread_dense", "spread_experts"]


class Spread(Frozen):
    """The ranks of a target as (cutter, partition): whose shard, and which partition of it.

    Attributes:
        cutters: Ranks of the tensors' layouts: the tensor-parallel or the expert-parallel ones.
        partitions: Ranks that share the shard of a cutter.
        cutter_stride: Distance on the mesh ``dp, tp`` between neighbouring cutters.
        partition_stride: Distance between the partitions of one shard.
        block: Cutters that are neighbours; `cutter_stride` is the distance between two such blocks.
    """

    cutters: int
    partitions: int
    cutter_stride: int
    partition_stride: int
    block: int = 1

    def place(self, rank: int) -> tuple[int, int]:
        """The cutter and the partition that a rank of the mesh ``dp, tp`` is.

        Examples:
            >>> [Spread(2, 2, 1, 2).place(rank) for rank in range(4)]
            [(0, 0), (1, 0), (0, 1), (1, 1)]
        """
        block = rank // self.cutter_stride % (self.cutters // self.block)
        cutter = block * self.block + rank % self.block
        return cutter, rank // self.partition_stride % self.partitions

    def ranks(self, cutter: int) -> list[int]:
        """Ranks that share the shard of a cutter, in the order of their partitions."""
        first = cutter // self.block * self.cutter_stride + cutter % self.block
        return [first + number * self.partition_stride for number in range(self.partitions)]

    def chain(self, layout: Layout, inner: Mapping[int, Layout], target: DeepSpeedTarget) -> Layout:
        """Cut each cutter's shard of a tensor once more, over the ranks that share it.

        Args:
            layout: How the cutters cut the tensor.
            inner: For each cutter, how its flattened shard is cut into partitions.
            target: The ranks.
        """
        if self.block > 1:
            return chained_in_block(layout, inner, target.mesh, self.block)
        first = inner[0]
        is_same = all(cut == first for cut in inner.values())
        return chain(
            layout,
            first if is_same else inner,
            mesh=target.mesh,
            outer_stride=self.cutter_stride,
            inner_stride=self.partition_stride,
        )


def spread_dense(target: DeepSpeedTarget) -> Spread:
    """Parameters that all data-parallel ranks share, each tensor-parallel rank its shard."""
    return Spread(target.tp, target.dp, 1, target.tp)


def spread_experts(target: DeepSpeedTarget, *, is_data_first: bool) -> Spread:
    """Experts: the ranks with the same ones share them, whatever their tensor-parallel ranks.

    Neighbouring ranks hold different experts, unless the run puts data parallelism first (deepspeed
    0.19.8 `utils/groups.py`, `_create_expert_and_data_parallel`).

    Examples:
        >>> from restride.formats.deepspeed.target import DeepSpeedTarget
        >>> target = DeepSpeedTarget(tp=1, dp=4, zero=1, ep=2)
        >>> spread_experts(target, is_data_first=False).ranks(1)
        [1, 3]
        >>> spread_experts(target, is_data_first=True).ranks(1)
        [2, 3]
    """
    count = target.dp * target.tp // target.ep
    if is_data_first:
        return Spread(target.ep, count, count, 1)
    return Spread(target.ep, count, 1, target.ep)


def spread_cut_experts(target: DeepSpeedTarget, *, is_data_first: bool) -> Spread:
    """Experts that tensor-parallel ranks cut: each of these has all expert-parallel ranks.

    A cutter is one of each; the tensor-parallel rank is the fastest (deepspeed 0.19.8
    `utils/groups.py`, `_get_expert_parallel_ranks`).

    Examples:
        >>> from restride.formats.deepspeed.target import DeepSpeedTarget
        >>> target = DeepSpeedTarget(tp=2, dp=4, zero=1, ep=2)
        >>> spread_cut_experts(target, is_data_first=False).ranks(3)
        [3, 7]
        >>> spread_cut_experts(target, is_data_first=True).ranks(3)
        [5, 7]
    """
    cutters, count = target.ep * target.tp, target.dp // target.ep
    if is_data_first and target.tp > 1:
        return Spread(cutters, count, count * target.tp, target.tp, target.tp)
    return Spread(cutters, count, 1, cutters)
