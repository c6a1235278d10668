"""What comes before the first byte of a conversion: open, lay out, plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict, replace

from restride.algebra._checks import require_int
from restride.algebra.coverage import replication
from restride.checkpoint.catalog import Finding
from restride.checkpoint.decisions import DEFAULT, read_rules
from restride.checkpoint.proofs import master_findings
from restride.checkpoint.soundness import require_sound
from restride.errors import BudgetError, CoverageError, PlanError
from restride.executors.events import Notice
from restride.executors.identity import describe_job
from restride.executors.masters import spot_check_masters
from restride.executors.sources import CatalogReader, default_budget_nbytes, default_workers
from restride.executors.writing import plan_writing
from restride.exports import lay_out_export
from restride.formats.opening import Told, open_catalog, require_told_matters
from restride.frozen import Frozen
from restride.planning.jobs import Job
from restride.storage.machine import peak_nbytes
from restride.storage.torch_zip import TorchFiles
from restride.wording import told_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.decisions import ReplicaRules, Saying
    from restride.checkpoint.selection import Export, Selected
    from restride.executors.events import Observer
    from restride.executors.writing import Task
    from restride.exports import Wanted
    from restride.storage.journal import Record
    from restride.storage.ranges import FilePool

__all__ = ["Prepared", "prepare"]

_UNIVERSAL: Final = "deepspeed universal"
# What is imported on the way is the program itself.
_PROGRAM_NBYTES: Final = 64 << 20


class Prepared(Frozen):
    """A conversion that can start.

    Attributes:
        catalog: The source.
        reader: Its files, as they were when it was opened.
        export: What goes out.
        decided: Which copies count where ranks hold different ones.
        task: What to write, in which steps and memory.
        first: What makes it this conversion and no other: the first record of its journal.
        spots: What a look at some weights beside their master copies found.
        memory: A warning where all this took more memory than the conversion may.
    """

    catalog: Catalog
    reader: CatalogReader
    export: Export
    decided: ReplicaRules
    task: Task
    first: Record
    spots: tuple[Finding, ...] = ()
    memory: tuple[Finding, ...] = ()

    @property
    def noticed(self) -> tuple[Finding, ...]:
        """What was noticed on the way, beside what the reader saw."""
        return (*self.spots, *self.memory)

    @property
    def inputs(self) -> list[Path]:
        """What the output must not replace. Files may be links to somewhere else."""
        root = Path(self.catalog.root)
        return [root, *(root / file.name for file in self.catalog.files)]

    def warn(self, observer: Observer) -> None:
        """Tell of the memory before there is more to do, which may take hours."""
        for finding in self.memory:
            observer.on_notice(Notice(finding.message))


def prepare(
    path: str | PathLike[str],
    wanted: Wanted,
    pool: FilePool,
    *,
    budget_nbytes: int | None = None,
    workers: int | None = None,
    replicas: Saying = DEFAULT,
    has_records: bool = False,
) -> Prepared:
    """Open a checkpoint, and plan what is written of it.

    Args:
        path: As for `restride.open`.
        wanted: Format and options.
        pool: What the source files are read through.
        budget_nbytes: Most memory.
        workers: Threads.
        replicas: What to do where ranks hold different copies.
        has_records: Whether there may be records of an earlier run, or of other processes.

    Raises:
        RestrideError: As for `restride.convert`, as far as it can be said without reading tensors.
    """
    if workers is not None:
        require_int("workers", workers)
        if workers < 1:
            raise PlanError(f"{workers} threads write nothing", remedy="give 1 or more")
    before_nbytes = peak_nbytes()
    # What the files hold is asked for three times, and let go with this call.
    opened = TorchFiles()
    told = Told(wanted.pp_tied, wanted.source_config, wanted.source_rules)
    catalog = open_catalog(path, opened, told)
    require_told_matters(told, catalog)
    only_weights = wanted.to == "safetensors" and wanted.states != "all"
    noticed = (*catalog.findings, *master_findings(catalog))
    require_sound(noticed, only_weights=only_weights)
    budget = default_budget_nbytes() if budget_nbytes is None else budget_nbytes
    # Before the job is described: what changes later is noticed.
    reader = CatalogReader(catalog, pool)
    export = lay_out_export(catalog, wanted, opened)
    decided = read_rules(replicas, catalog)
    sources = _of_masters(catalog, export.sources, decided, only_weights=only_weights)
    jobs = [
        Job(
            chosen.tensor,
            chosen.state,
            chosen.entry,
            target.layout,
            target.regions,
            target.dtype,
            decided.decide(chosen.tensor, chosen.state),
            "read" if wanted.optimizer_transform else "resume",
        )
        for chosen, target in zip(sources, export.output.tensors, strict=True)
    ]
    task = plan_writing(
        catalog,
        jobs,
        export.output,
        budget_nbytes=budget,
        workers=default_workers() if workers is None else workers,
        has_records=has_records,
    )
    spots = _spots(catalog, budget, only_weights=only_weights)
    require_sound(spots, only_weights=only_weights)
    options = {**asdict(wanted), "replicas": replicas}
    first = describe_job(catalog, reader, export.output, task.plan, options)
    memory = tuple(_taken(peak_nbytes() - before_nbytes, budget))
    return Prepared(catalog, reader, export, decided, task, first, spots, memory)


def _taken(nbytes: int, budget_nbytes: int) -> Iterator[Finding]:
    """A warning where opening and planning took more than the budget.

    Nobody knows before. What they took is free again, and the conversion itself does with less.
    """
    if nbytes > budget_nbytes + _PROGRAM_NBYTES:
        taken, budget = told_apart(nbytes, budget_nbytes)
        yield Finding(
            "warning",
            "memory-of-opening",
            f"reading headers and planning took {taken} of memory, more than the budget of "
            f"{budget}; the conversion itself stays below it",
        )


def _spots(catalog: Catalog, budget_nbytes: int, *, only_weights: bool) -> tuple[Finding, ...]:
    """What a look at some weights beside their master copies finds.

    Where only the weights go out it is told of and no more: they may be what is wanted, and the
    optimizer's files those of another save. It reads less of these than what tells that they have
    not changed.
    """
    if not only_weights:
        return spot_check_masters(catalog, budget_nbytes=budget_nbytes)
    try:
        found = spot_check_masters(catalog, budget_nbytes=budget_nbytes)
    except (BudgetError, CoverageError):
        return ()  # the weights themselves may have room, and be whole
    return tuple(replace(finding, severity="warning") for finding in found)


def _of_masters(
    catalog: Catalog, sources: Iterable[Selected], decided: ReplicaRules, *, only_weights: bool
) -> Iterator[Selected]:
    """Read weights whose copies are averaged from the master copies, where both go out.

    A training goes on from the mean of these, and its weights are that, rounded once. The mean of
    weights that were rounded before is another number.

    Of a universal folder the master copies are what was decided when it was written, and what an
    engine makes its weights of; in its model files they are as the ranks had them before.
    """
    states = {tensor.name: tensor.states for tensor in catalog.tensors}
    is_universal = catalog.format == _UNIVERSAL
    for chosen in sources:
        master = states.get(chosen.tensor, {}).get("fp32")
        decision = decided.decide(chosen.tensor, chosen.state)
        is_of_master = decision == "mean" and not only_weights
        if is_universal:
            is_of_master = decision != DEFAULT
        if (
            chosen.state == "weight"
            and is_of_master
            and master is not None
            and master.dtype.kind == chosen.dtype.kind == "float"
            and master.layout.full_shape == chosen.entry.layout.full_shape
            and master.layout.is_exact
            and replication(chosen.entry.layout)
        ):
            yield replace(chosen, state="fp32", entry=master)
        else:
            yield chosen
