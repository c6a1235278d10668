"""Yuan's shared-QK attention: value heads follow their query heads, two runs to a rank."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from restride.algebra.piece import Piece
from restride.errors import RuleError
from restride.layouts._arguments import MeshAxis, as_shape, find_mesh_axis, require_count
from restride.layouts.lifting import along, axes_of, place, row_layout
from restride.layouts.replicated import replicated
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike

__all__ = ["yuan_output", "yuan_value"]


def yuan_value(
    shape: Sequence[int], *, mesh: MeshLike, heads: int | None, axis: str | None = None
) -> Layout:
    """Give each rank the value heads that belong to its query heads: rows of `v_proj`.

    Two neighbouring query heads share a value head of the first half, and one of the second half::

        8 heads, 2 ranks      rank 0: 0 1 4 5      rank 1: 2 3 6 7
        6 heads, 2 ranks      rank 0: 0 1 3 4      rank 1: 1 2 4 5

    With an odd number of heads per rank, neighbouring ranks hold one head of each half both, as
    replicas; DeepSpeed cuts so too but cannot convert it (deepspeed 0.19.8
    `module_inject/fusedqkv_utils.py`, `shard_value_with_share_qk`).

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        heads: Value heads.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The head count is not given, the ranks do not divide it or are more than half of
            it, or it does not divide the rows.

    Examples:
        >>> layout = yuan_value((16, 2), mesh={"tp": 2}, heads=8)
        >>> len(layout.all_pieces), layout.pieces(1)[0].full_base
        (1, 8)
    """
    full = as_shape(shape, ndim=(1, 2))
    return _cut(full, 0, find_mesh_axis(mesh, axis), heads)


def yuan_output(
    shape: Sequence[int], *, mesh: MeshLike, heads: int | None, axis: str | None = None
) -> Layout:
    """Cut `o_proj` along with the value heads: columns of the weight; the bias is whole, scaled.

    Every rank adds the whole bias before the all-reduce, so each stores it divided by the number of
    ranks. DeepSpeed has the same rule and fails to return the bias.

    Args:
        shape: Shape of the full weight, or of the bias.
        mesh: The ranks.
        heads: Value heads.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: As for `yuan_value`, of the columns.

    Examples:
        >>> yuan_output((2, 16), mesh={"tp": 2}, heads=8).shard_shape(0)
        (2, 8)
        >>> yuan_output((2,), mesh={"tp": 2}, heads=8).pieces(0)[0].scale
        Fraction(1, 2)
    """
    full = as_shape(shape, ndim=(1, 2))
    target = find_mesh_axis(mesh, axis)
    if len(full) == 1:
        _checked_heads(heads, target.size)
        return replicated(full, mesh=target.mesh, scale=Fraction(1, target.size))
    return _cut(full, 1, target, heads)


def _checked_heads(heads: int | None, ranks: int) -> int:
    count = require_count("heads", heads, why="value heads are what is dealt out")
    if count % ranks:
        raise RuleError(f"{ranks} ranks do not divide {counted(count, 'value head')}")
    if ranks > count // 2:
        raise RuleError(
            f"{ranks} ranks are more than half of {counted(count, 'value head')}",
            remedy=f"use at most {counted(count // 2, 'rank')}",
        )
    if ranks == 1 and count % 2:
        raise RuleError(f"one rank would hold the middle one of {count} value heads twice")
    return count


def _cut(shape: Shape, dim: int, target: MeshAxis, heads: int | None) -> Layout:
    count = _checked_heads(heads, target.size)
    if shape[dim] % count:
        raise RuleError(
            f"{count} value heads do not divide dimension {dim} of shape {shape}: "
            f"the framework would drop {shape[dim] % count} rows"
        )
    each = count // target.size
    held = (each + 1) // 2
    vector = row_layout(target, count, [2 * held] * target.size, _head_pieces(target, count, held))
    return place(along(vector, shape, dim), target)


def _head_pieces(target: MeshAxis, count: int, held: int) -> list[Piece]:
    """Rank r starts at head ``r * each // 2``: even steps, or two unequal ones in turn."""
    ranks = target.size
    each = count // ranks
    heads = ((2, count // 2, 0, held), (held, 1, 0, 1))
    if each % 2 == 0:
        return [Piece(axes_of((ranks, each // 2, 1, 0), *heads))]
    pairs, last = divmod(ranks, 2)
    pieces = []
    if pairs:
        steps = ((pairs, each, 2, 0), (2, each // 2, 1, 0))
        pieces.append(Piece(axes_of(*steps, *heads)))
    if last:
        pieces.append(Piece(axes_of(*heads), pairs * each, ranks - 1))
    return pieces
