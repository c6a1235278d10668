"""``restride convert``: another format, bit for bit."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import click
from msgspec.structs import asdict

from restride import api
from restride.cli.cut_options import cut_options, source_options
from restride.cli.exits import ExitCode
from restride.cli.findings import finding_to_json, show_findings
from restride.cli.numbers import Integer, Number
from restride.cli.options import (
    PathName,
    as_nbytes,
    as_replica_rules,
    json_option,
    memory_option,
    workers_option,
)
from restride.cli.output import open_page, write_json
from restride.cli.part_executors import open_executor
from restride.cli.processes import Process, as_process, process_of
from restride.cli.progress import open_progress
from restride.cli.projection import show_projection
from restride.cli.sections import SectionedCommand
from restride.cli.signals import stop_on_signals
from restride.cli.sizes import format_count, format_duration, format_rate, format_size
from restride.cli.stage_options import stage_options
from restride.cli.waiting import Waiting
from restride.errors import MissingProcessError, RestrideError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Event

    from restride.api import ConvertReport, PartExecutor
    from restride.checkpoint.selection import Target
    from restride.cli.output import Page
    from restride.executors.events import Observer

__all__ = ["command", "show_report"]

_MOST_SHOWN: Final = 12
_EXAMPLES: Final = """\b
Examples:
  restride convert CKPT OUT                         the weights, for from_pretrained
  restride convert CKPT OUT --to deepspeed --dp 8   for load_checkpoint on 8 ranks
  restride convert CKPT OUT --to universal          for engines with load_universal
