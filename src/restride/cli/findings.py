"""What was noticed of a checkpoint, as a page and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from restride.cli.drift import KIND as DRIFT
from restride.cli.drift import show_drift

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.checkpoint.catalog import Finding
    from restride.cli.output import Page, Tone

__all__ = ["finding_to_json", "show_findings"]

_MOST_OF_A_KIND = 5
_TONES: dict[str, Tone] = {"error": "bad", "warning": "warn", "note": "dim"}


def finding_to_json(finding: Finding) -> dict[str, object]:
    """One finding, for machines."""
    return {
        "severity": finding.severity,
        "kind": finding.kind,
        "where": finding.where,
        "message": finding.message,
        "details": dict(finding.details),
    }


def show_findings(page: Page, findings: Iterable[Finding]) -> None:
    """Write one line for each finding, then copies that differ as a table.

    One lost file leaves a hole in every array: of the same kind only the first few are shown.
    """
    findings = tuple(findings)
    counts = Counter(finding.kind for finding in findings)
    shown: Counter[str] = Counter()
    for finding in findings:
        if finding.kind == DRIFT:
            continue
        shown[finding.kind] += 1
        if shown[finding.kind] <= _MOST_OF_A_KIND:
            page.line(f"{finding.severity}: {finding.message} [{finding.kind}]", _tone(finding))
        elif shown[finding.kind] == counts[finding.kind]:
            more = counts[finding.kind] - _MOST_OF_A_KIND
            page.line(f"... and {more} more [{finding.kind}]; --json lists all", _tone(finding))
    show_drift(page, findings)


def _tone(finding: Finding) -> Tone:
    return _TONES[finding.severity]
