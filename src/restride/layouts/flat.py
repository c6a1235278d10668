"""Flat partitions: tensors laid end to end and cut by element, without regard to their shape.

ZeRO-1 and ZeRO-2 concatenate the parameters of a group and cut the buffer; ZeRO-3 and FSDP cut each
parameter on its own. Where the parameter is itself a tensor-parallel shard, the two layouts are
chained (`restride.algebra.compose.chain`); nothing here knows of tensor parallelism.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from restride.algebra._checks import require_int
from restride.algebra.layout import Fill, Layout, Padding, Shape
from restride.algebra.piece import Piece
from restride.errors import RuleError
from restride.frozen import Frozen
from restride.layouts._arguments import MeshAxis, as_shape, find_mesh_axis
from restride.layouts.lifting import axes_of, place, reshaped, row_layout
from restride.layouts.split import padded_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.mesh import MeshLike

__all__ = ["FlatGroup", "FlatMember", "flat_chunks", "zero_flat", "zero_group"]


class FlatMember(Frozen):
    """One parameter of a flat buffer.

    Attributes:
        start: Element of the whole buffer where the parameter starts.
        layout: Its elements over the ranks; the shard of a rank is the run of the parameter inside
            that rank's partition, and is empty where the partition lies elsewhere.
        shard_starts: For each rank the element of its partition where that run starts, or None
            where the rank holds none of it.
    """

    start: int
    layout: Layout
    shard_starts: tuple[int | None, ...]


class FlatGroup(Frozen):
    """A buffer of several parameters, cut into one equal partition per rank.

    Attributes:
        members: The parameters, in the order of the buffer.
        partition_numel: Elements of every rank's partition, padding included.
        layout: The whole buffer: a virtual full tensor of all members end to end, without the
            padding; the shards are the partitions, with it.
    """

    members: tuple[FlatMember, ...]
    partition_numel: int
    layout: Layout


def flat_chunks(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    alignment: int = 1,
    fill: Fill = "undefined",
    axis: str | None = None,
) -> Layout:
    """Cut one parameter by element: each rank gets as many, rounded up; the end is padding.

    ZeRO-3 cuts every parameter so (deepspeed 0.19.8 `runtime/zero/partition_parameters.py`; its
    padding is never written, hence ``"undefined"``), and so does any engine that shards a
    flattened parameter.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        alignment: The elements of a rank are a multiple of this.
        fill: What the padding holds.
        axis: Mesh axis that is cut, by default the only one.

    Returns:
        A layout with flat shards.

    Raises:
        LayoutError: A number is no integer or out of range.

    Examples:
        >>> chunks = flat_chunks((5, 2), mesh={"dp": 4})
        >>> [chunks.shard_shape(3), chunks.pieces(3)[0].numel, chunks.paddings(3)[0].shard_base]
        [(3,), 1, 1]
    """
    full = as_shape(shape)
    target = find_mesh_axis(mesh, axis)
    require_int("alignment", alignment, at_least=1)
    width = _round_up(-(-prod(full) // target.size), alignment)
    return place(reshaped(padded_rows(target, prod(full), width, fill), full), target)


def zero_flat(
    shapes: Sequence[Sequence[int]],
    *,
    mesh: MeshLike,
    alignment: int | None = None,
    parameter_alignment: int = 1,
    axis: str | None = None,
) -> Layout:
    """Describe the whole buffer of a ZeRO-1/2 group: the `FlatGroup.layout` of `zero_group`.

    Raises:
        LayoutError: As for `zero_group`.
        RuleError: As for `zero_group`.

    Examples:
        >>> buffer = zero_flat([(3, 3), (2,)], mesh={"dp": 2})
        >>> buffer.full_shape, buffer.shard_shape(0), buffer.paddings(1)[0].shard_base
        ((11,), (6,), 5)
    """
    return zero_group(
        shapes,
        mesh=mesh,
        alignment=alignment,
        parameter_alignment=parameter_alignment,
        axis=axis,
    ).layout


def zero_group(
    shapes: Sequence[Sequence[int]],
    *,
    mesh: MeshLike,
    alignment: int | None = None,
    parameter_alignment: int = 1,
    axis: str | None = None,
) -> FlatGroup:
    """Lay parameters end to end and cut the buffer evenly, as ZeRO-1/2 and FSDP1 do.

    The buffer is padded with zeros at its end to a multiple of `alignment`; between parameters, so
    that each starts at a multiple of `parameter_alignment` (deepspeed 0.19.8
    `runtime/zero/stage_1_and_2.py`). Parameters of 5 and 4 elements, aligned to 2, on two ranks::

        rank 0  a a a a a .
        rank 1  b b b b . .

    Args:
        shapes: Shapes of the parameters, in the order of the buffer.
        mesh: The ranks.
        alignment: The padded buffer is a multiple of this; by default twice the ranks, as DeepSpeed
            has it. It must be a multiple of the ranks.
        parameter_alignment: Each parameter starts at a multiple of this many elements (DeepSpeed:
            ``16 // itemsize`` where `zero_optimization.parameter_alignment` is on).
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: There is no parameter, or the alignment is no multiple of the ranks.

    Cost:
        O(parameters * ranks).

    Examples:
        >>> group = zero_group([(3, 3), (2,)], mesh={"dp": 2})
        >>> group.partition_numel, [member.shard_starts for member in group.members]
        (6, [(0, 0), (None, 3)])
    """
    target = find_mesh_axis(mesh, axis)
    members = [as_shape(shape) for shape in shapes]
    if not members:
        raise RuleError("a flat group has no parameter")
    require_int("parameter_alignment", parameter_alignment, at_least=1)
    multiple = 2 * target.size if alignment is None else alignment
    require_int("alignment", multiple, at_least=1)
    if multiple % target.size:
        raise RuleError(
            f"a buffer aligned to {multiple} elements does not cut into {target.size} equal parts",
            remedy=f"use a multiple of {target.size}",
        )
    starts, stop = _starts(members, parameter_alignment)
    width = _round_up(stop, multiple) // target.size
    known: dict[tuple[Shape, int, int], Layout] = {}
    return FlatGroup(
        tuple(
            _member(shape, start, width, target, known)
            for shape, start in zip(members, starts, strict=True)
        ),
        width,
        _buffer(members, starts, width, target),
    )


def _starts(members: Sequence[Shape], alignment: int) -> tuple[list[int], int]:
    """First element of each member in the buffer, and the end of the last."""
    starts: list[int] = []
    stop = 0
    for shape in members:
        starts.append(_round_up(stop, alignment))
        stop = starts[-1] + prod(shape)
    return starts, stop


def _member(
    shape: Shape,
    start: int,
    width: int,
    target: MeshAxis,
    known: dict[tuple[Shape, int, int], Layout],
) -> FlatMember:
    """One parameter on its own: shards are its runs inside the partitions.

    How a parameter is cut follows from its shape, its first partition and how much of that it has;
    those of most layers are cut alike, and share a layout in `known`.
    """
    numel = prod(shape)
    runs = [_overlap(start, numel, rank * width, width) for rank in range(target.size)]
    partition, base = divmod(start, max(width, 1))  # of nothing there may be partitions, too
    cut = shape, partition, min(width - base, numel)
    layout = known.get(cut)
    if layout is None:
        pieces = [
            Piece(piece.axes, piece.full_base, piece.rank_base, 0)
            for piece in _run_pieces(numel, start, width)
        ]
        row = row_layout(target, numel, [len(run) for run in runs], pieces)
        layout = known[cut] = place(reshaped(row, shape), target)
    stride = target.mesh.axis_stride(target.name)
    starts = [run.start if run else None for run in runs]
    return FlatMember(
        start,
        layout,
        tuple(starts[rank // stride % target.size] for rank in range(target.mesh.size)),
    )


def _buffer(
    members: Sequence[Shape], starts: Sequence[int], width: int, target: MeshAxis
) -> Layout:
    """All parameters end to end; the gaps between them and the end are padding."""
    pieces: list[Piece] = []
    padding: list[Padding] = []
    full_base = stop = 0
    for start, numel in _runs(members, starts):
        padding += _run_padding(start - stop, stop, width)
        pieces += [
            Piece(piece.axes, piece.full_base + full_base, piece.rank_base, piece.shard_base)
            for piece in _run_pieces(numel, start, width)
        ]
        full_base += numel
        stop = start + numel
    padding += _run_padding(width * target.size - stop, stop, width)
    return place(row_layout(target, full_base, [width] * target.size, pieces, padding), target)


def _runs(members: Sequence[Shape], starts: Sequence[int]) -> list[tuple[int, int]]:
    """(start, elements) of the parameters; those with no gap between them are one run."""
    runs: list[tuple[int, int]] = []
    for shape, start in zip(members, starts, strict=True):
        if runs and start == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + prod(shape))
        else:
            runs.append((start, prod(shape)))
    return runs


def _overlap(start: int, numel: int, first: int, width: int) -> range:
    """Where the run of `numel` elements from `start` on lies in the partition from `first` on."""
    low = max(start, first)
    return range(low - first, max(low, min(start + numel, first + width)) - first)


def _run_pieces(numel: int, start: int, width: int) -> Iterator[Piece]:
    """A run of the buffer cut at the partitions: the first one, the whole ones, the last one."""
    done = 0
    while done < numel:
        rank, shard_base = divmod(start + done, width)
        whole = 1 if shard_base else max(1, (numel - done) // width)
        length = min(width - shard_base, numel - done)
        axes = axes_of((whole, width, 1, 0), (length, 1, 0, 1))
        yield Piece(axes, done, rank, shard_base)
        done += whole * length


def _run_padding(numel: int, start: int, width: int) -> Iterator[Padding]:
    for piece in _run_pieces(numel, start, width):
        axes = [(axis.extent, 0, axis.rank_stride, axis.shard_stride) for axis in piece.axes]
        yield Padding(axes_of(*axes), piece.rank_base, piece.shard_base)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
