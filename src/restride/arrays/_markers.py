"""Run a partition function on numbers that say where they come from, and read its shards.

Three runs tell what a function does to each element: on markers, which are the flat index of every
element plus one; on the same markers moved by a distance; and on random numbers. What stays where
the markers move is a constant, what moves by another distance is scaled, and what the random
numbers contradict is no layout but arithmetic: a sum, a sort, or something else.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from restride.arrays._frameworks import framework_of, loaded_torch
from restride.errors import RestrideError, UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from restride.algebra.layout import Shape
    from restride.arrays._frameworks import Array

__all__ = [
    "PADDED",
    "CastError",
    "Origin",
    "Partition",
    "PartitionError",
    "Runner",
    "agreeing",
    "random_elements",
    "strip",
    "trace",
]

Partition: TypeAlias = "Callable[[Array, int], Array]"

PADDED: Final = -1

# Integers up to here are exact; markers, moved by their distance, must stay below.
_LARGEST_EXACT: Final = {"int64": 1 << 62, "float64": 1 << 53, "int32": 1 << 30, "float32": 1 << 24}
_LARGEST_RANDOM: Final = {"int64": 1 << 40, "int32": 1 << 20}
_MOST_SCALES: Final = 16
_LARGEST_DENOMINATOR: Final = 1 << 16
# A layer may multiply by a rounded reciprocal where a layout divides.
_TOLERATED_EPSILONS: Final = 4


class PartitionError(Exception):
    """The partition function itself raised, or returned something that is no shard."""


class CastError(PartitionError):
    """The partition function returned elements of another type than it was given."""


class Origin(Frozen):
    """Where the elements of one shard come from.

    Attributes:
        shape: Shape of the shard.
        indices: For each shard address, the flat index in the full tensor, or `PADDED`.
        scales: For each shard address the position of its scale in `factors`.
        factors: The scales that may occur.
    """

    shape: Shape
    indices: NDArray[np.int64]
    scales: NDArray[np.int64]
    factors: tuple[Fraction, ...]


class Runner(Frozen):
    """A partition function with the kind of arrays that it is run on.

    Attributes:
        partition: The function.
        ranks: Number of ranks.
        framework: ``"numpy"`` or ``"torch"``.
        dtype: Element type of the tensors it is given.
    """

    partition: Partition
    ranks: int
    framework: str
    dtype: str

    def run(self, full: NDArray[Any]) -> list[NDArray[Any]]:
        """Cut a tensor into the shards of all ranks.

        Raises:
            CastError: A shard has another element type.
            PartitionError: The function raised, or returned no array of the same framework.
        """
        return [self._run(full, rank) for rank in range(self.ranks)]

    def _run(self, full: NDArray[Any], rank: int) -> NDArray[Any]:
        given: Array = full.copy()  # the function may write into it
        if self.framework == "torch":
            torch = loaded_torch()
            if torch is None:
                raise PartitionError("PyTorch has not been imported")
            given = torch.from_numpy(given)
        try:
            returned = self.partition(given, rank)
        except Exception as error:  # whatever a foreign function raises
            raise PartitionError(f"rank {rank}: {type(error).__name__}: {error}") from error
        if isinstance(returned, np.generic):
            returned = np.asarray(returned)  # what NumPy makes of an array of no dimension
        try:
            framework = framework_of(returned)
            shard = framework.admit(returned)
        except RestrideError as error:
            raise PartitionError(f"rank {rank} got no shard: {error}") from error
        if framework.name != self.framework:
            raise PartitionError(f"rank {rank} got a {framework.name} array")
        if framework.dtype_name(shard) != self.dtype:
            raise CastError(f"{self.dtype} to {framework.dtype_name(shard)}")
        plain: NDArray[Any] = shard.cpu().numpy() if framework.name == "torch" else shard
        return plain


def trace(runner: Runner, shape: Shape) -> list[Origin]:
    """Find out where the elements of every shard come from, and check it on random numbers.

    Raises:
        PartitionError: The function raised.
        UnsupportedError: The function is no layout; the message says what it does instead, and
            where.
    """
    numel = prod(shape)
    distance = 1 << max(numel, 1).bit_length()
    largest = _LARGEST_EXACT[runner.dtype]
    if numel + distance > largest:
        raise UnsupportedError(
            f"{runner.dtype} tells {largest} numbers apart, too few to mark {numel} elements",
            remedy="probe a smaller shape, or with dtype='int64' or dtype='float64'",
        )
    markers = np.arange(1, numel + 1).astype(runner.dtype).reshape(shape)
    sample = random_elements(runner.dtype, shape, seed=0)
    moved_markers = np.asarray(markers + markers.dtype.type(distance))
    runs = [runner.run(full) for full in (markers, moved_markers, sample)]
    found = []
    for rank, (here, moved, checked) in enumerate(zip(*runs, strict=True)):
        if not here.shape == moved.shape == checked.shape:
            raise UnsupportedError(
                f"the shape of the shard depends on the data: {here.shape} and {checked.shape}",
                where=f"rank {rank}",
            )
        origin, is_wrong = _read(here, moved, distance, numel)
        is_wrong |= _contradicted(origin, sample.reshape(-1), checked.reshape(-1))
        if is_wrong.any():
            raise _explain(runner, rank, is_wrong, sample, here, moved, distance)
        found.append(origin)
    return found


def random_elements(dtype: str, shape: Shape, *, seed: int) -> NDArray[Any]:
    """Numbers of both signs in which no two elements are likely to be equal."""
    rng = np.random.default_rng(seed)
    if dtype in _LARGEST_RANDOM:
        largest = _LARGEST_RANDOM[dtype]
        return np.asarray(rng.integers(-largest, largest, shape)).astype(dtype)
    return np.asarray(1000 * rng.standard_normal(shape)).astype(dtype)


def _read(
    here: NDArray[Any], moved: NDArray[Any], distance: int, numel: int
) -> tuple[Origin, NDArray[np.bool_]]:
    """Read markers: where each element comes from, and which elements are no markers."""
    values = here.reshape(-1)
    with np.errstate(invalid="ignore"):  # infinities and NaNs are no markers either
        steps = moved.reshape(-1) - values
    indices = np.full(values.size, PADDED)
    scales = np.zeros(values.size, np.int64)
    is_unread = ~((steps == 0) & (values == 0))
    factors = [Fraction(1)]
    for step in _different(steps[is_unread], distance):
        scale = _scale_of(step, distance)
        if not scale or (scale != 1 and values.dtype.kind != "f"):
            continue
        if scale not in factors:
            factors.append(scale)
        chosen = np.flatnonzero(is_unread & (steps == step))
        read = values[chosen]
        if scale != 1:
            read = np.rint(read * scale.denominator / scale.numerator)
        found = read.astype(np.int64) - 1
        is_inside = (found >= 0) & (found < numel)
        indices[chosen[is_inside]] = found[is_inside]
        scales[chosen] = factors.index(scale)
        is_unread[chosen[is_inside]] = False
    return Origin(tuple(here.shape), indices, scales, tuple(factors)), is_unread


def _different(steps: NDArray[Any], distance: int) -> list[int | float]:
    """The distances by which markers moved, that of a copy first."""
    others = np.unique(steps[steps != distance])
    found: list[int | float] = [distance, *others[:_MOST_SCALES].tolist()]
    return found


def _scale_of(step: float, distance: int) -> Fraction:
    if not np.isfinite(step):
        return Fraction(0)
    return (Fraction(step) / distance).limit_denominator(_LARGEST_DENOMINATOR)


def _contradicted(origin: Origin, sample: NDArray[Any], shard: NDArray[Any]) -> NDArray[np.bool_]:
    """Which elements are not what the origin foretells of random numbers."""
    is_wrong = np.zeros(shard.size, np.bool_)
    for number, scale in enumerate(origin.factors):
        chosen = origin.scales == number
        expected = np.zeros(np.count_nonzero(chosen), shard.dtype)
        is_element = origin.indices[chosen] != PADDED
        expected[is_element] = sample[origin.indices[chosen][is_element]]
        if scale != 1:
            expected *= shard.dtype.type(scale.numerator)
            if scale.denominator != 1:
                expected /= shard.dtype.type(scale.denominator)
        is_wrong[chosen] = ~agreeing(expected, shard[chosen], is_exact=scale == 1)
    return is_wrong


def agreeing(expected: NDArray[Any], shard: NDArray[Any], *, is_exact: bool) -> NDArray[np.bool_]:
    """Where elements are equal, or as good as equal where they have been scaled."""
    is_equal: NDArray[np.bool_] = expected == shard
    if not is_exact and shard.dtype.kind == "f":
        tolerance = _TOLERATED_EPSILONS * np.finfo(shard.dtype).eps
        is_equal |= np.abs(expected - shard) <= tolerance * np.abs(shard)
    return is_equal


def strip(maps: list[NDArray[np.int64]]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Take the innermost loops that all maps share out of them.

    Returns:
        The maps without them, and the loops (extent, full stride), outermost first.
    """
    loops: list[tuple[int, int]] = []
    while True:
        extent, step = _inner_loop(maps)
        if extent == 1:
            return [entries.tolist() for entries in maps], loops
        loops.insert(0, (extent, step))
        maps = [entries[::extent] for entries in maps]


