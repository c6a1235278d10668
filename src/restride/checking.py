"""Prove that a checkpoint is whole, and compare what more than one rank holds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from restride.checkpoint.catalog import Finding
from restride.checkpoint.fused_cuts import FUSED_CUT, fused_findings
from restride.checkpoint.proofs import prove_catalog
from restride.errors import RestrideError
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import NullObserver, PlanFinished
from restride.executors.running import run_plan
from restride.executors.sources import default_workers
from restride.formats._registry import open_catalog
from restride.planning.conversion import plan_comparison
from restride.targets import find_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from restride.checkpoint.catalog import Catalog
    from restride.executors.events import Observer

__all__ = ["CheckReport", "check"]

_DEFAULT_BUDGET_NBYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found.

    Attributes:
        catalog: What is in the checkpoint.
        findings: Everything that was noticed: what the reader saw, proofs that failed, replicas
            that drifted.
        compared_nbytes: Bytes of tensors that more than one rank holds, and that were compared.
    """

    catalog: Catalog
    findings: tuple[Finding, ...]
    compared_nbytes: int

    @property
    def verdict(self) -> Literal["ok", "findings"]:
        """Whether anything was found that is more than a note."""
        return "findings" if any(f.severity != "note" for f in self.findings) else "ok"


def check(
    path: str | PathLike[str],
    *,
    budget_nbytes: int = _DEFAULT_BUDGET_NBYTES,
    observer: Observer | None = None,
) -> CheckReport:
    """Prove that a checkpoint is whole, and compare everything that more than one rank holds.

    Args:
        path: As for `open`.
        budget_nbytes: Most memory for plan and buffers.
        observer: Receives progress.

    Returns:
        The catalog, and every finding.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `open`.
        BudgetError: The budget is too small for any buffer.

    Cost:
        Proofs do not depend on sizes. All replicas are read once.
    """
    started = time.perf_counter()
    catalog = open_catalog(path)
    noticed = [finding for finding in catalog.findings if finding.kind != FUSED_CUT]
    findings = [*noticed, *_fused(catalog), *prove_catalog(catalog)]
    # What a broken layout would read is not what the tensor is: compare the sound ones only.
    broken = {finding.where for finding in findings if finding.severity == "error"}
    states = [
        (tensor.name, state, entry)
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
        if f"tensor {tensor.name!r}, state {state!r}" not in broken
    ]
    workers = default_workers()
    plan = plan_comparison(catalog.files, states, budget_nbytes=budget_nbytes, workers=workers)
    table = DriftTable(observer or NullObserver(), {})
    read_nbytes = run_plan(catalog, plan, None, table)
    findings += drift_findings(catalog, table.totals(plan))
    table.on_finish(PlanFinished(read_nbytes, 0, time.perf_counter() - started))
    return CheckReport(catalog, tuple(findings), plan.total_nbytes)


def _fused(catalog: Catalog) -> list[Finding]:
    """Fused weights that train wrongly, judged by the model's config where one is found."""
    notes: tuple[Finding, ...] = ()
    config: Mapping[str, object] | None = None
    try:
        config, notes = find_config(catalog)
    except RestrideError as error:
        # It is no part of the checkpoint: weights are judged by their names instead.
        notes = (Finding("note", "model-config", f"{error}: it is not used", error.where),)
    found = list(fused_findings(catalog, config))
    return [*notes, *found] if found or config is None else []
