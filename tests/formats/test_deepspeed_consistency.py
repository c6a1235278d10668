"""What all files of a save say alike: one that says something else is named, with both values."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from restride import api
from restride.errors import CorruptError
from restride.formats.deepspeed import read_catalog
from restride.testing.saved_values import Array, edit_file

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
