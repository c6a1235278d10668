"""Map files: everything comes back, and nothing dishonest gets in."""

from __future__ import annotations

import json
from fractions import Fraction
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh, as_mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.serial import (
    MapFile,
    layout_from_json,
    layout_to_json,
    read_map,
    write_map,
)
from restride.errors import FormatError, LayoutError, RestrideError, UnsupportedError
from restride.testing.strategies import layouts, meshes, wild_layouts

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def valid() -> dict:
    """A small map file as parsed JSON."""
    return {
        "format": "restride/1",
        "mesh": {"tp": 2},
        "layouts": {
            "L2": {
                "full": [4, 3],
                "shards": [[2, [2, 3]]],
                "pieces": [
                    {"axes": [[3, 1, 0, 1]], "base": [0, 0, 0]},
                    {"axes": [[3, 1, 0, 1]], "base": [3, 0, 3], "scale": "1/3"},
                    {"axes": [[2, 3, 0, 3], [3, 1, 0, 1]], "base": [6, 1, 0]},
                ],
                "padding": [{"axes": [[2, 1, 0]], "base": [0, 5]}],
            }
        },
        "tensors": {"h.0.attn": "L2"},
    }


@given(st.dictionaries(NAMES, layouts() | wild_layouts(), max_size=4), st.data())
def test_what_is_written_is_read_back(tensors, data):
    mesh = data.draw(meshes(4))
    text = write_map(MapFile(mesh, tensors))

    assert read_map(text) == read_map(text.encode()) == MapFile(mesh, tensors)
    assert write_map(read_map(text)) == text


@given(layouts() | wild_layouts())
def test_a_single_layout_comes_back_with_its_mesh(layout):
    value = json.loads(json.dumps(layout_to_json(layout)))

    assert layout_from_json(value) == layout


def test_a_layout_without_a_mesh_of_its_own_needs_one_from_elsewhere():
    value = layout_to_json(Layout.of({"tp": 1}, (0,), [(0,)], []), mesh=as_mesh("tp=1"))

    with pytest.raises(FormatError) as caught:
        layout_from_json(value, where="$.layouts.L0")

    assert str(caught.value) == "$.layouts.L0: the layout does not name its mesh"


def test_the_file_reads_as_documented():
    rows = Piece((Axis(8, 1024, 1, 0), Axis(8192, 8192, 0, 1024), Axis(1024, 1, 0, 1)))
    columns = Layout.of({"tp": 8}, (8192, 8192), [(8192, 1024)] * 8, [rows])
    name = "modèle.layers.0.self_attn.o_proj.weight"

    text = write_map(MapFile(as_mesh("tp=8"), {name: columns, "other": columns}))

    assert json.loads(text) == {
        "format": "restride/1",
        "mesh": {"tp": 8},
        "layouts": {
            "L0": {
                "full": [8192, 8192],
                "shards": [[8, [8192, 1024]]],
                "pieces": [
                    {
                        "axes": [[8, 1024, 1, 0], [8192, 8192, 0, 1024], [1024, 1, 0, 1]],
                        "base": [0, 0, 0],
                    }
                ],
            }
        },
        "tensors": {name: "L0", "other": "L0"},
    }
    assert [line for line in text.splitlines() if name in line] == [f'"{name}": "L0",']


def test_what_has_its_usual_value_is_left_out_and_the_rest_is_there():
    nibbles = Layout(
        as_mesh("tp=2"),
        (4,),
        ((1, (3,)), (1, (2,))),
        (Piece((Axis(2, 1, 0, 1),), scale=Fraction(-5, 7)), Piece((Axis(2, 1, 0, 1),), 2, 1)),
        (Padding((), 0, 2, "undefined"),),
        4,
    )

    value = layout_to_json(nibbles, mesh=as_mesh("tp=2"))

    assert value == {
        "full": [4],
        "shards": [[1, [3]], [1, [2]]],
        "pieces": [
            {"axes": [[2, 1, 0, 1]], "base": [0, 0, 0], "scale": "-5/7"},
            {"axes": [[2, 1, 0, 1]], "base": [2, 1, 0]},
        ],
        "padding": [{"axes": [], "base": [0, 2], "fill": "undefined"}],
        "unit_bits": 4,
    }
    assert layout_from_json(value, mesh=as_mesh("tp=2")) == nibbles


