"""`probe` finds the layout of a partition function, or says what the function does instead."""

from __future__ import annotations

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from restride.algebra.coverage import Covered, prove
from restride.algebra.signature import same_layout
from restride.arrays.extract import extract
from restride.arrays.probe import probe
from restride.errors import LayoutError, UnsupportedError
from restride.testing.partitions import PARTITIONS
from restride.testing.strategies import layouts

CASES = [(partition, ranks) for partition in PARTITIONS for ranks in partition.ranks[-1:]]


def numpy_probe(partition, shape, ranks=2, **options):
    return probe(partition, shape, mesh={"tp": ranks}, framework="numpy", **options)


def rows(full, rank):
    return np.split(full, 2)[rank]


@given(layouts())
def test_probing_what_a_layout_extracts_gives_the_layout(layout):
    def partition(full, rank):
        return extract(layout, full, rank)

    def same_shape(shape, factor):  # noqa: ARG001 - a layout has one
        return shape

    found = probe(
        partition, layout.full_shape, mesh=layout.mesh, framework="numpy", scale_shape=same_shape
    )

    assert found.is_bit_exact
    assert isinstance(prove(found.layout), Covered)
    if all(padding.fill == "zero" for padding in layout.padding):
        assert same_layout(found.layout, layout)


@pytest.mark.parametrize(
    ("partition", "ranks"), CASES, ids=lambda case: getattr(case, "name", case)
)
def test_partitions_of_frameworks_are_found_at_several_sizes(partition, ranks):
    sizes = {partition.shape(size): size for size in (1, 2, 4)}

    def cut(full, rank):
        return partition.cut(full, sizes[full.shape], ranks, rank)

    found = numpy_probe(
        cut,
        partition.shape(1),
        ranks,
        scale_shape=lambda shape, factor: partition.shape({2: 2, 3: 4}[factor]),  # noqa: ARG005
    )

    assert len(found.layout.all_pieces) == partition.pieces
    assert found.checked_shapes == tuple(sizes)
    assert found.is_size_independent
    assert found.refused == ()


def test_the_sizes_that_were_checked_are_named():
    found = numpy_probe(rows, (4, 3))

    assert found.checked_shapes == ((4, 3), (8, 6))
    assert (found.framework, found.dtype) == ("numpy", "int64")


def test_sizes_that_the_function_refuses_are_named_with_its_reason():
    def eight_rows_only(full, rank):
        if full.shape[0] != 8:
            raise KeyError("8 rows")
        return rows(full, rank)

    found = numpy_probe(eight_rows_only, (8, 3))

    assert found.checked_shapes == ((8, 3), (8, 6))
    assert [refused.shape for refused in found.refused] == [(16, 6), (24, 9), (16, 3)]
    assert found.refused[0].reason == "rank 0: KeyError: '8 rows'"


def test_a_function_for_one_size_is_not_called_size_independent():
    def this_size_only(full, rank):
        assert full.shape == (8, 3), "another size"
        return rows(full, rank)

    found = numpy_probe(this_size_only, (8, 3))

    assert found.others == ()
    assert len(found.refused) == 4
    assert not found.is_size_independent


def test_a_layout_that_grows_with_the_tensor_is_not_called_size_independent():
    def by_table(full, rank):
        return full[np.random.default_rng(0).permutation(len(full))][rank::2]

    found = numpy_probe(by_table, (16,))

    assert not found.is_size_independent
    assert len(found.others[0].all_pieces) > len(found.layout.all_pieces)


def test_large_tensors_are_checked_at_half_the_size(monkeypatch):
    monkeypatch.setattr(sys.modules["restride.arrays.probe"], "_LARGEST_ENLARGED_NUMEL", 100)

    assert numpy_probe(rows, (8, 6)).checked_shapes == ((8, 6), (4, 3))
    assert numpy_probe(rows, (8, 5)).checked_shapes == ((8, 5), (16, 5))


# --- padding and scale


def test_zeros_that_come_from_no_element_are_padding():
    def padded(full, rank):
        return np.pad(full, [(0, 1), (0, 0)])[2 * rank : 2 * rank + 2]

    found = numpy_probe(padded, (3, 2))

    (padding,) = found.layout.padding
    assert (padding.rank_base, padding.shard_base, padding.fill) == (1, 2, "zero")


def test_a_fill_that_is_not_zero_is_refused():
    def padded(full, rank):
        return np.pad(full, [(0, 1)], constant_values=7)[2 * rank : 2 * rank + 2]

    with pytest.raises(UnsupportedError, match=r"rank 1: .*\(1,\) is always 7(\.0)?; only zeros"):
        numpy_probe(padded, (3,))


