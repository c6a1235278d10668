"""One dimension in segments, each cut over the ranks or held whole by all of them.

A plain split is one segment, a fused QKV is three, GPTBigCode is a cut one and a whole one.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from restride.algebra._checks import require_int
from restride.algebra.piece import Piece
from restride.errors import RuleError
from restride.layouts._arguments import (
    MeshAxis,
    as_dim,
    as_ints,
    as_shape,
    as_widths,
    find_mesh_axis,
)
from restride.layouts.lifting import along, axes_of, place, row_layout
from restride.layouts.sizes import autotp_sizes, even_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike

__all__ = ["Segment", "cut_segments", "gate_up", "segmented", "sub_params"]

Segment: TypeAlias = "tuple[int, Sequence[int] | None]"
"""Rows of a segment, and how many of them each rank gets; None where all ranks hold it whole."""


def segmented(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    segments: Sequence[Segment],
    dim: int = 0,
    axis: str | None = None,
) -> Layout:
    """Cut or replicate runs of rows along one dimension, each on its own.

    A shard holds its part of each segment in turn::

        full    q0 q1 q2 q3 | kv          segments = [(4, [2, 2]), (1, None)]
        rank 0  q0 q1 | kv
        rank 1  q2 q3 | kv

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        segments: (rows, rows of each rank) of every segment in order, or (rows, None) for a segment
            that every rank holds whole. Zero rows for a rank are allowed.
        dim: Dimension that is cut.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is negative.
        RuleError: The segments do not add up to the dimension, or the widths of a segment do not
            add up to it, or are not one per rank.

    Cost:
        O(segments * ranks).

    Examples:
        >>> layout = segmented((5, 2), mesh={"tp": 2}, segments=[(4, [2, 2]), (1, None)])
        >>> layout.shard_shape(0), len(layout.all_pieces)
        ((3, 2), 2)
    """
    sizes = as_shape(shape)
    cut = as_dim(dim, sizes)
    target = find_mesh_axis(mesh, axis)
    checked: list[Segment] = []
    for number, segment in enumerate(segments):
        rows, widths = _as_segment(number, segment)
        if widths is not None:
            what = f"widths of segment {number}"
            widths = as_widths(what, widths, ranks=target.size, total=rows)
        checked.append((rows, widths))
    total = sum(rows for rows, _ in checked)
    if total != sizes[cut]:
        raise RuleError(
            f"segments {[rows for rows, _ in checked]} add up to {total}, "
            f"dimension {cut} of shape {sizes} has {sizes[cut]}"
        )
    return cut_segments(sizes, target, checked, cut)


def sub_params(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    sizes: Sequence[int],
    widths: Sequence[Sequence[int]] | None = None,
    dim: int = 0,
    axis: str | None = None,
) -> Layout:
    """Cut each of several parameters that are fused along one dimension.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        sizes: Rows of each sub-parameter, in order.
        widths: Rows of each rank, for each sub-parameter; by default all ranks get the same.
        dim: Dimension along which they are fused.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is negative.
        RuleError: The sizes do not add up to the dimension, the widths not to the sizes, or a
            sub-parameter does not cut evenly and no widths are given.

    Examples:
        Keys and values are narrower than queries:

        >>> qkv = sub_params((8, 2), mesh={"tp": 2}, sizes=[4, 2, 2])
        >>> qkv.shard_shape(1), [piece.full_base for piece in qkv.pieces(1)]
        ((4, 2), [4, 10])
    """
    target = find_mesh_axis(mesh, axis)
    rows = as_ints("sizes", sizes, at_least=0)
    if widths is None:
        widths = [even_sizes(size, target.size) for size in rows]
    elif len(widths) != len(rows):
        raise RuleError(f"widths are given for {len(widths)} of {len(rows)} sub-parameters")
    segments = list(zip(rows, widths, strict=True))
    return segmented(shape, mesh=mesh, segments=segments, dim=dim, axis=target.name)


def gate_up(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    grain: int = 1,
    dim: int = 0,
    axis: str | None = None,
) -> Layout:
    """Cut a gate and an up projection that are fused one behind the other, each half on its own.

    DeepSpeed's `GateUpPack_LinearLayer` (deepspeed 0.19.8 `module_inject/layers.py`), SwiGLU in
    Megatron: the halves follow the near-even rule of an MLP (`autotp_sizes` without heads).

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        grain: DeepSpeed's `tp_grain_size`.
        dim: Dimension along which the two are fused.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The rows do not cut into two halves.

    Examples:
        >>> mlp = gate_up((8, 2), mesh={"tp": 2})
        >>> len(mlp.all_pieces), [piece.full_base for piece in mlp.pieces(1)]
        (1, [4])
    """
    full = as_shape(shape)
    cut = as_dim(dim, full)
    target = find_mesh_axis(mesh, axis)
    if full[cut] % 2:
        raise RuleError(f"{full[cut]} rows do not cut into a gate and an up half")
    half = full[cut] // 2
    widths = autotp_sizes(half, target.size, grain=grain)
    return cut_segments(full, target, [(half, widths)] * 2, cut)


def cut_segments(shape: Shape, target: MeshAxis, segments: Sequence[Segment], dim: int) -> Layout:
    """Build the layout of segments that have been checked: see `segmented`."""
    shares = _shares(segments, target.size)
    pieces = [
        piece
        for first, count in _classes(shares)
        for piece in _pieces_of_class(segments, shares, first, count)
    ]
    rows = sum(size for size, _ in segments)
    vector = row_layout(target, rows, [sum(share) for share in shares], pieces)
    return place(along(vector, shape, dim), target)


def _as_segment(number: int, segment: Segment) -> Segment:
    pair: object = segment
    if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004 - a pair
        raise RuleError(f"segment {number} is a pair (rows, widths or None), got {pair!r}")
    require_int(f"rows of segment {number}", segment[0], at_least=0)
    return segment[0], segment[1]


def _shares(segments: Sequence[Segment], ranks: int) -> list[tuple[int, ...]]:
    """Rows that each rank holds of each segment."""
    return [
        tuple(size if widths is None else widths[rank] for size, widths in segments)
        for rank in range(ranks)
    ]


def _classes(shares: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring ranks with equal shares: (first, how many)."""
    first = 0
    for _, run in groupby(shares):
        count = len(list(run))
        yield first, count
        first += count


def _pieces_of_class(
    segments: Sequence[Segment],
    shares: Sequence[tuple[int, ...]],
    first: int,
    count: int,
) -> Iterator[Piece]:
    segment_start = shard_base = 0
    for number, ((size, widths), rows) in enumerate(zip(segments, shares[first], strict=True)):
        before = 0 if widths is None else sum(shares[rank][number] for rank in range(first))
        step = 0 if widths is None else rows
        if rows:
            axes = axes_of((count, step, 1, 0), (rows, 1, 0, 1))
            yield Piece(axes, segment_start + before, first, shard_base)
        segment_start += size
        shard_base += rows