def test_the_sample_of_these_tests_is_accepted():
    layout = read_map(json.dumps(valid())).tensors["h.0.attn"]

    assert layout.all_pieces[1].scale == Fraction(1, 3)
    assert layout.padding == (Padding((Axis(2, 0, 1, 0),), 0, 5),)


def changed(path: str, value: object) -> str:
    """The sample with one value replaced, or removed where the new value is `...`."""
    root = valid()
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    inside = root
    for step in steps:
        inside = inside[step]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return json.dumps(root)


PIECE = "layouts/L2/pieces"
FORMAT_FAULTS = [
    ("format", ..., "$.format"),
    ("format", "safetensors/1", "$.format"),
    ("format", "restride/0", "$.format"),
    ("format", "restride/1.5", "$.format"),
    ("format", 1, "$.format"),
    ("extra", 1, "$"),
    ("mesh", [2], "$.mesh"),
    ("mesh/tp", 2.0, "$.mesh"),
    ("mesh/tp", True, "$.mesh"),
    ("tensors/h.0.attn", "L3", "$.tensors['h.0.attn']"),
    ("tensors/h.0.attn", ["L2"], "$.tensors['h.0.attn']"),
    ("layouts", [], "$.layouts"),
    ("layouts/L2/full", ..., "$.layouts.L2"),
    ("layouts/L2/full", [4.0, 3], "$.layouts.L2.full[0]"),
    ("layouts/L2/full", [2**63, 3], "$.layouts.L2.full[0]"),
    ("layouts/L2/shape", [4, 3], "$.layouts.L2"),
    ("layouts/L2/shards", [[2, [2, 3], 1]], "$.layouts.L2.shards[0]"),
    ("layouts/L2/unit_bits", "4", "$.layouts.L2.unit_bits"),
    (f"{PIECE}/2/axes/0", [2, 3, 0], "$.layouts.L2.pieces[2].axes[0]"),
    (f"{PIECE}/2/axes/0/1", None, "$.layouts.L2.pieces[2].axes[0][1]"),
    (f"{PIECE}/2/base", [0, 0], "$.layouts.L2.pieces[2].base"),
    (f"{PIECE}/2/colour", "red", "$.layouts.L2.pieces[2]"),
    (f"{PIECE}/2/scale", "2/6", "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", "1e999999999", "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", "1/0", "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", "0.5", "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", "", "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", "1" * 5000, "$.layouts.L2.pieces[2].scale"),
    (f"{PIECE}/2/scale", 2, "$.layouts.L2.pieces[2].scale"),
    ("layouts/L2/padding/0/fill", "ones", "$.layouts.L2.padding[0].fill"),
]


@pytest.mark.parametrize(("path", "value", "where"), FORMAT_FAULTS)
def test_what_is_no_map_file_is_refused_where_it_goes_wrong(path, value, where):
    with pytest.raises(FormatError) as caught:
        read_map(changed(path, value))

    assert caught.value.where.removesuffix("[...]") == where


