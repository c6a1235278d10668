"""Prove that a checkpoint is whole, and compare what more than one rank holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.checkpoint.proofs import prove_catalog
from restride.errors import BudgetError, PlanError, RestrideError
from restride.executors.checksums import check_sums, summed_nbytes
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import (
    Forwarding,
    NullObserver,
    PlanFinished,
    PlanStarted,
    StepFinished,
)
from restride.executors.group_steps import step_findings
from restride.executors.manifests import FoundManifest, check_manifest, find_manifest
from restride.executors.masters import compare_masters, plan_masters
from restride.executors.progress import Continued
from restride.executors.running import run_plan
from restride.executors.sources import default_budget_nbytes, default_workers
from restride.executors.verifying import digest_rows
from restride.formats.opening import Told, open_catalogs
from restride.frozen import Frozen
from restride.planning.jobs import plan_comparison

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from os import PathLike

    from restride.checkpoint.catalog import Catalog, StateEntry
    from restride.executors.events import Observer
    from restride.executors.masters import MasterPlans
    from restride.planning.plan import Plan

__all__ = ["CheckReport", "Depth", "check"]

Depth: TypeAlias = Literal["headers", "copies", "all"]
"""What a check reads: no tensor, what is there more than once, or all that has a checksum."""

_DEPTHS: Final[tuple[Depth, ...]] = get_args(Depth)


class CheckReport(Frozen):
    """What a check found.

    Attributes:
        catalog: What is in the checkpoint.
        findings: Everything that was noticed: what the reader saw, proofs that failed, replicas
            that drifted, weights that are not their master copies.
        compared_nbytes: Bytes of tensors that more than one rank holds, and that were compared.
        rounded_nbytes: Bytes of weights that were compared with their master copies.
        verified_nbytes: Bytes of files that were held against the manifest which a conversion
            left, or without one against the checksums in files of torch.
        read: What was read to find it.
    """

    catalog: Catalog
    findings: tuple[Finding, ...]
    compared_nbytes: int
    rounded_nbytes: int = 0
    verified_nbytes: int = 0
    read: Depth = "all"

    @property
    def verdict(self) -> Literal["ok", "findings"]:
        """Whether anything was found that is more than a note."""
        return "findings" if any(f.severity != "note" for f in self.findings) else "ok"


def check(
    path: str | PathLike[str],
    *,
    read: Depth = "all",
    budget_nbytes: int | None = None,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
    observer: Observer | None = None,
) -> CheckReport:
    """Prove that a checkpoint is whole, and compare what it holds more than once.

    That is what several ranks hold, bit for bit, and weights beside master copies: each element is
    the one as rounded from the other, unless files of two saves are mixed.

    The files of a conversion are held against its manifest as well, every byte of them; others
    against the checksums that they state.

    Args:
        path: As for `open`.
        read: ``"headers"`` for what can be told without a tensor, within seconds; ``"copies"`` to
            compare what is there more than once; ``"all"`` to hold every byte against its checksum
            as well.
        budget_nbytes: Most memory for plan and buffers. Default: 512 MiB, or a quarter of what
            the cgroup allows where that is less.
        pp_tied: As for `restride.convert`, of a pipeline without ZeRO.
        source_config: As for `restride.convert`.
        source_rules: Likewise.
        observer: Receives progress.

    Returns:
        The catalog, and every finding.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `open`.
        BudgetError: The budget is too small for any buffer.
        PlanError: `read` is something else.

    Cost:
        Proofs do not depend on sizes. All replicas are read once, and where there are both weights
        and master copies, one copy of each once more; all files that a manifest names or that
        state checksums, too.
    """
    started = time.perf_counter()
    if read not in _DEPTHS:
        raise PlanError(
            f"{read!r} does not say what is to be read", remedy=f"say {', '.join(_DEPTHS)}"
        )
    (catalog,) = open_catalogs(path, told=Told(pp_tied, source_config, source_rules))
    findings = [*_judged(catalog), *prove_catalog(catalog)]
    findings += step_findings(catalog)
    # What a broken layout would read is not what the tensor is: compare the sound ones only.
    broken = {finding.where for finding in findings if finding.severity == "error"}
    compared = replace(catalog, tensors=()) if read == "headers" else catalog
    states = [
        (tensor.name, state, entry)
        for tensor in compared.tensors
        for state, entry in tensor.states.items()
        if f"tensor {tensor.name!r}, state {state!r}" not in broken
    ]
    workers = default_workers()
    budget = default_budget_nbytes() if budget_nbytes is None else budget_nbytes
    plan, masters = _planned(compared, states, broken, budget, workers)
    manifest = find_manifest(catalog)
    if isinstance(manifest, Finding):
        findings.append(manifest)
        manifest = None
    known = 0
    if read == "all":
        known = manifest.nbytes if manifest else summed_nbytes(catalog)
    progress = Continued(observer or NullObserver(), more_nbytes=known)
    both = _OneAfterTheOther(progress, plan, masters)
    table = DriftTable(both)
    table.on_plan(PlanStarted(plan.step_count, plan.total_nbytes, plan.projected_nbytes))
    read_nbytes = run_plan(catalog, plan, None, table)
    if masters is not None:
        both.is_second = True
        mismatches, more_nbytes = compare_masters(catalog, masters, both)
        findings += mismatches
        read_nbytes += more_nbytes
    findings += drift_findings(catalog, table.totals(plan))
    rows = digest_rows(budget, workers)
    damage, verified_nbytes = _verified(
        *(catalog, manifest, rows, workers, progress), only_sizes=read != "all"
    )
    findings += damage
    seconds = time.perf_counter() - started
    table.on_finish(PlanFinished(read_nbytes + verified_nbytes, 0, seconds))
    rounded_nbytes = masters.masters.total_nbytes if masters else 0
    shared_nbytes = _shared_nbytes(plan)
    return CheckReport(
        *(catalog, tuple(findings), shared_nbytes, rounded_nbytes, verified_nbytes, read)
    )


def _planned(
    catalog: Catalog,
    states: Sequence[tuple[str, str, StateEntry]],
    broken: Container[str],
    budget_nbytes: int,
    workers: int,
) -> tuple[Plan, MasterPlans | None]:
    """Plans of both comparisons. The first is kept while the second is carried out.

    Raises:
        BudgetError: The budget is too small for one of them; names what is enough for both.
    """
    try:
        plan = plan_comparison(states, budget_nbytes=budget_nbytes, workers=workers)
    except BudgetError as error:
        enough = error.needed_nbytes
        plan = plan_comparison(states, budget_nbytes=enough, workers=workers)
    kept = _kept(plan)
    try:
        masters = plan_masters(catalog, budget_nbytes=budget_nbytes - kept, broken=broken)
    except BudgetError as error:
        needed = max(plan.projected_nbytes, kept + error.needed_nbytes)
        raise BudgetError(needed_nbytes=needed, budget_nbytes=budget_nbytes) from None
    if plan.projected_nbytes > budget_nbytes:
        raise BudgetError(needed_nbytes=plan.projected_nbytes, budget_nbytes=budget_nbytes)
    return plan, masters


def _shared_nbytes(plan: Plan) -> int:
    """Bytes that more than one rank holds: of a fused weight that may be a part."""
    return sum([r.pattern.numel * r.source_dtype.itemsize_nbytes for r in plan.regions])


def _kept(plan: Plan) -> int:
    """What is left of a plan that has been carried out."""
    return plan.objects_nbytes - plan.steps_nbytes


def _verified(
    catalog: Catalog,
    manifest: FoundManifest | None,
    rows: int,
    workers: int,
    progress: Continued,
    *,
    only_sizes: bool,
) -> tuple[list[Finding], int]:
    """What is not as the manifest says, or else the checksums; and the bytes that were held."""

    def on_read(nbytes: int) -> None:
        progress.skip(nbytes, "what was written")

    if manifest is not None:
        found = check_manifest(
            manifest, workers=workers, rows=rows, on_read=on_read, only_sizes=only_sizes
        )
        return list(found), 0 if only_sizes else manifest.nbytes
    if only_sizes:  # which the reader has looked at
        return [], 0
    return check_sums(catalog, workers=workers, rows=rows, on_read=on_read)


class _OneAfterTheOther(Forwarding):
    """An observer of two plans that tells another one of a single plan."""

    def __init__(self, observer: Observer, first: Plan, second: MasterPlans | None) -> None:
        super().__init__(observer)
        self._first = first
        self._second = second
        self._read_nbytes = 0
        self.is_second = False

    def on_plan(self, event: PlanStarted, /) -> None:
        """Tell of both plans at once."""
        if self._second is not None:
            event = PlanStarted(
                event.steps + self._second.masters.step_count,
                event.total_nbytes + self._second.masters.total_nbytes,
                max(event.projected_nbytes, _kept(self._first) + self._second.projected_nbytes),
            )
        super().on_plan(event)

    def on_step(self, event: StepFinished, /) -> None:
        """Count on where the first plan ended."""
        if self.is_second:
            event = StepFinished(
                self._first.step_count + event.done_steps,
                self._first.total_nbytes + event.done_nbytes,
                self._read_nbytes + event.read_nbytes,
                event.tensor,
            )
        else:
            self._read_nbytes = event.read_nbytes
        super().on_step(event)


def _judged(catalog: Catalog) -> list[Finding]:
    """What was noticed, with fused weights judged by the model's config where one is found."""
    # Only a check needs the catalogue of families.
    from restride.checkpoint.fused_cuts import FUSED_CUT, fused_findings  # noqa: PLC0415
    from restride.targets import find_config  # noqa: PLC0415

    noticed = [finding for finding in catalog.findings if finding.kind != FUSED_CUT]
    notes: tuple[Finding, ...] = ()
    config: Mapping[str, object] | None = None
    try:
        config, notes = find_config(catalog)
    except RestrideError as error:
        # It is no part of the checkpoint: weights are judged by their names instead.
        notes = (Finding("note", "model-config", f"{error}: it is not used", error.where),)
    found = list(fused_findings(catalog, config))
    return [*noticed, *notes, *found] if found or config is None else noticed
