"""The catalogue is complete, its examples work, and text is read as it should be."""

from __future__ import annotations

import inspect
from fractions import Fraction

import pytest

from restride import layouts
from restride.algebra.coverage import Covered, prove
from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.errors import LayoutError
from restride.layouts.catalogue import CATALOGUE, build

_CODEGEN = {"shape": "48x2", "mesh": "tp=2"}


def test_every_builder_of_a_layout_is_in_the_catalogue():
    transforms = {"lift", "permuted", "transposed"}
    builders = {
        name.replace("_", "-")
        for name in layouts.__all__
        if inspect.isfunction(getattr(layouts, name))
        and inspect.signature(getattr(layouts, name), eval_str=False).return_annotation == "Layout"
    }

    assert builders - transforms == set(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_describes_the_signature_of_its_builder(name):
    entry = CATALOGUE[name]
    signature = inspect.signature(entry.builder).parameters

    assert name == entry.name == entry.builder.__name__.replace("_", "-")
    assert {p.name for p in entry.parameters} == set(signature)
    for parameter in entry.parameters:
        # A head count may be None in Python, to be refused with its reason; a command asks for it.
        is_required = signature[parameter.name].default is inspect.Parameter.empty
        assert parameter.is_required == is_required
        assert parameter.help
        assert parameter.option == "--" + parameter.name.replace("_", "-")
    assert entry.summary.endswith(".")
    assert entry.topic


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_example_is_a_layout_that_is_whole(name):
    entry = CATALOGUE[name]

    layout = build(name, entry.example)

    assert isinstance(layout, Layout)
    assert isinstance(prove(layout), Covered)
    assert {p.name for p in entry.parameters if p.is_required} <= set(entry.example)


@pytest.mark.parametrize(
    ("name", "parameter", "text", "value"),
    [
        ("split", "shape", "3072x1024", (3072, 1024)),
        ("split", "shape", "7", (7,)),
        ("split", "shape", "3, 4", (3, 4)),
        ("split", "mesh", "tp=4,dp=2", Mesh((("tp", 4), ("dp", 2)))),
        ("split", "dim", "-1", -1),
        ("split", "sizes", "3, 0,2", (3, 0, 2)),
        ("split", "axis", "tp", "tp"),
        ("experts", "placement", "0,2;;1", [(0, 2), (), (1,)]),
        ("segmented", "segments", "8:4,4;2", [(8, (4, 4)), (2, None)]),
        ("zero-flat", "shapes", "4x5;3", [(4, 5), (3,)]),
        ("replicated", "scale", "-1/3", Fraction(-1, 3)),
        ("replicated", "scale", "2", Fraction(2)),
        ("block-gather", "allow_shared", "yes", True),
        ("block-gather", "allow_shared", "False", False),
    ],
)
def test_an_argument_is_read_from_text(name, parameter, text, value):
    (found,) = [p for p in CATALOGUE[name].parameters if p.name == parameter]

    assert found.parse(text) == value


@pytest.mark.parametrize(
    ("name", "parameter", "text", "words"),
    [
        ("split", "shape", "3072*1024", "--shape: '3072\\*1024' is no integer; write a shape as"),
        ("split", "shape", "", "--shape: '' is no integer"),
        ("split", "shape", "3x", "is no integer"),
        ("split", "mesh", "tp", "--mesh: 'tp' is no axis with a size; write the mesh as tp=4,dp=2"),
        ("split", "dim", "1.0", "'1.0' is no integer"),
        ("split", "dim", "²", "is no integer"),
        ("replicated", "scale", "1/0", "divides by zero"),
        ("replicated", "scale", "0.5", "is no integer"),
        ("experts", "placement", "0,a;1", "write one list per rank"),
        ("block-gather", "allow_shared", "maybe", "neither yes nor no"),
    ],
)
def test_text_that_is_no_value_is_refused_with_the_option(name, parameter, text, words):
    (found,) = [p for p in CATALOGUE[name].parameters if p.name == parameter]

    with pytest.raises(LayoutError, match=words):
        found.parse(text)


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        ("codegen", {}, "no layout 'codegen' in the catalogue; known are .*codegen-qkv"),
        (
            "codegen-qkv",
            {"shape": "48x2", "mesh": "tp=2"},
            "needs --heads: .*; for example --heads",
        ),
        ("codegen-qkv", {"head": "16"}, "takes no 'head'; it takes --shape, --mesh, --heads"),
        (
            "codegen-qkv",
            {"shape": "48x2", "mesh": "tp=2", "heads": "12"},
            "12 heads are no multiple",
        ),
    ],
)
def test_building_from_text_says_what_is_missing_or_wrong(name, texts, words):
    with pytest.raises(LayoutError, match=words):
        build(name, texts)
