"""ZeRO-3: what is written is what was there, in the files that the engine would have written."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.checkpoint.values import OrderedDictValue
from restride.errors import FormatError, ReplicaError, UnsupportedError
from restride.formats.deepspeed._sub_groups import DEFAULT_SUB_GROUP_NUMEL, sub_groups
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts.replicated import replicated
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import content_of, file_content
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all
from restride.testing.partitioned_files import write_partitioned_run
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct, zero_runs

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.selection import Export

CHECKPOINTS = (
    "bloom_tp2_z1",
    "codegen_fused_tp2dp2_z1",
    "codegen_rowcut_tp2_z1",
    "gpt2_tp1dp2_z1",
    "llama_tied_tp2_z1",
    "llama_tp1dp2_z2",
    "llama_tp1dp2_z3",
    "llama_tp2_z1_fp32",
    "llama_tp2_z3",
    "llama_unevenkv_tp2_z1",
    "opt_tp2_z1",
)
DATA = Path(__file__).parents[2] / "data"
PADDED = "deepspeed/partitioned_z3"
RECORDED = (
    PADDED,
    "deepspeed/persistent_momentum_z3",
    "deepspeed/tensor_parallel_z3",
    "deepspeed_optimizers/muon_z3",
    "deepspeed_optimizers/rmsprop_z3",
)
OWN = {"llama_tp1dp2_z3": DeepSpeedTarget(1, 2, 3), "llama_tp2_z3": DeepSpeedTarget(2, 1, 3)}


def layouts_of(catalog: Catalog, target: DeepSpeedTarget) -> dict[str, Layout]:
    """The tensors' own layouts, or none of them cut."""
    return {
        tensor.name: tensor.layout
        if tensor.layout.rank_count == target.tp
        else replicated(tensor.layout.full_shape, mesh=target.tp_mesh)
        for tensor in catalog.tensors
    }


def written(source: Catalog, target: DeepSpeedTarget, out: Path) -> Export:
    export = lay_out(source, read_training(source), target, layouts_of(source, target))
    write_export(source, export, out)
    return export


# Real checkpoints.


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("is_joined", "dp"), [(False, 1), (False, 3), (True, 2)])
def test_every_state_is_read_back_bit_for_bit(
    name: str, dp: int, *, is_joined: bool, shared: Path, tmp_path: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / name)
    target = DeepSpeedTarget(1 if is_joined else source.mesh.axis_size("tp"), dp, 3)

    written(source, target, tmp_path / "out")

    again = read_catalog(tmp_path / "out")
    assert (again.format, again.mesh) == ("deepspeed zero-3", target.mesh)
    known = {finding.kind for finding in source.findings}
    assert not [finding for finding in again.findings if finding.kind not in known]
    expected, found = gather_all(source), gather_all(again)
    masters = {f"{tensor.name}/fp32" for tensor in source.tensors}
    # A weight that has a master copy is not stored a second time.
    stored = {
        key for key in expected if f"{key.rpartition('/')[0]}/fp32" not in masters & {*expected}
    }
    assert found.keys() == stored | {key for key in expected if not key.endswith("/weight")}
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


