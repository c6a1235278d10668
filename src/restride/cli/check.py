"""``restride check``: is it whole, consistent, intact?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import replace

from restride import api
from restride.cli.contents import catalog_to_json, show_headline
from restride.cli.cut_options import source_options
from restride.cli.exits import concluded
from restride.cli.findings import finding_to_json, show_findings
from restride.cli.options import PathName, json_option, memory_option
from restride.cli.output import open_page, write_json
from restride.cli.progress import open_progress
from restride.cli.sizes import format_count, format_size
from restride.cli.stage_options import tied_option
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.api import CheckReport
    from restride.checking import Depth
    from restride.cli.output import Page

__all__ = ["command", "show_report"]

_EXAMPLES: Final = """\b
Examples:
  restride check CKPT                        before it is converted or kept
  restride check CKPT --read headers         of terabytes, first
  restride check OUT                         an output: every byte of it
  restride check OUT --against before.json   fingerprints, kept from before
"""


@click.command("check", epilog=_EXAMPLES)
@click.argument("checkpoint", type=PathName())
@click.option(
    "--against",
    metavar="FILE",
    type=PathName(),
    help="Compare with the fingerprints that restride fingerprint -o FILE has written, or with "
    "those in the restride.json of a conversion, which may be named by its folder.",
)
@click.option(
    "--read",
    type=click.Choice(["headers", "copies", "all"]),
    default="all",
    metavar="WHAT",
    help="headers: no tensor, within seconds; copies: also what is there more than once, and "
    "weights with their master copies; all (default): also every byte that has a checksum.",
)
@tied_option
@source_options
@memory_option("plan and buffers; the interpreter and the names and places of the checkpoint come")
@json_option
def command(
    checkpoint: str,
    *,
    against: str | None,
    read: Depth,
    pp_tied: dict[str, tuple[int, ...]] | None,
    source_config: str | None,
    source_rules: str | None,
    memory: int,
    as_json: bool,
) -> int:
    """Is a checkpoint whole, consistent and intact? Prove it.

    Proves that every element of every tensor and state is held by some rank and that each shard
    lies inside its file. Compares what more than one rank holds, bit for bit; weights with their
    master copies; and every byte of an output of convert with what was written, of other files
    with the checksums in them (safetensors have none). Exits with 1 where something is found, and
    with 2 where a file is missing or damaged so that the rest cannot be read.
    """
    kept = None
    if against is not None:
        kept = against, sum(map(len, api.read_fingerprints(against).values()))
    with open_progress("checking") as observer:
        report = api.check(
            checkpoint,
            read=read,
            budget_nbytes=memory,
            pp_tied=pp_tied,
            source_config=source_config,
            source_rules=source_rules,
            observer=observer,
        )
    if against is not None:
        with open_progress("comparing fingerprints") as observer:
            deviations = api.check_against(
                checkpoint,
                against,
                budget_nbytes=memory,
                pp_tied=pp_tied,
                source_config=source_config,
                source_rules=source_rules,
                observer=observer,
            )
        report = replace(report, findings=(*report.findings, *deviations))
    code = concluded(is_fine=report.verdict == "ok")
    if as_json:
        findings = [finding_to_json(finding) for finding in report.findings]
        content = catalog_to_json(report.catalog)
        write_json(
            content
            | {
                "verdict": report.verdict,
                "findings": findings,
                "compared_nbytes": report.compared_nbytes,
                "rounded_nbytes": report.rounded_nbytes,
                "verified_nbytes": report.verified_nbytes,
                "read": report.read,
            }
        )
    else:
        show_report(open_page(), checkpoint, report, kept)
    return code


def show_report(
    page: Page, path: str, report: CheckReport, kept: tuple[str, int] | None = None
) -> None:
    """Write what was checked, the findings, then the verdict.

    Args:
        page: Where to.
        path: The checkpoint, as it was named.
        report: What was found.
        kept: The file of fingerprints that it was compared with, and how many are in there.
    """
    show_headline(page, path, report.catalog)
    show_findings(page, report.findings)
    arrays = sum(len(tensor.states) for tensor in report.catalog.tensors)
    if report.verdict == "ok":
        for sentence in _proved(report, arrays, kept):
            page.line(f"ok: {sentence}", "good")
        _show_unread(page, report)
        return
    counts = Counter(finding.severity for finding in report.findings)
    parts = [
        format_count(counts[severity], severity)
        for severity in ("error", "warning")
        if counts[severity]
    ]
    page.line(f"{' and '.join(parts)} in {format_count(arrays, 'array')}{_advice(report)}", "bad")
    _show_unread(page, report)


def _show_unread(page: Page, report: CheckReport) -> None:
    """Say what a check that was told to read less leaves open."""
    if report.read != "all":
        compared = "no copies were compared, and " if report.read == "headers" else ""
        page.line(f"not all was read: {compared}no bytes held against checksums", "warn")


def _advice(report: CheckReport) -> str:
    """What to compare with, where all that is wrong is that weights alone were converted."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    are_states = (
        finding.kind == "fingerprint-missing" and finding.details["state"] != "weight"
        for finding in errors
    )
    if not errors or not all(are_states):
        return ""
    return "; of weights alone, take the fingerprints with --states weights"


def _proved(report: CheckReport, arrays: int, kept: tuple[str, int] | None) -> Iterator[str]:
    whole = "the one array is" if arrays == 1 else f"all {format_count(arrays, 'array')} are"
    alike = (
        f", and {format_size(report.compared_nbytes)} that more than one rank holds are the same "
        "everywhere"
    )
    yield f"{whole} whole{alike if report.compared_nbytes else ''}"
    if report.rounded_nbytes:
        rounded = ", rounded" if _is_rounded(report) else ""
        yield f"{format_size(report.rounded_nbytes)} of weights are their master copies{rounded}"
    if report.verified_nbytes:
        yield f"{format_size(report.verified_nbytes)} of files are what was written"
    if kept is not None:
        against, count = kept
        those = "the one fingerprint" if count == 1 else f"all {format_count(count, 'fingerprint')}"
        yield f"{those} in {against} {which(count, 'is that', 'are those')} of the checkpoint"


def _is_rounded(report: CheckReport) -> bool:
    """Whether any weight is of another kind of number than its master copy."""
    states = (tensor.states for tensor in report.catalog.tensors)
    return any(
        "weight" in found and "fp32" in found and found["weight"].dtype != found["fp32"].dtype
        for found in states
    )
