"""An engine of ZeRO-3 takes one step from a universal folder, whatever its parameters had."""

from __future__ import annotations

import numpy as np
import pytest

from restride import api
from restride.errors import ReplicaError, UnsupportedError
from restride.testing.gather import gather_all
from restride.testing.partitioned_files import write_partitioned_run
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import ZeroRun, stored, write_zero_run
from restride.testing.zero_runs import distinct, parameter


def run_of(*groups, dp=1):
    return ZeroRun(
        dp, 1, {f"{n}.w": parameter(10 * n, (4,), group=g) for n, g in enumerate(groups)}
    )


def step(value):
    return Array("float32", (), np.float32(value).tobytes())


def kinds(report):
    return {finding.kind for finding in report.findings}


def set_steps(folder, *steps):
    def change(value):
        state = value["optimizer_state_dict"]["base_optimizer_state"]["state"]
        for number, own in enumerate(steps):
            state[number]["step"] = own

    edit_file(folder / "step/zero_pp_rank_0_mp_rank_00_optim_states.pt", change)


@pytest.mark.parametrize("steps", [(step(2), step(7)), (2, 7), (2, step(2))])
def test_steps_that_zero_3_collapses_are_told_of(tmp_path, steps):
    write_zero_run(tmp_path / "run", run_of(0, 1))
    set_steps(tmp_path / "run", *steps)

    report = api.convert(tmp_path / "run", tmp_path / "out", to="universal", stage=3)

    (finding,) = [found for found in report.findings if found.kind == "group-steps"]
    assert finding.severity == "warning"
    assert finding.details == {"sub_groups": [1]}


def test_one_step_in_all_groups_is_nothing_to_tell_of(tmp_path):
    write_zero_run(tmp_path / "run", run_of(0, 1))
    set_steps(tmp_path / "run", 3, 3)

    report = api.convert(tmp_path / "run", tmp_path / "out", to="universal", stage=3)

    assert not {"group-steps", "shared-step"} & kinds(report)


@pytest.mark.parametrize("other", [step(9), 9])
def test_parameters_with_steps_of_their_own_do_not_get_that_of_another(tmp_path, other):
    write_zero_run(tmp_path / "run", run_of(0, 0))
    folder = tmp_path / "universal"
    api.convert(tmp_path / "run", folder, to="universal")
    edit_file(folder / "step_universal/zero/1.w/step.pt", lambda _: other)

    with pytest.raises(UnsupportedError, match=r"'1.w'.*not that of '0.w'.*--stage 1"):
        api.convert(folder, tmp_path / "out", to="universal", stage=3)


def test_a_step_that_several_sub_groups_would_count_is_told_of(tmp_path):
    """The engine gives all of them the very same tensor, and each adds one to it."""
    write_partitioned_run(tmp_path / "several", run_of(0, 0, 0), sub_group_length=2)
    write_partitioned_run(tmp_path / "one", run_of(0, 0, 0), sub_group_length=3)

    several = api.convert(tmp_path / "several", tmp_path / "out several", to="universal")
    one = api.convert(tmp_path / "one", tmp_path / "out one", to="universal")
    other = api.convert(tmp_path / "several", tmp_path / "out other", to="universal", stage=1)

    assert "shared-step" in kinds(several)
    assert "shared-step" not in kinds(one) | kinds(other)


def test_more_elements_than_a_sub_group_takes_are_several_of_them(tmp_path):
    run = run_of(0, 0, 0)
    run.extra["ds_config"] = {"zero_optimization": {"sub_group_size": 11}}
    write_zero_run(tmp_path / "run", run)

    report = api.convert(tmp_path / "run", tmp_path / "out", to="universal", stage=3)

    assert "shared-step" in kinds(report)


def test_buffers_that_differ_between_ranks_are_not_chosen_silently(tmp_path):
    """Under ZeRO-3 every rank saves its own; the other shape has a place for one."""
    write_partitioned_run(tmp_path / "run", run_of(0, dp=2))
    for dp in range(2):

        def add(value, dp=dp):
            value["module"]["mean"] = stored(distinct((4,), 100 * dp))
            value["buffer_names"] = ["mean"]

        edit_file(tmp_path / f"run/step/zero_pp_rank_{dp}_mp_rank_00_model_states.pt", add)

    with pytest.raises(ReplicaError, match="mean"):
        api.convert(tmp_path / "run", tmp_path / "out", to="universal", stage=1)
    report = api.convert(
        tmp_path / "run", tmp_path / "out", to="universal", stage=1, replicas="first"
    )

    assert "replica-drift" in kinds(report)
    found = gather_all(api.open(tmp_path / "out"))
    assert found["mean/weight"].tobytes() == distinct((4,), 0).tobytes()


def test_sub_groups_of_one_group_that_count_otherwise_are_refused(tmp_path):
    """One of two steps would be lost: a group has one, in either shape and in sharded files."""
    write_partitioned_run(tmp_path / "run", run_of(0, 0), sub_group_length=1)
    api.convert(tmp_path / "run", tmp_path / "universal", to="universal")

    def count(value):
        for number, own in value["optimizer_state_dict"]["state"].items():
            own["step"] = 3 + number

    edit_file(tmp_path / "universal/step_universal/zero/optimizer_state.pt", count)

    for wanted in ({"to": "universal"}, {"to": "deepspeed", "tp": 1, "dp": 1, "zero": 1}):
        with pytest.raises(UnsupportedError, match=r"is 4, .*of the same group is 3"):
            api.convert(tmp_path / "universal", tmp_path / "out", **wanted)
