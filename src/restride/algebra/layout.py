"""All pieces of all ranks for one tensor, on a mesh."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

from restride.algebra._checks import require_int
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Fill", "Layout", "Padding", "Shape", "shape_runs"]

Shape: TypeAlias = tuple[int, ...]
Fill: TypeAlias = Literal["zero", "undefined"]


class Padding(Frozen):
    """Shard elements that no full element owns: skipped on read, filled on write.

    A padding that repeats elements needs no word of its own: it is a piece with a full stride of 0.

    Attributes:
        axes: Loops over (rank, shard), outermost first; their full stride is 0.
        rank_base: First rank that is padded.
        shard_base: Flat index of the first padded element of its shard.
        fill: ``"zero"`` where the owner of the format writes zeros, ``"undefined"`` where nobody
            may rely on the content (it is written as zeros too).
    """

    axes: tuple[Axis, ...]
    rank_base: int = 0
    shard_base: int = 0
    fill: Fill = "zero"

    def __post_init__(self) -> None:
        if self.fill not in {"zero", "undefined"}:
            msg = f"padding is filled with 'zero' or 'undefined', got {self.fill!r}"
            raise LayoutError(msg)
        for axis in self.axes:
            if axis.full_stride:
                msg = f"padding has no full element, yet an axis has full stride {axis.full_stride}"
                raise LayoutError(msg)
        self.as_piece()  # checks the bases

    def as_piece(self) -> Piece:
        """The same walk as a piece that stands still at full index 0."""
        return Piece(self.axes, 0, self.rank_base, self.shard_base)


class Layout(Frozen, cache_hash=True):
    """Where every element of one tensor is: a relation between full index and (rank, shard index).

    Replicas are elements that more than one (rank, shard index) holds; they are derived and never
    stored. Building a layout checks what is cheap and local: every address is inside its tensor,
    mesh or shard. That the full tensor is covered and no shard address is written twice is what
    `prove` proves.

    Attributes:
        mesh: Names of the ranks.
        full_shape: Shape of the full tensor, in units; row-major.
        shard_shapes: Runs of (number of ranks, shape): so many ranks, in rank order, hold shards of
            that shape. The counts add up to the size of the mesh.
        all_pieces: The walks, for all ranks together.
        padding: Shard addresses that belong to no element.
        unit_bits: Width of a unit where it is not a whole element (4 for packed 4-bit weights), or
            None where a unit is one element of whatever dtype the tensor has.

    Raises:
        LayoutError: A shape, count or address does not fit.

    Examples:
        >>> rows = Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, [Piece((Axis(2, 6, 1, 0),
        ...                                                           Axis(6, 1, 0, 1)))])
        >>> rows.pieces(1)[0].full_base
        6
    """

    mesh: Mesh
    full_shape: Shape
    shard_shapes: tuple[tuple[int, Shape], ...]
    all_pieces: tuple[Piece, ...]
    padding: tuple[Padding, ...] = ()
    unit_bits: int | None = None

    def __post_init__(self) -> None:
        _require_shape("full shape", self.full_shape)
        for count, shape in self.shard_shapes:
            require_int("number of ranks with one shard shape", count, at_least=1)
            _require_shape("shard shape", shape)
        total = sum(count for count, _ in self.shard_shapes)
        if total != self.mesh.size:
            raise LayoutError(
                f"shard shapes are given for {counted(total, 'rank')}, "
                f"the mesh {self.mesh} has {self.mesh.size}"
            )
        if self.unit_bits is not None:
            require_int("unit_bits", self.unit_bits, at_least=1)
        runs = _runs(self.shard_shapes)
        for number, piece in enumerate(self.all_pieces):
            if piece.full_range.stop > self.full_numel:
                msg = (
                    f"piece {number} reaches full index {piece.full_range.stop - 1}, "
                    f"the tensor has {self.full_numel} elements"
                )
                raise LayoutError(msg)
            self._require_in_shards(f"piece {number}", piece, runs)
        for number, padding in enumerate(self.padding):
            self._require_in_shards(f"padding {number}", padding.as_piece(), runs)

    @classmethod
    def of(
        cls,
        mesh: Mesh | dict[str, int],
        full_shape: Iterable[int],
        shard_shapes: Iterable[Iterable[int]],
        pieces: Iterable[Piece],
        padding: Iterable[Padding] = (),
        unit_bits: int | None = None,
    ) -> Layout:
        """Build a layout from one shard shape per rank, in rank order.

        Raises:
            LayoutError: As for `Layout` itself.
        """
        return cls(
            mesh if isinstance(mesh, Mesh) else Mesh(tuple(mesh.items())),
            tuple(full_shape),
            shape_runs(shard_shapes),
            tuple(pieces),
            tuple(padding),
            unit_bits,
        )

    @property
    def full_numel(self) -> int:
        """Number of units in the full tensor."""
        return prod(self.full_shape)

    @property
    def rank_count(self) -> int:
        """Number of ranks on the mesh."""
        return self.mesh.size

    @property
    def is_exact(self) -> bool:
        """Whether shards hold the very values of the full tensor, bit for bit.

        A scale that is a power of two loses nothing short of overflow, but it is not a copy: use
        `Piece.scale` to tell.
        """
        return all(piece.scale == 1 for piece in self.all_pieces)

    def shard_shape(self, rank: int) -> Shape:
        """Shape of the shard that `rank` holds.

        Raises:
            LayoutError: The rank is not on the mesh.
        """
        if rank >= 0:
            left = rank
            for count, shape in self.shard_shapes:
                if left < count:
                    return shape
                left -= count
        msg = f"rank {rank} is not on a mesh of {counted(self.rank_count, 'rank')}"
        raise LayoutError(msg)

    def shard_numel(self, rank: int) -> int:
        """Number of units in the shard that `rank` holds."""
        return prod(self.shard_shape(rank))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Concrete pieces of one rank: what the axes without a rank stride leave.

        Their (extent, full) and (extent, shard) pairs are two `as_strided` argument lists.

        Raises:
            LayoutError: The rank is not on the mesh.

        Cost:
            O(pieces). Never walks elements.
        """
        self.shard_shape(rank)
        return tuple(concrete for piece in self.all_pieces for concrete in piece.at_rank(rank))

    def paddings(self, rank: int) -> tuple[Padding, ...]:
        """Concrete paddings of one rank, as `pieces` is for elements.

        Raises:
            LayoutError: The rank is not on the mesh.
        """
        self.shard_shape(rank)
        return tuple(
            Padding(concrete.axes, rank, concrete.shard_base, padding.fill)
            for padding in self.padding
            for concrete in padding.as_piece().at_rank(rank)
        )

    def _require_in_shards(self, what: str, piece: Piece, runs: _Runs) -> None:
        """Check that every rank of the walk exists and its shard is long enough."""
        if piece.rank_range.stop > self.rank_count:
            msg = f"{what} reaches rank {piece.rank_range.stop - 1}, the mesh has {self.rank_count}"
            raise LayoutError(msg)
        needed = piece.shard_range.stop
        rank = piece.first_rank_in(run for run, numel in runs if numel < needed)
        if rank is not None:
            msg = (
                f"{what} reaches shard index {needed - 1} of rank {rank}, "
                f"whose shard has {self.shard_numel(rank)} elements"
            )
            raise LayoutError(msg)


