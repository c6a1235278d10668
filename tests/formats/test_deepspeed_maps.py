"""Affine maps as layouts: every map that DeepSpeed makes, and every way in which one may lie."""

from __future__ import annotations

import copy
import json
import tracemalloc
from fractions import Fraction

import pytest

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.formats.deepspeed import from_affine_map, maps
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed.maps import read_affine_maps
from restride.layouts import bigcode_qkv, codegen_qkv, replicated, segmented, split, sub_params
from restride.storage.torch_zip import open_torch_zip


def box(shape, source, dest, locations, **more):
    return {
        "shape": list(shape),
        "source": [source[0], list(source[1])],
        "dest": [dest[0], list(dest[1])],
        "locations": list(locations),
        **more,
    }


def columns():
    """A 3 x 4 tensor in two halves of columns."""
    return {
        "logical_shape": [3, 4],
        "ranks": {
            rank: {
                "shard_shape": [3, 2],
                "pieces": [box((3, 2), (2 * rank, (4, 1)), (0, (2, 1)), [rank])],
            }
            for rank in range(2)
        },
    }


def whole(ranks=2, **more):
    """Five elements that every rank holds."""
    entry = {
        "shard_shape": [5],
        "pieces": [box((5,), (0, (1,)), (0, (1,)), range(ranks), **more)],
    }
    return {"logical_shape": [5], "ranks": {rank: copy.deepcopy(entry) for rank in range(ranks)}}


def refused(stored, *words, error: type[RestrideError] = CorruptError):
    with pytest.raises(error) as caught:
        from_affine_map(stored)
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message


def test_boxes_of_all_ranks_are_one_piece():
    layout = from_affine_map(columns())

    assert len(layout.all_pieces) == 1
    assert layout == split((3, 4), mesh={"tp": 2}, dim=1)


def test_replicas_are_one_piece_for_any_number_of_ranks():
    assert from_affine_map(whole(7)) == replicated((5,), mesh={"tp": 7})


def test_a_map_that_has_been_through_json_is_the_same():
    assert from_affine_map(json.loads(json.dumps(columns()))) == from_affine_map(columns())


def test_the_mesh_may_be_named():
    assert str(from_affine_map(columns(), "ep=2").mesh) == "ep=2"


@pytest.mark.parametrize(
    ("stored", "scale"),
    [(0.5, Fraction(1, 2)), (1 / 3, Fraction(1, 3)), (3.0, Fraction(3)), (0.1, Fraction(1, 10))],
)
def test_a_scale_is_the_factor_that_the_layer_used(stored, scale):
    layout = from_affine_map(whole(scale=stored))

    assert [piece.scale for piece in layout.all_pieces] == [scale]


def test_a_scale_that_is_no_simple_number_is_the_float_itself():
    stored = 0.3333

    (piece,) = from_affine_map(whole(scale=stored)).all_pieces

    assert piece.scale == Fraction(stored)


@pytest.mark.parametrize("scale", [0, 0.0, float("nan"), float("inf"), "1", [1], 10**400])
def test_a_scale_that_is_none(scale):
    refused(whole(scale=scale), "a scale is a finite number other than 0")


def test_a_hole_is_named_with_its_element():
    stored = columns()
    stored["ranks"][1]["pieces"][0]["source"][0] = 1

    refused(stored, "no rank holds full element 3 at (0, 3)")


def test_an_overlap_inside_a_shard_that_the_peer_overlooks():
    """Strided boxes are not checked by DeepSpeed; the second one overwrites the first."""
    stored = columns()
    halves = [box((3, 1), (n, (4, 1)), (0, (2, 1)), [0]) for n in range(2)]
    stored["ranks"][0]["pieces"] = halves

    refused(stored, "rank 0", "shard index 0")


@pytest.mark.parametrize(
    ("side", "base", "words"),
    [("source", 3, ("full index 12",)), ("dest", 1, ("shard index 6", "rank 1"))],
)
def test_a_box_that_leaves_its_tensor(side, base, words):
    stored = columns()
    stored["ranks"][1]["pieces"][0][side][0] = base

    refused(stored, *words)


@pytest.mark.parametrize("locations", [[0], [0, 1, 2], [5]])
def test_holders_that_are_not_those_of_the_element(locations):
    stored = whole()
    stored["ranks"][1]["pieces"][0]["locations"] = locations

    refused(stored, "element 0 is held by ranks [0, 1]", "rank 1", str(sorted(locations)))


def test_a_replica_that_is_not_declared():
    """Both ranks hold rows 0 and 1, and rank 0 says that it alone has row 1."""
    row = [box((1, 2), (2 * n, (2, 1)), (2 * n, (2, 1)), [0, 1]) for n in range(2)]
    stored = {
        "logical_shape": [2, 2],
        "ranks": {rank: {"shard_shape": [2, 2], "pieces": copy.deepcopy(row)} for rank in range(2)},
    }
    assert from_affine_map(stored)

    stored["ranks"][0]["pieces"][1]["locations"] = [0]
    refused(stored, "element 2 is held by ranks [0, 1]", "[0]")