INVARIANT_FAULTS = [
    ("mesh/tp", 0, "$.mesh"),
    ("mesh/tp", 2**62, "$.mesh"),
    ("mesh", {"t p": 2}, "$.mesh"),
    ("mesh/tp", 3, "$.layouts.L2"),
    ("layouts/L2/full/0", -4, "$.layouts.L2"),
    ("layouts/L2/full/0", 3, "$.layouts.L2"),
    ("layouts/L2/shards/0/0", 3, "$.layouts.L2"),
    ("layouts/L2/unit_bits", 0, "$.layouts.L2"),
    (f"{PIECE}/2/axes/0", [1, 3, 0, 3], "$.layouts.L2.pieces[2].axes[0]"),
    (f"{PIECE}/2/axes/0", [2, -3, 0, 3], "$.layouts.L2.pieces[2].axes[0]"),
    (f"{PIECE}/2/axes/0", [2, 3, 1, 3], "$.layouts.L2.pieces[2].axes[0]"),
    (f"{PIECE}/2/axes/0", [2**62, 2**62, 0, 2**62], "$.layouts.L2"),
    (f"{PIECE}/2/base", [6, -1, 0], "$.layouts.L2.pieces[2]"),
    (f"{PIECE}/2/base", [6, 2, 0], "$.layouts.L2"),
    (f"{PIECE}/2/scale", "0", "$.layouts.L2.pieces[2]"),
    ("layouts/L2/padding/0/base", [0, 6], "$.layouts.L2"),
    ("layouts/L2/padding/0/axes/0", [2, 1, 1], "$.layouts.L2.padding[0].axes[0]"),
]


@pytest.mark.parametrize(("path", "value", "where"), INVARIANT_FAULTS)
def test_numbers_that_break_an_invariant_are_refused_where_they_stand(path, value, where):
    with pytest.raises(LayoutError) as caught:
        read_map(changed(path, value))

    assert caught.value.where == where


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"format": "restride/1", "format": "restride/1"}', "$"),
        ('{"mesh": {"tp": 2, "tp": 2}}', "$.mesh"),
        ('{"layouts": {"L1": 0, "L1": 0}}', "$.layouts"),
        ('{"layouts": {"L1": {"pieces": [{}, {"base": 1, "base": 1}]}}}', "$.layouts.L1.pieces[1]"),
        ('{"tensors": {"a b": "L1", "a b": "L1"}}', "$.tensors"),
        ('{"a": NaN}', "$"),
        ('{"a": 1e999}', "$.format"),
        ('{"\\ud800": 1}', ""),
        ('"\ud800"', ""),
        (b'{"\xff": 1}', ""),
        ("[" * 100_000, ""),
        ('{"a":' * 100_000, ""),
        ("1" * 5000, ""),
        ("[]", "$"),
        ("", ""),
        ("{} {}", ""),
    ],
)
def test_ambiguous_and_broken_json_is_refused(text, where):
    with pytest.raises(FormatError) as caught:
        read_map(text)

    assert caught.value.where == where


def test_the_largest_numbers_that_are_read_are_the_largest_that_are_written():
    scale = Fraction(-(2**62), 3**39)
    piece = Piece((), 0, 0, 2**63 - 2, scale)
    largest = Layout(as_mesh("tp=1"), (1,) * 64, ((1, (2**63 - 1,)),), (piece,))
    beyond = [
        replace(largest, full_shape=(1,) * 65),
        replace(largest, shard_shapes=((1, (2**63,)),)),
        replace(largest, all_pieces=(replace(piece, scale=scale / 3),)),
    ]

    assert (len(str(scale)), len(str(scale / 3))) == (40, 41)
    assert layout_from_json(layout_to_json(largest)) == largest
    for layout in beyond:
        with pytest.raises(RestrideError):
            layout_from_json(layout_to_json(layout))


def test_a_file_from_the_future_says_what_to_install():
    with pytest.raises(UnsupportedError, match="newer") as caught:
        read_map('{"format": "restride/2", "surprise": 1}')

    assert caught.value.where == "$.format"


