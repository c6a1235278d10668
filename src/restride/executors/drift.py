"""Gather what the comparison of replicas found, one row for each array and pair of ranks."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.copies import OWN
from restride.algebra.coverage import holders
from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError
from restride.executors.events import Forwarding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping

    from restride.algebra.coverage import Held
    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.catalog import Catalog, Severity
    from restride.checkpoint.decisions import ReplicaRules
    from restride.executors.events import Observer, ReplicaDrift
    from restride.planning.plan import Plan

__all__ = ["DriftTable", "add_drift", "drift_findings"]


class DriftTable(Forwarding):
    """An observer that adds up drift over the steps and hands every event on.

    Args:
        observer: Who else wants to know.

    Attributes:
        rows: Sums by (tensor, state, ranks) of the steps in which something differs, in the order
            in which they were found.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__(observer)
        self.rows: dict[tuple[str, str, tuple[int, int]], ReplicaDrift] = {}

    def totals(self, plan: Plan) -> Iterator[ReplicaDrift]:
        """Yield the rows with the elements that were compared in all steps of `plan`.

        Steps without a difference say nothing, so what the rows add up depends on the budget.
        """
        numels = plan.compared_numel
        for key, row in self.rows.items():
            yield replace(row, numel=numels[key])

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Add it to its row and hand it on."""
        add_drift(self.rows, event)
        super().on_drift(event)


def add_drift(
    rows: MutableMapping[tuple[str, str, tuple[int, int]], ReplicaDrift], found: ReplicaDrift
) -> None:
    """Add what was found to the sum of its array and ranks."""
    key = (found.tensor, found.state, found.ranks)
    known = rows.get(key)
    rows[key] = found if known is None else _sum(known, found)


def _sum(a: ReplicaDrift, b: ReplicaDrift) -> ReplicaDrift:
    return replace(
        a,
        numel=a.numel + b.numel,
        different_numel=a.different_numel + b.different_numel,
        largest=_larger(a.largest, b.largest),
    )


def _larger(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return a if b is None else b
    return max(a, b)


def drift_findings(
    catalog: Catalog, rows: Iterable[ReplicaDrift], *, decided: ReplicaRules | None = None
) -> Iterator[Finding]:
    """One finding for each array and pair of ranks that hold different copies.

    Args:
        catalog: The checkpoint.
        rows: What was found.
        decided: Which copies were taken, where something was made of them.
    """
    states = {
        (tensor.name, state): (len(tensor.states), entry.layout)
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
    }
    order = {array: place for place, array in enumerate(states)}
    for row in sorted(rows, key=lambda r: (order[r.tensor, r.state], r.ranks)):
        count, layout = states[row.tensor, row.state]
        mesh, row = layout.mesh, _counted_once(row, layout)  # noqa: PLW2901 - the same drift
        where = f"tensor {row.tensor!r}, state {row.state!r}"
        first, other = (f"{rank} ({_coordinates(mesh, rank)})" for rank in row.ranks)
        largest = "" if row.largest is None else f", by up to {row.largest:.6g}"
        who = f"ranks {first} and {other} hold"
        if row.ranks[0] == row.ranks[1]:
            who = f"rank {first} holds"
        message = (
            f"{where}: {who} different copies of {row.different_numel} "
            f"of {row.numel} elements{largest}"
        )
        details: dict[str, object] = {
            "tensor": row.tensor,
            "state": row.state,
            "state_count": count,
            "ranks": list(row.ranks),
            "coordinates": [mesh.coordinates(rank) for rank in row.ranks],
            "numel": row.numel,
            "different_numel": row.different_numel,
            # JSON has no infinity, which is how far a number is from no number.
            "largest": "inf" if row.largest == inf else row.largest,
        }
        if decided is not None:
            decision = decided.decide(row.tensor, row.state)
            written = f"the copy of rank {first}"
            if decision in {"mean", OWN}:
                written = "their mean" if decision == "mean" else "to each rank its own"
            message += f"; written is {written}"
            details["decided"] = str(decision)
        severity: Severity = "error" if decided is None else "warning"
        yield Finding(severity, "replica-drift", message, where, details)


def _counted_once(row: ReplicaDrift, layout: Layout) -> ReplicaDrift:
    """Take out what was compared again for each target rank that holds the same elements."""
    if row.ranks[0] == row.ranks[1]:
        return row
    shared = sum(held.numel for held in _held(layout) if set(row.ranks) <= set(held.ranks))
    times, rest = divmod(row.numel, shared) if shared else (1, 0)
    if times < 2 or rest or row.different_numel % times:  # noqa: PLR2004
        return row
    return replace(row, numel=shared, different_numel=row.different_numel // times)


@lru_cache(maxsize=64)
def _held(layout: Layout) -> tuple[Held, ...]:
    try:
        return holders(layout)
    except UnsupportedError:  # more ranks than anybody names: the numbers stay as they were added
        return ()


def _coordinates(mesh: Mesh, rank: int) -> str:
    return ",".join(f"{name}={at}" for name, at in mesh.coordinates(rank).items())