@pytest.mark.parametrize("ranks", [2, 3, 7, 48])
def test_a_scaled_bias_is_found_with_its_exact_fraction(ranks):
    found = numpy_probe(lambda full, rank: full / ranks, (96,), ranks)  # noqa: ARG005

    (piece,) = found.layout.all_pieces
    assert piece.scale == Fraction(1, ranks)
    assert found.is_bit_exact
    assert found.dtype == "float64"


def test_a_reciprocal_is_told_from_a_division():
    found = numpy_probe(lambda full, rank: full * (1 / 3), (999,), 3)  # noqa: ARG005

    assert found.layout.all_pieces[0].scale == Fraction(1, 3)
    assert not found.is_bit_exact


def test_parts_of_different_scale_are_pieces_of_different_scale():
    def partition(full, rank):
        return np.concatenate([rows(full[:4], rank), full[4:] / 2, np.zeros(1)])

    found = numpy_probe(partition, (6,), scale_shape=lambda shape, factor: (4 + 2 * factor,))  # noqa: ARG005

    assert {piece.scale for piece in found.layout.all_pieces} == {Fraction(1), Fraction(1, 2)}
    assert isinstance(prove(found.layout), Covered)
    assert found.layout.padding[0].shard_base == 4


def test_a_sign_is_a_scale():
    found = numpy_probe(lambda full, rank: -rows(full, rank), (4,))

    assert found.layout.all_pieces[0].scale == -1


# --- what is no layout


def test_a_sum_is_told_from_a_view():
    def summed(full, rank):
        return np.stack([full[rank], full[0] + full[1]])

    with pytest.raises(UnsupportedError, match=r"rank 0: .*\(1, 0\) adds up several elements"):
        numpy_probe(summed, (2, 3))


def test_an_average_is_told_from_a_view_although_it_hits_a_marker():
    with pytest.raises(UnsupportedError, match="adds up several elements"):
        numpy_probe(lambda full, rank: (full[0] + full[2]) / 2 + 0 * rank, (3, 2))


def test_a_sort_is_told_from_a_view_although_markers_are_sorted():
    with pytest.raises(UnsupportedError, match="comes from a place that depends on the data"):
        numpy_probe(lambda full, rank: rows(np.sort(full), rank), (8,))


@pytest.mark.parametrize("function", [np.abs, np.square, np.tanh])
def test_other_arithmetic_is_told_from_a_view(function):
    with pytest.raises(UnsupportedError, match="another way than by copying or scaling"):
        numpy_probe(lambda full, rank: rows(function(full), rank), (8,))


def test_an_offset_is_told_from_a_view():
    with pytest.raises(UnsupportedError, match="another way than by copying"):
        numpy_probe(lambda full, rank: rows(full + 1, rank), (8,))


def test_a_cast_is_told_from_a_view():
    with pytest.raises(UnsupportedError, match="casts float64 to float32"):
        numpy_probe(lambda full, rank: rows(full, rank).astype(np.float32), (8,))


def test_integers_that_are_scaled_are_not_called_a_sum():
    with pytest.raises(UnsupportedError, match="is an element times 3, and int64 elements"):
        numpy_probe(lambda full, rank: 3 * rows(full, rank), (8,), dtype="int64")


def test_a_shape_that_depends_on_the_data_is_refused():
    with pytest.raises(UnsupportedError, match="shape of the shard depends on the data"):
        numpy_probe(lambda full, rank: full[full > 4 + rank], (8,))


