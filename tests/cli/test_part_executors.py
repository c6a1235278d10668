"""Whatever the code behind --executor raises is one sentence, with the line of the user's file."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from restride.cli.part_executors import open_executor
from restride.errors import PlanError
from restride.testing.command_line import SAMPLE, run

MODULE = """\
from concurrent.futures import ThreadPoolExecutor
import helper_of_mine

def make():
    return ThreadPoolExecutor(2)

def fails():
    raise ValueError("no queue of that name:\\n  gpu")

def fails_elsewhere():
    return helper_of_mine.fails()

def leaves():
    raise SystemExit(3)

def makes_nothing():
    return None

class Refuses:
    def __enter__(self):
        raise TimeoutError("no scheduler" + "!" * 500)

    def __exit__(self, *_):
        pass
"""
HELPER = "def fails():\n    return {}['queue']\n"


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    for name, text in {
        "pools_of_mine": MODULE,
        "helper_of_mine": HELPER,
        "pools_broken": "import json\n\nimport not_installed_here\n",
        "pools_dividing": "x = 1\n\n\ny = x / 0\n",
        "pools_unreadable": "def make():\n    return (\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


NO_MODULE = "ModuleNotFoundError: No module named 'not_installed_here'"


@pytest.mark.parametrize(
    ("name", "what", "raised"),
    [
        ("pools_of_mine:fails", "fails() failed", "ValueError: no queue of that name: gpu|8"),
        ("pools_of_mine:fails_elsewhere", "fails_elsewhere() failed", "KeyError: 'queue'|11"),
        ("pools_of_mine:leaves", "leaves() failed", "SystemExit: 3|14"),
        (
            "pools_of_mine:Refuses",
            "the Refuses that Refuses made cannot be used",
            f"TimeoutError: no scheduler{'!' * 188}...|21",
        ),
        ("pools_broken:make", "the module cannot be imported", f"{NO_MODULE}|3"),
        (
            "pools_dividing:make",
            "the module cannot be imported",
            "ZeroDivisionError: division by zero|4",
        ),
    ],
)
def test_what_the_code_of_a_user_raises_is_told_with_its_place(tmp_path, name, what, raised):
    ran = run("convert", SAMPLE, tmp_path / "out", "--executor", name, "--parts", "2")

    module, _, factory = name.partition(":")
    text, line = raised.split("|")
    assert ran.code == 2
    assert ran.err == (
        f"restride: --executor '{name}': {what} ({text}, {module}.py, line {line}); "
        f"try it alone: python -c 'import {module}; {module}.{factory}()'\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_module_that_is_no_python_is_told_of_with_its_line():
    with (
        pytest.raises(PlanError, match=r"\(SyntaxError: .*, pools_unreadable.py, line 2\)"),
        open_executor("pools_unreadable:make"),
    ):
        pytest.fail("it was imported")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pools_of_mine", "names nothing to call; write it as MODULE:FUNCTION"),
        (
            "no_such:make",
            "cannot be found (no module 'no_such'); put it into the working directory",
        ),
        ("json.no_such:make", "(no module 'json.no_such')"),
        ("pools_of_mine:no_such", "cannot be found (module 'pools_of_mine' has no attribute"),
        ("pools_of_mine:makes_nothing", "returns NoneType, which has no submit()"),
    ],
)
def test_a_name_that_means_no_executor_is_refused(tmp_path, name, told):
    ran = run("convert", SAMPLE, tmp_path / "out", "--executor", name, "--parts", "2")

    assert ran.code == 2
    assert told in ran.err
    assert ran.err.count("\n") == 1


def test_what_a_factory_makes_is_used_and_closed():
    with open_executor("pools_of_mine:make") as pool:
        assert isinstance(pool, ThreadPoolExecutor)
        assert pool.submit(int, "7").result() == 7
    with pytest.raises(RuntimeError):
        pool.submit(int, "7")
    with open_executor(None) as pool:
        assert pool is None
