"""The real engine resumes without hyperparameters, with those of a file, and with Muon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

# Vectors of 50 elements on two ranks: their buffer is padded, which engines treat in ways of their
# own where the padding is cut off.
MODEL = {"model": "llama", "dtype": "fp32", "hidden": 50, "heads": 5, "kv_heads": 5}
ELASTIC = {"zero_optimization": {"elastic_checkpoint": True}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}}}


def optimizer(weight_decay: float) -> dict[str, Any]:
    return {
        "type": "AdamW",
        "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": weight_decay},
    }


def test_training_goes_on_from_files_without_hyperparameters_and_from_given_ones(
    engine, tmp_path: Path
) -> None:
    """The second engine has settings of its own, which it would take for want of others."""
    job = {**MODEL, "vectors": {"weight_decay": 0.0}}
    mine, other = ({**ELASTIC, "optimizer": optimizer(decay)} for decay in (0.1, 0.9))
    source = tmp_path / "source"
    unbroken = engine(**job, world=2, zero=1, config=mine, steps=2, more=2, save=source)
    groups = [
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": decay,
            "decoupled_weight_decay": True,
        }
        for decay in (0.1, 0.0)
    ]
    (tmp_path / "groups.json").write_text(json.dumps(groups))

    api.convert(source, tmp_path / "two", to="deepspeed", zero=2)
    api.convert(
        *(source, tmp_path / "three"),
        to="deepspeed",
        zero=3,
        hyperparameters=tmp_path / "groups.json",
    )

    job |= {"world": 2, "skip": 2, "steps": 2}
    assert engine(**job, zero=2, config=mine, load=tmp_path / "two") == unbroken[2:]
    del other["zero_optimization"]
    assert engine(**job, zero=3, config=other, load=tmp_path / "three") == unbroken[2:]


@pytest.mark.thorough
def test_muon_goes_on_after_it_was_on_ranks_that_sort_its_parameters_otherwise(
    engine, tmp_path: Path
) -> None:
    """Halves of a matrix are smaller than other matrices, and come after them."""
    job = {"model": "llama", "config": MUON}
    source, halves, whole = (tmp_path / name for name in ("source", "halves", "whole"))
    unbroken = engine(**job, world=2, zero=1, steps=2, more=2, save=source)

    api.convert(source, halves, to="deepspeed", tp=2, dp=1, zero=2)
    engine(**job, world=2, tp=2, zero=2, load=halves, resave=tmp_path / "again")
    api.convert(halves, whole, to="deepspeed", tp=1, dp=2, zero=1)

    loaded, saved = (gather_all(api.open(path)) for path in (tmp_path / "again", source))
    states = [key for key in saved if key.endswith(("/fp32", "/exp_avg", "/exp_avg_sq"))]
    assert len(states) > 30
    assert all(loaded[key].tobytes() == saved[key].tobytes() for key in states)
    # The engine keeps it in the type of the gradients from its first step on, until then wider.
    momenta = [key for key in saved if key.endswith("/momentum_buffer")]
    assert len(momenta) == 14
    for key in momenta:
        assert loaded[key][..., :2].max() == 0, key
        assert loaded[key][..., 2:].tobytes() == saved[key].tobytes(), key
    assert engine(**job, world=2, zero=1, skip=2, steps=2, load=whole) == unbroken[2:]
