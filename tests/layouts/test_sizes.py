"""The size rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.errors import LayoutError
from restride.layouts import autotp_sizes, chunk_sizes, even_sizes

totals, ranks = st.integers(0, 500), st.integers(1, 12)


@given(total=totals, ranks=ranks, heads=st.none() | st.integers(1, 20), grain=st.integers(1, 70))
def test_the_sizes_of_all_ranks_add_up(total, ranks, heads, grain):
    sizes = autotp_sizes(total, ranks, heads=heads, grain=grain)

    assert len(sizes) == ranks
    assert sum(sizes) == total
    assert all(type(size) is int and size >= 0 for size in sizes)
    assert sum(chunk_sizes(total, ranks)) == total
    assert sorted(chunk_sizes(total, ranks), reverse=True) == list(chunk_sizes(total, ranks))


@given(each=st.integers(0, 40), ranks=ranks)
def test_all_rules_agree_where_the_rows_cut_evenly(each, ranks):
    expected = (each,) * ranks

    assert even_sizes(each * ranks, ranks) == expected
    assert chunk_sizes(each * ranks, ranks) == expected
    assert autotp_sizes(each * ranks, ranks) == expected


@pytest.mark.parametrize(
    ("total", "ranks", "options", "expected"),
    [
        (48, 4, {"heads": 6}, (16, 16, 8, 8)),
        (48, 4, {"heads": 2}, (24, 24, 0, 0)),
        (48, 4, {"heads": 5}, (12, 12, 12, 12)),
        (48, 4, {"heads": 6, "name": "lm_head"}, (12, 12, 12, 12)),
        (48, 4, {"heads": 6, "name": "lm_head_proj"}, (16, 16, 8, 8)),
        (48, 4, {"heads": 6, "name": "h.0.mlp.fc_in"}, (12, 12, 12, 12)),
        (50, 3, {"grain": 8}, (16, 16, 18)),
        (7, 3, {"grain": 8}, (3, 2, 2)),
    ],
)
def test_a_size_follows_heads_then_grains_then_rows(total, ranks, options, expected):
    assert autotp_sizes(total, ranks, **options) == expected


@pytest.mark.parametrize("rule", [even_sizes, chunk_sizes, autotp_sizes])
def test_a_rule_refuses_what_is_no_size(rule):
    for total, count in [(-1, 2), (8, 0), (8.0, 2), (8, True), (8, -1)]:
        with pytest.raises(LayoutError):
            rule(total, count)


def test_heads_and_grains_are_counts():
    for options in ({"heads": 0}, {"heads": 2.0}, {"grain": 0}, {"grain": None}):
        with pytest.raises(LayoutError):
            autotp_sizes(8, 2, **options)
