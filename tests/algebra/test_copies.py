"""Whose copy counts: what users write, which ranks are meant, and whether they hold enough."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride import Axis, Layout, Piece
from restride.algebra.copies import CopyAt, as_replicas, require_copies
from restride.algebra.mesh import Mesh, as_mesh
from restride.errors import PlanError
from restride.layouts import replicated
from restride.testing.oracles import walk_relation
from restride.testing.strategies import layouts

RUN = as_mesh("dp=2,tp=3")


@pytest.mark.parametrize("word", ["check", "first", "mean"])
def test_a_word_is_a_decision(word):
    assert as_replicas(word, RUN) == word


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ("tp=1", [1, 4]),
        ("dp=1", [3, 4, 5]),
        ("dp=0,tp=2", [2]),
        ("tp=2,dp=0", [2]),
        ("4", [4]),
        (4, [4]),
    ],
)
def test_coordinates_and_numbers_mean_ranks(said, ranks):
    choice = as_replicas(said, RUN)

    assert isinstance(choice, CopyAt)
    assert [rank for rank in range(6) if choice.is_at(RUN, rank)] == ranks


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("last", ("'last' does not say", "check, first, mean", "such as tp=0")),
        ("", ("'' does not say",)),
        ("tp=", ("'tp=' does not say",)),
        ("tp=-1", ("does not say",)),
        ("tp=1,", ("does not say",)),
        (True, ("True does not say",)),
        (None, ("None does not say",)),
        (1.0, ("1.0 does not say",)),
        ("tp=3", ("tp goes from 0 to 2", "dp=2,tp=3")),
        ("tp=1,tp=1", ("names an axis twice",)),
        ("pp=0", ("the axis 'pp'", "dp=2,tp=3")),
        (6, ("no rank 6", "0 to 5")),
        (-1, ("does not say",)),
        ("6", ("no rank 6",)),
        ("9" * 40, ("does not say",)),
        ("٣", ("does not say",)),
    ],
)
def test_anything_else_is_refused_with_what_could_be_said(said, words):
    with pytest.raises(PlanError) as error:
        as_replicas(said, RUN)

    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_checkpoint_without_ranks_has_none_to_name():
    with pytest.raises(PlanError, match="the mesh of one rank"):
        as_replicas("tp=0", Mesh(()))


def test_an_axis_that_an_array_is_not_cut_along_is_no_condition():
    weights = as_mesh("tp=3")

    assert [rank for rank in range(3) if as_replicas("dp=1,tp=2", RUN).is_at(weights, rank)] == [2]
    assert all(as_replicas("dp=1", RUN).is_at(weights, rank) for rank in range(3))


@given(layouts(), st.data())
def test_a_choice_is_refused_exactly_where_it_lacks_an_element_that_others_share(layout, data):
    rank = data.draw(st.integers(0, layout.rank_count - 1))
    coordinates = layout.mesh.coordinates(rank)
    named = data.draw(st.sets(st.sampled_from(sorted(coordinates)))) if coordinates else set()
    choice = CopyAt(tuple((axis, coordinates[axis]) for axis in sorted(named)))
    held = defaultdict(set)
    for element, holder, *_ in walk_relation(layout):
        held[element].add(holder)
    shared = [ranks for ranks in held.values() if len(ranks) > 1]
    lost = sum(not any(choice.is_at(layout.mesh, r) for r in ranks) for ranks in shared)

    if not lost:
        event("every shared element has a copy")
        require_copies(choice, layout)
        return
    with pytest.raises(PlanError, match=f"no copy of {lost} of the {len(shared)} elements"):
        require_copies(choice, layout)


def test_the_refusal_names_ranks_that_do_have_a_copy():
    heads = Piece((Axis(2, 4, 2, 0), Axis(2, 0, 1, 0), Axis(4, 1, 0, 1)))
    pairs = Layout.of({"tp": 4}, (8,), [(4,)] * 4, [heads])

    with pytest.raises(PlanError) as error:
        require_copies(CopyAt((("tp", 1),)), pairs)

    assert str(error.value) == (
        "tp=1 has no copy of 4 of the 8 elements that several ranks hold; of element 4 ranks "
        "2 (tp=2), 3 (tp=3) have one; choose coordinates that hold them all, or first or mean"
    )


def test_a_tensor_that_everybody_has_may_be_taken_from_anybody():
    layout = replicated((5,), mesh=RUN)

    for rank in range(6):
        choice = as_replicas(rank, RUN)
        assert isinstance(choice, CopyAt)
        require_copies(choice, layout)