def test_replicas_may_be_cut_in_other_places():
    stored = whole()
    stored["ranks"][1]["pieces"] = [
        box((2,), (0, (1,)), (0, (1,)), [0, 1]),
        box((3,), (2, (1,)), (2, (1,)), [0, 1]),
    ]

    assert same_layout(from_affine_map(stored), replicated((5,), mesh={"tp": 2}))


def test_a_missing_rank():
    stored = whole(3)
    del stored["ranks"][1]

    refused(stored, "ranks [0, 2]")


def test_a_rank_without_boxes_that_has_a_shard():
    stored = whole()
    stored["ranks"][1]["pieces"] = []

    refused(stored, "rank 1", "nobody writes")


def test_a_rank_with_nothing():
    stored = columns()
    stored["ranks"][0] = {
        "shard_shape": [3, 4],
        "pieces": [box((3, 4), (0, (4, 1)), (0, (4, 1)), [0])],
    }
    stored["ranks"][1] = {
        "shard_shape": [3, 0],
        "pieces": [box((3, 0), (4, (4, 1)), (0, (0, 1)), [1])],
    }

    assert from_affine_map(stored) == split((3, 4), mesh={"tp": 2}, dim=1, sizes=[4, 0])


@pytest.mark.parametrize(
    "broken",
    [
        5,
        None,
        "logical_shape",
        [[]],
        {},
        {"logical_shape": [5]},
        {"logical_shape": [5], "ranks": {}},
        {"logical_shape": [5], "ranks": []},
        {"logical_shape": 5, "ranks": whole()["ranks"]},
        {"logical_shape": [5.0], "ranks": whole()["ranks"]},
        {"logical_shape": [True], "ranks": whole()["ranks"]},
        {"logical_shape": [-5], "ranks": whole()["ranks"]},
        {"logical_shape": [5], "ranks": {"x": whole()["ranks"][0]}},
        {"logical_shape": [5], "ranks": {0: None}},
        {"logical_shape": [1] * 100, "ranks": whole()["ranks"]},
        {"logical_shape": [2**62, 2**62], "ranks": whole()["ranks"]},
    ],
)
def test_a_map_that_is_none(broken):
    with pytest.raises(FormatError):
        from_affine_map(broken)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [5, 1]),
        ("shape", ["5"]),
        ("source", [0]),
        ("source", [0, [1], 2]),
        ("source", [0.5, [1]]),
        ("source", [0, [-1]]),
        ("dest", None),
        ("dest", [0, [0]]),
        ("locations", []),
        ("locations", [-1]),
        ("locations", 0),
    ],
)
def test_a_box_that_is_none(key, value):
    stored = whole()
    stored["ranks"][0]["pieces"][0][key] = value

    with pytest.raises(FormatError):
        from_affine_map(stored)


@pytest.mark.parametrize("level", ["map", "rank", "box"])
def test_what_is_not_understood_is_refused(level):
    stored = whole()
    target = {
        "map": stored,
        "rank": stored["ranks"][0],
        "box": stored["ranks"][0]["pieces"][0],
    }[level]
    target["bias"] = 1

    refused(stored, "'bias'", error=UnsupportedError)


def test_maps_of_a_version_from_the_future_are_refused():
    stored = Field({"version": 2, "params": {}}, "a.pt: affine_map")

    with pytest.raises(UnsupportedError, match="version 2 are stored, version 1 is understood"):
        list(read_affine_maps(stored, Mesh((("tp", 2),))))


def test_maps_without_a_version_are_of_the_first():
    stored = Field({"params": {"^up$": columns()}}, "a.pt: affine_map")

    assert [pattern for pattern, _ in read_affine_maps(stored, Mesh((("tp", 2),)))] == ["^up$"]


def test_maps_of_another_number_of_ranks_are_refused():
    stored = Field({"version": 1, "params": {"^up$": columns()}}, "a.pt: affine_map")

    with pytest.raises(CorruptError, match="maps of 2 ranks are given, the checkpoint has 4"):
        list(read_affine_maps(stored, Mesh((("tp", 4),))))


