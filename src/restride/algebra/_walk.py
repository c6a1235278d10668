"""Strided walks over several addresses at once.

A walk is a nest of loops that moves k addresses together. What the addresses mean is up to the
caller: (full, rank, shard) for pieces, (shard, file element) for copies.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Addresses", "Digit", "Digits", "Walk", "coalesce", "fix", "moved"]

# Loops that reach over each other can have one value in exponentially many ways.
_MOST_PROBLEMS: Final = 100_000

Addresses: TypeAlias = tuple[int, ...]
"""One number for each address: where a walk stands, or how far a step goes."""
Digit: TypeAlias = tuple[int, ...]
"""(extent, stride of the first address, stride of the second, ...)."""
Digits: TypeAlias = tuple[Digit, ...]


class Walk(Frozen):
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

    Raises:
        UnsupportedError: The loops reach the value in a hundred thousand ways.

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


def _solved(bases: Addresses, moving: list[Digit], address: int, value: int) -> list[Addresses]:
    """Bases after the loops in `moving`, by falling stride, have brought an address to a value."""
    # What the last n loops can add: between low[n] and high[n], in multiples of common[n].
    low, high, common = [0], [0], [0]
    for digit in reversed(moving):
        reach = (digit[0] - 1) * digit[1 + address]
        low.append(low[-1] + min(reach, 0))
        high.append(high[-1] + max(reach, 0))
        common.append(gcd(common[-1], digit[1 + address]))
    found: list[Addresses] = []
    problems = 0
    unsolved = [(bases, len(moving))]
    while unsolved:
        problems += 1
        if problems > _MOST_PROBLEMS:
            raise UnsupportedError(
                f"{len(moving)} loops reach one value in more than {_MOST_PROBLEMS} ways"
            )
        at, left = unsolved.pop()
        distance = value - at[address]
        if not left:
            found.append(at)
        elif distance % common[left] == 0:
            extent, *strides = moving[-left]
            left -= 1
            # What remains after the steps of this loop has to be in reach of the lower ones.
            ends = distance - high[left], distance - low[left]
            stride = strides[address]
            first, last = ends if stride > 0 else ends[::-1]
            steps = range(max(0, -(-first // stride)), min(extent - 1, last // stride) + 1)
            unsolved.extend((moved(at, step, tuple(strides)), left) for step in reversed(steps))
    return found
