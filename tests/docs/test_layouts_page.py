"""`docs/layouts.md` shows what happens: its commands are run with the files that it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from restride.layouts.presets import known_models
from restride.layouts.presets._families import FAMILIES
from restride.layouts.presets._rules import AUTOTP_CUTS
from restride.testing.command_line import SAMPLE, run
from restride.testing.documents import blocks_of, links_of, matches

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"


def test_every_command_writes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page: what it shows as a file is there for the commands that follow."""
    shutil.copytree(SAMPLE, tmp_path / "codegen-tp2-dp2")
    monkeypatch.chdir(tmp_path)
    files = {"json": "codegen-tp2-dp2/config.json", "toml": "rules.toml"}
    commands = 0

    for block in blocks_of(PAGE):
        if block.language in files:
            (tmp_path / files[block.language]).write_text(block.text)
            continue
        command, _, shown = block.text.partition("\n")
        ran = run(*shlex.split(command.removeprefix("$ "))[1:])
        assert matches(shown, ran.out + ran.err), f"{command}\n{ran.out}{ran.err}"
        commands += 1

    assert commands == 3


def test_the_table_of_presets_is_that_of_the_presets() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) ?\| (.*?) \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE
    )

    assert [row[0] for row in rows] == list(known_models())
    for model_type, fused, plan, required in rows:
        family = FAMILIES[model_type]
        if family.names is None:
            assert plan.startswith("AutoTP refuses")
            continue
        layouts = dict.fromkeys(rule.layout for rule in family.names)
        assert re.findall(r"`(.*?)`", fused) == [n for n in layouts if n not in AUTOTP_CUTS]
        wanted = "followed" if family.plan else "refused by DeepSpeed" if family.refused else "none"
        assert plan == wanted
        assert re.findall(r"`(.*?)`", required) == list(family.required)


def test_every_link_resolves() -> None:
    for target in links_of(PAGE):
        assert (PAGE.parent / target).exists(), target
