"""What all files of a save say alike: one that says something else is named, with both values."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from restride import api
from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import CorruptError
from restride.formats.deepspeed import read_catalog
from restride.testing.saved_values import Array, edit_file
from restride.testing.whole_files import rounded_run, write_whole_run
from restride.testing.zero_files import Parameter, ZeroRun
from restride.testing.zero_runs import distinct

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
MODEL = "step/mp_rank_00_model_states.pt"


def rank(dp, prefix="bf16_"):
    return f"step/{prefix}zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"


@pytest.fixture(params=["tied_frozen_z1", "elastic_z1", "aligned_frozen_z2", "bf16_optimizer_z1"])
def saved(request, tmp_path):
    """A checkpoint of the real engine, with several parameter groups."""
    shutil.copytree(RECORDED / request.param, tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder, name, change):
    edit_file(folder / name, change)


def findings(folder, *kinds):
    return [finding for finding in read_catalog(folder).findings if finding.kind in kinds]


def test_the_files_of_one_save_agree(saved):
    assert not findings(saved, "run-mismatch", "settings-mismatch", "step-mismatch")


def test_a_file_of_another_version(saved):
    edit(saved, rank(1), lambda root: root.update(ds_version="0.18.0"))

    (found,) = findings(saved, "run-mismatch")

    assert found.severity == "error"
    assert found.where == rank(1)
    assert "DeepSpeed '0.18.0'" in found.message
    assert "'0.19.8'" in found.message
    with pytest.raises(CorruptError, match="of different runs; put all files of one save"):
        api.convert(saved, saved.parent / "out")


def test_a_file_of_a_run_with_another_configuration(saved):
    edit(
        saved, rank(1), lambda root: root["ds_config"].update(gradient_clipping=1.0, x=1, y=2, z=3)
    )

    (found,) = findings(saved, "run-mismatch")

    assert found.severity == "warning"
    assert found.details["keys"] == ["gradient_clipping", "x", "y", "z"]
    assert "gradient_clipping is 1.0 and not 0.0, x is 1 and not None" in found.message
    assert found.message.endswith("and 1 more")


def test_a_file_without_version_and_configuration_contradicts_nothing(saved):
    def strip(root):
        del root["ds_config"], root["ds_version"]

    edit(saved, rank(1), strip)

    assert not findings(saved, "run-mismatch")


def groups_of(root):
    return root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


@pytest.fixture
def grouped(tmp_path):
    shutil.copytree(RECORDED / "tied_frozen_z1", tmp_path / "saved")
    return tmp_path / "saved"


def test_hyperparameters_that_one_rank_has_of_its_own(grouped):
    edit(grouped, rank(2), lambda root: groups_of(root)[1].update(lr=0.5, betas=(0.9, 0.99)))

    (found,) = findings(grouped, "settings-mismatch")

    assert found.severity == "error"
    assert found.details == {"group": 1, "keys": ["lr", "betas"], "part": "optimizer"}
    assert "dp rank 2, tp rank 0 has other settings for group 1" in found.message
    assert "lr is 0.5 and not 0.02" in found.message
    assert rank(0) in found.message


def test_a_setting_that_one_rank_lacks(grouped):
    edit(grouped, rank(1), lambda root: groups_of(root)[0].pop("weight_decay") and None)

    (found,) = findings(grouped, "settings-mismatch")

    assert "weight_decay is None and not 0.1" in found.message


def test_settings_that_are_no_number_or_are_tensors_are_compared_with_care(grouped):
    for dp in range(3):
        lr = Array("float32", (), bytes(4))
        edit(grouped, rank(dp), lambda root, lr=lr: groups_of(root)[0].update(lr=lr, x=math.nan))

    assert not findings(grouped, "settings-mismatch")


def test_an_optimizer_of_another_step_does_not_keep_the_weights_from_being_converted(grouped):
    edit(grouped, rank(2), lambda root: groups_of(root)[1].update(lr=0.5))

    with pytest.raises(CorruptError, match="or convert the weights alone"):
        api.convert(grouped, grouped.parent / "all", states="all")
    assert not (grouped.parent / "all").exists()
    assert api.convert(grouped, grouped.parent / "weights").files == ("model.safetensors",)


def test_steps_in_plain_numbers_are_compared(grouped):
    for dp in range(3):

        def count(root, dp=dp):
            state = root["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[0]["step"] = 7 if dp == 1 else 2

        edit(grouped, rank(dp), count)

    (found,) = findings(grouped, "step-mismatch")

    assert (found.where, found.details) == (rank(1), {"part": "optimizer"})
    assert "is 7 in" in found.message


def test_the_step_of_an_elastic_checkpoint_is_compared(tmp_path):
    shutil.copytree(RECORDED / "elastic_z1", tmp_path / "saved")
    for dp in range(2):

        def count(root, dp=dp):
            root["optimizer_state_dict"]["base_optimizer_state_step"] = 7 if dp else 2

        edit(tmp_path / "saved", rank(dp), count)

    (found,) = findings(tmp_path / "saved", "step-mismatch")

    assert f"is 7 in {rank(1)} and 2 in {rank(0)}" in found.message


def test_a_configuration_that_is_no_dict_is_none(grouped):
    edit(grouped, rank(1), lambda root: root.update(ds_config={1: 2}))

    (found,) = findings(grouped, "run-mismatch")

    assert "and not" in found.message


def scalar_of_numpy(content):
    """A number as numpy pickles it: schedulers leave such learning rates."""
    dtype = Constructed(GlobalName("numpy", "dtype"), ("f8", False, True), state=(3, "<"))
    return Constructed(GlobalName("numpy.core.multiarray", "scalar"), (dtype, content))


def test_learning_rates_of_numpy_are_compared_by_what_they_are(grouped):
    for dp in range(3):
        lr = scalar_of_numpy(bytes(8))
        edit(grouped, rank(dp), lambda root, lr=lr: groups_of(root)[0].update(lr=lr))
    assert not findings(grouped, "settings-mismatch")

    lr = scalar_of_numpy(bytes(7) + b"\x40")
    edit(grouped, rank(1), lambda root: groups_of(root)[0].update(lr=lr))

    (found,) = findings(grouped, "settings-mismatch")
    assert (found.where, found.details["keys"]) == (rank(1), ["lr"])


def test_other_plain_numbers_of_a_group_are_compared(grouped):
    for dp in range(3):

        def count(root, dp=dp):
            state = root["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[1]["mu_product"] = 0.25 if dp == 2 else 0.5

        edit(grouped, rank(dp), count)

    (found,) = findings(grouped, "settings-mismatch")

    assert (found.severity, found.where) == ("error", rank(2))
    assert "'mu_product' of group 1 is 0.25 in" in found.message


def test_where_lists_of_two_ranks_differ_is_said(grouped):
    def change(root):
        state = root["optimizer_state_dict"]["base_optimizer_state"]
        state["state"][1]["scales"] = [0.5, 0.25]
        state["param_groups"][0]["betas"] = (0.9, 0.95)

    def change_more(root):
        change(root)
        state = root["optimizer_state_dict"]["base_optimizer_state"]
        state["state"][1]["scales"] = [0.5, 0.75]
        state["param_groups"][0]["betas"] = (0.9, 0.99)

    for dp in range(3):
        edit(grouped, rank(dp), change_more if dp == 2 else change)

    settings, state = findings(grouped, "settings-mismatch")

    assert "betas[1] is 0.99 and not 0.95" in settings.message
    assert "'scales'[1] of group 1 is 0.75 in" in state.message


def test_a_number_that_is_not_a_number_is_the_same_everywhere(grouped, tmp_path):
    def change(root):
        states = root["optimizer_state_dict"]["base_optimizer_state"]["state"]
        for state in states if isinstance(states, list) else states.values():
            state["loss"] = float("nan")

    for dp in range(3):
        edit(grouped, rank(dp), change)

    assert api.check(grouped).verdict == "ok"
    for to in ("deepspeed", "universal"):
        api.convert(grouped, tmp_path / to, to=to)
    api.convert(tmp_path / "universal", tmp_path / "back", to="deepspeed", tp=1, dp=1, zero=1)


def test_a_rank_that_scales_or_clips_otherwise_is_told_of(grouped):
    edit(grouped, rank(1), lambda root: root["optimizer_state_dict"].update(clip_grad=0.5))

    (found,) = findings(grouped, "optimizer-mismatch")

    assert (found.severity, found.where) == ("warning", rank(1))
    assert found.details == {"keys": ["clip_grad"]}


@pytest.mark.parametrize("kind", ["bare", "unfused", "flat"])
def test_hyperparameters_without_zero_are_compared_over_the_model_files(tmp_path, kind):
    arrays = {state: distinct((4, 3), 100) for state in ("fp32", "exp_avg")}
    run = ZeroRun(1, 2, {"w": Parameter((4, 3), arrays, (0, (2, 2)))})
    write_whole_run(tmp_path / "saved", rounded_run(run, kind), kind, has_names=True)
    assert not findings(tmp_path / "saved", "settings-mismatch", "optimizer-mismatch")

    def change(root):
        optimizer = root["optimizer"]
        optimizer.get("optimizer_state_dict", optimizer)["param_groups"][0]["lr"] = 0.75

    edit(tmp_path / "saved", "step/mp_rank_01_model_states.pt", change)

    (found,) = findings(tmp_path / "saved", "settings-mismatch")
    assert "tp rank 1 has other settings for group 0" in found.message
    with pytest.raises(CorruptError, match=r"lr is 0.75 and not 0.5"):
        api.convert(tmp_path / "saved", tmp_path / "out", to="deepspeed", zero=1)
