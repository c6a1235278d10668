"""Every optimizer that DeepSpeed trains with in fp16 without ZeRO, and what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.interop, pytest.mark.thorough]

SCALE = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# DeepSpeed's fused Adam is in flat groups, all others have a master copy of each parameter.
OPTIMIZERS = {
    "fused Adam": {"type": "AdamW", "params": {"lr": 1e-3}},
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-3}},
    "SGD": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}},
    "Muon": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}},
}


def job_of(optimizer: dict[str, Any]) -> dict[str, Any]:
    config = {**SCALE, "optimizer": optimizer}
    return {"model": "llama", "hidden": 32, "dtype": "fp16", "config": config}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_without_zero_are_what_an_engine_of_other_ranks_holds(
    name: str, engine: Any, tmp_path: Path
) -> None:
    job = job_of(OPTIMIZERS[name])
    of_two = {**job, "world": 2, "tp": 2, "zero": 0}
    losses = engine(**of_two, steps=2, more=2, save=tmp_path / "source")
    stored = gather_all(api.open(tmp_path / "source"))
    assert len({key.rpartition("/")[2] for key in stored}) > 2

    for tp, dp, zero in ((2, 1, 0), (1, 1, 0), (1, 2, 1)):
        out, again = tmp_path / f"out{tp}{zero}", tmp_path / f"again{tp}{zero}"
        if (name, zero) == ("Lamb", 1):
            continue  # does not run with ZeRO
        api.convert(tmp_path / "source", out, to="deepspeed", tp=tp, dp=dp, zero=zero)
        more: dict[str, Any] = {"zero_allow_untested_optimizer": True}
        if (name, zero) == ("Muon", 1):
            more["zero_optimization"] = {"reduce_scatter": False}
        target = {**job, "config": {**job["config"], **more}, "world": tp * dp, "tp": tp}
        resumed = engine(**target, zero=zero, skip=2, steps=2, load=out, resave=again)
        if tp == 2:
            assert resumed == losses[2:]
        held = gather_all(api.open(again))
        assert held.keys() == stored.keys()
        assert all(held[key].tobytes() == array.tobytes() for key, array in stored.items())


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        # It makes its states before the wrapper gives it other parameters.
        ({"type": "Adagrad", "params": {"lr": 0.01}}, "KeyError"),
        ({"type": "OneBitAdam", "params": {"lr": 1e-3}}, "is not a supported DeepSpeed Optimizer"),
        ({"type": "Lion", "params": {"lr": 1e-4}}, "had not been implemented on CPU"),
    ],
)
def test_other_optimizers_leave_no_checkpoint(
    optimizer: dict[str, Any], words: str, engine: Any, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=words):
        engine(**job_of(optimizer), world=1, zero=0, steps=1, save=tmp_path / "source")
