"""Open, check and convert checkpoints: the seam for the command line, notebooks and viewers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from restride.checkpoint.catalog import Finding
from restride.checkpoint.output import Output, OutputFile
from restride.checkpoint.proofs import prove_catalog
from restride.checkpoint.selection import COPIED, cast_target, select_optimizer, select_weights
from restride.errors import UnsupportedError
from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver, PlanFinished, PlanStarted
from restride.executors.sources import CatalogReader, default_workers
from restride.executors.streaming import StreamingExecutor
from restride.formats._registry import open_catalog
from restride.planning.conversion import Job, plan_comparison, plan_conversion
from restride.storage.atomic import atomic_directory
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from restride.algebra.mesh import Mesh
    from restride.checkpoint.catalog import Catalog, Severity
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.selection import Selected, States, Target
    from restride.executors.events import Observer, ReplicaDrift
    from restride.planning.plan import Plan, Replicas
    from restride.storage.atomic import AtomicDirectory

__all__ = ["CheckReport", "ConvertReport", "check", "convert", "open"]

_Written: TypeAlias = "tuple[list[Selected], Output, tuple[Finding, ...]]"
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


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        out: Folder that was written.
        files: Names of the files in it.
        tensor_count: Number of arrays written.
        read_nbytes: Bytes read from the tensors of the source.
        written_nbytes: Bytes of tensors written.
        projected_nbytes: Upper bound of the memory that plan and buffers took.
        seconds: Wall time, opening and syncing included.
        findings: What the user should know: what the reader saw, replicas that were decided.
    """

    out: Path
    files: tuple[str, ...]
    tensor_count: int
    read_nbytes: int
    written_nbytes: int
    projected_nbytes: int
    seconds: float
    findings: tuple[Finding, ...]


def open(path: str | PathLike[str]) -> Catalog:  # noqa: A001 - reads as restride.open
    """Find out what is in a checkpoint, without loading a tensor.

    Args:
        path: A DeepSpeed checkpoint (its folder, or one of its tags), a universal folder, a
            safetensors file or a folder of them.

    Returns:
        Tensors, states, layouts, and where their bytes are.

    Raises:
        FormatError: It is no checkpoint that is known, or one that is damaged.
        UnsupportedError: It is one that this version cannot read.
        ExecutionError: A file cannot be read.

    Cost:
        Reads headers only; time grows with the number of tensors, not with their size.
    """
    return open_catalog(path)


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
    findings = [*catalog.findings, *prove_catalog(catalog)]
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
    read_nbytes = _execute(catalog, plan, None, table)
    findings += _drift_findings(catalog, table.totals(plan))
    table.on_finish(PlanFinished(read_nbytes, 0, time.perf_counter() - started))
    return CheckReport(catalog, tuple(findings), plan.total_nbytes)


def convert(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: Target = "safetensors",
    states: States = "weights",
    dtype: str | None = None,
    max_shard_nbytes: int | None = None,
    budget_nbytes: int = _DEFAULT_BUDGET_NBYTES,
    replicas: Replicas = "check",
    force: bool = False,
    observer: Observer | None = None,
) -> ConvertReport:
    """Write a checkpoint in another form, bit for bit, within a memory budget.

    As safetensors, ``model*.safetensors`` holds the weights under the names of the model. With all
    states, ``optimizer*.safetensors`` holds the rest as ``TENSOR/STATE``, and ``state.json`` what
    is not a tensor. As a universal folder of DeepSpeed it holds all states, one file each, and
    ``load_checkpoint(out)`` of an engine with ``load_universal`` resumes from it. The output
    appears under its name when it is complete and durable, or not at all.

    Args:
        path: As for `open`.
        out: Folder to write.
        to: Format of the output.
        states: Only the weights, or everything. A universal folder always has everything.
        dtype: Type of the weights in safetensors, where it is not the one they were trained in.
        max_shard_nbytes: Largest file of safetensors; a larger model is split, with an index.
        budget_nbytes: Most memory for plan and buffers.
        replicas: What to do where ranks hold different copies of the same elements: refuse, take
            the lowest rank's, or take the mean.
        force: Replace a folder that is there.
        observer: Receives progress.

    Returns:
        What was written.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `open`.
        ExistsError: There is something at `out`.
        BudgetError: The budget is too small for any buffer.
        CoverageError: An element of a tensor is in no file.
        ReplicaError: Replicas differ and `replicas` says to check.
    """
    started = time.perf_counter()
    catalog = open_catalog(path)
    if to == "safetensors":
        wanted = cast_target(dtype) if dtype is not None else None
        written = _lay_out_safetensors(catalog, states, wanted, max_shard_nbytes)
    elif to == "universal":
        _refuse_options(dtype=dtype, max_shard_nbytes=max_shard_nbytes)
        written = _lay_out_universal(catalog)
    else:
        raise UnsupportedError(
            f"cannot write {to!r}", remedy="formats to write are safetensors and universal"
        )
    selected, output, notes = written
    jobs = [
        Job(chosen.tensor, chosen.state, chosen.entry, target.layout, target.regions, target.dtype)
        for chosen, target in zip(selected, output.tensors, strict=True)
    ]
    plan = plan_conversion(
        catalog.files,
        jobs,
        budget_nbytes=budget_nbytes,
        workers=default_workers(),
        replicas=replicas,
    )
    table = DriftTable(observer or NullObserver(), {})
    with atomic_directory(out, force=force, inputs=_inputs(catalog)) as directory:
        directory.create(output)
        read_nbytes = _execute(catalog, plan, _OutputWriter(directory, output), table)
    seconds = time.perf_counter() - started
    table.on_finish(PlanFinished(read_nbytes, plan.total_nbytes, seconds))
    return ConvertReport(
        out=Path(out),
        files=tuple(file.name for file in output.files),
        tensor_count=sum(chosen.state != COPIED for chosen in selected),
        read_nbytes=read_nbytes,
        written_nbytes=plan.total_nbytes,
        projected_nbytes=plan.projected_nbytes,
        seconds=seconds,
        findings=(
            *catalog.findings,
            *notes,
            *_drift_findings(catalog, table.totals(plan), decided=replicas),
        ),
    )


