"""Which copy counts where several ranks hold the same element.

That they hold it is a fact, and derived from the layout. Which of them is believed when they differ
is a decision, and the user's: compare and refuse, the lowest rank, the mean, or the ranks at some
coordinates. All commands and functions take it in the same words.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.algebra.coverage import holders
from restride.errors import PlanError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh

__all__ = ["OWN", "CopyAt", "Decision", "Replicas", "as_replicas", "require_copies"]

_WORDS: Final[dict[object, Literal["check", "first", "mean"]]] = {
    "check": "check",
    "first": "first",
    "mean": "mean",
}
_COORDINATES: Final = re.compile(r"[^\W\d]\w*=\d{1,7}(,[^\W\d]\w*=\d{1,7})*", re.ASCII)
_RANK: Final = re.compile(r"\d{1,7}", re.ASCII)
_MOST_NAMED: Final = 4


class CopyAt(Frozen):
    """The copy that the ranks at some coordinates hold.

    Attributes:
        coordinates: (axis, index) by name of the axis. Axes that are not named may be anything:
            where several ranks are left, their copies must be the same.

    Examples:
        >>> from restride.algebra.mesh import as_mesh
        >>> mesh = as_mesh("dp=2,tp=2")
        >>> [rank for rank in range(4) if CopyAt((("tp", 1),)).is_at(mesh, rank)]
        [1, 3]
    """

    coordinates: tuple[tuple[str, int], ...]

    def is_at(self, mesh: Mesh, rank: int) -> bool:
        """Whether a rank of `mesh` is meant. An axis that the mesh does not have is no condition.

        An array may be cut along fewer axes than its checkpoint: the weights of DeepSpeed's model
        files are those of all data-parallel ranks.
        """
        at = mesh.coordinates(rank)
        return all(at.get(axis, index) == index for axis, index in self.coordinates)

    def __str__(self) -> str:
        return ",".join(f"{axis}={index}" for axis, index in self.coordinates)


Replicas: TypeAlias = Literal["check", "first", "mean"] | CopyAt
"""What to do with copies: refuse if they differ, the lowest rank's, their mean, or one rank's."""


OWN: Final = "own"

Decision: TypeAlias = Replicas | Literal["own"]
"""The same where ranks go on from ranks: each can keep what the rank in its place had."""


def as_replicas(said: str | int, mesh: Mesh, *, also: tuple[str, ...] = ()) -> Replicas:
    """Understand a decision as users write it.

    Args:
        said: ``"check"``, ``"first"``, ``"mean"``, coordinates such as ``"tp=1"`` or
            ``"dp=0,tp=1"``, or the number of a rank, as an integer or as text.
        mesh: Ranks that a number counts, and axes that coordinates name.
        also: Other words that the caller understands, for the error.

    Raises:
        PlanError: It is nothing of that, or there is no such rank.

    Examples:
        >>> from restride.algebra.mesh import as_mesh
        >>> as_replicas("mean", as_mesh("tp=4"))
        'mean'
        >>> str(as_replicas(3, as_mesh("dp=2,tp=2")))
        'dp=1,tp=1'
    """
    if said in _WORDS:
        return _WORDS[said]
    text = "" if isinstance(said, bool) else str(said)
    if _COORDINATES.fullmatch(text):
        pairs = (part.split("=") for part in text.split(","))
        return _at(tuple((axis, int(index)) for axis, index in pairs), mesh, text)
    if _RANK.fullmatch(text):
        return _of_rank(int(text), mesh)
    raise PlanError(
        f"{said!r} does not say which copy counts",
        remedy=f"say {', '.join((*_WORDS.values(), *also))}, the number of a rank, or coordinates"
        f"{_example(mesh)}",
    )


def require_copies(choice: CopyAt, layout: Layout) -> None:
    """Make sure that the chosen ranks have a copy of every element of which there are several.

    Raises:
        PlanError: They have none of some, with the numbers and the ranks that have.

    Cost:
        As for `holders`.
    """
    shared = [held for held in holders(layout) if len(held.ranks) > 1]
    lost = [
        held for held in shared if not any(choice.is_at(layout.mesh, rank) for rank in held.ranks)
    ]
    if lost:
        numel, of = (sum(held.numel for held in some) for some in (lost, shared))
        some = ", ".join(
            f"{rank} ({_name(layout.mesh, rank)})" for rank in lost[0].ranks[:_MOST_NAMED]
        )
        more = ", ..." if lost[0].ranks[_MOST_NAMED:] else ""
        raise PlanError(
            f"{choice} has no copy of {numel} of the {of} elements that several ranks hold; "
            f"of element {lost[0].full_base} ranks {some}{more} have one",
            remedy="choose coordinates that hold them all, or first or mean",
        )


def _of_rank(rank: int, mesh: Mesh) -> CopyAt:
    if not 0 <= rank < mesh.size:
        raise PlanError(
            f"there is no rank {rank} whose copy could count, ranks are 0 to {mesh.size - 1}"
            f"{f' ({mesh})' if mesh.axes else ''}"
        )
    return CopyAt(tuple(mesh.coordinates(rank).items()))


def _at(coordinates: tuple[tuple[str, int], ...], mesh: Mesh, said: str) -> CopyAt:
    sizes = dict(mesh.axes)
    if len(dict(coordinates)) < len(coordinates):
        raise PlanError(f"{said!r} names an axis twice")
    for axis, index in coordinates:
        if axis not in sizes:
            raise PlanError(
                f"{said!r} names the axis {axis!r}, the ranks are on the mesh "
                f"{mesh if mesh.axes else 'of one rank'}"
            )
        if index >= sizes[axis]:
            raise PlanError(
                f"{said!r} is no rank: {axis} goes from 0 to {sizes[axis] - 1} ({mesh})"
            )
    return CopyAt(coordinates)


def _example(mesh: Mesh) -> str:
    return f" such as {mesh.axes[-1][0]}=0" if mesh.axes else ""


def _name(mesh: Mesh, rank: int) -> str:
    return ",".join(f"{axis}={at}" for axis, at in mesh.coordinates(rank).items())