def test_a_function_that_answers_differently_each_time_is_refused():
    calls = iter(range(1000))

    with pytest.raises(UnsupportedError, match="another shard each time"):
        numpy_probe(lambda full, rank: np.roll(rows(full, rank), next(calls) // 6), (8,))


def test_a_function_that_writes_into_its_argument_is_probed_all_the_same():
    def greedy(full, rank):
        part = rows(full, rank).copy()
        full[...] = 0
        return part

    assert numpy_probe(greedy, (4,)).layout == numpy_probe(rows, (4,)).layout


# --- hostile input


def test_a_function_that_fails_is_refused_with_what_it_raised_on_each_kind_of_array():
    def broken(full, rank):  # noqa: ARG001
        raise ZeroDivisionError("by rank")

    with pytest.raises(UnsupportedError, match="numpy int64: rank 0: ZeroDivisionError: by rank;"):
        numpy_probe(broken, (4,))


def test_what_is_no_array_is_no_shard():
    with pytest.raises(UnsupportedError, match=r"rank 0 got no shard: builtins\.NoneType"):
        numpy_probe(lambda full, rank: None, (4,))  # noqa: ARG005


@pytest.mark.parametrize(
    ("shape", "mesh", "message"),
    [((-1,), "tp=2", "at least 0"), ((2.0,), "tp=2", "integer"), ((4,), "tp=0", "at least 1")],
)
def test_a_shape_or_mesh_that_is_none_is_refused(shape, mesh, message):
    with pytest.raises(LayoutError, match=message):
        probe(rows, shape, mesh=mesh, framework="numpy")


def test_too_many_elements_for_the_markers_are_refused():
    with pytest.raises(UnsupportedError, match="float32 tells 16777216 numbers apart"):
        numpy_probe(rows, (1 << 23, 2), dtype="float32")


def test_an_empty_tensor_and_a_scalar_are_probed():
    assert numpy_probe(rows, (0, 4)).layout.all_pieces == ()
    (piece,) = numpy_probe(lambda full, rank: full, ()).layout.all_pieces  # noqa: ARG005
    assert piece.numel == 2


def test_a_scalar_of_numpy_is_a_shard_of_no_dimension():
    found = numpy_probe(lambda full, rank: full[rank], (2,), scale_shape=lambda shape, _: shape)

    assert found.layout.shard_shape(1) == ()


def test_infinities_are_no_markers():
    with pytest.raises(UnsupportedError, match="is always inf"):
        numpy_probe(lambda full, rank: rows(full, rank) * np.inf, (8,), dtype="float64")


def test_what_is_no_layout_at_another_size_is_refused_with_that_size():
    def sums_when_large(full, rank):
        part = rows(full, rank)
        return part if len(full) == 4 else part + part[::-1]

    with pytest.raises(UnsupportedError, match=r"^at shape \(8,\): rank 0: .*adds up"):
        numpy_probe(sums_when_large, (4,))


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", "int64"])
def test_the_element_type_may_be_asked_for(dtype):
    def strict(full, rank):
        assert full.dtype == dtype
        return rows(full, rank)

    assert numpy_probe(strict, (4, 2), dtype=dtype).dtype == dtype


# --- PyTorch


@pytest.mark.interop
def test_a_function_of_torch_is_run_on_tensors_where_torch_is_imported():
    torch = pytest.importorskip("torch")

    def transposed(full, rank):
        return full.transpose(0, 1).chunk(2)[rank]

    found = probe(transposed, (4, 6), mesh={"tp": 2})

    assert (found.framework, found.dtype) == ("torch", "int64")
    full = torch.arange(24).reshape(4, 6)
    assert torch.equal(extract(found.layout, full, 1), transposed(full, 1))


@pytest.mark.interop
def test_a_function_of_numpy_is_run_on_arrays_even_where_torch_is_imported():
    pytest.importorskip("torch")

    found = probe(lambda full, rank: np.concatenate([full, full])[rank::2], (4, 6), mesh={"tp": 2})

    assert found.framework == "numpy"


@pytest.mark.interop
def test_a_function_that_wants_floats_is_given_floats():
    torch = pytest.importorskip("torch")

    found = probe(
        lambda full, rank: torch.nn.Parameter(full.chunk(2)[rank]),
        (4, 6),
        mesh={"tp": 2},
        framework="torch",
    )

    assert found.dtype == "float64"


@pytest.mark.interop
def test_torch_that_is_not_imported_is_not_run(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    with pytest.raises(UnsupportedError, match="PyTorch has not been imported"):
        probe(rows, (4,), mesh={"tp": 2}, framework="torch")


@pytest.mark.interop
@pytest.mark.parametrize(("ranks", "heads"), [(2, 16), (4, 16), (2, 32), (4, 32), (8, 32)])
def test_the_codegen_partition_of_deepspeed_is_one_piece_on_all_ranks(ranks, heads):
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    class Module:
        def __str__(self) -> str:
            return "CodeGenBlock"

    def partition(full, rank):
        meta = AutoTPMeta(num_kv_heads=heads)
        return fused.prepare_tp_fused_qkvw(Module(), full, ranks, rank, meta)

    found = probe(partition, (3 * heads * 8, 24), mesh={"tp": ranks}, framework="torch")

    assert len(found.layout.all_pieces) == 1
    assert all(len(layout.pieces(rank)) == 1 for rank in range(ranks) for layout in found.others)
    assert found.is_size_independent
    restated = next(case for case in PARTITIONS if case.name == "deepspeed codegen")
    mine = numpy_probe(
        lambda full, rank: restated.cut(full, 1, ranks, rank), (3 * heads * 8, 24), ranks
    )
    assert same_layout(found.layout, mine.layout)


@pytest.mark.interop
def test_shared_value_heads_of_deepspeed_are_one_piece():
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    def partition(full, rank):
        meta = AutoTPMeta(num_kv_heads=16)
        return fused.shard_value_with_share_qk(full, None, rank, 4, True, meta)[0]  # noqa: FBT003

    found = probe(partition, (64, 8), mesh={"tp": 4}, framework="torch")

    assert found.dtype == "float64"
    assert len(found.layout.all_pieces) == 1
