"""What goes along with the tensors: frozen, tied and empty ones, buffers, values of the ranks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from restride import api
from restride.checkpoint.values import OrderedDictValue
from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts.replicated import replicated
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import file_content
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import (
    Parameter,
    ZeroRun,
    box_map,
    shard_of,
    stored,
    write_zero_run,
)
from restride.testing.zero_runs import distinct

STATES = ("weight", "fp32", "exp_avg")
RULES = """
format = "restride-rules/1"
rest = "whole"

[[rules]]
match = "up.weight"
layout = "column"

[[rules]]
match = "down.weight"
layout = "row"
"""


def parameter(shape, first, cut=None, states=STATES, group=0):
    arrays = {state: distinct(shape, first + 1000 * n) for n, state in enumerate(states)}
    return Parameter(shape, arrays, cut, group)


def small_run(dp=2, tp=2, **more):
    """A weight cut by rows, a norm, and what `more` says."""
    parameters = {
        "up.weight": parameter((4, 3), 100, (0, (2, 2)) if tp > 1 else None),
        "norm.weight": parameter((3,), 50_000),
    }
    return ZeroRun(dp, tp, parameters, **more)


def edit_models(folder, change):
    """Change the model file of every rank; `change` gets its content and its number."""
    for tp, path in enumerate(sorted((folder / "step").glob("mp_rank_*"))):
        edit_file(path, lambda value, tp=tp: change(value, tp))


def convert(tmp_path, **target):
    report = api.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", **target)
    return report, tmp_path / "out" / "step"


def kinds(report):
    return {finding.kind for finding in report.findings}


# Frozen, empty and tied parameters, buffers and extra states.


def add_frozen(run, value, tp):
    """As an adapter leaves the weight below it: in the module, and in no group."""
    base = Parameter((4, 2), {"weight": distinct((4, 2), 7)}, (0, (2, 2)))
    frozen = ZeroRun(run.dp, run.tp, {"base.weight": base})
    value["module"]["base.weight"] = stored(shard_of(frozen, "base.weight", "weight", tp))
    maps = value["universal_checkpoint_info"]["affine_map"]["params"]
    maps["^base\\.weight$"] = box_map(frozen, "base.weight")


@pytest.mark.parametrize("zero", [1, 2])
def test_frozen_parameters_are_whole_and_named_where_the_stage_names_them(tmp_path, zero):
    run = small_run()
    write_zero_run(tmp_path / "run", run)
    edit_models(tmp_path / "run", lambda value, tp: add_frozen(run, value, tp))

    _, step = convert(tmp_path, tp=1, dp=1, zero=zero)

    content = file_content(step / "mp_rank_00_model_states.pt")
    _, dtype, shape, elements = content["module"][1]["base.weight"]
    assert (dtype, shape) == ("float32", (4, 2))
    assert elements == distinct((4, 2), 7).tobytes()
    (_, (members, *_)) = content["param_shapes"]
    assert list(members[1]) == ["up.weight", "norm.weight"]
    if zero == 1:
        nothing = ("NoneType", None)
        assert content["frozen_param_shapes"] == content["frozen_param_fragments"] == nothing
    else:
        sizes = ("SizeValue", [("int", 4), ("int", 2)])
        assert content["frozen_param_shapes"][1] == {"base.weight": sizes}
        assert content["frozen_param_fragments"][1] == {
            "base.weight": ("tensor", "float32", (4, 2), elements)
        }


def test_a_parameter_that_a_rank_has_nothing_of_is_named_with_the_frozen_ones_there(tmp_path):
    run = small_run(dp=1)
    run.parameters["k.weight"] = parameter((4, 3), 9000, (0, (4, 0)))
    write_zero_run(tmp_path / "run", run)

    _, step = convert(tmp_path, dp=3, zero=2)

    contents = [file_content(path) for path in sorted(step.glob("mp_rank_*"))]
    members = [list(content["param_shapes"][1][0][1]) for content in contents]
    assert members == [["up.weight", "norm.weight", "k.weight"], ["up.weight", "norm.weight"]]
    assert [list(content["frozen_param_shapes"][1]) for content in contents] == [[], ["k.weight"]]
    assert contents[1]["module"][1]["k.weight"] == ("tensor", "float32", (0, 3), b"")
    expected, found = (gather_all(api.open(tmp_path / name)) for name in ("run", "out"))
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_an_optimizer_without_zero_has_empty_states_of_what_a_rank_has_nothing_of(tmp_path):
    run = small_run(dp=2)
    run.parameters["k.weight"] = parameter((4, 3), 9000, (0, (4, 0)))
    write_zero_run(tmp_path / "run", run)

    _, step = convert(tmp_path, dp=1, zero=0)

    values = [open_torch_zip(path).value for path in sorted(step.glob("mp_rank_*"))]
    moments = [
        [state["exp_avg"].shape for state in value["optimizer"]["state"].values()]
        for value in values
    ]
    assert moments == [[(2, 3), (3,), (4, 3)], [(2, 3), (3,), (0, 3)]]
    expected, found = (gather_all(api.open(tmp_path / name)) for name in ("run", "out"))
    of_optimizer = {key: array for key, array in expected.items() if not key.endswith("/fp32")}
    assert all(np.array_equal(found[key], array) for key, array in of_optimizer.items())


def test_a_parameter_without_elements_keeps_its_shape(tmp_path):
    write_zero_run(tmp_path / "run", small_run(tp=1))

    def change(value, _):
        value["module"]["empty.weight"] = Array("float32", (0, 5), b"")

    edit_models(tmp_path / "run", change)

    _, step = convert(tmp_path, dp=1, zero=2)

    content = file_content(step / "mp_rank_00_model_states.pt")
    assert content["module"][1]["empty.weight"] == ("tensor", "float32", (0, 5), b"")
    assert list(content["frozen_param_shapes"][1]) == ["empty.weight"]


def test_a_parameter_without_elements_goes_through_zero_3_and_comes_back(tmp_path):
    write_zero_run(tmp_path / "run", small_run(tp=1))
    edit_models(
        tmp_path / "run",
        lambda value, _: value["module"].update({"empty.weight": Array("bfloat16", (0, 5), b"")}),
    )

    report, _ = convert(tmp_path, dp=3, zero=3)
    assert "empty-parameter" in kinds(report)
    back = tmp_path / "back"
    api.convert(tmp_path / "out", back, to="deepspeed", dp=2, zero=1)
    api.convert(tmp_path / "out", tmp_path / "plain", states="all")

    assert not [finding for finding in api.open(tmp_path / "out").findings if finding.where]
    content = file_content(back / "step" / "mp_rank_00_model_states.pt")
    assert content["module"][1]["empty.weight"] == ("tensor", "bfloat16", (0, 5), b"")
    empty = next(t for t in api.open(tmp_path / "plain").tensors if t.name == "empty.weight")
    assert (empty.layout.full_shape, empty.states["weight"].dtype.name) == ((0, 5), "bfloat16")


def test_tied_weights_are_one_storage_under_both_names(shared, tmp_path):
    source = shared / "checkpoints" / "llama_tied_tp2_z1"

    api.convert(source, tmp_path / "out", to="deepspeed", tp=1, dp=2, zero=1)

    value = open_torch_zip(tmp_path / "out" / "step" / "mp_rank_00_model_states.pt").value
    names = "model.embed_tokens.weight", "lm_head.weight"
    assert value["module"][names[0]] == value["module"][names[1]]
    assert value["shared_params"] == {names[1]: names[0]}


def test_buffers_extra_states_and_attributes_of_the_module_are_carried(tmp_path):
    write_zero_run(tmp_path / "run", small_run())

    def change(value, _):
        module = OrderedDictValue()
        module["steps"] = Array("int64", (2,), np.array([3, 4]).tobytes())
        module.update(value["module"])
        module["norm._extra_state"] = {"scale": 0.5, "table": Array("float32", (1,), b"\0\0\0@")}
        module.state = {"_metadata": {"": {"version": 1}}}
        value["module"] = module
        value["buffer_names"] = ["steps"]

    edit_models(tmp_path / "run", change)
    before = file_content(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt")

    _, step = convert(tmp_path, tp=1, dp=1, zero=1)

    content = file_content(step / "mp_rank_00_model_states.pt")
    assert content["buffer_names"] == ("list", [("str", "steps")])
    assert list(content["module"][1]) == list(before["module"][1])
    for name in ("steps", "norm._extra_state"):
        assert content["module"][1][name] == before["module"][1][name]


# Values of the ranks.


def test_values_that_ranks_do_not_share_follow_them_or_are_told_of(tmp_path):
    write_zero_run(tmp_path / "run", small_run())

    def change(value, tp):
        value["rng"] = Array("uint8", (4,), bytes([tp] * 4))
        value["epoch"] = 7

    edit_models(tmp_path / "run", change)

    api.convert(tmp_path / "run", tmp_path / "same", to="deepspeed", dp=1)
    report, step = convert(tmp_path, tp=1)

    same = [file_content(path) for path in sorted((tmp_path / "same" / "step").glob("mp_*"))]
    assert [content["rng"][-1] for content in same] == [b"\0" * 4, b"\1" * 4]
    found = file_content(step / "mp_rank_00_model_states.pt")
    assert found["rng"][-1] == b"\0" * 4
    assert found["epoch"] == ("int", 7)
    (told,) = [finding for finding in report.findings if finding.kind == "rank-values"]
    assert told.severity == "warning"
    assert told.details == {"keys": ["rng"]}
    assert "left out are those of step/mp_rank_01_model_states.pt" in told.message


def test_more_ranks_than_there_were_share_their_values(tmp_path):
    run = small_run()
    run.parameters["down.weight"] = parameter((3, 4), 80_000, (1, (2, 2)))
    write_zero_run(tmp_path / "run", run)
    edit_models(tmp_path / "run", lambda value, tp: value.update(seed=tp))
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)

    report, step = convert(tmp_path, tp=4, dp=1, rules=rules)

    seeds = [file_content(path)["seed"][1] for path in sorted(step.glob("mp_*"))]
    assert seeds == [0, 0, 1, 1]
    assert "rank-values" in kinds(report)


def test_who_is_used_twice_and_who_not_at_all_is_named(tmp_path):
    run = small_run()
    run.parameters["down.weight"] = parameter((3, 4), 80_000, (1, (2, 2)))
    write_zero_run(tmp_path / "run", run)
    edit_models(tmp_path / "run", lambda value, tp: value.update(seed=tp))
    (tmp_path / "rules.toml").write_text(RULES)

    def told(tp):
        report = api.convert(
            tmp_path / "run",
            tmp_path / f"out-{tp}",
            to="deepspeed",
            tp=tp,
            rules=tmp_path / "rules.toml",
        )
        (finding,) = (own for own in report.findings if own.kind == "rank-values")
        return finding.message

    assert told(3).endswith("used twice are those of step/mp_rank_00_model_states.pt")
    assert told(1).endswith("left out are those of step/mp_rank_01_model_states.pt")


# Configuration.


def test_what_no_longer_fits_the_configuration_is_told_of_and_left_alone(tmp_path):
    write_zero_run(tmp_path / "run", small_run())

    def change(value, _):
        value["ds_config"]["train_batch_size"] = 8
        value["ds_config"]["train_micro_batch_size_per_gpu"] = 2
        value["ds_config"]["gradient_accumulation_steps"] = 2
        value["ds_config"]["tensor_parallel"] = {"autotp_size": 2}

    edit_models(tmp_path / "run", change)
    before = file_content(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt")["ds_config"]

    same, _ = convert(tmp_path, dp=2)
    report = api.convert(tmp_path / "run", tmp_path / "other", to="deepspeed", tp=1, dp=3, zero=2)

    # Only the model files were changed, and weights and master copies are other numbers.
    known = {"run-mismatch", "master-mismatch"}
    assert kinds(same) == known
    assert kinds(report) == {"config-stage", "config-tp", "config-batch"} | known
    content = file_content(tmp_path / "other" / "step" / "mp_rank_00_model_states.pt")
    assert content["ds_config"] == before
    message = next(f.message for f in report.findings if f.kind == "config-batch")
    assert "train_batch_size of 8" in message
    assert "2 a rank * 2 accumulation steps * 3 data-parallel ranks" in message


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 10**600, "zero_optimization": {"stage": 10**600}},
        {"zero_optimization": [], "tensor_parallel": 3, "bf16": "yes", "train_batch_size": "auto"},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": [10**600]}},
    ],
    ids=["numbers", "types", "names"],
)
def test_a_configuration_of_nonsense_decides_nothing(tmp_path, config):
    write_zero_run(tmp_path / "run", small_run())
    edit_models(tmp_path / "run", lambda value, _: value.update(ds_config=config))

    _, step = convert(tmp_path, tp=1, dp=1)

    assert len(list(step.iterdir())) == 2


# The optimizer.


def edit_optimizers(folder, change):
    for path in (folder / "step").glob("*optim_states.pt"):
        edit_file(path, lambda value: change(value["optimizer_state_dict"]["base_optimizer_state"]))


def test_groups_keep_their_own_hyperparameters_and_numbers(tmp_path):
    run = small_run()
    run.parameters["bias"] = parameter((5,), 70_000, group=1)
    write_zero_run(tmp_path / "run", run)

    def change(base):
        base["param_groups"][1] = {"lr": 0.25, "weight_decay": 0.0, "params": [1]}
        for number, state in base["state"].items():
            state["step"] = 10 + number

    edit_optimizers(tmp_path / "run", change)

    _, step = convert(tmp_path, tp=1, dp=3, zero=2)

    path = min(step.glob("zero_pp_rank_2_*"))
    base = open_torch_zip(path).value["optimizer_state_dict"]["base_optimizer_state"]
    assert base["param_groups"] == [
        {"lr": 0.5, "params": [0]},
        {"lr": 0.25, "weight_decay": 0.0, "params": [1]},
    ]
    assert [base["state"][number]["step"] for number in (0, 1)] == [10, 11]


def test_an_optimizer_without_states_has_none_afterwards(tmp_path):
    run = small_run()
    for name in run.parameters:
        del run.parameters[name].states["exp_avg"]
    write_zero_run(tmp_path / "run", run)
    edit_optimizers(tmp_path / "run", lambda base: base["state"].clear())

    _, step = convert(tmp_path, tp=1, dp=1)

    state = open_torch_zip(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").value
    assert state["optimizer_state_dict"]["base_optimizer_state"]["state"] == {}


def test_a_state_under_our_own_name_for_master_weights_keeps_the_optimizers(tmp_path):
    write_zero_run(tmp_path / "run", small_run())

    def change(base):
        for state in base["state"].values():
            state["fp32"] = state.pop("exp_avg")

    edit_optimizers(tmp_path / "run", change)

    _, step = convert(tmp_path, tp=1, dp=1)

    value = open_torch_zip(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").value
    state = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    assert set(state) == {"step", "fp32"}
    expected, found = (gather_all(api.open(tmp_path / name)) for name in ("run", "out"))
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_a_state_whose_cut_is_not_known_is_refused(tmp_path):
    write_zero_run(tmp_path / "run", small_run())

    def change(base):
        for state in base["state"].values():
            state["row"] = Array("float32", (2, 2), b"\0" * 16)

    edit_optimizers(tmp_path / "run", change)

    with pytest.raises(UnsupportedError, match="state 'row' of parameter group 0 is a tensor"):
        convert(tmp_path, tp=1, dp=1)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    write_zero_run(tmp_path / "run", small_run())
    (tmp_path / "run" / "step" / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()

    with pytest.raises(CorruptError, match="1 of 4 optimizer files is missing"):
        convert(tmp_path, tp=1, dp=1)
    assert not (tmp_path / "out").exists()


def test_weights_alone_are_no_training(tmp_path):
    write_zero_run(tmp_path / "run", small_run())
    for path in (tmp_path / "run" / "step").glob("*optim_states.pt"):
        path.unlink()

    with pytest.raises(RestrideError, match="no optimizer"):
        convert(tmp_path, tp=1, dp=1)


# Biases that layers store divided by the number of ranks.


def lay_out_halved(folder):
    """Lay out for two ranks, of which each holds half of every value of a bias."""
    source, target = read_catalog(folder), DeepSpeedTarget(2, 1, 1)
    layouts = {
        tensor.name: replicated(
            tensor.layout.full_shape,
            mesh=target.tp_mesh,
            scale=Fraction(1, 2) if tensor.name == "o_proj.bias" else 1,
        )
        for tensor in source.tensors
    }
    return source, lay_out(source, read_training(source), target, layouts)


def test_masters_follow_the_scale_of_the_target(tmp_path):
    run = small_run(tp=1)
    run.parameters["o_proj.bias"] = parameter((4,), 60_000)
    for one in run.parameters.values():
        del one.states["exp_avg"]
    write_zero_run(tmp_path / "run", run)

    write_export(*lay_out_halved(tmp_path / "run"), tmp_path / "out")

    read = api.open(tmp_path / "out")
    bias = next(tensor for tensor in read.tensors if tensor.name == "o_proj.bias")
    assert {piece.scale for piece in bias.layout.all_pieces} == {Fraction(1, 2)}
    for state in ("weight", "fp32"):
        entry = bias.states[state]
        (region, _) = entry.regions
        with (tmp_path / "out" / read.files[region.file].name).open("rb") as file:
            file.seek(region.start_nbytes)
            shard = np.frombuffer(file.read(16), np.float32)
        assert np.array_equal(shard, run.parameters["o_proj.bias"].states[state] / 2)


def test_moments_do_not_follow_it_silently(tmp_path):
    run = small_run(tp=1)
    run.parameters["o_proj.bias"] = parameter((4,), 60_000)
    write_zero_run(tmp_path / "run", run)

    source, export = lay_out_halved(tmp_path / "run")

    scales = {
        tensor.name: {piece.scale for piece in tensor.layout.all_pieces}
        for tensor in export.output.tensors
    }
    assert scales["o_proj.bias/exp_avg"] == {Fraction(2)}
    with pytest.raises(
        UnsupportedError, match=r"'exp_avg' changes by a factor of 2 .* lr \* \(1/2\)"
    ):
        write_export(source, export, tmp_path / "out")


# Options that mean nothing here, or mean something here alone.


@pytest.mark.parametrize(
    ("option", "spelled"),
    [
        ({"states": "weights"}, "--states"),
        ({"dtype": "float32"}, "--dtype"),
        ({"max_shard_nbytes": 1 << 20}, "--max-shard-size"),
    ],
)
@pytest.mark.parametrize("to", ["deepspeed", "universal"])
def test_options_of_safetensors_are_refused(tmp_path, to, option, spelled):
    write_zero_run(tmp_path / "run", small_run())

    with pytest.raises(UnsupportedError) as caught:
        api.convert(tmp_path / "run", tmp_path / "out", to=to, **option)
    assert str(caught.value) == (
        f"{to} takes no {spelled}: it has every state, as it is stored; leave it out, or convert "
        "to safetensors"
    )


@pytest.mark.parametrize("option", [{"tp": 2}, {"dp": 1}, {"zero": 1}, {"ep": 1}, {"grain": 2}])
@pytest.mark.parametrize("to", ["safetensors", "universal"])
def test_options_of_sharded_files_are_refused_elsewhere(tmp_path, to, option):
    write_zero_run(tmp_path / "run", small_run())
    (name,) = option

    with pytest.raises(UnsupportedError, match=f"^{to} takes no --{name}; .* convert to deepspeed"):
        api.convert(tmp_path / "run", tmp_path / "out", to=to, **option)
