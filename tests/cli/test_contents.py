"""Everything a catalog knows of a tensor is shown, whatever wrote it."""

from __future__ import annotations

import pytest

from restride import api
from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Catalog, FileEntry, Finding, Region, StateEntry, TensorEntry
from restride.checkpoint.dtypes import dtype_named
from restride.layouts import replicated
from restride.testing.command_line import run


@pytest.fixture(autouse=True)
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    whole = replicated((4, 2), mesh={"dp": 1})
    scalar = replicated((), mesh={"dp": 1})

    def state(dtype: str, layout=whole) -> StateEntry:
        return StateEntry(dtype_named(dtype), layout, (Region(0, 0),))

    tensors = (
        TensorEntry(
            "embed",
            "parameter",
            whole,
            {"weight": state("bfloat16"), "fp32": state("float32")},
            aliases=("head", "output"),
        ),
        TensorEntry("base", "parameter", whole, {"weight": state("bfloat16")}, is_frozen=True),
        TensorEntry("count", "buffer", scalar, {"weight": state("int64", scalar)}),
        TensorEntry("lost", "buffer", whole, {}),
    )
    made = Catalog(
        "made up",
        "root",
        (FileEntry("a.bin", 1000),),
        Mesh((("dp", 1),)),
        tensors,
        {"step": 3},
        (Finding("note", "odd", "tensor 'base' is odd", "tensor 'base'", {"n": 1}),),
    )
    monkeypatch.setattr(api, "open", lambda _, **__: made)
    return made


def test_info_shows_kinds_states_ties_and_findings() -> None:
    one = "of 1 tensor"
    assert run("info", "x").out.splitlines() == [
        "x: made up, written by 1 rank (dp=1)",
        "2 parameters and 2 buffers, 25 elements, in 1 file of 1.00 kB",
        f"states: weight (bfloat16) of 2 tensors; fp32 (float32) {one}; weight (int64) {one}",
        "",
        "tensor  shape   dtype     layout",
        "embed   4x2     bfloat16  whole",
        "base    4x2     bfloat16  whole, frozen",
        "count   scalar  int64     whole, buffer",
        "lost    4x2     -         whole, buffer",
        "",
        "head, output is tied to embed",
        "",
        "note: tensor 'base' is odd [odd]",
    ]


def test_info_gives_machines_the_same() -> None:
    content = run("info", "x", "--json").json

    assert content["files"] == {"a.bin": 1000}
    assert content["values"] == ["step"]
    assert content["findings"] == [
        {
            "severity": "note",
            "kind": "odd",
            "where": "tensor 'base'",
            "message": "tensor 'base' is odd",
            "details": {"n": 1},
        }
    ]
    tensors = content["tensors"]
    assert tensors["embed"]["aliases"] == ["head", "output"]
    assert tensors["base"]["frozen"] is True
    assert tensors["count"]["kind"] == "buffer"
    assert tensors["count"]["shape"] == []


def test_a_checkpoint_without_tensors_is_no_accident(
    monkeypatch: pytest.MonkeyPatch, catalog: Catalog
) -> None:
    empty = Catalog(catalog.format, "root", (), catalog.mesh, (), {})
    monkeypatch.setattr(api, "open", lambda _, **__: empty)

    assert run("info", "x").out.splitlines()[1:] == [
        "no tensors, 0 elements, in 0 files of 0 B",
        "states: none",
    ]
