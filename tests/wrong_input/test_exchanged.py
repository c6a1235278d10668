"""Files are under the names of other ranks: each is sound, and all have the same shapes."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from restride import api
from restride.errors import RestrideError
from restride.testing.saved_values import edit_file

FILES = {
    "model": ("codegen_fused_tp2_z0", "mp_rank_00_model_states", "mp_rank_01_model_states"),
    "partition": (
        "llama_tp1dp2_z3",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states",
    ),
    "model of ZeRO-3": (
        "llama_tp2_z3",
        "zero_pp_rank_0_mp_rank_00_model_states",
        "zero_pp_rank_0_mp_rank_01_model_states",
    ),
    "expert": (
        "mixtral_ep2_z1",
        "layer_0_expert_1_mp_rank_00_model_states",
        "layer_0_expert_3_mp_rank_00_model_states",
    ),
    "expert of another layer": (
        "mixtral_ep2_z1",
        "layer_0_expert_1_mp_rank_00_model_states",
        "layer_1_expert_1_mp_rank_00_model_states",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_two_files_are_exchanged(damaged, kind):
    checkpoint, *names = FILES[kind]
    run = damaged(checkpoint)
    first, second = (run.folder / "step" / f"{name}.pt" for name in names)
    first.rename(run.folder / "kept")
    second.rename(first)
    (run.folder / "kept").rename(second)

    run.check_finds(f"{names[0]}.pt was saved as {names[1]}.pt", "[other-rank]")
    run.convert_refuses()


@pytest.mark.parametrize("kind", [kind for kind in FILES if "expert" not in kind])
def test_one_file_is_copied_over_another(damaged, kind):
    checkpoint, *names = FILES[kind]
    run = damaged(checkpoint)
    first, second = (run.folder / "step" / f"{name}.pt" for name in names)
    shutil.copyfile(first, second)

    run.check_finds(f"{names[1]}.pt was saved as {names[0]}.pt", "[other-rank]")
    run.convert_refuses()


WRITTEN = [
    (
        "llama_tp1dp2_z1",
        {"to": "deepspeed", "dp": 2, "zero": 3},
        "bf16_zero_pp_rank_{}_mp_rank_00_optim_states",
    ),
    ("llama_tp2_z1", {"to": "deepspeed", "zero": 0}, "mp_rank_0{}_model_states"),
    (
        "llama_tp1dp2_z1",
        {"to": "deepspeed", "dp": 12, "zero": 3},
        "zero_pp_rank_1{}_mp_rank_00_model_states",
    ),
    (
        "mixtral_ep2_z1",
        {"to": "deepspeed", "dp": 4, "ep": 4},
        "layer_0_expert_{}_mp_rank_00_model_states",
    ),
    ("llama_tp2_z1", {"to": "universal"}, "mp_rank_0{}_model_states"),
]


@pytest.mark.parametrize(("checkpoint", "wanted", "name"), WRITTEN)
def test_two_files_of_an_output_are_exchanged_that_lost_its_manifest(
    damaged, tmp_path, checkpoint, wanted, name
):
    """Restride calls files inside as torch does."""
    api.convert(damaged(checkpoint).folder, tmp_path / "out", **wanted)
    (tmp_path / "out" / "restride.json").unlink()
    names = [name.format(number) for number in (1, 0)]
    first, second = (next(tmp_path.glob(f"out/*/{name}.pt")) for name in names)
    assert "other-rank" not in {finding.kind for finding in api.open(tmp_path / "out").findings}
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)

    found = {
        finding.where: finding.details["saved_as"]
        for finding in api.open(tmp_path / "out").findings
        if finding.kind == "other-rank"
    }
    assert found == {first.name: second.name, second.name: first.name}
    assert api.check(tmp_path / "out").verdict != "ok"


def test_a_file_of_another_precision_by_its_name_is_of_the_same_rank(damaged):
    run = damaged("llama_tp1dp2_z1")
    path = run.file("zero_pp_rank_1_mp_rank_00_optim_states.pt")
    path.rename(path.with_name(path.name.removeprefix("bf16_")))

    assert api.check(run.folder).verdict == "ok"


def test_a_file_that_says_nothing_of_its_name_is_taken_at_its_name(damaged):
    run = damaged("llama_tp1dp2_z1")
    edit_file(run.file("mp_rank_00_model_states.pt"), lambda _: None)

    assert api.check(run.folder).verdict == "ok"


def test_the_model_files_of_a_universal_folder_are_held_against_their_names_too(damaged, tmp_path):
    api.convert(damaged("llama_tp2_z1").folder, tmp_path / "universal", to="universal")
    folder = tmp_path / "universal" / "step_universal"
    shutil.copyfile(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")

    found = [finding.kind for finding in api.open(tmp_path / "universal").findings]
    assert found.count("other-rank") == 1


@pytest.mark.parametrize("checkpoint", ["llama_tp2_z1", "llama_tp1dp2_z3"])
@pytest.mark.parametrize("is_copied", [True, False])
def test_two_states_of_a_parameter_of_a_universal_folder_are_exchanged(
    damaged, tmp_path, checkpoint, is_copied
):
    """They have one shape, and without the manifest nothing else tells them apart."""
    out = tmp_path / "out"
    api.convert(damaged(checkpoint).folder, out, to="universal")
    (out / "restride.json").unlink()
    folder = out / "step_universal" / "zero" / "model.norm.weight"
    if is_copied:
        shutil.copyfile(folder / "exp_avg.pt", folder / "exp_avg_sq.pt")
    else:
        (folder / "exp_avg.pt").rename(out / "kept")
        (folder / "exp_avg_sq.pt").rename(folder / "exp_avg.pt")
        (out / "kept").rename(folder / "exp_avg_sq.pt")

    told = [finding for finding in api.check(out).findings if finding.kind == "other-rank"]

    assert len(told) == 2 - is_copied
    assert "model.norm.weight/exp_avg_sq.pt was saved as exp_avg.pt: " in told[-1].message
    with pytest.raises(RestrideError, match="was saved as"):
        api.convert(out, tmp_path / "again")


def test_what_others_call_a_state_inside_is_theirs(damaged, tmp_path):
    out = tmp_path / "out"
    api.convert(damaged("llama_tp2_z1").folder, out, to="universal")
    (out / "restride.json").unlink()
    file = out / "step_universal" / "zero" / "model.norm.weight" / "exp_avg_sq.pt"
    with zipfile.ZipFile(file) as zipped:
        assert zipped.namelist()[0] == "exp_avg_sq/data.pkl"
    file.write_bytes(file.read_bytes().replace(b"exp_avg_sq/", b"exp_avg_qs/"))

    assert not api.check(out).findings
