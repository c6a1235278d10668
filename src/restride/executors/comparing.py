"""Compare what one plan reads with what another does, instead of writing it."""

from __future__ import annotations

from threading import Lock, local
from typing import TYPE_CHECKING

from restride.arrays.differences import Tolerance, compare_runs, join_differences
from restride.executors._copying import StepBuffers, fill_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.arrays.differences import Difference
    from restride.executors._copying import Reader
    from restride.executors.events import ReplicaDrift
    from restride.planning.plan import Plan

__all__ = ["CompareWriter"]


class CompareWriter:
    """A target whose files are arrays: what is written into one is compared with another plan's.

    Both plans read whole arrays, numbered alike. The steps are those of the plan that is carried
    out; the other side reads the same elements into buffers of its own.
    """

    def __init__(self, plan: Plan, other: Plan, reader: Reader, tolerance: Tolerance) -> None:
        """Prepare to compare.

        Args:
            plan: The plan that is carried out, and writes here.
            other: What to compare with.
            reader: Source files of `other`.
            tolerance: How far elements may be apart.
        """
        self._regions = {region.target_file: region for region in plan.regions}
        self._others = {region.target_file: region for region in other.regions}
        self._plan = other
        self._reader = reader
        self._tolerance = tolerance
        self._found: dict[int, Difference] = {}
        self._read_nbytes = 0
        self._lock = Lock()
        self._local = local()

    @property
    def found(self) -> Mapping[int, Difference]:
        """What is different so far, by the number of the array."""
        return self._found

    @property
    def read_nbytes(self) -> int:
        """Bytes read by the other side."""
        return self._read_nbytes

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Compare the bytes of array number `file` that start there. Any thread may call it."""
        itemsize = self._regions[file].target_dtype.itemsize_nbytes
        # What is streamed on one side may be wider on the other, and need larger buffers.
        most_nbytes = self._others[file].step_numel * itemsize
        for first in range(0, buffer.nbytes, most_nbytes):
            part = buffer[first : first + most_nbytes]
            self._compare(file, (start_nbytes + first) // itemsize, part)

    def _compare(self, file: int, start: int, ours: memoryview) -> None:
        """Compare elements that a step of the other side takes."""
        region, other = self._regions[file], self._others[file]
        step = other.step(start, start + ours.nbytes // region.target_dtype.itemsize_nbytes)
        buffers: StepBuffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = StepBuffers(self._plan)
        before = buffers.read_nbytes
        theirs = fill_step(step, self._reader, buffers, _ignore)
        dtypes = (region.target_dtype, other.target_dtype)
        found = compare_runs(ours, theirs, dtypes, self._tolerance)
        with self._lock:
            self._read_nbytes += buffers.read_nbytes - before
            joined = join_differences(self._found.get(file), found, start)
            if joined is not None:
                self._found[file] = joined


def _ignore(event: ReplicaDrift) -> None:
    """There is none: one replica is read."""
    del event
