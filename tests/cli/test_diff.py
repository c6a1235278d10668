"""`diff`, `fingerprint` and `check --against`, for people and for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.testing.command_line import SAMPLE, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    api.convert(SAMPLE, tmp_path / "out", states="all")
    return tmp_path / "out"


@pytest.fixture
def master(tmp_path: Path) -> Path:
    api.convert(SAMPLE, tmp_path / "master", dtype="float32")
    return tmp_path / "master"


def test_a_conversion_is_the_same(converted: Path) -> None:
    for_people, for_machines = (
        run("diff", SAMPLE, converted),
        run("diff", SAMPLE, converted, "--json"),
    )

    assert (for_people.code, for_machines.code) == (0, 0)
    assert for_people.out.splitlines()[-1].startswith("same: 65 arrays, ")
    assert for_people.out.splitlines()[-1].endswith(", the same bits")
    assert for_machines.json["verdict"] == "same"
    assert for_machines.json["compared"] == 65
    assert for_machines.json["differences"] == []


def test_differences_exit_with_one_and_are_told_one_a_line(master: Path) -> None:
    for_people, for_machines = run("diff", SAMPLE, master), run("diff", SAMPLE, master, "--json")

    assert (for_people.code, for_machines.code) == (1, 1)
    content = for_machines.json
    assert len(content["only_a"]) == 52
    assert len(content["differences"]) == 13
    row = content["differences"][0]
    assert row["dtypes"] == ["bfloat16", "float32"]
    assert row["first_index"] == row["first_coordinates"][0] * 32 + row["first_coordinates"][1]
    assert abs(row["first_values"][0] - row["first_values"][1]) <= row["largest"]
    assert "... and 32 more; --json lists all" in for_people.out
    last = for_people.out.splitlines()[-1]
    assert last == "different: 13 of 13 arrays differ, 52 arrays only in A"


def test_a_tolerance_compares_values_and_says_what_was_widened(master: Path) -> None:
    near = run("diff", SAMPLE, master, "--states", "weights", "--rtol", "0.004")

    assert near.code == 0
    assert "13 arrays of them widened exactly" in near.out.splitlines()[-1]


@pytest.mark.parametrize("rule", ["=x", "x"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    refused = run("diff", SAMPLE, SAMPLE, "--rename", rule)

    assert refused.code == 2
    assert "is no rule OLD=NEW" in refused.err


def test_fingerprints_are_written_once_and_checked_against(converted: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.json"

    first = run("fingerprint", SAMPLE, "-o", file)
    again = run("fingerprint", SAMPLE, "-o", file)
    forced = run("fingerprint", converted, "-o", file, "--force", "--json")

    assert (first.code, again.code, forced.code) == (0, 2, 0)
    assert "--force" in again.err
    assert json.loads(file.read_text()) == forced.json
    assert run("check", SAMPLE, "--against", file).code == 0


def test_a_check_against_other_fingerprints_is_a_finding(master: Path, tmp_path: Path) -> None:
    run("fingerprint", master, "-o", tmp_path / "f.json")

    checked = run("check", SAMPLE, "--against", tmp_path / "f.json", "--json")

    assert checked.code == 1
    kinds = [finding["kind"] for finding in checked.json["findings"]]
    assert kinds == ["fingerprint-differs"] * 13 + ["fingerprint-unknown"]


def test_fingerprints_are_listed_one_a_line() -> None:
    lines = run("fingerprint", SAMPLE, "--states", "weights").out.splitlines()

    assert lines[0].split() == ["fingerprint", "tensor", "state"]
    assert len(lines) == 14
    assert all(len(line.split()[0]) == 32 for line in lines[1:])
