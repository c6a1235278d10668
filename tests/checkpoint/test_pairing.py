"""Which array of one checkpoint stands opposite which of another."""

from __future__ import annotations

import pytest

from restride.algebra.mesh import as_mesh
from restride.checkpoint.catalog import Catalog, FileEntry, Region, StateEntry, TensorEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.pairing import pair_arrays
from restride.errors import PlanError
from restride.planning.jobs import whole_layout


def catalog(**tensors):
    """Tensors by name with the names of their states; tied names follow after a comma."""
    layout = whole_layout((4,))
    entry = StateEntry(DTYPES["float32"], layout, (Region(0, 0),))
    entries = []
    for names, states in tensors.items():
        name, *aliases = names.split(",")
        kept = dict.fromkeys(states.split(), entry)
        entries.append(TensorEntry(name, "parameter", layout, kept, aliases=tuple(aliases)))
    files = (FileEntry("f", 16),)
    return Catalog("test", "root", files, as_mesh("tp=1"), tuple(entries), {})


def paired(a, b, states="all", rename=()):
    pairs, only_a, only_b = pair_arrays(a, b, states, rename)
    return [(*pair.names, pair.state) for pair in pairs], only_a, only_b


def test_arrays_pair_by_tensor_and_state():
    a = catalog(wte="weight fp32", bias="weight", old="weight exp_avg")
    b = catalog(bias="weight step", wte="weight fp32", new="weight")

    pairs, only_a, only_b = paired(a, b)

    assert pairs == [
        ("wte", "wte", "weight"),
        ("wte", "wte", "fp32"),
        ("bias", "bias", "weight"),
    ]
    assert only_a == (("old", "weight"), ("old", "exp_avg"))
    assert only_b == (("bias", "step"), ("new", "weight"))


def test_weights_alone_leave_every_other_state_out():
    a, b = catalog(wte="weight fp32"), catalog(wte="weight step")

    assert paired(a, b, "weights") == ([("wte", "wte", "weight")], (), ())


@pytest.mark.parametrize("b_name", ["wte", "head", "head,wte", "head,other"])
def test_a_tied_name_on_either_side_is_a_name(b_name):
    a = catalog(**{"wte,head": "weight fp32"})
    b = catalog(**{b_name: "weight fp32"})
    other = b_name.partition(",")[0]

    pairs, only_a, only_b = paired(a, b)

    assert pairs == [("wte", other, "weight"), ("wte", other, "fp32")]
    assert (only_a, only_b) == ((), ())


def test_a_tied_tensor_that_the_other_side_has_twice_is_compared_with_both():
    tied = catalog(**{"wte,head": "weight fp32"})
    twice = catalog(wte="weight fp32", head="weight")

    # The second copy has no master copy of its own, and needs none.
    assert paired(tied, twice) == (
        [("wte", "wte", "weight"), ("wte", "wte", "fp32"), ("wte", "head", "weight")],
        (),
        (),
    )
    pairs, only_a, only_b = paired(twice, tied)
    assert pairs == [("wte", "wte", "weight"), ("wte", "wte", "fp32"), ("head", "wte", "weight")]
    assert (only_a, only_b) == ((), ())


def test_a_rule_renames_whole_names_of_the_first_side_only():
    a = catalog(**{"module.h.0.w": "weight", "module.h.1.w": "weight", "my.module.x": "weight"})
    b = catalog(**{"h.0.w": "weight", "h.1.w": "weight", "my.module.x": "weight"})

    pairs, only_a, only_b = paired(a, b, rename=[(r"module\.(.*)", r"\1")])

    assert [pair[:2] for pair in pairs] == [
        ("module.h.0.w", "h.0.w"),
        ("module.h.1.w", "h.1.w"),
        ("my.module.x", "my.module.x"),
    ]
    assert (only_a, only_b) == ((), ())


def test_the_first_rule_that_matches_counts():
    a, b = catalog(**{"a.x": "weight", "b.x": "weight"}), catalog(one="weight", two="weight")

    pairs, _, _ = paired(a, b, rename=[(r"a\..", "one"), (r"[ab]\.x", "two")])

    assert [pair[:2] for pair in pairs] == [("a.x", "one"), ("b.x", "two")]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("(", "x"), r"'\(' is no regular expression"),
        (("w", r"\1"), r"cannot replace what 'w' matches"),
        (("q", "x"), "no tensor has a name that 'q' matches as a whole"),
        (("w|v", "x"), "the rules give 'x' to 'w' and to 'v'"),
        (("w", "v"), "the rules give 'v' to 'w' and to 'v'"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule, message):
    a = catalog(w="weight", v="weight")

    with pytest.raises(PlanError, match=message):
        paired(a, a, rename=[rule])
