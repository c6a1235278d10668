"""Strided walks over several addresses at once.

A walk is a nest of loops that moves k addresses together. What the addresses mean is up to the
caller: (full, rank, shard) for pieces, (shard, file element) for copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Addresses", "Digit", "Digits", "Walk", "coalesce", "fix", "moved"]

Addresses: TypeAlias = tuple[int, ...]
"""One number for each address: where a walk stands, or how far a step goes."""
Digit: TypeAlias = tuple[int, ...]
"""(extent, stride of the first address, stride of the second, ...)."""
Digits: TypeAlias = tuple[Digit, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """Loops that move k addresses together.

    Attributes:
        bases: Where the addresses start.
        digits: Loops, outermost first: the extent, then one stride for each address.
    """

    bases: Addresses
    digits: Digits = ()

    @property
    def numel(self) -> int:
        """Number of steps."""
        return prod(digit[0] for digit in self.digits)

    def reach(self, address: int = 0) -> range:
        """Smallest range of one address that contains the walk.

        Examples:
            >>> Walk((5,), ((3, -2), (2, 10))).reach()
            range(1, 16)
        """
        steps = [(digit[0] - 1) * digit[1 + address] for digit in self.digits]
        base = self.bases[address]
        low = base + sum(step for step in steps if step < 0)
        return range(low, base + sum(step for step in steps if step > 0) + 1)


def coalesce(digits: Iterable[Digit]) -> Digits:
    """Merge neighbouring loops that continue each other on every address, and drop loops of one.

    The steps and their order stay the same. Called *coalesce* in CuTe.

    Cost:
        O(digits). Never walks steps.

    Examples:
        >>> coalesce([(4, 8, 8), (1, 5, 5), (8, 1, 1)])
        ((32, 1, 1),)
    """
    merged: list[Digit] = []
    for digit in digits:
        extent = digit[0]
        if extent == 1:
            continue
        if merged and all(
            outer == extent * inner for outer, inner in zip(merged[-1][1:], digit[1:], strict=True)
        ):
            merged[-1] = (merged[-1][0] * extent, *digit[1:])
        else:
            merged.append(digit)
    return tuple(merged)


def fix(walk: Walk, address: int, value: int) -> list[Walk]:
    """The steps of a walk at which one address has a value, as walks that do not move it.

    Args:
        walk: The walk.
        address: Which address, counted from 0.
        value: What it shall be.

    Returns:
        One walk for every way to reach the value: none, one, or several where the loops that move
        the address reach over each other.

    Cost:
        O(loops) where each stride exceeds the reach of the smaller ones, as on every mesh.

    Examples:
        >>> fix(Walk((0, 0), ((4, 1, 6), (6, 0, 1))), 0, 2)
        [Walk(bases=(2, 12), digits=((6, 0, 1),))]
    """
    moving = [digit for digit in walk.digits if digit[1 + address]]
    if not moving:
        return [walk] if walk.bases[address] == value else []
    moving.sort(key=lambda digit: -abs(digit[1 + address]))
    others = tuple(digit for digit in walk.digits if not digit[1 + address])
    return [Walk(bases, others) for bases in _solved(walk.bases, moving, address, value)]


def moved(bases: Addresses, steps: int, strides: Addresses) -> Addresses:
    """Where a number of steps leads."""
    if not steps:
        return bases
    return tuple([base + steps * stride for base, stride in zip(bases, strides, strict=True)])


def _solved(bases: Addresses, moving: list[Digit], address: int, value: int) -> Iterator[Addresses]:
    """Bases after the loops in `moving`, by falling stride, have brought an address to a value."""
    distance = value - bases[address]
    if not moving:
        if not distance:
            yield bases
        return
    (extent, *strides), lower = moving[0], moving[1:]
    stride = strides[address]
    steps = [(digit[0] - 1) * digit[1 + address] for digit in lower]
    down, up = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    # The lower loops reach [down, up], so distance - index * stride has to be in there.
    bounds = (distance - up, distance - down) if stride > 0 else (down - distance, up - distance)
    lowest, highest = -(-bounds[0] // abs(stride)), bounds[1] // abs(stride)
    for index in range(max(0, lowest), min(extent - 1, highest) + 1):
        yield from _solved(moved(bases, index, tuple(strides)), lower, address, value)
