"""Composition of layouts against walking, against isl, and against the counts of real layouts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import prod

import islpy
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.algebra.compose import chain, compose
from restride.algebra.intersect import intersect
from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh, as_mesh
from restride.algebra.piece import Axis, Piece
from restride.algebra.transfer import Transfer, TransferAxis
from restride.algebra.walks import Walk, join
from restride.errors import LayoutError, ShapeMismatchError, UnsupportedError
from restride.layouts import bigcode_qkv, codegen_qkv, replicated, split, sub_params
from restride.testing.oracles import (
    chain_by_walking,
    compose_by_walking,
    walk_padding,
    walk_piece,
    walk_relation,
    walk_transfers,
)
from restride.testing.strategies import layout_pairs, layouts, pieces, wild_layouts

WIDTH = 24
UNEVEN = (1, 0, 300, 67, 400)


def codegen(ranks, hidden=256):
    return codegen_qkv((3 * hidden, WIDTH), mesh={"tp": ranks}, heads=hidden // 8)


def rows(ranks, hidden):
    return split((3 * hidden, WIDTH), mesh={"tp": ranks})


def columns(ranks, hidden):
    return split((3 * hidden, WIDTH), mesh={"tp": ranks}, dim=1)


def fused(ranks, hidden):
    return sub_params((3 * hidden, WIDTH), mesh={"tp": ranks}, sizes=[hidden] * 3)


def bigcode(ranks, hidden):
    return bigcode_qkv((hidden + 128, WIDTH), mesh={"tp": ranks}, heads=hidden // 64, hidden=hidden)


@st.composite
def wild_pairs(draw):
    """Two layouts of any pieces, of one tensor."""
    pair = [draw(wild_layouts(most_pieces=2)) for _ in range(2)]
    shape = (max(layout.full_numel for layout in pair),)
    return tuple(replace(layout, full_shape=shape) for layout in pair)


@given(layout_pairs() | wild_pairs())
def test_a_composition_is_every_pair_of_holders_of_an_element_once(pair):
    target, source = pair

    transfers = compose(target, source)

    moved = walk_transfers(transfers.descriptors)
    event(f"several scales: {len({transfer.scale for transfer in transfers.descriptors}) > 1}")
    event(f"fewer descriptors than elements: {len(transfers.descriptors) < moved.total()}")
    assert moved == compose_by_walking(target, source)
    assert transfers.numel == moved.total()
    assert (transfers.target, transfers.source) == (target, source)


@given(layout_pairs())
def test_moving_back_is_the_same_relation_turned_round(pair):
    target, source = pair

    back = walk_transfers(compose(source, target).descriptors)

    assert walk_transfers(compose(target, source).descriptors) == Counter(
        {(full, a, b, c, d, 1 / scale): n for (full, c, d, a, b, scale), n in back.items()}
    )


@given(layouts(with_padding=False))
def test_a_layout_composed_with_itself_leaves_every_element_where_it_is(layout):
    moved = walk_transfers(compose(layout, layout).descriptors)

    stayed = Counter(
        {
            (full, rank, shard, rank, shard, Fraction(1)): count
            for (full, rank, shard, _), count in walk_relation(layout).items()
        }
    )
    assert not stayed - moved


@given(layout_pairs() | wild_pairs())
def test_fixing_ranks_selects_their_part_of_the_transfers(pair):
    target, source = pair
    transfers = compose(target, source)
    moved = walk_transfers(transfers.descriptors)

    for rank in range(target.rank_count):
        part = transfers.at_target(rank)
        assert not any(axis.target_rank_stride for each in part for axis in each.axes)
        assert walk_transfers(part) == select(moved, 3, rank)
    for rank in range(source.rank_count):
        part = transfers.at_source(rank)
        assert not any(axis.source_rank_stride for each in part for axis in each.axes)
        assert walk_transfers(part) == select(moved, 1, rank)
    last = source.rank_count - 1, target.rank_count - 1
    assert walk_transfers(transfers.between(*last)) == select(select(moved, 1, last[0]), 3, last[1])


def select(moved, place, rank):
    return Counter({move: count for move, count in moved.items() if move[place] == rank})


@given(pieces(), pieces())
def test_pieces_intersect_where_they_visit_the_same_element(target, source):
    expected = Counter(
        (full, *holder, *wanted, target.scale / source.scale)
        for full, *wanted in walk_piece(target)
        for other, *holder in walk_piece(source)
        if other == full
    )

    assert walk_transfers(intersect(target, source)) == expected


def isl_map(loops, bases, names):
    """The relation {[first address] -> [other addresses]} of a walk, as isl reads it."""
    steps = [f"x{number}" for number in range(len(loops))]
    terms = [f"0 <= {step} < {loop[0]}" for step, loop in zip(steps, loops, strict=True)]
    for place, name in enumerate(names):
        moves = [f"{loop[1 + place]}*{step}" for step, loop in zip(steps, loops, strict=True)]
        terms.append(f"{name} = {' + '.join([str(bases[place]), *moves])}")
    text = " and ".join(terms)
    if steps:
        text = f"exists {', '.join(steps)} : {text}"
    return islpy.Map(f"{{ [{names[0]}] -> [{', '.join(names[1:])}] : {text} }}")


def isl_map_of_piece(piece):
    loops = [(a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in piece.axes]
    return isl_map(loops, (piece.full_base, piece.rank_base, piece.shard_base), ("f", "r", "s"))


def isl_map_of_transfer(transfer):
    walk = transfer.as_walk()
    return isl_map(walk.digits, walk.bases, ("f", "a", "b", "c", "d"))


def isl_union(transfers):
    union = islpy.Map("{ [f] -> [a, b, c, d] : false }")
    for transfer in transfers:
        union = union.union(isl_map_of_transfer(transfer))
    return union


@settings(max_examples=30)
@given(pieces(most_axes=3), pieces(most_axes=3))
def test_isl_finds_the_same_common_elements_of_two_pieces(target, source):
    """The Integer Set Library decides Presburger arithmetic: it shares no idea with our method."""
    both = isl_map_of_piece(source).flat_range_product(isl_map_of_piece(target))

    found = isl_union(intersect(target, source))

    event(f"nothing in common: {both.is_empty()}")
    assert found.is_equal(both)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (codegen(8), codegen(2)),
        (split((768, WIDTH), mesh={"tp": 3}), codegen(2)),
        (
            split((768, WIDTH), mesh={"tp": 4}, dim=1),
            split((768, WIDTH), mesh={"tp": 5}, sizes=UNEVEN),
        ),
    ],
    ids=["codegen 2 to 8", "codegen 2 to rows 3", "uneven rows 5 to columns 4"],
)
def test_isl_finds_the_same_moves_between_real_layouts(target, source):
    """More elements than one would walk: 18432 each."""
    both = islpy.Map("{ [f] -> [a, b, c, d] : false }")
    for wanted in target.all_pieces:
        for there in source.all_pieces:
            pair = isl_map_of_piece(there).flat_range_product(isl_map_of_piece(wanted))
            both = both.union(pair)

    assert isl_union(compose(target, source).descriptors).is_equal(both)


def test_replicas_and_scales_of_both_sides_are_all_there():
    """Element 1, held by two source ranks at a third, wanted twice by one rank at a half."""
    axis = Axis(2, 0, 1, 0)
    source = Layout.of({"dp": 2}, (2,), [(1,)] * 2, [Piece((axis,), 1, scale=Fraction(1, 3))])
    twice = Piece((Axis(2, 0, 0, 4),), 1, 0, 3, Fraction(1, 2))
    target = Layout.of({"tp": 1}, (2,), [(8,)], [twice])

    transfers = compose(target, source)

    scale = Fraction(3, 2)
    assert transfers.descriptors == (
        Transfer(
            (TransferAxis(2, 0, 1, 0, 0, 0), TransferAxis(2, 0, 0, 0, 0, 4)), 1, 0, 0, 0, 3, scale
        ),
    )
    assert walk_transfers(transfers.between(1, 0)) == Counter(
        {(1, 1, 0, 0, 3, scale): 1, (1, 1, 0, 0, 7, scale): 1}
    )


COUNTS = {
    "codegen 2 to 4": (1, lambda hidden: (codegen(2, hidden), codegen(4, hidden))),
    "codegen 4 to 2": (1, lambda hidden: (codegen(4, hidden), codegen(2, hidden))),
    "codegen 2 to 8": (1, lambda hidden: (codegen(2, hidden), codegen(8, hidden))),
    "codegen 8 to 2": (1, lambda hidden: (codegen(8, hidden), codegen(2, hidden))),
    "codegen 4 to 8": (1, lambda hidden: (codegen(4, hidden), codegen(8, hidden))),
    "codegen 8 to 4": (1, lambda hidden: (codegen(8, hidden), codegen(4, hidden))),
    "codegen 16 to 48": (5, lambda hidden: (codegen(16, hidden), codegen(48, hidden))),
    "codegen 4 to columns 3": (1, lambda hidden: (codegen(4, hidden), columns(3, hidden))),
    "codegen 4 to rows 3": (6, lambda hidden: (codegen(4, hidden), rows(3, hidden))),
    "rows 8 to columns 3": (1, lambda hidden: (rows(8, hidden), columns(3, hidden))),
    "fused 64 to 48": (6, lambda hidden: (fused(64, hidden), fused(48, hidden))),
    "fused 512 to 384": (6, lambda hidden: (fused(512, hidden), fused(384, hidden))),
    "bigcode 2 to 4": (2, lambda hidden: (bigcode(2, hidden), bigcode(4, hidden))),
}


@pytest.mark.parametrize("case", COUNTS)
def test_a_few_descriptors_move_all_ranks_of_any_hidden_size(case):
    """The figures of the prototypes; the peer needs 44 segments for CodeGen 2 to 4."""
    count, make = COUNTS[case]

    for hidden in (1536, 3072, 24576):
        source, target = make(hidden)
        assert len(compose(target, source).descriptors) == count


@pytest.mark.parametrize(
    ("source", "target", "is_split"),
    [
        ((9, 7), (11, 5), True),
        ((7, 11), (5, 13), False),
        ((9, 7), (5, 1), False),
        ((9, 7), (3, 97), False),
    ],
    ids=["one target rank at a time", "all ranks at once", "one target rank", "too many ranks"],
)
def test_radices_that_do_not_divide_give_the_same_relation_with_fewer_descriptors(
    source, target, is_split
):
    """Cyclic blocks of a length over a number of ranks."""
    numel = prod((*source, *target))
    there, wanted = (cyclic(numel, *blocks) for blocks in (source, target))

    transfers = compose(wanted, there)

    assert walk_transfers(transfers.descriptors) == compose_by_walking(wanted, there)
    pair = wanted.all_pieces[0], there.all_pieces[0]
    jointly = join(*(walk_by_full(piece) for piece in reversed(pair)), pure=((1, 2), (3, 4)))
    assert (len(transfers.descriptors) < len(jointly)) == is_split


def cyclic(numel, block, ranks):
    rounds = numel // (block * ranks)
    loops = Axis(rounds, block * ranks, 0, block), Axis(block, 1, 0, 1)
    over = (Axis(ranks, block, 1, 0),) if ranks > 1 else ()
    piece = Piece((*over, *loops))
    return Layout.of({"cp": ranks}, (numel,), [(numel // ranks,)] * ranks, [piece])


def walk_by_full(piece):
    loops = [(a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in piece.axes]
    return Walk((piece.full_base, piece.rank_base, piece.shard_base), tuple(loops))


def test_tensors_of_different_shape_do_not_compose():
    with pytest.raises(ShapeMismatchError) as caught:
        compose(replicated((4, 2), mesh="tp=1"), replicated((2, 4), mesh="tp=1"))

    assert str(caught.value) == (
        "the target is a layout of shape (4, 2), the source of shape (2, 4)"
    )


def test_elements_and_packed_units_do_not_compose():
    whole = replicated((4,), mesh="tp=1")

    with pytest.raises(ShapeMismatchError) as caught:
        compose(replace(whole, unit_bits=4), whole)

    assert "units of 4 bits, the source of None" in str(caught.value)


@st.composite
def chains(draw):
    """An outer layout, an inner one for each of its ranks, and the strides of both."""
    outer = draw(layouts())
    parts = draw(st.integers(1, 3))
    inner = {
        rank: draw(layouts((outer.shard_numel(rank),), ranks=parts))
        for rank in range(outer.rank_count)
    }
    return outer, inner, draw(st.sampled_from(((1, outer.rank_count), (parts, 1))))


@given(chains())
def test_chaining_is_cutting_the_shards_once_more(drawn):
    outer, inner, (outer_stride, inner_stride) = drawn
    parts = inner[0].rank_count
    mesh = Mesh((("zero", parts), ("tp", outer.rank_count)))

    both = chain(outer, inner, mesh=mesh, outer_stride=outer_stride, inner_stride=inner_stride)

    relation, padding = chain_by_walking(
        outer, inner, outer_stride=outer_stride, inner_stride=inner_stride
    )
    event(f"padding: {bool(padding)}")
    assert walk_relation(both) == relation
    assert walk_padding(both) == padding
    assert both.full_shape == outer.full_shape
    for rank, layout in inner.items():
        for part in range(parts):
            holder = rank * outer_stride + part * inner_stride
            assert both.shard_shape(holder) == layout.shard_shape(part)


@given(st.data())
def test_one_inner_layout_for_all_is_the_same_as_one_for_each(data):
    outer = data.draw(
        layouts().filter(lambda one: len({prod(shape) for _, shape in one.shard_shapes}) == 1)
    )
    inner = data.draw(layouts((outer.shard_numel(0),)))
    mesh = Mesh((("zero", inner.rank_count), ("tp", outer.rank_count)))

    both = chain(outer, inner, mesh=mesh)

    each = dict.fromkeys(range(outer.rank_count), inner)
    relation, padding = chain_by_walking(outer, each, outer_stride=1, inner_stride=outer.rank_count)
    event(f"several outer ranks: {outer.rank_count > 1}")
    event(f"padding of the inner layout: {bool(inner.padding)}")
    assert walk_relation(both) == relation
    assert walk_padding(both) == padding
    assert chain(outer, each, mesh=mesh) == both


def test_zero_over_tensor_parallel_is_one_piece_for_all_ranks():
    """Columns of a 4 x 6 tensor over two ranks, then each flattened shard over three."""
    columns_of = split((4, 6), mesh={"tp": 2}, dim=1)
    thirds = split((12,), mesh={"zero": 3})

    both = chain(columns_of, thirds, mesh=as_mesh("zero=3,tp=2"))

    shards = {}
    for full, rank, place, _ in sorted(walk_relation(both), key=lambda held: held[2]):
        shards.setdefault(rank, []).append(full)
        assert len(shards[rank]) == place + 1
    assert shards[0] == [0, 1, 2, 6]
    assert shards[1] == [3, 4, 5, 9]
    assert shards[5] == [17, 21, 22, 23]


@pytest.mark.parametrize(("outer_stride", "inner_stride"), [(1, 2), (3, 1)])
def test_parts_that_recur_on_other_ranks_become_one_piece_over_them(outer_stride, inner_stride):
    """Shards of two rows of three: the first and the last part are within a row, the middle not."""
    both = chain(
        split((2, 6), mesh={"tp": 2}, dim=1),
        split((6,), mesh={"zero": 3}),
        mesh=as_mesh("a=3,b=2"),
        outer_stride=outer_stride,
        inner_stride=inner_stride,
    )

    over_tp, recurring = Axis(2, 3, outer_stride, 0), Axis(2, 7, 2 * inner_stride, 0)
    rank_axes = sorted((over_tp, recurring), key=lambda axis: -axis.rank_stride)
    assert both.all_pieces == (
        Piece((*rank_axes, Axis(2, 1, 0, 1)), 0, 0, 0),
        Piece((over_tp, Axis(2, 4, 0, 1)), 2, inner_stride, 0),
    )


def test_padding_of_one_inner_layout_is_padding_on_every_outer_rank():
    """Two shards of 3, each cut in two parts of 2, the last one padded."""
    halves = [Piece((Axis(2, 1, 0, 1),)), Piece((), 2, 1)]
    inner = Layout.of({"zero": 2}, (3,), [(2,)] * 2, halves, [Padding((), 1, 1)])

    both = chain(split((6,), mesh={"tp": 2}), inner, mesh=as_mesh("zero=2,tp=2"))

    assert walk_padding(both) == Counter({(2, 1, "zero"): 1, (3, 1, "zero"): 1})


def test_padding_of_both_cuts_is_padding_of_the_chain():
    """3 elements and one padded; cut in two parts of 2, each padded to 3."""
    outer = Layout.of(
        {"tp": 1}, (3,), [(4,)], [Piece((Axis(3, 1, 0, 1),))], [Padding((), 0, 3, "undefined")]
    )
    halves = Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)), shard_base=1)
    inner = Layout.of({"zero": 2}, (4,), [(3,)] * 2, [halves], [Padding((Axis(2, 0, 1, 0),))])

    both = chain(outer, inner, mesh=as_mesh("zero=2"))

    assert walk_padding(both) == Counter(
        {(0, 0, "zero"): 1, (1, 0, "zero"): 1, (1, 2, "undefined"): 1}
    )


@pytest.mark.parametrize(
    ("inner", "options", "problem"),
    [
        (
            split((6,), mesh="zero=2"),
            {},
            "outer rank 0 holds 12 elements, its inner layout describes 6",
        ),
        (
            {0: split((12,), mesh="zero=2"), 1: split((6,), mesh="zero=2")},
            {},
            "outer rank 1 holds 12 elements, its inner layout describes 6",
        ),
        (
            {0: split((12,), mesh="zero=2")},
            {},
            "no layout says how the shard of outer rank 1 is cut",
        ),
        (
            split((12,), mesh="zero=3"),
            {},
            "2 outer ranks in steps of 1 with inner ranks in steps of 2 do not fill the mesh zero",
        ),
        (
            replace(split((12,), mesh="zero=2"), unit_bits=4),
            {},
            "the outer layout counts units of None bits, the inner one of rank 0 of 4",
        ),
        (
            split((12,), mesh="zero=2"),
            {"outer_stride": 2},
            "2 outer ranks in steps of 2 with inner",
        ),
        (
            split((12,), mesh="zero=2"),
            {"inner_stride": 1},
            "2 outer ranks in steps of 1 with inner",
        ),
        (
            {0: split((12,), mesh="zero=2"), 1: split((12,), mesh="zero=1")},
            {},
            "2 outer ranks in steps of 1 with inner ranks in steps of 2 do not fill the mesh",
        ),
    ],
)
def test_cuts_that_do_not_fit_are_not_chained(inner, options, problem):
    outer = split((4, 6), mesh={"tp": 2}, dim=1)

    with pytest.raises(LayoutError) as caught:
        chain(outer, inner, mesh=as_mesh("zero=2,tp=2"), **options)

    assert str(caught.value).startswith(problem)


def test_pieces_that_all_lie_in_one_place_are_not_matched_for_days(monkeypatch):
    monkeypatch.setattr("restride.algebra.compose._MOST_PAIRS", 99)
    piece = Piece((Axis(4, 1, 0, 1),))
    few, many = (Layout.of({"tp": 1}, (4,), [(4,)], [piece] * count) for count in (9, 12))

    assert compose(few, few).descriptors
    with pytest.raises(
        UnsupportedError, match=r"12 pieces .* 9 of the other .* more than 99 pairs"
    ):
        compose(many, few)
