"""What tests of runs that end early and go on have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.executors import blocks, manifests, resuming
from restride.executors.members import Member
from restride.testing.command_line import SAMPLE
from restride.testing.contents import tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a few steps fill, so that little has several of them: `BLOCK` of the module."""
    for module in (blocks, manifests, resuming):
        monkeypatch.setattr(module, "BLOCK_NBYTES", getattr(request.module, "BLOCK", 4096))


class Until(float):
    """A time that process 0 waits for others: over when something is so, whatever the load is.

    Any time that has passed is compared with it.
    """

    is_over: Callable[[], object]

    def __lt__(self, waited: float) -> bool:
        return bool(self.is_over())


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Until]:
    """Make a time to wait of a condition."""

    def make(is_over: Callable[[], object]) -> Until:
        seconds = Until(30)
        seconds.is_over = is_over
        return seconds

    return make


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the processes that process 0 looked at, one each time that it did."""
    found: list[int] = []
    look = Member.look

    def looks(member: Member, *arguments: Any) -> str:
        told = look(member, *arguments)
        found.append(member.number)
        return told

    monkeypatch.setattr(Member, "look", looks)
    return found


@pytest.fixture
def source() -> Path:
    """What is converted."""
    return SAMPLE


@pytest.fixture
def reference(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Mapping[str, bytes]:
    """The files that one run writes with the `OPTIONS` of the module, from start to end."""
    api.convert(source, tmp_path / "reference", **request.module.OPTIONS)
    return tree(tmp_path / "reference")
