"""Find out whether arrays that differ have the same rows or columns in another order."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from restride.arrays.slice_sums import Moves, SliceSums, find_moves
from restride.executors.events import NullObserver
from restride.executors.running import run_plan
from restride.planning.conversion import plan_reading

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.pairing import Array, Pair

__all__ = ["moves_of"]


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


def moves_of(
    catalogs: tuple[Catalog, Catalog], pair: Pair, *, budget_nbytes: int
) -> tuple[Moves | None, int]:
    """Say how the second checkpoint has the slices of an array of the first.

    Args:
        catalogs: Both checkpoints.
        pair: An array of one shape and dtype that both have.
        budget_nbytes: Most memory for plans, buffers and sums.

    Returns:
        What moved, and the bytes read. None where it is not the same slices, or the budget is too
        small to tell.

    Raises:
        ExecutionError: A file cannot be read, or changed since it was opened.

    Cost:
        Both sides are read once more, one after the other.
    """
    left_nbytes = budget_nbytes - 2 * SliceSums.nbytes(pair.a.shape)
    if left_nbytes < budget_nbytes // 2 or not SliceSums.can_sum(pair.a.dtype.itemsize_nbytes):
        return None, 0
    sums, read_nbytes = [], 0
    for catalog, name, array in zip(catalogs, pair.names, (pair.a, pair.b), strict=True):
        plan = plan_reading(
            [(name, pair.state, array.entry)],
            dtypes=[array.dtype],
            budget_nbytes=left_nbytes,
            workers=1,
        )
        writer = _SumWriter(array)
        read_nbytes += run_plan(catalog, plan, writer, NullObserver())
        sums.append(writer.sums)
    return find_moves(*sums), read_nbytes
