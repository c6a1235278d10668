"""The real engine resumes from ZeRO-3 files, and saves them again as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop


def require_same_states(one: Path, other: Path) -> None:
    states = [gather_all(api.open(folder)) for folder in (one, other)]
    common = states[0].keys() & states[1].keys()
    assert len(common) > 60
    for key in common:
        assert states[0][key].tobytes() == states[1][key].tobytes(), key


def test_an_engine_of_more_ranks_saves_again_what_it_was_given(
    engine, require_saved_again, shared: Path, tmp_path: Path, copied
) -> None:
    """Three ranks, for which chunks are padded; small sub-groups; Conv1D layers and biases."""
    settings = {"sub_group_size": 20_000}
    source = copied(shared / "checkpoints" / "gpt2_tp1dp2_z1", tmp_path / "source")
    edit_file(
        source / "step" / "mp_rank_00_model_states.pt",
        lambda model: model["ds_config"]["zero_optimization"].update(settings),
    )

    report = api.convert(source, tmp_path / "out", to="deepspeed", dp=3, zero=3)

    assert "sub-groups" in {finding.kind for finding in report.findings}
    job = {"model": "gpt2", "world": 3, "zero": 3, "config": {"zero_optimization": settings}}
    engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    require_saved_again(tmp_path / "out", tmp_path / "again")


def test_tensor_parallel_ranks_save_again_what_they_were_given(
    engine, require_saved_again, shared: Path, tmp_path: Path
) -> None:
    """From there on the stages round the norm of the gradients differently."""
    source = shared / "checkpoints" / "llama_tp2_z1"
    api.convert(source, tmp_path / "out", to="deepspeed", zero=3)

    job = {"model": "llama", "world": 2, "tp": 2, "zero": 3}
    engine(**job, load=tmp_path / "out", resave=tmp_path / "again")

    require_saved_again(tmp_path / "out", tmp_path / "again")


def test_training_goes_on_bit_for_bit_from_zero_1_to_zero_3_and_back(
    engine, shared: Path, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "llama_tp1dp2_z1"
    job = {"model": "llama", "world": 2, "steps": 2}
    api.convert(source, tmp_path / "three", to="deepspeed", zero=3)
    api.convert(tmp_path / "three", tmp_path / "one", to="deepspeed", zero=1)

    losses = [
        engine(**job, zero=zero, load=folder, save=tmp_path / f"{folder.name} later")
        for zero, folder in ((1, source), (3, tmp_path / "three"), (1, tmp_path / "one"))
    ]

    assert losses[0] == losses[1] == losses[2]
    for folder in ("three", "one"):
        require_same_states(tmp_path / f"{source.name} later", tmp_path / f"{folder} later")


def test_deepspeeds_own_converter_reads_it(engine, shared: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = shared / "checkpoints" / "llama_tp2_z1"
    api.convert(source, tmp_path / "out", to="deepspeed", dp=3, zero=3)

    engine(peer=[tmp_path / "out" / "step", tmp_path / "universal"])

    expected = gather_all(api.open(source))
    for key in [key for key in expected if key.endswith(("/fp32", "/exp_avg", "/exp_avg_sq"))]:
        read = torch.load(tmp_path / "universal" / "zero" / f"{key}.pt", weights_only=False)
        found = read["param"] if isinstance(read, dict) else read
        assert found.numpy().tobytes() == expected[key].tobytes(), key
