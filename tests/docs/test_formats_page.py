"""The tables of docs/formats.md, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from restride import api
from restride.errors import RestrideError
from restride.testing.documents import tables_of

ROOT = Path(__file__).resolve().parents[2]
READ, MADE, OPTIMIZERS, REFUSED = tables_of(ROOT / "docs" / "formats.md")
DATA = ROOT / "tests" / "data"


def example(cell: str) -> Path:
    return DATA / cell.split("`")[1]


def told(cell: str) -> dict[str, tuple[int, ...]] | None:
    _, option, said = cell.partition("with `--pp-tied ")
    key, _, layers = said.rstrip("`").partition("=")
    if not option:
        return None
    return {key: tuple(map(int, layers.split(",")))} if layers else {}


@pytest.mark.parametrize("row", READ, ids=lambda row: row[2])
def test_what_is_read_is_read_as_the_page_says(row):
    catalog = api.open(example(row[2]), pp_tied=told(row[2]))

    assert [catalog.format, str(catalog.mesh)] == row[3:]
    assert not [finding for finding in catalog.findings if finding.severity == "error"]


@pytest.mark.parametrize("row", MADE, ids=lambda row: row[0])
def test_what_can_be_made_can_be_made(row, tmp_path):
    for target, said in zip(("safetensors", "universal", "deepspeed"), row[1:], strict=True):
        states = "all" if target == "safetensors" else None
        try:
            options = {"to": target, "states": states, "pp_tied": told(row[0])}
            api.convert(example(row[0]), tmp_path / target, **options)
            found = "yes"
        except RestrideError as error:
            found = str(error)
        assert said == found if "yes" in (said, found) else said in found, target


def test_every_kind_of_recorded_checkpoint_has_a_row():
    shown = {example(row[2]).parent.name for row in READ}

    assert shown == {path.name for path in DATA.iterdir() if path.name.startswith("deepspeed")}


def test_optimizers_are_those_that_the_engine_is_run_with():
    """tests/interop/test_optimizers.py reads its names from the page."""
    script = (ROOT / "scripts" / "record_optimizer_checkpoints.py").read_text()

    for optimizer, _, _ in OPTIMIZERS:
        assert f'    "{optimizer.strip("`")}": {{' in script


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_reasons_are_those_of_the_program(row):
    source = ROOT / "src" / "restride" / "formats" / "deepspeed"

    assert any(row[1] in file.read_text() for file in source.rglob("*.py"))
