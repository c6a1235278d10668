"""Flat partitions against the buffers that they describe, laid out by NumPy."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import layouts
from restride.algebra.coverage import Covered, prove
from restride.testing.cuts import index_maps

members = st.lists(st.lists(st.integers(0, 5), max_size=2), min_size=1, max_size=5)


def buffer(shapes, ranks: int, alignment: int, parameter_alignment: int):
    """(member, element) at each address of each partition; None where it is padding."""
    flat: list[tuple[int, int] | None] = []
    for number, shape in enumerate(shapes):
        while len(flat) % parameter_alignment:
            flat.append(None)
        flat += [(number, element) for element in range(prod(shape))]
    while len(flat) % alignment:
        flat.append(None)
    width = len(flat) // ranks
    return [flat[rank * width : (rank + 1) * width] for rank in range(ranks)]


@given(shapes=members, ranks=st.integers(1, 5), align=st.integers(1, 4), multiple=st.integers(1, 3))
def test_a_group_lays_parameters_end_to_end_and_pads(shapes, ranks, align, multiple):
    partitions = buffer(shapes, ranks, multiple * ranks, align)
    bases = np.cumsum([0, *(prod(shape) for shape in shapes)])

    group = layouts.zero_group(
        shapes, mesh={"dp": ranks}, alignment=multiple * ranks, parameter_alignment=align
    )

    assert group.partition_numel == len(partitions[0])
    assert index_maps(group.layout) == [
        [-1 if at is None else int(bases[at[0]]) + at[1] for at in partition]
        for partition in partitions
    ]
    assert isinstance(prove(group.layout), Covered)


@given(shapes=members, ranks=st.integers(1, 5), align=st.integers(1, 4))
def test_each_parameter_of_a_group_is_found_in_every_partition(shapes, ranks, align):
    require_found(shapes, ranks, align)


@given(
    shapes=st.lists(st.sampled_from([(2, 2), (4,), (3,)]), min_size=2, max_size=9),
    ranks=st.integers(1, 5),
)
def test_so_is_each_of_many_that_have_one_shape_and_are_not_cut_alike(shapes, ranks):
    require_found(shapes, ranks, 1)


def test_of_two_in_one_partition_the_second_may_be_cut():
    require_found([(4,), (4,), (4,)], 2, 1)


def require_found(shapes, ranks, align):
    partitions = buffer(shapes, ranks, 2 * ranks, align)

    group = layouts.zero_group(shapes, mesh={"dp": ranks}, parameter_alignment=align)

    for number, (shape, member) in enumerate(zip(shapes, group.members, strict=True)):
        assert member.layout.full_shape == tuple(shape)
        assert isinstance(prove(member.layout), Covered)
        for rank, partition in enumerate(partitions):
            places = [
                (i, at[1]) for i, at in enumerate(partition) if at is not None and at[0] == number
            ]
            assert member.shard_starts[rank] == (places[0][0] if places else None)
            assert index_maps(member.layout)[rank] == [element for _, element in places]


def test_a_group_on_a_mesh_with_other_axes_is_the_same_on_each_of_them():
    alone = layouts.zero_group([(3, 3), (4,)], mesh={"dp": 2})
    both = layouts.zero_group([(3, 3), (4,)], mesh={"dp": 2, "tp": 3}, axis="dp")

    assert index_maps(both.layout) == [m for m in index_maps(alone.layout) for _ in range(3)]
    for one, many in zip(alone.members, both.members, strict=True):
        assert many.shard_starts == tuple(start for start in one.shard_starts for _ in range(3))


@given(
    shape=st.lists(st.integers(0, 6), max_size=3),
    ranks=st.integers(1, 7),
    alignment=st.integers(1, 5),
)
def test_chunks_of_one_parameter_are_equal_and_the_end_is_padding(shape, ranks, alignment):
    numel = prod(shape)
    width = ceil(ceil(numel / ranks) / alignment) * alignment
    whole = [*range(numel), *[-1] * (width * ranks - numel)]

    layout = layouts.flat_chunks(shape, mesh={"dp": ranks}, alignment=alignment)

    assert index_maps(layout) == [whole[r * width : (r + 1) * width] for r in range(ranks)]
    assert isinstance(prove(layout), Covered)


def test_many_ranks_cost_no_more_pieces_than_few():
    few = layouts.flat_chunks((1000, 1000), mesh={"dp": 6})
    many = layouts.flat_chunks((1000, 1000), mesh={"dp": 768})

    assert len(many.all_pieces) <= len(few.all_pieces) == 2
    group = layouts.zero_group([(1024, 1024), (1024,), (4096, 1024)], mesh={"dp": 1024})
    assert len(group.layout.all_pieces) <= 2
    assert all(len(member.layout.all_pieces) <= 3 for member in group.members)


@pytest.mark.interop
@pytest.mark.usefixtures("frameworks")
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [1, 7, 24])
def test_chunks_have_the_size_that_zero_3_gives_them(numel, ranks):
    from types import SimpleNamespace

    from deepspeed.runtime.zero.partition_parameters import Init

    init = SimpleNamespace(_partition_world_size=lambda _: ranks)
    init._padding_size = lambda param: Init._padding_size(init, param)
    aligned = Init._aligned_size(init, SimpleNamespace(ds_numel=numel))

    assert layouts.flat_chunks((numel,), mesh={"dp": ranks}).shard_shape(0) == (aligned // ranks,)
