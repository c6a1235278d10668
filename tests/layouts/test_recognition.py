"""Recognition: a layout names its family, and the family gives the layout on other ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import layouts
from restride.algebra.canonical import canonicalize
from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.algebra.signature import same_layout
from restride.arrays.extract import extract
from restride.arrays.probe import probe
from restride.deepspeed import from_affine_maps
from restride.errors import RuleError
from restride.layouts.catalogue import CATALOGUE
from restride.layouts.presets import autotp_layouts
from restride.layouts.recognition import rebuild_on, recognize
from restride.storage.torch_zip import open_torch_zip
from restride.testing import strategies
from restride.testing.cuts import read_example


def names_of(layout):
    return {name for found in recognize(layout) for name in (found.name, *found.also)}


def find(layout, name, words=""):
    """The one family called `name` whose text has these words."""
    (found,) = [
        one for one in recognize(layout) if name in (one.name, *one.also) and words in one.text
    ]
    return found


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"zero-flat", "block-gather"}))
def test_every_layout_of_the_catalogue_is_recognized(name):
    layout = CATALOGUE[name].builder(**read_example(CATALOGUE[name]))

    # The example of experts has no matrices, and is cut like a gate and an up projection.
    expected = {"conv1d-column": "split", "experts": "gate-up"}.get(name, name)
    assert expected in names_of(layout)


@pytest.mark.parametrize(
    "name", ["codegen-qkv", "bigcode-qkv", "yuan-value", "gate-up", "phi3-qkv"]
)
def test_a_probed_layout_is_recognized_like_the_one_that_was_built(name):
    """All that is known of it is a function that cuts."""
    layout = CATALOGUE[name].builder(**read_example(CATALOGUE[name]))

    probed = probe(
        lambda full, rank: extract(layout, full, rank), layout.full_shape, mesh=layout.mesh
    ).layout

    assert name in names_of(probed)
    assert [str(found) for found in recognize(probed)] == [str(f) for f in recognize(layout)]


def assert_sound(layout):
    for found in recognize(layout):
        try:
            rebuilt = rebuild_on(found, layout.mesh, axis=found.axis)
        except RuleError:
            assert "listed" in found.text or "at a time" in found.text
            continue
        assert same_layout(rebuilt, layout), found
        assert rebuilt.mesh == layout.mesh


@given(strategies.layouts())
def test_what_is_recognized_means_the_layout(layout):
    assert_sound(layout)


def widths_of(draw, total, ranks):
    cuts = sorted(draw(st.integers(0, total)) for _ in range(ranks - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def cut_layouts(draw):
    ranks = draw(st.integers(2, 5))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 12))
        kind = draw(st.sampled_from(("whole", "any", "heads", "near-even", "chunked", "grain")))
        widths = {
            "whole": lambda: None,
            "any": lambda rows=rows: widths_of(draw, rows, ranks),
            "heads": lambda rows=rows: layouts.autotp_sizes(rows, ranks, heads=3),
            "near-even": lambda rows=rows: layouts.autotp_sizes(rows, ranks),
            "chunked": lambda rows=rows: layouts.chunk_sizes(rows, ranks),
            "grain": lambda rows=rows: layouts.autotp_sizes(rows, ranks, grain=2),
        }[kind]()
        segments.append((rows, widths))
    total = sum(rows for rows, _ in segments)
    dim = draw(st.integers(0, 1))
    shape = (total, 3) if dim == 0 else (2, total)
    mesh = draw(st.sampled_from(({"tp": ranks}, {"dp": 2, "tp": ranks}, {"tp": ranks, "dp": 2})))
    return layouts.segmented(shape, mesh=mesh, segments=segments, dim=dim, axis="tp")


@given(cut_layouts())
def test_segments_are_recognized_and_mean_the_layout(layout):
    assert recognize(layout)
    assert_sound(layout)


def permutation(draw, count, ranks):
    ids = draw(st.permutations(range(count)))
    each = count // ranks
    return [ids[rank * each : (rank + 1) * each] for rank in range(ranks)]


@given(st.data())
def test_a_table_is_recognized_and_means_the_layout(data):
    ranks = data.draw(st.integers(2, 4))
    table = permutation(data.draw, 12 - 12 % ranks, ranks)
    count = sum(map(len, table))
    layout = layouts.experts((count, 2, 3), mesh={"ep": ranks}, placement=table)

    assert "experts" in names_of(layout)
    assert_sound(layout)


TP2, TP3, TP4, TP6 = ({"tp": ranks} for ranks in (2, 3, 4, 6))

REBUILT = [
    ("split", "evenly", {}, lambda m: layouts.split((24, 2), mesh=m), TP2, TP3),
    ("split", "evenly", {}, lambda m: layouts.split((2, 24), mesh=m, dim=1), TP6, TP2),
    (
        "split",
        "evenly",
        {},
        lambda m: layouts.split((7, 2), mesh=m, sizes=layouts.autotp_sizes(7, m["tp"])),
        TP2,
        TP3,
    ),
    (
        "split",
        "heads: 3",
        {},
        lambda m: layouts.split((48, 2), mesh=m, sizes=layouts.autotp_sizes(48, m["tp"], heads=3)),
        TP2,
        TP4,
    ),
    ("chunked", "rounded up", {}, lambda m: layouts.chunked((9, 2), mesh=m), TP4, TP2),
    (
        "split",
        "grain",
        {"grain": 16},
        lambda m: layouts.split(
            (100, 2), mesh=m, sizes=layouts.autotp_sizes(100, m["tp"], grain=16)
        ),
        TP3,
        TP2,
    ),
    ("gate-up", "", {}, lambda m: layouts.gate_up((20, 2), mesh=m), TP2, TP3),
    (
        "glm-qkv",
        "heads",
        {"heads": 4},
        lambda m: layouts.glm_qkv((36, 2), mesh=m, heads=4),
        TP2,
        TP3,
    ),
    (
        "phi3-qkv",
        "heads",
        {"heads": 2},
        lambda m: layouts.phi3_qkv((32, 16), mesh=m, query_heads=4, heads=2),
        TP2,
        TP3,
    ),
    (
        "chatglm-qkv",
        "heads",
        {"heads": 2},
        lambda m: layouts.chatglm_qkv((24, 2), mesh=m, hidden=16),
        TP2,
        TP4,
    ),
    (
        "bigcode-qkv",
        "heads",
        {"heads": 1},
        lambda m: layouts.bigcode_qkv((20, 2), mesh=m, hidden=16, heads=1),
        TP2,
        TP4,
    ),
    (
        "bigcode-qkv",
        "heads: 4",
        {"heads": 4},
        lambda m: layouts.bigcode_qkv((20,), mesh=m, hidden=16, heads=4),
        TP4,
        TP3,
    ),
    (
        "sub-params",
        "evenly",
        {},
        lambda m: layouts.sub_params((12, 2), mesh=m, sizes=[6, 6]),
        TP2,
        TP6,
    ),
    (
        "codegen-qkv",
        "",
        {"heads": 48},
        lambda m: layouts.codegen_qkv((72, 2), mesh=m, heads=48),
        TP2,
        TP3,
    ),
    (
        "codegen-qkv",
        "",
        {"heads": 16},
        lambda m: layouts.codegen_qkv((48, 2), mesh=m, heads=16),
        TP4,
        TP2,
    ),
    (
        "yuan-value",
        "heads: 15",
        {},
        lambda m: layouts.yuan_value((30, 2), mesh=m, heads=15),
        {"tp": 5},
        TP3,
    ),
    (
        "yuan-output",
        "heads",
        {"heads": 24},
        lambda m: layouts.yuan_output((2, 48), mesh=m, heads=24),
        TP2,
        {"tp": 8},
    ),
    ("padded", "", {}, lambda m: layouts.padded((13, 2), mesh=m, rows=24), TP4, TP6),
    (
        "padded",
        "undefined",
        {},
        lambda m: layouts.padded((2, 5), mesh=m, rows=12, dim=1, fill="undefined"),
        TP4,
        TP3,
    ),
    ("flat-chunks", "", {}, lambda m: layouts.flat_chunks((5, 2), mesh=m), TP4, TP3),
    ("flat-chunks", "", {}, lambda m: layouts.flat_chunks((4, 3), mesh=m), TP4, {"tp": 5}),
    ("flat-chunks", "", {}, lambda m: layouts.flat_chunks((7,), mesh=m), TP4, TP3),
    ("conv1d-row", "evenly", {}, lambda m: layouts.conv1d_row((12, 12), mesh=m), TP2, TP3),
    (
        "transposed",
        "heads: 3",
        {},
        lambda m: layouts.conv1d_row((12, 12), mesh=m, heads=3),
        TP2,
        TP4,
    ),
    ("experts", "", {}, lambda m: layouts.experts((12, 2, 3), mesh=m), TP2, TP6),
    ("replicated", "", {}, lambda m: layouts.replicated((4, 2), mesh=m), TP2, TP3),
    (
        "replicated",
        "times -2",
        {},
        lambda m: layouts.replicated((4,), mesh=m, scale=-2),
        TP2,
        TP3,
    ),
    (
        "replicated",
        "divided",
        {},
        lambda m: layouts.yuan_output((4,), mesh=m, heads=12),
        TP2,
        TP3,
    ),
]


@pytest.mark.parametrize(
    ("name", "words", "numbers", "build", "source", "target"),
    REBUILT,
    ids=[f"{name} {words}".strip() for name, words, *_ in REBUILT],
)
def test_a_family_is_built_on_other_ranks(name, words, numbers, build, source, target):
    found = find(build(source), name, words)

    assert same_layout(rebuild_on(found, target, **numbers), build(target))
    # And back.
    back = find(build(target), name, words.partition(":")[0])
    assert same_layout(rebuild_on(back, source, **numbers), build(source))


@pytest.mark.parametrize(("name", "words", "build", "source"), [(*r[:2], *r[3:5]) for r in REBUILT])
def test_one_rank_holds_the_whole(name, words, build, source):
    layout = build(source)
    if name in {"padded", "flat-chunks"} or not layout.is_exact:
        return
    one = rebuild_on(find(layout, name, words), {"tp": 1})

    if name in {"transposed", "conv1d-row"}:
        expected = layouts.transposed(layouts.replicated(layout.full_shape[::-1], mesh={"tp": 1}))
    else:
        expected = layouts.replicated(layout.full_shape, mesh={"tp": 1})
    assert same_layout(one, expected)


def test_the_cut_axis_is_found_and_named_on_the_new_mesh():
    layout = layouts.split((8, 3), mesh={"pp": 2, "tp": 4}, axis="tp")
    found = find(layout, "split", "evenly")

    assert found.axis == "tp"
    assert same_layout(
        rebuild_on(found, {"tp": 2, "dp": 3}), layouts.split((8, 3), mesh="tp=2,dp=3", axis="tp")
    )
    assert same_layout(rebuild_on(found, {"ep": 2}), layouts.split((8, 3), mesh="ep=2"))
    with pytest.raises(RuleError, match="none is named"):
        rebuild_on(found, {"ep": 2, "dp": 2})


def test_families_that_fit_are_all_named_with_what_tells_them_apart():
    even = layouts.split((6, 2), mesh=TP3)

    found = recognize(even)

    assert [one.text for one in found] == [
        "split of dimension 0 evenly",
        "split of dimension 0 by heads: 3",
        "chunked of dimension 0 rounded up",
    ]
    assert all(one.apart and one.apart in str(one) for one in found)
    assert recognize(layouts.replicated((2,), mesh=TP2))[0].apart == ""


def test_units_are_kept():
    packed = replace(layouts.split((8, 2), mesh=TP2), unit_bits=4)

    found = find(packed, "split", "evenly")

    assert rebuild_on(found, TP4) == replace(layouts.split((8, 2), mesh=TP4), unit_bits=4)


def test_what_is_no_family_is_not_named():
    pieces = [Piece((Axis(4, 3, 0, 1),)), Piece((Axis(4, 3, 0, 1),), 1, 0, 4)]
    odd = Layout.of({"tp": 2}, (12,), [(8,), (4,)], [*pieces, Piece((Axis(4, 3, 0, 1),), 2, 1)])
    scales = [Piece((Axis(2, 1, 0, 1),)), Piece((Axis(2, 1, 0, 1),), 2, 0, 2, Fraction(2))]
    mixed = Layout.of({"tp": 1}, (4,), [(4,)], scales)

    assert [one.text for one in recognize(odd)] == ["experts of 12 blocks by a table"]
    assert recognize(mixed) == ()
    assert recognize(layouts.replicated((0, 3), mesh=TP2))[0].name == "replicated"


def test_the_way_in_which_a_layout_is_written_does_not_matter():
    layout = layouts.codegen_qkv((48, 2), mesh=TP2, heads=8)
    concrete = replace(
        layout, all_pieces=tuple(piece for rank in range(2) for piece in layout.pieces(rank))
    )
    assert concrete != layout
    assert recognize(concrete) == recognize(layout) == recognize(canonicalize(layout))


@pytest.mark.parametrize(
    ("build", "name", "words", "target", "numbers", "message"),
    [
        (
            lambda: layouts.codegen_qkv((48, 2), mesh=TP2, heads=8),
            "codegen-qkv",
            "",
            TP4,
            {},
            "codegen-qkv: heads is known to be a multiple of 8, and 4 ranks need a multiple of 16",
        ),
        (
            lambda: layouts.codegen_qkv((48, 2), mesh=TP2, heads=8),
            "codegen-qkv",
            "",
            TP4,
            {"heads": 8},
            "8 heads are no multiple of 4 * 4 ranks",
        ),
        (
            lambda: layouts.codegen_qkv((48, 2), mesh=TP2, heads=8),
            "codegen-qkv",
            "",
            TP4,
            {"heads": 12},
            "12 heads are no multiple of 8, as here",
        ),
        (
            lambda: layouts.split((48, 2), mesh=TP2),
            "split",
            "heads",
            TP4,
            {},
            "heads may be 2, 4, 6, 8, 12, 16 or 1 more, which are cut differently over 4 ranks",
        ),
        (
            lambda: layouts.split((48, 2), mesh=TP2),
            "split",
            "heads",
            TP4,
            {"heads": 5},
            "5 heads do not give this layout; possible are 2, 4",
        ),
        (
            lambda: layouts.split((48, 2), mesh=TP2),
            "split",
            "evenly",
            TP4,
            {"heads": 4},
            "does not depend on heads",
        ),
        (
            lambda: layouts.split((48, 2), mesh=TP2, sizes=[11, 37]),
            "split",
            "listed",
            TP4,
            {},
            "split: the widths follow no rule that is known",
        ),
        (
            lambda: layouts.split((100, 2), mesh=TP3, sizes=[32, 32, 36]),
            "split",
            "grain",
            TP2,
            {},
            "grain may be 8, 16, 32, which are cut differently over 2 ranks; pass grain=",
        ),
        (
            lambda: layouts.padded((13, 2), mesh=TP4, rows=16),
            "padded",
            "",
            TP3,
            {},
            "padded: 16 padded rows do not cut into 3 equal parts; pad the 13 rows anew",
        ),
        (
            lambda: layouts.flat_chunks((5, 2), mesh=TP2, alignment=8),
            "flat-chunks",
            "8 elements",
            TP4,
            {},
            "by an alignment that the layout does not say",
        ),
        (
            lambda: layouts.experts((4, 2, 2), mesh={"ep": 2}, placement=[[0, 2], [1, 3]]),
            "experts",
            "",
            {"ep": 4},
            {},
            "a table of 4 blocks on 2 ranks does not say how they are placed on 4",
        ),
        (
            lambda: layouts.yuan_value((48, 2), mesh=TP2, heads=8),
            "yuan-value",
            "",
            TP4,
            {},
            "heads may be 4, 8, 12, 16, 24, 48, which are cut differently over 4 ranks",
        ),
        (
            lambda: layouts.yuan_value((48, 2), mesh=TP2, heads=8),
            "yuan-value",
            "",
            TP3,
            {"heads": 8},
            "3 ranks do not divide 8 value heads",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(
    build, name, words, target, numbers, message
):
    found = find(build(), name, words)

    with pytest.raises(RuleError) as caught:
        rebuild_on(found, target, **numbers)
    assert message in str(caught.value)


def test_recognition_does_not_walk_a_large_tensor():
    large = layouts.bigcode_qkv((2**24 + 2**10, 2**24), mesh={"tp": 8}, hidden=2**24)

    assert "bigcode-qkv" in names_of(large)
    assert "split" in names_of(layouts.split((2**40, 2**20), mesh={"tp": 512}, dim=1))
    assert "codegen-qkv" in names_of(
        layouts.codegen_qkv((96 * 2**20, 2**20), mesh={"tp": 8}, heads=32)
    )


CHECKPOINTS = {
    "bloom_tp2_z1": ({"model_type": "bloom", "n_head": 8}, None),
    "codegen_fused_tp2_z1": ({"model_type": "codegen", "n_head": 16}, False),
    "codegen_rowcut_tp2_z1": ({"model_type": "codegen", "n_head": 8}, True),
    "gptbigcode_tp2_z1": ({"model_type": "gpt_bigcode", "n_head": 8, "n_embd": 64}, None),
    "llama_unevenkv_tp2_z1": (
        {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3},
        None,
    ),
    "mixtral_tp2_z1": (
        {"model_type": "mixtral", "num_attention_heads": 8, "num_key_value_heads": 4},
        None,
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_maps_of_real_checkpoints_are_built_on_other_ranks(name, ranks, shared):
    """One of the families that fit is what AutoTP itself would cut there."""
    (file, *_) = sorted(
        (shared / "checkpoints" / name / "step").glob("*mp_rank_00_model_states.pt")
    )
    stored = from_affine_maps(open_torch_zip(file).value["universal_checkpoint_info"]["affine_map"])
    config, plan = CHECKPOINTS[name]
    config["tie_word_embeddings"] = name.startswith(("bloom", "gptbigcode"))
    shapes = {key: layout.full_shape for key, layout in stored.items()}
    if name == "codegen_fused_tp2_z1" and ranks == 3:
        # The framework has no cut of sixteen heads for three ranks, and neither have we.
        with pytest.raises(RuleError):
            autotp_layouts(config, shapes, mesh={"tp": ranks}, plan=plan)
        return
    wanted = autotp_layouts(config, shapes, mesh={"tp": ranks}, plan=plan)
    heads = config.get("num_key_value_heads") or (
        1 if config["model_type"] == "gpt_bigcode" else config["n_head"]
    )

    for key, layout in stored.items():
        built = []
        for found in recognize(layout):
            takes_heads = found.family.takes == "heads"
            try:
                built.append(rebuild_on(found, {"tp": ranks}, heads=heads if takes_heads else None))
            except RuleError:
                continue
        assert any(same_layout(one, wanted[key]) for one in built), key
