"""Which ranks of a target hold the shards of a tensor, and which of them share each shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from restride.algebra.compose import chain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["Spread", "spread_dense", "spread_experts"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks of a target as (cutter, partition): whose shard, and which partition of it.

    Attributes:
        cutters: Ranks of the tensors' layouts: the tensor-parallel or the expert-parallel ones.
        partitions: Ranks that share the shard of a cutter.
        cutter_stride: Distance on the mesh ``dp, tp`` between neighbouring cutters.
        partition_stride: Distance between the partitions of one shard.
    """

    cutters: int
    partitions: int
    cutter_stride: int
    partition_stride: int

    def place(self, rank: int) -> tuple[int, int]:
        """The cutter and the partition that a rank of the mesh ``dp, tp`` is.

        Examples:
            >>> [Spread(2, 2, 1, 2).place(rank) for rank in range(4)]
            [(0, 0), (1, 0), (0, 1), (1, 1)]
        """
        cutter = rank // self.cutter_stride % self.cutters
        return cutter, rank // self.partition_stride % self.partitions

    def ranks(self, cutter: int) -> list[int]:
        """Ranks that share the shard of a cutter, in the order of their partitions."""
        first = cutter * self.cutter_stride
        return [first + number * self.partition_stride for number in range(self.partitions)]

    def chain(self, layout: Layout, inner: Mapping[int, Layout], target: DeepSpeedTarget) -> Layout:
        """Cut each cutter's shard of a tensor once more, over the ranks that share it.

        Args:
            layout: How the cutters cut the tensor.
            inner: For each cutter, how its flattened shard is cut into partitions.
            target: The ranks.
        """
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
