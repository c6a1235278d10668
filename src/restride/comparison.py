"""Do two checkpoints hold the same tensors? Compare them, or compare fingerprints.

Both are questions about full tensors: it does not matter how a checkpoint cuts them, in which
format it is, or how much is read at one time. Where several ranks hold an element, the replica that
a conversion would choose is looked at; whether the others agree with it is a question for `check`.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from restride.arrays.differences import Tolerance, can_compare
from restride.arrays.fingerprint import SCRATCH_NBYTES, finish
from restride.checkpoint.catalog import Finding
from restride.checkpoint.pairing import arrays_of, pair_arrays, tensors_by_name
from restride.checkpoint.proofs import prove_catalog
from restride.checkpoint.selection import require_states
from restride.checkpoint.soundness import errors_in
from restride.errors import BudgetError, CorruptError, PlanError
from restride.executors.comparing import CompareWriter
from restride.executors.digesting import DigestWriter
from restride.executors.drift import drift_findings
from restride.executors.events import NullObserver, PlanFinished, PlanStarted
from restride.executors.finding_drift import as_stored, compared_one, drift_error, find_drift
from restride.executors.reordering import find_all_moves
from restride.executors.running import run_plan
from restride.executors.sources import CatalogReader, default_budget_nbytes, default_workers
from restride.formats.opening import Told, open_catalogs
from restride.frozen import Frozen
from restride.planning.jobs import plan_reading
from restride.storage.fingerprint_files import read_fingerprints
from restride.storage.ranges import FilePool
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from restride.arrays.differences import Difference, Number
    from restride.arrays.slice_sums import Moves
    from restride.checkpoint.catalog import Catalog, StateEntry, TensorEntry
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.fingerprints import Fingerprints
    from restride.checkpoint.pairing import Pair
    from restride.checkpoint.selection import States
    from restride.executors.events import Observer
    from restride.planning.plan import Plan

__all__ = [
    "ArrayDifference",
    "DiffReport",
    "check_against",
    "diff",
    "fingerprint",
    "read_fingerprints",
]

_Array: TypeAlias = "tuple[str, str, StateEntry, DType]"

# Temporaries of one thread while values that differ are looked at.
_COMPARING_NBYTES: Final = 1 << 20


class ArrayDifference(Frozen):
    """One array that is not the same in both checkpoints.

    Attributes:
        tensor: Name of the tensor in the first checkpoint.
        other_tensor: Name in the second one; another where a rule renamed it or the name is tied.
        state: Name of the state.
        shapes: Shape on both sides.
        dtypes: Names of the dtypes on both sides.
        different_numel: How many elements differ; None where shapes or dtypes are such that
            elements cannot be compared.
        first_index: Flat index of the first element that differs, or None.
        first_coordinates: The same index along each dimension, or None.
        first_values: That element on both sides, or None.
        largest: Largest absolute difference, infinity between a number and a NaN, or None.
        moves: Where the second checkpoint has the rows or columns of the first, if it has the same
            ones in another order, or which tensor of the first has what this one has there.
    """

    tensor: str
    other_tensor: str
    state: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    different_numel: int | None = None
    first_index: int | None = None
    first_coordinates: tuple[int, ...] | None = None
    first_values: tuple[Number, Number] | None = None
    largest: int | float | None = None
    moves: Moves | None = None


class DiffReport(Frozen):
    """How two checkpoints differ.

    Attributes:
        a: What is in the first checkpoint.
        b: What is in the second one.
        compared_count: Number of arrays that both have.
        compared_nbytes: Bytes of those whose elements were compared, as the first one has them.
        read_nbytes: Bytes read on both sides together.
        only_a: (tensor, state) that only the first one has.
        only_b: (tensor, state) that only the second one has.
        differences: Arrays that both have and that are not the same.
        widened_count: Arrays of different dtypes that were compared after exact widening.
        seconds: Wall time.
        unread: Which side, and what is wrong there: an error that its reader noticed (what is
            missing, or has no name, was not compared), or copies of one array that differ (that of
            the lowest rank was compared).
    """

    a: Catalog
    b: Catalog
    compared_count: int
    compared_nbytes: int
    read_nbytes: int
    only_a: tuple[tuple[str, str], ...]
    only_b: tuple[tuple[str, str], ...]
    differences: tuple[ArrayDifference, ...]
    widened_count: int
    seconds: float
    unread: tuple[tuple[Literal["A", "B"], Finding], ...] = ()

    @property
    def verdict(self) -> Literal["same", "different", "incomplete"]:
        """Whether both hold the same tensors; incomplete where that is known of some alone."""
        if self.only_a or self.only_b or self.differences:
            return "different"
        return "incomplete" if self.unread else "same"


def diff(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    states: States = "all",
    rename: Sequence[tuple[str, str]] = (),
    budget_nbytes: int | None = None,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
    observer: Observer | None = None,
) -> DiffReport:
    r"""Compare the tensors of two checkpoints of any format and sharding.

    Without a tolerance two arrays are the same when shape, dtype and every bit are. With one, they
    are when the shape is and ``|a - b| <= atol + rtol * |b|`` everywhere; a NaN is near a NaN.
    Arrays of different dtypes are compared after both are widened to a type that holds all values
    of both; without a tolerance they are different even if every value is equal.

    Args:
        a: As for `restride.open`.
        b: Likewise.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        states: Only the weights, or every state.
        rename: Rules (OLD, NEW) for the names of `a`. The first rule whose regular expression OLD
            matches a whole name replaces that name by NEW, in which ``\1`` is the first group.
        budget_nbytes: Most memory for plans and buffers. Default: as for `restride.check`.
        pp_tied: As for `restride.convert`, of pipelines without ZeRO.
        source_config: As for `restride.convert`.
        source_rules: Likewise.
        observer: Receives progress, counted in bytes of `a`.

    Returns:
        What only one side has, and what is different.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `restride.open`.
        CoverageError: An element of a tensor is in no file.
        PlanError: A rule is no regular expression, matches no name, or gives two tensors one name;
            or a tolerance is negative.
        BudgetError: The budget is too small for any buffer.

    Cost:
        Both sides are read once, at the same time, and every copy of what several ranks hold. What
        may have the same elements in another order is read twice.
    """
    started = time.perf_counter()
    tolerance = _tolerance(rtol, atol)
    require_states(states)
    first, second = open_catalogs(a, b, told=Told(pp_tied, source_config, source_rules))
    catalogs = first, second
    pairs, only_a, only_b = pair_arrays(*catalogs, states, rename)
    readable = [
        pair
        for pair in pairs
        if pair.a.shape == pair.b.shape and can_compare(pair.a.dtype, pair.b.dtype)
    ]
    budget = default_budget_nbytes() if budget_nbytes is None else budget_nbytes
    plans = _plan_both(readable, budget)
    found, read_nbytes = _compare(catalogs, plans, tolerance, observer or NullObserver())
    compared_nbytes = plans[0].total_nbytes
    del plans  # what finds copies that differ has the same budget
    moves, more_nbytes = find_all_moves(catalogs, readable, found, budget_nbytes=budget)
    read_nbytes += more_nbytes
    by_pair = {
        (pair.names, pair.state): (found.get(place), moves.get(place))
        for place, pair in enumerate(readable)
    }
    differences = [
        _difference(pair, *by_pair[pair.names, pair.state], tolerance)
        if (pair.names, pair.state) in by_pair
        else ArrayDifference(*pair.names, pair.state, pair.shapes, pair.dtypes)
        for pair in pairs
    ]
    unread = [*_unread(catalogs, only_weights=states == "weights")]
    sides: tuple[Literal["A", "B"], ...] = ("A", "B")
    for place, side in enumerate(sides):
        catalog = catalogs[place]
        held = [(p.names[place], (p.a, p.b)[place].entry) for p in readable]
        drifted, more_nbytes = find_drift(catalog, as_stored(catalog, held), budget_nbytes=budget)
        unread += [(side, compared_one(own)) for own in drift_findings(catalog, drifted)]
        read_nbytes += more_nbytes
    seconds = time.perf_counter() - started
    (observer or NullObserver()).on_finish(PlanFinished(read_nbytes, 0, seconds))
    return DiffReport(
        *catalogs,
        compared_count=len(pairs),
        compared_nbytes=compared_nbytes,
        read_nbytes=read_nbytes,
        only_a=only_a,
        only_b=only_b,
        differences=tuple(difference for difference in differences if difference is not None),
        widened_count=sum(pair.a.dtype != pair.b.dtype for pair in readable),
        seconds=seconds,
        unread=tuple(unread),
    )


def _unread(
    catalogs: tuple[Catalog, Catalog], *, only_weights: bool
) -> Iterator[tuple[Literal["A", "B"], Finding]]:
    for error in errors_in(catalogs[0].findings, only_weights=only_weights):
        yield "A", error
    for error in errors_in(catalogs[1].findings, only_weights=only_weights):
        yield "B", error


def fingerprint(
    path: str | PathLike[str],
    *,
    states: States = "all",
    budget_nbytes: int | None = None,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
    observer: Observer | None = None,
) -> dict[str, dict[str, str]]:
    """Take the fingerprint of every array: the same under every sharding, format and budget.

    Two arrays with one fingerprint have the same shape, dtype and bits, but for a chance below
    2^-95 (see `restride.arrays.fingerprint`). It is no protection against forgery.

    Args:
        path: As for `restride.open`.
        states: Only the weights, or every state.
        budget_nbytes: Most memory for plan and buffers. Default: as for `restride.check`.
        pp_tied: As for `restride.convert`, of a pipeline without ZeRO.
        source_config: As for `restride.convert`.
        source_rules: Likewise.
        observer: Receives progress.

    Returns:
        32 hexadecimal digits by tensor and state.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `restride.open`.
        CorruptError: An error was noticed, so that states would be left out.
        ReplicaError: Ranks hold different copies of an array, which has no one fingerprint then.
        CoverageError: An element of a tensor is in no file.
        BudgetError: The budget is too small for any buffer.

    Cost:
        Every element is read once; twice where a weight is the master copy, rounded. So is every
        copy of what several ranks hold.
    """
    require_states(states)
    (catalog,) = open_catalogs(path, told=Told(pp_tied, source_config, source_rules))
    errors = errors_in(catalog.findings, only_weights=states == "weights")
    if errors:
        raise CorruptError(
            errors[0].message,
            where=catalog.root,
            remedy="see `restride check`, or take the fingerprints of the weights alone with "
            "--states weights"
            if states != "weights" and not errors_in(errors, only_weights=True)
            else "see `restride check`",
        )
    arrays = list(_selected(catalog, states))
    budget = default_budget_nbytes() if budget_nbytes is None else budget_nbytes
    found = _fingerprints(catalog, arrays, budget, observer)
    held = as_stored(catalog, [(tensor, entry) for tensor, _, entry, _ in arrays])
    drifted, _ = find_drift(catalog, held, budget_nbytes=budget)
    if drifted:
        raise drift_error(catalog, drifted)
    return found


def check_against(
    path: str | PathLike[str],
    file: str | PathLike[str],
    *,
    budget_nbytes: int | None = None,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
    observer: Observer | None = None,
) -> tuple[Finding, ...]:
    """Compare a checkpoint with fingerprints that were taken before, of whatever sharding.

    Args:
        path: As for `restride.open`.
        file: What `restride fingerprint -o` wrote, the manifest of an output, or the output.
        budget_nbytes: Most memory for plan and buffers. Default: as for `restride.check`.
        pp_tied: As for `restride.convert`, of a pipeline without ZeRO.
        source_config: As for `restride.convert`.
        source_rules: Likewise.
        observer: Receives progress.

    Returns:
        An error for each array of the file that is missing or different, and a note where the
        checkpoint has more. Arrays that are not whole are left to `restride.check`.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `restride.open`, or `file` is no file
            of fingerprints.
        BudgetError: The budget is too small for any buffer.
    """
    expected = read_fingerprints(file)
    (catalog,) = open_catalogs(path, told=Told(pp_tied, source_config, source_rules))
    broken = {finding.where for finding in prove_catalog(catalog) if finding.severity == "error"}
    by_name = tensors_by_name(catalog)
    wanted = {
        (by_name[name].name, state): (name, state)
        for name, states in expected.items()
        for state in states
        if name in by_name and state in arrays_of(by_name[name], "all")
    }
    arrays = list(_selected(catalog, "all"))
    sound = [
        array
        for array in arrays
        if array[:2] in wanted and f"tensor {array[0]!r}, state {array[1]!r}" not in broken
    ]
    budget = default_budget_nbytes() if budget_nbytes is None else budget_nbytes
    found = _fingerprints(catalog, sound, budget, observer)
    return tuple(_deviations(expected, by_name, found, len(arrays) - len(wanted), str(file)))


def _deviations(
    expected: Fingerprints,
    by_name: Mapping[str, TensorEntry],
    found: Fingerprints,
    more: int,
    file: str,
) -> Iterator[Finding]:
    for name, states in expected.items():
        for state, digits in states.items():
            where = f"tensor {name!r}, state {state!r}"
            tensor = by_name.get(name)
            details = {"tensor": name, "state": state, "expected": digits}
            if tensor is None or state not in arrays_of(tensor, "all"):
                message = f"{where}: {file} has its fingerprint, the checkpoint has no such array"
                yield Finding("error", "fingerprint-missing", message, where, details)
                continue
            ours = found.get(tensor.name, {}).get(state)
            if ours is not None and ours != digits:
                message = f"{where}: its fingerprint is {ours}, in {file} it is {digits}"
                details["found"] = ours
                yield Finding("error", "fingerprint-differs", message, where, details)
    if more:
        those = which(more, "it", "them")
        message = f"{counted(more, 'array')} not compared: {file} has no fingerprint of {those}"
        yield Finding("note", "fingerprint-unknown", message, "", {"arrays": more})


def _fingerprints(
    catalog: Catalog,
    arrays: Iterable[_Array],
    budget_nbytes: int,
    observer: Observer | None,
) -> dict[str, dict[str, str]]:
    arrays = list(arrays)
    (plan,) = _within([arrays], budget_nbytes, SCRATCH_NBYTES)
    reserved = plan.workers * SCRATCH_NBYTES
    watching = observer or NullObserver()
    started = time.perf_counter()
    writer = DigestWriter(len(arrays))
    watching.on_plan(
        PlanStarted(plan.step_count, plan.total_nbytes, plan.projected_nbytes + reserved)
    )
    read_nbytes = run_plan(catalog, plan, writer, watching)
    watching.on_finish(PlanFinished(read_nbytes, 0, time.perf_counter() - started))
    result: dict[str, dict[str, str]] = {}
    for total, (tensor, state, entry, dtype) in zip(writer.totals, arrays, strict=True):
        digits = finish(total, dtype.name, entry.layout.full_shape)
        result.setdefault(tensor, {})[state] = digits
    return result


def _within(
    sides: Sequence[Sequence[_Array]], budget_nbytes: int, scratch_nbytes: int
) -> list[Plan]:
    """Plan to read each side in an equal part of what the scratch of the threads leaves."""
    workers = max(1, min(default_workers(), budget_nbytes // (4 * scratch_nbytes)))
    reserved = workers * scratch_nbytes
    part = (budget_nbytes - reserved) // len(sides)
    try:
        return [
            plan_reading(
                [array[:3] for array in arrays],
                dtypes=[array[3] for array in arrays],
                budget_nbytes=part,
                workers=workers,
            )
            for arrays in sides
        ]
    except BudgetError as error:
        needed = error.needed_nbytes * len(sides) + reserved
        raise BudgetError(needed_nbytes=needed, budget_nbytes=budget_nbytes) from None


def _plan_both(pairs: Sequence[Pair], budget_nbytes: int) -> tuple[Plan, Plan]:
    """Plans of both sides in which a step of the first fits the buffers of the second."""
    a = [(pair.names[0], pair.state, pair.a.entry, pair.a.dtype) for pair in pairs]
    b = [(pair.names[1], pair.state, pair.b.entry, pair.b.dtype) for pair in pairs]
    first, second = _within((a, b), budget_nbytes, _COMPARING_NBYTES)
    regions = tuple(
        replace(region, step_numel=min(region.step_numel, other.step_numel))
        for region, other in zip(first.regions, second.regions, strict=True)
    )
    workers = min(first.workers, second.workers)
    return replace(first, regions=regions, workers=workers), second


def _compare(
    catalogs: tuple[Catalog, Catalog],
    plans: tuple[Plan, Plan],
    tolerance: Tolerance,
    observer: Observer,
) -> tuple[Mapping[int, Difference], int]:
    """Read both sides. Returns differences by number of the array, and the bytes read."""
    a, b = plans
    projected = a.projected_nbytes + b.projected_nbytes + a.workers * _COMPARING_NBYTES
    observer.on_plan(PlanStarted(a.step_count, a.total_nbytes, projected))
    with FilePool() as pool:
        second = CatalogReader(catalogs[1], pool)
        writer = CompareWriter(a, b, second, tolerance)
        read_nbytes = run_plan(catalogs[0], a, writer, observer)
    second.require_unchanged()
    return writer.found, read_nbytes + writer.read_nbytes


def _difference(
    pair: Pair, found: Difference | None, moves: Moves | None, tolerance: Tolerance
) -> ArrayDifference | None:
    if found is None:
        if pair.a.dtype == pair.b.dtype or not tolerance.is_exact:
            return None
        return ArrayDifference(*pair.names, pair.state, pair.shapes, pair.dtypes, 0)
    coordinates = np.unravel_index(found.first_index, pair.shapes[0])
    return ArrayDifference(
        *pair.names,
        state=pair.state,
        shapes=pair.shapes,
        dtypes=pair.dtypes,
        different_numel=found.different_numel,
        first_index=found.first_index,
        first_coordinates=tuple(map(int, coordinates)),
        first_values=found.first_values,
        largest=found.largest,
        moves=moves,
    )


def _tolerance(rtol: float, atol: float) -> Tolerance:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < inf:
            raise PlanError(
                f"{name} is {value}", remedy="a tolerance is a finite number, and not negative"
            )
    return Tolerance(rtol, atol)


def _selected(catalog: Catalog, states: States) -> Iterator[_Array]:
    for tensor in catalog.tensors:
        for state, array in arrays_of(tensor, states).items():
            yield tensor.name, state, array.entry, array.dtype
