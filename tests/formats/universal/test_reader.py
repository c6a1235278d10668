"""Universal folders are read as what they were made of, and every lie in them is found."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride import api
from restride.algebra.mesh import Mesh
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import StoredTensor
from restride.errors import (
    CorruptError,
    ExecutionError,
    FormatError,
    RestrideError,
    UnsupportedError,
)
from restride.formats.universal import read_catalog
from restride.storage.torch_file import new_tensor
from restride.testing.command_line import run
from restride.testing.gather import gather_all
from restride.testing.inert_values import save_value
from restride.testing.saved_values import Array, edit_file, save_file
from restride.testing.zero_files import ZeroRun, write_zero_run
from restride.testing.zero_runs import ADAM, parameter

PARAMETERS = {
    "z.weight": parameter(0, (6, 4), (0, (4, 2))),
    "b.weight": parameter(5_000, (3, 8), (1, (4, 4))),
    "a.norm": parameter(9_000, (5,)),
}


def universal(folder, parameters=PARAMETERS, dp=2, tp=2, **extra):
    """A universal folder, and the checkpoint that it was made of."""
    write_zero_run(folder / "in", ZeroRun(dp, tp, dict(parameters), extra=extra))
    api.convert(folder / "in", folder / "out", to="universal")
    return folder / "out"


@pytest.fixture
def made(tmp_path):
    return universal(tmp_path)


def place(made, name, state="fp32"):
    return made / "step_universal" / "zero" / name / f"{state}.pt"


@settings(max_examples=10)
@given(dp=st.integers(1, 3), tp=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_state_is_that_of_the_source(tmp_path_factory, dp, tp, seed):
    rng = np.random.default_rng(seed)
    parameters = {"norm": parameter(0, (3,))}
    for number in range(3):
        widths = tuple(int(width) for width in rng.integers(1, 4, tp))
        dim = int(rng.integers(0, 2))
        shape = (sum(widths), 3) if dim == 0 else (3, sum(widths))
        parameters[f"layer.{number}"] = parameter(10_000 * number, shape, (dim, widths))
    folder = tmp_path_factory.mktemp("run")

    read = read_catalog(universal(folder, parameters, dp, tp))

    source = api.open(folder / "in")
    expected, found = gather_all(source), gather_all(read)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key
    assert [tensor.layout for tensor in read.tensors] == [t.layout for t in source.tensors]


@pytest.mark.parametrize("latest", [None, "step_universal"])
def test_a_universal_folder_that_its_latest_file_does_not_name_is_refused(made, latest):
    """Only the weights would be seen, and nothing wrong with them."""
    (made / "latest_universal").unlink()
    if latest is not None:
        (made / "latest").write_text(latest)

    with pytest.raises(FormatError, match="tag 'step_universal', which is a universal") as caught:
        api.open(made)
    assert caught.value.remedy == f"name the folder itself, as {str(made / 'step_universal')!r}"
    assert api.open(made / "step_universal").format == "deepspeed universal"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_folder_without_model_files_is_told_of(made, stage):
    api.convert(made, made.parent / "other", to="universal", stage=stage)
    made = made.parent / "other"
    for path in made.glob("step_universal/*_model_states.pt"):
        path.unlink()

    report = api.check(made)

    (finding,) = [f for f in report.findings if f.kind == "missing-file"]
    assert (finding.severity, report.verdict) == ("warning", "findings")
    assert "no model file is there" in finding.message


def test_a_universal_folder_without_the_state_of_its_optimizer_is_told_of(made):
    (made / "step_universal" / "zero" / "optimizer_state.pt").unlink()

    (finding,) = read_catalog(made).findings

    place = "step_universal/zero/optimizer_state.pt"
    assert (finding.severity, finding.kind, finding.where) == ("warning", "missing-file", place)
    assert finding.message.endswith("no engine resumes from the folder without it")


def test_states_are_whole_and_in_the_order_of_the_model(made):
    catalog = api.open(made)

    assert catalog.format == "deepspeed universal"
    assert catalog.mesh == Mesh((("tp", 2),))
    assert [tensor.name for tensor in catalog.tensors] == list(PARAMETERS)
    assert [list(tensor.states) for tensor in catalog.tensors] == [
        ["weight", "fp32", "exp_avg", "exp_avg_sq", "step"]
    ] * 3
    assert {tensor.name: tensor.layout.full_shape for tensor in catalog.tensors} == {
        name: parameter.shape for name, parameter in PARAMETERS.items()
    }
    assert all(
        entry.layout.mesh == Mesh(())
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
        if state != "weight"
    )
    assert catalog.findings == ()


def test_the_folder_itself_is_read_like_the_one_above_it(made):
    above, itself = (gather_all(api.open(path)) for path in (made, made / "step_universal"))

    assert above.keys() == itself.keys()
    assert all(np.array_equal(above[key], itself[key]) for key in above)


def test_safetensors_of_it_are_those_of_its_source(made, tmp_path):
    api.convert(made, tmp_path / "weights", states="all")

    read = gather_all(api.open(tmp_path / "weights"))
    source = gather_all(api.open(tmp_path / "in"))
    assert len(read) == 15
    assert read.keys() == source.keys()
    for key, array in source.items():
        assert np.array_equal(read[key], array), key


def test_the_commands_take_it(made):
    shown, checked = run("info", str(made)), run("check", str(made))

    assert (shown.code, checked.code) == (0, 0)
    assert "deepspeed universal" in shown.out
    assert "3 parameters" in shown.out


def test_a_second_name_is_no_second_tensor(tmp_path):
    made = universal(tmp_path, dp=1, tp=1, shared_params={"tied": "z.weight"})
    tied = place(made, "tied")
    tied.parent.mkdir(exist_ok=True)
    save_file(tied, {"param": Array("float32", (1,), bytes(4))})

    names = [tensor.name for tensor in read_catalog(made).tensors]

    assert names == list(PARAMETERS)


def test_parameters_that_no_model_file_names_come_last(made):
    extra = place(made, "0.extra")
    extra.parent.mkdir()
    save_file(extra, {"param": Array("float32", (2,), bytes(8))})

    assert [tensor.name for tensor in read_catalog(made).tensors] == [*PARAMETERS, "0.extra"]


def test_a_folder_without_model_files_is_in_the_order_of_names(made):
    for file in (made / "step_universal").glob("mp_rank_*"):
        file.unlink()

    assert [tensor.name for tensor in read_catalog(made).tensors] == sorted(PARAMETERS)


def test_tensors_without_elements_need_no_bytes(made):
    extra = place(made, "0.extra")
    extra.parent.mkdir()
    save_file(extra, {"param": Array("float32", (0, 3), b"", strides=(3, 1))})

    tensor = read_catalog(made).tensors[3]

    assert tensor.states["fp32"].regions == (None,)
    assert tensor.layout.full_shape == (0, 3)


def test_folders_count_where_no_model_file_says_what_was_trained(made, tmp_path):
    for tp in range(2):
        edit_file(
            made / "step_universal" / f"mp_rank_{tp:02d}_model_states.pt",
            lambda value: value.update(param_shapes=None),
        )

    read, source = gather_all(read_catalog(made)), gather_all(api.open(tmp_path / "in"))

    assert read.keys() == source.keys()
    assert all(np.array_equal(read[key], array) for key, array in source.items())


def test_a_missing_parameter_is_an_error_of_the_check(made):
    for file in place(made, "b.weight").parent.iterdir():
        file.unlink()
    place(made, "b.weight").parent.rmdir()

    report = api.check(made)

    assert report.verdict == "findings"
    (finding,) = (found for found in report.findings if found.where == "tensor 'b.weight'")
    assert finding.message == "1 of 3 parameters has no folder: 'b.weight'"


def test_missing_parameters_are_told_of_in_the_order_of_their_names(tmp_path):
    names = ["g", "b", "f", "a", "e", "d", "c"]
    made = universal(tmp_path, {name: parameter(0, (2,)) for name in names}, tp=1)
    for name in names[1:]:
        shutil.rmtree(place(made, name).parent)

    (found,) = (f for f in read_catalog(made).findings if f.kind == "missing-file")

    assert (found.severity, found.where) == ("error", "tensor 'a'")
    assert found.message == "6 of 7 parameters have no folder: 'a', 'b', 'c', 'd', 'e'"


def test_files_of_others_are_left_alone(made):
    (place(made, "a.norm").parent / "notes.txt").write_text("hello")

    kinds = [finding.kind for finding in read_catalog(made).findings]

    assert kinds == ["unknown-file"]


def test_a_plain_step_is_no_array(made):
    save_file(place(made, "a.norm", "step"), 7)

    assert "step" not in read_catalog(made).tensors[2].states


def spoiled(made, value, state="fp32"):
    """Put another value into the file of one state, and say what reading it says."""
    if isinstance(value, StoredTensor):
        save_value(place(made, "b.weight", state), value, {"k": bytes(64)})
    elif isinstance(value, bytes):
        place(made, "b.weight", state).write_bytes(value)
    else:
        save_file(place(made, "b.weight", state), value)
    with pytest.raises(RestrideError) as caught:
        read_catalog(made)
    return caught.value


def test_flat_tensors_without_model_files_are_refused_with_the_reason(made):
    for file in (made / "step_universal").glob("mp_rank_*"):
        file.unlink()

    error = spoiled(made, new_tensor("k", DTYPES["float32"], (16,)))

    assert isinstance(error, UnsupportedError)
    assert str(error).startswith("step_universal/zero/b.weight/fp32.pt: holds a bare tensor")
    assert "no model file says the shape" in str(error)


def test_a_flat_tensor_has_the_shape_that_the_model_files_say(made, tmp_path):
    values = PARAMETERS["b.weight"].states["fp32"]
    save_file(place(made, "b.weight"), {"param": Array("float32", (24,), values.tobytes())})
    for state in ("exp_avg", "exp_avg_sq"):
        place(made, "b.weight", state).unlink()

    read = gather_all(read_catalog(made))

    assert np.array_equal(
        read["b.weight/fp32"], gather_all(api.open(tmp_path / "in"))["b.weight/fp32"]
    )


def test_states_of_another_size_than_the_parameter_are_an_error_of_the_check(made):
    for state in ADAM[1:]:
        save_file(place(made, "b.weight", state), {"param": Array("float32", (2, 8), bytes(64))})

    report = api.check(made)

    (found,) = (finding for finding in report.findings if finding.where == "tensor 'b.weight'")
    assert (found.severity, found.kind) == ("error", "shape-mismatch")
    assert found.message == (
        "step_universal/zero/b.weight: the states have shape (2, 8), by the model files the "
        "parameter has (3, 8); they are left out"
    )


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"weight": 1}, FormatError, "has no tensor 'param'"),
        ({"param": [1, 2]}, FormatError, "has no tensor 'param'"),
        ([1], FormatError, "has no tensor 'param'"),
        (b"PK\3\4 cut off", CorruptError, "fp32.pt: "),
        (b"", FormatError, "fp32.pt: "),
        (
            {"param": Array("float32", (8, 3), bytes(96), strides=(1, 8))},
            UnsupportedError,
            r"strides \(1, 8\)",
        ),
        (
            {"param": Array("float32", (24,), bytes(96))},
            CorruptError,
            r"zero/b\.weight: state 'exp_avg' has shape \(3, 8\), 'fp32' has \(24,\)",
        ),
    ],
)
def test_a_file_that_lies_is_named(made, value, kind, message):
    error = spoiled(made, value)

    assert isinstance(error, kind)
    assert "step_universal/zero/b.weight" in str(error)
    with pytest.raises(kind, match=message):
        raise error


def test_a_parameter_with_nothing_but_a_step_is_refused(made):
    for state in ADAM[1:]:
        place(made, "b.weight", state).unlink()

    with pytest.raises(FormatError, match=r"zero/b\.weight: has no state of a parameter"):
        read_catalog(made)


def test_a_model_file_that_is_none_is_refused(made):
    save_file(made / "step_universal" / "mp_rank_00_model_states.pt", [1])

    with pytest.raises(FormatError, match=r"mp_rank_00_model_states\.pt: the dict of a model file"):
        read_catalog(made)


@pytest.mark.parametrize(
    "tag", ["../in/step", "..", "", "absent", "a\\b", "x" * 2000, "step_universal/zero/.."]
)
def test_a_tag_that_leads_elsewhere_is_refused(made, tag):
    (made / "latest_universal").write_text(tag)

    with pytest.raises(FormatError, match="no universal folder beside it"):
        read_catalog(made)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(FormatError, match="neither 'zero' nor 'latest_universal'"):
        read_catalog(tmp_path)


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_system(made, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)

    with pytest.raises(ExecutionError, match=r"cannot be listed \(Permission denied\)"):
        read_catalog(made)


def test_a_checkpoint_converted_beside_its_source_is_still_its_source(tmp_path):
    write_zero_run(tmp_path / "in", ZeroRun(1, 1, {"w": parameter(0, (4,))}))
    api.convert(tmp_path / "in", tmp_path / "out", to="universal")
    (tmp_path / "out" / "step_universal").rename(tmp_path / "in" / "step_universal")
    (tmp_path / "in" / "latest_universal").write_text("step_universal")

    assert api.open(tmp_path / "in").format == "deepspeed zero-1"
    assert api.open(tmp_path / "in" / "step_universal").format == "deepspeed universal"
