"""The page about fuzzing names the targets that there are, and the script finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from restride.testing.documents import tables_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "fuzz.py"
PAGE = ROOT / "docs" / "fuzzing.md"


def fuzz(*arguments):
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def find(path, target, content):
    path.write_text(json.dumps({"target": target, "input": content.hex(), "key": "", "error": ""}))
    return path


def test_the_page_describes_every_target_and_its_run():
    described, *others = tables_of(PAGE)
    measured = {row[0].strip("`") for table in others for row in table}
    asked = fuzz("--targets", "nothing")
    targets = asked.stderr.strip().partition("; there are ")[2].split(", ")

    assert [row[0].strip("`") for row in described] == targets
    assert set(targets) <= measured


def test_a_second_finds_nothing_and_leave_a_log(tmp_path):
    ran = fuzz("--seconds", 1, "--targets", "document", "--out", tmp_path / "out")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    log = (tmp_path / "out" / "log.txt").read_text()
    assert ran.stdout == log
    assert "document: " in log
    assert log.endswith("0 finds in all\n")
    assert not (tmp_path / "out" / "finds").exists()


@pytest.mark.parametrize(
    "target", ["document", "numbers", "casts", "commands", "resume", "team", "kept"]
)
def test_an_input_that_is_no_find_says_how_far_it_came(tmp_path, target):
    ran = fuzz("--replay", find(tmp_path / "find.json", target, b"\x80\x02N."))

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("no find: ")


def test_a_find_is_shown_with_its_error(tmp_path):
    broken = tmp_path / "fuzz_readers.py"
    broken.write_text("def pickle(content):\n    return content and 1 / 0\n")
    (tmp_path / "fuzz.py").write_bytes(SCRIPT.read_bytes())
    command = [sys.executable, tmp_path / "fuzz.py"]
    path = find(tmp_path / "find.json", "pickle", b"abc")

    ran = subprocess.run([*command, "--replay", path], capture_output=True, text=True, check=False)

    assert ran.returncode == 1
    assert "ZeroDivisionError" in ran.stderr
    assert "still a find" in ran.stdout
