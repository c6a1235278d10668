"""Muon under `deepspeed.zero.Init`, where the real engine has its parameters in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.errors import UnsupportedError
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.interop, pytest.mark.slow]

MUON = {
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}},
    "zero_optimization": {"reduce_scatter": False},
}


def test_an_engine_under_zero_init_goes_on_with_the_order_of_the_model_and_mixes_up_the_other(
    engine: Any, tmp_path: Path
) -> None:
    """It says nothing of it: every parameter group has as many elements in either order."""
    job = {"model": "llama", "dtype": "fp32", "world": 2, "config": MUON}
    source = tmp_path / "source"
    unbroken = engine(**job, zero=1, steps=2, more=2, save=source)[2:]
    with pytest.raises(UnsupportedError, match=r"--zero-init or --no-zero-init"):
        api.convert(source, tmp_path / "unsaid", to="deepspeed", zero=3)

    losses = {}
    for said in (True, False):
        out = tmp_path / str(said)
        api.convert(source, out, to="deepspeed", zero=3, zero_init=said)
        for zero_init in (True, False) if said else (True,):
            resumed = {"zero": 3, "skip": 2, "more": 2, "load": out, "zero_init": zero_init}
            losses[said, zero_init] = engine(**job, **resumed)

    assert losses[True, True] == unbroken
    assert losses[True, False] != unbroken
    assert losses[False, True] != unbroken


@pytest.mark.thorough
def test_a_run_under_zero_init_goes_on_under_it_and_where_there_is_none(
    engine: Any, tmp_path: Path
) -> None:
    job = {"model": "llama", "dtype": "fp32", "world": 2, "config": MUON}
    source = tmp_path / "source"
    unbroken = engine(**job, zero=3, zero_init=True, steps=2, more=2, save=source)[2:]

    api.convert(source, tmp_path / "three", to="deepspeed", zero=3)
    api.convert(source, tmp_path / "one", to="deepspeed", zero=1)

    job |= {"skip": 2, "more": 2}
    assert engine(**job, zero=3, zero_init=True, load=tmp_path / "three") == unbroken
    assert engine(**job, zero=1, load=tmp_path / "one") == unbroken


@pytest.mark.thorough
def test_experts_of_muon_go_to_another_stage_and_to_one_rank_and_back(
    engine: Any, tmp_path: Path
) -> None:
    """Every expert-parallel rank has a group of its own experts, which Muon sorted as well."""
    flat = {**MUON, "zero_optimization": {}}  # with experts the other stages scatter
    job = {"model": "mixtral", "dtype": "fp32"}
    source, one, again, back = (tmp_path / name for name in ("source", "one", "again", "back"))
    three = {"world": 2, "ep": 2, "zero": 3, "config": MUON}
    unbroken = engine(**job, **three, steps=2, more=2, save=source)[2:]

    api.convert(source, one, to="deepspeed", dp=1, ep=1, zero=1)
    engine(**job, world=1, ep=1, zero=1, config=flat, load=one, resave=again)
    api.convert(again, back, to="deepspeed", dp=2, ep=2, zero=3, zero_init=False)

    held, stored = (gather_all(api.open(path)) for path in (again, source))
    states = [key for key in stored if not key.endswith(("/weight", "/step"))]
    assert any(key.endswith("experts.w1/momentum_buffer") for key in states)
    assert all(held[key].tobytes() == stored[key].tobytes() for key in states)
    assert engine(**job, **three, skip=2, more=2, load=back) == unbroken
