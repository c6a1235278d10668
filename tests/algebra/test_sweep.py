"""The sweep against walking: regions are disjoint, complete, and say exactly who stands there."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra._field import PRIME, Fingerprint, field_point, points_needed
from restride.algebra._lattice import compact, count_below, is_nested, normalize, numel_of
from restride.algebra._sweep import Region, lowest_missing, sweep
from restride.errors import LayoutError, UnsupportedError
from restride.testing.proofs import tags_by_walking

EXTENTS = [1, 2, 2, 3, 4, 5, 8]
STRIDES = [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, -1, -2, -6]


def points(base, digits):
    for steps in product(*(range(extent) for extent, _ in digits)):
        yield base + sum(step * stride for step, (_, stride) in zip(steps, digits, strict=True))


def random_walks(random: Random, most_loops: int = 4):
    walks = []
    for _ in range(random.randint(0, 6)):
        digits = [
            (random.choice(EXTENTS), random.choice(STRIDES))
            for _ in range(random.randint(0, most_loops))
        ]
        lowest = sum(min(0, stride) * (extent - 1) for extent, stride in digits)
        walks.append((random.randint(0, 30) - lowest, digits, random.randint(0, 3)))
    reach = max((max(points(base, digits)) for base, digits, _ in walks), default=0)
    return walks, reach + random.randint(1, 5)


def check_against_walking(walks, numel):
    regions = sweep(walks, numel)

    tags = {}
    for region in regions:
        visited = list(points(region.base, region.digits))
        assert region.numel == len(visited)
        assert min(visited) == region.base
        assert not tags.keys() & set(visited), "regions overlap"
        tags.update(dict.fromkeys(visited, region.tags))
    order = list(dict.fromkeys(tag for _, _, tag in walks))
    assert tags == {
        address: tuple(tag for tag in order for _ in range(min(2, counts[tag])))
        for address, counts in tags_by_walking(walks).items()
    }
    assert [region.base for region in regions] == sorted(region.base for region in regions)
    missing = [address for address in range(numel) if address not in tags]
    assert sum(region.numel for region in regions) + len(missing) == numel
    if missing:
        assert lowest_missing(regions, numel) == missing[0]
    return regions


@given(st.randoms(use_true_random=False))
def test_regions_are_disjoint_and_carry_exactly_the_tags_that_walking_finds(random):
    check_against_walking(*random_walks(random))


def test_two_thousand_overlapping_walks_are_swept_as_walking_does():
    random = Random(1)  # noqa: S311 - repeatable cases, no secrets
    repeated = sum(
        any(region.is_repeated for region in check_against_walking(*random_walks(random)))
        for _ in range(2000)
    )

    assert repeated > 200


def test_a_tag_that_visits_an_address_twice_is_listed_twice():
    by_itself = sweep([(0, [(2, 1), (2, 1)], "a")], 3)
    by_two_walks = sweep([(0, [(3, 1)], "a"), (1, [], "a")], 3)
    standing_still = sweep([(5, [(1000, 0)], "a")], 6)

    assert [(region.base, region.digits, region.tags) for region in by_itself] == [
        (0, (), ("a",)),
        (1, (), ("a", "a")),
        (2, (), ("a",)),
    ]
    assert by_itself == by_two_walks
    assert standing_still == (Region(5, (), ("a", "a")),)


def test_no_walk_and_a_walk_without_steps_give_no_region():
    assert sweep([], 10) == ()
    assert sweep([(0, [(0, 1), (3, 1)], "a")], 10) == ()


@pytest.mark.parametrize("walk", [(-1, [], "a"), (0, [(3, -1)], "a"), (8, [(3, 1)], "a")])
def test_a_walk_outside_the_addresses_is_refused(walk):
    with pytest.raises(LayoutError, match=r"addresses -?\d+ to -?\d+, outside \[0, 10\)"):
        sweep([walk], 10)


def test_the_refusal_names_the_first_and_the_last_address_of_the_walk():
    with pytest.raises(LayoutError, match=r"addresses 4 to 10, outside \[0, 10\)"):
        sweep([(4, [(3, 3)], "a")], 10)


def test_one_lattice_comes_back_as_it_is_however_large():
    regions = sweep([(7, [(2**20, 2**40), (2**30, 2**5), (2**3, 1)], "a")], 2**60 + 7)

    assert regions == (Region(7, ((2**20, 2**40), (2**30, 2**5), (2**3, 1)), ("a",)),)


def test_replicas_that_are_cut_differently_take_a_few_regions_at_any_size():
    for scale in (1, 1000, 10**9):
        rows = [(rank * 16 * scale, [(16 * scale, 1)], f"rows {rank}") for rank in range(4)]
        columns = [
            (rank * scale, [(16, 4 * scale), (scale, 1)], f"columns {rank}") for rank in range(4)
        ]

        regions = sweep([*rows, *columns], 64 * scale)

        assert len(regions) == 16
        assert {region.tags for region in regions} == {
            (f"rows {row}", f"columns {column}") for row in range(4) for column in range(4)
        }
        assert all(region.digits[-1] == (scale, 1) or scale == 1 for region in regions)


def test_strides_that_do_not_divide_are_swept_on_their_common_multiple():
    regions = sweep([(0, [(7 * 10**6, 6)], "six"), (0, [(6 * 10**6, 7)], "seven")], 42 * 10**6)

    both = [region for region in regions if region.tags == ("six", "seven")]
    assert sum(region.numel for region in both) == 10**6
    assert len(regions) < 30


@pytest.mark.parametrize(
    "walks",
    [
        pytest.param(
            [(0, [(10**7, 10**7 + 1)], 0), (0, [(10**7, 10**7)], 1)], id="coprime strides"
        ),
        pytest.param(
            [(0, [(2, 2**level + level % 3) for level in range(90)], 0)], id="loops over each other"
        ),
        pytest.param([(0, [(2, 1)] * 1000, 0)], id="a thousand loops"),
        pytest.param(
            [
                (0, [(3, 3**level) for level in range(0, 400, step)][-100:], step)
                for step in (1, 2, 3)
            ],
            id="hundreds of levels",
        ),
        pytest.param([(0, [(10**6, 3), (10**6, 2)], 0)], id="a sum of progressions"),
    ],
)
def test_work_without_end_is_refused_and_never_done(walks):
    with pytest.raises(UnsupportedError):
        sweep(walks, 10**300)


def test_the_limit_is_the_callers():
    walks = [(0, [(100, 101)], 0), (0, [(100, 100)], 1)]

    assert sum(region.numel for region in sweep(walks, 10**5)) == 199
    with pytest.raises(UnsupportedError, match="little in common that 150 steps"):
        sweep(walks, 10**5, limit=134)


@given(st.randoms(use_true_random=False))
def test_compact_keeps_every_point_with_its_multiplicity(random):
    walks, _ = random_walks(random)
    lattices = [normalize(base, digits) for base, digits, _ in walks]

    joined = compact(lattices)
    united = compact(lattices, union=True)

    before = Counter(point for lattice in lattices for point in points(*lattice))
    assert Counter(point for lattice in joined for point in points(*lattice)) == before
    assert {point for lattice in united for point in points(*lattice)} == before.keys()
    assert len(joined) <= len(lattices)


@given(st.randoms(use_true_random=False), st.integers(-3, 300))
def test_count_below_is_the_number_of_smaller_points(random, limit):
    for base, digits, _ in random_walks(random)[0]:
        lattice = normalize(base, digits)
        if is_nested(lattice[1]):
            assert count_below(lattice, limit) == sum(p < limit for p in points(*lattice))


@given(st.randoms(use_true_random=False))
def test_a_normal_lattice_has_the_points_of_the_walk(random):
    for base, digits, _ in random_walks(random)[0]:
        lattice = normalize(base, digits)

        assert set(points(*lattice)) == set(points(base, digits))
        still = [extent for extent, stride in digits if stride == 0]
        assert numel_of(lattice[1]) == numel_of(digits) // numel_of([(n, 0) for n in still])
        strides = [stride for _, stride in lattice[1]]
        assert strides == sorted(strides, reverse=True)
        assert all(extent > 1 and stride > 0 for extent, stride in lattice[1])


@given(
    st.integers(0, PRIME - 1),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=3),
)
def test_a_fingerprint_is_the_sum_of_powers_over_the_walk(point, base, digits):
    expected = sum(pow(point, address, PRIME) for address in points(base, digits)) % PRIME

    assert Fingerprint((point,)).walk((base,), digits) == expected


def test_points_of_the_field_differ_by_seed_and_number_and_are_neither_0_nor_1():
    drawn = {field_point(seed, number) for seed in (b"a", b"b") for number in range(50)}

    assert len(drawn) == 100
    assert all(1 < point < PRIME for point in drawn)


@pytest.mark.parametrize("bits", [1, 30, 50, 60, 88, 100])
def test_enough_points_are_taken_for_the_promised_error(bits):
    assert (127 - bits) * points_needed(2**bits - 1) >= 77


def test_a_list_of_lattices_with_nothing_in_common_is_refused_after_a_few_steps_for_each():
    """A map file of some megabytes lists ten thousands of them."""
    random = Random(0)  # noqa: S311 - repeatable cases, no secrets
    walks = [
        (
            random.randrange(10**6),
            [(random.randint(2, 999), random.randint(1, 999)) for _ in range(2)],
            number,
        )
        for number in range(2000)
    ]

    with pytest.raises(UnsupportedError, match=r"that (\d+) steps were not enough") as caught:
        sweep(walks, 10**9, limit=0)

    assert int(caught.value.problem.split(" steps")[0].split()[-1]) == 8 * len(walks)
