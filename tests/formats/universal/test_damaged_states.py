"""States of a universal folder that are not those of the parameter, or not all of them."""

from __future__ import annotations

import numpy as np
import pytest

from restride import api
from restride.errors import CorruptError
from restride.formats.universal import read_catalog
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, stored, write_zero_run
from restride.testing.zero_runs import distinct

ADAM = ("weight", "fp32", "exp_avg", "exp_avg_sq")


def parameter(shape, first, group=0):
    starts = (first, first, first + 1000, first + 2000)
    arrays = {state: distinct(shape, start) for state, start in zip(ADAM, starts, strict=True)}
    return Parameter(shape, arrays, None, group)


@pytest.fixture
def folder(tmp_path):
    run = ZeroRun(2, 1, {"a": parameter((4, 3), 100), "b": parameter((6,), 500)})
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
