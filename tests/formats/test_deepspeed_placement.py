"""Checkpoints without affine maps: categories of parameters, and nothing guessed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._patterns import PatternTable, parse_pattern
from restride.formats.deepspeed._placement import Placement
from restride.layouts import padded, replicated, split, sub_params

TP = Mesh((("tp", 2),))
CATEGORIES = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"^layers\.\d+\.norm\.weight$"],
    "parameter_with_row_parallelism_patterns": [r"^layers\.\d+\.o_proj\.weight$"],
    "parameter_to_average_patterns": [r"layers\.\d+\.router"],
    "parameter_with_2_sub_params_cat_dim_0": [r"^layers\.\d+\.gate_up\.weight$"],
    "vocabulary_parameter_patterns": [r"^wte\.weight$"],
    "original_vocab_size": 5,
}


def placement(info, mesh=TP):
    return Placement(None if info is None else Field(info, "a.pt: info"), mesh, "a.pt")


def refused(info, name, shapes, *words, error: type[RestrideError] = UnsupportedError):
    with pytest.raises(error) as caught:
        placement(info).layout(name, shapes)
    for word in (f"tensor {name!r}", *words):
        assert word in str(caught.value)


def test_one_rank_holds_everything_and_needs_no_metadata():
    one = Mesh((("tp", 1),))

    assert placement(None, one).layout("up", [(4, 3)]) == replicated((4, 3), mesh=one)


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("layers.0.norm.weight", [(3,), (3,)], replicated((3,), mesh=TP)),
        ("layers.7.router.weight", [(4, 3), (4, 3)], replicated((4, 3), mesh=TP)),
        ("layers.1.o_proj.weight", [(4, 3), (4, 2)], split((4, 5), mesh=TP, dim=1, sizes=(3, 2))),
        ("layers.1.q_proj.weight", [(4, 3), (2, 3)], split((6, 3), mesh=TP, sizes=(4, 2))),
        ("layers.1.q_proj.bias", [(4,), (2,)], split((6,), mesh=TP, sizes=(4, 2))),
        ("layers.1.gate_up.weight", [(4, 3), (4, 3)], sub_params((8, 3), mesh=TP, sizes=[4, 4])),
        ("wte.weight", [(3, 2), (3, 2)], padded((5, 2), mesh=TP, rows=6, fill="undefined")),
    ],
)
def test_a_category_is_a_layout(name, shapes, expected):
    assert same_layout(placement(CATEGORIES).layout(name, shapes), expected)


def test_averaged_copies_are_replicas_that_may_drift():
    assert placement(CATEGORIES).is_averaged("layers.7.router.weight")
    assert not placement(CATEGORIES).is_averaged("layers.7.norm.weight")


def test_a_vocabulary_without_padding_is_a_plain_cut():
    layout = placement({**CATEGORIES, "original_vocab_size": 6}).layout("wte.weight", [(3, 2)] * 2)

    assert layout == split((6, 2), mesh=TP)
    assert not layout.padding


@pytest.mark.parametrize("info", [None, {}, {"tp_replicated_parameter_patterns": []}])
def test_a_parameter_that_nothing_is_said_of_is_refused(info):
    refused(
        info,
        "layers.0.q_proj.weight",
        [(4, 3), (4, 3)],
        "nothing in the checkpoint says how 2 tensor-parallel ranks hold shards of (4, 3)",
        "--source-config",
    )


def test_a_layout_that_deepspeed_marks_as_unknown_is_refused_with_its_reason():
    info = {**CATEGORIES, "autotp_unsupported_parameter_patterns": {r"^o\.bias$": "shared heads"}}

    refused(info, "o.bias", [(4,), (4,)], "shared heads")


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("layers.0.norm.weight", [(3,), (4,)], "whole on every rank"),
        ("layers.1.o_proj.weight", [(4, 3), (5, 3)], "do not join along dimension 1"),
        ("layers.1.o_proj.weight", [(4,), (4,)], "do not join along dimension 1"),
        ("layers.1.q_proj.weight", [(4, 3), (4, 2)], "do not join along dimension 0"),
        ("layers.1.q_proj.weight", [(4, 3), (4,)], "do not join along dimension 0"),
        ("scalar", [(), ()], "do not join along dimension 0"),
        ("layers.1.gate_up.weight", [(3, 3), (3, 3)], "even number of rows"),
        ("wte.weight", [(2, 2), (2, 2)], "do not fit"),
    ],
)
def test_shards_that_do_not_fit_their_category(name, shapes, words):
    refused(CATEGORIES, name, shapes, words, error=CorruptError)


def test_a_vocabulary_padded_to_uneven_shards_is_refused():
    refused(CATEGORIES, "wte.weight", [(4, 2), (3, 2)], "[4, 3] rows")


def test_a_parameter_in_two_categories_is_refused():
    info = {**CATEGORIES, "parameter_with_row_parallelism_patterns": ["^layers"]}

    refused(info, "layers.0.norm.weight", [(3,)] * 2, "is said to be", error=CorruptError)


def box_map(shape, rank_shape, bases, strides, dest):
    return {
        "logical_shape": list(shape),
        "ranks": {
            rank: {
                "shard_shape": list(rank_shape),
                "pieces": [
                    {
                        "shape": list(rank_shape),
                        "source": [base, list(strides)],
                        "dest": [0, list(dest)],
                        "locations": [rank],
                    }
                ],
            }
            for rank, base in enumerate(bases)
        },
    }


def test_a_map_goes_before_the_categories():
    stored = box_map((4, 4), (4, 2), (0, 2), (4, 1), (2, 1))
    info = {**CATEGORIES, "affine_map": {"version": 1, "params": {r"^wte\.weight$": stored}}}

    assert placement(info).layout("wte.weight", [(4, 2)] * 2) == split((4, 4), mesh=TP, dim=1)
    refused(info, "wte.weight", [(2, 2)] * 2, "shape (2, 2)", "(4, 2)", error=CorruptError)
    refused(info, "wte.weight", [(2, 4)] * 2, "shape (2, 4)", "(4, 2)", error=CorruptError)


def test_a_parameter_that_two_maps_match_is_refused():
    stored = box_map((4, 4), (4, 2), (0, 2), (4, 1), (2, 1))
    params = {r"^wte\.weight$": stored, r"^wte\.w": stored}
    info = {**CATEGORIES, "affine_map": {"params": params}}

    refused(info, "wte.weight", [(4, 2)] * 2, "matches 2 patterns", error=CorruptError)


def test_a_map_in_more_dimensions_than_the_stored_matrix_keeps_the_matrix():
    """Stacked experts, cut inside each one: the parameter is stored with the first two merged."""
    stored = box_map((3, 4, 5), (3, 2, 5), (0, 10), (20, 5, 1), (10, 5, 1))
    info = {"affine_map": {"params": {"^experts$": stored}}}

    layout = placement(info).layout("experts", [(6, 5)] * 2)

    assert layout.full_shape == (12, 5)
    assert layout.shard_shape(0) == (6, 5)
    assert [piece.full_base for piece in layout.pieces(1)] == [10]


SUB = {"patterns": ["^qkv$"], "shape": [(4, 2, 2), 3], "partition_dim": 0}


@pytest.mark.parametrize(
    ("sub", "more", "shapes", "expected"),
    [
        (
            SUB,
            {"sub_param_shard_widths": {"^qkv$": [[3, 1], [1, 1], [1, 1]]}},
            [(5, 3), (3, 3)],
            sub_params((8, 3), mesh=TP, sizes=[4, 2, 2], widths=[[3, 1], [1, 1], [1, 1]]),
        ),
        (
            {**SUB, "shape": (3, -1)},
            {"universal_checkpoint_version": 0.2},
            [(6, 5), (6, 5)],
            sub_params((12, 5), mesh=TP, sizes=[4, 4, 4]),
        ),
        (
            {**SUB, "shape": [(4, 4), -1]},
            {"universal_checkpoint_version": 0.2},
            [(12,), (12,)],
            sub_params((8, 3), mesh=TP, sizes=[4, 4]),
        ),
    ],
)
def test_sub_parameters_are_cut_each(sub, more, shapes, expected):
    info = {**CATEGORIES, "parameter_with_sub_params": [sub], **more}

    assert same_layout(placement(info).layout("qkv", shapes), expected)


@pytest.mark.parametrize(
    ("sub", "more", "shapes", "words"),
    [
        (
            SUB,
            {"sub_param_shard_widths": {"^qkv$": [[3, 2], [1, 1], [1, 1]]}},
            [(5, 3), (3, 3)],
            "do not fit",
        ),
        (
            SUB,
            {"sub_param_shard_widths": {"^qkv$": [[3, 1], [1, 1], [1, 1]]}},
            [(3, 3), (5, 3)],
            "tp rank 0 stores a shard of shape (3, 3)",
        ),
        (
            {**SUB, "shape": (3, -1)},
            {"universal_checkpoint_version": 0.2},
            [(5, 5), (6, 5)],
            "11 rows are no 3 sub-parameters",
        ),
        (
            {**SUB, "shape": (2, -1)},
            {"universal_checkpoint_version": 0.2},
            [(3, 5), (3, 5)],
            "3 rows does not cut evenly",
        ),
        (
            {**SUB, "shape": [(4, 4), -1, -1]},
            {"universal_checkpoint_version": 0.2},
            [(12,), (12,)],
            "do not make 24 elements",
        ),
    ],
)
def test_sub_parameters_that_do_not_fit(sub, more, shapes, words):
    info = {**CATEGORIES, "parameter_with_sub_params": [sub], **more}

    with pytest.raises(CorruptError, match=re.escape(words)):
        placement(info).layout("qkv", shapes)


def test_sub_parameters_without_their_widths_are_refused():
    with pytest.raises(CorruptError, match="sub_param_shard_widths has nothing for"):
        placement({**CATEGORIES, "parameter_with_sub_params": [SUB]})


# Patterns.


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        (r"^a\.b$", "a.b", True),
        (r"^a\.b$", "a.bc", False),
        (r"a\.b", "a.bc", True),
        (r"a.b", "axb", True),
        (r"\d+\.w", "12.w", True),
        (r"\d+\.w", ".w", False),
        (r".*\.experts\.w[123]$", "layers.3.mlp.experts.w2", True),
        (r".*\.experts\.w[123]$", "layers.3.mlp.experts.w4", False),
        (r"x?y*z", "z", True),
        (r"x?y*z", "xyyyz", True),
        (r"[^a-c]+$", "xyz", True),
        (r"[^a-c]+$", "xbz", False),
        (r"a\$$", "a$", True),
        ("", "anything", True),
        ("$", "", True),
    ],
)
def test_a_pattern_matches_as_the_peers_does(pattern, name, is_match):
    assert parse_pattern(pattern).matches(name) is is_match
    assert (re.match(pattern, name) is not None) is is_match


_ATOMS = st.sampled_from(["a", "b", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]"])
_PATTERNS = st.lists(st.tuples(_ATOMS, st.sampled_from(["", "", "*", "+", "?"])), max_size=6)


@given(_PATTERNS, st.booleans(), st.text("ab.1", max_size=8))
def test_every_pattern_matches_as_the_peers_does(atoms, is_whole, name):
    pattern = "^" + "".join(atom + mark for atom, mark in atoms) + "$" * is_whole

    assert parse_pattern(pattern).matches(name) == (re.match(pattern, name) is not None)


@given(st.text("ab._$-\n\\", max_size=4), st.text("ab._$-\n\\", max_size=4), st.booleans())
def test_an_escaped_name_is_found_by_its_name_alone(known, name, is_anchored):
    pattern = "^" * is_anchored + re.escape(known) + "$"

    assert PatternTable([(pattern, 1)]).find(name) == ([(pattern, 1)] if known == name else [])


def test_a_pattern_that_takes_a_backtracking_matcher_hours_is_matched_at_once():
    pattern = parse_pattern("^" + ".*" * 30 + "x$")

    assert not pattern.matches("a" * 500)


@pytest.mark.parametrize(
    "pattern", ["(a|b)", "a{3}", r"\bword", "[[a]", "[a", "a**", "a+?", "\\", "^a^b", "a" * 2000]
)
def test_a_pattern_that_is_not_understood_is_refused(pattern):
    with pytest.raises(UnsupportedError, match="not understood"):
        parse_pattern(pattern)


def test_names_that_are_written_out_are_found_directly():
    table = PatternTable([(r"^a\.b$", 1), (r"^a", 2), (r"^c$", 3)])

    assert table.find("a.b") == [(r"^a\.b$", 1), ("^a", 2)]
    assert table.find("c") == [("^c$", 3)]
    assert table.find("d") == []
