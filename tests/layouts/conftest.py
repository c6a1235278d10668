"""The script that runs the real partition functions, as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "record_partitions.py"


@pytest.fixture(scope="session")
def frameworks() -> ModuleType:
    """`scripts/record_partitions.py` with the frameworks loaded; skipped where they are not."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    spec = importlib.util.spec_from_file_location("record_partitions", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.real()
    return module
