"""Hold the weights against their master copies: two files, two cuts, one rounding between them.

A training that is saved has both: the weights as it computes with them, whole shards in one file,
and the master copies that its optimizer steps, cut flat over others. Every element of a weight is
its master copy, rounded once. So files of another run or another step stand out, and parameters
that were mixed up, although every number of every header agrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from restride.algebra.coverage import replication
from restride.arrays.differences import Tolerance
from restride.checkpoint.catalog import Finding
from restride.errors import BudgetError
from restride.executors._copying import StepBuffers, fill_step
from restride.executors.comparing import CompareWriter
from restride.executors.events import NullObserver
from restride.executors.sources import CatalogReader, default_workers
from restride.executors.streaming import StreamingExecutor
from restride.frozen import Frozen
from restride.planning.jobs import plan_reading
from restride.storage.ranges import FilePool
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.arrays.differences import Difference
    from restride.checkpoint.catalog import Catalog, StateEntry, TensorEntry
    from restride.executors.events import Observer, ReplicaDrift
    from restride.planning.plan import Plan, RegionPlan

__all__ = ["MasterPlans", "compare_masters", "plan_masters", "spot_check_masters"]

# Temporaries of one thread while values that differ are looked at.
_COMPARING_NBYTES: Final = 1 << 20
# A cast needs a step of four bytes an element (planning/jobs.py).
_WIDE_NBYTES: Final = 4
_SPOT_NUMEL: Final = 256
_SPOT_SCRATCH_NBYTES: Final = 1 << 16
_SPOTS_A_FILE: Final = 8

_Place = TypeVar("_Place")


class MasterPlans(Frozen):
    """How both sides are read.

    Attributes:
        names: The tensors, in the order of the regions of both plans.
        masters: Reads the master copies, rounded.
        weights: Reads the weights.
    """

    names: tuple[str, ...]
    masters: Plan
    weights: Plan

    @property
    def projected_nbytes(self) -> int:
        """Upper bound of the memory that both plans and the comparison take."""
        plans = self.masters.projected_nbytes + self.weights.projected_nbytes
        return plans + self.masters.workers * _COMPARING_NBYTES


def plan_masters(
    catalog: Catalog,
    *,
    budget_nbytes: int,
    broken: Container[str] = (),
) -> MasterPlans | None:
    """Plan to read each weight and its master copy; None where no tensor has both.

    Weights of which ranks hold copies are left out: those are compared with each other, and where
    they differ a conversion takes one of them, or the mean.

    Args:
        catalog: The checkpoint.
        budget_nbytes: Most memory for plans and buffers.
        broken: Places of arrays, as findings name them, that are not to be read.

    Raises:
        BudgetError: The budget is too small for any buffer.
    """
    workers = max(1, min(default_workers(), budget_nbytes // (4 * _COMPARING_NBYTES)))
    tensors = _comparable(catalog, broken)
    return _plan(tensors, budget_nbytes, _COMPARING_NBYTES, workers)


def _comparable(catalog: Catalog, broken: Container[str]) -> list[TensorEntry]:
    """Tensors whose weights and master copies can be compared."""
    are_copied: dict[Layout, bool] = {}
    tensors = []
    for tensor in catalog.tensors:
        if _has_both(tensor, broken):
            layout = tensor.states["weight"].layout
            if layout not in are_copied:
                are_copied[layout] = replication(layout)
            if not are_copied[layout]:
                tensors.append(tensor)
    return tensors


def _plan(
    tensors: Sequence[TensorEntry],
    budget_nbytes: int,
    scratch_nbytes: int,
    workers: int,
) -> MasterPlans | None:
    if not tensors:
        return None
    part = (budget_nbytes - workers * scratch_nbytes) // 2
    try:
        masters, weights = (
            plan_reading(
                [(tensor.name, state, tensor.states[state]) for tensor in tensors],
                budget_nbytes=part,
                workers=workers,
            )
            for state in ("fp32", "weight")
        )
    except BudgetError as error:
        needed = 2 * error.needed_nbytes + workers * scratch_nbytes
        raise BudgetError(needed_nbytes=needed, budget_nbytes=budget_nbytes) from None
    # Rounded while they are read, in steps that fit the buffers of both sides.
    regions = tuple(
        replace(
            master,
            array=replace(master.array, target_dtype=weight.source_dtype),
            step_numel=min(master.step_numel, weight.step_numel),
        )
        for master, weight in zip(masters.regions, weights.regions, strict=True)
    )
    common = min(masters.workers, weights.workers)
    return MasterPlans(
        tuple(tensor.name for tensor in tensors),
        replace(masters, regions=regions, workers=common),
        replace(weights, workers=common),
    )


def compare_masters(
    catalog: Catalog, plans: MasterPlans, observer: Observer | None = None
) -> tuple[tuple[Finding, ...], int]:
    """Compare every element.

    Returns:
        One error for each pair of files that do not belong together, and the bytes read.

    Raises:
        ExecutionError: A file cannot be read.
    """
    with FilePool() as pool:
        reader = CatalogReader(catalog, pool)
        writer = CompareWriter(plans.masters, plans.weights, reader, Tolerance())
        read_nbytes = StreamingExecutor().execute(
            plans.masters, reader, writer, observer or NullObserver()
        )
        reader.require_unchanged()
    return tuple(_findings(catalog, plans, writer.found)), read_nbytes + writer.read_nbytes


def spot_check_masters(catalog: Catalog, *, budget_nbytes: int) -> tuple[Finding, ...]:
    """Compare a few elements out of every file: enough to find one of another run, in no time.

    Returns:
        As `compare_masters`. Where weights and master copies have one type it is a warning: a
        model may have got other weights after its optimizer was made, and masters go on from where
        they are.

    Raises:
        BudgetError: The budget is too small for any buffer.
        ExecutionError: A file cannot be read.

    Cost:
        Plans some tensors for each file, and reads some kilobytes of it.
    """
    tensors = _spread(_comparable(catalog, ()))
    plans = _plan(tensors, budget_nbytes, _SPOT_SCRATCH_NBYTES, workers=1)
    if plans is None:
        return ()
    with FilePool() as pool:
        reader = CatalogReader(catalog, pool)
        writer = CompareWriter(plans.masters, plans.weights, reader, Tolerance())
        buffers = StepBuffers(plans.masters)
        for region, start in _spots(plans.masters):
            stop = min(start + min(_SPOT_NUMEL, region.step_numel), region.numel)
            filled = fill_step(region.step(start, stop), reader, buffers, _ignore)
            itemsize = region.target_dtype.itemsize_nbytes
            writer.write_from(region.target_file, start * itemsize, filled)
    return tuple(
        finding
        if finding.details["dtype"] != finding.details["master_dtype"]
        else replace(finding, severity="warning")
        for finding in _findings(catalog, plans, writer.found)
    )


def _spread(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Some of the tensors: a few of those that have elements in each file, first to last."""
    by_file: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        for region in tensor.states["fp32"].regions:
            if region is not None:
                by_file.setdefault(region.file, []).append(number)
    chosen = {number for numbers in by_file.values() for number in _few(numbers)}
    return [tensors[number] for number in sorted(chosen)]


