"""Layouts and places of what the files store for one tensor.

A weight is cut by the tensor-parallel ranks, and its shard is a tensor of the model file. A master
weight or moment is cut once more: the shard is laid flat and the fragments go to the data-parallel
ranks. That second cut is a layout like the first, and the two are chained; nothing else in this
package knows of flat buffers.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from restride.algebra.canonical import canonicalize
from restride.algebra.compose import chain
from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Regions, StateEntry
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._rank_blocks import chained_in_block
from restride.frozen import Frozen
from restride.layouts.flat import flat_chunks
from restride.layouts.scaled import scaled_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.catalog import Region
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._optimizer import Group
    from restride.formats.deepspeed._partitions import FlatCut
    from restride.formats.deepspeed._run import FileTable

__all__ = [
    "FlatLayouts",
    "flat_states",
    "group_states",
    "replicas_of",
    "stored_state",
    "whole_states",
]

_Run: TypeAlias = tuple[int, int, int]
"""A fragment: its partition, its first element in the shard, its length."""


def stored_state(
    layout: Layout, tensors: Sequence[StoredTensor], files: FileTable, where: str
) -> StateEntry:
    """Describe a tensor whose shards are tensors of files, one for each rank of `layout`.

    Args:
        layout: How the ranks cut the tensor.
        tensors: The shard of each rank, as it is stored: any strides.
        files: The files.
        where: Tensor, for errors.

    Raises:
        CorruptError: The shards have different dtypes.
        UnsupportedError: A shard is a view in which elements share an address.
    """
    dtype = _one_dtype([(tensor.storage.dtype, tensor.storage.file) for tensor in tensors], where)
    if not all(tensor.is_dense for tensor in tensors):
        layout = _strided(layout, tensors, where)
    regions = tuple(files.region(t) if prod(t.shape) else None for t in tensors)
    return StateEntry(dtype, layout, regions)


def whole_states(
    layout: Layout,
    arrays: Mapping[int, Mapping[str, StoredTensor]],
    shapes: Sequence[Shape],
    files: FileTable,
    where: str,
) -> dict[str, StateEntry]:
    """Describe states that every rank of `layout` stores whole, as it does the weight.

    Args:
        layout: How the ranks cut the parameter.
        arrays: What each rank has, by state; nothing where it holds no element.
        shapes: Shape of the shard on each rank, as it is stored.
        files: The files.
        where: Tensor, for errors.

    Raises:
        CorruptError: A rank lacks a state that another one has, or has it in another dtype or
            shape.
        UnsupportedError: A state other than Adam's is stored of a scaled parameter.
    """
    states: dict[str, StateEntry] = {}
    for name in dict.fromkeys(name for known in arrays.values() for name in known):
        first = next(known[name] for known in arrays.values() if name in known)
        shards: list[StoredTensor] = []
        for rank, shape in enumerate(shapes):
            shard = arrays.get(rank, {}).get(name)
            if shard is None and not prod(shape):
                shard = replace(first, shape=shape, strides=(0,) * len(shape))
            if shard is None or shard.shape != shape:
                has = "no state" if shard is None else f"shape {shard.shape} in state"
                raise CorruptError(
                    f"rank {rank} has {has} {name!r}, its weight has shape {shape}", where=where
                )
            shards.append(shard)
        states[name] = stored_state(scaled_state(layout, name, where), shards, files, where)
    return states


class _FlatArrays(Frozen):
    """The flat arrays of one state: their type, and where each of them begins."""

    dtype: DType
    places: list[Region]


class FlatLayouts:
    """Layouts of fragments, and the arrays that they are in.

    The layers of a model are cut alike, and chained once.

    Args:
        mesh: The ranks that hold fragments, ``dp, tp``.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[object, Layout] = {}
        self._groups: Sequence[Group] = ()
        self._arrays: dict[str, _FlatArrays] = {}

    def find(self, layout: Layout, cut: FlatCut) -> Layout:
        """Chain the cut of a tensor with the cut of each of its shards into fragments."""
        runs: list[list[_Run]] = [[] for _ in range(layout.rank_count)]
        for holding in () if cut.is_even else cut.holdings:
            fragment = holding.fragment
            runs[holding.cutter].append((fragment.partition, fragment.param_base, fragment.numel))
        strides = cut.outer_stride, cut.inner_stride, cut.block
        key = layout, cut.is_even, strides, tuple(map(tuple, runs))
        if key not in self._known:
            self._known[key] = _flat_layout(layout, cut, runs, self.mesh)
        return self._known[key]

    def arrays(
        self, name: str, groups: Sequence[Group], files: FileTable, where: str
    ) -> _FlatArrays:
        """Find the arrays of a state. Parameters that follow each other are mostly in the same."""
        if list(map(id, groups)) != list(map(id, self._groups)):
            self._groups, self._arrays = groups, {}
        if name not in self._arrays:
            dtype = _one_dtype([_dtype_of(group, name, where) for group in groups], where)
            places = [files.region(group.arrays[name]) for group in groups]
            self._arrays[name] = _FlatArrays(dtype, places)
        return self._arrays[name]