_Runs: TypeAlias = tuple[tuple[range, int], ...]
"""(ranks, elements of each of their shards)."""


def _runs(shard_shapes: tuple[tuple[int, Shape], ...]) -> _Runs:
    stops = list(accumulate(count for count, _ in shard_shapes))
    return tuple(
        (range(stop - count, stop), prod(shape))
        for stop, (count, shape) in zip(stops, shard_shapes, strict=True)
    )


def shape_runs(shapes: Iterable[Iterable[int]]) -> tuple[tuple[int, Shape], ...]:
    """Gather one shape per rank into runs of equal shapes.

    Examples:
        >>> shape_runs([(2, 3), (2, 3), (1, 3)])
        ((2, (2, 3)), (1, (1, 3)))
    """
    runs: list[tuple[int, Shape]] = []
    for shape in map(tuple, shapes):
        if runs and runs[-1][1] == shape:
            runs[-1] = (runs[-1][0] + 1, shape)
        else:
            runs.append((1, shape))
    return tuple(runs)


def _require_shape(what: str, shape: Shape) -> None:
    if type(shape) is not tuple:
        msg = f"{what} must be a tuple of integers, got {shape!r}"
        raise LayoutError(msg)
    for size in shape:
        require_int(f"each size in {what} {shape}", size, at_least=0)
