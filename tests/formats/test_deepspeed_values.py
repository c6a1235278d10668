"""Values that are no tensors: nothing lost, nothing run, and no more than there is room for."""

from __future__ import annotations

import json
import math

import pytest

from restride.checkpoint.dtypes import dtype_named
from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import CorruptError, FormatError
from restride.formats.deepspeed._fields import Field, shown
from restride.formats.deepspeed._values import JsonWriter

CLASS = GlobalName("torch.optim", "Thing")


def tensor(shape, strides=None, *, numel=1 << 20):
    storage = Storage("a.pt", "0", dtype_named("uint8"), 64, numel)
    return StoredTensor(storage, 0, shape, strides or (1,) * len(shape))


def plain(value, **options):
    return JsonWriter(lambda _: b"abc", **options).of(Field(value, "a.pt: it"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2.5, 2.5),
        ("x", "x"),
        ((1, [2]), [1, [2]]),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        ({1: "a"}, {"pairs": [[1, "a"]]}),
        (math.nan, {"float": "nan"}),
        (-math.inf, {"float": "-inf"}),
        (1 << 70, {"int": hex(1 << 70)}),
        (1 + 2j, {"complex": ["1.0", "2.0"]}),
        (b"abc", {"bytes": "YWJj"}),
        ({"b", "a"}, {"set": ["a", "b"]}),
        (CLASS, {"global": "torch.optim.Thing"}),
        ("\udcff", "\\udcff"),
        (
            Constructed(CLASS, (1,), state={"lr": 0.5}),
            {
                "object": {
                    "constructor": {"global": "torch.optim.Thing"},
                    "args": [1],
                    "state": {"lr": 0.5},
                }
            },
        ),
        (
            Constructed(GlobalName("collections", "defaultdict"), (CLASS,), pairs=[("a", 1)]),
            {"a": 1},
        ),
        (tensor((3,)), {"tensor": {"dtype": "uint8", "shape": [3], "data": "YWJj"}}),
        (tensor((0,)), {"tensor": {"dtype": "uint8", "shape": [0], "data": ""}}),
    ],
)
def test_a_value_is_plain_json(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False).encode()


@pytest.mark.parametrize("large", [tensor((100_000,)), tensor((3,), (2,))])
def test_a_tensor_that_is_no_small_dense_one_is_described_and_told_of(large):
    writer = JsonWriter(lambda _: b"")

    described = writer.of(Field([large], "a.pt: it"))

    assert described[0]["tensor"]["start_nbytes"] == 64
    assert "data" not in described[0]["tensor"]
    assert writer.left_behind == ["a.pt: it[0]"]


def test_keys_can_be_left_out_at_any_depth():
    assert plain({"a": [{"map": 1, "b": 2}]}, skipped_keys=frozenset({"map"})) == {"a": [{"b": 2}]}


def test_a_value_that_unfolds_without_end_is_refused():
    shared = [1] * 10
    for _ in range(9):
        shared = [shared] * 10

    with pytest.raises(CorruptError, match="unfold into more than"):
        plain(shared)


def test_a_long_text_that_is_said_often_is_refused():
    with pytest.raises(CorruptError, match="unfold into more than"):
        plain(["x" * (1 << 20)] * 64)


def test_what_has_no_room_is_left_behind_and_the_rest_is_there():
    """As the order of all samples, which a script saved with its model."""
    writer = JsonWriter(lambda _: b"")
    fields = {
        "first": Field(1, "a.pt: first"),
        "order": Field([[tensor((100_000,))], [0] * (1 << 20)], "a.pt: order"),
        "text": Field("x" * (40 << 20), "a.pt: text"),
        "last": Field([2] * 1000, "a.pt: last"),
    }

    assert writer.entries(fields) == {"first": 1, "last": [2] * 1000}
    assert writer.left_behind == ["a.pt: order", "a.pt: text"]


def test_a_file_of_values_that_have_no_room_is_refused():
    fields = {str(n): Field([0] * (1 << 20), f"a.pt: {n}") for n in range(9)}

    with pytest.raises(CorruptError, match=r"a\.pt: 8: the values of the file unfold into"):
        JsonWriter(lambda _: b"").entries(fields)


def test_what_is_nested_too_deep_is_not_left_behind():
    deep = []
    for _ in range(150):
        deep = [deep]

    with pytest.raises(CorruptError, match="nested deeper"):
        JsonWriter(lambda _: b"").entries({"deep": Field(deep, "a.pt: deep")})


@pytest.mark.parametrize("text", ["x" * (1 << 20), b"x" * (1 << 20)])
def test_a_long_text_that_is_said_a_few_times_is_shown(text):
    """A megabyte of JSON or of random state is nothing unusual."""
    assert len(plain([text] * 4)) == 4


def test_a_value_that_is_nested_too_deep_is_refused():
    deep = []
    for _ in range(150):
        deep = [deep]

    with pytest.raises(CorruptError, match="nested deeper"):
        plain(deep)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(10**5000, "16610 bits", id="huge"),
        ("x" * 500, "(500 characters)"),
        (CLASS, "torch.optim.Thing"),
        (Constructed(CLASS), "Thing"),
        (Constructed(3), "some class"),
        (tensor((3,)), "shape (3,)"),
        (tensor((3,)).storage, "a storage"),
        ([1, 2], "a list of 2"),
        (None, "None"),
    ],
)
def test_any_value_can_be_shown(value, words):
    assert words in shown(value)
    assert len(shown(value)) < 200


@pytest.mark.parametrize("state", [{"stop": 1}, (None, {"stop": 1}), None, 3, ("start",)])
def test_an_object_without_the_attribute_is_refused(state):
    made = Constructed(GlobalName("package", "Address"), state=state)

    with pytest.raises(FormatError, match="an object with an attribute 'start' is expected"):
        Field(made, "step/x.pt").attribute("start")


@pytest.mark.parametrize("state", [{"start": 7}, (None, {"start": 7})])
def test_an_object_has_its_attributes_in_a_dict_or_in_slots(state):
    made = Constructed(GlobalName("package", "Address"), state=state)

    assert Field(made, "step/x.pt").attribute("start").integer() == 7


def test_a_path_leads_to_the_value():
    field = Field({"a": [{"b": 1}]}, "step/x.pt")

    inner = field.at("a").elements()[0].at("b")

    assert inner.where == "step/x.pt: a[0]['b']"
    assert inner.integer() == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda field: field.text(),
        lambda field: field.elements(),
        lambda field: field.tensor(),
        lambda field: field.integer(at_least=9),
        lambda field: field.at("b"),
        lambda field: field.attribute("b"),
        lambda field: field.shape(),
        lambda field: list(field.items()),
        lambda field: list(field.numbered()),
    ],
)
def test_what_is_not_there_is_said_with_its_place(ask):
    with pytest.raises(FormatError, match=r"x\.pt: a: .*expected, found 7"):
        ask(Field({"a": 7}, "x.pt").at("a"))


def test_a_missing_key_is_told_with_those_there_are():
    with pytest.raises(FormatError, match="has no 'b'; its keys are 'a'"):
        Field({"a": 7}, "x.pt").at("b")
