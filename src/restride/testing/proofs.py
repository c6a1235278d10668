"""Random layouts that are whole by construction, ways to spoil them, and proofs by walking.

Everything draws from a `random.Random`. Hand in hypothesis' own (`st.randoms()`) to have failures
shrunk, or a seeded one to run thousands of cases.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from restride.algebra.coverage import Covered, Gap, Hole, Overlap, Writer
from restride.algebra.layout import Layout, Padding, shape_runs
from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from random import Random

    from restride.algebra.coverage import Verdict

__all__ = [
    "holders_by_walking",
    "random_layout",
    "random_wild_layout",
    "relation_by_walking",
    "rewrite",
    "spoil",
    "tags_by_walking",
    "verdict_by_walking",
]

Step: TypeAlias = tuple[int, int, int]


def walk(piece: Piece) -> Iterator[Step]:
    """Yield (full, rank, shard) of each step, in walk order."""
    for steps in product(*(range(axis.extent) for axis in piece.axes)):
        moved = list(zip(steps, piece.axes, strict=True))
        yield (
            piece.full_base + sum(step * axis.full_stride for step, axis in moved),
            piece.rank_base + sum(step * axis.rank_stride for step, axis in moved),
            piece.shard_base + sum(step * axis.shard_stride for step, axis in moved),
        )


def relation_by_walking(layout: Layout) -> Counter[tuple[object, ...]]:
    """Everything that a layout means: its steps and its padding, each with its multiplicity."""
    relation: Counter[tuple[object, ...]] = Counter()
    for piece in layout.all_pieces:
        relation.update((*step, piece.scale) for step in walk(piece))
    for padding in layout.padding:
        relation.update((*step[1:], padding.fill) for step in walk(padding.as_piece()))
    return relation


def verdict_by_walking(layout: Layout, *, side: str = "both") -> Verdict:
    """What `prove` must return, apart from the method of a `Covered`."""
    if side != "shard":
        held = {full for piece in layout.all_pieces for full, _, _ in walk(piece)}
        missing = [full for full in range(layout.full_numel) if full not in held]
        if missing:
            return Hole(missing[0], _coordinates(missing[0], layout.full_shape), len(missing))
    total = 0
    if side != "full":
        writers: dict[tuple[int, int], list[Writer]] = {}
        for kind, pieces in (
            ("piece", layout.all_pieces),
            ("padding", [padding.as_piece() for padding in layout.padding]),
        ):
            for number, piece in enumerate(pieces):
                for _, rank, shard in walk(piece):
                    writers.setdefault((rank, shard), []).append(Writer(kind, number))  # type: ignore[arg-type]
        addresses = [
            (rank, shard)
            for rank in range(layout.rank_count)
            for shard in range(layout.shard_numel(rank))
        ]
        total = len(addresses)
        faults = [address for address in addresses if len(writers.get(address, [])) != 1]
        if faults:
            gaps = [address for address in faults if address not in writers]
            if faults[0] not in writers:
                return Gap(*faults[0], len(gaps))
            first, second = writers[faults[0]][:2]
            return Overlap(*faults[0], first, second, len(faults) - len(gaps))
    return Covered(
        None if side == "shard" else layout.full_numel, None if side == "full" else total
    )


def holders_by_walking(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Ranks that hold each held element, sorted."""
    ranks: dict[int, set[int]] = {}
    for piece in layout.all_pieces:
        for full, rank, _ in walk(piece):
            ranks.setdefault(full, set()).add(rank)
    return {full: tuple(sorted(held_by)) for full, held_by in ranks.items()}


def tags_by_walking(
    walks: Iterable[tuple[int, Iterable[tuple[int, int]], int]],
) -> dict[int, Counter[int]]:
    """How often each tag stands on each address; what `sweep` says up to two."""
    tags: dict[int, Counter[int]] = {}
    for base, digits, tag in walks:
        digits = list(digits)  # noqa: PLW2901 - read twice
        for steps in product(*(range(extent) for extent, _ in digits)):
            address = base + sum(
                step * stride for step, (_, stride) in zip(steps, digits, strict=True)
            )
            tags.setdefault(address, Counter())[tag] += 1
    return tags


