"""A signature is the same for every way of writing a layout, and for nothing else."""

from __future__ import annotations

import time
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.signature import same_layout, signature
from restride.errors import UnsupportedError
from restride.testing.proofs import (
    random_layout,
    random_wild_layout,
    relation_by_walking,
    rewrite,
    spoil,
)


def meaning(layout):
    """Everything that makes a layout what it is, by walking."""
    shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]
    return layout.full_shape, shapes, layout.unit_bits, relation_by_walking(layout)


@given(st.randoms(use_true_random=False), st.sampled_from([random_layout, random_wild_layout]))
def test_every_way_of_writing_a_layout_has_its_signature(random, draw):
    layout = draw(random)
    other = rewrite(layout, random)

    assert meaning(other) == meaning(layout)
    assert signature(other) == signature(layout)
    assert same_layout(other, layout)


def test_three_thousand_layouts_are_the_same_exactly_when_they_mean_the_same():
    random = Random(6)  # noqa: S311 - repeatable cases, no secrets
    equal = 0
    for _ in range(600):
        layout = random_layout(random, numel=36)
        for _ in range(5):
            other = rewrite(spoil(layout, random), random)

            expected = meaning(other) == meaning(layout)
            assert (signature(other) == signature(layout)) == expected
            assert same_layout(other, layout) == expected
            assert same_layout(layout, other) == expected
            equal += expected

    assert equal < 300  # a mistake seldom changes nothing


def codegen(*pieces):
    return Layout.of({"tp": 2}, (24, 1), [(12, 1)] * 2, pieces)


ONE_PIECE = codegen(
    Piece((Axis(2, 12, 1, 0), Axis(2, 6, 0, 6), Axis(2, 1, 0, 3), Axis(3, 2, 0, 1)))
)


def test_the_piece_of_codegen_equals_its_twenty_four_rows():
    rows = [
        Piece((), 12 * rank + 6 * half + block + 2 * third, rank, 6 * half + 3 * block + third)
        for rank in range(2)
        for half in range(2)
        for block in range(2)
        for third in range(3)
    ]

    assert signature(codegen(*rows)) == signature(ONE_PIECE)
    assert same_layout(codegen(*rows), ONE_PIECE)
    swapped = [replace(rows[0], full_base=2), replace(rows[1], full_base=0), *rows[2:]]
    assert signature(codegen(*swapped)) != signature(ONE_PIECE)
    assert not same_layout(codegen(*swapped), ONE_PIECE)


def test_signatures_are_stable_across_releases():
    assert signature(ONE_PIECE) == "17ef948225468dba2af075b1ce87dd9dbc32b43f"


def test_names_of_mesh_axes_do_not_matter_but_the_number_of_ranks_does():
    renamed = replace(ONE_PIECE, mesh=Mesh((("dp", 1), ("x", 2))))
    larger = replace(
        ONE_PIECE, mesh=Mesh((("tp", 3),)), shard_shapes=(*ONE_PIECE.shard_shapes, (1, (0,)))
    )

    assert signature(renamed) == signature(ONE_PIECE)
    assert same_layout(renamed, ONE_PIECE)
    assert signature(larger) != signature(ONE_PIECE)
    assert not same_layout(larger, ONE_PIECE)


def test_runs_of_shard_shapes_may_be_written_apart():
    apart = replace(ONE_PIECE, shard_shapes=((1, (12, 1)), (1, (12, 1))))

    assert signature(apart) == signature(ONE_PIECE)
    assert same_layout(apart, ONE_PIECE)


PADDED = Layout.of(
    {"dp": 2},
    (6,),
    [(5,)] * 2,
    [Piece((Axis(2, 3, 1, 0), Axis(3, 1, 0, 1)))],
    [Padding((Axis(2, 0, 1, 0), Axis(2, 0, 0, 1)), 0, 3)],
)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(PADDED, full_shape=(2, 3)), id="full shape"),
        pytest.param(replace(PADDED, shard_shapes=((2, (1, 5)),)), id="shard shape"),
        pytest.param(replace(PADDED, unit_bits=4), id="unit"),
        pytest.param(replace(PADDED, padding=()), id="no padding"),
        pytest.param(
            replace(PADDED, padding=(replace(PADDED.padding[0], fill="undefined"),)), id="fill"
        ),
        pytest.param(
            replace(PADDED, all_pieces=(replace(PADDED.all_pieces[0], scale=Fraction(1, 3)),)),
            id="scale",
        ),
        pytest.param(
            replace(PADDED, all_pieces=(replace(PADDED.all_pieces[0], scale=Fraction(-1)),)),
            id="sign",
        ),
        pytest.param(replace(PADDED, all_pieces=PADDED.all_pieces * 2), id="the same piece twice"),
        pytest.param(
            replace(
                PADDED, padding=(), all_pieces=(*PADDED.all_pieces, PADDED.padding[0].as_piece())
            ),
            id="a piece where the padding was",
        ),
    ],
)
def test_each_part_of_a_layout_matters(other):
    assert signature(other) != signature(PADDED)
    assert not same_layout(other, PADDED)
    assert not same_layout(PADDED, other)
    assert same_layout(other, other)


