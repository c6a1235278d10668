"""Find out whether arrays that differ have the same rows, columns or names in another order."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final

from restride.arrays.slice_sums import Moves, SliceSums, find_moves
from restride.executors.events import NullObserver
from restride.executors.running import run_plan
from restride.planning.jobs import plan_reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.arrays.differences import Difference
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.pairing import Array, Pair

__all__ = ["find_all_moves"]

_MODULUS: Final = 1 << 64


class _SumWriter:
    """A target that is one array: it keeps the sums of its slices."""

    def __init__(self, array: Array) -> None:
        self._itemsize = array.dtype.itemsize_nbytes
        self.sums = SliceSums(array.shape, self._itemsize)
        self._lock = Lock()

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        del file  # there is one
        with self._lock:
            self.sums.add(start_nbytes // self._itemsize, buffer)


class _Summing:
    """Reads single arrays of two checkpoints, and counts the bytes."""

    def __init__(
        self, catalogs: tuple[Catalog, Catalog], pairs: Sequence[Pair], budget_nbytes: int
    ) -> None:
        self._catalogs, self._pairs, self._budget_nbytes = catalogs, pairs, budget_nbytes
        self.read_nbytes = 0

    def can_sum(self, place: int) -> bool:
        """Whether the sums of both sides leave as much for buffers as comparing them had."""
        array = self._pairs[place].a
        sums_nbytes = 2 * SliceSums.nbytes(array.shape)
        return (
            SliceSums.can_sum(array.dtype.itemsize_nbytes)
            and sums_nbytes <= self._budget_nbytes // 2
        )

    def sums(self, place: int, side: int) -> SliceSums:
        """Those of one array of one side."""
        pair = self._pairs[place]
        array = (pair.a, pair.b)[side]
        plan = plan_reading(
            [(pair.names[side], pair.state, array.entry)],
            dtypes=[array.dtype],
            budget_nbytes=self._budget_nbytes // 2,
            workers=1,
        )
        writer = _SumWriter(array)
        self.read_nbytes += run_plan(self._catalogs[side], plan, writer, NullObserver())
        return writer.sums

    def is_same(self, place: int, other: int) -> bool:
        """Whether the second side has at one place what the first one has at another."""
        first, second = self.sums(other, 0), self.sums(place, 1)
        return bool((first.rows == second.rows).all())


def find_all_moves(
    catalogs: tuple[Catalog, Catalog],
    pairs: Sequence[Pair],
    found: Mapping[int, Difference],
    *,
    budget_nbytes: int,
) -> tuple[dict[int, Moves], int]:
    """Say of arrays that differ where the second checkpoint has what the first one has.

    Args:
        catalogs: Both checkpoints.
        pairs: Arrays that both have.
        found: What is different, by the number of the pair.
        budget_nbytes: Most memory for plans, buffers and sums.

    Returns:
        What moved, by the number of the pair, and the bytes read. What is not the same in another
        order, or too large to tell within the budget, is left out.

    Raises:
        ExecutionError: A file cannot be read, or changed since it was opened.

    Cost:
        Both sides of what may be the same in another order are read once more, and nothing else.
    """
    summing = _Summing(catalogs, pairs, budget_nbytes)
    moves: dict[int, Moves] = {}
    waiting: dict[tuple[object, ...], int] = {}
    for place in filter(summing.can_sum, found):
        imbalance, kind = found[place].imbalance, _kind(pairs[place])
        if not imbalance:
            moved = find_moves(summing.sums(place, 0), summing.sums(place, 1))
            if moved is not None:
                moves[place] = moved
            continue
        # What one of two that were exchanged has more is what the other one has less.
        other = waiting.pop((*kind, _MODULUS - imbalance), None)
        if other is None:
            waiting[*kind, imbalance] = place
        elif summing.is_same(place, other) and summing.is_same(other, place):
            moves[place] = Moves("tensor", tensor=pairs[other].names[0])
            moves[other] = Moves("tensor", tensor=pairs[place].names[0])
    return moves, summing.read_nbytes


def _kind(pair: Pair) -> tuple[object, ...]:
    return pair.state, pair.a.shape, pair.a.dtype.name, pair.b.dtype.name
