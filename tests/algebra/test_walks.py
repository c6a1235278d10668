"""Walks: what join, merge, restrict, fix and coalesce keep, against walking every step."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import islpy as isl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.walks import Walk, coalesce, fix, join, merge, restrict
from restride.errors import UnsupportedError
from restride.testing.oracles import join_by_walking, walk_addresses
from restride.testing.strategies import walks


def steps(found):
    """All steps of several walks, as a multiset."""
    return Counter(step for walk in found for step in walk_addresses(walk))


@given(walks(), walks(3))
def test_a_join_is_every_pair_of_steps_at_the_same_address_once(a, b):
    assert steps(join(a, b)) == join_by_walking(a, b)


@given(walks(1), walks(1))
def test_a_join_over_one_address_counts_multiplicities(a, b):
    assert steps(join(a, b)) == join_by_walking(a, b)


@given(walks(2), walks(2))
def test_a_join_meets_the_same_addresses_from_both_sides(a, b):
    forth = steps(join(a, b))
    back = Counter({(first, x, y): n for (first, y, x), n in steps(join(b, a)).items()})

    assert forth == back


@given(walks(1, most_numel=60), walks(1, most_numel=60))
def test_isl_finds_the_same_common_addresses(a, b):
    """Presburger arithmetic of the Integer Set Library shares no idea with digit matching."""

    def image(walk):
        """The set of first addresses, as an isl set."""
        names = [f"x{number}" for number in range(len(walk.digits))]
        loops = list(zip(names, walk.digits, strict=True))
        total = " + ".join([str(walk.bases[0]), *(f"{digit[1]} * {name}" for name, digit in loops)])
        rules = [f"f = {total}", *(f"0 <= {name} < {digit[0]}" for name, digit in loops)]
        exists = f"exists {', '.join(names)} : " if names else ""
        return isl.Set(f"{{ [f] : {exists}{' and '.join(rules)} }}")

    found = {step[0] for step in steps(join(a, b))}
    points = []
    (image(a) & image(b)).foreach_point(
        lambda point: points.append(point.get_coordinate_val(isl.dim_type.set, 0).to_python())
    )

    assert sorted(points) == sorted(found)


@given(st.lists(walks(2, most_numel=60), max_size=6))
def test_merging_keeps_every_step(drawn):
    merged = merge(drawn)

    assert steps(merged) == steps(drawn)
    assert len(merged) <= len(drawn)
    assert merge(merged) == merged


@given(st.data(), walks(2, most_numel=60))
def test_a_loop_that_was_cut_into_single_steps_is_merged_again(data, walk):
    if not walk.digits:
        return
    cut = data.draw(st.integers(0, len(walk.digits) - 1))
    extent, *strides = walk.digits[cut]
    others = walk.digits[:cut] + walk.digits[cut + 1 :]
    parts = [
        Walk(tuple(b + i * s for b, s in zip(walk.bases, strides, strict=True)), others)
        for i in range(extent)
    ]
    merged = merge(data.draw(st.permutations(parts)))

    assert len(merged) == 1
    assert steps(merged) == steps([walk])


@pytest.mark.parametrize("sign", [1, -1])
def test_unequal_parts_that_follow_each_other_are_one_walk(sign):
    row = (4, 0, 1)
    parts = [(0, 2), (2, 1), (3, 5), (8, 7), (15, 1)]
    cut = [Walk((sign * 10 * low, 7), ((n, sign * 10, 0), row)) for low, n in parts]

    assert merge(cut[::-1]) == [Walk((0, 7), ((16, sign * 10, 0), row))]


@given(st.lists(walks(3, most_numel=30), max_size=8))
def test_no_new_loop_moves_both_addresses_of_a_pure_pair(drawn):
    clean = [
        Walk(walk.bases, tuple(digit for digit in walk.digits if not (digit[2] and digit[3])))
        for walk in drawn
    ]
    merged = merge(clean, pure=((1, 2),))

    assert steps(merged) == steps(clean)
    assert not any(digit[2] and digit[3] for walk in merged for digit in walk.digits)


def test_walks_in_a_grid_become_one():
    grid = [Walk((100 * i + 10 * j, i, j)) for j in range(4) for i in range(5)]

    assert merge(grid) == [Walk((0, 0, 0), ((5, 100, 1, 0), (4, 10, 0, 1)))]


def test_equal_walks_stay_a_multiplicity():
    same = Walk((3, 1), ((2, 1, 1),))

    assert steps(merge([same, same, same])) == Counter({(3, 1): 3, (4, 2): 3})


@given(walks(2), st.integers(-30, 90), st.integers(-5, 60))
def test_restricting_keeps_the_steps_inside(walk, low, length):
    kept = restrict(walk, low, low + length)

    assert steps(kept) == Counter(
        step for step in walk_addresses(walk) if low <= step[0] < low + length
    )


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 7, -4])
@pytest.mark.parametrize("inner", [(), ((2, 1, 9),), ((3, 2, 4),), ((2, -3, 1),)])
def test_restricting_to_any_interval_keeps_the_steps_at_its_bounds(stride, inner):
    walk = Walk((5, 40), ((4, stride, 20), *inner))
    found = list(walk_addresses(walk))
    first, last = (bound(step[0] for step in found) for bound in (min, max))

    for low in range(first - 2, last + 3):
        for high in range(low - 1, last + 4):
            kept = Counter(step for step in found if low <= step[0] < high)
            assert steps(restrict(walk, low, high)) == kept, (low, high)


@given(walks(3, most_numel=100), st.integers(0, 2), st.data())
def test_fixing_an_address_keeps_the_steps_at_its_value(walk, address, data):
    value = data.draw(st.sampled_from([step[address] for step in walk_addresses(walk)] + [1000]))
    fixed = fix(walk, address, value)

    assert steps(fixed) == Counter(step for step in walk_addresses(walk) if step[address] == value)
    assert not any(digit[1 + address] for part in fixed for digit in part.digits)


@given(walks(3))
def test_coalescing_keeps_the_steps_and_their_order(walk):
    loops = coalesce(walk.digits)

    assert list(walk_addresses(Walk(walk.bases, loops))) == list(walk_addresses(walk))
    assert coalesce(loops) == loops
    assert all(digit[0] > 1 for digit in loops)


@given(walks(3))
def test_the_reach_of_a_walk_is_tight_and_its_steps_are_counted(walk):
    assert walk.numel == len(list(walk_addresses(walk)))
    for address in range(3):
        values = [step[address] for step in walk_addresses(walk)]

        assert walk.reach(address) == range(min(values), max(values) + 1)


@pytest.mark.parametrize("times", [1, 5, 640, 10**9])
def test_the_number_of_results_does_not_grow_with_extents(times):
    """Contiguous parts over 7 and over 11 ranks, cyclic blocks of 96 and of 128, a transpose."""
    n = 77 * times
    seven, eleven = (Walk((0, 0, 0), ((k, n // k, 1, 0), (n // k, 1, 0, 1))) for k in (7, 11))
    by_96, by_128 = (
        Walk((0, 0, 0), ((4 * times, 4 * k, 0, k), (4, k, 1, 0), (k, 1, 0, 1))) for k in (96, 128)
    )
    rows = Walk((0, 0), ((6 * times, 8, 1), (8, 1, 6 * times)))

    assert len(join(seven, eleven, pure=((1, 2), (3, 4)))) == 17
    assert len(join(by_96, by_128, pure=((1, 2), (3, 4)))) == 24
    assert len(join(rows, Walk((0, 0), ((12 * times, 4, 4), (4, 1, 1))))) == 1


def test_merging_thousands_of_walks_takes_no_square_of_them():
    scattered = [Walk((i * i * i % 1_000_003, i * i), ((2, 1, 1),)) for i in range(8000)]
    started = perf_counter()

    assert len(merge(scattered, is_legal=lambda _: False)) == 8000
    assert len(merge(scattered)) == 4000
    assert perf_counter() - started < 8


def test_loops_that_meet_in_too_many_ways_are_refused():
    loops = tuple((3, 2**20 + number) for number in range(30))

    with pytest.raises(UnsupportedError, match="30 and 30 loops"):
        join(Walk((0,), loops), Walk((7,), loops))
    with pytest.raises(UnsupportedError, match="60 loops reach one value"):
        fix(Walk((0, 0), ((2, 1, 1),) * 60), 0, 30)
    with pytest.raises(UnsupportedError, match="40 loops reach one value"):
        fix(Walk((0,), tuple((2, 10**9 + 2**number) for number in range(40))), 0, 20 * 10**9 + 7)