def test_the_scale_belongs_to_its_piece():
    halves = [Piece((Axis(3, 1, 0, 1),)), Piece((Axis(3, 1, 0, 1),), 3, 0, 3)]

    def scaled(*scales):
        pieces = [replace(p, scale=Fraction(s)) for p, s in zip(halves, scales, strict=True)]
        return Layout.of({"tp": 1}, (6,), [(6,)], pieces)

    layouts = [scaled(1, 2), scaled(2, 1), scaled(2, 2), scaled(1, 1)]
    assert len({signature(layout) for layout in layouts}) == 4
    assert [same_layout(layouts[0], other) for other in layouts] == [True, False, False, False]


def test_padding_may_be_written_in_any_way():
    addresses = [Padding((), rank, index) for rank in (1, 0) for index in (4, 3)]
    other = replace(PADDED, padding=tuple(addresses))

    assert signature(other) == signature(PADDED)
    assert same_layout(other, PADDED)


def test_empty_and_scalar_layouts_have_signatures():
    empty = Layout.of({"tp": 2}, (0, 3), [(0, 3)] * 2, [])
    scalar = Layout.of({"tp": 2}, (), [()] * 2, [Piece((Axis(2, 0, 1, 0),))])

    assert len({signature(empty), signature(scalar), signature(ONE_PIECE)}) == 3
    assert same_layout(empty, empty)
    assert not same_layout(empty, scalar)


def columns(width, ranks=1024):
    axes = Axis(ranks, width, 1, 0), Axis(2**30, ranks * width, 0, width), Axis(width, 1, 0, 1)
    return Layout.of({"tp": ranks}, (2**30, ranks * width), [(2**30, width)] * ranks, [Piece(axes)])


def test_two_elements_of_2_to_the_60_that_change_places_are_noticed_in_no_time():
    layout = columns(2**20)
    (piece,) = layout.all_pieces
    ranks, rows, _ = piece.axes
    last = Piece((), 2**60 - 1, 1023, 2**50 - 1)
    before_last = Piece((), 2**60 - 2, 1023, 2**50 - 2)
    rest = [
        Piece((ranks, rows, Axis(2**20 - 2, 1, 0, 1))),
        Piece((replace(ranks, extent=1023), rows, Axis(2, 1, 0, 1)), 2**20 - 2, 0, 2**20 - 2),
        Piece(
            (replace(rows, extent=2**30 - 1), Axis(2, 1, 0, 1)),
            1024 * 2**20 - 2,
            1023,
            2**20 - 2,
        ),
    ]
    swapped = [replace(last, shard_base=2**50 - 2), replace(before_last, shard_base=2**50 - 1)]

    split = replace(layout, all_pieces=(*rest, before_last, last))
    spoiled = replace(layout, all_pieces=(*rest, *swapped))

    assert signature(split) == signature(layout)
    assert same_layout(split, layout)
    assert signature(spoiled) != signature(layout)
    assert not same_layout(spoiled, layout)
    start = time.perf_counter()
    for _ in range(10):
        signature(layout)
    assert time.perf_counter() - start < 0.1


def test_a_tensor_beyond_the_field_has_no_signature():
    far = columns(10**40)

    with pytest.raises(UnsupportedError, match="no signature; stay below"):
        signature(far)
    with pytest.raises(UnsupportedError, match="no signature"):
        same_layout(far, far)


def test_a_scale_of_ten_thousand_digits_is_a_scale_like_any_other():
    large = replace(PADDED.all_pieces[0], scale=Fraction(10**10_000, 3))
    layout = replace(PADDED, all_pieces=(large,))

    assert len(signature(layout)) == 40
    assert same_layout(layout, replace(layout, all_pieces=(replace(large),)))
    assert not same_layout(layout, PADDED)
