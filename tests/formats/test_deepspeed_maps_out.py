"""Layouts as affine maps: what was written is read back, and DeepSpeed itself takes it."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings

from restride import deepspeed, layouts
from restride.algebra.boxes import BoxCutter, BoxWalk
from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.algebra.signature import same_layout
from restride.arrays.extract import extract
from restride.arrays.rebuild import rebuild
from restride.deepspeed import from_affine_map, from_affine_maps, to_affine_map, to_affine_maps
from restride.errors import (
    CorruptError,
    CoverageError,
    FormatError,
    RestrideError,
    UnsupportedError,
)
from restride.layouts.catalogue import CATALOGUE
from restride.storage.torch_zip import open_torch_zip
from restride.testing import strategies
from restride.testing.cuts import index_maps, read_example
from restride.testing.oracles import walk_relation

PADDED = {"padded", "flat-chunks", "zero-flat"}
"""Entries of the catalogue whose examples have padding."""

SHARED_HEADS = layouts.yuan_value((30, 2), mesh={"tp": 5}, heads=15)
"""Neighbouring ranks have a part of their heads in common."""

OTHERS = {
    "a scalar": layouts.replicated((), mesh={"tp": 3}),
    "no elements": layouts.replicated((4, 0, 2), mesh={"tp": 3}),
    "one rank": layouts.replicated((4, 2), mesh={"tp": 1}),
    "empty ranks": layouts.split((5, 3), mesh={"tp": 4}, dim=1, sizes=[0, 2, 0, 1]),
    "dimensions of one": layouts.split((1, 6, 1), mesh={"tp": 3}, dim=1),
    "shards of one column": layouts.split((4, 3), mesh={"tp": 3}, dim=1),
    "shared heads": SHARED_HEADS,
    "shared columns": layouts.yuan_output((2, 30), mesh={"tp": 5}, heads=15),
    "scaled": layouts.replicated((4,), mesh={"tp": 4}, scale=Fraction(-1, 4)),
    "flat": layouts.flat_chunks((4, 3), mesh={"dp": 2}),
    "flat through rows": layouts.flat_chunks((4, 3), mesh={"dp": 4}),
    "three dimensions": layouts.sub_params((3, 8, 2), mesh={"tp": 2}, sizes=[4, 2, 2], dim=1),
    "a mesh of two axes": layouts.split((6, 4), mesh={"dp": 2, "tp": 3}, axis="tp"),
    "experts that are shared": layouts.experts(
        (5, 2, 3), mesh={"ep": 3}, placement=[[4, 0, 1], [1, 2, 3], [3, 4]]
    ),
    "codegen at 3": layouts.codegen_qkv((72, 2), mesh={"tp": 3}, heads=12),
    "transposed": layouts.transposed(layouts.split((3, 4), mesh={"tp": 3})),
}
KINDS = {
    name: entry.builder(**read_example(entry))
    for name, entry in CATALOGUE.items()
    if name not in PADDED
} | OTHERS


def strides_of(shape):
    found = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        found[dim] = found[dim + 1] * shape[dim + 1]
    return found


def read_by_walking(stored):
    """(full, rank, shard) of every element of a stored map, with its holders and scale."""
    for rank, entry in stored["ranks"].items():
        for box in entry["pieces"]:
            for steps in product(*map(range, box["shape"])):
                full, shard = (
                    base + sum(step * stride for step, stride in zip(steps, strides, strict=True))
                    for base, strides in (box["source"], box["dest"])
                )
                yield full, rank, shard, tuple(box["locations"]), box.get("scale", 1.0)


def assert_written_as_it_is(layout, stored):
    """By walking every element: the relation, the holders, and boxes with row-major strides."""
    held: dict[int, set[int]] = {}
    maps = [[None] * layout.shard_numel(rank) for rank in range(layout.rank_count)]
    for full, rank, shard, *_ in read_by_walking(stored):
        assert maps[rank][shard] is None
        maps[rank][shard] = full
        held.setdefault(full, set()).add(rank)
    assert maps == index_maps(layout)
    assert all(set(ranks) == held[full] for full, _, _, ranks, _ in read_by_walking(stored))
    for rank, entry in stored["ranks"].items():
        shape = entry["shard_shape"]
        is_flat = len(shape) != len(layout.full_shape)
        assert tuple(shape) == layout.shard_shape(rank)
        for box in entry["pieces"]:
            assert box["source"][1] == ([1] if is_flat else strides_of(layout.full_shape))
            assert box["dest"][1] == ([1] if is_flat else strides_of(shape))


@pytest.mark.parametrize("name", KINDS)
def test_a_layout_is_written_and_read_back(name):
    layout = KINDS[name]

    stored = to_affine_map(layout)

    assert_written_as_it_is(layout, stored)
    assert same_layout(from_affine_map(stored, layout.mesh), layout)
    assert same_layout(from_affine_map(json.loads(json.dumps(stored)), layout.mesh), layout)


@given(strategies.layouts())
@settings(max_examples=150)
def test_any_layout_is_read_back_or_refused_for_a_reason(layout):
    assume(not layout.padding)
    exact = all(
        piece.scale.denominator & (piece.scale.denominator - 1) == 0 for piece in layout.all_pieces
    )

    try:
        stored = to_affine_map(layout)
    except UnsupportedError as error:
        assert not exact or layout.unit_bits
        assert error.remedy  # noqa: PT017
        return

    assert exact
    assert {
        (full, rank, shard): Fraction(scale)
        for full, rank, shard, _, scale in read_by_walking(stored)
    } == {(full, rank, shard): scale for full, rank, shard, scale in walk_relation(layout)}
    assert_written_as_it_is(layout, stored)
    assert same_layout(from_affine_map(stored, layout.mesh), layout)


@pytest.mark.parametrize(("ranks", "boxes"), [(2, 11), (4, 12), (8, 12)])
def test_codegens_one_piece_is_as_many_boxes_as_the_peer_writes(ranks, boxes):
    layout = layouts.codegen_qkv((12288, 4096), mesh={"tp": ranks}, heads=32)

    stored = to_affine_map(layout)

    assert [len(entry["pieces"]) for entry in stored["ranks"].values()] == [boxes] * ranks
    assert same_layout(from_affine_map(stored), layout)


def test_a_run_that_ends_inside_a_row_is_cut_there():
    """Twelve elements in rows of three, of which a flat rank holds seven: two rows and a third."""
    walk = BoxWalk(((7, 1, 1),), 2, 2, (0,), Fraction(1))

    boxes = BoxCutter((4, 3), (4, 3), 10).cut([walk])

    assert [(box.full_start, box.extents) for box in boxes] == [((0, 2), (1, 1)), ((1, 0), (2, 3))]


def test_the_number_of_boxes_does_not_grow_with_the_tensor():
    large = layouts.split((150_000, 4096), mesh={"tp": 8}, dim=1)

    assert [len(entry["pieces"]) for entry in to_affine_map(large)["ranks"].values()] == [1] * 8


def refused(layout, *words, error: type[RestrideError] = UnsupportedError, **options):
    with pytest.raises(error) as caught:
        to_affine_map(layout, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", sorted(PADDED))
def test_padding_has_no_map(name):
    layout = CATALOGUE[name].builder(**read_example(CATALOGUE[name]))

    refused(layout, "padded addresses", "every shard address holds an element")


def test_units_that_are_no_elements_have_no_map():
    packed = Layout.of({"tp": 1}, (4,), [(4,)], [Piece((Axis(4, 1, 0, 1),))], unit_bits=4)

    refused(packed, "units of 4 bits")


@pytest.mark.parametrize(
    "scale", [Fraction(1, 3), Fraction(1 / 3), Fraction(2**60 + 1), Fraction(10**400)]
)
def test_a_scale_that_no_float_says_has_no_map(scale):
    layout = layouts.replicated((4,), mesh={"tp": 3}, scale=scale)

    refused(layout, f"the scale {scale} is no floating-point number", "power of two")


def test_a_layout_that_is_not_whole_has_no_map():
    hole = Layout.of({"tp": 1}, (4,), [(3,)], [Piece((Axis(3, 1, 0, 1),))])

    refused(hole, "element 3", error=CoverageError)


def test_a_transposed_matrix_has_no_boxes():
    layout = layouts.transposed(layouts.split((4096, 4096), mesh={"tp": 2}))

    refused(layout, "rank 0", "(2048, 4096)", "4096 boxes", "transposed copies")


def test_boxes_of_all_ranks_are_counted_together():
    layout = layouts.codegen_qkv((48, 2), mesh={"tp": 2}, heads=16)
    assert to_affine_map(layout, most_boxes=22)

    refused(layout, "ranks 0 to 1 of 2 are 22 boxes, 21 are allowed", most_boxes=21)
    refused(layout, "10 boxes", most_boxes=10)


NAMES = ("a.b", "w+[0]", "transformer.h.0.attn.c_attn.weight", "x$^", "back\\slash", "ünïcode")


def test_a_document_holds_every_parameter_by_its_name():
    document = {
        name: layouts.split((4, index + 2), mesh={"tp": 2}) for index, name in enumerate(NAMES)
    }

    stored = to_affine_maps(document)

    assert stored["version"] == 1
    assert from_affine_maps(stored) == document
    assert from_affine_maps(json.loads(json.dumps(stored)), "ep=2") == {
        name: layouts.split((4, index + 2), mesh={"ep": 2}) for index, name in enumerate(NAMES)
    }


def test_an_empty_document():
    assert from_affine_maps(to_affine_maps({})) == {}


def test_an_error_in_a_document_names_the_parameter():
    document = {
        "up": KINDS["split"],
        "bias": layouts.replicated((2,), mesh={"tp": 3}, scale=Fraction(1, 3)),
    }

    with pytest.raises(UnsupportedError, match=r"^parameter 'bias': the scale 1/3"):
        to_affine_maps(document)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda d: d.update(version=2), UnsupportedError, "version 2"),
        (lambda d: d["params"].update({"^c$": 5}), FormatError, "a dict is expected"),
        (
            lambda d: d["params"].update({r"^b.$": d["params"]["^b$"]}),
            UnsupportedError,
            "may match",
        ),
        (
            lambda d: d["params"].update({"^[b]$": d["params"]["^b$"]}),
            UnsupportedError,
            "may match",
        ),
        (
            lambda d: d["params"].update({"^(b$": d["params"]["^b$"]}),
            UnsupportedError,
            "not understood at",
        ),
        (lambda d: d["params"].update({"b$": d["params"]["^b$"]}), CorruptError, "two maps for"),
        (lambda d: d["params"]["^b$"]["ranks"].pop(1), CorruptError, "ranks"),
        (lambda d: d.pop("params"), FormatError, "has no 'params'"),
    ],
)
def test_a_document_that_is_none(change, error, words):
    stored = to_affine_maps({"a": KINDS["split"], "b": layouts.split((6, 3), mesh={"tp": 3})})
    change(stored)

    with pytest.raises(error, match=words):
        from_affine_maps(stored)


@pytest.mark.parametrize(
    "name",
    [
        "bloom_tp2_z1",
        "codegen_fused_tp2_z1",
        "gptbigcode_tp2_z1",
        "llama_tp2_z3",
        "llama_unevenkv_tp2_z1",
        "mixtral_tp2_z1",
        "opt_tp2_z1",
    ],
)
def test_a_real_document_is_written_again_number_for_number(name, shared):
    (file, *_) = sorted(
        (shared / "checkpoints" / name / "step").glob("*mp_rank_00_model_states.pt")
    )
    stored = open_torch_zip(file).value["universal_checkpoint_info"]["affine_map"]
    plain = json.loads(json.dumps(stored, default=list))
    for entry in plain["params"].values():
        for of_rank in entry["ranks"].values():
            # The peer writes empty boxes for empty shards, which say nothing.
            of_rank["pieces"] = [box for box in of_rank["pieces"] if 0 not in box["shape"]]

    assert json.loads(json.dumps(to_affine_maps(from_affine_maps(stored)))) == plain


def placed(*placement, shape=(4, 2, 3)):
    return layouts.experts(shape, mesh={"ep": len(placement)}, placement=placement)


def rows(*placement):
    return [{"rank": rank, "experts": held} for rank, held in enumerate(placement)]


PLACEMENTS = (
    ([0, 1], [2, 3]),
    ([0, 2], [3, 1]),
    ([0, 1, 2], [2, 3]),
    ([0, 1, 2, 3], [0, 1]),
    ([], [3, 2, 1, 0]),
    ([1, 0], [0, 1, 2, 3], [2]),
    ([0, 1, 2, 3],),
)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_placement_is_written_and_read_back(placement):
    layout = placed(*placement)

    stored = deepspeed.to_expert_placement(layout)

    assert [row["experts"] for row in stored["ranks"]] == list(placement)
    assert same_layout(deepspeed.from_expert_placement(stored, (4, 2, 3)), layout)
    expert_map = deepspeed.to_expert_map(layout)
    assert_written_as_it_is(layout, expert_map)
    assert same_layout(from_affine_map(expert_map, layout.mesh), layout)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (layouts.split((4, 6), mesh={"ep": 2}, dim=1), r"shape \(4, 3\)"),
        (layouts.replicated((), mesh={"ep": 2}), "a scalar"),
        (layouts.replicated((4, 3), mesh={"ep": 2}, scale=Fraction(1, 2)), "whole experts"),
    ],
)
def test_what_is_no_placement(layout, words):
    with pytest.raises(UnsupportedError, match=words):
        deepspeed.to_expert_placement(layout)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 2}, UnsupportedError, "version 2"),
        ({"version": "1"}, FormatError, "an integer"),
        ({"num_experts": 5}, CorruptError, "for 5 experts"),
        ({"ep_size": 3}, CorruptError, "3 ranks are to be placed"),
        ({"ranks": []}, CorruptError, "0 entries"),
        ({"ranks": [{"rank": 0, "experts": [0]}] * 2}, CorruptError, "2 entries for ranks"),
        ({"ranks": rows([0, 1, 2], [])}, CorruptError, "expert 3"),
        ({"ranks": rows([0, 1, 2], [3, 3])}, CorruptError, "more than once"),
        ({"ranks": rows([0, 1, 2], [4])}, CorruptError, "there are 4"),
        ({"ranks": [{"rank": 0}, {"rank": 1}]}, FormatError, "has no 'experts'"),
        ({"ranks": [{"rank": 0, "experts": [0], "tp": 1}]}, UnsupportedError, "'tp'"),
        ({"etp": 2}, UnsupportedError, "'etp'"),
    ],
)
def test_a_placement_that_lies(change, error, words):
    stored = {**deepspeed.to_expert_placement(placed([0, 1], [2, 3])), **change}

    with pytest.raises(error, match=words):
        deepspeed.from_expert_placement(stored, (4, 2, 3))


# What DeepSpeed makes of them.

# DeepSpeed does not plan with a scale, nor with shards of other dimensions than the tensor.
UNPLANNED = {"scaled", "replicated", "flat", "flat through rows"}


@pytest.fixture(scope="module")
def affine():
    return pytest.importorskip("deepspeed.checkpoint.affine")


@pytest.mark.interop
@pytest.mark.parametrize("name", KINDS)
def test_deepspeed_reads_proves_extracts_and_rebuilds_what_we_write(name, affine):
    torch = pytest.importorskip("torch")
    layout = KINDS[name]
    stored = to_affine_map(layout)

    theirs = affine.ParamAffineMap.from_dict(stored)

    assert theirs.to_dict() == stored
    theirs.validate_coverage()
    full = torch.arange(layout.full_numel, dtype=torch.float64).reshape(layout.full_shape) + 1
    shards = {}
    for rank in range(layout.rank_count):
        shards[rank] = theirs.extract(full, rank)
        assert torch.equal(shards[rank], extract(layout, full, rank))
    assert torch.equal(theirs.rebuild(shards), full)
    assert torch.equal(rebuild(layout, shards), full)


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(set(KINDS) - UNPLANNED))
def test_deepspeed_plans_with_what_we_write(name, affine):
    planner = pytest.importorskip("deepspeed.checkpoint.affine_transfer")
    layout = KINDS[name]
    theirs = affine.ParamAffineMap.from_dict(to_affine_map(layout))

    plan = planner.plan_transfer(theirs, theirs)

    assert plan.moved_elements == sum(map(layout.shard_numel, range(layout.rank_count)))


BUILT = {
    "replicated": lambda a: a.replicated_map((3, 4), 3),
    "scaled": lambda a: a.replicated_map((3, 4), 4, scale=0.25),
    "split": lambda a: a.contiguous_split_map((7, 7), [3, 0, 4], 0),
    "columns": lambda a: a.contiguous_split_map((7, 7), [3, 0, 4], 1),
    "sub-parameters": lambda a: a.sub_param_map((2, 12, 3), [6, 6], [[4, 2], [3, 3]], 1),
    "segments": lambda a: a.segmented_map((10, 2), [(8, False), (2, True)], 0, 2, [[4, 4]]),
    "blocks": lambda a: a.block_gather_map((8, 3), {0: [3, 0, 1], 1: [2]}, 2, 0),
    "blocks of columns": lambda a: a.block_gather_map((3, 8), {0: [3, 0], 1: [2, 1]}, 2, 1),
}


@pytest.mark.interop
@pytest.mark.parametrize("name", BUILT)
def test_the_maps_of_deepspeeds_builders_come_back_number_for_number(name, affine):
    stored = BUILT[name](affine).to_dict()
    for entry in stored["ranks"].values():
        entry["pieces"] = [box for box in entry["pieces"] if 0 not in box["shape"]]

    written = to_affine_map(from_affine_map(stored))

    assert json.loads(json.dumps(written)) == json.loads(json.dumps(stored))


@pytest.mark.interop
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_deepspeed_makes_the_same_of_a_placement(placement, affine):
    autoep = pytest.importorskip("deepspeed.checkpoint.autoep_affine")
    layout = placed(*placement)

    stored = deepspeed.to_expert_placement(layout)

    assert stored == autoep.make_autoep_placement_descriptor(4, placement)
    theirs = autoep.autoep_placement_to_affine_map(stored, layout.full_shape)
    ours = affine.ParamAffineMap.from_dict(deepspeed.to_expert_map(layout))
    assert ours.to_dict() == theirs.to_dict()
    both = {
        "expert_placement": stored,
        "affine_maps": {"version": 1, "params": {"w1": ours.to_dict()}},
    }
    loaded = autoep.autoep_metadata_to_affine_map(both, layout.full_shape, "w1")
    assert same_layout(from_affine_map(loaded.to_dict(), layout.mesh), layout)
