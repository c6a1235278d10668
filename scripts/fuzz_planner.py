"""Targets of `fuzz.py`: algebra, plans and executors against oracles that walk every element."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fuzz_choices import ByteRandom
from restride.algebra.canonical import canonicalize
from restride.algebra.compose import compose
from restride.algebra.coverage import Covered, Gap, Hole, Overlap, prove
from restride.algebra.fold import fold
from restride.algebra.layout import Layout, Padding
from restride.algebra.piece import Axis, Piece
from restride.algebra.serial import layout_from_json, layout_to_json
from restride.algebra.signature import same_layout, signature
from restride.algebra.walks import Walk, join
from restride.arrays.extract import extract
from restride.arrays.move import move
from restride.arrays.rebuild import rebuild
from restride.checkpoint.catalog import Region, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.errors import BudgetError, CoverageError, FormatError, LayoutError
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.planning.jobs import Job, plan_conversion, whole_layout
from restride.planning.transfers import plan_transfer
from restride.testing.arrays import extract_by_walking, random_elements, somewhere_in_memory
from restride.testing.moving import MemoryFiles, expected_shards, job_between, store
from restride.testing.oracles import (
    compose_by_walking,
    join_by_walking,
    walk_addresses,
    walk_transfers,
)
from restride.testing.proofs import (
    random_layout,
    random_wild_layout,
    relation_by_walking,
    rewrite,
    spoil,
    verdict_by_walking,
)
from restride.testing.strategies import layout_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from restride.algebra.transfer import Transfer
    from restride.testing.moving import StoredState

__all__ = ["arrays", "conversion", "layouts", "numbers", "planner_seeds"]

_NUMELS = (1, 12, 24, 30, 48)
_MOST_DRAWS = 6
_LARGE = (3, 1000, (1 << 20) + 7, 1 << 40, (1 << 57) + 1)
_LARGEST = 1 << 63


def planner_seeds() -> list[bytes]:
    """Inputs of many lengths; what they decide has no seeds that are better than others."""
    return [bytes((n * 89 + at * 31) & 255 for at in range(4 << n % 8)) for n in range(48)]


def _pair(random: Random) -> tuple[Layout, Layout]:
    """Two layouts of one tensor, whole or not."""
    if random.randrange(6) == 0:
        made = [random_wild_layout(random) for _ in range(2)]
        shape: tuple[int, ...] = (max(layout.full_numel for layout in made),)
    else:
        made = [random_layout(random, numel=random.choice(_NUMELS))]
        shape = made[0].full_shape
        numel = made[0].full_numel
        drawn = (random_layout(random, numel=numel) for _ in range(_MOST_DRAWS))
        made.append(next((layout for layout in drawn if layout.full_numel == numel), made[0]))
        made = [spoil(m, random) if random.randrange(6) == 0 else m for m in made]
        if len({layout.full_numel for layout in made}) > 1:
            shape = (max(layout.full_numel for layout in made),)
    return replace(made[0], full_shape=shape), replace(made[1], full_shape=shape)


def layouts(content: bytes) -> str:
    """Proofs, identity, canonical form, composition, folding and map files of small layouts."""
    random = ByteRandom(content)
    target, source = _pair(random)
    verdict = prove(target)
    assert _plain(verdict) == _plain(verdict_by_walking(target)), verdict
    canonical = canonicalize(target)
    relation = relation_by_walking(target)
    assert relation_by_walking(canonical) == relation
    assert same_layout(canonical, target)
    assert signature(canonical) == signature(target)
    assert layout_from_json(layout_to_json(target)) == target
    assert same_layout(target, source) == (
        _frame(target) == _frame(source) and relation == relation_by_walking(source)
    )
    moved = walk_transfers(compose(target, source).descriptors)
    assert moved == compose_by_walking(target, source)
    if isinstance(verdict, Covered):
        _require_folds(target, relation)
    if isinstance(verdict, Hole):
        _require_no_plan(target)
    return type(verdict).__name__


def _require_no_plan(layout: Layout) -> None:
    """What is not there cannot be read: nothing is planned of it."""
    dtype, ranks = DTYPES["uint8"], range(layout.rank_count)
    entry = StateEntry(dtype, layout, tuple(Region(rank, 0) for rank in ranks))
    whole = whole_layout(layout.full_shape)
    job = Job("wte", "weight", entry, whole, (Region(0, 0),), dtype, "first")
    try:
        plan_conversion([job], budget_nbytes=1 << 20, workers=1)
    except CoverageError as error:
        str(error)
    else:
        raise AssertionError("a tensor with a hole is planned")


def _frame(layout: Layout) -> tuple[object, ...]:
    return layout.mesh, layout.full_shape, layout.shard_shapes, layout.unit_bits


def _plain(verdict: Any) -> Any:
    return replace(verdict, method="structure") if isinstance(verdict, Covered) else verdict


def _require_folds(layout: Layout, relation: Counter[tuple[object, ...]]) -> None:
    ranks = range(layout.rank_count)
    maps = [extract_by_walking(_unscaled(layout), _counted(layout), r).ravel() - 1 for r in ranks]
    folded = fold(
        [entries.tolist() for entries in maps],
        mesh=layout.mesh,
        full_shape=layout.full_shape,
        shard_shapes=[layout.shard_shape(rank) for rank in ranks],
    )
    if all(padding.fill == "zero" for padding in layout.padding):
        assert relation_by_walking(folded) == relation


def _unscaled(layout: Layout) -> Layout:
    return replace(
        layout, all_pieces=tuple(replace(p, scale=Fraction(1)) for p in layout.all_pieces)
    )


def _counted(layout: Layout) -> np.ndarray[Any, Any]:
    return np.arange(1, layout.full_numel + 1).reshape(layout.full_shape)


def numbers(content: bytes) -> str:
    """The same with every element blown up into a block of up to 2^57: the answers scale."""
    random = ByteRandom(content)
    target, source = _pair(random)
    factor = random.choice(_LARGE)
    if max(_sizes(target) + _sizes(source)) * factor >= _LARGEST:
        factor = _LARGEST // max(1, *_sizes(target), *_sizes(source)) - random.randrange(3)
    big_target, big_source = _blown(target, factor), _blown(source, factor)
    _require_same_verdict(target, big_target, factor)
    again = _blown(rewrite(target, random), factor)
    assert same_layout(again, big_target)
    assert signature(canonicalize(again)) == signature(big_target)
    assert layout_from_json(layout_to_json(big_target)) == big_target
    transfers = compose(big_target, big_source)
    right = compose_by_walking(target, source)
    assert transfers.numel == right.total() * factor
    for transfer in transfers.descriptors:
        assert _somewhere(random, transfer, factor) in right
    _require_join(random)
    _require_refused(random, big_target)
    return f"factor {factor.bit_length()} bits"


def _sizes(layout: Layout) -> list[int]:
    return [layout.full_numel, *(layout.shard_numel(r) for r in range(layout.rank_count))]


def _blown(layout: Layout, factor: int) -> Layout:
    """Every element becomes a block of so many, dense on both sides."""

    def walk(axes: tuple[Axis, ...], *, moves_full: bool) -> tuple[Axis, ...]:
        scaled = (
            Axis(a.extent, a.full_stride * factor, a.rank_stride, a.shard_stride * factor)
            for a in axes
        )
        return (*scaled, *([Axis(factor, int(moves_full), 0, 1)] if factor > 1 else []))

    pieces = tuple(
        Piece(
            walk(p.axes, moves_full=True),
            p.full_base * factor,
            p.rank_base,
            p.shard_base * factor,
            p.scale,
        )
        for p in layout.all_pieces
    )
    padding = tuple(
        Padding(walk(p.axes, moves_full=False), p.rank_base, p.shard_base * factor, p.fill)
        for p in layout.padding
    )
    shards = tuple((count, (_numel(shape) * factor,)) for count, shape in layout.shard_shapes)
    return Layout(layout.mesh, (layout.full_numel * factor,), _merged(shards), pieces, padding)


def _merged(shards: tuple[tuple[int, tuple[int]], ...]) -> tuple[tuple[int, tuple[int]], ...]:
    merged: list[tuple[int, tuple[int]]] = []
    for count, shape in shards:
        if merged and merged[-1][1] == shape:
            merged[-1] = (merged[-1][0] + count, shape)
        else:
            merged.append((count, shape))
    return tuple(merged)


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=object)) if shape else 1


def _require_same_verdict(layout: Layout, blown: Layout, factor: int) -> None:
    match verdict_by_walking(layout):
        case Hole() as small:
            large = prove(blown)
            assert isinstance(large, Hole)
            assert (large.element, large.count) == (small.element * factor, small.count * factor)
        case Covered():
            large = prove(blown)
            assert isinstance(large, Covered)
            assert large.full_numel == layout.full_numel * factor
        case Gap() | Overlap() as small:
            large = prove(blown)
            place = small.shard_index * factor, small.count * factor
            assert large == replace(small, shard_index=place[0], count=place[1])


def _somewhere(random: Random, transfer: Transfer, factor: int) -> tuple[Any, ...]:
    """One step of a transfer, as a step of the small layouts."""
    walk = transfer.as_walk()
    steps = [random.randrange(digit[0]) for digit in walk.digits]
    full, from_rank, from_shard, to_rank, to_shard = (
        base + sum(step * digit[place] for step, digit in zip(steps, walk.digits, strict=True))
        for place, base in enumerate(walk.bases, 1)
    )
    assert full % factor == from_shard % factor == to_shard % factor
    shards = from_shard // factor, to_shard // factor
    return full // factor, from_rank, shards[0], to_rank, shards[1], transfer.scale


def _require_join(random: Random) -> None:
    """Walks of any kind meet where walking says; scaled and moved far away, in the same steps."""
    walks = [_random_walk(random) for _ in range(2)]
    right = join_by_walking(*walks)
    assert _stepped(join(*walks)) == right
    scale, shift = random.choice(_LARGE), random.choice((0, 1, 1 << 61))
    far = [
        Walk(
            (walk.bases[0] * scale + shift, *walk.bases[1:]),
            tuple((extent, first * scale, *others) for extent, first, *others in walk.digits),
        )
        for walk in walks
    ]
    moved = Counter({(k[0] * scale + shift, *k[1:]): n for k, n in right.items()})
    assert _stepped(join(*far)) == moved


def _random_walk(random: Random) -> Walk:
    strides = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 30, -1, -2, -6)
    digits = tuple(
        (random.randint(1, 5), random.choice(strides), random.choice(strides))
        for _ in range(random.randrange(4))
    )
    return Walk((random.randint(-20, 60), random.randrange(9)), digits)


def _stepped(walks: list[Walk]) -> Counter[tuple[int, ...]]:
    return Counter(address for walk in walks for address in walk_addresses(walk))


def _require_refused(random: Random, layout: Layout) -> None:
    """A piece that is moved out of the tensor or the shards is refused when it is made."""
    if not layout.all_pieces:
        return
    piece = random.choice(layout.all_pieces)
    name, room = random.choice(
        (
            ("full_base", layout.full_numel),
            ("rank_base", layout.rank_count),
            ("shard_base", max(_sizes(layout)[1:])),
        )
    )
    try:
        wrong = replace(piece, **{name: getattr(piece, name) + room})
        replace(layout, all_pieces=(*layout.all_pieces, wrong))
    except LayoutError as error:
        str(error)
    else:
        raise AssertionError(f"{name} moved by {room} is accepted")
    try:
        layout_from_json({**layout_to_json(layout), "full": [_LARGEST]})
    except FormatError as error:
        str(error)


@settings(database=None, deadline=None)
@given(
    layout_pairs(with_scales=False),
    st.sampled_from(("uint8", "bfloat16", "float32", "int64")),
    st.sampled_from((1, 1, 1, 3, 700)),
    st.integers(12, 20),
    st.integers(1, 3),
    st.sampled_from(("check", "first")),
)
def _converted(
    pair: tuple[Layout, Layout], name: str, factor: int, bits: int, workers: int, replicas: Any
) -> None:
    target, source = pair
    dtype = DTYPES[name]
    width = factor * dtype.itemsize_nbytes
    content = Random(width).randbytes(source.full_numel * width)  # noqa: S311 - no secret
    full = np.frombuffer(content, f"V{width}")
    stored = store(source, dtype, full)
    entry = StateEntry(dtype, _blown(source, factor), stored.entry.regions)
    stored = replace(stored, entry=entry)
    wanted = [shard.tobytes() for shard in expected_shards(target, full)]
    big = _blown(target, factor)
    for executor in (SerialExecutor, StreamingExecutor):
        got = _execute(executor, stored, big, dtype, 1 << bits, workers, replicas)
        assert got == wanted, executor.__name__


def _execute(
    executor: Callable[[], Any],
    source: StoredState,
    target: Layout,
    dtype: Any,
    budget: int,
    workers: int,
    replicas: Any,
) -> list[bytes]:
    job, sizes = job_between(source, target, dtype, replicas)
    try:
        plan = plan_conversion([job], budget_nbytes=budget, workers=workers)
    except BudgetError as error:
        budget = error.needed_nbytes
        plan = plan_conversion([job], budget_nbytes=budget, workers=workers)
    assert plan.projected_nbytes <= budget
    out = MemoryFiles([b"\xff" * size for size in sizes])
    executor().execute(plan, MemoryFiles(source.contents), out, NullObserver())
    spans = sorted(out.writes)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
    return [bytes(content) for content in out.contents]


def conversion(content: bytes) -> str:
    """Plans between any two layouts in any budget, carried out by both executors."""
    read = _converted.hypothesis.fuzz_one_input(content)  # type: ignore[attr-defined]
    return "too short" if read is None else "converted"


@settings(database=None, deadline=None)
@given(
    layout_pairs(with_scales=False),
    st.sampled_from(("uint8", "uint16", "float32", "int64", "complex128", "bool")),
    st.sampled_from(("check", "first", "mean")),
    st.integers(0, 1 << 32),
)
def _moved(pair: tuple[Layout, Layout], dtype: str, replicas: str, seed: int) -> None:
    target, source = pair
    random = Random(seed)  # noqa: S311 - no secret
    full = random_elements(random, source.full_shape, dtype)
    where = somewhere_in_memory(random, full)
    shards = {}
    for rank in range(source.rank_count):
        right = extract_by_walking(source, full, rank)
        _require_bits(extract(source, where, rank), right)
        shards[rank] = somewhere_in_memory(random, right)
    _require_bits(rebuild(source, shards, replicas=replicas), full)
    moved = move(plan_transfer(target, source), shards)
    for rank in range(target.rank_count):
        _require_bits(moved[rank], extract_by_walking(target, full, rank))


def arrays(content: bytes) -> str:
    """`extract`, `rebuild` and `move` of arrays of any type, anywhere in memory."""
    read = _moved.hypothesis.fuzz_one_input(content)  # type: ignore[attr-defined]
    return "too short" if read is None else "moved"


def _require_bits(found: Any, right: Any) -> None:
    assert found.shape == right.shape
    assert found.dtype == right.dtype
    assert found.tobytes() == right.tobytes()
