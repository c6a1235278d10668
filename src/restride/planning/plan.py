"""A plan is data: steps that each own a range of target bytes. Nothing here opens a file.

A region is one contiguous run of elements in one target file, made of *fills*: disjoint sets of its
elements with every place they can be read from. Regions are cut into steps that fit the memory
budget. Steps may run in any order, alone or twice, and the memory they take is known before the
first byte moves.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from restride.algebra.walks import Walk, restrict
from restride.errors import LayoutError
from restride.planning.fills import numel_of, walks_within
from restride.planning.sharing import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.algebra.copies import Replicas
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Region
    from restride.checkpoint.dtypes import DType
    from restride.planning.fills import Fill, Pattern, Reach

__all__ = [
    "BUFFERS_PER_WORKER",
    "ArrayPlan",
    "Chunk",
    "Copy",
    "Plan",
    "RegionPlan",
    "Step",
    "StepFill",
    "chunk_nbytes",
]

# What a worker holds at one time: the step, a replica to compare it with, the span of a strided
# read, the same step in another dtype, and four temporaries while differences are computed.
BUFFERS_PER_WORKER: Final = 8
# Python's work on a step takes as long as moving 200 kB: where no buffer has to hold it, it is
# longer, and still done in some hundredths of a second.
_STREAMED_NBYTES: Final = 16 << 20
_SHORTEST_RUN_NBYTES: Final = 64 << 10
# What is read stays in the core's cache until it is digested and written.
_CHUNK_NBYTES: Final = 128 << 10
_ONE: Final = Fraction(1)


class Copy(Struct, frozen=True):
    """A strided block of bytes from a source file into the buffer of a step.

    Attributes:
        file: Index of the source file.
        source_start_nbytes: First byte in the source file.
        target_start_nbytes: First byte in the buffer of the step.
        axes: (extent, source stride, target stride), strides in bytes, by falling source stride,
            which is at least 0; the target stride may be negative.
        run_nbytes: Bytes that are contiguous on both sides at each step of the axes.
    """

    file: int
    source_start_nbytes: int
    target_start_nbytes: int
    axes: tuple[tuple[int, int, int], ...]
    run_nbytes: int


class StepFill(Struct, frozen=True):
    """The part of a fill that is in one step.

    Attributes:
        copies: For each source its rank and where its elements are, the chosen one first.
        agreeing: As for the fill.
        scale: As for the fill.
    """

    copies: tuple[tuple[int, tuple[Copy, ...]], ...]
    agreeing: int
    scale: Fraction = _ONE


class Chunk(NamedTuple):
    """Bytes that stand together in a source file and in the target.

    Attributes:
        file: Index of the source file.
        source_start_nbytes: First byte in the source file.
        target_start_nbytes: First byte in the target file.
        nbytes: Number of bytes.
    """

    file: int
    source_start_nbytes: int
    target_start_nbytes: int
    nbytes: int


class Step(Struct, frozen=True):
    """Elements [start, stop) of a region, and how to fill them.

    Attributes:
        region: The region that the step is a part of.
        start: First element.
        stop: Element after the last one.
        fills: Where its elements come from.
        is_filled: Whether the fills leave no element out. What they leave out is padding.
    """

    region: RegionPlan
    start: int
    stop: int
    fills: tuple[StepFill, ...]
    is_filled: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def target_start_nbytes(self) -> int:
        """First byte in the target file."""
        return (
            self.region.target_start_nbytes + self.start * self.region.target_dtype.itemsize_nbytes
        )

    def chunks(self, buffer_nbytes: int) -> Iterator[Chunk]:
        """Cut a step of a region that is streamed into reads that a buffer takes.

        They end at multiples of their size in the target file, whatever the runs are: a system
        keeps a file in pages, and takes the longest where a write starts at such a place.

        Cost:
            O(chunks).
        """
        most = chunk_nbytes(buffer_nbytes)
        for fill in self.fills:
            for copy in fill.copies[0][1]:
                at = self.target_start_nbytes + copy.target_start_nbytes
                skew = copy.source_start_nbytes - at
                stop = at + copy.run_nbytes
                while at < stop:
                    end = min(stop, at - at % most + most)
                    yield Chunk(copy.file, at + skew, at, end - at)
                    at = end


class ArrayPlan(Struct, frozen=True):
    """What all regions of one array have in common.

    Attributes:
        tensor: Name of the tensor, for events and errors.
        state: Name of its state.
        target_layout: How the target cuts the tensor.
        source_dtype: Type of the elements as they are read.
        target_dtype: Type of the elements as they are written; a cast where it differs.
        places: Where the shard of each source rank is, as the catalog says.
        replicas: What was decided for elements that more than one rank holds.
    """

    tensor: str
    state: str
    target_layout: Layout
    source_dtype: DType
    target_dtype: DType
    places: Sequence[Region | None]
    replicas: Replicas = "check"


class RegionPlan(Struct, frozen=True, gc=False):
    """One contiguous run of elements in one target file.

    A plan for a thousand ranks has a million: each is as small as it can be, and nothing that it
    refers to leads back to it.

    Attributes:
        array: What it is a part of.
        target_rank: Rank of the target's layout whose shard the region is.
        target_file: Index of the target file.
        target_start_nbytes: First byte in the target file.
        numel: Number of elements.
        pattern: Which elements of which source ranks they are.
        step_numel: Elements that a buffer takes, and of one step; the last may be shorter.
        streamed_numel: Elements of one step where every element is read as it is, from one place,
            in long runs: such a step goes through a buffer in `Step.chunks`, and may be larger
            than one. 0 where a step is put together in the buffer. It follows from the others.
    """

    array: ArrayPlan
    target_rank: int
    target_file: int
    target_start_nbytes: int
    numel: int
    pattern: Pattern
    step_numel: int
    streamed_numel: int = 0

    def __post_init__(self) -> None:
        """Find out whether the region can be streamed."""
        numel, runs = 0, self.pattern.run_count
        if (
            runs
            and self.pattern.numel == self.numel
            and self.nbytes >= runs * _SHORTEST_RUN_NBYTES
            and self.source_dtype == self.target_dtype
        ):
            numel = max(1, _STREAMED_NBYTES // self.target_dtype.itemsize_nbytes)
        force_setattr(self, "streamed_numel", numel)

    @property
    def tensor(self) -> str:
        """Name of the tensor."""
        return self.array.tensor

    @property
    def state(self) -> str:
        """Name of its state."""
        return self.array.state

    @property
    def source_dtype(self) -> DType:
        """Type of the elements as they are read."""
        return self.array.source_dtype

    @property
    def target_dtype(self) -> DType:
        """Type of the elements as they are written."""
        return self.array.target_dtype

    @property
    def replicas(self) -> Replicas:
        """What was decided for elements that more than one rank holds."""
        return self.array.replicas

    @property
    def fills(self) -> tuple[Fill, ...]:
        """What its elements come from, in the elements of the shards."""
        return self.pattern.fills

    def place(self, rank: int) -> Region:
        """Where the shard of a source rank is.

        Raises:
            LayoutError: It is nowhere.
        """
        place = self.array.places[rank]
        if place is None:
            raise LayoutError(f"rank {rank} holds elements, but the catalog has no place for them")
        return place

    @property
    def nbytes(self) -> int:
        """Bytes in the target file."""
        return self.numel * self.target_dtype.itemsize_nbytes

    @property
    def step_count(self) -> int:
        """Number of steps."""
        return -(-self.numel // self.pitch_numel) if self.numel else 0

    @property
    def pitch_numel(self) -> int:
        """Elements of one step."""
        return self.streamed_numel or self.step_numel

    def full_index(self, index: int) -> int | None:
        """Flat index in the full tensor of an element of the region; None where it is padding.

        Cost:
            O(pieces of the rank). Never walks elements.
        """
        for piece in self.array.target_layout.pieces(self.target_rank):
            digits = tuple((a.extent, a.shard_stride, a.full_stride) for a in piece.axes)
            for walk in restrict(
                Walk((piece.shard_base, piece.full_base), digits), index, index + 1
            ):
                return walk.bases[1]
        return None

    def steps(self, wanted: Iterable[range] | None = None) -> Iterator[Step]:
        """Yield the steps in target order.

        Args:
            wanted: Ranges of elements, sorted and apart; steps that meet none are left out.

        Cost:
            O(fills that meet the step) each. Never walks elements.
        """
        reaches, pitch = self.pattern.reaches, self.pitch_numel
        if wanted is None and 0 < self.numel <= pitch:  # as most are
            yield self._step(0, self.numel, reaches)
            return
        met = 0
        active: list[Reach] = []
        for start in _starts(self.numel, pitch, wanted):
            stop = min(start + pitch, self.numel)
            while met < len(reaches) and reaches[met].start < stop:
                active.append(reaches[met])
                met += 1
            active = [reach for reach in active if reach.stop > start]
            yield self._step(start, stop, active)

    def step(self, start: int, stop: int) -> Step:
        """One step that fills the elements [start, stop), wherever `steps` would cut.

        Cost:
            O(fills). Never walks elements.
        """
        return self._step(start, stop, self.pattern.reaches)

    def _step(self, start: int, stop: int, reaches: Sequence[Reach]) -> Step:
        if self.pattern.run_count == len(self.pattern.fills):
            return self._step_of_runs(start, stop, reaches)
        return self._step_of_walks(start, stop, reaches)

    def _step_of_runs(self, start: int, stop: int, reaches: Iterable[Reach]) -> Step:
        """As `_step_of_walks`, where every fill is one run: those are most of all bytes."""
        itemsize = self.source_dtype.itemsize_nbytes
        fills = []
        filled = 0
        for low, high, _, fill in reaches:
            first, last = max(start, low), min(stop, high)
            if first < last:
                filled += last - first
                source = fill.sources[0]
                place, skew = self.place(source.rank), source.walks[0].bases[1] - low
                copy = Copy(
                    place.file,
                    place.start_nbytes + (first + skew) * itemsize,
                    (first - start) * itemsize,
                    (),
                    (last - first) * itemsize,
                )
                fills.append(StepFill(((source.rank, (copy,)),), fill.agreeing))
        return Step(self, start, stop, tuple(fills), filled == stop - start)

    def _step_of_walks(self, start: int, stop: int, reaches: Iterable[Reach]) -> Step:
        fills = []
        filled = 0
        for low, high, whole, fill in reaches:
            if start <= low and high <= stop:
                numel = whole
                parts: list[Sequence[Walk]] = [source.walks for source in fill.sources]
            else:
                parts = [walks_within(source.walks, start, stop) for source in fill.sources]
                numel = numel_of(parts[0])
            if numel:
                filled += numel
                copies = [
                    (source.rank, self._copies(source.rank, walks, start))
                    for source, walks in zip(fill.sources, parts, strict=True)
                ]
                fills.append(StepFill(tuple(copies), fill.agreeing, fill.scale))
        return Step(self, start, stop, tuple(fills), filled == stop - start)

    def _copies(self, rank: int, walks: Iterable[Walk], step_start: int) -> tuple[Copy, ...]:
        """What is read of the shard of one rank."""
        place, itemsize = self.place(rank), self.source_dtype.itemsize_nbytes
        copies = []
        for walk in walks:
            target, source, axes, run = _strided(walk, itemsize)
            source_start = place.start_nbytes + source * itemsize
            target_start = (target - step_start) * itemsize
            copies.append(Copy(place.file, source_start, target_start, axes, run * itemsize))
        return tuple(copies)


class Plan(Struct, frozen=True):
    """Everything an executor needs to know.

    Attributes:
        regions: What to write, in target order.
        buffer_nbytes: Size of one buffer.
        workers: Steps that may run at one time.
        objects_nbytes: Memory that regions, patterns and steps take, at most.
        steps_nbytes: How much of it steps take, while they are done.
    """

    regions: tuple[RegionPlan, ...]
    buffer_nbytes: int
    workers: int
    objects_nbytes: int = 0
    steps_nbytes: int = 0

    @property
    def projected_nbytes(self) -> int:
        """Upper bound of the memory that buffers and the plan itself take, in bytes."""
        return self.workers * BUFFERS_PER_WORKER * self.buffer_nbytes + self.objects_nbytes

    @property
    def step_count(self) -> int:
        """Number of steps."""
        return sum(region.step_count for region in self.regions)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)

    def lanes(self) -> Iterator[Iterator[tuple[Step, ...]]]:
        """Yield all steps, by target file, those together that read the same bytes."""
        return lanes(self.regions, lambda number: self.regions[number].steps())

    @property
    def compared_numel(self) -> Mapping[tuple[str, str, tuple[int, int]], int]:
        """Elements to compare by (tensor, state, ranks), with the rank that is read first."""
        found: dict[tuple[str, str, tuple[int, int]], int] = {}
        for region in self.regions:
            for fill in region.fills:
                first, *others = fill.sources
                for other in others:
                    key = region.tensor, region.state, (first.rank, other.rank)
                    found[key] = found.get(key, 0) + numel_of(other.walks)
        return found


def chunk_nbytes(buffer_nbytes: int) -> int:
    """Most bytes of one read of a region that is streamed."""
    return min(buffer_nbytes, _CHUNK_NBYTES)


def _strided(walk: Walk, itemsize: int) -> tuple[int, int, tuple[tuple[int, int, int], ...], int]:
    """(target base, source base, axes in bytes as in `Copy`, elements of a run) of a walk."""
    target, source = walk.bases
    run = 1
    axes: list[tuple[int, int, int]] = []
    for extent, target_stride, source_stride in walk.digits:
        if target_stride == source_stride == 1:
            run = extent
        elif source_stride < 0:
            # Files are read forwards; the buffer is in memory and may be filled backwards.
            target += (extent - 1) * target_stride
            source += (extent - 1) * source_stride
            axes.append((extent, -source_stride * itemsize, -target_stride * itemsize))
        else:
            axes.append((extent, source_stride * itemsize, target_stride * itemsize))
    if len(axes) > 1:
        axes.sort(key=lambda axis: (-axis[1], -abs(axis[2])))
    return target, source, tuple(axes), run


def _starts(numel: int, step_numel: int, wanted: Iterable[range] | None) -> Iterator[int]:
    """Where the steps start that meet a wanted range."""
    done = 0
    for part in (range(numel),) if wanted is None else wanted:
        first = max(done, part.start - part.start % step_numel)
        for start in range(first, min(part.stop, numel), step_numel):
            yield start
            done = start + step_numel
