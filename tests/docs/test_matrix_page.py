"""The table of the matrix has every source that the script runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.interop
def test_every_source_of_the_matrix_is_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    matrix = importlib.import_module("matrix")
    monkeypatch.delitem(sys.modules, "matrix")
    text = (ROOT / "docs" / "matrix.md").read_text()

    missing = [
        source.name
        for source in matrix.SOURCES
        if f"| {source.name} |" not in text and f"\n{source.name}: the engine" not in text
    ]

    assert not missing
    assert "FAILED" not in text