@pytest.mark.parametrize(
    "text",
    [
        " " * (2**24 + 1),
        changed("mesh", {f"a{number}": 1 for number in range(100)}),
        changed("layouts/L2/full", [1] * 100),
        changed(f"{PIECE}/2/axes", [[2, 0, 0, 1]] * 100),
        changed("layouts/L2/shards", [[1, [2, 3]]] * 2**17),
        json.dumps(
            valid()
            | {
                "mesh": {"tp": 2**16},
                "layouts": {
                    "L2": {
                        "full": [1],
                        "shards": [[1, [0]]] * 2**16,
                        "pieces": [{"axes": [], "base": [0, 0, 0]}] * 2**12,
                    }
                },
            }
        ),
    ],
    ids=["long", "mesh", "shape", "axes", "shards", "pieces and shards"],
)
def test_what_is_too_large_to_be_honest_is_refused_soon(text):
    started = process_time()
    with pytest.raises(RestrideError):
        read_map(text)

    assert process_time() - started < 5


def test_a_piece_over_overlapping_ranks_is_checked_without_visiting_each():
    """2^60 visits of 61 ranks, all beside the one rank whose shard is too short."""
    file = valid()
    file["mesh"] = {"tp": 2**10}
    file["layouts"]["L2"] |= {
        "shards": [[62, [4]], [1, [0]], [2**10 - 63, [4]]],
        "pieces": [{"axes": [[2, 0, 1, 0]] * 60, "base": [0, 0, 3]}],
        "padding": [],
    }

    assert read_map(json.dumps(file)).tensors["h.0.attn"].mesh.size == 2**10

    file["layouts"]["L2"]["pieces"][0]["base"] = [0, 2, 3]
    with pytest.raises(LayoutError, match="rank 62, whose shard has 0 elements"):
        read_map(json.dumps(file))


def test_hundreds_of_short_runs_beside_the_ranks_of_a_piece_cost_little():
    """A million ranks, and 60 kB of text: two ends that fit, and 256 runs between that do not."""
    ranks, between = 2**20, [[2**11, [number % 2]] for number in range(256)]
    used = 64 + 256 * 2**11
    file = valid()
    file["mesh"] = {"tp": ranks}
    file["layouts"]["L2"] |= {
        "shards": [[64, [4]], *between, [ranks - used, [4]]],
        "pieces": [{"axes": [[2, 0, used, 0], *[[2, 0, 1, 0]] * 59], "base": [0, 0, 3]}] * 64,
        "padding": [],
    }
    text = json.dumps(file)

    started = process_time()
    read_map(text)

    assert process_time() - started < 4


def test_nothing_is_written_that_could_not_be_read():
    long = Layout.of({"tp": 1}, (2**70,), [(2**70,)], [])
    for tensors in ({"a": long}, {"\ud800": Layout.of({"tp": 1}, (0,), [(0,)], [])}):
        with pytest.raises(FormatError):
            write_map(MapFile(Mesh((("tp", 1),)), tensors))


@settings(max_examples=300)
@given(st.data())
def test_a_value_in_the_wrong_place_is_refused_or_read_back(data):
    """Whatever is put wherever, the reader answers with one of its errors or with a layout."""
    root = valid()
    holder, key = root, "layouts"
    while isinstance(holder[key], dict | list) and data.draw(st.integers(0, 4)):
        holder = holder[key]
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
    holder[key] = data.draw(JSON | st.integers(-3, 12))

    try:
        content = read_map(json.dumps(root))
    except RestrideError as error:
        where = error.where
    else:
        where = "$" if read_map(write_map(content)) == content else "changed"

    assert where.startswith("$")


def test_places_are_spelled_only_where_a_key_is_repeated(monkeypatch):
    """Millions of values that are fine cost no more than reading them."""
    from restride import strict_json

    visited = []
    walk = strict_json._refuse_repeated

    def counted(value, where):
        visited.append(where)
        walk(value, where)

    monkeypatch.setattr(strict_json, "_refuse_repeated", counted)

    assert strict_json.parse_object('{"a": [1, 2, {"b": 3}]}') == {"a": [1, 2, {"b": 3}]}
    assert not visited
    with pytest.raises(FormatError, match=r"\$.a\[1\]: the key 'b' comes twice"):
        strict_json.parse_object('{"a": [1, {"b": 3, "b": 4}]}')
    assert visited