"""


class _Convert(SectionedCommand):
    sections: ClassVar = {
        "What is written": (
            *("to", "states", "dtype", "max_shard_size", "stage", "replicas"),
            *("optimizer_transform", "hyperparameters", "source_config", "source_rules"),
        ),
        "For which ranks (--to deepspeed)": (
            *("tp", "dp", "ep", "zero", "config", "rules", "plan", "grain"),
            *("pp", "pp_layers", "pp_tied", "zero_init"),
        ),
        "How it is written": ("dry_run", "resume", "force", "no_sync", "memory", "workers"),
        "By several processes": ("process", "wait", "executor", "parts"),
    }


@click.command("convert", cls=_Convert, epilog=_EXAMPLES)
@click.argument("checkpoint", type=PathName())
@click.argument("out", type=PathName())
@click.option(
    "--to",
    type=click.Choice(["safetensors", "universal", "deepspeed"]),
    default="safetensors",
    help="safetensors (default) for from_pretrained and PEFT; deepspeed for load_checkpoint on "
    "any ranks; universal for engines with load_universal.",
)
@click.option(
    "--tp",
    type=Integer(min=1),
    metavar="N",
    help="Tensor-parallel ranks of DeepSpeed's files. Default: as in CHECKPOINT.",
)
@click.option(
    "--dp",
    type=Integer(min=1),
    metavar="N",
    help="Data-parallel ranks. Default: as in CHECKPOINT.",
)
@click.option(
    "--ep",
    type=Integer(min=1),
    metavar="N",
    help="Expert-parallel ranks, out of all (tp times dp). Default: as in CHECKPOINT.",
)
@click.option(
    "--zero",
    type=Integer(min=0, max=3),
    metavar="STAGE",
    help="ZeRO stage of DeepSpeed's own files, 0 to 3. Default: as in CHECKPOINT.",
)
@cut_options
@source_options
@stage_options
@click.option(
    "--zero-init/--no-zero-init",
    default=None,
    help="Whether the model that resumes with ZeRO-3 is made under deepspeed.zero.Init: Muon has "
    "its parameters in another order then. Default: as CHECKPOINT shows.",
)
@click.option(
    "--optimizer-transform",
    is_flag=True,
    help="Where a parameter is stored scaled, let its moments follow, and the learning rate and "
    "epsilon of its group with them. Default: refuse.",
)
@click.option(
    "--hyperparameters",
    metavar="FILE",
    type=PathName(),
    help="JSON with the optimizer's param_groups, which a CHECKPOINT saved with elastic_checkpoint "
    "lacks. Default: the engine that resumes keeps its own.",
)
@click.option(
    "--states",
    type=click.Choice(["weights", "all"]),
    help="Of safetensors the weights alone (default), or the master copies and optimizer states "
    "too. The other formats have all of them.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Type of the weights in safetensors: float32, bfloat16, float16 or float64. Default: as "
    "trained.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=as_nbytes,
    help="Start a new file of safetensors above this size, such as 5GB. Default: 2GB.",
)
@click.option(
    "--stage",
    type=Integer(1, 3),
    metavar="1|2|3",
    help="ZeRO stage of the engines that load a universal folder. Default: that of the source.",
)
@memory_option("all of it but the interpreter, which comes")
@click.option(
    "--replicas",
    multiple=True,
    metavar="[PATTERN=]COPY",
    callback=as_replica_rules,
    help="Where ranks hold different copies: check and refuse (default), first, mean, own (each "
    "rank of a sharded output keeps its own), or the rank that counts, as tp=1 or its number. With "
    "a PATTERN of names, such as '*.c_attn.*=mean', for these tensors. May be repeated; the last "
    "that matches decides.",
)
@workers_option
@click.option(
    "--force",
    is_flag=True,
    help="Replace OUT if restride wrote all of it; throw away what an unfinished run left.",
)
@click.option(
    "--resume", is_flag=True, help="Go on where a run that was stopped or killed left it, or begin."
)
@click.option(
    "--no-sync",
    is_flag=True,
    help="Do not wait until the disk has it: faster. A kill loses nothing; if the machine dies "
    "soon after, a part of OUT may be missing, which `restride check` finds. Of several processes, "
    "what number 0 was told counts.",
)
@click.option(
    "--process",
    metavar="N/M",
    callback=as_process,
    help="Be process N of M, counted from 0: each writes a part of OUT, on a file system that all "
    "of them see. Default: as torchrun (RANK, WORLD_SIZE) or srun say; 0/1 is one process alone.",
)
@click.option(
    "--wait",
    type=Number(min=0),
    default=120.0,
    metavar="SECONDS",
    help="How long to wait for another process that does not come, or has died. Default: 120.",
)
@click.option(
    "--executor",
    metavar="MODULE:FUNCTION",
    help="Let an executor write the parts: what the function returns, such as "
    "concurrent.futures:ProcessPoolExecutor. Needs --parts.",
)
@click.option(
    "--parts",
    type=Integer(min=1),
    metavar="N",
    help="Number of parts for the executor.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be read and written; write nothing.")
@json_option
def command(
    checkpoint: str,
    out: str,
    *,
    to: Target,
    states: Literal["weights", "all"] | None,
    dtype: str | None,
    max_shard_size: int | None,
    stage: int | None,
    tp: int | None,
    dp: int | None,
    ep: int | None,
    zero: int | None,
    config: str | None,
    rules: str | None,
    plan: bool | None,
    grain: int | None,
    pp: int | None,
    pp_layers: str | None,
    pp_tied: dict[str, tuple[int, ...]] | None,
    zero_init: bool | None,
    source_config: str | None,
    source_rules: str | None,
    optimizer_transform: bool,
    hyperparameters: str | None,
    memory: int,
    replicas: tuple[tuple[str, str], ...],
    workers: int | None,
    force: bool,
    resume: bool,
    no_sync: bool,
    process: tuple[int, int] | None,
    wait: float,
    executor: str | None,
    parts: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write another format, or for other ranks, bit for bit.

    Reads CHECKPOINT and writes the folder OUT, which appears under its name only when it is
    complete. Until then all of it is in OUT.partial, from which --resume goes on after any end.
    Values are copied, not computed with; only --dtype, --replicas mean and a layout that is scaled
    change any.
    """
    wanted = api.Wanted(
        to=to,
        states=states,
        dtype=dtype,
        max_shard_nbytes=max_shard_size,
        stage=stage,
        tp=tp,
        dp=dp,
        ep=ep,
        zero=zero,
        config=config,
        rules=rules,
        plan=plan,
        grain=grain,
        optimizer_transform=optimizer_transform or None,
        pp=pp,
        pp_layers=pp_layers,
        pp_tied=pp_tied,
        hyperparameters=hyperparameters,
        zero_init=zero_init,
        source_config=source_config,
        source_rules=source_rules,
    )
    this = _this(process, executor)
    if dry_run:
        if not this.number:
            with Waiting("reading headers and planning"):
                projection = api.dry_run(
                    *(checkpoint, out, wanted),
                    budget_nbytes=memory,
                    workers=workers,
                    replicas=replicas,
                    force=force,
                    resume=resume,
                )
            show_projection(projection, out, as_json=as_json)
        return ExitCode.OK
    with _running(this, executor) as (pool, observer, stop):
        report = api.convert(
            *(checkpoint, out),
            **asdict(wanted),
            budget_nbytes=memory,
            workers=workers,
            replicas=replicas,
            force=force,
            resume=resume,
            durable=not no_sync,
            observer=observer,
            stop=stop,
            process=None if executor and process is None else (this.number, this.count),
            executor=pool,
            parts=parts,
            wait_seconds=wait,
        )
    if as_json and not this.number:
        write_json(_to_json(report))
    elif not this.number:
        show_report(open_page(), report, out)
    return ExitCode.OK


