"""A rank's file is from another step of the same run."""

from __future__ import annotations

import numpy as np
import pytest

from restride.testing.saved_values import Array, edit_file


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("llama_tp2_z1", "mp_rank_01_model_states.pt"),
        ("llama_tp2_z3", "zero_pp_rank_0_mp_rank_01_model_states.pt"),
        ("llama_tp1dp2_z3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("codegen_fused_tp2_z0", "mp_rank_01_model_states.pt"),
    ],
)
def test_a_model_file_counts_other_steps(damaged, checkpoint, name):
    run = damaged(checkpoint)
    edit_file(run.file(name), lambda root: root.update(global_steps=7, global_samples=56))

    run.check_finds("global_steps is 7 in", name, "global_samples is 56 in", "different saves")
    run.convert_refuses()


def step_of(root):
    state = root["optimizer_state_dict"]
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


@pytest.mark.parametrize(
    ("checkpoint", "dp", "tp"),
    [
        ("llama_tp2_z1", 0, 1),
        ("llama_tp1dp2_z2", 1, 0),
        ("llama_tp1dp2_z3", 1, 0),
        ("mixtral_ep2_z1", 1, 0),
    ],
)
@pytest.mark.parametrize("is_number", [False, True])
def test_an_optimizer_file_counts_other_steps(damaged, checkpoint, dp, tp, is_number):
    run = damaged(checkpoint)
    name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"

    def change(root):
        for own in step_of(root)["state"].values():
            own["step"] = 7 if is_number else Array("float32", (), np.float32(7).tobytes())

    edit_file(run.file(name), change)

    run.check_finds(name, "step")
    run.convert_refuses(weights="z3" in checkpoint)


@pytest.mark.parametrize(
    ("checkpoint", "dp", "tp"),
    [("llama_tp2_z1", 0, 1), ("llama_tp1dp2_z3", 1, 0), ("mixtral_ep2_z1", 1, 0)],
)
def test_a_schedule_has_moved_the_learning_rate_on(damaged, checkpoint, dp, tp):
    run = damaged(checkpoint)
    name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"

    def change(root):
        for group in step_of(root)["param_groups"]:
            group["lr"] = 0.0009

    edit_file(run.file(name), change)

    run.check_finds(name, f"dp rank {dp}, tp rank {tp}", "lr is 0.0009 and not 0.001")
    run.convert_refuses(weights="z3" in checkpoint)
