"""The budget that a command names when it refuses is enough for all that it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from restride import api, comparison
from restride.errors import BudgetError
from restride.executors.events import NullObserver
from restride.testing.command_line import SAMPLE

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
SOURCES = {"both": SAMPLE, "masters_alone": DATA / "aligned_frozen_z2", "many": DATA / "experts_z1"}
COMMANDS = {
    "check": api.check,
    "diff": lambda path, **options: comparison.diff(path, path, **options),
    "fingerprint": comparison.fingerprint,
}


class Noting(NullObserver):
    """Notes how much memory was said to be taken."""

    def __init__(self):
        self.projected = []

    def on_plan(self, event):
        self.projected.append(event.projected_nbytes)


def named(command, path, budget):
    with pytest.raises(BudgetError) as caught:
        command(path, budget_nbytes=budget)
    assert caught.value.budget_nbytes == budget
    return caught.value.needed_nbytes


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_budget_that_is_named_is_enough(name, source):
    command, path, observer = COMMANDS[name], SOURCES[source], Noting()
    needed = named(command, path, 1)

    command(path, budget_nbytes=needed, observer=observer)

    assert all(projected <= needed for projected in observer.projected)
    assert named(command, path, needed - 4096) <= needed


def test_of_two_plans_of_a_check_the_first_counts_in_the_second():
    observer = Noting()
    needed = named(api.check, SAMPLE, 1)
    api.check(SAMPLE, budget_nbytes=needed, observer=observer)

    assert needed - 8192 < max(observer.projected) <= needed


def test_a_check_that_has_one_plan_needs_what_that_takes():
    needed = named(api.check, DATA / "tensor_parallel_z3", 1)

    assert named(api.check, DATA / "tensor_parallel_z3", needed - 1) == needed
