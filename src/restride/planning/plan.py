"""A plan is data: steps that each own a range of target bytes. Nothing here opens a file.

A region is one contiguous run of elements in one target file, made of *fills*: disjoint sets of its
elements with every place they can be read from. Regions are cut into steps that fit the memory
budget. Steps may run in any order, alone or twice, and the memory they take is known before the
first byte moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from restride.algebra._digits import Walk, restrict
from restride.errors import BudgetError
from restride.planning.sharing import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.algebra.copies import Replicas
    from restride.algebra.layout import Layout
    from restride.checkpoint.dtypes import DType

__all__ = [
    "BUFFERS_PER_WORKER",
    "Chunk",
    "Copy",
    "Fill",
    "Plan",
    "RegionPlan",
    "Source",
    "Step",
    "StepFill",
]

# What a worker holds at one time: the step, a replica to compare it with, the span of a strided
# read, the same step in another dtype, and four temporaries while differences are computed.
BUFFERS_PER_WORKER: Final = 8
# Python objects of one walk of a plan: 380 bytes on a Llama at TP2 x DP2, more with more loops.
_WALK_NBYTES: Final = 1024


# Work on a step costs as much as some ten kilobytes: where no buffer has to hold it, it is longer.
_STREAMED_NBYTES: Final = 4 << 20
_SHORTEST_RUN_NBYTES: Final = 64 << 10
# What is read stays in the core's cache until it is digested and written.
_CHUNK_NBYTES: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class Copy:
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


@dataclass(frozen=True, slots=True)
class Source:
    """One place where the elements of a fill can be read.

    Attributes:
        rank: Source rank that holds them.
        file: Index of the source file.
        start_nbytes: Byte of the file where that rank's shard starts.
        walks: Walks over (target element of the region, source element of the shard).
    """

    rank: int
    file: int
    start_nbytes: int
    walks: tuple[Walk, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of a region and every replica of them.

    Attributes:
        sources: Every place where they are, the chosen one first.
        agreeing: How many sources, from the first on, must hold the same; the others may differ.
        scale: Exact factor: the target is what is read times this, rounded once.
    """

    sources: tuple[Source, ...]
    agreeing: int = 1
    scale: Fraction = Fraction(1)

    @property
    def target_range(self) -> range:
        """Smallest range of region elements that contains the fill."""
        bounds = [
            (walk.bases[0], walk.bases[0] + sum((d[0] - 1) * d[1] for d in walk.digits))
            for walk in self.sources[0].walks
        ]
        return range(min(low for low, _ in bounds), max(high for _, high in bounds) + 1)


@dataclass(frozen=True, slots=True)
class StepFill:
    """The part of a fill that is in one step.

    Attributes:
        copies: For each source its rank and where its elements are, the chosen one first.
        agreeing: As for the fill.
        scale: As for the fill.
    """

    copies: tuple[tuple[int, tuple[Copy, ...]], ...]
    agreeing: int
    scale: Fraction = Fraction(1)


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