def _lay_out_safetensors(
    catalog: Catalog, states: States, dtype: DType | None, max_shard_nbytes: int | None
) -> _Written:
    """Describe the output files, and which state goes where, in the same order."""
    from restride.formats.safetensors import lay_out  # noqa: PLC0415 - only when it is written

    selected = list(select_weights(catalog, dtype))
    outputs = [lay_out(_targets(selected), stem="model", max_shard_nbytes=max_shard_nbytes)]
    if states == "all":
        moments = list(select_optimizer(catalog))
        if moments:
            outputs.append(
                lay_out(_targets(moments), stem="optimizer", max_shard_nbytes=max_shard_nbytes)
            )
        selected += moments
        values = msgspec.json.format(msgspec.json.encode(dict(catalog.values)), indent=1) + b"\n"
        outputs.append(Output((OutputFile("state.json", len(values), ((0, values),)),)))
    return selected, Output.joined(outputs), ()


def _lay_out_universal(catalog: Catalog) -> _Written:
    """The same for a universal folder, which only DeepSpeed's own checkpoints have all parts of."""
    from restride.formats.deepspeed.companions import read_companions  # noqa: PLC0415
    from restride.formats.universal import lay_out  # noqa: PLC0415 - only when it is written

    if not catalog.format.startswith("deepspeed"):
        raise UnsupportedError(
            f"a universal folder cannot be made of {catalog.format}: it has no loader state, "
            "scheduler and parameter groups",
            where=catalog.root,
            remedy="convert the DeepSpeed checkpoint itself",
        )
    written = lay_out(catalog, read_companions(catalog))
    return list(written.sources), written.output, written.findings


def _refuse_options(**given: object) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise UnsupportedError(
            f"a universal folder takes no {' and no '.join(named)}: it has every state as it is "
            "stored, one file each",
            remedy="leave it out, or convert with --to safetensors",
        )


def _targets(selected: list[Selected]) -> list[tuple[str, DType, tuple[int, ...]]]:
    return [(item.key, item.dtype, item.entry.layout.full_shape) for item in selected]


def _execute(
    catalog: Catalog, plan: Plan, writer: _OutputWriter | None, observer: DriftTable
) -> int:
    observer.on_plan(PlanStarted(plan.step_count, plan.total_nbytes, plan.projected_nbytes))
    with FilePool() as pool:
        reader = CatalogReader(catalog, pool)
        read_nbytes = StreamingExecutor().execute(plan, reader, writer, observer)
    reader.require_unchanged()
    return read_nbytes


def _inputs(catalog: Catalog) -> list[Path]:
    """What the output must not replace. Files may be links to somewhere else."""
    root = Path(catalog.root)
    return [root, *(root / file.name for file in catalog.files)]


class _OutputWriter:
    """Target files by the number that the output gives them."""

    def __init__(self, directory: AtomicDirectory, output: Output) -> None:
        self._directory = directory
        self._names = [file.name for file in output.files]

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        self._directory.write_exact(self._names[file], start_nbytes, buffer)


def _drift_findings(
    catalog: Catalog, rows: Iterable[ReplicaDrift], *, decided: Replicas | None = None
) -> Iterator[Finding]:
    """One finding for each array and pair of ranks that hold different copies."""
    meshes = {
        (tensor.name, state): entry.layout.mesh
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
    }
    order = {array: place for place, array in enumerate(meshes)}
    for row in sorted(rows, key=lambda r: (order[r.tensor, r.state], r.ranks)):
        mesh = meshes[row.tensor, row.state]
        where = f"tensor {row.tensor!r}, state {row.state!r}"
        ranks = " and ".join(f"{rank} ({_coordinates(mesh, rank)})" for rank in row.ranks)
        largest = "" if row.largest is None else f", by up to {row.largest:.6g}"
        message = (
            f"{where}: ranks {ranks} hold different copies of {row.different_numel} "
            f"of {row.numel} elements{largest}"
        )
        if decided is not None:
            message += f"; written is {_DECIDED[decided]}"
        details = {
            "tensor": row.tensor,
            "state": row.state,
            "ranks": list(row.ranks),
            "numel": row.numel,
            "different_numel": row.different_numel,
            # JSON has no infinity, which is how far a number is from no number.
            "largest": "inf" if row.largest == inf else row.largest,
        }
        severity: Severity = "error" if decided is None else "warning"
        yield Finding(severity, "replica-drift", message, where, details)


_DECIDED: Final = {"check": "the copy", "first": "the first rank's copy", "mean": "their mean"}


def _coordinates(mesh: Mesh, rank: int) -> str:
    return ",".join(f"{name}={at}" for name, at in mesh.coordinates(rank).items())
