"""The page of all kinds of findings has those that the sources make, with their severity."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from restride.testing.documents import tables_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "findings.md"
SOURCES = [
    path
    for path in sorted((ROOT / "src" / "restride").rglob("*.py"))
    if "testing" not in path.parts
]
LISTED = {
    kind: row[1].split(", ")
    for rows in tables_of(PAGE)
    for row in rows
    for kind in re.findall(r"`([a-z-]+)`", row[0])
}
SEVERITIES = ("error", "warning", "note")


def made() -> set[tuple[str, str]]:
    """(kind, severity) of what is called with both as they are written."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) > 1:
                first, second = (
                    arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:2]
                )
                if first in SEVERITIES and isinstance(second, str):
                    found.add((second, str(first)))
    return found


def test_what_the_sources_make_is_listed_with_its_severity() -> None:
    kinds = made()

    assert len(kinds) > 60
    for kind, severity in sorted(kinds):
        assert severity in LISTED.get(kind, ()), (kind, severity)


@pytest.mark.parametrize("kind", LISTED)
def test_what_is_listed_is_made_somewhere(kind: str) -> None:
    verdicts = {"hole", "gap", "overlap"}  # spelled by the names of their classes
    told = any(f'"{kind}"' in path.read_text("utf-8") for path in SOURCES)

    assert kind in verdicts or told
    assert set(LISTED[kind]) <= set(SEVERITIES)