def flat_states(
    layout: Layout, cut: FlatCut, layouts: FlatLayouts, files: FileTable, where: str
) -> dict[str, StateEntry]:
    """Describe the master weight and the optimizer states of a parameter.

    Args:
        layout: How the tensor-parallel (or expert-parallel) ranks cut it.
        cut: The fragments of their shards; all in files that are there.
        layouts: Those of other parameters on the same ranks.
        files: The files.
        where: Tensor, for errors.

    Raises:
        CorruptError: A rank lacks a state that another one has, or has it in another dtype.
        UnsupportedError: A state other than Adam's is stored of a scaled parameter.
    """
    held = [holding for holding in cut.holdings if holding.group is not None]
    groups = [holding.group for holding in held if holding.group is not None]
    flat = layouts.find(layout, cut)
    states: dict[str, StateEntry] = {}
    for name in dict.fromkeys(name for group in groups for name in group.arrays):
        arrays = layouts.arrays(name, groups, files, where)
        regions = Regions.nowhere(layouts.mesh.size)
        itemsize_nbytes = arrays.dtype.itemsize_nbytes
        for holding, first in zip(held, arrays.places, strict=True):
            skipped_nbytes = holding.fragment.partition_base * itemsize_nbytes
            regions.put(holding.rank, first.file, first.start_nbytes + skipped_nbytes)
        states[name] = StateEntry(arrays.dtype, scaled_state(flat, name, where), regions)
    return states


def group_states(
    scalars: Mapping[int, Mapping[str, StoredTensor]], mesh: Mesh, files: FileTable, where: str
) -> dict[str, StateEntry]:
    """Describe what is stored once for a whole group, such as the step: replicas of a scalar.

    Args:
        scalars: What each rank has, by name.
        mesh: The ranks.
        files: The files.
        where: Tensor, for errors.
    """
    states: dict[str, StateEntry] = {}
    for name in dict.fromkeys(name for known in scalars.values() for name in known):
        held = {rank: known[name] for rank, known in scalars.items() if name in known}
        pieces = [Piece((), rank_base=rank) for rank in held]
        states[name] = StateEntry(
            _one_dtype([(t.storage.dtype, t.storage.file) for t in held.values()], where),
            canonicalize(Layout(mesh, (), ((mesh.size, ()),), tuple(pieces))),
            tuple(files.region(held[rank]) if rank in held else None for rank in range(mesh.size)),
        )
    return states


