"""Lower walks to boxes: blocks of coordinates, the same on both sides.

A box is so many steps along each dimension, with the strides of the full tensor on one side and
those of the shard on the other. It is all that DeepSpeed's planner reads, and how people speak of
cuts: these rows, those columns. Our pieces may have more axes than the tensor, so an axis that is
no dimension of both sides becomes one box per step, and a run that ends inside a row is cut there.
"""

from __future__ import annotations

from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    from restride.algebra.layout import Shape

__all__ = ["Box", "BoxCutter", "BoxWalk"]

_Step: TypeAlias = tuple[int, int, int]
"""(extent, full stride, shard stride) of one loop."""


class BoxWalk(Frozen):
    """Elements of one rank that the same ranks hold with the same scale.

    Attributes:
        steps: (extent, full stride, shard stride) of each loop, in any order.
        full_base: Flat index of the first element in the full tensor.
        shard_base: Flat index of the first element in the shard.
        ranks: Every rank that holds these elements, sorted.
        scale: ``shard == full * scale``.
    """

    steps: tuple[_Step, ...]
    full_base: int
    shard_base: int
    ranks: tuple[int, ...]
    scale: Fraction


class Box(Frozen):
    """A block of coordinates that one rank holds.

    Attributes:
        full_start: Coordinates of its first element in the full tensor.
        shard_start: Coordinates of its first element in the shard.
        extents: Steps along each dimension.
        ranks: Every rank that holds these elements, sorted.
        scale: ``shard == full * scale``.
    """

    full_start: tuple[int, ...]
    shard_start: tuple[int, ...]
    extents: tuple[int, ...]
    ranks: tuple[int, ...]
    scale: Fraction


class BoxCutter:
    """Cuts the walks of one rank into boxes.

    Args:
        full_shape: Shape of the full tensor.
        shard_shape: Shape of the rank's shard, with as many dimensions.
        most: Boxes that are allowed.
    """

    def __init__(self, full_shape: Shape, shard_shape: Shape, most: int) -> None:
        self.full_shape = full_shape
        self.shard_shape = shard_shape
        self.full_strides = row_major(full_shape)
        self.shard_strides = row_major(shard_shape)
        self.most = most

    def cut(self, walks: Sequence[BoxWalk]) -> list[Box]:
        """Cut walks into boxes, by the place in the shard.

        Raises:
            UnsupportedError: More boxes than allowed would be needed.

        Cost:
            O(boxes * axes^2).
        """
        boxes: list[Box] = []
        stack = list(walks)
        while stack:
            # Every walk on the stack gives a box at least.
            if len(boxes) + len(stack) > self.most:
                raise self._too_many()
            found = self._box_or_parts(stack.pop())
            if isinstance(found, Box):
                boxes.append(found)
            else:
                stack.extend(found)
        return _merged(boxes)

    def _box_or_parts(self, walk: BoxWalk) -> Box | list[BoxWalk]:
        """One box, or walks that are each nearer to one."""
        full = coordinates(walk.full_base, self.full_strides)
        shard = coordinates(walk.shard_base, self.shard_strides)
        extents = [1] * len(full)
        for number, step in sorted(enumerate(walk.steps), key=lambda entry: entry[1][1:]):
            taken = self._lay_along_dimensions(step, full, shard, extents)
            if taken < step[0]:
                return self._parts(walk, number, taken)
        return Box(full, shard, tuple(extents), walk.ranks, walk.scale)

    def _lay_along_dimensions(
        self, step: _Step, full: Sequence[int], shard: Sequence[int], extents: list[int]
    ) -> int:
        """Let a loop run along free dimensions of both sides: how many of its steps fit."""
        extent, full_stride, shard_stride = step
        covered = 1
        dim = self._dimension(full_stride, shard_stride)
        while dim is not None and extents[dim] == 1:
            left = extent // covered
            room = min(self.full_shape[dim] - full[dim], self.shard_shape[dim] - shard[dim])
            if left <= room:
                extents[dim] = left
                return covered * left
            # It goes on in the next row only where it fills this one on both sides.
            if room < self.full_shape[dim] or room < self.shard_shape[dim]:
                return covered * room
            extents[dim] = room
            covered *= room
            dim = self._dimension(full_stride * covered, shard_stride * covered)
            if extent % covered:
                return extent - extent % covered
        return covered

    def _dimension(self, full_stride: int, shard_stride: int) -> int | None:
        """The dimension along which a loop of these strides runs, on both sides."""
        for dim, strides in enumerate(zip(self.full_strides, self.shard_strides, strict=True)):
            if strides == (full_stride, shard_stride) and self.full_shape[dim] > 1:
                return dim
        return None

    def _parts(self, walk: BoxWalk, number: int, taken: int) -> list[BoxWalk]:
        """Cut a loop after every `taken` steps: each part lies in a row, or in the next one."""
        extent, full_stride, shard_stride = walk.steps[number]
        parts = [(0, taken), (taken, extent - taken)]
        if taken == 1:
            # Nothing of it runs along a dimension: it is written out.
            if extent > self.most:
                raise self._too_many()
            parts = [(first, 1) for first in range(extent)]
        return [
            replace(
                walk,
                steps=(
                    *walk.steps[:number],
                    *([(count, full_stride, shard_stride)] if count > 1 else []),
                    *walk.steps[number + 1 :],
                ),
                full_base=walk.full_base + first * full_stride,
                shard_base=walk.shard_base + first * shard_stride,
            )
            for first, count in parts
        ]

    def _too_many(self) -> UnsupportedError:
        return UnsupportedError(
            f"a shard of shape {self.shard_shape} of a tensor of shape {self.full_shape} is no "
            f"union of {self.most} boxes with the same axes on both sides",
            remedy="store a layout that keeps the order of the dimensions; transposed copies and "
            "flat cuts through rows have no affine map that DeepSpeed can plan with",
        )


