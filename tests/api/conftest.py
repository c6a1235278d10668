"""What tests of runs that end early and go on have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.executors import blocks, manifests, resuming
from restride.testing.command_line import SAMPLE
from restride.testing.contents import tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a few steps fill, so that little has several of them: `BLOCK` of the module."""
    for module in (blocks, manifests, resuming):
        monkeypatch.setattr(module, "BLOCK_NBYTES", getattr(request.module, "BLOCK", 4096))


@pytest.fixture
def source() -> Path:
    """What is converted."""
    return SAMPLE


@pytest.fixture
def reference(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Mapping[str, bytes]:
    """The files that one run writes with the `OPTIONS` of the module, from start to end."""
    api.convert(source, tmp_path / "reference", **request.module.OPTIONS)
    return tree(tmp_path / "reference")
