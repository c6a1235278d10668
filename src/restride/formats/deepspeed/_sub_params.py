"""Sub-parameters: several matrices fused in one, each cut over the tensor-parallel ranks.

`parameter_with_sub_params` says along which dimension they are fused and how large each is;
`sub_param_shard_widths` (since version 0.4) how many rows each rank has of each. Before that, every
sub-parameter was cut evenly, and a plain number meant that many of equal size.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import CorruptError
from restride.frozen import Frozen
from restride.layouts.segmented import sub_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import Mesh
    from restride.formats.deepspeed._fields import Field

__all__ = ["SubParams", "read_sub_params"]

_WIDTHS_SINCE: Final = 0.4
_MOST_SUB_PARAMS: Final = 1 << 16

_Widths: TypeAlias = tuple[tuple[int, ...], ...]


class SubParams(Frozen):
    """What is said of one fused parameter.

    Attributes:
        sizes: Rows of each sub-parameter; or how many of equal size there are.
        dim: Dimension along which they are fused.
        widths: Rows of each rank for each sub-parameter, or None where all ranks have the same.
        ndim: Number of dimensions that the description has.
        sides: Sizes of the other dimensions, None where they are left open.
        where: File and path, for errors.
    """

    sizes: tuple[int, ...] | int
    dim: int
    widths: _Widths | None
    sides: tuple[int | None, ...]
    where: str

    def layout(self, shapes: Sequence[Shape], mesh: Mesh) -> Layout:
        """Describe how the parameter is cut.

        Raises:
            CorruptError: The shards do not fit the description.
            LayoutError: The sizes and widths do not fit each other.
        """
        first, ranks = shapes[0], range(mesh.size)
        total = sum(prod(shape) for shape in shapes)
        if len(first) == len(self.sides) and all(len(shape) == len(first) for shape in shapes):
            rows = sum(shape[self.dim] for shape in shapes)
            full = (*first[: self.dim], rows, *first[self.dim + 1 :])
        else:
            full = self._opened(total)
        sizes = self._sizes(full[self.dim])
        widths = self.widths or [self._even(size, mesh.size) for size in sizes]
        layout = sub_params(full, mesh=mesh, sizes=sizes, widths=widths, dim=self.dim)
        for rank in ranks:
            if layout.shard_numel(rank) != prod(shapes[rank]):
                raise CorruptError(
                    f"tp rank {rank} stores a shard of shape {shapes[rank]}, by its "
                    f"sub-parameters it is of shape {layout.shard_shape(rank)}",
                    where=self.where,
                )
        return layout

    def _opened(self, total: int) -> Shape:
        """Fill the open dimension of the description from the number of elements."""
        known = prod(side for side in self.sides if side is not None)
        if not isinstance(self.sizes, int):
            known *= sum(self.sizes)
        is_open = [side is None and n != self.dim for n, side in enumerate(self.sides)]
        if sum(is_open) > 1 or not known or total % known or isinstance(self.sizes, int):
            raise CorruptError(
                f"sub-parameters of shape {self.sides} do not make {total} elements",
                where=self.where,
            )
        sides = [
            total // known if opened else side
            for opened, side in zip(is_open, self.sides, strict=True)
        ]
        sides[self.dim] = sum(self.sizes)
        return tuple(side for side in sides if side is not None)

    def _sizes(self, rows: int) -> tuple[int, ...]:
        if not isinstance(self.sizes, int):
            return self.sizes
        if not 0 < self.sizes <= _MOST_SUB_PARAMS or rows % self.sizes:
            raise CorruptError(
                f"{rows} rows are no {self.sizes} sub-parameters of equal size", where=self.where
            )
        return (rows // self.sizes,) * self.sizes

    def _even(self, size: int, ranks: int) -> tuple[int, ...]:
        if size % ranks:
            raise CorruptError(
                f"a sub-parameter of {size} rows does not cut evenly over {ranks} ranks, and no "
                "widths are stored",
                where=self.where,
            )
        return (size // ranks,) * ranks


def read_sub_params(info: Field) -> Iterator[tuple[str, SubParams]]:
    """Yield (parameter pattern, description).

    Raises:
        FormatError: A description has another type than it must have.
        CorruptError: The widths that its version must have are missing.
    """
    stored, widths = info.get("parameter_with_sub_params"), info.get("sub_param_shard_widths")
    version = info.get("universal_checkpoint_version")
    has_widths = version is not None and _number(version) >= _WIDTHS_SINCE
    for entry in stored.elements() if stored else ():
        for pattern in entry.at("patterns").texts():
            own = widths.get(pattern) if widths else None
            if own is None and has_widths:
                raise CorruptError(
                    f"sub_param_shard_widths has nothing for {pattern!r}", where=entry.where
                )
            yield pattern, _description(entry, own, has_widths=has_widths)


def _description(entry: Field, own: Field | None, *, has_widths: bool) -> SubParams:
    sides = entry.at("shape").elements()
    dim = entry.at("partition_dim").integer()
    if dim >= len(sides):
        raise CorruptError(f"partition_dim is {dim} of {len(sides)} dimensions", where=entry.where)
    fused = sides[dim]
    sizes: tuple[int, ...] | int
    if fused.is_sequence:
        sizes = fused.integers()
    else:
        count = fused.integer()
        sizes = (count,) if has_widths else count
    return SubParams(
        sizes,
        dim,
        None if own is None else tuple(row.integers() for row in own.elements()),
        tuple(None if n == dim else _side(side) for n, side in enumerate(sides)),
        entry.where,
    )


def _side(stored: Field) -> int | None:
    """Size of a dimension that is not cut; a negative one is left open."""
    if type(stored.value) is int and stored.value < 0:
        return None
    if stored.is_sequence:
        return sum(stored.integers())
    return stored.integer()


def _number(stored: Field) -> float:
    if type(stored.value) not in {int, float}:
        raise stored.wrong("a number")
    return float(stored.value)  # type: ignore[arg-type]  # one of the two
