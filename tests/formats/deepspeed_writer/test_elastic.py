"""Checkpoints without hyperparameters: what can be written of them, with and without a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from restride import api
from restride.errors import CorruptError, UnsupportedError
from restride.storage.torch_zip import open_torch_zip
from restride.testing.command_line import run
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

SOURCE = Path(__file__).parents[2] / "data" / "deepspeed" / "elastic_z1"
GIVEN = [
    {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1, "fused": None},
    {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.0, "fused": None},
]


def given(folder: Path, content: object = GIVEN) -> Path:
    file = folder / "hyperparameters.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def optimizer_of(folder: Path, dp: int = 0) -> dict:
    (file,) = folder.glob(f"*/*zero_pp_rank_{dp}_mp_rank_00_optim_states.pt")
    return open_torch_zip(file).value["optimizer_state_dict"]


def kinds(report: api.ConvertReport) -> set[str]:
    return {finding.kind for finding in report.findings}


@pytest.mark.parametrize("target", [{}, {"dp": 1}, {"dp": 3, "zero": 2}])
def test_other_ranks_get_the_form_that_an_engine_loads_without(tmp_path, target):
    report = api.convert(SOURCE, tmp_path / "out", to="deepspeed", **target)

    assert "no-settings" in kinds(report)
    state = optimizer_of(tmp_path / "out")
    assert [sorted(group) for group in state["base_optimizer_state"]] == [
        ["exp_avg", "exp_avg_sq", "step"]
    ] * 2
    # The engine does not load its own files for want of it.
    assert "base_optimizer_state_step" not in optimizer_of(SOURCE)
    assert state["base_optimizer_state_step"] == 2
    expected, found = gather_all(api.open(SOURCE)), gather_all(api.open(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("zero", [0, 3])
def test_engines_that_need_hyperparameters_get_none_that_are_guessed(tmp_path, zero):
    with pytest.raises(UnsupportedError, match=rf"ZeRO-{zero} needs them") as caught:
        api.convert(SOURCE, tmp_path / "out", to="deepspeed", zero=zero)

    assert "--hyperparameters FILE" in caught.value.remedy


def test_the_class_that_knows_no_such_form_is_refused(tmp_path):
    source = shutil.copytree(SOURCE, tmp_path / "source")
    types = {"grad_accum_dtype": "fp32"}
    file = source / "step" / "mp_rank_00_model_states.pt"
    edit_file(file, lambda root: root["ds_config"].update(data_types=types))

    with pytest.raises(UnsupportedError, match="BF16_Optimizer") as caught:
        api.convert(source, tmp_path / "out", to="deepspeed", zero=1)
    assert "--zero 2" in caught.value.remedy
    api.convert(source, tmp_path / "out", to="deepspeed", zero=2)


def test_groups_with_states_of_their_own_are_refused_for_an_engine_loads_those_of_the_first(
    tmp_path,
):
    states = {s: distinct((3,), 10 * n) for n, s in enumerate(("weight", "fp32", "exp_avg", "sum"))}
    parameters = {
        "a": Parameter((3,), {k: v for k, v in states.items() if k != "sum"}),
        "b": Parameter((3,), states, group=1),
    }
    write_zero_run(tmp_path / "source", ZeroRun(2, 1, parameters, writer="elastic"))

    with pytest.raises(UnsupportedError, match="group 1 has exp_avg, fp32, step, sum, group 0 has"):
        api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", zero=1)
    file = given(tmp_path)
    api.convert(
        *(tmp_path / "source", tmp_path / "out"), to="deepspeed", zero=1, hyperparameters=file
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_a_file_every_stage_gets_what_its_engine_wants(tmp_path, zero):
    file = given(tmp_path)

    report = api.convert(SOURCE, tmp_path / "out", to="deepspeed", zero=zero, hyperparameters=file)

    (note,) = (finding for finding in report.findings if finding.kind == "hyperparameters")
    assert note.message.endswith(f"those of {file}: lr 0.01, 0.02")
    assert "no-settings" not in kinds(report)
    found = api.open(tmp_path / "out").values["optimizer"]["param_groups"]
    assert [{k: v for k, v in group.items() if k != "params"} for group in found] == GIVEN
    expected, found = gather_all(api.open(SOURCE)), gather_all(api.open(tmp_path / "out"))
    kept = [key for key in expected if key.rpartition("/")[2].startswith(("fp32", "exp_"))]
    assert len(kept) == 27
    assert all(np.array_equal(found[key], expected[key]) for key in kept)


def test_a_universal_folder_takes_them_as_well(tmp_path):
    report = api.convert(SOURCE, tmp_path / "out", to="universal", hyperparameters=given(tmp_path))

    assert "no-settings" not in kinds(report)
    (state,) = (tmp_path / "out").rglob("optimizer_state.pt")
    groups = open_torch_zip(state).value["param_groups"]
    assert [group["lr"] for group in groups] == [0.01, 0.02]
    assert groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (GIVEN[:1], UnsupportedError, "1 parameter group, the checkpoint has 2"),
        ([GIVEN[0], {"betas": [0, 1]}], UnsupportedError, "no 'lr' for parameter group 1"),
        (GIVEN[0], CorruptError, "Expected `array`, got `object`; give a JSON list"),
        ([GIVEN[0], 3], CorruptError, "Expected `object`, got `int`"),
        ([GIVEN[0], {"lr": {"deep": 1}}], CorruptError, "plain values are expected"),
        ([GIVEN[0], {"lr": [[{}]]}], CorruptError, "group 1: 'lr'"),
        ('[{"lr": 1, "lr": 2}]', CorruptError, "the key 'lr' comes twice"),
        ('[{"lr": NaN}]', CorruptError, "NaN"),
        ('[{"lr": 1e999}]', CorruptError, "is inf"),
        ("lr = 1", CorruptError, "it is no JSON"),
        (" " * (2 << 20), CorruptError, "larger than the limit"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path, content, error, said):
    file = given(tmp_path, content)

    with pytest.raises(error, match=said) as caught:
        api.convert(SOURCE, tmp_path / "out", to="deepspeed", hyperparameters=file)

    assert str(file) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_has_its_own_takes_no_others(tmp_path):
    own = SOURCE.parent / "tied_frozen_z1"

    with pytest.raises(UnsupportedError, match="the checkpoint has its own"):
        api.convert(own, tmp_path / "out", to="deepspeed", hyperparameters=given(tmp_path))
    with pytest.raises(UnsupportedError, match="safetensors takes no --hyperparameters"):
        api.convert(own, tmp_path / "out", hyperparameters=given(tmp_path))


def test_what_a_schedule_would_have_said_is_warned_of(tmp_path):
    source = shutil.copytree(SOURCE, tmp_path / "source")
    file = source / "step" / "mp_rank_00_model_states.pt"
    edit_file(file, lambda root: root.update(lr_scheduler={"last_batch_iteration": 1}))

    report = api.convert(source, tmp_path / "out", to="deepspeed")

    said = [finding.message for finding in report.findings if finding.kind == "no-settings"]
    assert ["schedule" in message for message in said] == [False, True]


def test_a_number_that_an_engine_has_made_a_list_of_is_read_as_the_number(tmp_path):
    """An engine that loads an elastic checkpoint and saves again has steps of shape (1,)."""
    source = shutil.copytree(SOURCE, tmp_path / "source")
    for file in source.glob("step/*optim_states.pt"):

        def change(root) -> None:
            for group in root["optimizer_state_dict"]["base_optimizer_state"]:
                group["step"] = replace(group["step"], shape=(1,), strides=(1,))

        edit_file(file, change)

    catalog = api.open(source)

    assert not catalog.findings
    expected, found = gather_all(api.open(SOURCE)), gather_all(catalog)
    assert {key: array.tobytes() for key, array in found.items()} == {
        key: array.tobytes() for key, array in expected.items()
    }


def test_the_command_line_takes_the_file_and_says_so(tmp_path):
    file = given(tmp_path)
    words = ("convert", str(SOURCE), str(tmp_path / "out"), "--to", "deepspeed", "--zero", "3")

    refused = run(*words)
    ran = run(*words, "--hyperparameters", str(file))

    assert refused.code == 2
    assert "--hyperparameters FILE" in refused.err
    assert ran.code == 0, ran.err
    assert "the settings of the 2 parameter groups are those of" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("stored", "counters", "step"),
    [
        ({"base_optimizer_state_step": 7}, {}, 7),
        ({}, {"global_steps": 5, "skipped_steps": 2}, 3),
        ({}, {"global_steps": None, "skipped_steps": None}, 0),
    ],
)
def test_the_step_that_the_engine_asks_for_is_the_stored_one_or_is_counted(
    tmp_path, stored, counters, step
):
    source = shutil.copytree(SOURCE, tmp_path / "source")
    for file in source.glob("step/*optim_states.pt"):
        edit_file(file, lambda root: root["optimizer_state_dict"].update(stored))
    edit_file(source / "step" / "mp_rank_00_model_states.pt", lambda root: root.update(counters))

    api.convert(source, tmp_path / "out", to="deepspeed")

    assert optimizer_of(tmp_path / "out", 1)["base_optimizer_state_step"] == step


def test_groups_of_pipeline_stages_are_told_by_their_places_without_hyperparameters(tmp_path):
    """As their engines have them: a file gives both groups of every stage their settings."""
    pipeline = SOURCE.parents[1] / "deepspeed_pipeline" / "tied_z1"
    source = shutil.copytree(pipeline, tmp_path / "source")

    def strip(root) -> None:
        base = root["optimizer_state_dict"]["base_optimizer_state"]
        states = [base["state"].get(n, {}) for n in range(len(base["param_groups"]))]
        root["optimizer_state_dict"]["base_optimizer_state"] = states

    for file in source.glob("*/*optim_states.pt"):
        edit_file(file, strip)

    report = api.convert(source, tmp_path / "one", to="deepspeed", pp=1)

    kinds = [finding.kind for finding in report.findings]
    assert kinds.count("no-settings") == kinds.count("stage-groups") == 1
    expected, found = (gather_all(api.open(path)) for path in (source, tmp_path / "one"))
    assert expected.keys() == found.keys()
    assert all(expected[key].tobytes() == array.tobytes() for key, array in found.items())
    file = tmp_path / "groups.json"
    file.write_text(json.dumps([{"lr": 0.5}, {"lr": 0.25}]))
    for pp in (1, 2):
        out = tmp_path / f"given{pp}"
        api.convert(source, out, to="deepspeed", pp=pp, zero=1, hyperparameters=file)
        for own in sorted(out.glob("*/*optim_states.pt")):
            root = open_torch_zip(own).value
            groups = root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
            assert [group["lr"] for group in groups] == [0.5, 0.25], own
