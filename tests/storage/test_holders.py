"""What refers to a storage is found wherever it is, and nothing else is."""

from __future__ import annotations

import pytest

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    Storage,
    StoredTensor,
)
from restride.errors import UnsupportedError
from restride.storage.holders import has_tensor

STORAGE = Storage("file", "0", DTYPES["float32"], 0, 4)
TENSOR = StoredTensor(STORAGE, 0, (1,), (1,))
NAME = GlobalName("module", "name")


def with_state(state):
    value = OrderedDictValue()
    value.state = state
    return value


def with_key(key):
    value = OrderedDictValue()
    value[key,] = "value"
    return value


def nested(depth, inner):
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda value: value,
        lambda value: [1, value],
        lambda value: ("x", [value]),
        lambda value: {"key": {"other": value}},
        lambda value: {1: {(value, 2): "key"}},
        with_state,
        with_key,
        lambda value: Constructed((value,)),
        lambda value: Constructed(NAME, args=(value,)),
        lambda value: Constructed(NAME, kwargs={"a": value}),
        lambda value: Constructed(NAME, state={"a": value}),
        lambda value: Constructed(NAME, items=[[value]]),
        lambda value: Constructed(NAME, pairs=[("a", value)]),
        lambda value: Constructed(NAME, pairs=[((value,), "a")]),
    ],
)
def test_a_value_has_a_tensor_where_there_is_one_at_any_place_of_it(wrapped):
    assert has_tensor(wrapped(TENSOR))
    assert has_tensor(wrapped(STORAGE))
    for plain in (1, 2.5, "text", b"bytes", None, True, NAME, (), ("a", 1)):
        assert not has_tensor(wrapped(plain))
    assert not has_tensor([[], {}])


def test_values_are_followed_fifty_levels_deep_and_refused_beyond():
    assert has_tensor(nested(50, TENSOR))
    for depth in (52, 100_000):
        with pytest.raises(UnsupportedError, match="nested deeper than 50 levels"):
            has_tensor(nested(depth, TENSOR))


def test_what_is_shared_counts_where_it_is_deepest():
    shared = nested(40, TENSOR)

    assert has_tensor([shared, nested(8, shared)])
    with pytest.raises(UnsupportedError, match="nested deeper than 50 levels"):
        has_tensor([shared, nested(12, shared)])
