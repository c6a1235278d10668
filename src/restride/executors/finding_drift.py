"""Find out whether ranks hold different copies of what is about to be taken for one array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.checkpoint.pairing import tensors_by_name
from restride.errors import ReplicaError
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import NullObserver
from restride.executors.running import run_plan
from restride.executors.sources import default_workers
from restride.planning.jobs import plan_comparison
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.checkpoint.catalog import Catalog, Finding, StateEntry
    from restride.executors.events import ReplicaDrift

__all__ = ["as_stored", "compared_one", "drift_error", "find_drift"]


def find_drift(
    catalog: Catalog, arrays: Iterable[tuple[str, str, StateEntry]], *, budget_nbytes: int
) -> tuple[tuple[ReplicaDrift, ...], int]:
    """Compare what more than one rank holds, bit for bit.

    Args:
        catalog: The checkpoint.
        arrays: (tensor, state, entry) of each array.
        budget_nbytes: Most memory for plan and buffers.

    Returns:
        The pairs of ranks that hold different copies, and how many bytes were read.

    Raises:
        BudgetError, CoverageError, UnsupportedError: As for `plan_comparison`.
        ExecutionError: A file cannot be read, or changed since it was opened.

    Cost:
        Every copy of what several ranks hold is read once, and nothing else.
    """
    plan = plan_comparison(arrays, budget_nbytes=budget_nbytes, workers=default_workers())
    if not plan.regions:
        return (), 0
    table = DriftTable(NullObserver())
    read_nbytes = run_plan(catalog, plan, None, table)
    return tuple(table.totals(plan)), read_nbytes


def as_stored(
    catalog: Catalog, held: Iterable[tuple[str, StateEntry]]
) -> list[tuple[str, str, StateEntry]]:
    """Tensor and state of each entry as the checkpoint has them, once: not as they are read.

    A weight that is stored nowhere is read from the master copy, and a tied name is a second one.
    """
    by_name = tensors_by_name(catalog)
    stored = {
        (by_name[name].name, state): own
        for name, entry in held
        for state, own in by_name[name].states.items()
        if own is entry
    }
    return [(tensor, state, entry) for (tensor, state), entry in stored.items()]


def compared_one(finding: Finding) -> Finding:
    """Say of copies that differ which of them stood for the array."""
    message = f"{finding.message}; that of the lowest rank is what was compared"
    return replace(finding, message=message)


def drift_error(catalog: Catalog, drifted: Sequence[ReplicaDrift]) -> ReplicaError:
    """The error of who wants one fingerprint of copies that differ."""
    finding, *_ = drift_findings(catalog, drifted)
    count = len({(row.tensor, row.state) for row in drifted})
    more = f", and so of {counted(count, 'array')} in all" if count > 1 else ""
    first = drifted[0]
    return ReplicaError(
        f"{finding.message}{more}: they have no one fingerprint",
        ranks=first.ranks,
        different_numel=first.different_numel,
        largest=first.largest,
        where=catalog.root,
        remedy="see `restride check`, or decide which copy counts (`restride convert --replicas`) "
        "and take the fingerprints of the output",
    )