@dataclass(frozen=True, slots=True)
class Step:
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
        most = min(buffer_nbytes, _CHUNK_NBYTES)
        for fill in self.fills:
            for copy in fill.copies[0][1]:
                at = self.target_start_nbytes + copy.target_start_nbytes
                skew = copy.source_start_nbytes - at
                stop = at + copy.run_nbytes
                while at < stop:
                    end = min(stop, at - at % most + most)
                    yield Chunk(copy.file, at + skew, at, end - at)
                    at = end


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One contiguous run of elements in one target file.

    Attributes:
        tensor: Name of the tensor, for events and errors.
        state: Name of its state.
        target_layout: How the target cuts the tensor.
        target_rank: Rank of that layout whose shard the region is.
        target_file: Index of the target file.
        target_start_nbytes: First byte in the target file.
        numel: Number of elements.
        source_dtype: Type of the elements as they are read.
        target_dtype: Type of the elements as they are written; a cast where it differs.
        fills: Where they come from. What no fill reaches is padding, and zero.
        step_numel: Elements that a buffer takes, and of one step; the last may be shorter.
        replicas: What was decided for elements that more than one rank holds.
        streamed_numel: Elements of one step where every element is read as it is, from one place,
            in long runs: such a step goes through a buffer in `Step.chunks`, and may be larger
            than one. 0 where a step is put together in the buffer.
    """

    tensor: str
    state: str
    target_layout: Layout
    target_rank: int
    target_file: int
    target_start_nbytes: int
    numel: int
    source_dtype: DType
    target_dtype: DType
    fills: tuple[Fill, ...]
    step_numel: int
    replicas: Replicas = "check"
    streamed_numel: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Find out whether the region can be streamed; that follows from the other attributes."""
        numel = 0
        if self.source_dtype == self.target_dtype and self.numel and _is_plain(self):
            numel = max(1, _STREAMED_NBYTES // self.target_dtype.itemsize_nbytes)
        object.__setattr__(self, "streamed_numel", numel)

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
        for piece in self.target_layout.pieces(self.target_rank):
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
        waiting = [(fill.target_range, fill) for fill in self.fills]
        waiting.sort(key=lambda found: -found[0].start)
        active: list[tuple[range, Fill]] = []
        for start in _starts(self.numel, self.pitch_numel, wanted):
            stop = min(start + self.pitch_numel, self.numel)
            while waiting and waiting[-1][0].start < stop:
                active.append(waiting.pop())
            active = [found for found in active if found[0].stop > start]
            yield self._step(start, stop, [fill for _, fill in active])

    def step(self, start: int, stop: int) -> Step:
        """One step that fills the elements [start, stop), wherever `steps` would cut.

        Cost:
            O(fills). Never walks elements.
        """
        return self._step(start, stop, self.fills)

    def _step(self, start: int, stop: int, active: Sequence[Fill]) -> Step:
        fills = []
        filled = 0
        for fill in active:
            restricted = [_restrict_all(source.walks, start, stop) for source in fill.sources]
            if restricted[0]:
                filled += sum(_numel(walk) for walk in restricted[0])
                copies = tuple(
                    (source.rank, tuple(self._copy(source, walk, start) for walk in walks))
                    for source, walks in zip(fill.sources, restricted, strict=True)
                )
                fills.append(StepFill(copies, fill.agreeing, fill.scale))
        return Step(self, start, stop, tuple(fills), filled == stop - start)

    def _copy(self, source: Source, walk: Walk, step_start: int) -> Copy:
        itemsize = self.source_dtype.itemsize_nbytes
        target, source_index = walk.bases
        run = 1
        axes: list[tuple[int, int, int]] = []
        for extent, target_stride, source_stride in walk.digits:
            if target_stride == source_stride == 1:
                run = extent
            elif source_stride < 0:
                # Files are read forwards; the buffer is in memory and may be filled backwards.
                target += (extent - 1) * target_stride
                source_index += (extent - 1) * source_stride
                axes.append((extent, -source_stride * itemsize, -target_stride * itemsize))
            else:
                axes.append((extent, source_stride * itemsize, target_stride * itemsize))
        return Copy(
            file=source.file,
            source_start_nbytes=source.start_nbytes + source_index * itemsize,
            target_start_nbytes=(target - step_start) * itemsize,
            axes=tuple(sorted(axes, key=lambda axis: (-axis[1], -abs(axis[2])))),
            run_nbytes=run * itemsize,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an executor needs to know.

    Attributes:
        source_files: Paths of the source files, as the catalog names them.
        regions: What to write, in target order.
        buffer_nbytes: Size of one buffer.
        workers: Steps that may run at one time.
    """

    source_files: tuple[str, ...]
    regions: tuple[RegionPlan, ...]
    buffer_nbytes: int
    workers: int

    @property
    def projected_nbytes(self) -> int:
        """Upper bound of the memory that buffers and the plan itself take, in bytes."""
        return self.workers * BUFFERS_PER_WORKER * self.buffer_nbytes + _plan_nbytes(self.regions)

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
                    found[key] = found.get(key, 0) + sum(map(_numel, other.walks))
        return found


def _is_plain(region: RegionPlan) -> bool:
    """Whether all elements are read as they are, from one place, in long runs."""
    runs = numel = 0
    for fill in region.fills:
        if len(fill.sources) > 1 or fill.scale != 1:
            return False
        for walk in fill.sources[0].walks:
            if walk.digits and (len(walk.digits) > 1 or walk.digits[0][1:] != (1, 1)):
                return False
            runs += 1
            numel += walk.numel
    return numel == region.numel and region.nbytes >= runs * _SHORTEST_RUN_NBYTES


def _starts(numel: int, step_numel: int, wanted: Iterable[range] | None) -> Iterator[int]:
    """Where the steps start that meet a wanted range."""
    done = 0
    for part in (range(numel),) if wanted is None else wanted:
        first = max(done, part.start - part.start % step_numel)
        for start in range(first, min(part.stop, numel), step_numel):
            yield start
            done = start + step_numel


def _plan_nbytes(regions: tuple[RegionPlan, ...]) -> int:
    return _WALK_NBYTES * sum(
        1 + sum(len(source.walks) for source in fill.sources)
        for region in regions
        for fill in region.fills
    )


def require_budget(plan: Plan, budget_nbytes: int) -> Plan:
    """Return the plan if it fits the budget.

    Raises:
        BudgetError: It does not.
    """
    if plan.projected_nbytes > budget_nbytes:
        raise BudgetError(needed_nbytes=plan.projected_nbytes, budget_nbytes=budget_nbytes)
    return plan


def _restrict_all(walks: tuple[Walk, ...], start: int, stop: int) -> list[Walk]:
    return [part for walk in walks for part in restrict(walk, start, stop)]


def _numel(walk: Walk) -> int:
    numel = 1
    for digit in walk.digits:
        numel *= digit[0]
    return numel
