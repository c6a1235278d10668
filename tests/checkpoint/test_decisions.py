"""Whose copy counts, decided by the names of tensors."""

from __future__ import annotations

import pytest

from restride.algebra.mesh import as_mesh
from restride.checkpoint.catalog import Catalog, StateEntry, TensorEntry
from restride.checkpoint.decisions import read_rules
from restride.checkpoint.dtypes import DTYPES
from restride.errors import PlanError
from restride.layouts import replicated

MESH = as_mesh("dp=1,tp=2")


def tensor(name, *aliases):
    layout = replicated((2,), mesh=MESH)
    entry = StateEntry(DTYPES["float32"], layout, (None, None))
    states = {"weight": entry, "exp_avg": entry}
    return TensorEntry(name, "parameter", layout, states, aliases=aliases)


CATALOG = Catalog(
    "deepspeed zero-1",
    "run",
    (),
    MESH,
    (tensor("wte.weight", "lm_head.weight"), tensor("h.0.attn.bias"), tensor("h.0.mlp.bias")),
    {},
)


def decided(said):
    """What is decided for each array, shortly."""
    rules = read_rules(said, CATALOG)
    return {
        f"{entry.name}/{state}": str(rules.decide(entry.name, state))
        for entry in CATALOG.tensors
        for state in entry.states
    }


def test_one_decision_is_for_everything():
    assert set(decided("mean").values()) == {"mean"}
    assert set(decided(1).values()) == {"dp=0,tp=1"}


def test_without_rules_everything_is_checked():
    assert set(decided([]).values()) == {"check"}


def test_the_last_pattern_that_matches_decides():
    rules = [("*", "first"), ("*.bias", "mean"), ("h.0.mlp.*", "tp=1")]

    assert decided(rules) == {
        "wte.weight/weight": "first",
        "wte.weight/exp_avg": "first",
        "h.0.attn.bias/weight": "mean",
        "h.0.attn.bias/exp_avg": "mean",
        "h.0.mlp.bias/weight": "tp=1",
        "h.0.mlp.bias/exp_avg": "tp=1",
    }
    assert set(decided(rules[::-1]).values()) == {"first"}


def test_what_no_pattern_matches_is_checked():
    assert decided([("*.attn.*", "mean")])["h.0.mlp.bias/weight"] == "check"


def test_a_pattern_with_a_slash_is_for_states():
    found = decided([("*.bias/exp_avg", "mean")])

    assert found["h.0.attn.bias/exp_avg"] == "mean"
    assert found["h.0.attn.bias/weight"] == "check"


def test_a_tied_tensor_is_meant_by_each_of_its_names():
    assert decided([("lm_head.*", "tp=1")])["wte.weight/exp_avg"] == "tp=1"
    assert decided([("lm_head.*/weight", "tp=1")])["wte.weight/weight"] == "tp=1"


@pytest.mark.parametrize("pattern", ["*.biass", "weight", "*.bias/exp_avg_sq", "WTE.*"])
def test_a_pattern_that_matches_nothing_is_refused_with_some_names(pattern):
    with pytest.raises(PlanError) as error:
        read_rules([(pattern, "mean")], CATALOG)

    assert repr(pattern) in str(error.value)
    assert "no tensor of 3" in str(error.value)
    assert "wte.weight" in str(error.value)
    assert ("; states here are weight, exp_avg" in str(error.value)) == ("/" in pattern)


def test_a_rank_that_is_not_there_is_refused_in_a_rule_as_well():
    with pytest.raises(PlanError, match="tp goes from 0 to 1"):
        read_rules([("*.bias", "tp=2")], CATALOG)


def test_a_checkpoint_without_tensors_takes_a_decision_for_everything():
    empty = Catalog("safetensors", "run", (), MESH, (), {})

    assert read_rules("mean", empty).decide("x", "weight") == "mean"