def random_layout(random: Random, *, numel: int = 48) -> Layout:
    """Draw a layout that is whole: every element held, every shard address written once.

    Splits, permutations, replicas (cut in the same way or differently), padding, duplicates inside
    a shard, uneven shards and empty shards all occur, in any way of writing.
    """
    draft = _draft(random, numel, depth=2)
    if random.random() < 0.3:
        draft = _padded(draft, random)
    shapes = [_shape(random, numel) for numel in draft.shards]
    layout = Layout.of(
        {"rank": len(shapes)},
        _shape(random, draft.full),
        shapes,
        draft.pieces,
        draft.padding,
    )
    return rewrite(layout, random)


def random_wild_layout(random: Random) -> Layout:
    """Draw a layout of any pieces that fit: loops over each other, holes, duplicates."""
    full, ranks, shard = random.randint(1, 40), random.randint(1, 4), random.randint(1, 24)
    pieces = []
    for _ in range(random.randint(0, 5)):
        axes = []
        for _ in range(random.randint(0, 4)):
            on_ranks = random.random() < 0.3
            axes.append(
                Axis(
                    random.randint(2, 4),
                    random.choice([0, 1, 1, 2, 3, 4, 6, 8] + [-1, -3] * on_ranks),
                    random.randint(1, 2) if on_ranks else 0,
                    0 if on_ranks else random.choice([1, 1, 2, 3, 4, 6]),
                )
            )
        low = -sum(min(0, axis.full_stride) * (axis.extent - 1) for axis in axes)
        piece = Piece(tuple(axes), low + random.randint(0, full // 2))
        piece = replace(
            piece, rank_base=random.randint(0, ranks - 1), shard_base=random.randint(0, shard // 2)
        )
        if (
            piece.full_range.stop <= full
            and piece.rank_range.stop <= ranks
            and piece.shard_range.stop <= shard
        ):
            pieces.append(piece)
    return Layout.of({"rank": ranks}, (full,), [(shard,)] * ranks, pieces)


def rewrite(layout: Layout, random: Random) -> Layout:
    """Write the same layout differently: cut walks, split loops, change every order."""
    pieces = list(layout.all_pieces)
    for _ in range(random.randint(0, 5)):
        if pieces:
            number = random.randrange(len(pieces))
            change = random.choice([_cut_piece, _split_axis, _shuffle_axes])
            pieces[number : number + 1] = change(pieces[number], random)
    paddings = list(layout.padding)
    for _ in range(random.randint(0, 2)):
        if paddings:
            number = random.randrange(len(paddings))
            change = random.choice([_cut_piece, _split_axis, _shuffle_axes])
            paddings[number : number + 1] = [
                Padding(piece.axes, piece.rank_base, piece.shard_base, paddings[number].fill)
                for piece in change(paddings[number].as_piece(), random)
            ]
    random.shuffle(pieces)
    random.shuffle(paddings)
    return replace(layout, all_pieces=tuple(pieces), padding=tuple(paddings))


def spoil(layout: Layout, random: Random) -> Layout:
    """Change one number or one piece, as a bug would: the result is usually not whole."""
    changes: list[Callable[[Layout, Random], Layout]] = [
        _move_base,
        _change_axis,
        _drop,
        _duplicate,
        _change_shape,
    ]
    for _ in range(8):
        for change in random.sample(changes, len(changes)):
            try:
                return change(layout, random)
            except LayoutError:  # the constructor refuses it already
                continue
    return replace(layout, full_shape=(layout.full_numel + 1,))


class _Draft(Frozen):
    """A whole layout before it gets shapes."""

    full: int
    shards: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Padding, ...] = ()


def _draft(random: Random, numel: int, depth: int) -> _Draft:
    kind = random.choice(["base", "base", "beside", "stacked", "copied"]) if depth else "base"
    if kind == "base" or numel < 4:
        return _base(random, random.randint(1, numel))
    first = _draft(random, numel // 2, depth - 1)
    if kind == "stacked":
        # The same ranks hold a second tensor too, behind the first one, each the whole of it.
        more = random.randint(1, numel // 4)
        axes = [Axis(more, 1, 0, 1)] if more > 1 else []
        pieces = tuple(
            Piece(tuple(axes), first.full, rank, shard) for rank, shard in enumerate(first.shards)
        )
        return _Draft(
            first.full + more,
            tuple(shard + more for shard in first.shards),
            first.pieces + pieces,
            first.padding,
        )
    if kind == "beside":
        second, base = _draft(random, numel // 2, depth - 1), first.full
    else:
        second, base = _base(random, first.full), 0
    ranks = len(first.shards)
    return _Draft(
        base + second.full,
        first.shards + second.shards,
        first.pieces
        + tuple(
            replace(piece, full_base=piece.full_base + base, rank_base=piece.rank_base + ranks)
            for piece in second.pieces
        ),
        first.padding,
    )


def _base(random: Random, numel: int) -> _Draft:
    """One piece whose digits are dealt to the ranks and the shards in any order."""
    extents = _factors(random, numel)
    digits = []
    stride = 1
    for extent in extents:
        digits.append((extent, stride))
        stride *= extent
    digits += [(random.randint(2, 3), 0) for _ in range(random.choice([0, 0, 0, 1, 2]))]
    random.shuffle(digits)
    axes: list[Axis] = []
    base, ranks, shard = 0, 1, 1
    for extent, full_stride in digits:
        if random.random() < 0.4 and ranks * extent <= 8:
            turned = random.random() < 0.2
            base += (extent - 1) * full_stride * turned
            axes.append(Axis(extent, -full_stride if turned else full_stride, ranks, 0))
            ranks *= extent
        else:
            axes.append(Axis(extent, full_stride, 0, shard))
            shard *= extent
    idle = random.choice([0, 0, 0, 1])
    return _Draft(numel, (shard,) * ranks + (0,) * idle, (Piece(tuple(axes), base),))


def _padded(draft: _Draft, random: Random) -> _Draft:
    """Leave room behind the data of each shard, or before it, and declare it."""
    more = random.randint(1, 3)
    before = random.random() < 0.5
    padding = [
        Padding(
            (Axis(more, 0, 0, 1),) if more > 1 else (),
            rank,
            0 if before else shard,
            random.choice(["zero", "undefined"]),
        )
        for rank, shard in enumerate(draft.shards)
    ]
    shift = more if before else 0
    return _Draft(
        draft.full,
        tuple(shard + more for shard in draft.shards),
        tuple(replace(piece, shard_base=piece.shard_base + shift) for piece in draft.pieces),
        (
            *(replace(pad, shard_base=pad.shard_base + shift) for pad in draft.padding),
            *padding,
        ),
    )


def _factors(random: Random, numel: int) -> list[int]:
    factors = [prime for prime in range(2, numel + 1) for _ in range(_power(numel, prime))]
    random.shuffle(factors)
    while len(factors) > 1 and random.random() < 0.5:
        factors[:2] = [factors[0] * factors[1]]
    return factors


def _power(numel: int, prime: int) -> int:
    if any(prime % divisor == 0 for divisor in range(2, prime)):
        return 0
    power = 0
    while numel % prime == 0:
        numel, power = numel // prime, power + 1
    return power


def _shape(random: Random, numel: int) -> tuple[int, ...]:
    if numel < 2:
        return random.choice([(numel,), (1, numel), ()]) if numel else (0, 3)
    factors = _factors(random, numel)
    return tuple(factors)


def _cut_piece(piece: Piece, random: Random) -> list[Piece]:
    if not piece.axes:
        return [piece]
    place = random.randrange(len(piece.axes))
    axis = piece.axes[place]
    cut = random.randint(1, axis.extent - 1)
    return [
        replace(
            piece,
            axes=_with_extent(piece.axes, place, extent),
            full_base=piece.full_base + start * axis.full_stride,
            rank_base=piece.rank_base + start * axis.rank_stride,
            shard_base=piece.shard_base + start * axis.shard_stride,
        )
        for start, extent in ((0, cut), (cut, axis.extent - cut))
    ]


def _split_axis(piece: Piece, random: Random) -> list[Piece]:
    for place, axis in enumerate(piece.axes):
        divisors = [d for d in range(2, axis.extent) if axis.extent % d == 0]
        if divisors:
            inner = random.choice(divisors)
            outer = Axis(
                axis.extent // inner,
                axis.full_stride * inner,
                axis.rank_stride * inner,
                axis.shard_stride * inner,
            )
            axes = (*piece.axes[:place], outer, replace(axis, extent=inner))
            return [replace(piece, axes=axes + piece.axes[place + 1 :])]
    return [piece]


def _shuffle_axes(piece: Piece, random: Random) -> list[Piece]:
    return [replace(piece, axes=tuple(random.sample(piece.axes, len(piece.axes))))]


def _with_extent(axes: tuple[Axis, ...], place: int, extent: int) -> tuple[Axis, ...]:
    changed = (replace(axes[place], extent=extent),) if extent > 1 else ()
    return axes[:place] + changed + axes[place + 1 :]


def _with_piece(layout: Layout, number: int, *pieces: Piece) -> Layout:
    before, after = layout.all_pieces[:number], layout.all_pieces[number + 1 :]
    return replace(layout, all_pieces=(*before, *pieces, *after))


def _pick(layout: Layout, random: Random) -> int:
    if not layout.all_pieces:
        raise LayoutError("the layout has no piece to spoil")
    return random.randrange(len(layout.all_pieces))


def _move_base(layout: Layout, random: Random) -> Layout:
    number = _pick(layout, random)
    piece = layout.all_pieces[number]
    field = random.choice(["full_base", "rank_base", "shard_base"])
    moved = getattr(piece, field) + random.choice([-2, -1, 1, 1, 2, 3])
    return _with_piece(layout, number, replace(piece, **{field: moved}))


def _change_axis(layout: Layout, random: Random) -> Layout:
    number = _pick(layout, random)
    piece = layout.all_pieces[number]
    if not piece.axes:
        raise LayoutError("the piece has no axis to spoil")
    place = random.randrange(len(piece.axes))
    axis = piece.axes[place]
    step = random.choice([-1, 1])
    match random.choice(["extent", "full", "other"]):
        case "extent":
            axes = _with_extent(piece.axes, place, axis.extent + step)
        case "full":
            changed = replace(axis, full_stride=axis.full_stride + step)
            axes = (*piece.axes[:place], changed, *piece.axes[place + 1 :])
        case _:
            changed = replace(
                axis,
                rank_stride=axis.rank_stride + (step if axis.rank_stride else 0),
                shard_stride=axis.shard_stride + (step if axis.shard_stride else 0),
            )
            axes = (*piece.axes[:place], changed, *piece.axes[place + 1 :])
    return _with_piece(layout, number, replace(piece, axes=axes))


def _drop(layout: Layout, random: Random) -> Layout:
    if layout.padding and random.random() < 0.5:
        number = random.randrange(len(layout.padding))
        return replace(layout, padding=layout.padding[:number] + layout.padding[number + 1 :])
    return _with_piece(layout, _pick(layout, random))


def _duplicate(layout: Layout, random: Random) -> Layout:
    if layout.padding and random.random() < 0.5:
        return replace(layout, padding=(*layout.padding, random.choice(layout.padding)))
    again = layout.all_pieces[_pick(layout, random)]
    return replace(layout, all_pieces=(*layout.all_pieces, again))


def _change_shape(layout: Layout, random: Random) -> Layout:
    if random.random() < 0.3:
        return replace(layout, full_shape=(layout.full_numel + 1,))
    shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]
    rank = random.randrange(len(shapes))
    shapes[rank] = (prod(shapes[rank]) + 1,)
    return replace(layout, shard_shapes=shape_runs(shapes))


def _coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinates = product(*(range(size) for size in shape))
    return next(coordinate for place, coordinate in enumerate(coordinates) if place == index)