def _few(places: Sequence[_Place]) -> Sequence[_Place]:
    return places[:: -(-len(places) // _SPOTS_A_FILE)]


def _spots(plan: Plan) -> Iterator[tuple[RegionPlan, int]]:
    """Where to look: a few places of each file, from its first to its last fragment."""
    by_file: dict[int, list[tuple[RegionPlan, int]]] = {}
    for region in plan.regions:
        for fill in region.fills:
            place = region, fill.target_range.start
            by_file.setdefault(region.place(fill.sources[0].rank).file, []).append(place)
    for places in by_file.values():
        yield from _few(places)


def _has_both(tensor: TensorEntry, broken: Container[str]) -> bool:
    weight, master = tensor.states.get("weight"), tensor.states.get("fp32")
    if weight is None or master is None or tensor.kind != "parameter":
        return False
    if weight.layout.full_shape != master.layout.full_shape or not weight.layout.full_numel:
        return False
    places = (f"tensor {tensor.name!r}, state {state!r}" for state in ("weight", "fp32"))
    if any(place in broken for place in places) or not _are_exact(weight, master):
        return False
    is_wide = master.dtype.itemsize_nbytes >= max(_WIDE_NBYTES, weight.dtype.itemsize_nbytes)
    are_floats = master.dtype.kind == weight.dtype.kind == "float"
    return master.dtype == weight.dtype or (is_wide and are_floats)


def _are_exact(*entries: StateEntry) -> bool:
    return all(entry.layout.is_exact and entry.layout.unit_bits is None for entry in entries)


def _findings(
    catalog: Catalog, plans: MasterPlans, found: Mapping[int, Difference]
) -> Iterator[Finding]:
    """One finding for each pair of files, with the first tensor and how many more there are."""
    by_files: dict[tuple[int, int], list[int]] = {}
    for number in sorted(found):
        index = found[number].first_index
        key = tuple(
            _holder(plan.regions[number], index)[1] for plan in (plans.masters, plans.weights)
        )
        by_files.setdefault((key[0], key[1]), []).append(number)
    for (master_file, weight_file), numbers in by_files.items():
        first = numbers[0]
        difference, region = found[first], plans.masters.regions[first]
        name = plans.names[first]
        mesh = next(t for t in catalog.tensors if t.name == name).states["fp32"].layout.mesh
        rank, _ = _holder(region, difference.first_index)
        at = ", ".join(f"{axis} rank {place}" for axis, place in mesh.coordinates(rank).items())
        holder = f" ({at})" if at else ""
        others = f", and {counted(len(numbers) - 1, 'tensor')} more" if numbers[1:] else ""
        master, weight = difference.first_values
        files = [catalog.files[file].name for file in (master_file, weight_file)]
        message = (
            f"tensor {name!r}: its weights in {files[1]} are not its master copies in {files[0]}"
            f"{holder}, rounded to {region.target_dtype}: element {difference.first_index} is "
            f"{weight:.6g}, the master copy gives {master:.6g}{others}; the files are of different "
            "saves, or of different ranks"
        )
        details: dict[str, object] = {
            "tensors": [plans.names[number] for number in numbers],
            "files": files,
            "rank": rank,
            "dtype": str(region.target_dtype),
            "master_dtype": str(region.source_dtype),
        }
        yield Finding("error", "master-mismatch", message, files[0], details)


def _holder(region: RegionPlan, index: int) -> tuple[int, int]:
    """Rank and file that an element of a whole tensor is read from."""
    rank, copies = region.step(index, index + 1).fills[0].copies[0]
    return rank, copies[0].file


def _ignore(event: ReplicaDrift) -> None:
    """There is none: one replica is read."""
    del event