EXPECTED = {
    "codegen_fused_tp2_z0": {
        "transformer.h.0.attn.qkv_proj.weight": codegen_qkv((192, 64), mesh={"tp": 2}, heads=8),
        "transformer.h.1.mlp.fc_out.weight": split((64, 256), mesh={"tp": 2}, dim=1),
        "transformer.wte.weight": replicated((128, 64), mesh={"tp": 2}),
    },
    "gptbigcode_tp2_z1": {
        "transformer.h.0.attn.c_attn.weight": segmented(
            (96, 64), mesh={"tp": 2}, segments=[(64, (64, 0)), (32, None)]
        ),
    },
    "llama_unevenkv_tp2_z1": {
        "model.layers.0.self_attn.k_proj.weight": split((48, 96), mesh={"tp": 2}, sizes=(32, 16)),
    },
    "llama_tp2_z3": {
        "model.layers.1.self_attn.o_proj.weight": split((64, 64), mesh={"tp": 2}, dim=1),
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_stored_maps_are_the_layouts_that_the_builders_make(name, shared):
    (file, *_) = sorted(
        (shared / "checkpoints" / name / "step").glob("*mp_rank_00_model_states.pt")
    )
    stored = open_torch_zip(file).value["universal_checkpoint_info"]["affine_map"]["params"]
    by_name = {pattern.strip("^$").replace("\\", ""): stored[pattern] for pattern in stored}

    for tensor, expected in EXPECTED[name].items():
        assert same_layout(from_affine_map(by_name[tensor]), expected)
    assert max(len(from_affine_map(entry).all_pieces) for entry in stored.values()) <= 2


@pytest.mark.interop
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("columns", [1, 40])
def test_the_maps_of_deepspeeds_own_builders_fold(ranks, columns):
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    rows, heads = 12 * ranks * 4, 4 * ranks
    block, ids = fused.codegen_block_layout(rows, ranks, heads, 4)
    stored = affine.block_gather_map((rows, columns), ids, block, 0).to_dict()
    assert len(stored["ranks"][0]["pieces"]) > 10

    layout = from_affine_map(stored)

    assert len(layout.all_pieces) == 1
    assert same_layout(layout, codegen_qkv((rows, columns), mesh={"tp": ranks}, heads=heads))


@pytest.mark.interop
@pytest.mark.parametrize("dim", [0, 1])
def test_sub_parameters_and_segments_of_deepspeed_fold(dim):
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    shape = (24, 36)
    sizes = [shape[dim] // 2, shape[dim] // 4, shape[dim] // 4]
    widths = [[size // 3 + 1, size // 3, size - 2 * (size // 3) - 1] for size in sizes]
    stored = affine.sub_param_map(shape, sizes, widths, dim).to_dict()
    expected = sub_params(shape, mesh={"tp": 3}, sizes=sizes, widths=widths, dim=dim)
    assert same_layout(from_affine_map(stored), expected)

    runs = [(16, False), (8, True)]
    stored = affine.segmented_map((24, 5), runs, 0, 4, [[4] * 4]).to_dict()
    layout = from_affine_map(stored)
    assert len(layout.all_pieces) == 2
    assert same_layout(layout, bigcode_qkv((24, 5), mesh={"tp": 4}, hidden=16, heads=4))


def test_what_only_compares_equal_to_a_map_is_read_by_itself():
    """Layers repeat and are read once; but ``True`` is no 1, wherever it stands."""
    lying = columns()
    lying["ranks"][1]["pieces"][0]["locations"] = [True]
    stored = Field({"params": {"a": columns(), "b": columns(), "c": lying}}, "info")
    found = read_affine_maps(stored, Mesh((("tp", 2),)))

    assert next(found)[1] is next(found)[1]
    with pytest.raises(FormatError, match=r"params'\]\['c'\].*found True"):
        next(found)


def test_a_number_of_thousands_of_digits_is_refused():
    lying = {**columns(), "logical_shape": [10**5000, 4]}
    stored = Field({"params": {"a": lying}}, "info")

    with pytest.raises(FormatError, match="an integer of 16610 bits"):
        list(read_affine_maps(stored, Mesh((("tp", 2),))))


@pytest.mark.parametrize("many", [[], {}, ()], ids=lambda many: type(many).__name__)
def test_a_text_that_a_map_refers_to_again_and_again_is_not_spelled_out(many):
    """A file of a megabyte may say so gigabytes."""
    long = "x" * (1 << 20)
    shared = dict.fromkeys(range(64), long) if many == {} else type(many)([long] * 64)
    lying = {**columns(), "logical_shape": [[shared] * 4, 4]}
    stored = Field({"params": {"a": columns(), "b": lying}}, "info")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"params'\]\['b'\]\['logical_shape'\]"):
            list(read_affine_maps(stored, Mesh((("tp", 2),))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_an_object_of_a_map_holds_besides_is_not_spelled_out():
    sound = columns()
    ranks = Constructed(
        GlobalName("collections", "defaultdict"),
        (["x" * (1 << 20)] * 64,),
        pairs=list(sound["ranks"].items()),
    )
    stored = Field({"params": {"a": {**sound, "ranks": ranks}, "b": {**sound, "ranks": ranks}}}, "")
    tracemalloc.start()
    try:
        first, second = (layout for _, layout in read_affine_maps(stored, Mesh((("tp", 2),))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert first == second == from_affine_map(sound)


def test_maps_are_compared_with_so_many_and_read_alike_beyond_them(monkeypatch):
    stored = Field({"params": {"a": whole(), "b": columns(), "c": columns(), "d": whole()}}, "info")
    mesh = Mesh((("tp", 2),))
    alike = dict(read_affine_maps(stored, mesh))
    monkeypatch.setattr(maps, "_MOST_KNOWN", 1)
    apart = dict(read_affine_maps(stored, mesh))

    assert alike["b"] is alike["c"]
    assert alike["a"] is alike["d"]
    assert apart["b"] is not apart["c"]
    assert apart["a"] is apart["d"]
    assert alike == apart
