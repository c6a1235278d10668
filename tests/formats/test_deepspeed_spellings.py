"""What older versions of DeepSpeed wrote otherwise, and what they did not write yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from restride.errors import CorruptError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file

RECORDED = Path(__file__).parents[1] / "data"
ZERO_2, ZERO_3 = "deepspeed/aligned_frozen_z2", "deepspeed/partitioned_z3"
PIPELINE = "deepspeed_pipeline/tied_z1"


@pytest.fixture
def copied(tmp_path):
    """Copy a recorded checkpoint, to be changed."""

    def copy(name: str) -> Path:
        shutil.copytree(RECORDED / name, tmp_path / "copy")
        return tmp_path / "copy"

    return copy


def require_same(folder: Path, name: str) -> None:
    found, expected = gather_all(read_catalog(folder)), gather_all(read_catalog(RECORDED / name))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key


def rename(folder: Path, before: str, after: str) -> None:
    files = [file for file in (folder / "step").iterdir() if before in file.name]
    assert files
    for file in files:
        file.rename(file.with_name(file.name.replace(before, after)))


@pytest.mark.parametrize("prefix", ["", "fp16_"])
@pytest.mark.parametrize("name", [ZERO_2, ZERO_3, PIPELINE])
def test_optimizer_files_have_had_three_prefixes(copied, name, prefix):
    folder = copied(name)
    rename(folder, "bf16_zero", f"{prefix}zero")

    require_same(folder, name)


@pytest.mark.parametrize("name", [ZERO_2, ZERO_3, PIPELINE])
def test_there_was_no_underscore_before_optim_states(copied, name):
    folder = copied(name)
    rename(folder, "_optim_states", "optim_states")

    require_same(folder, name)


def test_both_spellings_of_one_rank_are_two_saves(copied):
    folder = copied(ZERO_2) / "step"
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name, folder / name.replace("_optim", "optim"))

    with pytest.raises(CorruptError, match="dp rank 0, mp rank 0 has 2 optimizer files"):
        read_catalog(folder)


def test_the_prefix_of_the_precision_decides_between_two_files(copied):
    """The engine looks for that one; the other is of a run before."""
    folder = copied(ZERO_2) / "step"
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / name.replace("bf16_", "")).write_bytes(b"of a run before")

    require_same(folder, ZERO_2)


@pytest.mark.parametrize("name", [ZERO_2, ZERO_3, PIPELINE])
def test_the_numbers_of_ranks_were_only_in_the_names_of_the_files(copied, name):
    folder = copied(name)
    for file in (folder / "step").glob("*mp_rank_*model_states.pt"):
        edit_file(file, without("dp_world_size", "mp_world_size"))

    require_same(folder, name)
    assert read_catalog(folder).mesh == read_catalog(RECORDED / name).mesh


def without(*keys: str):
    def change(root) -> None:
        for key in keys:
            del root[key]

    return change


def test_fragments_were_not_written_for_each_rank(copied):
    folder = copied(ZERO_2)
    for file in (folder / "step").glob("*_optim_states.pt"):
        edit_file(
            file, lambda root: root["optimizer_state_dict"].pop("param_slice_mappings") and None
        )

    require_same(folder, ZERO_2)


def forget_paddings(root):
    for key in ("group_paddings", "param_slice_mappings"):
        del root["optimizer_state_dict"][key]


@pytest.mark.parametrize(
    "name",
    [
        *("deepspeed/tied_frozen_z1", "deepspeed/elastic_z1", "deepspeed/round_robin_z2"),
        *("deepspeed_native_moe/residual_z1", PIPELINE),
    ],
)
def test_the_padding_that_was_cut_off_was_not_written(copied, name):
    folder = copied(name)
    for file in (folder / "step").glob("*_optim_states.pt"):
        edit_file(file, forget_paddings)

    require_same(folder, name)


def test_without_that_a_partition_that_is_short_is_not_taken_for_a_whole_one(copied):
    """The only file there is may be the one with the padding."""
    step = copied("deepspeed/elastic_z1") / "step"
    for file in step.glob("*_optim_states.pt"):
        edit_file(file, forget_paddings)
    (step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()

    with pytest.raises(CorruptError, match="cannot hold the 239 elements"):
        read_catalog(step)


def test_the_number_of_partitions_was_one_for_all_groups(copied):
    folder = copied(ZERO_2)
    for file in (folder / "step").glob("*_optim_states.pt"):
        edit_file(file, lambda root: root["optimizer_state_dict"].update(partition_count=3))

    require_same(folder, ZERO_2)
