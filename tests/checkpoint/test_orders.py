"""One order of what several ranks list parts of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.orders import merged_order
from restride.errors import CorruptError

NAMES = "abcdefgh"


@given(st.permutations(NAMES), st.data())
def test_parts_of_one_order_are_put_together_in_it(order, data):
    rank_count = data.draw(st.integers(1, 4))
    ranks = [[name for name in order if data.draw(st.booleans(), name)] for _ in range(rank_count)]

    merged = merged_order(ranks, order)

    assert list(merged) == [name for name in order if any(name in names for names in ranks)]


@given(st.permutations(NAMES), st.permutations(NAMES), st.data())
def test_what_a_rank_lists_stays_in_the_order_of_the_rank(order, module, data):
    ranks = [[name for name in order if data.draw(st.booleans(), name)] for _ in range(3)]

    merged = merged_order(ranks, module)

    for names in ranks:
        assert [name for name in merged if name in names] == names


def test_ranks_that_contradict_each_other_are_refused():
    with pytest.raises(CorruptError, match="'a' and its neighbours in different orders"):
        merged_order([["a", "b"], ["b", "a"]], "ab")
