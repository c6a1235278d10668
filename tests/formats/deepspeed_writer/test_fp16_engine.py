"""Training in fp16, with a loss scale and a learning rate that move: the real engine goes on.

DeepSpeed asks whether the CPU computes in fp16 by itself, and refuses where it does not. torch does
it all the same, so that the engine is told that it may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.interop, pytest.mark.slow]

# The first steps overflow at a scale of 2**24 and are skipped; every second one that does not
# doubles the scale.
RATES = {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_max_lr": 1e-2}
SCALED = {
    "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2},
    "scheduler": {"type": "WarmupDecayLR", "params": RATES},
}
COUNTED = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
JOB = {"model": "llama", "dtype": "fp16", "config": SCALED}


@pytest.fixture(scope="module")
def source(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("fp16") / "source"
    losses = engine(**JOB, world=2, zero=1, steps=4, more=3, save=folder)
    return folder, losses[4:]


def skipped_steps(folder: Path) -> list[int]:
    found: list[int] = []
    for file in sorted(folder.glob("step/*model_states.pt")):
        edit_file(file, lambda root: found.append(root["skipped_steps"]))
    return found


def test_a_run_that_skipped_steps_goes_on_at_every_stage_and_on_other_ranks(
    source: tuple[Path, list[str]], engine: Any, tmp_path: Path
) -> None:
    folder, unbroken = source
    assert len(set(unbroken)) > 1
    assert skipped_steps(folder)[0] > 0

    api.convert(folder, tmp_path / "three", to="deepspeed", dp=2, zero=3)
    api.convert(tmp_path / "three", tmp_path / "two", to="deepspeed", dp=1, zero=2)
    for dp, zero, name in ((2, 3, "three"), (1, 2, "two")):
        job = {"world": dp, "zero": zero, "skip": 4, "more": 3, "load": tmp_path / name}
        assert engine(**JOB, **job) == unbroken
    api.convert(folder, tmp_path / "universal", to="universal")
    resumed = {"skip": 4, "more": 3, "load": tmp_path / "universal", "universal": True}
    assert engine(**JOB, world=2, zero=2, **resumed) == unbroken


def scaling(folder: Path) -> list[dict[str, object]]:
    """What the optimizer of each file counts of its loss scale."""
    found: list[dict[str, object]] = []

    def look(root: Any) -> None:
        state = root.get("optimizer_state_dict", root.get("optimizer"))
        numbers = state["loss_scaler"].state if "loss_scaler" in state else state
        found.append({key: numbers[key] for key in COUNTED})

    files = sorted(folder.glob("step/*optim_states.pt"))
    for file in files or sorted(folder.glob("step/*model_states.pt")):
        edit_file(file, look)
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_an_engine_holds_the_scale_with_all_that_it_counts(
    zero: int, source: tuple[Path, list[str]], engine: Any, tmp_path: Path
) -> None:
    """A power of two leaves no trace in a loss, but for the steps that are skipped."""
    folder, _ = source
    (before, *others) = scaling(folder)
    assert others == [before]
    assert before["cur_scale"] not in {1.0, 2.0**24} or before["last_overflow_iter"] != -1

    api.convert(folder, tmp_path / "out", to="deepspeed", dp=2, zero=zero)

    engine(**JOB, world=2, zero=zero, load=tmp_path / "out", resave=tmp_path / "again")
    for written in ("out", "again"):
        assert scaling(tmp_path / written) == [before] * (2 if zero else 1)


@pytest.fixture(scope="module")
def without_zero(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("fp16") / "source"
    losses = engine(**JOB, world=2, tp=2, zero=0, steps=4, more=2, save=folder)
    return folder, losses[4:]


@pytest.mark.parametrize(
    ("tp", "dp", "zero"),
    [
        (2, 1, 0),
        (1, 2, 2),
        pytest.param(1, 1, 0, marks=pytest.mark.thorough),
        pytest.param(2, 1, 3, marks=pytest.mark.thorough),
    ],
)
def test_without_zero_it_is_what_an_engine_of_any_stage_holds(
    tp: int,
    dp: int,
    zero: int,
    without_zero: tuple[Path, list[str]],
    engine: Any,
    tmp_path: Path,
) -> None:
    """It takes other steps there: without ZeRO a loss scale is divided out elsewhere."""
    folder, unbroken = without_zero

    api.convert(folder, tmp_path / "out", to="deepspeed", tp=tp, dp=dp, zero=zero)

    again = tmp_path / "again"
    job = {**JOB, "world": tp * dp, "tp": tp, "zero": zero, "load": tmp_path / "out"}
    losses = engine(**job, skip=4, more=2, resave=again)
    if zero == 0 and tp == 2:
        assert losses == unbroken
    held, stored = (gather_all(api.open(path)) for path in (again, folder))
    states = [key for key in stored if key.endswith(("/fp32", "/exp_avg", "/exp_avg_sq"))]
    assert len(states) == 3 * 21
    assert all(held[key].tobytes() == stored[key].tobytes() for key in states)
