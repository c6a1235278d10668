"""What moves between two layouts: common strided blocks of source and target shards.

A transfer is a piece with two sides. Its axes move the full index, the source rank and shard
index, and the target rank and shard index together, so one transfer describes what many pairs of
ranks exchange. On either side an axis moves the rank or the shard index, never both, so that fixing
a rank is a substitution.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra._checks import require_int
from restride.algebra.walks import Walk, fix
from restride.errors import LayoutError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from restride.algebra.layout import Layout

__all__ = ["PURE", "Transfer", "TransferAxis", "Transfers"]

_SOURCE_RANK, _TARGET_RANK = 1, 3
PURE: Final = ((1, 2), (3, 4))
"""Addresses of a transfer of which no axis moves both: rank and shard index of either side."""


class TransferAxis(Frozen):
    """One loop of a transfer.

    Attributes:
        extent: Number of steps, at least 2.
        full_stride: Distance between two steps in the full tensor; 0 where the same element is held
            again, by another source or another target.
        source_rank_stride: Distance over the source ranks.
        source_shard_stride: Distance in the source shard.
        target_rank_stride: Distance over the target ranks.
        target_shard_stride: Distance in the target shard.

    Raises:
        LayoutError: A number is no integer, or the axis moves rank and shard index of one side.
    """

    extent: int
    full_stride: int
    source_rank_stride: int
    source_shard_stride: int
    target_rank_stride: int
    target_shard_stride: int

    def __post_init__(self) -> None:
        require_int("extent of a transfer axis", self.extent, at_least=2)
        for name in self.__struct_fields__[1:]:
            require_int(f"{name} of a transfer axis", getattr(self, name))
        for side, rank, shard in (
            ("source", self.source_rank_stride, self.source_shard_stride),
            ("target", self.target_rank_stride, self.target_shard_stride),
        ):
            if rank and shard:
                raise LayoutError(
                    f"a transfer axis moves {side} rank (by {rank}) and shard index (by {shard})"
                )


class Transfer(Frozen):
    """Elements that source and target have in common, as one strided block.

    Attributes:
        axes: Loops, outermost first.
        full_base: Flat index of the first element in the full tensor.
        source_rank_base: Rank that holds it in the source layout.
        source_shard_base: Where it is in that rank's shard.
        target_rank_base: Rank that holds it in the target layout.
        target_shard_base: Where it is in that rank's shard.
        scale: Exact factor: ``target == source * scale``.
    """

    axes: tuple[TransferAxis, ...]
    full_base: int
    source_rank_base: int
    source_shard_base: int
    target_rank_base: int
    target_shard_base: int
    scale: Fraction = Fraction(1)

    @classmethod
    def of_walk(cls, walk: Walk, scale: Fraction) -> Transfer:
        """Build a transfer from a walk over its five addresses, in the order of the fields."""
        axes = tuple(TransferAxis(*digit) for digit in walk.digits)
        full, source_rank, source_shard, target_rank, target_shard = walk.bases
        return cls(axes, full, source_rank, source_shard, target_rank, target_shard, scale)

    def as_walk(self) -> Walk:
        """The walk over the five addresses, in the order of the fields."""
        return Walk(
            (
                self.full_base,
                self.source_rank_base,
                self.source_shard_base,
                self.target_rank_base,
                self.target_shard_base,
            ),
            tuple(
                (
                    axis.extent,
                    axis.full_stride,
                    axis.source_rank_stride,
                    axis.source_shard_stride,
                    axis.target_rank_stride,
                    axis.target_shard_stride,
                )
                for axis in self.axes
            ),
        )

    @property
    def numel(self) -> int:
        """Number of steps: elements moved, once for each pair of ranks."""
        return prod(axis.extent for axis in self.axes)


class Transfers(Frozen, cache_hash=True):
    """All transfers between two layouts of one tensor.

    Attributes:
        source: Layout that is there.
        target: Layout that is wanted.
        descriptors: Transfers of all pairs of ranks together.
    """

    source: Layout
    target: Layout
    descriptors: tuple[Transfer, ...]

    @property
    def numel(self) -> int:
        """Elements moved, over all pairs of ranks."""
        return sum(transfer.numel for transfer in self.descriptors)

    def at_target(self, rank: int) -> tuple[Transfer, ...]:
        """What one target rank receives; the axes still move over source ranks.

        Raises:
            LayoutError: The target mesh has no such rank.

        Cost:
            O(descriptors). Never walks elements.
        """
        self.target.shard_shape(rank)
        return tuple(_fixed(self.descriptors, _TARGET_RANK, rank))

    def at_source(self, rank: int) -> tuple[Transfer, ...]:
        """What one source rank sends; the axes still move over target ranks.

        Raises:
            LayoutError: The source mesh has no such rank.
        """
        self.source.shard_shape(rank)
        return tuple(_fixed(self.descriptors, _SOURCE_RANK, rank))

    def between(self, source_rank: int, target_rank: int) -> tuple[Transfer, ...]:
        """What moves from one rank to one rank: strided blocks of their two shards.

        Raises:
            LayoutError: A mesh has no such rank.
        """
        self.source.shard_shape(source_rank)
        return tuple(_fixed(self.at_target(target_rank), _SOURCE_RANK, source_rank))


def _fixed(transfers: tuple[Transfer, ...], address: int, rank: int) -> list[Transfer]:
    return [
        Transfer.of_walk(walk, transfer.scale)
        for transfer in transfers
        for walk in fix(transfer.as_walk(), address, rank)
    ]
