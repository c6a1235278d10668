"""Tensors go in and come out as NumPy arrays do, with every dtype and any memory."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import restride
from restride.algebra.compose import compose
from restride.algebra.layout import Layout, Padding
from restride.algebra.piece import Axis, Piece
from restride.arrays import _kernel
from restride.arrays.extract import extract
from restride.arrays.move import move
from restride.arrays.rebuild import rebuild
from restride.errors import LayoutError, ReplicaError, UnsupportedError
from restride.testing.arrays import random_elements
from restride.testing.strategies import layouts

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("both_ways")]
torch = pytest.importorskip("torch")

# Each PyTorch dtype beside a NumPy dtype of the same width.
WIDTHS = {
    "float32": "uint32",
    "float64": "uint64",
    "float16": "uint16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int64": "uint64",
    "int8": "uint8",
    "bool": "bool",
    "complex64": "complex64",
    "complex128": "complex128",
}
ROWS = Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))])
COLUMNS = Layout.of({"tp": 3}, (4, 3), [(4, 1)] * 3, [Piece((Axis(3, 1, 1, 0), Axis(4, 3, 0, 1)))])


def everywhere(ranks: int, numel: int, scale: Fraction = Fraction(1)) -> Layout:
    piece = Piece((Axis(ranks, 0, 1, 0), Axis(numel, 1, 0, 1)), scale=scale)
    return Layout.of({"tp": ranks}, (numel,), [(numel,)] * ranks, [piece])


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    if not array.size:
        return torch.zeros(array.shape, dtype=getattr(torch, dtype))
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
    return flat.view(getattr(torch, dtype)).reshape(array.shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def somewhere(random, tensor: torch.Tensor) -> torch.Tensor:
    """The same elements transposed, with steps, inside a larger storage."""
    order = list(range(tensor.ndim))
    random.shuffle(order)
    steps = [random.choice([1, 1, 2]) for _ in order]
    room = [steps[at] * tensor.shape[axis] + 1 for at, axis in enumerate(order)]
    memory = torch.zeros(room, dtype=torch.uint8).to(tensor.dtype)
    view = memory
    for at, axis in enumerate(order):
        view = view.narrow(at, random.randint(0, 1), room[at] - 1)
        view = view[(slice(None),) * at + (slice(None, None, steps[at]),)]
        assert view.shape[at] == tensor.shape[axis]
    view = view.permute([order.index(axis) for axis in range(tensor.ndim)])
    view.copy_(tensor)
    return view


@given(layouts(with_scales=False), st.randoms(use_true_random=False), st.sampled_from([*WIDTHS]))
def test_tensors_are_cut_and_rebuilt_with_the_bits_of_arrays(layout, random, dtype):
    array = random_elements(random, layout.full_shape, WIDTHS[dtype])
    full = somewhere(random, as_tensor(array, dtype))

    shards = {rank: extract(layout, full, rank) for rank in range(layout.rank_count)}
    rebuilt = rebuild(layout, {rank: somewhere(random, shard) for rank, shard in shards.items()})

    for rank, shard in shards.items():
        assert bytes_of(shard) == extract(layout, array, rank).tobytes()
        assert tuple(shard.shape) == layout.shard_shape(rank)
        assert shard.dtype == full.dtype
        assert shard.is_contiguous()
    assert bytes_of(rebuilt) == array.tobytes()
    assert rebuilt.dtype == full.dtype


def test_tensors_are_moved():
    full = torch.arange(12).reshape(4, 3).to(torch.bfloat16)
    shards = {rank: extract(ROWS, full, rank) for rank in range(2)}

    moved = move(compose(COLUMNS, ROWS), shards)

    assert all(torch.equal(moved[rank], full[:, rank : rank + 1]) for rank in range(3))


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_scaled_bias_is_what_the_layer_itself_stores(ranks, dtype):
    """Fault E 3 of the peer."""
    torch.manual_seed(ranks)
    bias = torch.randn(1000).to(getattr(torch, dtype))
    layout = everywhere(ranks, 1000, Fraction(1, ranks))

    shard = extract(layout, bias, 0)

    assert bytes_of(shard) == bytes_of(bias / ranks)
    if dtype != "bfloat16":
        assert bytes_of(shard) == extract(layout, bias.numpy(), 0).tobytes()


def test_factors_and_padding_are_applied_to_tensors():
    layout = Layout.of(
        {"tp": 1},
        (3,),
        [(5,)],
        [Piece((Axis(3, 1, 0, 1),), 0, 0, 1, Fraction(-5, 7))],
        [Padding((Axis(2, 0, 0, 4),))],
    )
    full = torch.tensor([1.0, 2.0, 3.0])

    shard = extract(layout, full, 0)

    assert torch.equal(shard[1:4], full * -5 / 7)
    assert shard[[0, 4]].tolist() == [0.0, 0.0]


def test_gradients_stay_behind():
    weight = torch.nn.Parameter(torch.ones(4, 3))

    shard = extract(ROWS, weight, 0)
    rebuilt = rebuild(ROWS, {0: torch.nn.Parameter(shard), 1: torch.nn.Parameter(shard)})

    assert not shard.requires_grad
    assert not rebuilt.requires_grad


def test_lazily_conjugated_tensors_are_what_they_look_like():
    values = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    full = torch.complex(values, values).conj()

    assert torch.equal(extract(ROWS, full, 1), full[2:])
    assert torch.equal(extract(ROWS, full.imag, 1), full.imag[2:])


def test_a_view_ends_where_its_storage_goes_on():
    storage = torch.arange(100)
    window = storage[10:22].view(4, 3)
    outside = Layout.of({"tp": 1}, (4, 3), [(12,)], [Piece((Axis(12, 1, 0, 1),))])

    assert extract(ROWS, window, 1).tolist() == [[16, 17, 18], [19, 20, 21]]
    Piece.full_base.__set__(outside.all_pieces[0], 1)  # as no constructor would
    with pytest.raises(LayoutError, match="leaves the memory of an array"):
        extract(outside, window, 0)


def test_expanded_tensors_are_read_and_differences_found():
    one = torch.tensor([1.0]).expand(3)

    assert torch.equal(extract(everywhere(2, 3), one, 1), torch.ones(3))
    with pytest.raises(ReplicaError, match="copies of 3 of 3 elements"):
        rebuild(everywhere(2, 3), {0: one, 1: torch.full((3,), 2.0)})


def test_a_tensor_that_is_expanded_to_more_bytes_than_anybody_counts_is_read():
    numel = 1 << 61
    last = Layout.of({"tp": 1}, (numel,), [(2,)], [Piece((Axis(2, 1, 0, 1),), numel - 2)])

    shard = extract(last, torch.ones(1, dtype=torch.float64).expand(numel), 0)

    assert shard.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_mean_of_tensors_is_rounded_once(dtype):
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    copies = [torch.randn(500, generator=generator).to(kind) for _ in range(3)]

    mean = rebuild(everywhere(3, 500), dict(enumerate(copies)), replicas="mean")

    exact = (copies[0].double() + copies[1].double() + copies[2].double()) / 3
    error = (mean.double() - exact).abs()
    one = torch.ones((), dtype=kind)
    for other in (mean + one * 0, *_neighbours(mean)):
        assert bool((error <= (other.double() - exact).abs()).all())
    assert mean.dtype == kind


def _neighbours(tensor):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return [(tensor.view(bits) + step).view(tensor.dtype) for step in (1, -1)]


def test_drift_of_bfloat16_is_reported_in_values():
    base = torch.ones(4, dtype=torch.bfloat16)
    other = base.clone()
    other[2] = 1.5

    with pytest.raises(ReplicaError, match=r"\(2,\): 1\.0 on rank 0 and 1\.5 on rank 1") as caught:
        rebuild(everywhere(2, 4), {0: base, 1: other})
    assert caught.value.largest == 0.5


def test_complex_tensors_are_compared_in_both_parts():
    for dtype in (torch.complex64, torch.complex128):
        base = torch.ones(3, dtype=dtype)
        other = base.clone()
        other.imag[1] = 1

        with pytest.raises(ReplicaError, match="copies of 1 of 3 elements") as caught:
            rebuild(everywhere(2, 3), {0: base, 1: other})
        assert caught.value.largest is None


def test_tensors_and_arrays_do_not_mix():
    with pytest.raises(UnsupportedError, match="torch float64 cpu, that of rank 0 is numpy"):
        rebuild(ROWS, {0: np.zeros((2, 3)), 1: torch.zeros(2, 3, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 3).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(4, 3, device="meta"), "device meta"),
    ],
)
def test_tensors_without_strided_memory_are_refused(tensor, message):
    with pytest.raises(UnsupportedError, match=message):
        extract(ROWS, tensor, 0)


def test_a_distributed_tensor_is_refused_with_the_way_out():
    class Distributed(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    with pytest.raises(UnsupportedError, match=r"hand in the result of \.to_local\(\)"):
        extract(ROWS, Distributed(4, 3), 0)


@pytest.mark.parametrize("dtype", ["int32", "float8_e5m2", "bool"])
def test_what_torch_does_not_divide_cannot_be_scaled(dtype):
    layout = replace(everywhere(2, 2, Fraction(1, 2)))

    with pytest.raises(UnsupportedError, match=f"torch.{dtype} cannot be scaled"):
        extract(layout, torch.zeros(2).to(getattr(torch, dtype)), 0)


def test_a_scale_that_a_tensor_cannot_hold_is_refused():
    with pytest.raises(UnsupportedError, match=r"not exact in torch\.float32"):
        extract(everywhere(2, 2, Fraction(1, 2**24 + 1)), torch.ones(2), 0)


def test_torch_is_found_and_never_imported():
    code = (
        "import sys, numpy\n"
        "from restride import Axis, Layout, Piece, extract\n"
        "layout = Layout.of({'tp': 1}, (2,), [(2,)], [Piece((Axis(2, 1, 0, 1),))])\n"
        "extract(layout, numpy.zeros(2), 0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    source = Path(restride.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})


def test_autograd_notices_that_memory_it_needs_was_written():
    out = torch.ones(2, 3)
    weight = torch.ones(2, 3, requires_grad=True)
    loss = (weight * out).sum()

    extract(ROWS, torch.zeros(4, 3), 0, out=out)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_elements_of_a_subclass_are_reached_through_torch(monkeypatch):
    class Elsewhere(torch.Tensor):
        """Its elements need not be where its address says."""

    def refused(*_):
        raise AssertionError("the kernel was given an address")

    monkeypatch.setattr("restride.arrays._torch.copy_at", refused)
    if _kernel.KERNEL is not None:
        monkeypatch.setattr(_kernel.KERNEL, "copy_each", refused)
    full = torch.arange(12.0).view(4, 3).as_subclass(Elsewhere)

    shard = extract(ROWS, full, 1)

    assert shard.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]


def test_tensors_that_are_only_traced_have_no_address_and_are_copied_by_torch():
    full = torch.arange(12.0).view(4, 3)

    def there_and_back(tensor):
        shards = {rank: extract(ROWS, tensor, rank) for rank in range(2)}
        return rebuild(ROWS, shards)

    traced = torch.func.functionalize(there_and_back)(full)

    assert torch.equal(traced, full)