@pytest.mark.parametrize("name", OWN)
def test_converted_to_its_own_ranks_the_files_hold_what_they_held(
    name: str, shared: Path, tmp_path: Path
) -> None:
    root = shared / "checkpoints" / name

    export = written(read_catalog(root), OWN[name], tmp_path / "out")

    assert not export.findings
    names = sorted(path.name for path in (root / "step").iterdir())
    assert sorted(path.name for path in (tmp_path / "out" / "step").iterdir()) == names
    for file in names:
        expected, found = (
            file_content(folder / "step" / file) for folder in (root, tmp_path / "out")
        )
        assert found == expected, file


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_files_hold_what_they_held(name: str, tmp_path: Path) -> None:
    """Several groups and sub-groups, frozen parameters, persistent ones, other optimizers."""
    root = DATA / name
    source = read_catalog(root)
    target = DeepSpeedTarget(source.mesh.axis_size("tp"), source.mesh.axis_size("dp"), 3)

    written(source, target, tmp_path / "out")

    for path in sorted((root / "step").iterdir()):
        expected, found = (
            file_content(file) for file in (path, tmp_path / "out" / "step" / path.name)
        )
        if name == PADDED and "optimizer_state_dict" in expected:
            # What the engine left behind the last element is not to be known.
            masters = [c["optimizer_state_dict"].pop("fp32_flat_groups") for c in (expected, found)]
            assert [part[:3] for part in masters[0][1]] == [part[:3] for part in masters[1][1]]
        assert found == expected, path.name
    expected, found = gather_all(source), gather_all(read_catalog(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["llama_tp1dp2_z1", "llama_tied_tp2_z1", "opt_tp2_z1"])
def test_to_zero_3_and_back_nothing_has_changed(name: str, shared: Path, tmp_path: Path) -> None:
    source = read_catalog(shared / "checkpoints" / name)
    tp, dp = (source.mesh.axis_size(axis) for axis in ("tp", "dp"))

    written(source, DeepSpeedTarget(tp, 3, 3), tmp_path / "there")
    written(read_catalog(tmp_path / "there"), DeepSpeedTarget(tp, dp, 1), tmp_path / "back")

    expected, found = gather_all(source), gather_all(read_catalog(tmp_path / "back"))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


# Drawn runs, beside what a slow writer writes for the ranks of the target.


@st.composite
def partitioned_runs(draw):
    """Runs that train in half precision; of frozen parameters the weight is all there is."""
    run = draw(zero_runs(writers=("zero",)))
    parameters = {}
    for number, (name, parameter) in enumerate(run.parameters.items()):
        weight = distinct(parameter.shape, 100 * number).astype(np.float16)
        is_frozen = name.startswith("layer") and draw(st.integers(0, 3)) == 0
        states = {} if is_frozen else parameter.states
        parameters[name] = replace(parameter, states={**states, "weight": weight})
    return replace(run, parameters=parameters)


def comparable(path: Path) -> list[object]:
    """What both writers write. Sizes are tuples here and sizes there."""
    value = open_torch_zip(path).value
    if "module" in value:
        shapes = [
            [(name, tuple(shape)) for name, shape in group.items()]
            for group in (*value["param_shapes"], value["frozen_param_shapes"])
        ]
        keys = ("module", "frozen_param_fragments", "buffer_names", "shared_params")
        keys += ("global_steps", "dp_world_size", "mp_world_size", "ds_config")
        return [shapes, *(content_of(value[key]) for key in keys)]
    state = dict(value["optimizer_state_dict"])
    for added in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version"):
        state.pop(added, None)
    return [content_of(state), content_of(value["ds_config"])]


@given(partitioned_runs(), st.integers(1, 3), st.data())
@settings(max_examples=25)
def test_files_are_those_that_the_ranks_of_the_target_would_have_written(run, length, data):
    tp = data.draw(st.sampled_from([1, run.tp]), "tp")
    target = DeepSpeedTarget(tp, data.draw(st.integers(1, 4), "dp"), 3)
    cuts = {
        name: replace(parameter, cut=parameter.cut if tp == run.tp else None)
        for name, parameter in run.parameters.items()
    }
    expected = replace(run, dp=target.dp, tp=tp, parameters=cuts)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_partitioned_run(folder / "source", run, sub_group_length=length)
        write_partitioned_run(folder / "expected", expected, sub_group_length=100, padding=0.0)

        written(read_catalog(folder / "source"), target, folder / "out")

        for path in (folder / "expected" / "step").iterdir():
            assert comparable(folder / "out" / "step" / path.name) == comparable(path), path.name


@given(zero_runs(writers=("zero", "bf16_optimizer")), st.integers(1, 4))
@settings(max_examples=20)
def test_runs_of_zero_1_become_what_an_engine_of_zero_3_would_have_written(run, dp):
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_zero_run(folder / "source", run)
        expected = replace(run, dp=dp)
        write_partitioned_run(folder / "expected", expected, sub_group_length=100, padding=0.0)

        written(read_catalog(folder / "source"), DeepSpeedTarget(run.tp, dp, 3), folder / "out")

        for path in (folder / "expected" / "step").iterdir():
            (found,) = (folder / "out" / "step").glob(f"*{path.name}")
            if path.name.endswith("model_states.pt"):
                assert comparable(found)[:-1] == comparable(path)[:-1]  # but for ds_config
                continue
            state, other = (
                open_torch_zip(file).value["optimizer_state_dict"] for file in (found, path)
            )
            # The engine asks for the scaling of the loss, and BF16_Optimizer does not say it.
            if run.writer == "bf16_optimizer":
                assert state["loss_scaler"].state == {"cur_scale": 1.0, "dynamic": False}
                assert (state["dynamic_loss_scale"], state["overflow"]) == (False, False)
            for key in ("fp32_flat_groups", "partition_count", "zero_stage"):
                assert content_of(state[key]) == content_of(other[key])
            states, others = (
                content_of(value["optimizer_state_dict"]["state"]) for value in (state, other)
            )
            assert states == others


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_parameter_may_be_one_number(dp: int, zero: int, tmp_path: Path) -> None:
    """Its moments are numbers then, as the step of all parameters is, and what else they share."""
    run = ZeroRun(dp, 1, {"scale": numbered((), 100), "w": numbered((3,), 500)})
    write_zero_run(tmp_path / "source", run)
    eta = Array("float32", (), np.float32(0.25).tobytes())
    for path in (tmp_path / "source" / "step").glob("zero_*"):
        edit_file(path, lambda value: _state_of(value).update({"eta": eta}))
    source = read_catalog(tmp_path / "source")

    written(source, DeepSpeedTarget(1, 3, zero), tmp_path / "out")

    expected, found = gather_all(source), gather_all(read_catalog(tmp_path / "out"))
    assert {"scale/fp32", "scale/exp_avg", "scale/step", "w/step", "w/eta"} <= found.keys()
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def _state_of(value: Any) -> Any:
    return value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def numbered(shape: tuple[int, ...], first: int) -> Parameter:
    states = ("weight", "fp32", "exp_avg", "exp_avg_sq")
    return Parameter(shape, {state: distinct(shape, first * n) for n, state in enumerate(states)})


# What goes along with the parameters.


def add_buffer(value, content):
    """A buffer stands before the parameters, an extra state behind them."""
    module = OrderedDictValue()
    module["rotary.steps"] = Array("int64", (2, 1), np.array(content).tobytes())
    module.update(value["module"])
    module["norm._extra_state"] = {"scale": 0.5}
    value["module"] = module
    value["buffer_names"] = ["rotary.steps"]


def model_files(folder: Path) -> list[Path]:
    return sorted((folder / "step").glob("*model_states.pt"))


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_buffers_are_whole_in_the_file_of_every_rank(tmp_path: Path, *, is_partitioned: bool):
    run = ZeroRun(2, 1, {"w": numbered((3,), 500)})
    (write_partitioned_run if is_partitioned else write_zero_run)(tmp_path / "source", run)
    for path in model_files(tmp_path / "source"):
        edit_file(path, lambda value: add_buffer(value, [3, 4]))

    written(read_catalog(tmp_path / "source"), DeepSpeedTarget(1, 3, 3), tmp_path / "out")

    assert len(model_files(tmp_path / "out")) == 3
    for path in model_files(tmp_path / "out"):
        content = file_content(path)
        assert list(content["module"][1]) == ["rotary.steps", "w", "norm._extra_state"]
        buffer = content["module"][1]["rotary.steps"]
        assert buffer == ("tensor", "int64", (2, 1), np.array([3, 4]).tobytes())
        assert content["buffer_names"] == ("list", [("str", "rotary.steps")])
    again = read_catalog(tmp_path / "out")
    assert [tensor.name for tensor in again.tensors if tensor.kind == "buffer"] == ["rotary.steps"]


def test_buffers_that_differ_between_ranks_are_not_mixed_up(tmp_path: Path) -> None:
    write_partitioned_run(tmp_path / "source", ZeroRun(2, 1, {"w": numbered((3,), 500)}))
    for dp, path in enumerate(model_files(tmp_path / "source")):
        edit_file(path, lambda value, dp=dp: add_buffer(value, [dp, 4]))

    with pytest.raises(ReplicaError, match=r"rotary\.steps"):
        written(read_catalog(tmp_path / "source"), DeepSpeedTarget(1, 2, 3), tmp_path / "out")


def test_values_of_each_data_parallel_rank_stay_with_it(tmp_path: Path) -> None:
    """At ZeRO-3 every rank saves a model file, and its random states in it."""
    write_partitioned_run(tmp_path / "source", ZeroRun(2, 1, {"w": numbered((3,), 500)}))
    for dp, path in enumerate(model_files(tmp_path / "source")):
        edit_file(path, lambda value, dp=dp: value.update(seed=dp))
    source = read_catalog(tmp_path / "source")

    same = written(source, DeepSpeedTarget(1, 2, 3), tmp_path / "same")
    more = written(source, DeepSpeedTarget(1, 4, 3), tmp_path / "more")

    def seeds(folder: Path) -> list[int]:
        return [file_content(path)["seed"][1] for path in model_files(folder)]

    assert seeds(tmp_path / "same") == [0, 1]
    assert not same.findings
    assert seeds(tmp_path / "more") == [0, 0, 1, 1]
    assert "rank-values" in {finding.kind for finding in more.findings}


def test_only_the_first_rank_knows_of_tied_weights(shared: Path, tmp_path: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tied_tp2_z1")

    written(source, DeepSpeedTarget(2, 2, 3), tmp_path / "out")

    tied = {"lm_head.weight": ("str", "model.embed_tokens.weight")}
    contents = [file_content(path) for path in model_files(tmp_path / "out")]
    assert [content["shared_params"] for content in contents] == [tied, {}, {}, {}]
    assert all("lm_head.weight" in content["module"][1] for content in contents)


# Sub-groups.


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.integers(1, 9), max_size=8),
    st.integers(0, 30),
)
def test_sub_groups_are_closed_by_the_parameter_that_reaches_the_limit(widths, limit):
    found = list(sub_groups(widths, limit))

    assert [name for members in found for name in members] == list(widths)
    assert all(found)
    if limit >= sum(widths.values()):
        assert len(found) <= 1
        return
    for members in found:
        *before, last = (widths[name] for name in members)
        assert sum(before) < max(limit, 1)
        assert sum(before) + last >= limit or members == found[-1]


