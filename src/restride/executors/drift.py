"""Gather what the comparison of replicas found, one row for each array and pair of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.executors.events import (
        Observer,
        PlanFinished,
        PlanStarted,
        ReplicaDrift,
        StepFinished,
    )
    from restride.planning.plan import Plan

__all__ = ["DriftTable"]


@dataclass(slots=True)
class DriftTable:
    """An observer that adds up drift over the steps and hands every event on.

    Attributes:
        observer: Who else wants to know.
        rows: Sums by (tensor, state, ranks) of the steps in which something differs, in the order
            in which they were found.
    """

    observer: Observer
    rows: dict[tuple[str, str, tuple[int, int]], ReplicaDrift]

    def totals(self, plan: Plan) -> Iterator[ReplicaDrift]:
        """Yield the rows with the elements that were compared in all steps of `plan`.

        Steps without a difference say nothing, so what the rows add up depends on the budget.
        """
        numels = plan.compared_numel
        for key, row in self.rows.items():
            yield replace(row, numel=numels[key])

    def on_plan(self, event: PlanStarted, /) -> None:
        """Hand it on."""
        self.observer.on_plan(event)

    def on_step(self, event: StepFinished, /) -> None:
        """Hand it on."""
        self.observer.on_step(event)

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Add it to its row and hand it on."""
        key = (event.tensor, event.state, event.ranks)
        known = self.rows.get(key)
        self.rows[key] = event if known is None else _sum(known, event)
        self.observer.on_drift(event)

    def on_finish(self, event: PlanFinished, /) -> None:
        """Hand it on."""
        self.observer.on_finish(event)


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
