"""``restride check``: is it whole, consistent, intact?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from restride import api
from restride.cli.contents import catalog_to_json, finding_to_json, show_findings, show_summary
from restride.cli.exits import ExitCode
from restride.cli.options import json_option
from restride.cli.output import open_page, write_json
from restride.cli.progress import open_progress
from restride.cli.sizes import format_count, format_size

if TYPE_CHECKING:
    from restride.api import CheckReport
    from restride.cli.output import Page

__all__ = ["command", "show_report"]


@click.command("check")
@click.argument("checkpoint")
@json_option
def command(checkpoint: str, *, as_json: bool) -> int:
    """Is a checkpoint whole, consistent and intact? Prove it.

    Proves for every tensor and state that each element is held by some rank and each byte of each
    shard belongs to one element, and compares what more than one rank holds, bit for bit. Exits
    with 1 where something is found.
    """
    with open_progress("checking") as observer:
        report = api.check(checkpoint, observer=observer)
    if as_json:
        findings = [finding_to_json(finding) for finding in report.findings]
        content = catalog_to_json(report.catalog)
        write_json(
            content
            | {
                "verdict": report.verdict,
                "findings": findings,
                "compared_nbytes": report.compared_nbytes,
            }
        )
    else:
        page = open_page()
        show_summary(page, checkpoint, report.catalog)
        show_report(page, report)
    return ExitCode.OK if report.verdict == "ok" else ExitCode.FINDING


def show_report(page: Page, report: CheckReport) -> None:
    """Write the findings, then the verdict."""
    page.line()
    show_findings(page, report.findings)
    arrays = sum(len(tensor.states) for tensor in report.catalog.tensors)
    if report.verdict == "ok":
        page.line(
            f"ok: all {format_count(arrays, 'array')} are whole, and "
            f"{format_size(report.compared_nbytes)} that more than one rank holds are the same "
            "everywhere",
            "good",
        )
        return
    counts = Counter(finding.severity for finding in report.findings)
    parts = [
        format_count(counts[severity], severity)
        for severity in ("error", "warning")
        if counts[severity]
    ]
    page.line(f"{' and '.join(parts)} in {format_count(arrays, 'array')}", "bad")