def with_setting(catalog: Catalog, key: str, value: object):
    """The training of a catalog, as a configuration with one more setting says it."""
    training = read_training(catalog)
    ranks = []
    for rank in training.ranks:
        config = dict(rank.values["ds_config"])
        config["zero_optimization"] = {**config["zero_optimization"], key: value}
        ranks.append(replace(rank, values={**rank.values, "ds_config": config}))
    return replace(training, ranks=tuple(ranks))


@pytest.mark.parametrize("limit", [4000, 4000.0])
def test_the_configuration_says_how_long_a_sub_group_is(
    limit: float, shared: Path, tmp_path: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tp1dp2_z1")
    target = DeepSpeedTarget(1, 2, 3)
    training = with_setting(source, "sub_group_size", limit)

    export = lay_out(source, training, target, layouts_of(source, target))
    write_export(source, export, tmp_path / "out")

    notes = {finding.kind: finding for finding in export.findings}
    assert notes["sub-groups"].details == {"sub_group_size": 4000}
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = open_torch_zip(tmp_path / "out" / "step" / name).value["optimizer_state_dict"]
    lengths = [tensor.shape[0] for tensor in state["fp32_flat_groups"]]
    # Chunks of 4096, 2048, 1024, 1024, 2048 elements and so on: half of each parameter.
    assert lengths[:3] == [4096, 4096, 6144]
    numbers = state["optimizer_state_dict"]["param_groups"][0]["params"]
    assert numbers == list(range(len(lengths)))
    assert all(own["step"].shape == () for own in state["optimizer_state_dict"]["state"].values())
    expected, found = gather_all(source), gather_all(read_catalog(tmp_path / "out"))
    assert all(np.array_equal(found[key], expected[key]) for key in found)


def test_sub_groups_of_a_group_that_have_taken_other_steps_are_refused(tmp_path: Path) -> None:
    """Optimizers on the CPU count in plain integers, one for each sub-group."""
    run = ZeroRun(1, 1, {name: numbered((3,), 100) for name in ("a", "b")})
    write_partitioned_run(tmp_path / "source", run, sub_group_length=1)

    def count(value, steps):
        states = value["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        for number, step in enumerate(steps):
            states[number]["step"] = step

    file = tmp_path / "source" / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    edit_file(file, lambda value: count(value, [7, 7]))
    written(read_catalog(tmp_path / "source"), DeepSpeedTarget(1, 2, 3), tmp_path / "out")
    (own,) = (
        open_torch_zip(path).value["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        for path in (tmp_path / "out" / "step").glob("*_rank_1_*_optim_states.pt")
    )
    assert own[0]["step"] == 7

    edit_file(file, lambda value: count(value, [7, 8]))

    with pytest.raises(UnsupportedError, match=r"is 8, .* of the same parameter group is 7"):
        read_training(read_catalog(tmp_path / "source"))

    for own in (["fast", "slow"], [[1.0, 2.0], [1.0, 3.0]]):
        edit_file(file, lambda value, own=own: count(value, own))

        with pytest.raises(UnsupportedError, match=r"is ('slow'|3.0), .* parameter group is "):
            read_training(read_catalog(tmp_path / "source"))


def test_without_a_word_of_it_a_sub_group_has_as_many_elements_as_the_engine_gives_it() -> None:
    assert list(sub_groups({"a": DEFAULT_SUB_GROUP_NUMEL, "b": 1}, DEFAULT_SUB_GROUP_NUMEL)) == [
        ("a",),
        ("b",),
    ]


def test_a_limit_that_is_no_number_is_refused(shared: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tp1dp2_z1")
    target = DeepSpeedTarget(1, 2, 3)
    training = with_setting(source, "sub_group_size", "many")

    with pytest.raises(FormatError, match="sub_group_size"):
        lay_out(source, training, target, layouts_of(source, target))


def test_an_engine_that_cuts_over_a_part_of_the_ranks_is_told_to_resume_without(
    shared: Path,
) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tp1dp2_z1")
    target = DeepSpeedTarget(1, 4, 3)
    training = with_setting(source, "mics_shard_size", 2)

    export = lay_out(source, training, target, layouts_of(source, target))

    assert "config-mics" in {finding.kind for finding in export.findings}
