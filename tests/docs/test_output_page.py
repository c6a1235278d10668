"""What the page about outputs shows is what happens."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from restride.checkpoint.manifest import MANIFEST_NAME
from restride.testing.command_line import SAMPLE, run
from restride.testing.documents import matches, sessions_of

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "output.md"


def test_every_command_of_the_page_writes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)

    sessions = sessions_of(PAGE)
    assert len(sessions) == 4
    for command, shown in sessions:
        ran = run(*shlex.split(command)[1:])
        assert ran.code == 0, ran.err
        assert matches(shown, ran.out), f"$ {command}\n{ran.out}"


def test_the_page_names_every_member_of_a_manifest(tmp_path: Path) -> None:
    run("convert", SAMPLE, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())
    part = max(next(iter(manifest["files"].values()))["parts"], key=len)

    for name in (*manifest, *next(iter(manifest["files"].values())), *part):
        assert f"`{name}`" in PAGE.read_text(), name