def replicas_of(entries: Mapping[int, StateEntry], outer: Mesh, where: str) -> StateEntry:
    """Describe one array that several groups of ranks hold, each in its own way.

    Args:
        entries: What each group holds, by its rank on `outer`. The other groups hold nothing, and
            those that store fewer copies, on an outermost axis, nothing in the place of the others.
        outer: The groups. Their ranks are further apart than those inside them.
        where: Tensor, for errors.

    Raises:
        CorruptError: The groups hold arrays of different types or shapes.
    """
    first = next(iter(entries.values()))
    if outer.size == 1:
        return first
    inner = max((entry.layout.mesh for entry in entries.values()), key=lambda mesh: mesh.size)
    for entry in entries.values():
        if (entry.dtype, entry.layout.full_shape) != (first.dtype, first.layout.full_shape):
            raise CorruptError(
                f"is {entry.dtype} of shape {entry.layout.full_shape} in one place and "
                f"{first.dtype} of shape {first.layout.full_shape} in another",
                where=where,
            )
    held = [entries[group].layout if group in entries else None for group in range(outer.size)]
    missing = [inner.size - (own.rank_count if own else 0) for own in held]
    layout = Layout(
        Mesh((*outer.axes, *inner.axes)),
        first.layout.full_shape,
        tuple(
            run
            for own, lacks in zip(held, missing, strict=True)
            for run in (*(own.shard_shapes if own else ()), *(((lacks, (0,)),) if lacks else ()))
        ),
        tuple(
            replace(piece, rank_base=piece.rank_base + group * inner.size)
            for group, own in enumerate(held)
            for piece in (own.all_pieces if own else ())
        ),
        tuple(
            replace(padding, rank_base=padding.rank_base + group * inner.size)
            for group, own in enumerate(held)
            for padding in (own.padding if own else ())
        ),
    )
    regions = tuple(
        region
        for group, lacks in enumerate(missing)
        for region in (*(entries[group].regions if group in entries else ()), *((None,) * lacks))
    )
    return StateEntry(first.dtype, canonicalize(layout), regions)


def _flat_layout(
    layout: Layout, cut: FlatCut, fragments: Sequence[Sequence[_Run]], mesh: Mesh
) -> Layout:
    parts = Mesh((("part", mesh.size // layout.rank_count),))
    numels = [layout.shard_numel(rank) for rank in range(layout.rank_count)]
    if cut.is_even:
        inner = {rank: flat_chunks((numel,), mesh=parts) for rank, numel in enumerate(numels)}
    else:
        inner = {
            rank: _fragment_layout(runs, numels[rank], parts) for rank, runs in enumerate(fragments)
        }
    if cut.block:
        return chained_in_block(layout, inner, mesh, cut.block)
    first = inner[0]
    return chain(
        layout,
        first if all(other == first for other in inner.values()) else inner,
        mesh=mesh,
        outer_stride=cut.outer_stride,
        inner_stride=cut.inner_stride,
    )


def _fragment_layout(runs: Sequence[_Run], numel: int, parts: Mesh) -> Layout:
    """One flat shard over the partitions: the shard of a partition is its fragment."""
    lengths = {partition: length for partition, _, length in runs}
    pieces = [
        Piece((Axis(length, 1, 0, 1),) if length > 1 else (), base, partition)
        for partition, base, length in runs
    ]
    shapes = [(lengths.get(part, 0),) for part in range(parts.size)]
    return Layout.of(parts, (numel,), shapes, pieces)


def _strided(layout: Layout, tensors: Sequence[StoredTensor], where: str) -> Layout:
    """Chain the cut of the tensor with the memory order of its shards."""
    one = Mesh((("memory", 1),))
    inner: dict[int, Layout] = {}
    for rank, tensor in enumerate(tensors):
        sizes, strides, numel = tensor.shape, tensor.strides, prod(tensor.shape)
        if not numel:
            inner[rank] = Layout(one, (0,), ((1, (0,)),), ())
            continue
        if not _is_injective(sizes, strides):
            raise UnsupportedError(
                f"rank {rank} stores a view of shape {sizes} with strides {strides}, in which "
                "elements share an address",
                where=where,
                remedy="save it after .contiguous()",
            )
        axes = tuple(
            Axis(size, prod(sizes[dim + 1 :]), 0, stride)
            for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))
            if size > 1
        )
        span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        inner[rank] = Layout(one, (numel,), ((1, (span,)),), (Piece(axes),))
    return chain(layout, inner, mesh=layout.mesh)


def _is_injective(shape: Shape, strides: Shape) -> bool:
    """Whether no two elements stand at one address, for nested strides; others are refused."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _dtype_of(group: Group, name: str, where: str) -> tuple[DType, str]:
    tensor = group.arrays.get(name)
    if tensor is None:
        raise CorruptError(
            f"has no state {name!r}, which other ranks have", where=f"{group.where}: {where}"
        )
    return tensor.storage.dtype, group.where


def _one_dtype(found: Sequence[tuple[DType, str]], where: str) -> DType:
    first, first_place = found[0]
    for dtype, place in found:
        if dtype != first:
            raise CorruptError(
                f"is {dtype} in {place} and {first} in {first_place}",
                where=where,
                remedy="put all files of one save, and only those, into the folder",
            )
    return first
