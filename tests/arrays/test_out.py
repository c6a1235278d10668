"""Results go into memory that the caller has, where the caller hands it in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import plan_transfer
from restride.arrays._numpy import NumpyFramework
from restride.arrays.extract import extract
from restride.arrays.move import move
from restride.arrays.rebuild import rebuild
from restride.errors import LayoutError, ShapeMismatchError, UnsupportedError
from restride.layouts import codegen_qkv, padded, split
from restride.testing.arrays import random_elements
from restride.testing.strategies import layouts

pytestmark = pytest.mark.usefixtures("both_ways")

ROWS = split((4, 6), mesh={"tp": 2})
COLUMNS = split((4, 6), mesh={"tp": 3}, dim=1)


def cut(layout, full):
    return {rank: extract(layout, full, rank) for rank in range(layout.rank_count)}


@given(layouts(with_scales=False), st.randoms(use_true_random=False))
def test_a_shard_is_written_over_whatever_the_memory_held(layout, random):
    full = random_elements(random, layout.full_shape, "int64")
    rank = random.randrange(layout.rank_count)
    memory = np.full(layout.shard_shape(rank), 77)

    shard = extract(layout, full, rank, out=memory)

    assert shard is memory
    assert shard.tobytes() == extract(layout, full, rank).tobytes()


def test_padding_is_zero_in_memory_that_was_not():
    layout = padded((5, 2), mesh={"tp": 2}, rows=6)
    memory = np.full((3, 2), 9.0)

    extract(layout, np.ones((5, 2)), 1, out=memory)

    assert memory.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_a_full_tensor_and_moved_shards_go_where_they_are_told():
    full = np.arange(96 * 4).reshape(96, 4)
    two, four = (codegen_qkv((96, 4), mesh={"tp": tp}, heads=16) for tp in (2, 4))
    whole, one = np.empty_like(full), np.empty((24, 4), full.dtype)

    assert rebuild(two, cut(two, full), out=whole) is whole
    moved = move(plan_transfer(four, two), cut(two, full), out={2: one})

    assert np.array_equal(whole, full)
    assert moved[2] is one
    assert [shard.tolist() for shard in moved.values()] == [
        shard.tolist() for shard in cut(four, full).values()
    ]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_memory_may_touch_what_is_read_and_have_no_byte_of_it(framework):
    content = np.arange(60, dtype=np.uint8)
    memory = content.copy()
    if framework == "torch":
        memory = pytest.importorskip("torch").from_numpy(memory)
    full = memory[18:42].reshape(4, 6)

    for start in (6, 42):
        shard = extract(ROWS, full, 1, out=memory[start : start + 12].reshape(2, 6))
        assert shard.tolist() == content[30:42].reshape(2, 6).tolist()
    for start in (7, 41):
        with pytest.raises(UnsupportedError, match="shares memory with what is read"):
            extract(ROWS, full, 1, out=memory[start : start + 12].reshape(2, 6))


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        (np.empty((2, 5)), ShapeMismatchError, r"has shape \(2, 5\)"),
        (np.empty((2, 6), np.float32), UnsupportedError, "is numpy float32 cpu"),
        (np.empty((6, 2)).T, UnsupportedError, "not a contiguous array"),
        (np.frombuffer(bytes(96)).reshape(2, 6), UnsupportedError, "can be written"),
    ],
)
def test_memory_that_is_not_fit_is_refused_and_not_written(out, error, says):
    with pytest.raises(error, match=says):
        extract(ROWS, np.ones((4, 6)), 0, out=out)


def test_memory_that_is_read_is_never_written():
    full = np.arange(24.0).reshape(4, 6)
    shards = cut(ROWS, full)
    memory = np.zeros(24)
    first, second = memory[:8].reshape(4, 2), memory[4:12].reshape(4, 2)

    with pytest.raises(UnsupportedError, match="shares memory"):
        extract(ROWS, full, 0, out=full[:2])
    with pytest.raises(UnsupportedError, match="out of rank 1: shares memory"):
        move(plan_transfer(COLUMNS, ROWS), shards, out={0: first, 1: second})
    assert full.tolist() == np.arange(24.0).reshape(4, 6).tolist()
    assert not memory.any()


def test_arrays_whose_bytes_are_in_another_order_are_refused_and_not_mixed():
    """They have a dtype of the same name, and were copied bit for bit."""
    full = np.arange(24, dtype="<f4").reshape(4, 6)
    shards = cut(ROWS, full)
    mixed = {0: shards[0], 1: shards[1].astype(">f4")}

    for call in (
        lambda: rebuild(ROWS, mixed),
        lambda: move(plan_transfer(COLUMNS, ROWS), mixed),
    ):
        with pytest.raises(UnsupportedError, match="rank 1: the shard is numpy >f4 cpu, that of"):
            call()
    with pytest.raises(UnsupportedError, match="out: is numpy >f4 cpu, what is read is numpy flo"):
        extract(ROWS, full, 0, out=np.empty((2, 6), ">f4"))
    # All of them in that order are fine.
    turned = {rank: shard.astype(">f4") for rank, shard in shards.items()}
    assert rebuild(ROWS, turned).dtype == np.dtype(">f4")
    assert np.array_equal(rebuild(ROWS, turned), full)


def test_records_with_other_fields_are_refused_and_not_mixed():
    full = np.zeros((4, 6), [("a", "i4"), ("b", "f4")])

    with pytest.raises(UnsupportedError, match="what is read is numpy"):
        extract(ROWS, full, 0, out=np.empty((2, 6), [("a", "f4"), ("b", "i4")]))


def test_empty_memory_is_in_nobodys_way():
    empty = split((0, 6), mesh={"tp": 2})
    full = np.ones((3, 6))

    assert extract(empty, full[2:2], 0, out=full[1:1]).shape == (0, 6)


@pytest.mark.parametrize("rank", [3, -1])
def test_a_target_rank_that_does_not_exist_is_named(rank):
    with pytest.raises(LayoutError, match=f"array for rank {rank}, the target has 3 ranks"):
        move(
            plan_transfer(COLUMNS, ROWS),
            cut(ROWS, np.ones((4, 6))),
            out={rank: np.empty((4, 2))},
        )


def test_what_is_on_another_device_is_neither_read_nor_written(monkeypatch):
    """As a tensor on a second GPU is, which nobody has here."""
    there = np.empty((2, 6))
    monkeypatch.setattr(
        NumpyFramework,
        "place",
        lambda _, array: "there" if np.shares_memory(array, there) else "here",
    )
    full = np.ones((4, 6))
    with pytest.raises(UnsupportedError, match="is numpy float64 there, what is read is"):
        extract(ROWS, full, 0, out=there)
    with pytest.raises(UnsupportedError, match="the shard is numpy float64 there, that of rank 0"):
        rebuild(ROWS, {**cut(ROWS, full), 1: there})


@pytest.mark.interop
def test_tensors_are_written_in_place_and_told_from_views_that_share_memory():
    torch = pytest.importorskip("torch")
    full = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    parameter = torch.nn.Parameter(torch.full((2, 6), 7, dtype=torch.bfloat16))

    assert extract(ROWS, full, 1, out=parameter) is parameter
    assert torch.equal(parameter.data, full[2:])
    for out, says in (
        (full[1:3], "shares memory"),
        (torch.empty(2, 6), "is torch float32 cpu, what is read is torch bfloat16 cpu"),
        (torch.empty(6, 2, dtype=torch.bfloat16).T, "not a contiguous array"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            extract(ROWS, full, 0, out=out)
    # Beside each other in one memory is not the same memory.
    assert torch.equal(extract(ROWS, full[:, :], 0, out=torch.empty(4, 6).bfloat16()[:2]), full[:2])
    assert torch.equal(full.flatten(), torch.arange(24).bfloat16())
