"""Write a checkpoint in another form, bit for bit, within a memory budget."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from restride.checkpoint.decisions import DEFAULT
from restride.checkpoint.selection import COPIED
from restride.errors import ExecutionError, PlanError, RestrideError, StoppedError
from restride.executors.drift import DriftTable, drift_findings
from restride.executors.events import NullObserver, PlanFinished, PlanStarted
from restride.executors.identity import differs_from, job_digest, package_version
from restride.executors.journaled import SYNC_NBYTES
from restride.executors.leading import WAIT_SECONDS, Lead
from restride.executors.manifests import is_written, told_of
from restride.executors.progress import Continued
from restride.executors.stopping import StopsWith
from restride.executors.writing import Written, is_worth_resuming, write_output, write_part
from restride.exports import Wanted
from restride.frozen import Frozen
from restride.preparation import prepare
from restride.storage.joining import LOCK_SECONDS, joined_output
from restride.storage.paths import as_path
from restride.storage.ranges import FilePool
from restride.storage.unfinished import Purpose, unfinished_output
from restride.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike
    from threading import Event

    from restride.checkpoint.catalog import Finding
    from restride.checkpoint.decisions import Saying
    from restride.checkpoint.selection import States, Target
    from restride.executors.events import Observer
    from restride.executors.leading import Started
    from restride.preparation import Prepared
    from restride.storage.journal import Record
    from restride.storage.unfinished import Unfinished

__all__ = ["ConvertReport", "PartExecutor", "convert"]

_MOST_PROCESSES: Final = 1 << 16
_SECONDS_BETWEEN_LOOKS: Final = 0.02


class PartExecutor(Protocol):
    """What runs parts of a conversion: an executor as of `concurrent.futures`."""

    def submit(self, function: Callable[..., object], /, *arguments: object) -> Started:
        """Start a call somewhere; the function and its arguments can be pickled."""


class ConvertReport(Frozen):
    """What a conversion did.

    Attributes:
        out: Folder that was written.
        files: Names of the files in it, without its manifest (``restride.json``).
        tensor_count: Number of arrays written.
        read_nbytes: Bytes read from the tensors of the source.
        written_nbytes: Bytes of tensors that are in the output.
        projected_nbytes: Upper bound of the memory that it took, beside the program itself.
        seconds: Wall time, opening and syncing included.
        findings: What the user should know: what the reader saw, replicas that were decided.
        resumed_nbytes: Bytes of tensors that an earlier run had written. They were read back and
            are what it wrote; all of them, without a look, where it had finished.
    """

    out: Path
    files: tuple[str, ...]
    tensor_count: int
    read_nbytes: int
    written_nbytes: int
    projected_nbytes: int
    seconds: float
    findings: tuple[Finding, ...]
    resumed_nbytes: int = 0


def convert(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: Target = "safetensors",
    states: States | None = None,
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
    optimizer_transform: bool | None = None,
    pp: int | None = None,
    pp_layers: str | Sequence[int] | None = None,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    hyperparameters: str | PathLike[str] | None = None,
    zero_init: bool | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
    budget_nbytes: int | None = None,
    workers: int | None = None,
    replicas: Saying = DEFAULT,
    force: bool = False,
    resume: bool = False,
    observer: Observer | None = None,
    stop: Event | None = None,
    sync_nbytes: int = SYNC_NBYTES,
    durable: bool = True,
    process: tuple[int, int] | None = None,
    executor: PartExecutor | None = None,
    parts: int | None = None,
    wait_seconds: float = WAIT_SECONDS,
) -> ConvertReport:
    """Write a checkpoint in another form, bit for bit, within a memory budget.

    As safetensors, ``model*.safetensors`` holds the weights under the names of the model. With all
    states, ``optimizer*.safetensors`` holds the rest as ``TENSOR/STATE``, and ``state.json`` what
    is not a tensor. As a universal folder of DeepSpeed it holds all states, one file each, and
    ``load_checkpoint(out)`` of an engine with ``load_universal`` resumes from it. In DeepSpeed's
    own sharded form an engine of `tp` times `dp` ranks and that ZeRO stage resumes from it with
    plain ``load_checkpoint(out)``. The output appears under its name when it is complete and
    durable, or not at all; ``restride.json`` in it says what was written, and `check` holds the
    bytes against that.

    A run that was killed or failed leaves ``OUT.partial``, from which one with `resume` goes on.

    Several processes may do it together, on any machines that share a file system: each calls this
    with the same arguments and its own `process`, and number 0 publishes the output. Or one calls
    it with an `executor`, which runs the parts. The output is the same, byte for byte.

    Args:
        path: As for `open`.
        out: Folder to write.
        to: Format of the output.
        states: Only the weights (the default of safetensors), or everything. What DeepSpeed resumes
            from always has everything.
        dtype: Type of the weights in safetensors, where it is not the one they were trained in.
        max_shard_nbytes: Largest file of safetensors, 2 GB where nothing is said; a larger model
            is split, with an index.
        stage: ZeRO stage of the engines that load a universal folder: 1 and 2 are one shape, 3 is
            another. By default that of the source.
        tp: Tensor-parallel ranks of the sharded form; by default those of the source, as for `dp`
            and `zero`.
        dp: Data-parallel ranks: all ranks, divided by `tp` and `pp`.
        ep: Expert-parallel ranks of AutoEP, a part of the data-parallel ones.
        zero: ZeRO stage.
        config: The model's ``config.json``, where the source does not say how other ranks cut it;
            by default the one in or beside the checkpoint.
        rules: A file of the user's own rules for that.
        plan: Whether the engine follows transformers' tensor-parallel plan; by default as the run
            did that wrote the source.
        grain: DeepSpeed's `tp_grain_size`; by default what the source's configuration says.
        optimizer_transform: Whether moments follow a tensor that the target stores scaled, with
            the learning rate and epsilon of its group: possible where all of the group are scaled
            alike. Without it such a conversion is refused.
        pp: Stages of a pipeline; by default those of the source, with the same layers.
        pp_layers: How the layers are dealt out to other stages, as the module that resumes must do
            it too: the first layer of each stage, such as ``[0, 3, 6]``, or a `partition_method` of
            PipelineModule, ``"parameters"`` (the default) or ``"uniform"``, with the number of all
            layers where that matters, as ``"uniform:9"``.
        pp_tied: For the key of a tied module all layers that use it, such as ``{"embed": [0, 8]}``,
            where the source does not tell.
        hyperparameters: A JSON file with the settings of the parameter groups, a list of one object
            for each, where DeepSpeed's `elastic_checkpoint` left them out of the source. Without it
            what can be written is what an engine loads that keeps its own.
        zero_init: Whether the engine of ZeRO-3 that resumes makes its model under
            ``deepspeed.zero.Init``: where DeepSpeed's Muon trains, it has the parameters in another
            order then, and the source does not always tell.
        source_config: The model's ``config.json``, where the files of the source do not say how its
            own tensor-parallel ranks cut it: those of DeepSpeed before 0.19 and of models that
            somebody else cut. It is taken to be cut as AutoTP does it. Also for `config`, where
            that is not given.
        source_rules: A file of the user's own rules for that, which go first.
        budget_nbytes: Most memory beside the program itself. Default: 512 MiB, or a quarter of what
            the cgroup allows where that is less.
        workers: Threads. Default: one for each core that this process may use, up to four.
        replicas: What to do where ranks hold different copies of the same elements: refuse
            (``"check"``), take that of the lowest rank (``"first"``), the mean (``"mean"``), that
            of one rank, by its number or by coordinates such as ``"tp=1"``, or in sharded files
            leave to each rank the copy of the rank in its place (``"own"``). Or rules such as
            ``[("*.c_attn.*", "mean"), ("lm_head.*", "tp=1")]``, names of tensors in which ``*``
            stands for anything: the last that matches decides, the rest is checked.
        force: Replace a folder of which restride wrote all; throw away what an earlier run left.
        resume: Go on where an earlier run into `out` stopped, if there was one.
        observer: Receives progress.
        stop: When somebody sets it, the run stops at the end of a step.
        sync_nbytes: Bytes after which they are made durable, so that a kill costs no more.
        durable: Whether to wait until the disk has the output before it gets its name. Without it
            a run is faster and survives any death of its process all the same; but if the machine
            dies soon after, `out` may be there in part, which `check` finds by its manifest.
        process: Number of this process, from 0, and how many write the output together. Number 0
            leads: it returns when all of the output is there. Memory and threads are those of each.
        executor: Anything that has ``submit`` as the executors of `concurrent.futures`, such as
            `ProcessPoolExecutor` or Dask's ``Client.get_executor()``: it runs the parts, in
            processes that see the same files under the same names. This process copies nothing.
        parts: How many parts an executor gets: it does not say how many run at one time.
        wait_seconds: How long to wait for a process that is not there: to come, or to come back.

    Returns:
        What was written; with a `process` above 0, what this process wrote of it.

    Raises:
        FormatError, UnsupportedError, ExecutionError: As for `open`. A file that cannot be written
            is an ExecutionError as well, and so is a run into the same place.
        RuleError: What is said of the cut of a parameter leaves several answers, or is not so.
        CorruptError: A file is missing, or files are of different saves.
        ExistsError: Something is there or unfinished, and is not to be gone on with or replaced.
        BudgetError: The budget is too small for any buffer.
        CoverageError: An element of a tensor is in no file.
        PlanError: `replicas` names what is not there, or there is not even one thread.
        ReplicaError: Replicas differ and `replicas` does not say which counts.
        MissingProcessError: Another process did not come, or ended before its part was done.
        StoppedError: `stop` was set.
    """
    wanted = Wanted(
        *(to, states, dtype, max_shard_nbytes, stage, tp, dp, ep, zero, config, rules, plan, grain),
        optimizer_transform=optimizer_transform or None,
        pp=pp,
        pp_layers=pp_layers,
        pp_tied=pp_tied,
        hyperparameters=hyperparameters,
        zero_init=zero_init,
        source_config=source_config,
        source_rules=source_rules,
    )
    number, count = _require_process(process, executor, parts)
    if not wait_seconds >= 0:
        raise PlanError(f"wait_seconds is {wait_seconds}", remedy="wait for 0 s or longer")
    order = _PartOrder(
        *(as_path(path), as_path(out), wanted, number, count, budget_nbytes, workers, replicas),
        *(force, resume, sync_nbytes, durable, wait_seconds),
    )
    if number:
        return _convert_part(order, stop, observer)
    if executor is not None:
        # Before there is any file or lock that a process which it forks would keep open.
        _require_working(executor, wait_seconds, stop)
    return _convert_first(order, executor, stop, observer)


class _PartOrder(Frozen):
    """What a process that writes has to know; those of an executor get it as a pickle."""

    path: str
    out: str
    wanted: Wanted
    number: int
    count: int
    budget_nbytes: int | None
    workers: int | None
    replicas: Saying
    force: bool
    resume: bool
    sync_nbytes: int
    durable: bool
    wait_seconds: float
    said: Mapping[str, object] | None = None

    def described(self, first: Record) -> Record:
        """The first record of the journal, with paths as the user said them.

        Where the order came to another folder, they had to be spelled out.
        """
        return first if self.said is None else {**first, **self.said}

    def prepared(self, pool: FilePool) -> Prepared:
        """The conversion, planned."""
        return prepare(
            *(self.path, self.wanted, pool),
            budget_nbytes=self.budget_nbytes,
            workers=self.workers,
            replicas=self.replicas,
            has_records=self.resume or self.count > 1,
        )


def _require_process(
    process: tuple[int, int] | None, executor: PartExecutor | None, parts: int | None
) -> tuple[int, int]:
    """Number of this process, and how many there are."""
    if (executor is None) != (parts is None):
        raise PlanError("--executor and --parts go together", remedy="give both")
    if executor is not None and process is not None:
        raise PlanError(
            "an executor runs all parts, and a process is one of several that write a part each",
            remedy="give one of the two",
        )
    number, count = process or (0, 1)
    if parts is not None:
        number, count = 0, parts + 1
    if not 0 <= number < count or (parts is not None and parts < 1) or count > _MOST_PROCESSES:
        raise PlanError(
            f"there is no process {number} of {count}",
            remedy=f"count processes from 0, and have 1 to {_MOST_PROCESSES} of them or of parts",
        )
    return number, count


def _convert_first(
    order: _PartOrder,
    executor: PartExecutor | None,
    stop: Event | None,
    observer: Observer | None,
) -> ConvertReport:
    """Write the output, alone or with others, and publish it."""
    started = time.perf_counter()
    progress = Continued(observer or NullObserver())
    table = DriftTable(progress)
    with FilePool() as pool:
        prepared = order.prepared(pool)
        task, first = prepared.task, prepared.first
        total_nbytes = task.plan.total_nbytes
        prepared.warn(table)
        table.on_plan(PlanStarted(task.plan.step_count, total_nbytes, task.projected_nbytes))
        lead = _lead(order, executor, first)
        with (
            unfinished_output(
                order.out,
                _purpose(first),
                force=order.force,
                resume=order.resume,
                inputs=prepared.inputs,
                durable=order.durable,
                patience_seconds=LOCK_SECONDS if lead else 0.0,
            ) as place,
            _kept(place, total_nbytes),
        ):
            written = write_output(
                *(task, place, first, prepared.reader, table, progress),
                sync_nbytes=order.sync_nbytes,
                stop=stop,
                lead=lead,
            )
    seconds = time.perf_counter() - started
    table.on_finish(PlanFinished(written.read_nbytes, total_nbytes, seconds))
    return _report(Path(order.out), prepared, written, table, seconds)


def _lead(order: _PartOrder, executor: PartExecutor | None, first: Record) -> Lead | None:
    """How others are led; None where there are none."""
    if order.count == 1:
        return None
    start = None if executor is None else partial(_submit, executor, order, first)
    return Lead(order.count, job_digest(first), order.wait_seconds, start)


def _convert_part(
    order: _PartOrder, stop: Event | None, observer: Observer | None
) -> ConvertReport:
    """Write the part of a process that is not the first."""
    started, stop = time.perf_counter(), StopsWith(stop)
    progress = Continued(observer or NullObserver())
    table = DriftTable(progress)
    with FilePool() as pool:
        prepared = order.prepared(pool)
        prepared.warn(table)
        first = order.described(prepared.first)
        with joined_output(
            *(order.out, _purpose(first), job_digest(first), order.number, order.count),
            stop=stop,
            wait_seconds=order.wait_seconds,
            force=order.force,
            resume=order.resume,
            durable=order.durable,
        ) as joined:
            written = Written(0, 0, 0)
            if joined is not None:
                written = write_part(
                    *(prepared.task, joined, prepared.reader, table, progress),
                    sync_nbytes=order.sync_nbytes,
                    stop=stop,
                )
    seconds = time.perf_counter() - started
    return _report(Path(order.out), prepared, written, table, seconds)


def _run_part(order: _PartOrder) -> None:
    """What an executor runs."""
    _convert_part(order, None, None)


def _submit(executor: PartExecutor, order: _PartOrder, first: Record) -> Mapping[int, Started]:
    """Give all parts to an executor. It may run them in another folder."""
    wanted = order.wanted
    files: dict[str, Any] = {name: path and _absolute(path) for name, path in wanted.files.items()}
    order = replace(
        order,
        path=_absolute(order.path),
        out=_absolute(order.out),
        wanted=replace(wanted, **files),
        said={"options": first["options"]},
    )
    return {
        number: executor.submit(_run_part, replace(order, number=number))
        for number in range(1, order.count)
    }


def _absolute(path: str | PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))  # noqa: PTH100 - links are not followed


def _require_working(executor: PartExecutor, wait_seconds: float, stop: Event | None) -> None:
    """Let an executor do something, and make sure that it would do the same as this process."""
    try:
        started = executor.submit(package_version)
    except Exception as error:  # whatever a foreign executor raises
        raise ExecutionError(
            f"the executor takes no work ({type(error).__name__}: {error})"
        ) from error
    deadline = time.monotonic() + wait_seconds
    while not started.done():
        if stop is not None and stop.is_set():
            raise StoppedError("stopped")
        if time.monotonic() > deadline:
            started.cancel()
            raise ExecutionError(
                f"the executor did not start anything within {wait_seconds:.0f} s",
                remedy="see whether it has workers, or wait longer for them",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    failure = started.exception()
    if failure is not None:
        raise ExecutionError(
            f"the executor cannot run restride ({type(failure).__name__}: {failure})"
        ) from failure
    theirs = started.result()
    if theirs != package_version():
        raise ExecutionError(
            f"the executor has restride {theirs}, and this process {package_version()}",
            remedy="install the same version for both",
        )


def _purpose(first: Record) -> Purpose:
    return Purpose(
        first,
        partial(differs_from, first),
        partial(is_written, job=job_digest(first)),
        partial(told_of, first=first),
    )


def _report(
    out: Path, prepared: Prepared, written: Written, table: DriftTable, seconds: float
) -> ConvertReport:
    catalog, export, task = prepared.catalog, prepared.export, prepared.task
    drift = drift_findings(catalog, table.totals(task.plan), decided=prepared.decided)
    return ConvertReport(
        out=out,
        files=tuple(file.name for file in export.output.files),
        tensor_count=sum(chosen.state != COPIED for chosen in export.sources),
        read_nbytes=written.read_nbytes,
        written_nbytes=written.nbytes,
        projected_nbytes=task.projected_nbytes,
        seconds=seconds,
        findings=(*catalog.findings, *export.findings, *prepared.noticed, *drift),
        resumed_nbytes=written.resumed_nbytes,
    )


@contextmanager
def _kept(place: Unfinished, total_nbytes: int) -> Iterator[None]:
    """Say how to go on after an error, and throw away what no later run could use."""
    try:
        yield
    except RestrideError as error:
        if not is_worth_resuming(error):
            place.keeps = False
        elif place.keeps and not place.is_published:
            error.remedy = f"{error.remedy}; " if error.remedy else ""
            error.remedy += _how_to_resume(place, total_nbytes)
        raise
    except BaseException as error:
        if place.keeps and not place.is_published:
            error.add_note(_how_to_resume(place, total_nbytes))
        raise


def _how_to_resume(place: Unfinished, total_nbytes: int) -> str:
    done_nbytes = place.done_nbytes + place.done_elsewhere_nbytes
    return (
        f"{format_size(done_nbytes)} of {format_size(total_nbytes)} are done and kept in "
        f"{place.folder}: run it again with --resume"
    )
