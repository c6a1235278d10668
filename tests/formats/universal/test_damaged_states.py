"""States of a universal folder that are not those of the parameter, or not all of them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from restride import api
from restride.errors import CorruptError, FormatError
from restride.formats.universal import read_catalog
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import ZeroRun, stored, write_zero_run
from restride.testing.zero_runs import distinct, parameter


@pytest.fixture
def folder(tmp_path):
    run = ZeroRun(2, 1, {"a": parameter(100, (4, 3)), "b": parameter(500, (6,))})
    write_zero_run(tmp_path / "run", run)
    api.convert(tmp_path / "run", tmp_path / "universal", to="universal")
    return tmp_path / "universal"


def state_file(folder, name):
    return folder / "step_universal" / "zero" / f"{name}.pt"


def found(folder, kind):
    return [finding for finding in read_catalog(folder).findings if finding.kind == kind]


def test_a_transposed_tensor_is_not_taken_for_the_parameter(folder, tmp_path):
    """It has as many elements, and would be cut into rows of nothing."""
    for state in ("fp32", "exp_avg", "exp_avg_sq"):

        def transpose(value, state=state):
            first = {"fp32": 100, "exp_avg": 1100, "exp_avg_sq": 2100}[state]
            value["param"] = stored(np.ascontiguousarray(distinct((4, 3), first).T))

        edit_file(state_file(folder, f"a/{state}"), transpose)

    (finding,) = found(folder, "shape-mismatch")
    assert finding.severity == "error"
    assert "(3, 4), by the model files the parameter has (4, 3)" in finding.message
    with pytest.raises(CorruptError, match="shape"):
        api.convert(folder, tmp_path / "out", to="deepspeed", tp=1, dp=1, zero=1)


def test_a_flat_tensor_is_viewed_in_the_shape_of_the_parameter(folder):
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        edit_file(
            state_file(folder, f"a/{state}"),
            lambda value: value.update(param=stored(distinct((12,), 100))),
        )

    assert not found(folder, "shape-mismatch")


@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_a_state_that_others_of_the_group_have_is_told_of(folder, state):
    assert not found(folder, "missing-state")

    state_file(folder, f"b/{state}").unlink()

    (finding,) = found(folder, "missing-state")
    assert finding.severity == "warning"
    assert f"zero/b has no {state}, which 'a' of the same group has" in finding.message


def test_a_parameter_that_was_never_updated_lacks_nothing(folder):
    for state in ("exp_avg", "exp_avg_sq", "step"):
        state_file(folder, f"b/{state}").unlink()

    assert not found(folder, "missing-state")


def test_a_state_of_another_dtype_than_in_the_rest_of_its_group_is_told_of(folder):
    assert not found(folder, "state-dtype")

    halves = stored(distinct((6,), 1500).astype(np.float16))
    edit_file(state_file(folder, "b/exp_avg"), lambda value: value.update(param=halves))

    (finding,) = found(folder, "state-dtype")
    assert finding.severity == "warning"
    assert finding.message.endswith(
        "b/exp_avg.pt is float16, that of 'a' of the same group is float32"
    )


def test_moments_have_the_dtype_of_their_parameter_where_several_are_trained_in(folder):
    model = folder / "step_universal" / "mp_rank_00_model_states.pt"
    halves = stored(distinct((6,), 500).astype(np.float16))
    edit_file(model, lambda root: root["module"].update(b=halves))
    moments = stored(distinct((6,), 1500).astype(np.float16))
    edit_file(state_file(folder, "b/exp_avg"), lambda value: value.update(param=moments))

    assert not found(folder, "state-dtype")


@pytest.mark.parametrize(
    ("step", "told"),
    [(Array("float16", (), b"\0\0"), "float16"), (7, "a plain number")],
)
def test_a_step_of_another_type_than_in_the_rest_of_its_group_is_told_of(folder, step, told):
    """The first bytes of 2.0 in fp32 are 0.0 in fp16."""
    edit_file(state_file(folder, "b/step"), lambda _: step)

    (finding,) = found(folder, "state-dtype")
    assert finding.message.endswith(
        f"b/step.pt is {told}, that of 'a' of the same group is float32"
    )


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (float("nan"), "the number of a step is expected, found nan"),
        (float("inf"), "the number of a step is expected, found inf"),
        (-1, "the number of a step is expected, found -1"),
        (1 << 63, "the number of a step is expected"),
        (True, "the number of a step is expected, found True"),
        ("1", "the number of a step is expected"),
        ((1, 2), "the number of a step is expected"),
        (Array("bool", (), b"\1"), "is a tensor of bool and shape (), a step is one number"),
        (Array("int64", (2,), bytes(16)), "of int64 and shape (2,), a step is one number"),
    ],
)
def test_a_step_that_is_no_number_is_refused(folder, step, words):
    edit_file(state_file(folder, "a/step"), lambda _: step)

    with pytest.raises(FormatError) as caught:
        read_catalog(folder)

    assert words in str(caught.value)
    assert "zero/a/step.pt" in str(caught.value)


@pytest.mark.parametrize("step", [0, 7, 7.0, Array("int64", (1,), b"\7" + bytes(7))])
def test_a_step_may_be_any_number(folder, step):
    edit_file(state_file(folder, "a/step"), lambda _: step)

    assert read_catalog(folder).tensors


def test_moments_of_a_parameter_that_nobody_trains_are_told_of(folder, tmp_path):
    model = folder / "step_universal" / "mp_rank_00_model_states.pt"
    edit_file(model, lambda root: root["param_shapes"][0].pop("b") and None)

    (finding,) = found(folder, "untrained-states")

    assert finding.severity == "error"
    assert "zero/b has exp_avg, exp_avg_sq, by the model files nobody trains" in finding.message
    with pytest.raises(CorruptError, match="nobody trains"):
        api.convert(folder, tmp_path / "out", states="all")


@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        ({"param": Array("float32", (3,), bytes(12))}, True),
        (Array("float32", (3,), bytes(12)), True),
        ({"param": Array("float32", (6,), bytes(24))}, False),
        (Array("float32", (6, 1), bytes(24)), False),
        ({"param": [3]}, False),
        (None, False),
    ],
)
def test_a_part_of_a_weight_that_nobody_trains_is_told_of(folder, value, is_told):
    """The peer writes the first shard alone of a frozen weight that its ranks cut."""
    model = folder / "step_universal" / "mp_rank_00_model_states.pt"
    edit_file(model, lambda root: root["param_shapes"][0].pop("b") and None)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        state_file(folder, f"b/{state}").unlink()
    if value is None:
        state_file(folder, "b/fp32").unlink()
    else:
        edit_file(state_file(folder, "b/fp32"), lambda _: value)

    findings = read_catalog(folder).findings

    assert [(f.severity, f.kind, f.where) for f in findings] == (
        [("warning", "shape-mismatch", "tensor 'b'")] if is_told else []
    )
    assert not is_told or "fp32.pt has shape (3,), by the model files the" in findings[0].message


@pytest.mark.parametrize("state", [False, {}, {"state": {}, "param_groups": []}])
def test_a_model_file_with_the_state_of_an_optimizer_is_of_no_universal_folder(folder, state):
    """What was written of it could not be read again."""
    model = folder / "step_universal" / "mp_rank_00_model_states.pt"
    edit_file(model, lambda root: root.update(optimizer=state))

    with pytest.raises(CorruptError, match=r"_states\.pt: has the optimizer's state"):
        read_catalog(folder)


def test_a_folder_of_no_parameter_of_the_model_is_told_of(folder):
    """As one that was there before another model was converted into it."""
    assert not found(folder, "stale-file")
    shutil.copytree(
        state_file(folder, "b").with_suffix(""), state_file(folder, "old").with_suffix("")
    )

    (finding,) = found(folder, "stale-file")

    assert finding.severity == "warning"
    assert finding.where == "tensor 'old'"
    assert "zero/old is of no parameter that a model file names" in finding.message


def test_without_model_files_nothing_says_which_folder_is_of_the_model(folder):
    for file in (folder / "step_universal").glob("*_model_states.pt"):
        file.unlink()

    assert not found(folder, "stale-file")
