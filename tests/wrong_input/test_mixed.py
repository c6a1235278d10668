"""Two runs are mixed: every file is sound by itself."""

from __future__ import annotations

import numpy as np
import pytest

from restride import api
from restride.errors import BudgetError
from restride.executors import masters

MODEL = "mp_rank_01_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def test_a_model_file_of_a_run_that_cut_the_same_model_another_way(damaged):
    run = damaged("codegen_fused_tp2_z1")
    run.take_from("codegen_rowcut_tp2_z1", MODEL)

    run.check_finds(OPTIMIZER, "dp rank 0, tp rank 1", "than the 62272 elements that param_shapes")
    run.convert_refuses()


@pytest.mark.parametrize("is_copied", [True, False])
def test_optimizer_files_of_two_ranks_that_were_exchanged_or_copied_over_each_other(
    damaged, is_copied
):
    run = damaged("codegen_fused_tp2dp2_z1")
    first, second = (run.file(f"zero_pp_rank_{dp}_mp_rank_01_optim_states.pt") for dp in range(2))
    content = first.read_bytes()
    if not is_copied:
        first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    number = 1 if is_copied else 0
    run.check_finds(
        f"rank_{number}_mp_rank_01_optim_states.pt",
        f"says that it is partition {1 - number} of 2, by its name it is partition {number}; files "
        "of two ranks were exchanged",
    )
    run.convert_refuses()


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_file_of_a_run_in_another_precision(damaged, name):
    run = damaged("llama_tp2_z1_fp32")
    run.take_from("llama_tp2_z1", name)

    run.check_finds(name)
    run.convert_refuses(weights=name == MODEL)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_file_of_a_run_at_another_zero_stage(damaged, stage):
    run = damaged(f"llama_tp1dp2_z{stage}")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    run.take_from(f"llama_tp1dp2_z{3 - stage}", name)

    run.check_finds("zero_stage is", name)
    run.convert_refuses()


def test_files_of_zero_3_among_those_of_zero_1(damaged):
    run = damaged("llama_tp1dp2_z1")
    run.take_from(
        "llama_tp1dp2_z3",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )

    run.check_finds("zero_pp_rank_0_mp_rank_00_optim_states.pt")
    run.convert_refuses()


def overwrite(run, dp, tp):
    """Give an optimizer file the master copies of a run with another seed."""
    catalog = api.open(run.folder)
    rng = np.random.default_rng(0)
    name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"
    path = run.file(name)
    rank = dp * dict(catalog.mesh.axes)["tp"] + tp
    with path.open("r+b") as file:
        for tensor in catalog.tensors:
            entry = tensor.states.get("fp32")
            if entry is not None and entry.regions[rank] is not None:
                file.seek(entry.regions[rank].start_nbytes)
                values = rng.normal(0, 0.02, entry.layout.shard_numel(rank))
                file.write(values.astype(np.float32).tobytes())
    return name


@pytest.mark.parametrize(
    ("checkpoint", "dp", "tp"),
    [
        ("llama_tp1dp2_z1", 1, 0),
        ("llama_tp1dp2_z2", 0, 0),
        ("gpt2_tp1dp2_z1", 1, 0),
        ("codegen_fused_tp2dp2_z1", 1, 1),
        ("mixtral_ep2_z1", 1, 0),
    ],
)
def test_an_optimizer_file_of_the_same_configuration_and_step(damaged, checkpoint, dp, tp):
    """Nothing in it tells but the values: its master copies are not the weights."""
    run = damaged(checkpoint)
    name = overwrite(run, dp, tp)

    run.check_finds(name, f"dp rank {dp}, tp rank {tp}", "master-mismatch")
    run.convert_refuses(weights=False)


@pytest.mark.parametrize("checkpoint", ["llama_tp1dp2_z1", "llama_tp2_z1", "mixtral_ep2_z1"])
def test_the_weights_alone_are_written_with_a_warning_where_masters_are_of_another_save(
    damaged, checkpoint, tmp_path
):
    run = damaged(checkpoint)
    before = api.convert(run.folder, tmp_path / "before")
    assert not [found for found in before.findings if found.severity != "note"]
    name = overwrite(run, 0, 0)

    report = api.convert(run.folder, tmp_path / "after")

    told = [found for found in report.findings if found.severity == "warning"]
    assert {found.kind for found in told} == {"master-mismatch"}
    assert any(name in found.message and "different saves" in found.message for found in told)


def test_a_look_at_the_masters_takes_no_more_memory_than_the_weights_have(
    damaged, tmp_path, monkeypatch
):
    run = damaged("llama_tp2_z1")
    monkeypatch.setattr(masters, "_SPOT_SCRATCH_NBYTES", 1 << 30)

    assert api.convert(run.folder, tmp_path / "out", budget_nbytes=1 << 24).written_nbytes
    with pytest.raises(BudgetError):
        api.convert(run.folder, tmp_path / "all", states="all", budget_nbytes=1 << 24)


def test_a_model_file_of_the_same_configuration_and_step(damaged):
    """Parameters that every rank holds whole are not the same, and no master copy fits."""
    run = damaged("llama_tp2_z1")
    catalog = api.open(run.folder)
    rng = np.random.default_rng(0)
    with run.file(MODEL).open("r+b") as file:
        for tensor in catalog.tensors:
            region, entry = tensor.states["weight"].regions[1], tensor.states["weight"]
            file.seek(region.start_nbytes)
            values = rng.normal(0, 0.02, entry.layout.shard_numel(1)).astype(np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())

    run.check_finds("master-mismatch", MODEL, "replica-drift", "'model.norm.weight'")
    run.convert_refuses()
