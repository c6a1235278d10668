"""Named axes of ranks. The mesh gives ranks their names; the arithmetic knows only integers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final, TypeAlias

from restride.algebra._checks import require_int
from restride.errors import LayoutError
from restride.frozen import Frozen
from restride.wording import counted

__all__ = ["Mesh", "MeshLike", "as_mesh"]

# Loops over ranks must end: a file may claim any number of them.
_MOST_RANKS: Final = 2**20


class Mesh(Frozen):
    """Named axes with sizes; a rank is the row-major index of its coordinates.

    Called `DeviceMesh` in PyTorch and `Mesh` in JAX.

    Attributes:
        axes: (name, size) of each axis, outermost first. Sizes are at least 1.

    Raises:
        LayoutError: A name is empty or repeated, a size is below 1, or there are more than 2^20
            ranks.

    Examples:
        >>> mesh = Mesh((("dp", 2), ("tp", 4)))
        >>> mesh.size, mesh.coordinates(6)
        (8, {'dp': 1, 'tp': 2})
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not str(name).isidentifier():
                msg = f"mesh axis name {name!r} is not an identifier"
                raise LayoutError(msg)
            require_int(f"size of mesh axis {name!r}", size, at_least=1)
        if self.size > _MOST_RANKS:
            # The product is not printed: it may have more digits than Python turns into text.
            raise LayoutError(f"a mesh has at most {_MOST_RANKS} ranks, these axes have more")
        if len(set(names)) != len(names):
            msg = f"mesh axes {', '.join(names)} are not all different"
            raise LayoutError(msg)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    def axis_size(self, name: str) -> int:
        """Size of the axis called `name`.

        Raises:
            LayoutError: The mesh has no such axis.
        """
        return self.axes[self._position(name)][1]

    def axis_stride(self, name: str) -> int:
        """Distance in ranks between two neighbours along the axis called `name`.

        Raises:
            LayoutError: The mesh has no such axis.
        """
        return prod(size for _, size in self.axes[self._position(name) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank`, by axis name.

        Raises:
            LayoutError: The rank is not on the mesh.
        """
        if not 0 <= rank < self.size:
            msg = f"rank {rank} is not on a mesh of {counted(self.size, 'rank')}"
            raise LayoutError(msg)
        return {name: rank // self.axis_stride(name) % size for name, size in self.axes}

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def _position(self, name: str) -> int:
        for position, (candidate, _) in enumerate(self.axes):
            if candidate == name:
                return position
        msg = f"the mesh {self} has no axis {name!r}"
        raise LayoutError(msg)


MeshLike: TypeAlias = Mesh | Mapping[str, int] | str


def as_mesh(mesh: MeshLike) -> Mesh:
    """Accept a mesh as users write it: a `Mesh`, a mapping, or text such as ``"tp=4,dp=2"``.

    Raises:
        LayoutError: The text does not read ``name=size,name=size``, or the sizes are no mesh.

    Examples:
        >>> as_mesh("tp=4,dp=2") == as_mesh({"tp": 4, "dp": 2})
        True
    """
    match mesh:
        case Mesh():
            return mesh
        case str():
            return Mesh(tuple(map(_parse_axis, mesh.split(","))))
        case Mapping():
            return Mesh(tuple(mesh.items()))
    raise LayoutError(f"a mesh is a mapping or text such as 'tp=4,dp=2', got {mesh!r}")


def _parse_axis(part: str) -> tuple[str, int]:
    name, _, size = part.partition("=")
    if not size.strip().isascii() or not size.strip().isdigit():
        raise LayoutError(f"{part!r} is no axis with a size", remedy="write the mesh as tp=4,dp=2")
    return name.strip(), int(size)
