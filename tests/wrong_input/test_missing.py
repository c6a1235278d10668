"""A file of a rank is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from restride import api
from restride.errors import RestrideError
from restride.testing.saved_values import edit_file

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"


@pytest.mark.parametrize(
    ("checkpoint", "name", "words"),
    [
        ("llama_tp2_z1", "mp_rank_01_model_states.pt", ("1 of 2 model files", "mp_rank_01_model")),
        ("llama_tp2_z1", "mp_rank_00_model_states.pt", ("1 of 2 model files", "mp_rank_00_model")),
        (
            "codegen_fused_tp2_z0",
            "mp_rank_01_model_states.pt",
            ("1 of 2 model files", "mp_rank_01_model_states.pt"),
        ),
        (
            "llama_tp1dp2_z3",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            ("1 of 2 optimizer files", "dp 1 tp 0", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ),
        (
            "llama_tp2_z3",
            "zero_pp_rank_0_mp_rank_01_optim_states.pt",
            ("1 of 2 optimizer files", "dp 0 tp 1"),
        ),
        (
            "mixtral_ep2_z1",
            "layer_1_expert_2_mp_rank_00_model_states.pt",
            ("'model.layers.1.mlp.experts", "layer_1_expert_*"),
        ),
    ],
)
def test_a_file_with_weights_is_missing(damaged, checkpoint, name, words):
    run = damaged(checkpoint)
    run.file(name).unlink()

    run.check_finds(*words)
    run.convert_refuses()


@pytest.mark.parametrize(
    ("checkpoint", "dp", "tp"),
    [("llama_tp2_z1", 0, 1), ("llama_tp1dp2_z2", 1, 0), ("codegen_fused_tp2dp2_z1", 1, 1)],
)
def test_a_file_of_the_optimizer_is_missing_and_the_weights_are_all_there(
    damaged, checkpoint, dp, tp
):
    run = damaged(checkpoint)
    run.file(f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt").unlink()

    run.check_finds(
        f"(dp {dp} tp {tp}), bf16_zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt;",
        "missing-file",
    )
    run.convert_refuses(weights=False)


def test_a_model_file_of_zero_3_is_missing_that_says_nothing_of_its_own(damaged):
    """Each rank writes one, and their weights are in the optimizer files."""
    run = damaged("llama_tp1dp2_z3")
    run.file("zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()

    run.check_finds("1 of 2 model files is missing (dp 1 tp 0)")
    run.convert_refuses()


@pytest.mark.parametrize("ranks", [[1], [1, 2], [0]])
def test_some_ranks_do_not_hold_their_chunk_of_a_frozen_weight(tmp_path, ranks):
    """The optimizer files have nothing of it, and the files of these ranks are there."""
    shutil.copytree(RECORDED / "partitioned_z3", tmp_path / "saved")
    for dp in ranks:
        name = f"zero_pp_rank_{dp}_mp_rank_00_model_states.pt"
        edit_file(
            tmp_path / "saved" / "step" / name,
            lambda root: root["frozen_param_fragments"].pop("base.weight") and None,
        )

    report = api.check(tmp_path / "saved")

    (found,) = [finding for finding in report.findings if finding.kind == "frozen-missing"]
    assert found.severity == "error"
    assert f"the model files of {len(ranks)} of 3 ranks lack its chunk" in found.message
    assert all(f"dp {dp} tp 0" in found.message for dp in ranks)
    with pytest.raises(RestrideError, match=r"base\.weight"):
        api.convert(tmp_path / "saved", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_run_may_leave_all_frozen_weights_out(tmp_path):
    """`exclude_frozen_parameters` of DeepSpeed: adapters without their base."""
    shutil.copytree(RECORDED / "partitioned_z3", tmp_path / "saved")
    for file in (tmp_path / "saved" / "step").glob("*_model_states.pt"):
        edit_file(file, lambda root: root.update(frozen_param_fragments=None))

    kinds = {finding.kind for finding in api.check(tmp_path / "saved").findings}

    assert "frozen-missing" not in kinds
    assert "no-weight" in kinds


@pytest.mark.parametrize("dp", [0, 1, 2])
def test_frozen_weights_of_a_universal_folder_are_lost_with_the_model_file_of_any_rank(
    tmp_path, dp
):
    """Their chunks are nowhere else: `check` said ok, and conversions left the weights out."""
    api.convert(RECORDED / "partitioned_z3", tmp_path / "out", to="universal")
    name = f"zero_pp_rank_{dp}_mp_rank_00_model_states.pt"
    (tmp_path / "out" / "step_universal" / name).unlink()

    errors = [f for f in api.check(tmp_path / "out").findings if f.severity == "error"]

    (lost,) = [finding for finding in errors if finding.kind == "missing-file"]
    assert f"1 of 3 model files is missing (dp {dp} tp 0), {name}; the frozen" in lost.message
    with pytest.raises(RestrideError, match="the frozen weights"):
        api.convert(tmp_path / "out", tmp_path / "again", to="safetensors")


@pytest.mark.parametrize(
    ("dp", "tp", "words"),
    [(0, 1, "do not resume without those of dp 0"), (1, 0, "engines do without")],
)
def test_a_model_file_of_a_universal_folder_is_missing_that_has_no_weight(tmp_path, dp, tp, words):
    api.convert(RECORDED / "tensor_parallel_z3", tmp_path / "out", to="universal")
    name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_model_states.pt"
    whole = api.check(tmp_path / "out")
    (tmp_path / "out" / "step_universal" / name).unlink()
    (tmp_path / "out" / "restride.json").unlink()

    (told,) = api.check(tmp_path / "out").findings

    assert not whole.findings
    assert (told.kind, told.severity) == ("missing-file", "warning")
    assert f"1 of 4 model files is missing (dp {dp} tp {tp}), {name}; " in told.message
    assert words in told.message
    assert api.convert(tmp_path / "out", tmp_path / "again", to="safetensors").written_nbytes


@pytest.mark.parametrize("name", ["experts_z0", "experts_z1", "experts_z3"])
def test_a_universal_folder_has_experts_among_its_parameters_and_lacks_no_file(tmp_path, name):
    api.convert(RECORDED / name, tmp_path / "out", to="universal")

    kinds = {finding.kind for finding in api.check(tmp_path / "out").findings}

    assert "missing-file" not in kinds


@pytest.mark.parametrize("limit", [None, 100_000])
@pytest.mark.parametrize("lost", ["optimizer", "state.json", "model"])
def test_a_part_of_an_output_of_safetensors_is_lost_with_the_manifest(
    damaged, tmp_path, lost, limit
):
    """As a copy that was stopped leaves it: the files that are there are whole."""
    out = tmp_path / "out"
    run = damaged("llama_tp2_z1")
    api.convert(run.folder, out, states="all", max_shard_nbytes=limit)
    assert not api.check(out).findings
    for file in [out / "restride.json", *out.glob(f"{lost}*")]:
        file.unlink()

    (told,) = [f for f in api.check(out).findings if f.severity != "note"]

    assert (told.kind, told.severity) == ("missing-file", "error")
    assert f" was written together with {lost}" in told.message
    with pytest.raises(RestrideError, match="was written together with"):
        api.convert(out, tmp_path / "again", states="all")
    if lost != "model":
        assert api.convert(out, tmp_path / "again").written_nbytes


def test_one_file_of_an_output_is_read_without_the_others(damaged, tmp_path):
    run = damaged("llama_tp2_z1")
    api.convert(run.folder, tmp_path / "out", states="all")
    for name in ("optimizer.safetensors", "restride.json"):
        (tmp_path / "out" / name).unlink()

    assert not api.check(tmp_path / "out" / "model.safetensors").findings


def test_what_an_output_was_written_with_is_no_value_of_it(damaged, tmp_path):
    """Conversions of it would carry it on, into outputs with other files."""
    run = damaged("llama_tp2_z1")
    api.convert(run.folder, tmp_path / "all", states="all")
    api.convert(tmp_path / "all", tmp_path / "again", states="all")

    first, again = (api.open(tmp_path / name).values for name in ("all", "again"))

    assert first["safetensors_metadata"] == {
        name: {"format": "pt"} for name in ("model.safetensors", "optimizer.safetensors")
    }
    assert again == first
