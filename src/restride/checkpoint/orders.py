"""The order of parameters in a group, told from what each rank lists of it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

from restride.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["merged_order"]


def merged_order(by_rank: Sequence[Sequence[str]], module: Iterable[str] = ()) -> tuple[str, ...]:
    """Put together what ranks list of one group: a rank leaves out what it has no element of.

    Args:
        by_rank: Members of the group on each rank, in order.
        module: Names of the module in its order. It decides where the ranks do not.

    Raises:
        CorruptError: Ranks have the same members in different orders.

    Examples:
        >>> merged_order([["a", "d"], ["b", "d"]], "abcd")
        ('a', 'b', 'd')
        >>> merged_order([])
        ()
    """
    if all(names == by_rank[0] for names in by_rank):
        return tuple(by_rank[0]) if by_rank else ()
    places = {name: place for place, name in enumerate(module)}
    after: dict[str, set[str]] = {name: set() for names in by_rank for name in names}
    waits = dict.fromkeys(after, 0)
    for names in by_rank:
        for first, second in pairwise(names):
            if second not in after[first]:
                after[first].add(second)
                waits[second] += 1
    last = len(places)
    free = [(places.get(name, last), name) for name, count in waits.items() if not count]
    heapify(free)
    merged: list[str] = []
    while free:
        _, name = heappop(free)
        merged.append(name)
        for follower in sorted(after[name]):
            waits[follower] -= 1
            if not waits[follower]:
                heappush(free, (places.get(follower, last), follower))
    if len(merged) < len(after):
        stuck = next(name for name, count in waits.items() if count)
        raise CorruptError(
            f"the model files of different ranks list {stuck!r} and its neighbours in different "
            "orders",
            where="param_shapes",
            remedy="put only the files of one save into the folder",
        )
    return tuple(merged)
