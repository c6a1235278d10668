"""fp16 pipelines without ZeRO: the real engine goes on from files of other stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api

from .test_pipeline_engine import HEAD, MUON, PLAIN, TIED, convert, job_of

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.interop, pytest.mark.thorough]

UNFUSED = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# The operator is compiled first, which takes a minute.
FLAT = {**UNFUSED, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
BLOCKS = ("tied_block", "norm", "tied_block", "block", "tied_block", "norm")


@pytest.mark.parametrize(
    ("layers", "source", "target", "more"),
    [
        (PLAIN, {"pp": 2}, {"pp": 4, "pp_layers": "uniform:4", "pp_tied": {}}, {"config": FLAT}),
        (PLAIN, {"pp": 2, "tp": 2}, {"pp": 1, "tp": 2, "pp_tied": {}}, {"config": FLAT}),
        (
            TIED,
            {"pp": 2, "dp": 2},
            {"pp": 3, "pp_layers": "uniform:6", "pp_tied": HEAD},
            {"config": FLAT, "groups": True},
        ),
        (
            TIED,
            {"pp": 1},
            {"pp": 3, "pp_layers": "uniform:6", "pp_tied": HEAD},
            {"config": FLAT, "groups": True, "frozen": True},
        ),
        (
            BLOCKS,
            {"pp": 3},
            {"pp": 2, "pp_layers": "uniform:6", "pp_tied": {"block": [0, 2, 4]}},
            {"config": FLAT},
        ),
        (PLAIN, {"pp": 2}, {"pp": 1, "pp_tied": {}}, {"config": UNFUSED, "frozen": True}),
        (
            PLAIN,
            {"pp": 1},
            {"pp": 2, "pp_layers": "uniform:4", "pp_tied": {}},
            {"config": {**UNFUSED, "optimizer": MUON["optimizer"]}, "frozen": True},
        ),
    ],
)
def test_stages_in_fp16_without_zero_go_on_as_if_nothing_had_happened(
    engine: Any,
    tmp_path: Path,
    layers: tuple[str, ...],
    source: dict[str, Any],
    target: dict[str, Any],
    more: dict[str, Any],
) -> None:
    job = job_of(layers, {"zero": 0, **source}, **more)
    losses = engine(**job, steps=2, more=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", {"zero": 0, **target})

    job = job_of(layers, {"zero": 0, **target}, **more)
    assert engine(**job, skip=2, steps=2, load=out) == losses[2:]


def test_the_engine_saves_flat_groups_as_it_loaded_them(
    engine: Any, require_saved_again: Any, tmp_path: Path
) -> None:
    """It is the first to be of ZeRO here, whose wrapper takes other steps."""
    job = job_of(PLAIN, {"pp": 2}, config=FLAT, frozen=True)
    engine(**job, steps=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", {"pp": 1, "zero": 0})

    job = job_of(PLAIN, {"pp": 1, "zero": 0}, config=FLAT, frozen=True)
    engine(**job, load=out, resave=tmp_path / "again")
    require_saved_again(out, tmp_path / "again")
    api.convert(tmp_path / "again", tmp_path / "universal", to="universal", pp_tied={})
