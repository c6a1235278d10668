"""A rank's file is from another step of the same run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from restride import api
from restride.testing.saved_values import Array, edit_file

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"


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


def told_of_steps(folder: Path) -> list[tuple[str, str]]:
    found = [f for f in api.check(folder).findings if f.kind == "step-mismatch"]
    return [(f.severity, f.message.partition(": ")[0]) for f in found]


@pytest.mark.parametrize("checkpoint", ["llama_tp1dp2_z3", "llama_tp1dp2_z1"])
@pytest.mark.parametrize(
    ("steps", "skipped", "told"),
    [
        (2, 0, []),
        (9, 7, []),
        (1, 0, []),  # as what was made of files without ZeRO may have it
        (0, 0, [("warning", 0)]),
        (9, 8, []),
        (9, 9, [("warning", 0)]),
        (7, 0, [("note", 7)]),
        (3_000_000, 2, [("note", 2_999_998)]),
    ],
)
def test_all_model_files_count_other_steps_than_the_optimizer(
    damaged, checkpoint, steps, skipped, told
):
    """Nothing in the model files of ZeRO-3 could be compared with the optimizer but this."""
    run = damaged(checkpoint)
    for file in (run.folder / "step").glob("*model_states.pt"):
        edit_file(file, lambda root: root.update(global_steps=steps, skipped_steps=skipped))

    says = "the optimizer took 2 steps, by the model files (global_steps less skipped_steps) it was"
    assert told_of_steps(run.folder) == [(severity, f"{says} {count}") for severity, count in told]


@pytest.mark.parametrize("to", ["universal", "safetensors"])
def test_outputs_of_other_steps_are_told_of_as_well(damaged, tmp_path, to):
    run = damaged("llama_tp1dp2_z3")
    for file in (run.folder / "step").glob("*model_states.pt"):
        edit_file(file, lambda root: root.update(global_steps=0))
    options = {"states": "all"} if to == "safetensors" else {}
    api.convert(run.folder, tmp_path / "out", to=to, **options)

    assert [severity for severity, _ in told_of_steps(tmp_path / "out")] == ["warning"]


@pytest.mark.parametrize(
    ("rates", "is_told"), [([0.001], False), ([0.0009], True), ([0.1, 0.2], False), (None, False)]
)
def test_the_scheduler_in_the_model_files_has_another_learning_rate(damaged, rates, is_told):
    run = damaged("llama_tp1dp2_z3")
    for file in (run.folder / "step").glob("*model_states.pt"):
        edit_file(file, lambda root: root.update(lr_scheduler={"_last_lr": rates}))

    says = "the learning rate is 0.001 in the optimizer and 0.0009 in the scheduler of the model"
    expected = [("warning", f"{says} files")] if is_told else []
    assert told_of_steps(run.folder) == expected


@pytest.mark.parametrize("to", ["universal", "safetensors"])
def test_parameters_of_one_group_have_several_steps(damaged, tmp_path, to):
    """As where a copy brought some of the files of another save, of the same shapes."""
    out, run = tmp_path / "out", damaged("llama_tp2_z1")
    options = {"states": "all"} if to == "safetensors" else {}
    api.convert(run.folder, out, to=to, **options)
    name = "model.layers.1.self_attn.q_proj.weight"
    (step,) = [t.states["step"] for t in api.open(out).tensors if t.name == name]
    file = out / api.open(out).files[step.regions[0].file].name
    (out / "restride.json").unlink()
    assert not [f for f in api.check(out).findings if f.severity != "note"]
    content = bytearray(file.read_bytes())
    start = step.regions[0].start_nbytes
    content[start : start + 4] = np.float32(7).tobytes()
    file.write_bytes(content)

    (told,) = [f for f in api.check(out).findings if f.severity != "note"]

    assert (told.kind, told.severity) == ("step-mismatch", "error")
    assert told.message == (
        f"tensor {name!r}: the step is 7.0, in group 0 of the optimizer that of 20 parameters such "
        "as 'model.embed_tokens.weight' is 2.0: the files are of different saves"
    )


def test_without_zero_every_parameter_counts_its_own_steps(tmp_path):
    """Torch's optimizers pass over what got no gradient."""
    catalog = api.open(RECORDED / "numbered_fp32_z0")
    entry = next(t.states["step"] for t in catalog.tensors if "step" in t.states)
    region = next(region for region in entry.regions if region is not None)
    shutil.copytree(RECORDED / "numbered_fp32_z0", tmp_path / "saved")
    file = tmp_path / "saved" / catalog.files[region.file].name
    content = bytearray(file.read_bytes())
    content[region.start_nbytes : region.start_nbytes + 4] = np.float32(1).tobytes()
    file.write_bytes(content)

    kinds = {finding.kind for finding in api.check(tmp_path / "saved").findings}

    assert "checksum-differs" in kinds
    assert "step-mismatch" not in kinds
