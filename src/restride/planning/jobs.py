"""Turn 'this state of this tensor into that layout in those files' into a plan."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Final, assert_never

from msgspec import Struct
from msgspec.structs import replace

from restride.algebra.compose import compose
from restride.algebra.copies import CopyAt, require_copies
from restride.algebra.coverage import Hole, explain, prove
from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.scales import is_rounded_once
from restride.checkpoint.catalog import Region
from restride.errors import (
    CoverageError,
    LayoutError,
    PlanError,
    RestrideError,
    UnsupportedError,
)
from restride.planning.fills import Fill, Pattern, Source
from restride.planning.plan import ArrayPlan, RegionPlan
from restride.planning.replicas import Way, blocks_of_target
from restride.planning.scales import factor_of
from restride.planning.sizing import sized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from fractions import Fraction

    from restride.algebra.copies import Decision
    from restride.algebra.walks import Walk
    from restride.checkpoint.catalog import StateEntry
    from restride.checkpoint.dtypes import DType
    from restride.planning.plan import Plan
    from restride.planning.replicas import Block
    from restride.planning.scales import Use

__all__ = [
    "Job",
    "plan_comparison",
    "plan_conversion",
    "plan_reading",
    "whole_layout",
]

_WHOLE: Final = Mesh((("whole", 1),))


class Job(Struct, frozen=True):
    """One state of one tensor, and where it goes.

    Attributes:
        tensor: Name of the tensor.
        state: Name of the state.
        source: Where it is.
        target_layout: How the target cuts it.
        target_regions: (file index, first byte) of each target rank's shard, None where the rank
            holds nothing.
        target_dtype: Type to write; a cast where it is not the source's.
        replicas: What to do where several source ranks hold the same element. ``"own"`` means that
            each target rank reads the copy of the source rank in its place.
        use: What the elements are read for. It matters where the tensor is scaled.
    """

    tensor: str
    state: str
    source: StateEntry
    target_layout: Layout
    target_regions: Sequence[Region | None]
    target_dtype: DType
    replicas: Decision = "check"
    use: Use = "resume"


def whole_layout(shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor that one rank holds whole.

    Examples:
        >>> whole_layout((2, 3)).all_pieces[0].numel
        6
    """
    numel = prod(shape)
    axes = (Axis(numel, 1, 0, 1),) if numel > 1 else ()
    return Layout(_WHOLE, shape, ((1, shape),), (Piece(axes),) if numel else ())


def plan_conversion(
    jobs: Iterable[Job],
    *,
    budget_nbytes: int,
    workers: int,
) -> Plan:
    """Plan a conversion that fits a memory budget.

    Args:
        jobs: What to write. Targets do not overlap.
        budget_nbytes: Most memory that plan and buffers may take together.
        workers: Most steps to run at one time, at least 1; fewer where the budget is small.

    Returns:
        Regions in target order, cut into steps.

    Raises:
        BudgetError: Not even one worker with the smallest buffers fits.
        CoverageError: A source lacks elements.
        PlanError: Two target regions overlap, a rank that holds elements has none, or the ranks
            whose copies were chosen hold none of some elements.
        UnsupportedError: A state cannot follow the scale of its tensor, or a unit is no whole
            number of bytes.

    Cost:
        O(transfers), and for each two layouts that differ one `compose`. Never walks elements.
    """
    regions = _all_regions(jobs, _Patterns())
    # In two turns: a pair for each region would take as much memory as the region.
    regions.sort(key=attrgetter("target_start_nbytes"))
    regions.sort(key=attrgetter("target_file"))
    _require_apart(regions)
    return sized(regions, budget_nbytes, workers)