def _inner_loop(maps: list[NDArray[np.int64]]) -> tuple[int, int]:
    step: int | None = None
    extent = 0
    for entries in maps:
        extent = gcd(extent, entries.size)
        is_padding = entries == PADDED
        steps = np.diff(entries)
        if step is None and not is_padding[:-1].all():
            step = int(steps[np.argmin(is_padding[:-1])])
        is_break = (is_padding[1:] != is_padding[:-1]) | (~is_padding[1:] & (steps != step))
        extent = int(np.gcd.reduce(np.flatnonzero(is_break) + 1, initial=extent))
        if extent == 1:
            break
    return (1, 0) if step is None or step < 0 or extent < 1 else (extent, step)


def _explain(
    runner: Runner,
    rank: int,
    is_wrong: NDArray[np.bool_],
    sample: NDArray[Any],
    here: NDArray[Any],
    moved: NDArray[Any],
    distance: int,
) -> UnsupportedError:
    """Find out what the function does at the first element that is not copied or scaled."""
    at = int(np.flatnonzero(is_wrong)[0])
    first, second = (array.reshape(-1)[at] for array in (here, moved))
    with np.errstate(invalid="ignore"):
        weight = (second - first) / distance
    other = random_elements(runner.dtype, sample.shape, seed=1)
    alone, beside, both = (
        runner.run(full)[rank].reshape(-1)[at]
        for full in (sample, other, np.asarray(sample + other))
    )
    if first == second == alone:
        done = f"is always {first}; only zeros are taken as padding"
    elif weight not in {0, 1} and np.isin(alone, sample * weight):
        done = f"is an element times {weight:g}, and {runner.dtype} elements are not scaled"
    elif np.isfinite(both) and np.isclose(both, alone + beside, rtol=1e-6, atol=0):
        done = "adds up several elements of the full tensor"
    elif np.isin(alone, sample):
        done = "comes from a place that depends on the data"
    else:
        done = "is computed from the data in another way than by copying or scaling"
    place = tuple(int(step) for step in np.unravel_index(at, here.shape)) if here.ndim else ()
    return UnsupportedError(
        f"the shard element at {place} {done}",
        where=f"rank {rank}",
        remedy="such a step is an operation between layouts; probe the function without it",
    )
