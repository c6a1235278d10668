"""What one array is made of: parts of others, copied in one call of the kernel where that can be.

The parts of a layout are the same at every call, and so is nearly all that has to be known of them.
It is found out once, and kept as the kernel wants it: after a large copy no line of the interpreter
is left in any cache, and what is asked again then takes as long as a megabyte of the next one.
"""

from __future__ import annotations

from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, Final

from restride.arrays import _kernel
from restride.arrays._blocks import Block, Side, injective_parts, views
from restride.arrays._words import is_for_threads
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from fractions import Fraction

    from restride.arrays._frameworks import Array, Framework

__all__ = ["Part", "Parts", "copy_parts"]

_LARGEST: Final = (1 << 63) - 1  # of what the kernel counts in; a view may expand one byte to more


class Part(Frozen):
    """Elements that one array is to have from another.

    Attributes:
        rank: Whose array has them.
        block: Where they are in both.
        scale: What they are multiplied by.
    """

    rank: int
    block: Block
    scale: Fraction


class Parts:
    """All that is copied into one array.

    Attributes:
        in_order: Where two of them write an element, the later one stays.
        is_each_once: Whether it is known that none writes an element twice.
    """

    def __init__(self, in_order: Iterable[Part], *, is_each_once: bool = True) -> None:
        """Keep them."""
        self.in_order = tuple(in_order)
        self.is_each_once = is_each_once
        self._packed: dict[int, _Packed | None] = {}

    def packed(self, itemsize: int) -> _Packed | None:
        """The same for the kernel, packed once for elements of each size."""
        if itemsize not in self._packed:
            self._packed[itemsize] = _pack(self.in_order, itemsize)
        return self._packed[itemsize]


class _Packed(Frozen):
    """Copies as the kernel takes them.

    Attributes:
        ranks: Whose arrays are read, in the order in which the copies number them.
        read_stops: Behind the last byte that is read of each.
        written_stop: Behind the last byte that is written.
        copies: The numbers of all copies.
        count: How many there are.
        is_for_threads: Whether several threads would do each of them sooner.
    """

    ranks: tuple[int, ...]
    read_stops: tuple[int, ...]
    written_stop: int
    copies: bytes
    count: int
    is_for_threads: bool


def copy_parts(
    framework: Framework, sources: Mapping[int, Array], target: Array, parts: Parts
) -> None:
    """Copy all parts, scaled where their scale is not 1.

    Args:
        framework: That of all arrays.
        sources: Arrays of one place, by rank.
        target: A contiguous array of that place that shares no memory with them.
        parts: What is copied.

    Raises:
        LayoutError: A part is not inside its source, or not inside the target.
        UnsupportedError: Elements of this type cannot be scaled so.
    """
    if _copy_at_once(framework, sources, target, parts):
        return
    for part in parts.in_order:
        blocks = [part.block]
        if not parts.is_each_once:
            blocks = list(injective_parts(part.block))[::-1]
        for block in blocks:
            for pair in views(framework, sources[part.rank], target, block):
                scaled = part.scale != 1
                source = framework.scaled(pair.source, part.scale) if scaled else pair.source
                framework.copy(pair.target, source)


def _copy_at_once(
    framework: Framework, sources: Mapping[int, Array], target: Array, parts: Parts
) -> bool:
    """Have the kernel copy all parts, if it can."""
    kernel = _kernel.KERNEL
    packed = parts.packed(target.itemsize)
    if kernel is None or packed is None or (packed.is_for_threads and framework.is_parallel):
        return False
    read = [sources[rank] for rank in packed.ranks]
    # The only guard between these numbers and foreign memory: it trusts no check of the layout.
    if target.nbytes < packed.written_stop or any(
        array.nbytes < stop for array, stop in zip(read, packed.read_stops, strict=True)
    ):
        return False
    addresses = framework.addresses([target, *read])
    if addresses is None:
        return False
    places = pack(f"{len(read)}P", *addresses[1:])
    if not kernel.copy_each(addresses[0], places, packed.copies, packed.count):
        return False
    framework.count_write(target)
    return True


def _pack(parts: Sequence[Part], itemsize: int) -> _Packed | None:
    """Pack them; None where one is scaled, or where it is not plain that it has no order."""
    numbers: list[int] = []
    ranks: dict[int, int] = {}
    read_stops: dict[int, int] = {}
    written_stop = 0
    are_for_threads = True
    for part in parts:
        block = next(injective_parts(part.block))
        if part.scale != 1 or len(block.extents) < len(part.block.extents):
            return None
        read, written = _in_bytes(block.source, itemsize), _in_bytes(block.target, itemsize)
        (first, last), (to, end) = _ends(block.extents, read), _ends(block.extents, written)
        if min(first, to) < 0 or max(last, end) > _LARGEST:
            return None
        source = ranks.setdefault(part.rank, len(ranks))
        read_stops[part.rank] = max(read_stops.get(part.rank, 0), last + itemsize)
        written_stop = max(written_stop, end + itemsize)
        loops = zip(block.extents, read.strides, written.strides, strict=True)
        numbers += source, written.base, read.base, itemsize, len(block.extents)
        numbers += chain.from_iterable(loops)
        sides = (read.strides, written.strides)
        are_for_threads &= is_for_threads(itemsize, block.extents, sides)
    return _Packed(
        tuple(ranks),
        tuple(read_stops.values()),
        written_stop,
        pack(f"{len(numbers)}q", *numbers),
        len(parts),
        are_for_threads,
    )


def _in_bytes(side: Side, itemsize: int) -> Side:
    return Side(side.base * itemsize, tuple(stride * itemsize for stride in side.strides))


def _ends(extents: Sequence[int], side: Side) -> tuple[int, int]:
    """The lowest place at which the loops stand, and the highest."""
    steps = [(extent - 1) * stride for extent, stride in zip(extents, side.strides, strict=True)]
    return side.base + sum(s for s in steps if s < 0), side.base + sum(s for s in steps if s > 0)
