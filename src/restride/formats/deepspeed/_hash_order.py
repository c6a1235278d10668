"""The order of a set of names in processes that hash as this one does.

DeepSpeed orders groups of experts by a set, and engines take the groups of a file by their places.
Strings hash otherwise in every process, unless it was started with ``PYTHONHASHSEED=0``: then all
have the same order, and so has this one.
"""

from __future__ import annotations

import sys
from itertools import permutations
from typing import TYPE_CHECKING, Final

from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["set_order"]

_MOST: Final = 6


def set_order(names: Sequence[str], where: str) -> tuple[str, ...]:
    """List some names in the order that a set has them in.

    Args:
        names: The names.
        where: What they are of, for errors.

    Raises:
        UnsupportedError: Other processes have them in other orders.
    """
    if len(names) <= 1:
        return tuple(names)
    said = f"has layers of experts on different numbers of ranks ({', '.join(sorted(names))})"
    if sys.flags.hash_randomization or len(names) > _MOST:
        raise UnsupportedError(
            f"{said}, whose groups DeepSpeed orders by chance in each process, and takes by their "
            "places",
            where=where,
            remedy="run this with PYTHONHASHSEED=0, and the training that resumes as well; or "
            "choose one --ep for all layers",
        )
    # What comes first into a set may count, and it is not known.
    orders = {tuple(_set_of(given)) for given in permutations(names)}
    if len(orders) > 1:
        raise UnsupportedError(
            f"{said}, whose order depends on which DeepSpeed comes upon first",
            where=where,
            remedy="choose one --ep for all layers",
        )
    return orders.pop()


def _set_of(names: Sequence[str]) -> set[str]:
    found = set[str]()
    for name in names:
        found.add(name)
    return found
