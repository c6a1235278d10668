"""Checks of what a builder is given, shared by all builders.

A builder never accepts nonsense: the peer takes sizes that do not add up, duplicate blocks, floats
and a scale of NaN, and the mistake surfaces as wrong weights much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from restride.algebra._checks import require_int
from restride.algebra.mesh import Mesh, MeshLike, as_mesh
from restride.errors import RuleError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from restride.algebra.layout import Shape

__all__ = [
    "MeshAxis",
    "as_dim",
    "as_ints",
    "as_scale",
    "as_shape",
    "as_widths",
    "find_mesh_axis",
    "require_count",
]


class MeshAxis(Frozen):
    """The axis of a mesh along which a tensor is cut; the other axes hold replicas.

    Attributes:
        mesh: The whole mesh.
        name: Name of the axis.
        size: Number of ranks along it.
    """

    mesh: Mesh
    name: str
    size: int


def find_mesh_axis(mesh: MeshLike, axis: str | None) -> MeshAxis:
    """Find the axis that is cut: the one called `axis`, or the only one there is.

    Raises:
        RuleError: `axis` is not on the mesh, or is not given and the mesh has not exactly one.
    """
    whole = as_mesh(mesh)
    names = [name for name, _ in whole.axes]
    found = names[0] if axis is None and len(names) == 1 else axis
    if found in names:
        return MeshAxis(whole, found, whole.axis_size(found))
    remedy = f"give as axis one of {', '.join(names)}" if names else "name an axis: tp=1"
    if found is None:
        raise RuleError(
            f"the mesh {str(whole)!r} has {len(names)} axes and none is named as the one to cut",
            remedy=remedy,
        )
    raise RuleError(f"the mesh {str(whole)!r} has no axis {found!r}", remedy=remedy)


def as_ints(what: str, values: Sequence[int], *, at_least: int | None = None) -> tuple[int, ...]:
    """Take a sequence of plain integers: a list, a tuple, a range, a torch.Size.

    Raises:
        LayoutError: An entry is no plain integer, or below `at_least`.
        RuleError: `values` is no sequence.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RuleError(f"{what} must be a sequence of integers, got {values!r}")
    numbers = tuple(values)
    for number in numbers:
        require_int(f"each entry of {what}", number, at_least=at_least)
    return numbers


def as_shape(shape: Sequence[int], *, ndim: int | tuple[int, ...] | None = None) -> Shape:
    """Take the shape of a full tensor, of one of the numbers of dimensions in `ndim` if given.

    Raises:
        LayoutError: A size is no integer, or is negative.
        RuleError: The number of dimensions is another one.
    """
    sizes = as_ints("the shape", shape, at_least=0)
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if allowed is not None and len(sizes) not in allowed:
        counts = " or ".join(str(count) for count in allowed)
        raise RuleError(
            f"a tensor of {counts} dimensions is cut this way, and the shape has {len(sizes)}"
        )
    return sizes


def as_dim(dim: int, shape: Shape) -> int:
    """Take the dimension to cut; negative numbers count from the end, as in torch.

    Raises:
        LayoutError: `dim` is no integer.
        RuleError: The tensor has no such dimension.
    """
    require_int("dim", dim)
    if not -len(shape) <= dim < len(shape):
        raise RuleError(
            f"a tensor of shape {shape} has no dimension {dim}",
            remedy=f"dim runs from 0 to {len(shape) - 1}" if shape else "a scalar is replicated",
        )
    return dim % len(shape)


def as_widths(what: str, widths: Sequence[int], *, ranks: int, total: int) -> tuple[int, ...]:
    """Take the width of each rank's share; zero is allowed, and they add up to `total`.

    Raises:
        LayoutError: A width is no integer or is negative.
        RuleError: There is not one width per rank, or they do not add up.
    """
    numbers = as_ints(what, widths, at_least=0)
    if len(numbers) != ranks:
        raise RuleError(f"{what} {list(numbers)} are {len(numbers)} numbers for {ranks} ranks")
    if sum(numbers) != total:
        raise RuleError(f"{what} {list(numbers)} add up to {sum(numbers)}, not to {total}")
    return numbers


def require_count(what: str, value: int | None, *, why: str) -> int:
    """Require a count of at least 1 that has no default, and say why it is needed.

    Raises:
        LayoutError: `value` is no integer or is below 1.
        RuleError: `value` is None.
    """
    if value is None:
        raise RuleError(f"{what} is not given: {why}", remedy=f"pass {what}=")
    require_int(what, value, at_least=1)
    return value


def as_scale(scale: Fraction | int) -> Fraction:
    """Take an exact, non-zero factor.

    Raises:
        RuleError: The factor is zero, a float (also a whole one, NaN or infinite) or a bool.
    """
    if type(scale) not in {Fraction, int} or not scale:
        raise RuleError(
            f"a scale is an exact number other than 0, got {scale!r} ({type(scale).__name__})",
            remedy="write Fraction(1, 3), not 0.333",
        )
    return Fraction(scale)