def _merged(boxes: Sequence[Box]) -> list[Box]:
    """Merge disjoint boxes where one goes on as another ends, in the order of the shard."""
    found = list(boxes)
    for dim in reversed(range(len(found[0].extents) if found else 0)):
        groups: dict[object, list[Box]] = {}
        for box in found:
            offset = box.full_start[dim] - box.shard_start[dim]
            others = (
                box.full_start[:dim] + box.full_start[dim + 1 :],
                box.shard_start[:dim] + box.shard_start[dim + 1 :],
                box.extents[:dim] + box.extents[dim + 1 :],
            )
            groups.setdefault((offset, *others, box.ranks, box.scale), []).append(box)
        found = [box for group in groups.values() for box in _merge_along(group, dim)]
    return sorted(found, key=lambda box: box.shard_start)


def _merge_along(group: list[Box], dim: int) -> Iterator[Box]:
    """Join boxes that differ along one dimension only, where one ends as the next one starts."""
    group = sorted(group, key=lambda box: box.shard_start[dim])
    ends = [box.shard_start[dim] + box.extents[dim] for box in group]
    run = [0]
    for box, end in zip(group[1:], ends, strict=False):
        run.append(run[-1] + (box.shard_start[dim] != end))
    for _, entries in groupby(zip(run, group, strict=True), key=lambda entry: entry[0]):
        joined = [box for _, box in entries]
        first, total = joined[0], sum(box.extents[dim] for box in joined)
        yield replace(first, extents=(*first.extents[:dim], total, *first.extents[dim + 1 :]))


def row_major(shape: Shape) -> tuple[int, ...]:
    """Strides of a dense tensor, as the peer writes them: sizes of 0 count."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def coordinates(index: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a flat index in a dense tensor that has elements."""
    found: list[int] = []
    for stride in strides:
        at, index = divmod(index, stride)
        found.append(at)
    return tuple(found)