def _this(process: tuple[int, int] | None, executor: str | None) -> Process:
    """Which process this one is: an executor has all the others."""
    if process is not None:
        return Process(*process, "--process")
    return process_of({} if executor else os.environ)


@contextmanager
def _running(
    this: Process, executor: str | None
) -> Iterator[tuple[PartExecutor | None, Observer, Event]]:
    """What runs the parts, what shows progress, and what ends the run; process 0 alone shows."""
    with (
        _named(this),
        open_executor(executor) as pool,
        open_progress("converting", is_shown=not this.number) as observer,
        stop_on_signals(lambda: observer.is_planned, is_told=not this.number) as stop,
    ):
        yield pool, observer, stop


@contextmanager
def _named(this: Process) -> Iterator[None]:
    """Say in errors which process it was, and where it has its number from."""
    try:
        yield
    except MissingProcessError as error:
        if this.count > 1:
            error.located(f"{this.words} ({this.told_by})")
            error.remedy = f"start all of them, or one alone with --process 0/1; {error.remedy}"
            error.remedy = error.remedy.removesuffix("; ")
        raise
    except RestrideError as error:
        if this.number:
            error.located(this.words)
        raise


def show_report(page: Page, report: ConvertReport, out: str) -> None:
    """Write what was read, written and noticed; `out` is the folder as the user called it."""
    show_findings(page, report.findings)
    rate = ""
    if report.seconds > 1:  # below that it says more of the start than of the work
        rate = f" ({format_rate(report.written_nbytes, report.seconds)})"
    resumed = ""
    if report.resumed_nbytes:
        resumed = f" ({format_size(report.resumed_nbytes)} of it before)"
    page.line(
        f"{out}: {format_count(report.tensor_count, 'array')} in "
        f"{format_count(len(report.files), 'file')}, {format_size(report.written_nbytes)} written"
        f"{resumed}, "
        f"{format_size(report.read_nbytes)} read, {format_duration(report.seconds)}{rate}, "
        f"memory below {format_size(report.projected_nbytes)}",
        "good",
    )
    for name in report.files[:_MOST_SHOWN]:
        page.line(f"  {name}")
    if len(report.files) > _MOST_SHOWN:
        page.line(f"  ... and {len(report.files) - _MOST_SHOWN} more")


def _to_json(report: ConvertReport) -> dict[str, object]:

    return {
        "out": str(report.out),
        "files": list(report.files),
        "tensors": report.tensor_count,
        "written_nbytes": report.written_nbytes,
        "read_nbytes": report.read_nbytes,
        "resumed_nbytes": report.resumed_nbytes,
        "projected_nbytes": report.projected_nbytes,
        "seconds": report.seconds,
        "findings": [finding_to_json(finding) for finding in report.findings],
    }
