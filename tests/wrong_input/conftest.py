"""Copies of real checkpoints to damage, and what is expected of `check` and `convert` then."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.errors import RestrideError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WEIGHTS = {"to": "safetensors"}
WITH_STATES = (
    {"to": "safetensors", "states": "all"},
    {"to": "universal"},
    {"to": "deepspeed", "zero": 1},
)


class Damaged:
    """A copy of a real checkpoint, in a folder of its own.

    Attributes:
        folder: The copy.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self._shared = shared

    def file(self, name: str) -> Path:
        """The only file whose name ends like that."""
        (found,) = (self.folder / "step").glob(f"*{name}")
        return found

    def take_from(self, other: str, name: str, as_name: str | None = None) -> None:
        """Replace a file by the one that another run has of that name."""
        (source,) = (self._shared / "checkpoints" / other / "step").glob(f"*{name}")
        shutil.copyfile(source, self.file(as_name or name))

    def check_finds(self, *words: str) -> None:
        """`check` refuses to read it or has findings, and names all of this."""
        try:
            report = api.check(self.folder)
        except RestrideError as error:
            told = str(error)
        else:
            assert report.verdict == "findings"
            told = "\n".join(f"{f.message} [{f.kind}]" for f in report.findings)
        for word in words:
            assert word in told, told

    def convert_refuses(self, *, weights: bool = True) -> None:
        """No conversion writes anything: the folder around is as it was.

        Args:
            weights: Whether one of the weights alone is refused as well.
        """
        out = self.folder.parent / "out"
        before = list(self._listing())
        for wanted in [*([WEIGHTS] if weights else []), *WITH_STATES]:
            with pytest.raises(RestrideError) as error:
                api.convert(self.folder, out, **wanted)
            assert str(error.value).count("\n") == 0
            assert list(self._listing()) == before
        if not weights:
            assert api.convert(self.folder, out, **WEIGHTS).written_nbytes

    def _listing(self) -> Iterator[tuple[str, int]]:
        for path in sorted(self.folder.parent.rglob("*")):
            yield str(path), path.stat().st_mtime_ns if path.is_file() else 0


@pytest.fixture
def damaged(
    shared: Path, tmp_path: Path, copied: Callable[[Path, Path], Path]
) -> Callable[[str], Damaged]:
    """Make a copy of a checkpoint by its name."""

    def copy(name: str) -> Damaged:
        return Damaged(copied(shared / "checkpoints" / name, tmp_path / name), shared)

    return copy
