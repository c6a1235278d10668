"""One mesh axis is cut, the others hold replicas."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import layouts
from restride.algebra.mesh import as_mesh
from restride.errors import RuleError
from restride.layouts.catalogue import CATALOGUE
from restride.layouts.lifting import repeated
from restride.testing import strategies
from restride.testing.cuts import index_maps, read_example
from restride.testing.oracles import walk_padding, walk_relation

meshes = st.permutations(("dp", "tp", "pp")).flatmap(
    lambda names: st.tuples(*(st.integers(1, 3) for _ in names)).map(
        lambda sizes: dict(zip(names, sizes, strict=True))
    )
)


@given(mesh=meshes, rows=st.integers(0, 9), dim=st.integers(0, 1))
def test_ranks_with_the_same_coordinate_hold_the_same(mesh, rows, dim):
    shape = (rows, 3) if dim == 0 else (3, rows)
    alone = layouts.chunked(shape, mesh={"tp": mesh["tp"]}, dim=dim)

    lifted = layouts.lift(alone, mesh=mesh, axis="tp")

    ranks = as_mesh(mesh)
    assert lifted.mesh == ranks
    assert lifted == layouts.chunked(shape, mesh=mesh, axis="tp", dim=dim)
    for rank, index_map in enumerate(index_maps(lifted)):
        coordinate = ranks.coordinates(rank)["tp"]
        assert index_map == index_maps(alone)[coordinate]
        assert lifted.shard_shape(rank) == alone.shard_shape(coordinate)


@given(layout=strategies.layouts(), copies=st.integers(1, 4))
def test_ranks_that_repeat_others_hold_what_these_hold(layout, copies):
    count = layout.rank_count

    many = repeated(layout, as_mesh({"file": copies * count}))

    places = range(0, copies * count, count)
    assert walk_relation(many) == Counter(
        {
            (full, rank + first, *rest): times
            for (full, rank, *rest), times in walk_relation(layout).items()
            for first in places
        }
    )
    assert walk_padding(many) == Counter(
        {
            (rank + first, *rest): times
            for (rank, *rest), times in walk_padding(layout).items()
            for first in places
        }
    )
    assert [many.shard_shape(rank) for rank in range(many.rank_count)] == [
        layout.shard_shape(rank) for rank in range(count)
    ] * copies


def test_ranks_are_repeated_as_a_whole_and_not_in_part():
    for size in (1, 3, 5):
        with pytest.raises(RuleError, match="no multiple"):
            repeated(layouts.split((4,), mesh={"tp": 2}), as_mesh({"file": size}))


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "replicated"])
def test_every_builder_takes_a_mesh_with_other_axes(name):
    entry = CATALOGUE[name]
    arguments = read_example(entry)
    ((cut, size),) = arguments["mesh"].axes
    alone = index_maps(entry.builder(**arguments))

    outer = entry.builder(**{**arguments, "mesh": {"zz": 2, cut: size}, "axis": cut})
    inner = entry.builder(**{**arguments, "mesh": {cut: size, "zz": 3}, "axis": cut})

    assert index_maps(outer) == [*alone, *alone]
    assert index_maps(inner) == [index_map for index_map in alone for _ in range(3)]
    assert len(outer.all_pieces) == len(entry.builder(**arguments).all_pieces)


def test_padding_and_scale_are_lifted_too():
    padded = layouts.padded((3, 2), mesh={"tp": 2}, rows=4)
    scaled = layouts.replicated((4,), mesh={"tp": 2}, scale=Fraction(1, 2))

    lifted = layouts.lift(padded, mesh={"dp": 2, "tp": 2}, axis="tp")

    assert [len(lifted.paddings(rank)) for rank in range(4)] == [0, 1, 0, 1]
    assert layouts.lift(scaled, mesh={"dp": 2, "tp": 2}, axis="tp") == layouts.replicated(
        (4,), mesh={"dp": 2, "tp": 2}, scale=Fraction(1, 2)
    )


def test_a_layout_is_lifted_from_one_axis_to_one_of_the_same_size():
    both = layouts.split((4, 2), mesh={"dp": 2, "tp": 2}, axis="tp")

    with pytest.raises(RuleError, match="on one mesh axis"):
        layouts.lift(both, mesh={"dp": 2, "tp": 4}, axis="tp")
    with pytest.raises(RuleError, match=r"is for 2 ranks, axis 'tp' .* has 4"):
        layouts.lift(layouts.split((4, 2), mesh={"x": 2}), mesh={"dp": 2, "tp": 4}, axis="tp")
