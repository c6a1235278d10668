"""Every builder against what the real frameworks did when the vectors were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restride import layouts
from restride.errors import LayoutError
from restride.testing.cuts import index_maps

FOLDER = Path(__file__).resolve().parents[1] / "data" / "partitions"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CASES = [
    pytest.param(kind, case, id=f"{kind}-{number}")
    for kind, recorded in RECORDED.items()
    for number, case in enumerate(recorded["cases"])
]


def test_the_vectors_say_what_recorded_them():
    assert RECORDED
    for recorded in RECORDED.values():
        assert recorded["format"] == "restride-partitions/1"
        assert set(recorded["versions"]) == {"deepspeed", "torch"}
    assert all(path.stat().st_size < 8192 for path in FOLDER.iterdir())


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_layout_is_what_the_framework_did(kind, case):
    builder, mesh, arguments = getattr(layouts, kind), {"tp": case["ranks"]}, case["arguments"]
    if "shapes" not in arguments:
        arguments = {"shape": case["shape"], **arguments}
    if "refused" in case:
        with pytest.raises(LayoutError):
            builder(mesh=mesh, **arguments)
        return

    layout = builder(mesh=mesh, **arguments)

    assert [list(layout.shard_shape(rank)) for rank in range(case["ranks"])] == [
        shard["shape"] for shard in case["shards"]
    ]
    assert index_maps(layout) == [expand(shard["runs"]) for shard in case["shards"]]


@pytest.mark.interop
@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_the_framework_still_does_what_was_recorded(frameworks, kind):
    def without_wording(cases):
        # The text of a refusal is the framework's own and may change; that it refuses may not.
        return [{**case, "refused": "refused" in case} for case in cases]

    now = json.loads(frameworks.as_text(frameworks.record(kind)))

    assert without_wording(now["cases"]) == without_wording(RECORDED[kind]["cases"])


def expand(runs: list[list[int]]) -> list[int]:
    return [
        full
        for first, length in runs
        for full in (range(first, first + length) if first >= 0 else [-1] * length)
    ]
