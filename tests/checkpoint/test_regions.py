"""Places of shards in two numbers each are the places that they were made of."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.catalog import Region, Regions, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.planning.jobs import whole_layout

PLACES = st.lists(
    st.none() | st.builds(Region, st.integers(-1, 1 << 31), st.integers(-1, 1 << 62)), max_size=5
)


@given(PLACES, st.integers(-6, 6))
def test_places_are_those_that_were_given(places, rank):
    found = Regions(places)

    assert list(found) == places
    assert found == tuple(places) == Regions(found)
    assert hash(found) == hash(tuple(places))
    assert found[:rank] == tuple(places[:rank])
    assert found.held_count == len(places) - places.count(None)
    if -len(places) <= rank < len(places):
        assert found[rank] == places[rank]
    else:
        with pytest.raises(IndexError):
            found[rank]


def test_places_are_filled_in_one_after_the_other():
    found = Regions.nowhere(3)
    found.put(1, 4, 64)

    assert found == (None, Region(4, 64), None)
    assert found != (None, Region(4, 64), Region(0, 0))


def test_an_array_of_a_thousand_ranks_takes_two_numbers_for_each():
    layout = whole_layout((1,))
    places = [Region(1000 + rank, 1000 + rank) for rank in range(1000)]
    tracemalloc.start()
    try:
        entry = StateEntry(DTYPES["float32"], layout, places)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(entry.regions) == 1000
    assert kept < 20_000
