"""Files of a run with another number of ranks."""

from __future__ import annotations

import shutil

import pytest

from restride import api
from restride.testing.saved_values import edit_file

OPTIMIZER = "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def test_an_optimizer_file_of_twice_as_many_data_parallel_ranks(damaged):
    run = damaged("codegen_fused_tp2_z1")
    run.take_from("codegen_fused_tp2dp2_z1", OPTIMIZER)

    run.check_finds(OPTIMIZER, "dp rank 0, tp rank 1", "partition_count is 2")
    run.convert_refuses()


def test_an_optimizer_file_of_half_as_many_data_parallel_ranks(damaged):
    run = damaged("codegen_fused_tp2dp2_z1")
    run.take_from("codegen_fused_tp2_z1", OPTIMIZER)

    run.check_finds(OPTIMIZER, "dp rank 0, tp rank 1")
    run.convert_refuses()


def test_a_model_file_of_twice_as_many_data_parallel_ranks(damaged):
    run = damaged("codegen_fused_tp2_z1")
    run.take_from("codegen_fused_tp2dp2_z1", "mp_rank_01_model_states.pt")

    run.check_finds("dp_world_size is 1", "mp_rank_01_model_states.pt it is 2")
    run.convert_refuses()


def test_a_file_without_tensor_parallelism_in_a_run_with_it(damaged):
    run = damaged("llama_tp2_z1")
    run.take_from("llama_tp1dp2_z1", "mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")

    run.check_finds("mp_world_size is 1", "mp_rank_01_model_states.pt it is 2")
    run.convert_refuses()


@pytest.mark.parametrize("checkpoint", ["llama_tp1dp2_z1", "llama_tp1dp2_z3"])
def test_a_partition_count_of_another_world(damaged, checkpoint):
    run = damaged(checkpoint)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def change(root):
        state = root["optimizer_state_dict"]
        count = state["partition_count"]
        state["partition_count"] = [4] * len(count) if isinstance(count, list) else 4

    edit_file(run.file(name), change)

    run.check_finds(name, "dp rank 1, tp rank 0", "partition_count is 4")
    run.convert_refuses()


def test_files_of_ranks_that_the_run_does_not_have_are_told_of_and_left_alone(damaged):
    run = damaged("llama_tp1dp2_z1")
    own = run.file("zero_pp_rank_1_mp_rank_00_optim_states.pt")
    shutil.copyfile(own, own.with_name(own.name.replace("rank_1", "rank_7")))

    run.check_finds("rank_7", "is of a rank that a run with dp=2, tp=1 does not have", "stale-file")


def test_a_file_of_another_precision_beside_that_of_a_rank_is_told_of(damaged):
    """An engine of another configuration saved under the same tag; one of them is passed over."""
    run = damaged("llama_tp1dp2_z1")
    file = run.file("zero_pp_rank_1_mp_rank_00_optim_states.pt")
    other = file.name.removeprefix("bf16_")
    assert other != file.name
    shutil.copyfile(file, file.with_name(other))

    (told,) = api.check(run.folder).findings

    assert (told.kind, told.severity, told.where) == ("stale-file", "warning", f"step/{other}")
    assert f"step/{other} is of a rank that has step/{file.name} as well" in told.message
    assert "left out" in told.message


@pytest.mark.parametrize("checkpoint", ["mixtral_ep2_z3", "llama_tp1dp2_z3"])
def test_an_expert_file_beside_those_of_zero_3_is_told_of(damaged, shared, checkpoint):
    """The optimizer files have the experts there; what was left under the tag is of no use."""
    run = damaged(checkpoint)
    name = "layer_0_expert_1_mp_rank_00_model_states.pt"
    before = api.check(run.folder)
    source = shared / "checkpoints" / "mixtral_ep2_z1" / "step" / name
    shutil.copyfile(source, run.folder / "step" / name)

    (told,) = [f for f in api.check(run.folder).findings if f not in before.findings]

    assert (told.kind, told.severity, told.where) == ("stale-file", "warning", name)
