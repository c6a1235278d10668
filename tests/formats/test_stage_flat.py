"""Where parameters begin in a flat buffer: the one way through it, or a reason."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride.formats.deepspeed._numbering import Unmatched
from restride.formats.deepspeed._pipeline.flat import FlatCutter
from restride.formats.deepspeed._whole.flat import Place, view_of
from restride.formats.deepspeed._witness import Witness
from restride.storage.ranges import FilePool
from restride.storage.torch_zip import open_torch_zip
from restride.testing.saved_values import Array, save_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from restride.formats.deepspeed._pipeline.flat import FlatCut

Weights = list["NDArray[np.float16]"]


def cut_of(weights: Weights, flat: NDArray[np.float32]) -> FlatCut | Unmatched:
    """What is found, from files."""
    with TemporaryDirectory() as folder, FilePool() as pool:
        layers, model = Path(folder, "layers.pt"), Path(folder, "model.pt")
        save_file(layers, [Array("float16", w.shape, w.tobytes()) for w in weights])
        save_file(model, Array("float32", flat.shape, flat.tobytes()))
        stored: Any = [open_torch_zip(file).value for file in (layers, model)]
        return FlatCutter(stored[0], Witness(pool)).cut(stored[1])


def ways(weights: Sequence[NDArray[np.float16]], flat: NDArray[np.float16]) -> set[Any]:
    """Every sequence of shapes of weights that the whole buffer is, by trying all."""

    def behind(start: int) -> Iterator[tuple[Any, ...]]:
        if start == flat.size:
            yield ()
        for weight in weights:
            part = flat[start : start + weight.size]
            if weight.size and np.array_equal(part, weight.ravel()):
                for rest in behind(start + weight.size):
                    yield (start, weight.shape), *rest

    return set(behind(0))


SHAPES = st.sampled_from([(1,), (2,), (2, 2), (4,), (3,), (2, 3), (3, 2), (0, 2)])


@st.composite
def buffers(draw: st.DrawFn, kind: str) -> tuple[Weights, NDArray[np.float32], FlatCut]:
    """Weights, and a buffer of some of them in any order.

    Their values are "few" ones, or no two are the same, or there are "twins" besides: one of the
    buffer has the values of another weight, which is of another shape.
    """
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    shapes += [(2, 3)] if kind == "twins" else []
    sizes = [int(np.prod(shape)) for shape in shapes]
    spread = draw(st.sampled_from([1, 2, 50])) if kind == "few" else sum(sizes) or 1
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    values = (
        numbers.permutation(spread) if kind != "few" else numbers.integers(0, spread, sum(sizes))
    )
    parts = np.split(values[: sum(sizes)].astype(np.float32) + 0.0001, np.cumsum(sizes)[:-1])
    masters = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    weights = [master.astype(np.float16) for master in masters]
    chosen = draw(st.permutations(range(len(shapes))))[: draw(st.integers(0, len(shapes)))]
    if kind == "twins":
        chosen = draw(st.permutations(sorted({*chosen, len(shapes) - 1})))
        weights.insert(draw(st.integers(0, len(weights))), weights[-1].reshape(3, 2))
    flat, truth = [np.zeros(0, np.float32)], list[tuple[int, Any]]()
    for number in chosen:
        if masters[number].size:
            truth.append((sum(part.size for part in flat), shapes[number]))
            flat.append(masters[number].ravel())
    return weights, np.concatenate(flat), tuple(truth)


@pytest.mark.parametrize("kind", ["few", "distinct", "twins"])
@given(data=st.data())
@settings(max_examples=40)
def test_a_cut_is_the_only_one_that_fits_or_it_is_not_said(kind, data):
    weights, flat, truth = data.draw(buffers(kind))

    found, fitting = cut_of(weights, flat), ways(weights, flat.astype(np.float16))

    assert truth in fitting
    assert kind == "few" or (len(fitting) > 1) == (kind == "twins")
    assert isinstance(found, Unmatched) == (len(fitting) > 1)
    if isinstance(found, Unmatched):
        assert "is several sequences of weights of layers" in found.reason
    else:
        assert found == truth


def test_a_buffer_of_other_weights_is_none_of_these():
    numbers = np.random.default_rng(0)
    masters = [numbers.normal(size=shape).astype(np.float32) for shape in ((40, 300), (7,), (3,))]
    flat = np.concatenate([master.ravel() for master in masters])
    weights = [master.astype(np.float16) for master in masters]
    assert cut_of(weights, flat) == ((0, (40, 300)), (12000, (7,)), (12007, (3,)))

    changed = cut_of([*weights[:1], weights[1] + np.float16(1), weights[2]], flat)
    short = cut_of(weights, flat[:-1])

    assert isinstance(changed, Unmatched)
    assert "has 12010 elements, and from element 12000 on it rounds to no weight" in changed.reason
    assert isinstance(short, Unmatched)
    assert "from element 12007 on" in short.reason
    assert cut_of(weights, flat.reshape(-1, 1)) == Unmatched(
        "has shape (12010, 1), which is not flat"
    )


def test_weights_that_are_what_they_were_initialised_with_take_no_time():
    """A buffer of zeros fits small weights at every place."""
    weights = [np.zeros(n, np.float16) for n in (1, 2, 3, 1000)]

    found = cut_of(weights, np.zeros(100_000, np.float32))

    assert isinstance(found, Unmatched)
    assert "still what they were initialised with" in found.reason


def test_a_part_of_a_buffer_with_a_step_is_taken_with_it(tmp_path):
    content = np.arange(8, dtype=np.float32).tobytes()
    save_file(tmp_path / "file.pt", Array("float32", (4,), content, strides=(2,)))
    flat = open_torch_zip(tmp_path / "file.pt").value

    view = view_of(flat, Place("", 1, (3, 1)))

    assert (view.storage_base, view.shape, view.strides) == (2, (3, 1), (2, 2))
