"""What a proof returns, and how it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.piece import Piece

__all__ = ["Covered", "Gap", "Hole", "Method", "Overlap", "Verdict", "Writer", "explain"]

Method: TypeAlias = Literal["structure", "fingerprint", "sweep"]

# A search among loops that reach over each other is given up after so many steps: the sentence
# then says less.
_MOST_STEPS = 2_000


class Covered(Frozen):
    """Everything that was asked for is whole.

    Attributes:
        full_numel: Elements of the full tensor, each held by somebody; None where only the shards
            were proved.
        shard_numel: Shard addresses of all ranks, each written exactly once or declared padding;
            None where only the full side was proved.
        method: The weakest argument that was needed: ``"structure"`` and ``"sweep"`` are exact,
            ``"fingerprint"`` is wrong with probability below 2^-77.
    """

    full_numel: int | None
    shard_numel: int | None
    method: Method = "structure"


class Hole(Frozen):
    """Some full element is held by nobody.

    Attributes:
        element: Lowest flat index in the full tensor that nobody holds.
        coordinates: The same element by axis of the full tensor.
        count: Number of such elements.
    """

    element: int
    coordinates: tuple[int, ...]
    count: int


class Gap(Frozen):
    """Some shard address is neither written by a piece nor declared padding.

    Attributes:
        rank: Lowest rank that has one.
        shard_index: Lowest flat index in the shard of that rank.
        count: Number of such addresses over all ranks.
    """

    rank: int
    shard_index: int
    count: int


class Writer(Frozen):
    """A piece or a padding, by its place in the layout."""

    kind: Literal["piece", "padding"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


class Overlap(Frozen):
    """Some shard address is written more than once.

    Attributes:
        rank: Lowest rank that has one.
        shard_index: Lowest flat index in the shard of that rank.
        first: Who writes it: the pieces come before the paddings, each in the order of the layout.
        second: Who writes it again; the same as `first` where a walk returns to the address.
        count: Number of such addresses over all ranks.
    """

    rank: int
    shard_index: int
    first: Writer
    second: Writer
    count: int


Verdict: TypeAlias = Covered | Hole | Gap | Overlap


def explain(verdict: Verdict, layout: Layout) -> str:
    """Say a verdict in one sentence: element, coordinates, ranks and pieces.

    Examples:
        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> layout = Layout.of({"tp": 2}, (4, 3), [(1, 3)] * 2,
        ...                    [Piece((Axis(2, 6, 1, 0), Axis(3, 1, 0, 1)))])
        >>> explain(Gap(rank=1, shard_index=2, count=1), layout)
        'nobody writes shard index 2 at (0, 2) of rank 1, and no padding declares it; 1 in all'
    """
    match verdict:
        case Covered():
            return _explain_covered(verdict, layout)
        case Hole():
            return _explain_hole(verdict, layout)
        case Gap(rank, shard_index, count):
            place = _shard_place(layout, rank, shard_index)
            return f"nobody writes {place}, and no padding declares it; {count} in all"
        case Overlap():
            return _explain_overlap(verdict, layout)


def coordinates_of(index: int, shape: Shape) -> tuple[int, ...]:
    """Coordinates of a flat row-major index."""
    coordinates = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _explain_covered(verdict: Covered, layout: Layout) -> str:
    parts = []
    if verdict.full_numel is not None:
        parts.append(f"each of {verdict.full_numel} full elements is held")
    if verdict.shard_numel is not None:
        parts.append(
            f"each of {verdict.shard_numel} shard addresses of "
            f"{counted(layout.rank_count, 'rank')} is "
            "written exactly once or declared padding"
        )
    return " and ".join(parts)


def _explain_hole(verdict: Hole, layout: Layout) -> str:
    problem = (
        f"no rank holds full element {verdict.element} at {verdict.coordinates}, "
        f"{verdict.count} of {layout.full_numel} in all"
    )
    before = verdict.element - 1
    for number, piece in enumerate(layout.all_pieces):
        for rank in _ranks_that_hold(piece, before):
            return f"{problem}; the element before it is on rank {rank} (piece {number})"
    return problem


def _explain_overlap(verdict: Overlap, layout: Layout) -> str:
    place = _shard_place(layout, verdict.rank, verdict.shard_index)
    first, second = verdict.first, verdict.second
    if first == second:
        both = f"{first} writes {place} more than once"
    else:
        both = f"{first} and {second} both write {place}"
    found = [
        element
        for writer in dict.fromkeys((first, second))
        if writer.kind == "piece"
        for element in _elements_at(
            layout.all_pieces[writer.index], verdict.rank, verdict.shard_index
        )
    ]
    named = [f"{e} at {coordinates_of(e, layout.full_shape)}" for e in found[:2]]
    elements = f" (full elements {' and '.join(named)})" if len(named) > 1 else ""
    return f"{both}{elements}; {verdict.count} in all"


def _shard_place(layout: Layout, rank: int, shard_index: int) -> str:
    coordinates = coordinates_of(shard_index, layout.shard_shape(rank))
    return f"shard index {shard_index} at {coordinates} of rank {rank}"


def _ranks_that_hold(piece: Piece, element: int) -> Iterator[int]:
    digits = tuple((a.extent, a.full_stride, a.rank_stride) for a in piece.axes if a.full_stride)
    return _search(digits, piece.full_base, element, piece.rank_base)


def _elements_at(piece: Piece, rank: int, shard_index: int) -> Iterator[int]:
    # One address for both: the rank of a piece moves on other axes than the shard index.
    width = piece.shard_range.stop
    digits = tuple(
        (a.extent, a.rank_stride * width + a.shard_stride, a.full_stride) for a in piece.axes
    )
    base = piece.rank_base * width + piece.shard_base
    return _search(digits, base, rank * width + shard_index, piece.full_base)


def _search(
    digits: tuple[tuple[int, int, int], ...], base: int, goal: int, other_base: int
) -> Iterator[int]:
    """Find the steps at which one address reaches `goal`, and yield the other address there."""
    todo = sorted(digits, key=lambda digit: -abs(digit[1]))
    for extent, stride, _ in todo:
        base += min(0, stride) * (extent - 1)
    reaches = [0]
    for extent, stride, _ in reversed(todo):
        reaches.append(reaches[-1] + (extent - 1) * abs(stride))
    reaches.reverse()
    pending = [(0, goal - base, other_base)]
    for _ in range(_MOST_STEPS):
        if not pending:
            return
        place, left, other = pending.pop()
        if place == len(todo):
            if left == 0:
                yield other
            continue
        extent, stride, other_stride = todo[place]
        lowest = max(0, -((reaches[place + 1] - left) // abs(stride)))
        highest = min(extent - 1, left // abs(stride))
        for step in range(min(highest, lowest + _MOST_STEPS), lowest - 1, -1):
            moved = step if stride > 0 else extent - 1 - step
            pending.append((place + 1, left - step * abs(stride), other + moved * other_stride))
