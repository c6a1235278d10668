"""Parts of arrays, copied in one call of the kernel: what it may be given, and what it may not."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest

from restride.algebra.compose import compose
from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.arrays import _kernel
from restride.arrays._blocks import Block, Side
from restride.arrays._numpy import NUMPY
from restride.arrays._parts import Part, Parts, copy_parts
from restride.arrays.move import move
from restride.errors import LayoutError

ONE = Fraction(1)


def part(extents, source, target, rank=0, scale=ONE):
    """Loops with (base, *strides) in the source and in the target."""
    sides = [Side(base, tuple(strides)) for base, *strides in (source, target)]
    return Part(rank, Block(tuple(extents), *sides), scale)


@pytest.fixture
def calls(kernels, use, monkeypatch):
    """What the kernel was asked to do at once."""
    asked = []
    given = type(kernels[-1]).copy_each

    def counted(self, *arguments):
        asked.append(arguments[-1])
        return given(self, *arguments)

    monkeypatch.setattr(type(kernels[-1]), "copy_each", counted)
    with use(kernels[-1]):
        yield asked


@pytest.mark.parametrize("dtype", ["u1", "<f2", ">f4", "f8", "c16", "M8[s]", "V3", "?"])
def test_parts_of_several_arrays_are_one_call(calls, dtype):
    content = np.arange(160, dtype=np.uint8)
    sources = {rank: np.frombuffer((content + rank).tobytes(), dtype, 10) for rank in (3, 5)}
    target = np.zeros(8, dtype)
    parts = Parts(
        [
            part([2], (1, 2), (0, 1), rank=5),
            part([2, 2], (0, 5, 1), (2, 2, 1), rank=3),
            part([2], (9, -1), (6, 1), rank=5),
        ]
    )

    copy_parts(NUMPY, sources, target, parts)

    a, b = sources[3], sources[5]
    expected = [(b, 1), (b, 3), (a, 0), (a, 1), (a, 5), (a, 6), (b, 9), (b, 8)]
    assert target.tobytes() == b"".join(array[at : at + 1].tobytes() for array, at in expected)
    assert calls == [3]


def test_of_two_parts_that_write_an_element_the_later_one_stays(each_way):
    sources = {rank: np.full(4, rank) for rank in range(3)}
    order = [1, 0, 2]
    parts = Parts([part([3], (0, 1), (at, 1), rank=rank) for at, rank in enumerate(order)])

    def copied():
        target = np.full(5, 9)
        copy_parts(NUMPY, sources, target, parts)
        return tuple(target)

    assert set(each_way(copied)) == {(1, 0, 2, 2, 2)}


@pytest.mark.parametrize(
    "outside",
    [
        part([4], (0, 2), (0, 1)),  # behind the source
        part([4], (2, -1), (0, 1)),  # before it
        part([2, 3], (4, -3, 1), (0, 3, 1), rank=1),  # before it, though it goes on behind
        part([4], (0, 1), (3, 1)),  # behind the target
        part([4], (0, 1), (-1, 1)),  # before it
        part([], (0,), (6,)),
        part([], (6,), (0,), rank=1),
    ],
)
def test_a_part_outside_of_an_array_is_refused(calls, outside):
    sources = {rank: np.arange(6.0) for rank in range(2)}
    around = np.zeros(18)
    inside = part([2], (0, 1), (0, 1), rank=outside.rank)

    for parts in ([outside], [outside, inside], [inside, outside]):
        with pytest.raises(LayoutError, match=r"leaves the memory|no element"):
            copy_parts(NUMPY, sources, around[6:12], Parts(parts))

    assert not calls
    assert not around[:6].any()
    assert not around[12:].any()


def test_a_smaller_array_than_last_time_is_noticed(calls):
    parts = Parts([part([6], (0, 1), (0, 1))])
    whole, empty = np.arange(6, dtype=np.uint8), np.zeros(6, np.uint8)

    copy_parts(NUMPY, {0: whole}, empty.copy(), parts)

    assert calls == [1]
    for source, target in ((whole[:5], empty), (whole, empty[:5])):
        with pytest.raises(LayoutError, match="leaves the memory"):
            copy_parts(NUMPY, {0: source}, target, parts)
    assert calls == [1]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Scaled, beside one that is not.
        (
            Parts([part([2], (0, 1), (0, 1)), part([2], (2, 1), (2, 1), scale=2 * ONE)]),
            [1, 2, 6, 8],
        ),
        # An element twice: the last step stays, and loops that mesh without it.
        (Parts([part([2, 3], (0, 3, 1), (0, 0, 1))], is_each_once=False), [1, 2, 3, 0]),
        (Parts([part([2, 2], (0, 2, 1), (0, 1, 2))]), [1, 3, 2, 4]),
    ],
)
def test_parts_with_an_order_or_a_scale_are_written_with_views(calls, parts, expected):
    target = np.zeros(4)

    copy_parts(NUMPY, {0: np.arange(1.0, 7.0)}, target, parts)

    assert target.tolist() == expected
    assert len(calls) == (parts.in_order[0].block.extents == (2, 2))


@pytest.mark.parametrize("strewn", [np.arange(12)[::2], np.arange(6)[::-1]])
def test_arrays_in_another_order_of_memory_are_read_with_views(calls, strewn):
    target = np.zeros(6, int)

    copy_parts(NUMPY, {0: strewn}, target, Parts([part([6], (0, 1), (0, 1))]))

    assert target.tolist() == strewn.tolist()
    assert not calls


def test_what_the_kernel_does_not_do_is_done_without_it(kernels, use, monkeypatch):
    monkeypatch.setattr(type(kernels[-1]), "copy_each", lambda *_: False)
    target = np.zeros(4, int)

    with use(kernels[-1]):
        copy_parts(NUMPY, {0: np.arange(4)}, target, Parts([part([4], (0, 1), (0, 1))]))

    assert target.tolist() == [0, 1, 2, 3]


def test_copies_of_one_call_are_those_of_a_loop(kernels):
    random_ = random.Random(7)  # noqa: S311
    sources = [np.random.default_rng(seed).integers(0, 256, 4000, np.uint8) for seed in range(3)]
    expected, target = np.zeros(6000, np.uint8), np.zeros(6000, np.uint8)
    numbers, count = [], 0
    for at in range(0, 6000, 120):
        which, run, steps = random_.randrange(3), random_.randint(1, 30), random_.randint(1, 4)
        start = random_.randint(0, 3000)
        numbers += [which, at, start, run, 1, steps, 100, 30]
        count += 1
        for step in range(steps):
            read = sources[which][start + 100 * step :][:run]
            expected[at + 30 * step :][:run] = read
    places = np.array([source.ctypes.data for source in sources], np.uintp).tobytes()
    packed = np.array(numbers, np.int64).tobytes()

    assert kernels[-1].copy_each(target.ctypes.data, places, packed, count)
    assert np.array_equal(target, expected)


def test_a_copy_with_too_many_loops_ends_the_call_and_says_so(kernels):
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    places = np.array([source.ctypes.data], np.uintp).tobytes()
    deep = [0, 1, 0, 1, 33, *[2, 0, 0] * 33]
    numbers = [0, 0, 0, 1, 0, *deep, 0, 2, 0, 1, 0]

    done = kernels[-1].copy_each(
        target.ctypes.data, places, np.array(numbers, np.int64).tobytes(), 3
    )

    assert not done
    assert target.tolist() == [1] + 7 * [0]


def test_threads_that_share_parts_copy_what_one_copies(kernels, use):
    random_ = random.Random(3)  # noqa: S311
    source = np.random.default_rng(3).integers(0, 1 << 30, 1 << 16)
    order = random_.sample(range(512), 512)
    expected = source.reshape(512, 128)[order]
    together = threading.Barrier(8)

    def copied(parts):
        target = np.zeros(1 << 16, int)
        together.wait()
        copy_parts(NUMPY, {0: source}, target, parts)
        return np.array_equal(target.reshape(512, 128), expected)

    with use(kernels[-1]), ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            # New ones, so that all threads pack them at once.
            moved = [part([128], (128 * row, 1), (128 * at, 1)) for at, row in enumerate(order)]
            assert all(pool.map(copied, [Parts(moved)] * 8))


@pytest.mark.interop
class TestTensors:
    """What only PyTorch asks for."""

    PARTS = Parts([part([6], (0, 1), (0, 1))])

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.fixture
    def tensors(self, torch):
        from restride.arrays._torch import TorchFramework

        return TorchFramework(torch)

    @pytest.mark.parametrize("is_old", [False, True])
    def test_autograd_notices_a_write(self, torch, tensors, calls, monkeypatch, is_old):
        if is_old:
            monkeypatch.delattr(torch.autograd.graph, "increment_version")
        factor, weight = torch.ones(6), torch.ones(6, requires_grad=True)
        product = (weight * factor).sum()

        copy_parts(tensors, {0: torch.zeros(6)}, factor, self.PARTS)

        assert calls == [1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_a_tensor_of_no_dimension_is_one(self, torch, tensors, calls):
        target = torch.tensor(0.0)

        copy_parts(tensors, {0: torch.tensor(7.0)}, target, Parts([part([], (0,), (0,))]))

        assert calls == [1]
        assert target.item() == 7

    def test_memory_of_another_device_or_kind_is_left_to_torch(self, torch, tensors, calls):
        class Sub(torch.Tensor):
            pass

        target = torch.zeros(6)

        copy_parts(tensors, {0: torch.arange(6.0).as_subclass(Sub)}, target, self.PARTS)
        copy_parts(tensors, {0: torch.zeros(6, device="meta")}, target.to("meta"), self.PARTS)

        assert not calls
        assert target.tolist() == list(range(6))

    @pytest.mark.parametrize(
        ("threads", "rows", "run", "more", "at_once"),
        [
            (2, 1024, 512, [], 0),
            (2, 1, 1 << 19, [], 0),
            (1, 1024, 512, [], 1),
            (2, 1023, 512, [], 1),  # less than a mebibyte
            (2, 2048, 511, [], 1),  # in runs of less than a kibibyte
            (2, 1024, 512, [part([2], (0, 1), (0, 1))], 1),  # a small part beside it
        ],
    )
    def test_large_copies_are_left_to_torch_where_it_has_threads_for_them(
        self, torch, tensors, calls, monkeypatch, threads, rows, run, more, at_once
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        singles = []
        monkeypatch.setattr("restride.arrays._torch.copy_at", lambda *given: singles.append(given))
        source = torch.arange(rows * run * 2, dtype=torch.int32).short()
        target = torch.zeros(rows * run).short()
        large = part([rows, run], (0, 2 * run, 1), (0, run, 1))

        copy_parts(tensors, {0: source}, target, Parts([*more, large]))

        assert torch.equal(target.view(rows, run), source.view(rows, 2 * run)[:, :run])
        assert len(calls) == at_once
        assert not singles


def test_rows_that_are_turned_around_in_the_target_are_one_call(calls):
    rows = [Piece((Axis(3, 1, 0, 1),), 3 * row, 0, 3 * row) for row in range(8)]
    turned = [Piece((Axis(3, 1, 0, 1),), 3 * row, 0, 21 - 3 * row) for row in range(8)]
    source, target = (Layout.of({"tp": 1}, (8, 3), [(8, 3)], cut) for cut in (rows, turned))
    full = np.arange(24).reshape(8, 3)

    moved = move(compose(target, source), {0: full})

    assert moved[0].tolist() == full[::-1].tolist()
    assert len(calls) == 1


def test_without_a_kernel_nothing_is_asked_of_it(calls, use):
    target = np.zeros(2, int)

    with use(None):
        assert _kernel.KERNEL is None
        copy_parts(NUMPY, {0: np.arange(2)}, target, Parts([part([2], (0, 1), (0, 1))]))

    assert target.tolist() == [0, 1]
    assert not calls
