"""Meshes: names and coordinates of ranks, and what is no mesh."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.mesh import Mesh, as_mesh
from restride.errors import LayoutError
from restride.testing.strategies import meshes


@given(st.integers(1, 60).flatmap(meshes))
def test_ranks_are_the_row_major_order_of_the_coordinates(mesh):
    by_walking = product(*(range(size) for _, size in mesh.axes))
    names = [name for name, _ in mesh.axes]

    assert [mesh.coordinates(rank) for rank in range(mesh.size)] == [
        dict(zip(names, place, strict=True)) for place in by_walking
    ]


@given(st.integers(1, 60).flatmap(meshes))
def test_a_step_along_an_axis_changes_that_coordinate_only(mesh):
    for name, size in mesh.axes:
        stride = mesh.axis_stride(name)
        last = (size - 1) * stride

        assert mesh.axis_size(name) == size
        assert mesh.coordinates(last) == dict.fromkeys(dict(mesh.axes), 0) | {name: size - 1}


@given(st.integers(1, 60).flatmap(meshes))
def test_a_mesh_reads_as_the_text_and_the_mapping_it_is_written_as(mesh):
    assert as_mesh(mesh) is mesh
    assert as_mesh(str(mesh)) == mesh
    assert as_mesh(dict(mesh.axes)) == mesh


def test_text_may_have_blanks_around_names_and_sizes():
    assert as_mesh(" dp = 2 , tp=4") == Mesh((("dp", 2), ("tp", 4)))


def test_a_mesh_without_axes_has_one_rank():
    assert (Mesh(()).size, Mesh(()).coordinates(0), str(Mesh(()))) == (1, {}, "")


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ((("tp", 0),), "size of mesh axis 'tp' must be at least 1, got 0"),
        ((("tp", -2),), "size of mesh axis 'tp' must be at least 1, got -2"),
        ((("tp", 2.0),), "size of mesh axis 'tp' must be an integer, got 2.0 (float)"),
        ((("tp", True),), "size of mesh axis 'tp' must be an integer, got True (bool)"),
        ((("tp", "2"),), "size of mesh axis 'tp' must be an integer, got '2' (str)"),
        ((("", 2),), "mesh axis name '' is not an identifier"),
        ((("t p", 2),), "mesh axis name 't p' is not an identifier"),
        (((3, 2),), "mesh axis name 3 is not an identifier"),
        ((("tp", 2), ("dp", 3), ("tp", 2)), "mesh axes tp, dp, tp are not all different"),
        ((("tp", 2**20 + 1),), "a mesh has at most 1048576 ranks, these axes have more"),
        ((("tp", 10**4000), ("dp", 10**4000)), "a mesh has at most 1048576 ranks"),
    ],
)
def test_axes_that_are_no_mesh_are_refused_with_the_numbers(axes, problem):
    with pytest.raises(LayoutError) as caught:
        Mesh(axes)

    assert str(caught.value).startswith(problem)


def test_the_largest_mesh_is_allowed():
    assert Mesh((("dp", 2**10), ("tp", 2**10))).size == 2**20


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=", "tp=x", "tp=-2", "tp=2.0", "tp=2,,dp=2", "tp=2,", "tp=²", "=2"]
)
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(LayoutError):
        as_mesh(text)


def test_text_without_a_size_says_how_to_write_it():
    with pytest.raises(LayoutError) as caught:
        as_mesh("tp=4,dp")

    assert str(caught.value) == "'dp' is no axis with a size; write the mesh as tp=4,dp=2"


@pytest.mark.parametrize("value", [4, None, [("tp", 2)], b"tp=2"])
def test_what_is_neither_text_nor_mapping_is_no_mesh(value):
    with pytest.raises(LayoutError, match="a mesh is a mapping or text"):
        as_mesh(value)


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_beside_the_mesh_has_no_coordinates(rank):
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a mesh of 8 ranks"):
        as_mesh("dp=2,tp=4").coordinates(rank)


@pytest.mark.parametrize("ask", [Mesh.axis_size, Mesh.axis_stride])
def test_an_axis_that_is_not_there_is_named(ask):
    with pytest.raises(LayoutError, match="the mesh dp=2,tp=4 has no axis 'pp'"):
        ask(as_mesh("dp=2,tp=4"), "pp")
