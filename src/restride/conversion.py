"""Write a checkpoint in another form, bit for bit, within a memory budget."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.decisions import DEFAULT, read_rules
from restride.checkpoint.selection import COPIED
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import NullObserver, PlanFinished
from restride.executors.running import run_plan
from restride.executors.sources import default_workers
from restride.exports import Wanted, lay_out_export
from restride.formats._registry import open_catalog
from restride.planning.conversion import Job, plan_conversion
from restride.storage.atomic import atomic_directory

if TYPE_CHECKING:
    from os import PathLike

    from restride.checkpoint.catalog import Catalog, Finding
    from restride.checkpoint.decisions import Saying
    from restride.checkpoint.output import Output
    from restride.checkpoint.selection import States, Target
    from restride.executors.events import Observer
    from restride.storage.atomic import AtomicDirectory

__all__ = ["ConvertReport", "convert"]

_DEFAULT_BUDGET_NBYTES: Final = 512 << 20


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


def convert(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: Target = "safetensors",
    states: States = "weights",
    dtype: str | None = None,
    max_shard_nbytes: int | None = None,
    stage: int | None = None,
    tp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    zero: int | None = None,
    config: str | PathLike[str] | None = None,
    rules: str | PathLike[str] | None = None,
    plan: bool | None = None,
    grain: int | None = None,
    budget_nbytes: int = _DEFAULT_BUDGET_NBYTES,
    replicas: Saying = DEFAULT,
    force: bool = False,
    observer: Observer | None = None,
) -> ConvertReport:
    """Write a checkpoint in another form, bit for bit, within a memory budget.

    As safetensors, ``model*.safetensors`` holds the weights under the names of the model. With all
    states, ``optimizer*.safetensors`` holds the rest as ``TENSOR/STATE``, and ``state.json`` what
    is not a tensor. As a universal folder of DeepSpeed it holds all states, one file each, and
    ``load_checkpoint(out)`` of an engine with ``load_universal`` resumes from it. In DeepSpeed's
    own sharded form an engine of `tp` times `dp` ranks and that ZeRO stage resumes from it with
    plain ``load_checkpoint(out)``. The output appears under its name when it is complete and
    durable, or not at all.

    Args:
        path: As for `open`.
        out: Folder to write.
        to: Format of the output.
        states: Only the weights, or everything. What DeepSpeed resumes from always has everything.
        dtype: Type of the weights in safetensors, where it is not the one they were trained in.
        max_shard_nbytes: Largest file of safetensors; a larger model is split, with an index.
        stage: ZeRO stage of the engines that load a universal folder: 1 and 2 are one shape, 3 is
            another. By default that of the source.
        tp: Tensor-parallel ranks of the sharded form; by default those of the source, as for `dp`
            and `zero`.
        dp: Data-parallel ranks: all ranks, divided by `tp`.
        ep: Expert-parallel ranks of AutoEP, a part of the data-parallel ones.
        zero: ZeRO stage.
        config: The model's ``config.json``, where the source does not say how other ranks cut it;
            by default the one in or beside the checkpoint.
        rules: A file of the user's own rules for that.
        plan: Whether the engine follows transformers' tensor-parallel plan; by default as the run
            did that wrote the source.
        grain: DeepSpeed's `tp_grain_size`; by default what the source's configuration says.
        budget_nbytes: Most memory for plan and buffers.
        replicas: What to do where ranks hold different copies of the same elements: refuse
            (``"check"``), take that of the lowest rank (``"first"``), the mean (``"mean"``), or
            that of one rank, by its number or by coordinates such as ``"tp=1"``. Or rules such as
            ``[("*.c_attn.*", "mean"), ("lm_head.*", "tp=1")]``, names of tensors in which ``*``
            stands for anything: the last that matches decides, the rest is checked.
        force: Replace a folder that is there.
        observer: Receives progress.

    Returns:
        What was written.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `open`.
        RuleError: Nothing says how a parameter is cut for other ranks, or leaves several answers.
        ExistsError: There is something at `out`.
        BudgetError: The budget is too small for any buffer.
        CoverageError: An element of a tensor is in no file.
        PlanError: `replicas` names no rank or no tensor, or a rank that has no copy of something.
        ReplicaError: Replicas differ and `replicas` does not say which counts.
    """
    started = time.perf_counter()
    catalog = open_catalog(path)
    wanted = Wanted(
        to, states, dtype, max_shard_nbytes, stage, tp, dp, ep, zero, config, rules, plan, grain
    )
    export = lay_out_export(catalog, wanted)
    output = export.output
    decided = read_rules(replicas, catalog)
    jobs = [
        Job(
            chosen.tensor,
            chosen.state,
            chosen.entry,
            target.layout,
            target.regions,
            target.dtype,
            decided.decide(chosen.tensor, chosen.state),
        )
        for chosen, target in zip(export.sources, output.tensors, strict=True)
    ]
    planned = plan_conversion(
        catalog.files,
        jobs,
        budget_nbytes=budget_nbytes,
        workers=default_workers(),
    )
    table = DriftTable(observer or NullObserver(), {})
    with atomic_directory(out, force=force, inputs=_inputs(catalog)) as directory:
        directory.create(output)
        read_nbytes = run_plan(catalog, planned, _OutputWriter(directory, output), table)
    seconds = time.perf_counter() - started
    table.on_finish(PlanFinished(read_nbytes, planned.total_nbytes, seconds))
    return ConvertReport(
        out=Path(out),
        files=tuple(file.name for file in output.files),
        tensor_count=sum(chosen.state != COPIED for chosen in export.sources),
        read_nbytes=read_nbytes,
        written_nbytes=planned.total_nbytes,
        projected_nbytes=planned.projected_nbytes,
        seconds=seconds,
        findings=(
            *catalog.findings,
            *export.findings,
            *drift_findings(catalog, table.totals(planned), decided=decided),
        ),
    )


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
