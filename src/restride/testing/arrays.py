"""Arrays to test with: any dtype, any place in memory; and the slow way to cut them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from restride.testing.oracles import walk_piece

if TYPE_CHECKING:
    from random import Random

    from numpy.typing import NDArray

    from restride.algebra.layout import Layout

__all__ = ["extract_by_walking", "random_elements", "somewhere_in_memory"]


def extract_by_walking(layout: Layout, full: NDArray[Any], rank: int) -> NDArray[Any]:
    """What `extract` must return, one element at a time."""
    shard = np.zeros(layout.shard_shape(rank), full.dtype)
    for piece in layout.all_pieces:
        for full_index, holder, shard_index in walk_piece(piece):
            if holder == rank:
                element = full[np.unravel_index(full_index, full.shape)] if full.ndim else full[()]
                if piece.scale.numerator != 1:
                    element = element * element.dtype.type(piece.scale.numerator)
                if piece.scale.denominator != 1:
                    element = element / element.dtype.type(piece.scale.denominator)
                shard[np.unravel_index(shard_index, shard.shape) if shard.ndim else ()] = element
    return shard


def random_elements(random: Random, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Elements of any bit pattern, NaNs and negative zeros among them, but for bools."""
    kind = np.dtype(dtype)
    numel = int(np.prod(shape, dtype=np.int64))
    words = np.frombuffer(random.randbytes(numel * kind.itemsize), np.uint8)
    if kind.kind == "b":
        words = words & np.uint8(1)
    elements: NDArray[Any] = words.copy().view(kind).reshape(shape)
    return elements


def somewhere_in_memory(random: Random, array: NDArray[Any]) -> NDArray[Any]:
    """The same elements in another memory order: transposed, reversed, or in a larger array."""
    order = list(range(array.ndim))
    random.shuffle(order)
    starts = [random.randint(0, 2) for _ in order]
    steps = [random.choice([1, 1, 2, -1]) for _ in order]
    room = tuple(
        start + abs(step) * array.shape[axis] + random.randint(0, 1)
        for axis, start, step in zip(order, starts, steps, strict=True)
    )
    memory = np.zeros(room, array.dtype)
    view = memory
    for place, (axis, start, step) in enumerate(zip(order, starts, steps, strict=True)):
        stop = start + abs(step) * array.shape[axis]
        forward = (slice(None),) * place + (slice(start, stop, abs(step)),)
        view = view[forward]
        if step < 0:
            view = np.flip(view, place)
    view = view.transpose(np.argsort(order)) if array.ndim else view
    view[...] = array
    return view
