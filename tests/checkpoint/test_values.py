"""Inert values say whether they are the same, and which bytes they are."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    Storage,
    StoredTensor,
    Value,
    difference,
)

NAN = float("nan")
NAME = GlobalName("module", "name")


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(Storage("file", "0", DTYPES["float32"], 64, 4000), 3, shape, strides)


def test_a_tensor_is_dense_where_its_elements_follow_one_another() -> None:
    for rank in range(4):
        for shape in product(range(4), repeat=rank):
            for strides in product((0, 1, 2, 3, 6), repeat=rank):
                steps = [sum(map(int.__mul__, at, strides)) for at in np.ndindex(shape)]
                follow = steps == [*range(prod(shape))]
                assert tensor(shape, strides).is_dense == follow, (shape, strides)


def test_the_first_element_of_a_tensor_stands_behind_those_of_the_storage_before_it() -> None:
    assert tensor((2,), (1,)).start_nbytes == 64 + 3 * 4


scalars = st.one_of(st.none(), st.integers(0, 2), st.sampled_from([0.5, NAN]), st.text(max_size=1))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", 1]), inner, max_size=3),
        st.builds(lambda part: Constructed(NAME, args=(part,)), inner),
    ),
    max_leaves=6,
)


def spelled(value: Value) -> object:
    """What values that are the same have in common."""
    match value:
        case dict():
            return "dict", sorted((repr(key), repr(spelled(value[key]))) for key in value)
        case list():
            return [spelled(part) for part in value]
        case Constructed():
            return "object", *map(spelled, value.args)
        case _:
            return repr(value)


@given(values, values)
def test_values_differ_where_they_are_not_the_same_whichever_comes_first(
    a: Value, b: Value
) -> None:
    is_same = spelled(a) == spelled(b)

    assert difference(a, a) is None
    assert (difference(a, b) is None) == (difference(b, a) is None) == is_same


@pytest.mark.parametrize(
    ("a", "b", "place", "one", "other"),
    [
        (NAN, 1.0, "", NAN, 1.0),
        (1.0, NAN, "", 1.0, NAN),
        ({"a": 1}, {"a": 1, "b": 2}, "['b']", None, 2),
        ({"a": 1, "b": 2}, {"a": 1}, "['b']", 2, None),
        ({"k" * 50: 1}, {}, f"['{'k' * 40}']", 1, None),
        ({-(1 << 63): 1}, {}, f"[{-(1 << 63)}]", 1, None),
        ({10**5000: 1}, {}, "[...]", 1, None),
        ([1, [2, 3]], [1, [2, 4]], "[1][1]", 3, 4),
        ([1], [1, 2], "", [1], [1, 2]),
        (Constructed(NAME, state={"a": 1}), Constructed(NAME, state={"a": 2}), ".state['a']", 1, 2),
        (Constructed(NAME, pairs=[("a", 1)]), Constructed(NAME), ".pairs", [("a", 1)], []),
    ],
)
def test_a_difference_says_where_it_is_and_what_each_side_has(
    a: Value, b: Value, place: str, one: Value, other: Value
) -> None:
    assert repr(difference(a, b)) == repr((place, one, other))
    assert repr(difference(b, a)) == repr((place, other, one))


def test_objects_of_the_stream_may_be_keys_and_are_themselves_alone() -> None:
    """Hashing or comparing their parts would follow what a hostile file nests."""
    first, second = Constructed(NAME), Constructed(NAME)

    assert len({first: 1, second: 2}) == 2
    assert difference(first, second) is None
