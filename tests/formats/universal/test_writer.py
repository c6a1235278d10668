"""Universal folders: every state whole in a file of its own, and what goes with it."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.checkpoint.catalog import Region, StateEntry, TensorEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import Constructed, StoredTensor
from restride.errors import CorruptError, ReplicaError, RestrideError, UnsupportedError
from restride.formats.opening import open_training
from restride.formats.safetensors.spelling import whole_layout
from restride.formats.universal import lay_out
from restride.storage.torch_zip import open_torch_zip
from restride.testing.command_line import run
from restride.testing.gather import gather
from restride.testing.mutations import damaged_pickles
from restride.testing.saved_values import Array, edit_file, save_file
from restride.testing.zero_files import ZeroRun, shard_of, write_zero_run
from restride.testing.zero_runs import ADAM, parameter

OPTIMIZER_FILE = "step/zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
MODEL_FILE = "step/mp_rank_{:02d}_model_states.pt"


PARAMETERS = {
    "embed.weight": parameter(0, (6, 4), (0, (4, 2))),
    "down.weight": parameter(5_000, (3, 8), (1, (4, 4))),
    "norm.weight": parameter(9_000, (5,)),
}


def written(folder, parameters=PARAMETERS, dp=2, tp=2, **options):
    write_zero_run(folder, ZeroRun(dp, tp, dict(parameters), **options))
    return folder


def converted(source, out):
    api.convert(source, out, to="universal")
    return out / "step_universal"


def value_of(path):
    return open_torch_zip(path).value


def array(tensor):
    assert isinstance(tensor, StoredTensor)
    dtype = np.dtype(tensor.storage.dtype.name)
    content = np.fromfile(tensor.storage.file, np.uint8)[tensor.start_nbytes :]
    return content[: prod(tensor.shape) * dtype.itemsize].view(dtype).reshape(tensor.shape)


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(dp=st.integers(1, 3), tp=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_state_is_whole_whatever_cut_it_had(tmp_path_factory, dp, tp, seed):
    rng = np.random.default_rng(seed)
    parameters = {"norm": parameter(0, (3,))}
    for number in range(3):
        widths = tuple(int(width) for width in rng.integers(1, 4, tp))
        shape = (sum(widths), int(rng.integers(1, 5)))
        cut = (0, widths) if number else None
        parameters[f"layer.{number}"] = parameter(10_000 * (number + 1), shape, cut)
    folder = tmp_path_factory.mktemp("run")
    source = written(folder / "in", parameters, dp, tp)

    top = converted(source, folder / "out")

    for name, expected in parameters.items():
        for state in ADAM[1:]:
            content = value_of(top / "zero" / name / f"{state}.pt")
            assert np.array_equal(array(content["param"]), expected.states[state])
        assert array(value_of(top / "zero" / name / "step.pt")) == 2


def test_the_files_are_those_that_an_engine_looks_for(tmp_path):
    source = written(tmp_path / "in")

    report = api.convert(source, tmp_path / "out", to="universal")

    states = ("fp32", "exp_avg", "exp_avg_sq", "step")
    assert files_below(tmp_path / "out") == {
        "restride.json",
        "latest_universal",
        "step_universal/mp_rank_00_model_states.pt",
        "step_universal/mp_rank_01_model_states.pt",
        "step_universal/zero/optimizer_state.pt",
        *(f"step_universal/zero/{name}/{state}.pt" for name in PARAMETERS for state in states),
    }
    assert {*report.files, "restride.json"} == files_below(tmp_path / "out")
    assert report.tensor_count == 4 * len(PARAMETERS)
    assert (tmp_path / "out" / "latest_universal").read_text() == "step_universal"


def test_the_folder_of_a_tag_may_be_named_as_well(tmp_path):
    source = written(tmp_path / "in")

    api.convert(source / "step", tmp_path / "out", to="universal")

    assert (tmp_path / "out" / "latest_universal").read_text() == "step_universal"


def test_model_files_are_copied_byte_for_byte(tmp_path):
    source = written(tmp_path / "in")

    top = converted(source, tmp_path / "out")

    for tp in range(2):
        copied = top / f"mp_rank_{tp:02d}_model_states.pt"
        assert copied.read_bytes() == (source / MODEL_FILE.format(tp)).read_bytes()


def test_the_optimizer_keeps_everything_but_its_tensors(tmp_path):
    source = written(tmp_path / "in")
    loss_scaler = {"cur_scale": 1.5, "table": Array("int64", (2,), bytes(range(16)))}
    edit_file(
        source / OPTIMIZER_FILE.format(0, 0),
        lambda value: value["optimizer_state_dict"].update(loss_scaler=loss_scaler),
    )

    top = converted(source, tmp_path / "out")

    state = value_of(top / "zero" / "optimizer_state.pt")
    assert set(state) == {
        *("clip_grad", "ds_version", "group_paddings", "partition_count", "zero_stage"),
        *("param_alignment_paddings", "loss_scaler", "param_groups"),
    }
    assert state["param_groups"] == [{"lr": 0.5, "params": [0]}]
    assert (state["group_paddings"], state["partition_count"]) == ([0], [2])
    assert array(state["loss_scaler"]["table"]).tobytes() == bytes(range(16))


def test_states_keep_the_names_that_the_optimizer_gave_them(tmp_path):
    states = ("weight", "fp32", "momentum_buffer")
    source = written(tmp_path / "in", {"w": parameter(0, (4, 3), (0, (2, 2)), states=states)})

    top = converted(source, tmp_path / "out")

    assert files_below(top / "zero" / "w") == {"fp32.pt", "momentum_buffer.pt", "step.pt"}


def test_a_step_that_is_a_plain_number_stays_one(tmp_path):
    source = written(tmp_path / "in")
    for dp in range(2):
        for tp in range(2):
            edit_file(
                source / OPTIMIZER_FILE.format(dp, tp),
                lambda value: value["optimizer_state_dict"]["base_optimizer_state"]["state"][
                    0
                ].update(step=7),
            )

    top = converted(source, tmp_path / "out")

    assert all(value_of(top / "zero" / name / "step.pt") == 7 for name in PARAMETERS)


def test_a_scalar_state_that_no_engine_looks_for_is_told_of_and_kept(tmp_path):
    source = written(tmp_path / "in")
    product = Array("float32", (), np.float32(0.25).tobytes())
    for dp in range(2):
        for tp in range(2):
            edit_file(
                source / OPTIMIZER_FILE.format(dp, tp),
                lambda value: value["optimizer_state_dict"]["base_optimizer_state"]["state"][
                    0
                ].update(mu_product=product, rounds=3),
            )

    report = api.convert(source, tmp_path / "out", to="universal")

    (finding,) = report.findings
    assert (finding.severity, finding.kind) == ("warning", "not-loaded")
    assert finding.message.startswith("no engine loads mu_product, rounds again")
    assert not any("mu_product" in name for name in report.files)
    catalog = api.open(tmp_path / "out")
    for tensor in catalog.tensors:
        assert gather(catalog, tensor.states["mu_product"]).tobytes() == np.float32(0.25).tobytes()
    assert [dict(group.numbers) for group in open_training(catalog).groups] == [{"rounds": 3}]


def test_buffers_are_in_the_model_files_and_nowhere_else(tmp_path):
    source = written(tmp_path / "in")
    for tp in range(2):

        def add(value):
            value["module"]["counter"] = Array("int64", (1,), bytes(8))
            value["buffer_names"] = ["counter"]

        edit_file(source / MODEL_FILE.format(tp), add)

    top = converted(source, tmp_path / "out")

    assert not (top / "zero" / "counter").exists()


def test_a_frozen_weight_is_whole_and_widened(tmp_path):
    source = written(tmp_path / "in")
    halves = np.arange(8, dtype=np.float16).reshape(2, 4)
    for tp in range(2):

        def freeze(value, tp=tp):
            value["module"]["base.weight"] = Array("float16", (1, 4), halves[tp].tobytes())
            value["frozen_param_shapes"] = {"base.weight": (1, 4)}
            maps = value["universal_checkpoint_info"]["affine_map"]["params"]
            maps[r"^base\.weight$"] = {
                "logical_shape": [2, 4],
                "ranks": {
                    rank: {
                        "shard_shape": [1, 4],
                        "pieces": [
                            {
                                "shape": [1, 4],
                                "source": [4 * rank, [4, 1]],
                                "dest": [0, [4, 1]],
                                "locations": [rank],
                            }
                        ],
                    }
                    for rank in range(2)
                },
            }

        edit_file(source / MODEL_FILE.format(tp), freeze)

    top = converted(source, tmp_path / "out")

    assert files_below(top / "zero" / "base.weight") == {"fp32.pt"}
    content = value_of(top / "zero" / "base.weight" / "fp32.pt")
    assert set(content) == {"param"}
    assert array(content["param"]).dtype == np.float32
    assert np.array_equal(array(content["param"]), halves.astype(np.float32))
    # The peer writes the first shard there; the model files have all of it.
    save_file(
        top / "zero" / "base.weight" / "fp32.pt",
        {"param": Array("float32", (1, 4), halves[0].astype(np.float32).tobytes())},
    )
    (tensor,) = (t for t in api.open(top).tensors if t.name == "base.weight")
    assert tensor.is_frozen
    assert list(tensor.states) == ["weight"]
    assert gather(api.open(top), tensor.states["weight"]).tobytes() == halves.tobytes()


def test_a_second_embedding_is_not_cut_to_the_size_of_the_first(tmp_path):
    positions = parameter(30_000, (10, 4), (0, (6, 4)))
    source = written(tmp_path / "in", {**PARAMETERS, "embed.positions": positions})
    for tp in range(2):
        edit_file(
            source / MODEL_FILE.format(tp),
            lambda value: value["universal_checkpoint_info"].update(
                vocabulary_parameter_patterns=[r"^embed\.weight$", r"^embed\.positions$"],
                original_vocab_size=6,
            ),
        )

    top = converted(source, tmp_path / "out")

    whole = array(value_of(top / "zero" / "embed.positions" / "fp32.pt")["param"])
    assert np.array_equal(whole, positions.states["fp32"])
    assert marks_of(top, "embed.positions") == {"vocab_tensor": True}


def marks_of(top, name, state="fp32"):
    content = value_of(top / "zero" / name / f"{state}.pt")
    return {key: mark for key, mark in content.items() if key != "param"}


def without_maps(source, tp=2, **info):
    """Say in categories how parameters are cut, as before there were maps."""
    for rank in range(tp):
        edit_file(
            source / MODEL_FILE.format(rank),
            lambda value: value.update(universal_checkpoint_info=info),
        )


def test_what_a_map_describes_has_no_marks(tmp_path):
    top = converted(written(tmp_path / "in"), tmp_path / "out")

    assert all(marks_of(top, name) == {} for name in PARAMETERS)


def test_without_tensor_parallelism_the_peer_joins_along_dimension_0(tmp_path):
    parameters = {"w": parameter(0, (4, 3))}
    top = converted(written(tmp_path / "in", parameters, dp=2, tp=1), tmp_path / "out")

    assert marks_of(top, "w") == {"cat_dim": 0}
    assert marks_of(top, "w", "exp_avg") == {"cat_dim": 0}


def test_categories_become_the_marks_that_the_peer_writes(tmp_path):
    halves = parameter(20_000, (8, 3), (0, (4, 4)))
    parameters = {**PARAMETERS, "column.weight": parameter(7_000, (4, 2), (0, (2, 2)))}
    source = written(tmp_path / "in", {**parameters, "gate_up": halves})
    without_maps(
        source,
        tp_replicated_parameter_patterns=[r"^norm\.weight$"],
        parameter_with_row_parallelism_patterns=[r"^down\.weight$"],
        parameter_with_2_sub_params_cat_dim_0=["^gate_up$"],
        vocabulary_parameter_patterns=[r"^embed\.weight$"],
        original_vocab_size=6,
    )

    top = converted(source, tmp_path / "out")

    assert {name: marks_of(top, name) for name in (*parameters, "gate_up")} == {
        "embed.weight": {"cat_dim": 0, "vocab_tensor": True},
        "down.weight": {"cat_dim": 1},
        "norm.weight": {},
        "column.weight": {"cat_dim": 0},
        "gate_up": {"cat_dim": 0, "param_n_sub_params": 2},
    }


def test_sub_parameters_are_an_object_of_the_peers_class_and_have_its_shape(tmp_path):
    source = written(tmp_path / "in", {"qkv": parameter(0, (6, 4), (0, (3, 3)))})
    without_maps(
        source,
        tp_replicated_parameter_patterns=[],
        parameter_with_row_parallelism_patterns=[],
        parameter_with_sub_params=[
            {"patterns": ["^qkv$"], "shape": ((2, 2, 2), 4), "partition_dim": 0}
        ],
        sub_param_shard_widths={"^qkv$": [[1, 1]] * 3},
        universal_checkpoint_version=0.4,
    )

    top = converted(source, tmp_path / "out")

    mark = marks_of(top, "qkv")["sub_param_shape"]
    assert isinstance(mark, Constructed)
    assert str(mark.constructor).endswith("universal_checkpoint.SubparamShape")
    assert mark.state == {"patterns": ["^qkv$"], "shape": ((2, 2, 2), 4), "partition_dim": 0}
    assert value_of(top / "zero" / "qkv" / "fp32.pt")["param"].shape == (6, 4)


@pytest.mark.parametrize("first", [2, -1])
def test_sub_parameters_in_dimensions_of_their_own_are_joined_in_these(tmp_path, first):
    """DeepSpeed views a stack of matrices, which is stored as one, in three dimensions."""
    source = written(tmp_path / "in", {"up": parameter(0, (4, 6), (1, (3, 3)))})
    without_maps(
        source,
        tp_replicated_parameter_patterns=[],
        parameter_with_row_parallelism_patterns=[],
        parameter_with_sub_params=[
            {"patterns": ["^up$"], "shape": (first, 2, (4, 2)), "partition_dim": 2}
        ],
        sub_param_shard_widths={"^up$": [[2, 2], [1, 1]]},
        universal_checkpoint_version=0.4,
    )

    top = converted(source, tmp_path / "out")

    stored = value_of(top / "zero" / "up" / "fp32.pt")["param"]
    assert stored.shape == (2, 2, 6)
    run = ZeroRun(2, 2, {"up": parameter(0, (4, 6), (1, (3, 3)))})
    left, right = (shard_of(run, "up", "fp32", tp).reshape(4, 3) for tp in range(2))
    parts = (left[:, :2], right[:, :2], left[:, 2:], right[:, 2:])
    catalog = api.open(tmp_path / "out")
    assert np.array_equal(
        gather(catalog, catalog.tensors[0].states["fp32"]).view("f4").reshape(4, 6),
        np.concatenate(parts, axis=1),
    )


def test_a_count_of_sub_parameters_becomes_their_sizes(tmp_path):
    source = written(tmp_path / "in", {"qkv": parameter(0, (6, 4), (0, (3, 3)))})
    without_maps(
        source,
        tp_replicated_parameter_patterns=[],
        parameter_with_row_parallelism_patterns=[],
        parameter_with_sub_params=[{"patterns": ["^qkv$"], "shape": (3, -1), "partition_dim": 0}],
    )

    top = converted(source, tmp_path / "out")

    assert marks_of(top, "qkv")["sub_param_shape"].state["shape"] == ((2, 2, 2), -1)


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "a\\b", "/etc/x", "../../x", "optimizer_state.pt"]
)
def test_a_name_that_would_lead_elsewhere_is_refused_and_nothing_is_left(tmp_path, name):
    source = written(tmp_path / "in", {name: parameter(0, (4,))}, dp=1, tp=1)

    with pytest.raises(UnsupportedError, match="universal folder") as caught:
        api.convert(source, tmp_path / "out", to="universal")

    assert repr(name) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("state", ["../fp32", "a/b"])
def test_a_state_that_would_lead_elsewhere_is_refused(tmp_path, state):
    states = ("weight", "fp32", state)
    source = written(tmp_path / "in", {"w": parameter(0, (4,), states=states)}, dp=1, tp=1)

    with pytest.raises(UnsupportedError, match="cannot be the name of a file"):
        api.convert(source, tmp_path / "out", to="universal")

    assert not (tmp_path / "out").exists()


def laid_out(catalog, tensor):
    one = replace(catalog, tensors=(tensor,))
    return lay_out(one, open_training(catalog), is_partitioned=False)


def test_states_are_written_in_the_dtype_in_which_they_are_stored(tmp_path):
    source = written(tmp_path / "in", {"w": parameter(0, (4,))}, dp=1, tp=1)
    catalog = api.open(source)
    (tensor,) = catalog.tensors
    half = StateEntry(DTYPES["bfloat16"], tensor.states["fp32"].layout, (Region(0, 64),))
    tensor = replace(tensor, states={"fp32": half, "exp_avg": half, "momentum": half})

    made = laid_out(catalog, tensor)

    arrays = [target for target in made.output.tensors if target.dtype.name == "bfloat16"]
    assert [target.name for target in arrays] == [
        f"step_universal/zero/w/{state}.pt" for state in ("fp32", "exp_avg", "momentum")
    ]
    assert [source.entry for source in made.sources[:3]] == [half] * 3


def test_a_weight_that_cannot_be_widened_is_told_of(tmp_path):
    source = written(tmp_path / "in", {"w": parameter(0, (4,))}, dp=1, tp=1)
    catalog = api.open(source)
    (tensor,) = catalog.tensors
    packed = StateEntry(DTYPES["uint8"], tensor.layout, (Region(0, 64),))
    frozen = TensorEntry("packed", "parameter", tensor.layout, {"weight": packed}, is_frozen=True)

    made = laid_out(catalog, frozen)

    assert [finding.kind for finding in made.findings] == ["not-carried"]
    assert "a weight of uint8 has no master copy" in made.findings[0].message


def test_a_state_of_another_shape_than_its_parameter_is_told_of(tmp_path):
    catalog = api.open(written(tmp_path / "in", {"w": parameter(0, (4,))}, dp=1, tp=1))
    (tensor,) = catalog.tensors
    rows = StateEntry(DTYPES["float32"], whole_layout((2,)), (Region(0, 64),))

    made = laid_out(catalog, replace(tensor, states={**tensor.states, "rows": rows}))

    (told,) = made.findings
    assert (told.severity, told.kind, told.where) == ("warning", "not-carried", "tensor 'w'")
    assert told.message == (
        "tensor 'w': its state 'rows' of shape (2,) has no place in a universal folder"
    )
    assert not [file.name for file in made.output.files if "rows" in file.name]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"weight"}, {"w": "weight", "again": "weight", "third": "weight"}),
        ({"weight", "fp32"}, {"w": "fp32", "again": "weight", "third": "weight"}),
        ({"fp32"}, {"w": "fp32"}),
    ],
)
def test_every_name_of_a_parameter_has_the_best_that_there_is(tmp_path, states, expected):
    catalog = api.open(written(tmp_path / "in", {"w": parameter(0, (4,))}, dp=1, tp=1))
    (tensor,) = catalog.tensors
    half = replace(tensor.states["fp32"], dtype=DTYPES["bfloat16"])
    known = {"weight": half, "fp32": tensor.states["fp32"]}
    tied = replace(
        tensor, aliases=("again", "third"), states={state: known[state] for state in states}
    )

    made = laid_out(catalog, tied)

    assert {own.key.split("/")[-2]: own.state for own in made.sources if "/zero/" in own.key} == (
        expected
    )
    assert {file.name for file in made.output.files if file.name.endswith("/fp32.pt")} == {
        f"step_universal/zero/{name}/fp32.pt" for name in expected
    }


def test_a_checkpoint_with_a_missing_file_is_refused(tmp_path):
    source = written(tmp_path / "in")
    (source / OPTIMIZER_FILE.format(1, 1)).unlink()

    with pytest.raises(CorruptError, match=r"^1 of 4 optimizer files is missing \(dp 1 tp 1\)"):
        api.convert(source, tmp_path / "out", to="universal")

    assert not (tmp_path / "out").exists()


def test_weights_without_an_optimizer_are_refused_with_the_way_out(tmp_path):
    source = written(tmp_path / "in", dp=1, tp=1, parameters={"w": parameter(0, (4,))})
    (source / OPTIMIZER_FILE.format(0, 0)).unlink()

    with pytest.raises(UnsupportedError, match=r"no optimizer files.*--to safetensors"):
        api.convert(source, tmp_path / "out", to="universal")


@pytest.mark.parametrize("stage", [1, 3])
def test_an_elastic_checkpoint_leaves_the_engine_its_own_hyperparameters(tmp_path, stage):
    source = written(tmp_path / "in", writer="elastic")

    report = api.convert(source, tmp_path / "out", to="universal", stage=stage)

    assert [finding.kind for finding in report.findings] == ["no-settings"]
    state = value_of(tmp_path / "out" / "step_universal" / "zero" / "optimizer_state.pt")
    assert state["param_groups"] == [{"params": [0]}]
    groups = open_training(api.open(tmp_path / "out")).groups
    assert [dict(group.settings) for group in groups] == [{}]
    assert groups[0].names == tuple(PARAMETERS)


def test_safetensors_cannot_become_a_universal_folder(tmp_path):
    api.convert(written(tmp_path / "in"), tmp_path / "weights")

    with pytest.raises(UnsupportedError, match="no training that could go on"):
        api.convert(tmp_path / "weights", tmp_path / "out", to="universal")


@pytest.mark.parametrize(
    ("option", "spelled"),
    [({"dtype": "float32"}, "--dtype"), ({"max_shard_nbytes": 100}, "--max-shard-size")],
)
def test_options_of_another_format_are_refused(tmp_path, option, spelled):
    with pytest.raises(UnsupportedError, match=f"takes no {spelled}"):
        api.convert(written(tmp_path / "in"), tmp_path / "out", to="universal", **option)


def test_a_format_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"cannot write 'onnx'; .*safetensors, universal, deepspeed"
    ):
        api.convert(written(tmp_path / "in"), tmp_path / "out", to="onnx")


def test_the_command_writes_it(tmp_path):
    source = written(tmp_path / "in")

    ran = run("convert", str(source), str(tmp_path / "out"), "--to", "universal", "--json")

    assert (ran.code, ran.err) == (0, "")
    assert len(json.loads(ran.out)["files"]) == 4 + 4 * len(PARAMETERS)
    assert (tmp_path / "out" / "latest_universal").is_file()


def test_the_command_does_not_list_a_thousand_files(tmp_path):
    source = written(tmp_path / "in", {f"w{n}": parameter(n, (2,)) for n in range(9)}, dp=1, tp=1)

    ran = run("convert", str(source), str(tmp_path / "out"), "--to", "universal")

    assert ran.out.splitlines()[-1] == f"  ... and {9 * 4 + 3 - 12} more"


def test_a_replica_that_drifted_is_refused_or_decided_like_everywhere(tmp_path):
    source = written(tmp_path / "in")

    def drift(value):
        flat = value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        content = np.fromfile(flat.storage.file, np.uint8)[flat.start_nbytes :][: 4 * flat.shape[0]]
        changed = content.view(np.float32).copy()
        changed[-1] += 1
        value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = Array(
            "float32", flat.shape, changed.tobytes()
        )

    edit_file(source / OPTIMIZER_FILE.format(1, 0), drift)

    with pytest.raises(ReplicaError, match=r"norm\.weight"):
        api.convert(source, tmp_path / "out", to="universal")
    report = api.convert(source, tmp_path / "out", to="universal", replicas="first")
    # The weights of these files are other numbers than their master copies, to tell them apart.
    kinds = [finding.kind for finding in report.findings if finding.kind != "master-mismatch"]
    assert kinds == ["replica-drift"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), tp=st.integers(1, 2))
def test_damaged_files_are_refused_or_harmless(tmp_path_factory, data, tp):
    folder = tmp_path_factory.mktemp("damaged")
    source = written(folder / "in", dp=1, tp=tp)
    victim = source / data.draw(
        st.sampled_from([MODEL_FILE.format(0), OPTIMIZER_FILE.format(0, 0)])
    )
    read = open_torch_zip(victim)
    content = victim.read_bytes()
    storages = {
        storage.key: content[storage.start_nbytes :][: storage.nbytes]
        for storage in read.storages.values()
    }
    pickle = read.records["data.pkl"]
    stream = content[pickle.start_nbytes :][: pickle.nbytes]
    victim.write_bytes(data.draw(damaged_pickles(stream, storages)))

    try:
        api.convert(source, folder / "out", to="universal")
    except RestrideError:
        assert sorted(path.name for path in folder.iterdir()) == ["in"]
    else:
        # Whatever was written, is inside and can be read.
        assert api.open(folder / "out").format == "deepspeed universal"
        assert sorted(path.name for path in folder.iterdir()) == ["in", "out"]