def plan_comparison(
    states: Iterable[tuple[str, str, StateEntry]],
    *,
    budget_nbytes: int,
    workers: int,
) -> Plan:
    """Plan to read every replica and compare it; nothing is written.

    Args:
        states: (tensor, state, entry) of each array to look at.
        budget_nbytes: Most memory that plan and buffers may take together.
        workers: Most steps to run at one time.

    Returns:
        Regions that hold only the fills that more than one rank holds.

    Raises:
        BudgetError, CoverageError, UnsupportedError: As for `plan_conversion`.
    """
    place = (Region(-1, 0),)
    jobs = (
        Job(*(tensor, state, entry), whole, place, entry.dtype, "first", "compare")
        for tensor, state, entry in states
        for whole in (whole_layout(entry.layout.full_shape),)
    )
    regions = _all_regions(jobs, _Patterns(_compared))
    return sized([region for region in regions if region.fills], budget_nbytes, workers)


def plan_reading(
    states: Sequence[tuple[str, str, StateEntry]],
    *,
    dtypes: Sequence[DType] | None = None,
    budget_nbytes: int,
    workers: int,
) -> Plan:
    """Plan to read arrays in logical order, each element once, whatever the replicas hold.

    Args:
        states: (tensor, state, entry) of each array to read.
        dtypes: Type to read each of them in, by default the one that is stored.
        budget_nbytes: Most memory that plan and buffers may take together.
        workers: Most steps to run at one time.

    Returns:
        One region for each array, as if it stood alone in the target file of its number. Where
        several ranks hold an element, the one that a conversion would choose is read.

    Raises:
        BudgetError, CoverageError, UnsupportedError: As for `plan_conversion`.
    """
    types = [entry.dtype for _, _, entry in states] if dtypes is None else dtypes
    jobs = (
        Job(*(tensor, state, entry), whole, (Region(number, 0),), dtype, "first", "read")
        for number, ((tensor, state, entry), dtype) in enumerate(zip(states, types, strict=True))
        for whole in (whole_layout(entry.layout.full_shape),)
    )
    return sized(_all_regions(jobs, _Patterns(_chosen)), budget_nbytes, workers)


def _compared(fills: Iterable[Fill]) -> tuple[Fill, ...]:
    """Those that more than one rank holds."""
    return tuple(fill for fill in fills if len(fill.sources) > 1)


def _chosen(fills: Iterable[Fill]) -> tuple[Fill, ...]:
    """All of them, with the one place that is read."""
    return tuple(Fill(fill.sources[:1], scale=fill.scale) for fill in fills)


class _Part(Struct, frozen=True):
    """A block, and the copies of it that can be read.

    Attributes:
        scale: That of the copies: none where there is an exact one, else the simplest.
        copies: Every copy with this scale: others are not bit for bit the same. The first is the
            one to read.
        is_held_once: Whether one rank alone holds the block.
    """

    scale: Fraction
    copies: tuple[Source, ...]
    is_held_once: bool


class _Patterns:
    """What fills the regions of a plan.

    The layers of a model are cut alike, and so are the states of a parameter: each two layouts are
    matched once, whatever the number of tensors, and their regions share what fills them.

    Args:
        kept: Which of the fills are needed, and which of their sources.
    """

    def __init__(self, kept: Callable[[Iterable[Fill]], tuple[Fill, ...]] = tuple) -> None:
        self._kept = kept
        self._matches: dict[tuple[Layout, Layout], _Match] = {}

    def match(self, job: Job) -> _Match:
        """What the layouts of a job have in common."""
        key = job.target_layout, job.source.layout
        found = self._matches.get(key)
        if found is None:
            found = self._matches[key] = _Match(*key, self._kept)
        return found


