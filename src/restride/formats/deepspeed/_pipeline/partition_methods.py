"""How an engine deals the layers of a pipeline out to its stages, by its own methods.

A checkpoint does not say how it was done, and the module that resumes does it anew: what is
computed here has to be what that module computes (deepspeed 0.19.8 `runtime/pipe/module.py`,
`_partition_layers`, and `runtime/utils.py`, `partition_uniform` and `partition_balanced`).
"""

from __future__ import annotations

from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["balanced_starts", "uniform_starts"]

_INFINITE = inf


def uniform_starts(layers: int, stages: int) -> tuple[int, ...]:
    """First layer of each stage where all have the same number of layers, the first ones one more.

    Examples:
        >>> uniform_starts(7, 3)
        (0, 3, 5)
        >>> uniform_starts(2, 3)
        (0, 1, 2)
    """
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages))


def balanced_starts(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """First layer of each stage where the heaviest stage is as near as possible to the lightest.

    Of several such cuts it is the engine's: for the first layers and each number of stages it
    remembers one cut, whose last stage begins as late as possible, and looks at no other again.

    Args:
        weights: Parameters that each layer trains.
        stages: How many stages.

    Cost:
        O(layers ** 2 * stages).

    Examples:
        >>> balanced_starts([5, 1, 1, 1, 5], 2)
        (0, 3)
        >>> balanced_starts([66, 122, 0, 122, 12, 66], 2)
        (0, 3)
    """
    count = len(weights)
    if count <= stages:
        return uniform_starts(count, stages)
    sums = [0, *accumulate(weights)]
    heaviest: list[float] = [0, *[_INFINITE] * count]
    lightest: list[float] = [_INFINITE] * (count + 1)
    last: list[list[int]] = []
    for _ in range(stages):
        found = [_last_start(stop, sums, heaviest, lightest) for stop in range(count + 1)]
        last.append([start for start, _, _ in found])
        heaviest = [most for _, most, _ in found]
        lightest = [least for _, _, least in found]
    starts = [count]
    for begins in reversed(last):
        starts.append(begins[starts[-1]])
    return tuple(reversed(starts[1:]))


def _last_start(
    stop: int, sums: Sequence[int], heaviest: Sequence[float], lightest: Sequence[float]
) -> tuple[int, float, float]:
    """Where the last stage begins that ends at `stop`, and the extremes over all stages then."""
    best: tuple[float, int, float, float] = (_INFINITE, 0, _INFINITE, _INFINITE)
    for start in range(stop):
        if heaviest[start] == _INFINITE:
            continue
        weight = sums[stop] - sums[start]
        most, least = max(heaviest[start], weight), min(lightest[start], weight)
        if most - least <= best[0]:
            best = most - least, start, most, least
    return best[1:]
