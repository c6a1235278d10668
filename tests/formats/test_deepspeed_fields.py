"""A field tells where it stands in its file, and believes no number that it has not looked at."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import FormatError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._patterns import literal_name

KEYS = st.sampled_from(["a", "b.pt", "", "it's", 0, 7])
STEPS = st.tuples(st.just("key"), KEYS) | st.tuples(
    st.sampled_from(["entry", "number", "element", "attribute"]), st.integers(0, 2)
)


def held(inner: object, how: str, step: str | int) -> object:
    """A value that has another one in it."""
    if how == "element":
        return [None] * int(step) + [inner]
    if how == "attribute":
        return Constructed(GlobalName("a", "B"), state={f"x{step}": inner})
    return {f"k{step}" if how == "entry" else step: inner}


def into(field: Field, how: str, step: str | int) -> Field:
    """That other one."""
    if how == "key":
        return field.at(step)
    if how == "entry":
        return dict(field.items())[f"k{step}"]
    if how == "number":
        return dict(field.numbered())[step]
    if how == "element":
        return field.elements()[step]
    return field.attribute(f"x{step}")


def spelled(where: str, how: str, step: str | int) -> str:
    """Its place."""
    if how == "attribute":
        return f"{where}.x{step}"
    key = f"k{step}" if how == "entry" else step
    # The first step after the name of a file.
    if type(key) is str and where.endswith(".pt"):
        return f"{where}: {key}"
    return f"{where}[{key!r}]"


@given(st.sampled_from(["a.pt", "map", "a.pt: b"]), st.lists(STEPS, max_size=6))
def test_the_place_of_a_field_is_that_of_its_outer_one_and_a_step(where, steps):
    value: object = 1
    for how, step in reversed(steps):
        value = held(value, how, step)
    field = Field(value, where)
    for how, step in steps:
        field, where = into(field, how, step), spelled(where, how, step)

    assert field.value == 1
    assert field.where == where
    with pytest.raises(FormatError) as caught:
        field.text()
    assert str(caught.value).startswith(where)


NUMBERS = st.integers(-2, 3) | st.sampled_from([2**63 - 1, 2**63, 10**5000, True, 1.0, "1", None])


@given(st.lists(NUMBERS, max_size=4), st.sampled_from([list, tuple]), st.integers(0, 2))
def test_numbers_are_refused_together_as_each_of_them_is(numbers, kind, at_least):
    stored = Field(kind(numbers), "map")

    def one_by_one() -> tuple[int, ...]:
        return tuple(element.integer(at_least=at_least) for element in stored.elements())

    try:
        expected = one_by_one()
    except FormatError as error:
        with pytest.raises(FormatError, match=re.escape(str(error))):
            stored.integers(at_least=at_least)
    else:
        found = stored.integers(at_least=at_least)
        assert found == expected
        assert {*map(type, found)} <= {int}


PARTS = ["a", "b1", "_", ".", "\\.", "\\\\", "\\-", "\\ ", "\\$", "\n", "*", "$", "^", "\\w", "("]


@given(st.lists(st.sampled_from(PARTS), max_size=6))
def test_a_pattern_that_spells_one_name_out_gives_that_name(parts):
    text = f"^{''.join(parts)}$"
    special = {".", "*", "$", "^", "\\w", "("}
    name = "".join(part[-1] if part[0] == "\\" else part for part in parts)

    assert literal_name(text) == (None if special & {*parts} else name)
    if not special & {*parts}:
        assert literal_name(text[1:]) == name
        assert literal_name(text[:-1]) is None