class _Match:
    """What two layouts have in common."""

    def __init__(
        self,
        target: Layout,
        source: Layout,
        kept: Callable[[Iterable[Fill]], tuple[Fill, ...]],
    ) -> None:
        self._relation = compose(target, source)
        self._kept = kept
        self._patterns: dict[tuple[object, ...], tuple[Pattern, frozenset[int]]] = {}
        self._by_fills: dict[tuple[Fill, ...], Pattern] = {}
        # Without a scale, states and types make no difference.
        self._is_scaled = any(t.scale != 1 for t in self._relation.descriptors)

    def pattern(self, job: Job, rank: int) -> tuple[Pattern, frozenset[int]]:
        """What fills the shard of one target rank, and all source ranks that have of it.

        Raises:
            CoverageError: The source lacks elements.
            LayoutError: The blocks are not those that the target needs.
            PlanError: The ranks whose copies were chosen hold none of some elements.
            UnsupportedError: A source shard holds an element too many times, or the state cannot
                follow the scale.
        """
        scaled = (job.state, job.source.dtype, job.use) if self._is_scaled else ()
        key = (rank, job.replicas, *scaled)
        found = self._patterns.get(key)
        if found is None:
            parts = self._parts(rank)
            fills = self._kept(_fills(job, parts, rank))
            ranks = frozenset(copy.rank for part in parts for copy in part.copies)
            found = self._patterns[key] = self._shared(fills), ranks
        return found

    def without_copies(self, pattern: Pattern) -> Pattern:
        """The same, read from one place each: what is compared for another rank already."""
        return self._shared(_chosen(pattern.fills))

    def _shared(self, fills: tuple[Fill, ...]) -> Pattern:
        """One pattern for all ranks that are filled alike, as those that have copies are."""
        found = self._by_fills.get(fills)
        if found is None:
            found = self._by_fills[fills] = Pattern.of(fills)
        return found

    def _parts(self, rank: int) -> tuple[_Part, ...]:
        """What a target rank is made of: parts that together fill all of its elements."""
        source = self._relation.source
        blocks = blocks_of_target(self._relation, rank)
        needed = sum(piece.numel for piece in self._relation.target.pieces(rank))
        found = sum(block.numel for block in blocks)
        if found != needed:
            verdict = prove(source, side="full")
            if isinstance(verdict, Hole):
                raise CoverageError(explain(verdict, source), verdict=verdict)
            raise LayoutError(f"the source fills {found} elements of a target that needs {needed}")
        return tuple(_part(block, source.mesh) for block in blocks)


def _part(block: Block, mesh: Mesh) -> _Part:
    scale = _chosen_scale(block)
    alike = [way for way in block.ways if way.scale == scale]
    placed = sorted(_placed(alike), key=lambda pair: _order(mesh, *pair))
    copies = tuple(Source(rank, tuple(map(_without_full, way.walks))) for rank, way in placed)
    return _Part(scale, copies, len(block.holders) == 1)


def _all_regions(jobs: Iterable[Job], patterns: _Patterns) -> list[RegionPlan]:
    regions: list[RegionPlan] = []
    for job in jobs:
        try:
            regions.extend(_regions(job, patterns))
        except RestrideError as error:
            raise error.located(f"tensor {job.tensor!r}, state {job.state!r}") from error.__cause__
    return regions


def _regions(job: Job, patterns: _Patterns) -> Iterator[RegionPlan]:
    if job.source.layout.unit_bits is not None or job.target_layout.unit_bits is not None:
        raise UnsupportedError(
            "units of less than an element cannot be converted between files yet"
        )
    match, array = patterns.match(job), _array(job)
    compared: set[int] = set()
    known: dict[int, int] = {}  # numbers that are the same on a thousand ranks are one object
    for rank, place in enumerate(job.target_regions):
        if place is not None:
            pattern, ranks = match.pattern(job, rank)
            if not pattern.is_moved and job.replicas != "mean":
                # A thousand ranks that hold a copy of the step need not all compare the thousand
                # copies that are there: that would be a million reads of four bytes.
                if id(pattern) in compared:
                    pattern = match.without_copies(pattern)
                else:
                    compared.add(id(pattern))
            start, numel = place.start_nbytes, job.target_layout.shard_numel(rank)
            start, numel = known.setdefault(start, start), known.setdefault(numel, numel)
            region = RegionPlan(array, rank, place.file, start, numel, pattern, 1)
            for source_rank in ranks:
                region.place(source_rank)
            yield region
        elif job.target_layout.pieces(rank):
            raise PlanError(f"rank {rank} of the target holds elements, but has no place for them")


