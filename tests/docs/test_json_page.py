"""The page about --json names every member that a command prints, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from restride.testing.command_line import SAMPLE, run
from restride.testing.documents import tables_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
HEADINGS = re.findall(r"^## `restride (.*)`$", PAGE.read_text("utf-8"), re.MULTILINE)
MEMBERS = {
    heading: {row[0].strip("`") for row in rows}
    for heading, rows in zip(HEADINGS, tables_of(PAGE), strict=True)
}


def test_every_command_with_a_report_is_on_the_page() -> None:
    assert {heading.split()[0] for heading in HEADINGS} == {
        *("info", "check", "convert", "diff", "fingerprint", "layouts", "demo"),
    }


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_command_prints_the_members_that_are_listed(heading: str, tmp_path: Path) -> None:
    places = {"CHECKPOINT": SAMPLE, "A": SAMPLE, "B": SAMPLE, "OUT": tmp_path / "out"}

    ran = run(*(places.get(word, word) for word in heading.split()), "--json")

    assert ran.code == 0, ran.err
    inherited = MEMBERS["info CHECKPOINT"] if heading.startswith("check") else set()
    assert set(ran.json) == MEMBERS[heading] | inherited


def test_the_members_of_what_is_listed_in_a_member_are_on_the_page(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    run("convert", SAMPLE, tmp_path / "master", "--dtype", "float32")
    tensor = next(iter(run("info", SAMPLE, "--json").json["tensors"].values()))
    row = run("diff", SAMPLE, tmp_path / "master", "--json").json["differences"][0]

    names = {"tensor", "other_tensor", "state"}
    (family, *_) = run("layouts", SAMPLE, "--json").json["kinds"]
    (cut, *_) = run("layouts", SAMPLE, "--tp", "1", "--json").json["kinds"]
    (entry, *_) = run("layouts", "--json").json["layouts"].values()
    families = family["families"][0]
    for member in {*tensor, *row, *family, *families, *cut, *entry} - names:
        assert f"`{member}`" in page, member
