"""Strided copies: the same bytes as a loop over all steps writes, with the kernel and without."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride.arrays import _kernel
from restride.arrays.strided import copy_at, copy_strided
from restride.errors import LayoutError

EXTENTS = st.one_of(st.integers(1, 4), st.sampled_from([15, 16, 17, 33, 64, 65]))
RUNS = st.one_of(
    st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 140), st.sampled_from([1100, 17_001])
)
MOST = 40_000


def nested_strides(draw, extents, run):
    """Strides that visit no byte twice, in any order of the loops, of any sign."""
    strides = [0] * len(extents)
    reach = run
    for place in draw(st.permutations(range(len(extents)))):
        strides[place] = reach + draw(st.sampled_from([0, 0, 0, 1, run, 5 * run, 64]))
        reach = extents[place] * strides[place]
    return [stride * draw(st.sampled_from([1, 1, 1, -1])) for stride in strides]


@st.composite
def nests(draw):
    """Loops, the run, and where both sides start in memory that they just fit."""
    run = draw(RUNS)
    extents = draw(st.lists(EXTENTS, max_size=4).filter(lambda e: run * np.prod(e) <= MOST))
    target = nested_strides(draw, extents, run)
    # The source may be read as often as one likes.
    source = (
        nested_strides(draw, extents, run)
        if draw(st.booleans())
        else [draw(st.integers(-9, 9)) * run for _ in extents]
    )
    loops = list(zip(extents, source, target, strict=True))
    return loops, run


def reach(loops, side, run):
    steps = [(loop[0] - 1) * loop[side] for loop in loops]
    return -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + run


def memory(nbytes, seed, offset):
    content = np.random.default_rng(seed).integers(0, 256, nbytes + 64, dtype=np.uint8)
    return content[offset : offset + nbytes]


def copied_slowly(source, target, loops, run, source_start, target_start):
    target = target.copy()
    for steps in product(*(range(loop[0]) for loop in loops)):
        at = source_start + sum(step * loop[1] for step, loop in zip(steps, loops, strict=True))
        to = target_start + sum(step * loop[2] for step, loop in zip(steps, loops, strict=True))
        target[to : to + run] = source[at : at + run]
    return target


@given(nest=nests(), offsets=st.tuples(st.integers(0, 63), st.integers(0, 63)))
def test_a_copy_moves_what_a_loop_over_all_steps_moves(each_way, nest, offsets):
    loops, run = nest
    (before, after), (start, stop) = reach(loops, 1, run), reach(loops, 2, run)
    source = memory(before + after, 1, offsets[0])
    target = memory(start + stop, 2, offsets[1])
    expected = copied_slowly(source, target, loops, run, before, start)
    event(f"{sum(loop[0] > 1 for loop in loops)} loops")

    def copied():
        mine = memory(start + stop, 2, offsets[1])
        copy_strided(source, mine, loops, run, source_start=before, target_start=start)
        return mine.tobytes()

    assert set(each_way(copied)) == {expected.tobytes()}


def test_runs_of_every_length_are_moved_whole_and_alone(each_way):
    source = memory(3 * 300, 15, 3)
    for run in range(1, 270):
        loops = [(3, run + 5, run + 7)]
        expected = copied_slowly(source, np.zeros(3 * 300, np.uint8), loops, run, 0, 0)

        def copied(loops=loops, run=run):
            target = np.zeros(3 * 300, np.uint8)
            copy_strided(source, target, loops, run)
            return target.tobytes()

        assert set(each_way(copied)) == {expected.tobytes()}, run


@given(
    word=st.sampled_from([1, 2, 4, 8, 16]),
    rows=st.integers(1, 200),
    columns=st.integers(1, 200),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    offset=st.integers(0, 63),
)
def test_a_transposition_of_any_size_at_any_address_is_one(
    each_way, word, rows, columns, gaps, offset
):
    pitch, turned_pitch = (columns + gaps[0]) * word, (rows + gaps[1]) * word
    source = memory(rows * pitch, 3, offset)
    matrix = np.ndarray((rows, columns), f"V{word}", source, strides=(pitch, word))

    def turned():
        target = memory(columns * turned_pitch, 4, (offset * 7) % 64)
        copy_strided(source, target, [(columns, word, turned_pitch), (rows, pitch, word)], word)
        return target

    results = each_way(turned)

    for result in results:
        found = np.ndarray((columns, rows), f"V{word}", result, strides=(turned_pitch, word))
        assert found.tobytes() == matrix.T.tobytes()
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("apart", "turned_apart"), [(3, 1), (1, 3), (2, 2)])
def test_a_transposition_with_gaps_between_words_is_one(each_way, word, apart, turned_apart):
    rows, columns = 70, 67
    pitch, turned_pitch = columns * apart * word, rows * turned_apart * word
    source = memory(rows * pitch, 14, 0)
    loops = [(columns, apart * word, turned_pitch), (rows, pitch, turned_apart * word)]
    words = source.view(f"V{word}").reshape(rows, columns, apart)[:, :, 0]
    expected = np.zeros((columns, rows, turned_apart), f"V{word}")
    expected[:, :, 0] = words.T

    def turned():
        target = np.zeros(columns * turned_pitch, np.uint8)
        copy_strided(source, target, loops, word)
        return target.tobytes()

    assert set(each_way(turned)) == {expected.tobytes()}


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("offset", [0, 16, 33])
def test_a_transposition_that_no_cache_holds_is_one(kernels, word, offset):
    rows, columns = 1 << 11, (10 << 20) // (word << 11)
    source = memory(rows * columns * word, 5, offset)
    target = np.zeros(source.nbytes + 64, np.uint8)[offset : offset + source.nbytes]
    loops = [(columns, word, rows * word), (rows, columns * word, word)]
    addresses = source.ctypes.data, target.ctypes.data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert copy_at(*addresses, loops, word)

    matrix = source.view(f"V{word}").reshape(rows, columns)
    assert np.array_equal(target.view(f"V{word}").reshape(columns, rows), matrix.T)


@pytest.mark.parametrize(
    ("word", "rows", "columns", "offset"),
    [
        (1, 8, (1 << 20) + 3, 33),  # fewer words than there are to the next line
        (8, 5, 250_007, 8),
        (1, 2049, 4099, 0),  # lines of the target that begin at any place
        (2, 2051, 2053, 2),
        (4, 1031, 2053, 4),
    ],
)
def test_a_large_transposition_of_odd_sizes_is_one_and_writes_nothing_else(
    kernels, word, rows, columns, offset
):
    nbytes = rows * columns * word
    source = memory(nbytes, 13, 0)
    around = np.full(nbytes + 256, 7, np.uint8)
    start = 64 + -around.ctypes.data % 64 + offset
    loops = [(columns, word, rows * word), (rows, columns * word, word)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert copy_at(source.ctypes.data, around.ctypes.data + start, loops, word)

    target = around[start : start + nbytes].view(f"V{word}").reshape(columns, rows)
    assert np.array_equal(target, source.view(f"V{word}").reshape(rows, columns).T)
    assert (around[:start] == 7).all()
    assert (around[start + nbytes :] == 7).all()


@given(
    word=st.sampled_from([1, 2, 4, 8, 16]),
    step=st.integers(1, 5),
    count=st.integers(1, 300),
    offset=st.integers(0, 63),
)
def test_every_so_manyth_word_is_gathered_and_scattered(each_way, word, step, count, offset):
    strewn = memory(step * word * count, 8, offset)
    dense = memory(word * count, 9, offset // 2)
    last = (count - 1) * step * word

    def all_three():
        gathered, turned, scattered = dense.copy(), dense.copy(), strewn.copy()
        copy_strided(strewn, gathered, [(count, step * word, word)], word)
        copy_strided(strewn, turned, [(count, -step * word, word)], word, source_start=last)
        copy_strided(dense, scattered, [(count, word, step * word)], word)
        return gathered.tobytes(), turned.tobytes(), scattered.tobytes()

    words = strewn.copy().reshape(count, step, word)
    expected_gathered, expected_turned = words[:, 0].tobytes(), words[::-1, 0].tobytes()
    words[:, 0] = dense.reshape(count, word)

    for results in each_way(all_three):
        assert results == (expected_gathered, expected_turned, words.tobytes())


@pytest.mark.parametrize("run", [64, 192, 32 << 10])
@pytest.mark.parametrize("offset", [0, 8])
def test_runs_of_whole_lines_that_no_cache_holds_are_scattered(kernels, run, offset):
    count = (9 << 20) // run
    around = np.zeros(2 * run * count + 128, np.uint8)
    start = -around.ctypes.data % 64 + offset
    target = around[start : start + 2 * run * count]
    source = memory(run * count, 7, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert copy_at(source.ctypes.data, target.ctypes.data, [(count, run, 2 * run)], run)

    written, between = target.reshape(count, 2, run).transpose(1, 0, 2)
    assert np.array_equal(written, source.reshape(count, run))
    assert not between.any()
    assert not around[:start].any()
    assert not around[start + target.nbytes :].any()


@pytest.mark.parametrize("run", [1024, 1024 + 24, 2048 + 1, 5000])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 16), (24, 63)])
@pytest.mark.parametrize("between", [0, 64, 100])
def test_runs_with_gaps_that_no_cache_holds_are_gathered_at_any_place(
    kernels, run, offsets, between
):
    """One behind the other, whose last and first bytes share a line, or apart."""
    count, parts = -(-(5 << 20) // run), 2
    pitch = (run + between) * count + 40
    around = np.zeros(parts * pitch + 192, np.uint8)
    start = -around.ctypes.data % 64 + offsets[1]
    target = around[start : start + parts * pitch]
    content = memory(parts * count * 4 * run + 128, 11, 0)
    begin = -content.ctypes.data % 64 + offsets[0]
    source = content[begin : begin + parts * count * 4 * run]
    loops = [(parts, count * 4 * run, pitch), (count, 4 * run, run + between)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert copy_at(source.ctypes.data, target.ctypes.data, loops, run)

    for part, written in enumerate(target.reshape(parts, pitch)):
        rows = written[: pitch - 40].reshape(count, run + between)
        assert np.array_equal(rows[:, :run], source.reshape(parts, count, 4, run)[part, :, 0])
        assert not rows[:, run:].any()
        assert not written[pitch - 40 :].any()
    assert not around[:start].any()
    assert not around[start + target.nbytes :].any()


@pytest.mark.parametrize("run", [16 << 10, (16 << 10) + 24, (5 << 20) + 1, (17 << 20) + 1])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 63), (40, 8)])
def test_long_runs_that_no_cache_holds_are_copied_from_any_place_to_any(kernels, run, offsets):
    count, halves, gap = -(-(8 << 20) // run), 2, 96
    pitch = (run + gap) * count + 32
    around = np.zeros(halves * pitch + 192, np.uint8)
    start = -around.ctypes.data % 64 + offsets[1]
    target = around[start : start + halves * pitch]
    content = memory(halves * count * run + 128, 11, 0)
    begin = -content.ctypes.data % 64 + offsets[0]
    source = content[begin : begin + halves * count * run]
    loops = [(halves, count * run, pitch), (count, run, run + gap)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert copy_at(source.ctypes.data, target.ctypes.data, loops, run)

    for half, written in enumerate(target.reshape(halves, pitch)):
        rows = written[: pitch - 32].reshape(count, run + gap)
        expected = source.reshape(halves, count, run)[half]
        assert np.array_equal(rows[:, :run], expected)
        assert not rows[:, run:].any()
        assert not written[pitch - 32 :].any()
    assert not around[:start].any()
    assert not around[start + target.nbytes :].any()


@pytest.mark.parametrize(
    ("loops", "run"),
    [
        ([(3, 4, 4)], 5),  # runs that overlap in the target
        ([(3, 4, 0)], 4),  # a target that stays where it is
        ([(2, 8, 6), (3, 1, 4)], 2),  # loops that mesh, of which it is not plain
        ([], 0),
        ([(0, 4, 4)], 4),
    ],
)
def test_the_kernel_leaves_alone_what_it_may_not_reorder(kernels, loops, run):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernels[-1])
        assert not copy_at(source.ctypes.data, target.ctypes.data, loops, run)
        assert not copy_at(source.ctypes.data, source.ctypes.data + 3, [(2, 8, 8)], 4)

    assert not target.any()
    assert np.array_equal(source, np.arange(64))


def test_meshing_loops_are_copied_all_the_same(each_way):
    loops, run = [(2, 8, 6), (3, 1, 4)], 2
    source = memory(64, 6, 0)
    expected = copied_slowly(source, np.zeros(64, np.uint8), loops, run, 0, 0)

    def copied():
        target = np.zeros(64, np.uint8)
        copy_strided(source, target, loops, run)
        return target.tobytes()

    assert set(each_way(copied)) == {expected.tobytes()}


@pytest.mark.parametrize(
    ("loops", "run"),
    [
        ([(3, 40, 80), (5, 8, 16)], 4),  # one loop goes on where the other ends, on both sides
        ([(3, 40, 85), (5, 8, 16)], 4),  # in the source alone
        ([(3, 45, 80), (5, 8, 16)], 4),  # in the target alone
        ([(2, 120, 240), (3, 40, 80), (5, 8, 16)], 4),
        ([(3, 20, 40), (5, 4, 8), (2, 60, 120)], 4),
        ([(3, 20, 20), (5, 4, 4)], 4),  # all of it is one run
        ([(5, 4, 4), (3, 20, 24)], 4),
    ],
)
def test_loops_that_go_on_where_others_end_are_one(each_way, loops, run):
    source = memory(400, 12, 0)
    expected = copied_slowly(source, np.zeros(500, np.uint8), loops, run, 0, 0)

    def copied():
        target = np.zeros(500, np.uint8)
        copy_strided(source, target, loops, run)
        return target.tobytes()

    assert set(each_way(copied)) == {expected.tobytes()}


@pytest.mark.parametrize("loops", [[(0, 4, 4)], [(3, 8, 8), (0, 4, 4)], [(0, 4, 9), (3, 4, 4)]])
def test_a_loop_of_no_step_writes_nothing_whoever_asks(kernels, loops):
    source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    packed = np.array(loops, np.int64).tobytes()
    numbers = np.array([0, 0, 0, 4, len(loops), *np.ravel(loops)], np.int64).tobytes()
    places = np.array([source.ctypes.data], np.uintp).tobytes()

    assert kernels[-1].copy(target.ctypes.data, source.ctypes.data, len(loops), packed, 4)
    assert kernels[-1].copy_each(target.ctypes.data, places, numbers, 1)
    assert not target.any()


def test_more_loops_than_the_kernel_holds_are_refused_by_it_and_not_begun(kernels):
    source, target = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    loops = np.array([[2, 0, 0]] * 33, np.int64).tobytes()

    done = kernels[-1].copy(target.ctypes.data, source.ctypes.data, 33, loops, 1)

    assert not done
    assert target.all()


@pytest.mark.parametrize(
    ("loops", "run", "source_start", "target_start", "said"),
    [
        ([(4, 16, 4)], 4, 4, 0, "bytes 4 to 56 leaves a source of 52"),
        ([(4, 4, 16)], 4, 0, 17, "bytes 17 to 69 leaves a target of 68"),
        ([(4, 4, -16)], 4, 0, 47, "bytes -1 to 51 leaves a target"),
        ([(4, -4, 4)], 4, 11, 0, "bytes -1 to 15 leaves a source"),
        ([], 53, 0, 0, "bytes 0 to 53 leaves a source"),
        ([(-1, 4, 4)], 4, 0, 0, "cannot be counted"),
        ([], -1, 0, 0, "cannot be counted"),
        ([(1 << 70, 1, 1)], 1, 0, 0, "leaves a source"),
    ],
)
def test_a_run_outside_of_either_side_is_refused_before_a_byte_moves(
    each_way, loops, run, source_start, target_start, said
):
    source, target = np.ones(52, np.uint8), np.zeros(68, np.uint8)

    def refused():
        with pytest.raises(LayoutError, match=said):
            copy_strided(
                source,
                target,
                loops,
                run,
                source_start=source_start,
                target_start=target_start,
            )

    each_way(refused)
    assert not target.any()


def test_memory_that_is_read_only_or_strewn_is_refused(each_way):
    content, frozen = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    frozen.flags.writeable = False

    def refused():
        with pytest.raises(LayoutError, match="must not be written"):
            copy_strided(content, frozen, [], 8)
        with pytest.raises(LayoutError, match="contiguous"):
            copy_strided(content[::2], frozen, [], 4)

    each_way(refused)


def test_loops_of_one_step_and_of_none_do_nothing_of_their_own(each_way):
    source = np.arange(8, dtype=np.uint8)

    def copied():
        target = np.zeros(8, np.uint8)
        copy_strided(source, target, [(1, 1 << 80, -(1 << 80)), (4, 2, 2)], 2)
        copy_strided(np.full(8, 9, np.uint8), target, [(0, 1 << 80, 0), (4, 2, 2)], 2)
        return target.tobytes()

    assert set(each_way(copied)) == {source.tobytes()}