def _require_apart(regions: Sequence[RegionPlan]) -> None:
    """Refuse regions that share bytes: which step wins would be a matter of luck."""
    for a, b in pairwise(region for region in regions if region.numel):
        stop = a.target_start_nbytes + a.nbytes
        if a.target_file == b.target_file and stop > b.target_start_nbytes:
            raise PlanError(
                f"byte {b.target_start_nbytes} of target file {b.target_file} belongs to "
                f"state {a.state!r} of tensor {a.tensor!r}, which ends at byte {stop}",
                where=f"tensor {b.tensor!r}, state {b.state!r}",
            )


def _array(job: Job) -> ArrayPlan:
    return ArrayPlan(
        tensor=job.tensor,
        state=job.state,
        target_layout=job.target_layout,
        source_dtype=job.source.dtype,
        target_dtype=job.target_dtype,
        places=job.source.regions,
        replicas="check" if job.replicas == "own" else job.replicas,
    )


def _fills(job: Job, parts: Iterable[_Part], rank: int) -> Iterator[Fill]:
    for part in parts:
        fill = _decided(job, rank, part)
        factor = factor_of(job.state, part.scale, job.source.dtype, job.use)
        yield replace(fill, scale=factor) if factor != 1 else fill


def _decided(job: Job, rank: int, part: _Part) -> Fill:
    """Put the source that was chosen first, and say which others must hold the same."""
    sources = part.copies
    match job.replicas:
        case "check":
            return Fill(sources, len(sources))
        case "first" | "mean":
            return Fill(sources)
        case "own":
            chosen = _in_place(job, rank, sources)
            others = tuple(source for source in sources if source not in chosen)
            return Fill((*chosen, *others), len(chosen))
        case CopyAt() as choice:
            if part.is_held_once:
                # No rank to choose; where one holds an element twice, it has to agree with itself.
                return Fill(sources, len(sources))
            mesh = job.source.layout.mesh
            chosen = tuple(source for source in sources if choice.is_at(mesh, source.rank))
            if not chosen:
                require_copies(choice, job.source.layout)
                raise PlanError(f"{choice} has no copy that can be read as it is")
            others = tuple(source for source in sources if not choice.is_at(mesh, source.rank))
            return Fill((*chosen, *others), len(chosen))
    assert_never(job.replicas)


def _in_place(job: Job, rank: int, sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The copies of the source ranks in whose place a target rank is, axis by axis.

    The fastest axis decides first, which is that of the model-parallel ranks: flat partitions of
    the ranks on the others have different parts, and mostly no copies at all.
    """
    mesh, place = job.source.layout.mesh, job.target_layout.mesh
    at = place.coordinates(rank)
    chosen = sources
    for axis, size in reversed(mesh.axes):
        if axis in at:
            index = at[axis] * size // place.axis_size(axis)
            same = tuple(s for s in chosen if mesh.coordinates(s.rank)[axis] == index)
            chosen = same or chosen
    return chosen


def _chosen_scale(block: Block) -> Fraction:
    scales = {way.scale for way in block.ways}
    return min(scales, key=lambda scale: (scale != 1, not is_rounded_once(scale), scale))


def _placed(ways: list[Way]) -> Iterator[tuple[int, Way]]:
    return ((rank, way) for way in ways for rank in way.ranks)


def _order(mesh: Mesh, rank: int, way: Way) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fastest axis counts first, which is that of the model-parallel ranks.

    So all parts of a tensor are the copy of one of them where it has all, however the ranks on the
    other axes share it: weights and master copies that drifted still belong together.
    """
    place: list[int] = []
    for _, size in reversed(mesh.axes):
        rank, index = divmod(rank, size)
        place.append(index)
    return tuple(place), way.walks[0].bases


def _without_full(walk: Walk) -> Walk:
    return type(walk)(walk.bases[:2], tuple(digit[:3] for digit in walk.digits))
