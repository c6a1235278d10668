"""The atom of the IR: one walk over full index, rank and shard index at once.

A piece is a nest of axes with three bases. Step x of its loops stands at

    full  = full_base  + sum x_i * full_stride_i      where the element is in the full tensor
    rank  = rank_base  + sum x_i * rank_stride_i      who holds it
    shard = shard_base + sum x_i * shard_stride_i     where it is in that rank's shard

so the rank is one more address. An axis that moves only the rank is replication, one that moves
rank and full is the split, one that moves full and shard is data.
Full and shard addresses count elements.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra._checks import require_int
from restride.algebra.walks import Walk, fix
from restride.errors import LayoutError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Axis", "Piece"]


class Axis(Frozen):
    """One loop of a piece. Called a *mode* in CuTe.

    An axis is pure: it moves either the rank or the shard index, never both and never neither. So
    fixing the rank is a substitution, and no two steps of one axis write the same shard address.

    Attributes:
        extent: Number of steps, at least 2. A loop of one step is dropped.
        full_stride: Distance between two steps in the full tensor. Negative only on a rank axis;
            0 where the same element is held again.
        rank_stride: Distance between two steps over the ranks, at least 0.
        shard_stride: Distance between two steps in the shard, at least 0.

    Raises:
        LayoutError: One of the above does not hold.
    """

    extent: int
    full_stride: int
    rank_stride: int
    shard_stride: int

    def __post_init__(self) -> None:
        require_int("extent of an axis", self.extent, at_least=2)
        require_int("full stride of an axis", self.full_stride)
        require_int("rank stride of an axis", self.rank_stride, at_least=0)
        require_int("shard stride of an axis", self.shard_stride, at_least=0)
        if (self.rank_stride > 0) == (self.shard_stride > 0):
            msg = (
                f"an axis moves either the rank or the shard index, got rank stride "
                f"{self.rank_stride} and shard stride {self.shard_stride}"
            )
            raise LayoutError(msg)
        if self.full_stride < 0 and not self.rank_stride:
            msg = (
                f"full stride {self.full_stride} is negative on an axis that does not move the rank"
            )
            raise LayoutError(msg)

    @property
    def is_rank_axis(self) -> bool:
        """Whether the axis moves over ranks."""
        return self.rank_stride > 0


class Piece(Frozen):
    """A strided block of elements and everyone who holds it.

    Attributes:
        axes: Loops, outermost first.
        full_base: Flat index of the first element in the full tensor.
        rank_base: Rank of the first holder.
        shard_base: Flat index of the first element in that rank's shard.
        scale: Exact factor between the two: ``shard == full * scale``. Not zero.

    Raises:
        LayoutError: A base is no integer or the scale is not an exact non-zero fraction, or the
            walk leaves the non-negative addresses.

    Examples:
        Rows of a 4 x 3 tensor over two ranks:

        >>> piece = Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))
        >>> piece.numel, piece.full_range, piece.rank_range, piece.shard_range
        (12, range(0, 12), range(0, 2), range(0, 6))
    """

    axes: tuple[Axis, ...]
    full_base: int = 0
    rank_base: int = 0
    shard_base: int = 0
    scale: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        require_int("full base of a piece", self.full_base)
        require_int("rank base of a piece", self.rank_base, at_least=0)
        require_int("shard base of a piece", self.shard_base, at_least=0)
        if type(self.scale) is not Fraction or not self.scale:
            msg = f"the scale of a piece is an exact non-zero Fraction, got {self.scale!r}"
            raise LayoutError(msg)
        if self.full_range.start < 0:
            msg = f"a piece reaches full index {self.full_range.start}, below 0"
            raise LayoutError(msg)

    @property
    def numel(self) -> int:
        """Number of steps of the walk, replicas included."""
        return prod(axis.extent for axis in self.axes)

    @property
    def rank_axes(self) -> tuple[Axis, ...]:
        """Axes that move over ranks."""
        return tuple(axis for axis in self.axes if axis.is_rank_axis)

    @property
    def shard_axes(self) -> tuple[Axis, ...]:
        """Axes that move inside one shard: the (extent, full) and (extent, shard) strided views."""
        return tuple(axis for axis in self.axes if not axis.is_rank_axis)

    @property
    def full_range(self) -> range:
        """Smallest range of full indices that contains the walk."""
        steps = [(axis.extent - 1) * axis.full_stride for axis in self.axes]
        low = self.full_base + sum(step for step in steps if step < 0)
        high = self.full_base + sum(step for step in steps if step > 0)
        return range(low, high + 1)

    @property
    def rank_range(self) -> range:
        """Smallest range of ranks that contains the walk."""
        span = sum((axis.extent - 1) * axis.rank_stride for axis in self.axes)
        return range(self.rank_base, self.rank_base + span + 1)

    @property
    def shard_range(self) -> range:
        """Smallest range of shard indices that contains the walk, the same on every rank."""
        span = sum((axis.extent - 1) * axis.shard_stride for axis in self.axes)
        return range(self.shard_base, self.shard_base + span + 1)

    def ranks(self) -> Iterator[int]:
        """Yield every rank that the walk visits, in walk order, once per visit.

        Cost:
            O(visited ranks). Never walks elements.
        """
        yield from _lattice(self.rank_base, [(a.extent, a.rank_stride) for a in self.rank_axes])

    def first_rank_in(self, runs: Iterable[range]) -> int | None:
        """The first rank of some runs that the walk visits, or None where it visits none.

        Cost:
            For each run, a search in a text of one character per rank, which is made once, with a
            few operations on integers of one bit per rank, whatever the loops are.
        """
        reached = self.rank_range
        visited = ""
        for run in runs:
            start, stop = max(run.start, reached.start), min(run.stop, reached.stop)
            if start >= stop:
                continue
            visited = visited or self._visited()
            found = visited.find("1", start - reached.start, stop - reached.start)
            if found >= 0:
                return reached.start + found
        return None

    def at_rank(self, rank: int) -> tuple[Piece, ...]:
        """Fix the rank: the concrete pieces that `rank` holds of this walk.

        Returns:
            Pieces without rank axes whose `rank_base` is `rank`: none where the walk does not visit
            the rank, one where it does, several where it visits it more than once.

        Cost:
            O(rank axes) where every stride exceeds the reach of the smaller ones, as in every
            layout of a mesh; the number of visits otherwise.
        """
        walk = Walk(
            (self.rank_base, self.full_base),
            tuple((axis.extent, axis.rank_stride, axis.full_stride) for axis in self.rank_axes),
        )
        return tuple(
            replace(self, axes=self.shard_axes, full_base=fixed.bases[1], rank_base=rank)
            for fixed in fix(walk, 0, rank)
        )

    def _visited(self) -> str:
        """For each rank in the range of ranks, in order: "1" where the walk visits it, or "0"."""
        visited = 1
        for axis in self.rank_axes:
            done = 1
            while done < axis.extent:
                more = min(done, axis.extent - done)
                visited |= visited << more * axis.rank_stride
                done += more
        return f"{visited:b}"[::-1]


def _lattice(base: int, steps: list[tuple[int, int]]) -> Iterator[int]:
    if not steps:
        yield base
        return
    extent, stride = steps[0]
    for index in range(extent):
        yield from _lattice(base + index * stride, steps[1:])
