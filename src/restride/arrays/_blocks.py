"""Which elements of two arrays belong together, as strided views of both.

A piece counts in flat row-major indices. An array that is laid out in another order, a transposed
view or a slice of something larger, has the same indices elsewhere in memory. Where they are is
itself a walk, so the two are joined and the array is not copied.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from restride.algebra.walks import Walk, join
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from restride.arrays._frameworks import Array, Framework

__all__ = ["Block", "Side", "Views", "chunks", "injective_parts", "views"]


class Side(Frozen):
    """Addresses of a block in one of its arrays.

    Attributes:
        base: Flat index of the first element.
        strides: Distance between two steps of each loop, in flat indices.
    """

    base: int
    strides: tuple[int, ...]


class Block(Frozen):
    """Elements that stand in two arrays, in the same order.

    Attributes:
        extents: Steps of each loop, outermost first.
        source: Where they are read.
        target: Where they are written, or compared.
    """

    extents: tuple[int, ...]
    source: Side
    target: Side

    def turned(self) -> Block:
        """The same block with source and target exchanged."""
        return Block(self.extents, self.target, self.source)

    def forwards(self) -> Block:
        """The same elements in an order in which no loop goes backwards in the target."""
        sides = []
        for side in (self.source, self.target):
            axes = list(zip(self.extents, side.strides, self.target.strides, strict=True))
            moved = sum((extent - 1) * stride for extent, stride, step in axes if step < 0)
            strides = tuple(-stride if step < 0 else stride for _, stride, step in axes)
            sides.append(Side(side.base + moved, strides))
        return Block(self.extents, *sides)


class Views(Frozen):
    """Two views of one shape over the same elements.

    Attributes:
        source: Elements that are read.
        target: Elements that are written, or compared.
        place: Flat indices of the target.
    """

    source: Array
    target: Array
    place: Side


def views(framework: Framework, source: Array, target: Array, block: Block) -> Iterator[Views]:
    """Yield views of the source elements and of the target elements.

    One pair where the source is in row-major memory, a few where it is not. The target always is.
    """
    for extents, base, strides, place in _in_memory(framework, source, block):
        # One element is a view of one loop too, since boolean masks in no dimension are awkward.
        if not extents:
            extents, strides, place = (1,), (1,), Side(place.base, (1,))  # noqa: PLW2901
        yield Views(
            framework.view(source, base, extents, strides),
            framework.view(target, place.base, extents, place.strides),
            place,
        )


def _in_memory(
    framework: Framework, source: Array, block: Block
) -> Iterator[tuple[Sequence[int], int, Sequence[int], Side]]:
    axes = tuple(zip(block.extents, block.source.strides, block.target.strides, strict=True))
    bases = (block.source.base, block.target.base)
    in_memory = _memory_walk(tuple(source.shape), framework.strides(source))
    found: Iterable[Walk]
    if in_memory is None:
        found = [Walk((*bases, bases[0]), tuple((*axis, axis[1]) for axis in axes))]
    else:
        found = join(Walk(bases, axes), in_memory)
    for joined in found:
        parts = [joined] if framework.has_negative_strides else _forwards(joined)
        for part in parts:
            extents, target_strides, strides = (
                tuple(digit[place] for digit in part.digits) for place in (0, 2, 3)
            )
            yield extents, part.bases[0], strides, Side(part.bases[1], target_strides)


def _forwards(walk: Walk) -> Iterator[Walk]:
    """Write out the loops that go backwards on any address."""
    backwards = [digit for digit in walk.digits if min(digit[1:]) < 0]
    digits = tuple(digit for digit in walk.digits if min(digit[1:]) >= 0)
    for steps in product(*(range(digit[0]) for digit in backwards)):
        moved = list(zip(steps, backwards, strict=True))
        bases = (
            base + sum(step * digit[place] for step, digit in moved)
            for place, base in enumerate(walk.bases, 1)
        )
        yield Walk(tuple(bases), digits)


def _memory_walk(shape: Sequence[int], strides: Sequence[int]) -> Walk | None:
    """Walk over (flat index, place in memory), or None where the two are the same."""
    digits = []
    flat_stride = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1:
            digits.append((extent, flat_stride, stride))
        flat_stride *= extent
    if not flat_stride or all(flat == memory for _, flat, memory in digits):
        return None
    return Walk((0, 0), tuple(reversed(digits)))


def injective_parts(block: Block) -> Iterator[Block]:
    """Cut a block until no part visits a target element twice.

    Writing through a view that holds an element twice leaves open which of the two stays.
    """
    axes = sorted(
        zip(block.extents, block.source.strides, block.target.strides, strict=True),
        key=lambda axis: (axis[2], axis[1]),
    )
    reach = 0
    kept: list[tuple[int, int, int]] = []
    repeated: list[tuple[int, int, int]] = []
    for axis in axes:
        if axis[2] <= reach:
            repeated.append(axis)
        else:
            kept.insert(0, axis)
            reach += (axis[0] - 1) * axis[2]
    for steps in product(*(range(axis[0]) for axis in repeated)):
        moved = list(zip(steps, repeated, strict=True))
        yield Block(
            tuple(axis[0] for axis in kept),
            Side(
                block.source.base + sum(step * axis[1] for step, axis in moved),
                tuple(axis[1] for axis in kept),
            ),
            Side(
                block.target.base + sum(step * axis[2] for step, axis in moved),
                tuple(axis[2] for axis in kept),
            ),
        )


def chunks(extents: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield index tuples that cut a view into parts of at most `most` elements, or single rows."""
    inner = 1
    depth = len(extents)
    while depth and inner * extents[depth - 1] <= most:
        depth -= 1
        inner *= extents[depth]
    if not depth:
        yield ()
        return
    rows = max(1, most // inner)
    last = extents[depth - 1]
    for outer in product(*(range(extent) for extent in extents[: depth - 1])):
        for start in range(0, last, rows):
            yield (*(slice(at, at + 1) for at in outer), slice(start, start + rows))
