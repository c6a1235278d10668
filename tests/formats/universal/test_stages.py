"""Both shapes of universal folders, made of checkpoints of every stage and of each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.checkpoint.catalog import Finding
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.formats.opening import open_training
from restride.formats.universal import lay_out
from restride.storage.torch_zip import open_torch_zip
from restride.testing.command_line import run
from restride.testing.gather import gather_all
from restride.testing.partitioned_files import write_partitioned_run
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import ZeroRun, write_zero_run
from restride.testing.zero_runs import ADAM, parameter

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed"
WRITERS = {1: write_zero_run, 3: write_partitioned_run}
FORMATS = {1: "deepspeed universal", 3: "deepspeed universal zero-3"}


PARAMETERS = {
    "embed.weight": parameter(0, (6, 4), (0, (4, 2))),
    "norm.weight": parameter(9_000, (5,), group=1),
    "down.weight": parameter(15_000, (3, 8), (1, (4, 4))),
    "up.weight": parameter(23_000, (8, 3), (0, (4, 4))),
    "bias": parameter(37_000, (3,), group=1),
    "empty.on.rank.0": parameter(48_000, (2, 2), (0, (0, 2))),
}
PARTITIONED_FILE = "step/zero_pp_rank_{}_mp_rank_{:02d}_{}_states.pt"


def written(folder, stage, parameters=PARAMETERS, dp=2, tp=2, **options):
    if tp == 1:
        parameters = {name: replace(p, cut=None) for name, p in parameters.items()}
    WRITERS[stage](folder, ZeroRun(dp, tp, dict(parameters), **options))
    return folder


def converted(source, out, stage=None):
    api.convert(source, out, to="universal", stage=stage)
    return out


def value_of(path):
    return open_torch_zip(path).value


def state_of(made):
    return value_of(made / "step_universal" / "zero" / "optimizer_state.pt")


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def require_same(found, expected):
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key


def comparable(value):
    match value:
        case StoredTensor():
            return value.storage.dtype, value.shape
        case dict():
            return {key: comparable(entry) for key, entry in value.items()}
        case list() | tuple():
            return [comparable(entry) for entry in value]
        case _:
            return value


def groups_of(path):
    return open_training(api.open(path)).groups


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(
    data=st.data(),
    dp=st.integers(1, 3),
    tp=st.integers(1, 3),
    source=st.sampled_from([1, 3]),
    target=st.sampled_from([1, 3, None]),
)
def test_every_state_survives_every_pair_of_stages(tmp_path_factory, data, dp, tp, source, target):
    parameters = {"first": parameter(0, (2,))}
    # Of groups that ZeRO-3 splits elsewhere on ranks that hold nothing, see below.
    group = data.draw(st.integers(0, 1)) if source == 1 else 0
    parameters["norm"] = parameter(5_000, (3,), group=group)
    for number in range(3):
        widths = tuple(data.draw(st.lists(st.integers(0, 3), min_size=tp, max_size=tp)))
        dim = data.draw(st.integers(0, 1))
        shape = (max(sum(widths), 1), 3) if dim == 0 else (3, max(sum(widths), 1))
        cut = (dim, widths) if sum(widths) else None
        parameters[f"layer.{number}"] = parameter(10_000 * (number + 1), shape, cut)
    folder = tmp_path_factory.mktemp("run")
    written(folder / "in", source, parameters, dp, tp)

    made = api.open(converted(folder / "in", folder / "out", target))

    original = api.open(folder / "in")
    assert made.format == FORMATS[target or source]
    assert {t.name: t.layout for t in made.tensors} == {t.name: t.layout for t in original.tensors}
    expected = gather_all(original)
    if (target or source) == 3:
        expected = {key: array for key, array in expected.items() if not key.endswith("/weight")}
    elif source == 3:
        # The weight as it was trained: the master copy, rounded to the type of the training.
        expected |= {f"{name}/weight": expected[f"{name}/fp32"] for name in parameters}
    require_same(gather_all(made), expected)
    assert [comparable(group.settings) for group in groups_of(folder / "out")] == [
        comparable(group.settings) for group in groups_of(folder / "in")
    ]
    assert [g.names for g in groups_of(folder / "out")] == [
        g.names for g in groups_of(folder / "in")
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_there_and_back_is_the_same(tmp_path, tp):
    source = written(tmp_path / "in", 1, tp=tp)
    direct = converted(source, tmp_path / "direct")

    there = converted(direct, tmp_path / "there", 3)
    back = converted(there, tmp_path / "back", 1)

    assert files_below(back) == files_below(direct)
    expected = gather_all(api.open(direct))
    # On the way the weights were rounded from the master copies anew.
    expected |= {f"{name}/weight": expected[f"{name}/fp32"] for name in PARAMETERS}
    require_same(gather_all(api.open(back)), expected)
    assert comparable(state_of(back)["param_groups"]) == comparable(
        state_of(direct)["param_groups"]
    )


def test_the_files_are_those_that_an_engine_of_zero_3_looks_for(tmp_path):
    made = converted(written(tmp_path / "in", 1), tmp_path / "out", 3)

    assert files_below(made) - {"restride.json"} == {
        "latest_universal",
        "step_universal/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "step_universal/zero_pp_rank_0_mp_rank_01_model_states.pt",
        "step_universal/zero/optimizer_state.pt",
        *(f"step_universal/zero/{n}/{state}.pt" for n in PARAMETERS for state in ADAM[1:]),
    }


def test_model_files_of_the_same_kind_are_copied_byte_for_byte(tmp_path):
    source = written(tmp_path / "in", 3)

    made = converted(source, tmp_path / "out")

    for dp in range(2):
        for tp in range(2):
            name = PARTITIONED_FILE.format(dp, tp, "model")
            copied = made / name.replace("step", "step_universal")
            assert copied.read_bytes() == (source / name).read_bytes()


def test_a_folder_of_zero_3_is_flat_where_the_peer_writes_it_flat(tmp_path):
    for tp, kind in ((1, StoredTensor), (2, dict)):
        made = converted(written(tmp_path / f"in{tp}", 3, tp=tp), tmp_path / f"out{tp}")

        value = value_of(made / "step_universal" / "zero" / "up.weight" / "fp32.pt")
        assert isinstance(value, kind)
        if tp == 1:
            assert value.shape == (24,)


def test_made_of_another_stage_it_has_shapes_for_engines_with_tensor_parallelism(tmp_path):
    made = converted(written(tmp_path / "in", 1, tp=1), tmp_path / "out", 3)

    value = value_of(made / "step_universal" / "zero" / "up.weight" / "fp32.pt")
    assert value["param"].shape == (8, 3)


def test_sub_groups_keep_their_steps_and_lose_the_partitions_of_one_rank(tmp_path):
    made = converted(written(tmp_path / "in", 3), tmp_path / "out")

    state = state_of(made)
    inner = state["optimizer_state_dict"]
    assert "fp32_flat_groups" not in state
    assert [set(own) for own in inner["state"].values()] == [{"step"}] * 3
    assert [group["params"] for group in inner["param_groups"]] == [[0, 1], [2]]
    assert state["param_groups"] == inner["param_groups"]
    assert [group["lr"] for group in inner["param_groups"]] == [0.5, 1.5]


def test_a_group_that_the_first_rank_does_not_know_is_not_guessed(tmp_path):
    parameters = {
        "first": parameter(0, (2,)),
        "second": parameter(5_000, (2,)),
        "empty.on.rank.0": parameter(10_000, (2, 2), (0, (0, 2))),
        "norm": parameter(15_000, (2,), group=1),
    }
    made = converted(written(tmp_path / "in", 3, parameters), tmp_path / "out")

    catalog = api.open(made)

    assert [finding.kind for finding in catalog.findings] == ["unknown-group"]
    assert "which of 2 groups of parameters has 'empty.on.rank.0'" in catalog.findings[0].message
    with pytest.raises(UnsupportedError, match="convert the checkpoint that the folder was made"):
        open_training(catalog)


def test_an_engine_of_zero_1_is_told_which_version_wrote_the_optimizer(tmp_path):
    source = written(tmp_path / "in", 3, extra={"ds_version": "0.0"})

    made = converted(source, tmp_path / "out", 1)

    assert state_of(made)["ds_version"] == "0.0"
    assert state_of(made)["zero_stage"].args == (1,)


def test_the_order_of_round_robin_is_undone_and_done_again(tmp_path):
    source = written(tmp_path / "in", 1, is_round_robin=True)
    there = converted(source, tmp_path / "there", 3)
    back = converted(there, tmp_path / "back", 1)

    trained = [group.names for group in groups_of(source)]
    assert [group.names for group in groups_of(there)] == trained
    assert [group.names for group in groups_of(back)] == trained
    file = "step_universal/zero_pp_rank_0_mp_rank_01_model_states.pt"
    shapes = [tuple(shapes) for shapes in value_of(there / file)["param_shapes"]]
    assert shapes == trained


def test_a_state_that_is_missing_in_zero_3_is_refused_with_the_way_out(tmp_path):
    momentum = {"w": parameter(0, (4,), states=("weight", "fp32", "momentum_buffer"))}
    source = written(tmp_path / "in", 1, momentum)

    with pytest.raises(UnsupportedError, match=r"'w': has no state 'exp_avg' .*--stage 1"):
        api.convert(source, tmp_path / "out", to="universal", stage=3)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_its_own_master_copy_is_named_so_for_zero_3(tmp_path):
    """Stacks of experts that were trained in float32 without ZeRO have no other."""
    catalog = api.open(written(tmp_path / "in", 1, {"w": parameter(0, (4,))}, dp=1, tp=1))
    (tensor,) = catalog.tensors
    states = {key: own for key, own in tensor.states.items() if key != "fp32"}
    alone = replace(tensor, states={**states, "weight": tensor.states["fp32"]})

    export = lay_out(
        replace(catalog, tensors=(alone,)), open_training(catalog), is_partitioned=True
    )

    masters = [own for own in export.sources if own.key.endswith("zero/w/fp32.pt")]
    assert [(own.state, own.entry) for own in masters] == [("weight", tensor.states["fp32"])]
    rounded = replace(states["weight"], dtype=DTYPES["bfloat16"])
    alone = replace(tensor, states={**states, "weight": rounded})
    with pytest.raises(UnsupportedError, match="has no state 'fp32'"):
        lay_out(replace(catalog, tensors=(alone,)), open_training(catalog), is_partitioned=True)


def test_experts_of_zero_3_keep_shape_and_marks_where_all_else_is_flat_and_bare(tmp_path):
    """An engine that shares experts out asks for them: seen in its folders (deepspeed 0.19.8)."""
    (top,) = converted(RECORDED / "experts_z3", tmp_path / "out", 3).glob("*_universal/zero")
    expected = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": 4}

    kinds = set()
    for path in top.glob("*/*.pt"):
        value, is_stack = value_of(path), ".experts." in path.parent.name
        kinds.add((is_stack, path.stem))
        if is_stack:
            assert len(value.pop("param").shape) == 3
            assert value == expected
        else:
            assert len(value.shape) == 1
    assert kinds == {(is_stack, state) for is_stack in (False, True) for state in ADAM[1:]}


def test_a_weight_without_a_master_copy_has_marks_where_it_is_trained_alone(tmp_path):
    source = written(tmp_path / "in", 1, {"w": parameter(0, (4,))}, dp=1, tp=1)
    catalog = api.open(source)
    (tensor,) = catalog.tensors
    weight = tensor.states["fp32"]
    trained = replace(tensor, states={"weight": weight, "exp_avg": tensor.states["exp_avg"]})
    frozen = replace(tensor, states={"weight": weight})

    for alone, has_marks in ((trained, True), (frozen, False)):
        made = lay_out(
            replace(catalog, tensors=(alone,)), open_training(catalog), is_partitioned=False
        )
        (file,) = [file for file in made.output.files if file.name.endswith("/w/fp32.pt")]
        assert any(b"cat_dim" in content for _, content in file.literals) == has_marks


@pytest.mark.parametrize("details", [{}, {"part": "optimizer"}])
def test_a_checkpoint_that_is_not_whole_is_not_described(tmp_path, details):
    catalog = api.open(written(tmp_path / "in", 1, {"w": parameter(0, (4,))}, dp=1, tp=1))
    finding = Finding("error", "missing-file", "some file is missing", details=details)

    with pytest.raises(CorruptError, match="some file is missing"):
        lay_out(replace(catalog, findings=(finding,)), open_training(catalog), is_partitioned=False)


def test_a_state_that_zero_3_does_not_load_is_told_of(tmp_path):
    amsgrad = {"w": parameter(0, (4,), states=(*ADAM, "max_exp_avg_sq"))}

    report = api.convert(
        written(tmp_path / "in", 1, amsgrad), tmp_path / "out", to="universal", stage=3
    )

    assert [finding.kind for finding in report.findings] == ["not-loaded"]
    assert "max_exp_avg_sq" in report.findings[0].message
    assert "w/max_exp_avg_sq" in gather_all(api.open(tmp_path / "out"))


def test_every_state_that_zero_3_does_not_load_is_told_of_whichever_parameter_has_it(tmp_path):
    parameters = {
        "a": parameter(0, (4,), states=(*ADAM, "s", "max_exp_avg_sq")),
        "b": parameter(9_000, (4,), group=1),
    }

    report = api.convert(
        written(tmp_path / "in", 1, parameters), tmp_path / "out", to="universal", stage=3
    )

    (found,) = [finding for finding in report.findings if finding.kind == "not-loaded"]
    assert found.message == "an engine of ZeRO-3 does not load max_exp_avg_sq, s again"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_is_one_number_keeps_its_states(tmp_path, stage):
    source = written(tmp_path / "in", 1, {"scale": parameter(7, ()), "w": parameter(99, (4,))})

    found = gather_all(api.open(converted(source, tmp_path / "out", stage)))

    expected = gather_all(api.open(source))
    assert {f"scale/{state}" for state in (*ADAM[1:], "step")} <= found.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in found)


def test_muon_in_one_group_of_several_is_told_of(tmp_path):
    source = written(tmp_path / "in", 1)
    for file in source.glob("step/*_optim_states.pt"):
        edit_file(
            file,
            lambda value: value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][
                1
            ].update(use_muon=True),
        )

    report = api.convert(source, tmp_path / "out", to="universal")

    assert "not-loaded" in [finding.kind for finding in report.findings]
    assert any("updated by Muon" in finding.message for finding in report.findings)


def test_a_training_without_a_step_is_refused_for_zero_3(tmp_path):
    source = written(tmp_path / "in", 1, {"w": parameter(0, (4,))}, dp=1, tp=1)

    def forget(value):
        del value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]

    edit_file(source / "step/zero_pp_rank_0_mp_rank_00_optim_states.pt", forget)

    with pytest.raises(UnsupportedError, match=r"has no step.*--stage 1"):
        api.convert(source, tmp_path / "out", to="universal", stage=3)


def test_a_plain_step_is_carried_into_either_shape(tmp_path):
    source = written(tmp_path / "in", 1, {"w": parameter(0, (4,))}, dp=1, tp=1)
    edit_file(
        source / "step/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda value: value["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
            step=7
        ),
    )

    there = converted(source, tmp_path / "there", 3)
    back = converted(there, tmp_path / "back", 1)

    assert state_of(there)["optimizer_state_dict"]["state"] == {0: {"step": 7}}
    assert value_of(back / "step_universal" / "zero" / "w" / "step.pt") == 7
    assert [dict(group.numbers) for group in groups_of(back)] == [{"step": 7}]


def test_settings_that_zero_3_collapses_are_told_of(tmp_path):
    report = api.convert(written(tmp_path / "in", 3), tmp_path / "out", to="universal")

    (finding,) = [found for found in report.findings if found.kind != "shared-step"]
    assert (finding.severity, finding.kind) == ("warning", "group-settings")
    assert "different lr" in finding.message


def test_settings_that_zero_3_collapses_are_told_of_by_name_and_names_are_none(tmp_path):
    catalog = api.open(written(tmp_path / "in", 1))
    training = open_training(catalog)
    settings = [
        {"name": name, "lr": lr, "eps": lr, "betas": lr, "decay": 0.0}
        for name, lr in (("matrices", 0.5), ("vectors", 0.25))
    ]
    groups = [replace(g, settings=own) for g, own in zip(training.groups, settings, strict=True)]

    export = lay_out(catalog, replace(training, groups=tuple(groups)), is_partitioned=True)

    (found,) = [finding for finding in export.findings if finding.kind == "group-settings"]
    assert found.message.startswith("parameter groups have different betas, eps, lr; an engine")


FROZEN = parameter(70_000, (4, 3), (0, (2, 2)), states=("weight",))


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_of_zero_3_stay_whole(tmp_path, stage):
    source = written(tmp_path / "in", 3, {**PARAMETERS, "base.weight": FROZEN})

    made = api.open(converted(source, tmp_path / "out", stage))

    tensor = next(t for t in made.tensors if t.name == "base.weight")
    assert tensor.is_frozen or stage == 1
    assert list(tensor.states) == ["weight"]
    found = gather_all(made)["base.weight/weight"]
    assert np.array_equal(found, gather_all(api.open(source))["base.weight/weight"])


def test_buffers_and_second_names_change_their_files_with_the_shape(tmp_path):
    source = written(tmp_path / "in", 1, tp=1)

    def extend(value):
        value["module"]["table"] = Array("int64", (2,), bytes(range(16)))
        value["module"]["tied"] = value["module"]["up.weight"]
        value["module"]["extra._extra_state"] = {"scale": 1.5}
        value["buffer_names"] = ["table"]
        value["shared_params"] = {"tied": "up.weight"}

    edit_file(source / "step/mp_rank_00_model_states.pt", extend)

    there = converted(source, tmp_path / "there", 3)
    back = converted(there, tmp_path / "back", 1)

    for made in (there, back):
        catalog = api.open(made)
        table = next(t for t in catalog.tensors if t.name == "table")
        assert table.kind == "buffer"
        assert gather_all(catalog)["table/weight"].tobytes() == bytes(range(16))
        assert next(t for t in catalog.tensors if t.name == "up.weight").aliases == ("tied",)
        assert "tied" not in {t.name for t in catalog.tensors}
        training = open_training(catalog)
        assert training.order == (*PARAMETERS, "table", "tied", "extra._extra_state")
        assert training.ranks[0].module == {"extra._extra_state": {"scale": 1.5}}
    module = value_of(back / "step_universal" / "mp_rank_00_model_states.pt")["module"]
    assert module["tied"] == module["up.weight"]


def test_values_that_only_other_ranks_of_zero_3_have_are_told_of(tmp_path):
    source = written(tmp_path / "in", 3, {"w": parameter(0, (4,))}, tp=1)
    edit_file(source / PARTITIONED_FILE.format(1, 0, "model"), lambda value: value.update(seed=5))

    report = api.convert(source, tmp_path / "out", to="universal", stage=1)

    assert [finding.kind for finding in report.findings] == ["rank-values"]
    assert "'seed' differ" in report.findings[0].message
    assert "zero_pp_rank_1_mp_rank_00" in report.findings[0].message


def test_a_stage_that_there_is_not_is_refused(tmp_path):
    source = written(tmp_path / "in", 1)

    with pytest.raises(UnsupportedError, match="no universal folder for ZeRO-4; choose 1, 2 or 3"):
        api.convert(source, tmp_path / "out", to="universal", stage=4)
    with pytest.raises(UnsupportedError, match="safetensors takes no --stage; leave it out"):
        api.convert(source, tmp_path / "out", stage=3)
    with pytest.raises(UnsupportedError, match="deepspeed takes no --stage; say --zero, or"):
        api.convert(source, tmp_path / "out", to="deepspeed", stage=3)
    with pytest.raises(UnsupportedError, match="universal takes no --zero; say --stage, or"):
        api.convert(source, tmp_path / "out", to="universal", zero=3)


def test_the_command_takes_a_stage(tmp_path):
    source = written(tmp_path / "in", 1, tp=1)

    ran = run("convert", str(source), str(tmp_path / "out"), "--to", "universal", "--stage", "3")

    assert (ran.code, ran.err) == (0, "")
    assert api.open(tmp_path / "out").format == FORMATS[3]


def test_a_parameter_that_nothing_trains_and_no_module_has_is_refused(tmp_path):
    """A folder of states that was left from another model."""
    source = written(tmp_path / "run", 1, tp=1)
    converted(source, tmp_path / "folder")
    top = next(path for path in (tmp_path / "folder").iterdir() if path.is_dir())
    shutil.copytree(top / "zero" / "bias", top / "zero" / "base.weight")

    with pytest.raises(CorruptError, match=r"mp_rank_00.*tensor 'base.weight': no parameter group"):
        converted(tmp_path / "folder", tmp_path / "out", 3)

    assert not (tmp_path / "out").exists()
