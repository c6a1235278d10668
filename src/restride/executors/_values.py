"""Look at the values of a step: where its replicas differ, what their mean is, what scales it.

Imported only where that is asked for, with NumPy.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from restride.arrays.casts import largest_gap, round_once, to_comparable
from restride.arrays.scaling import scaled_once
from restride.errors import ReplicaError, UnsupportedError
from restride.executors.events import ReplicaDrift

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from restride.checkpoint.dtypes import DType
    from restride.planning.plan import Copy, RegionPlan, Step, StepFill

__all__ = ["Mean", "difference", "refusal", "scale"]

_LARGEST_WORD_NBYTES: Final = 8


def scale(fill: StepFill, dtype: DType, main: memoryview) -> None:
    """Multiply the elements of one fill by its factor, wherever they stand in the buffer."""
    itemsize = dtype.itemsize_nbytes
    words = _words(dtype, main)
    for copy in fill.copies[0][1]:
        run = copy.run_nbytes // itemsize
        shape = (*(axis[0] for axis in copy.axes), run)
        first = np.int64(copy.target_start_nbytes // itemsize)
        places = np.full(shape, first)
        for number, stride in enumerate([*(axis[2] // itemsize for axis in copy.axes), 1]):
            ramp = np.arange(shape[number], dtype=np.int64) * stride
            places += ramp.reshape(-1, *[1] * (len(shape) - number - 1))
        flat = places.reshape(-1)
        words[flat] = _words(dtype, scaled_once(words[flat], dtype, fill.scale))


class Mean:
    """Sum of replicas in float64. Elements on which all of them agree keep their bits."""

    def __init__(self, region: RegionPlan, first: memoryview, count: int) -> None:
        """Start with so many replicas that are all like the first."""
        if region.source_dtype.kind != "float":
            raise UnsupportedError(
                f"a mean of {region.source_dtype} replicas has no meaning",
                where=f"tensor {region.tensor!r}, state {region.state!r}",
                remedy="choose the first one",
            )
        self.dtype = region.source_dtype
        with np.errstate(invalid="ignore", over="ignore"):
            self.total = _comparable(first, self.dtype) * count
        self.first = _words(self.dtype, first)
        self.disagree = np.zeros(self.total.shape, np.bool_)
        self.count = count

    def add(self, replica: memoryview) -> None:
        """Add one more replica."""
        # The sum of an infinity and its negative is no number, and nothing to warn of.
        with np.errstate(invalid="ignore", over="ignore"):
            self.total += _comparable(replica, self.dtype)
        self.disagree |= _words(self.dtype, replica) != self.first
        self.count += 1

    def store(self, main: memoryview) -> None:
        """Put the mean where replicas disagree."""
        fresh = round_once(self.total[self.disagree] / self.count, self.dtype)
        _words(self.dtype, main)[self.disagree] = _words(self.dtype, fresh)


def _words(dtype: DType, buffer: memoryview | NDArray[np.uint8]) -> NDArray[np.generic]:
    """The elements of a buffer as bit patterns."""
    content = np.frombuffer(buffer, np.uint8)
    if dtype.itemsize_nbytes > _LARGEST_WORD_NBYTES:
        return content.view(f"V{dtype.itemsize_nbytes}")
    return content.view(f"u{dtype.itemsize_nbytes}")


def _comparable(buffer: memoryview, dtype: DType) -> NDArray[np.float64]:
    return to_comparable(np.frombuffer(buffer, np.uint8), dtype)


def difference(
    region: RegionPlan,
    ranks: tuple[int, int],
    copies: tuple[Copy, ...],
    a: memoryview,
    b: memoryview,
) -> ReplicaDrift:
    """What differs between two ranks' copies of what a fill reads; the rest of both is the same."""
    dtype = region.source_dtype
    where = _words(dtype, a) != _words(dtype, b)
    largest: float | None = None
    if dtype.kind != "complex":
        largest = largest_gap(_comparable(a, dtype)[where], _comparable(b, dtype)[where])
    payload = sum(copy.run_nbytes * prod(axis[0] for axis in copy.axes) for copy in copies)
    return ReplicaDrift(
        tensor=region.tensor,
        state=region.state,
        ranks=ranks,
        numel=payload // dtype.itemsize_nbytes,
        different_numel=int(np.count_nonzero(where)),
        largest=largest,
    )


def refusal(step: Step, drift: ReplicaDrift, main: memoryview, replica: memoryview) -> ReplicaError:
    """What is told of copies that differ and must not, with the first element that does."""
    dtype = step.region.source_dtype
    index = int(np.flatnonzero(_words(dtype, main) != _words(dtype, replica))[0])
    values = ""
    if dtype.kind != "complex":
        itemsize = dtype.itemsize_nbytes
        at = slice(index * itemsize, (index + 1) * itemsize)
        first, second = (float(_comparable(buffer[at], dtype)[0]) for buffer in (main, replica))
        values = f" ({first:.9g} and {second:.9g})"
    first, second = drift.ranks
    holders = f"ranks {first} and {second} hold" if first != second else f"rank {first} holds"
    full_index = step.region.full_index(step.start + index)
    shape = step.region.array.target_layout.full_shape
    place = f"element {full_index}{_at(full_index, shape)}"
    return ReplicaError(
        f"{holders} different copies of the same elements, the first at {place}{values}",
        ranks=drift.ranks,
        different_numel=drift.different_numel,
        largest=drift.largest,
        first_index=full_index,
        where=f"tensor {drift.tensor!r}, state {drift.state!r}",
        remedy="see the whole table with `restride check`, then decide: --replicas first or mean, "
        "or the rank whose copy counts, as tp=1, or with --to deepspeed own, each rank's own",
    )


def _at(index: int | None, shape: tuple[int, ...]) -> str:
    """The same element by its place in the tensor, where that says more than the flat index."""
    if index is None or len(shape) < 2:  # noqa: PLR2004 - a vector has one coordinate
        return ""
    coordinates = []
    for extent in reversed(shape):
        index, at = divmod(index, extent)
        coordinates.append(str(at))
    return f" ([{', '.join(reversed(coordinates))}] of the tensor)"
