"""The quick part of the matrix of `scripts/matrix.py`: the real engine resumes from conversions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "matrix.py"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look for their module.
    sys.modules["matrix"] = module
    spec.loader.exec_module(module)
    return module


def test_states_and_losses_are_those_of_the_peer_and_of_a_training_that_never_stopped(
    matrix: ModuleType,
) -> None:
    wide = (("heads", 16),)
    cases = [
        ("llama", (2, 1, 1), [(2, 2, 1)], ()),
        ("codegen", (2, 1, 0), [(2, 1, 3)], wide),
    ]
    expected = {
        "llama": ["states, peer, universal, unbroken"],
        "codegen": ["states, universal, unbroken"],
    }

    for model, cut, targets, more in cases:
        source = matrix.Source(model, matrix.Shape(*cut), more=more)
        (row,) = matrix.run([source], tuple(matrix.Shape(*target) for target in targets))
        assert list(row.cells.values()) == expected[model], row
