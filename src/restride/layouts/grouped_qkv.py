"""Fused query, key and value weights with fewer keys and values than queries.

The rules are those of deepspeed 0.19.8 `module_inject/fusedqkv_utils.py` (`prepare_tp_fused_qkvw`),
and a builder refuses what that function refuses. `heads` is always DeepSpeed's `num_kv_heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.errors import RuleError
from restride.layouts._arguments import as_shape, find_mesh_axis, require_count
from restride.layouts.fused_qkv import cut_each, fused_shape
from restride.layouts.segmented import Segment, cut_segments
from restride.layouts.sizes import autotp_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike

__all__ = ["bigcode_qkv", "phi3_qkv"]


def phi3_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    query_heads: int | None,
    heads: int | None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut q, k and v of unequal size: grouped-query attention as Phi-3 fuses it.

    The size of a head is taken from the columns, as the framework does, so this is for weights; cut
    a bias with `sub_params`.

    Args:
        shape: Shape of the full weight.
        mesh: The ranks.
        query_heads: Query heads (DeepSpeed's `num_attention_heads`).
        heads: Key/value heads.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: A head count is not given, the tensor is a bias, or the rows are too few for k
            and v.

    Examples:
        >>> layout = phi3_qkv((32, 16), mesh={"tp": 2}, query_heads=4, heads=2)
        >>> layout.shard_shape(0), len(layout.all_pieces)
        ((16, 16), 2)
    """
    full = as_shape(shape, ndim=2)
    target = find_mesh_axis(mesh, axis)
    queries = require_count("query_heads", query_heads, why="it gives the size of one head")
    groups = require_count("heads", heads, why="it says how many rows k and v have")
    size = full[1] // queries
    rest = full[0] - 2 * groups * size
    if rest < 0:
        raise RuleError(
            f"{full[0]} rows are fewer than k and v need: {groups} key/value heads of "
            f"{full[1]} // {queries} = {size} rows each, twice"
        )
    return cut_each(full, target, [rest, groups * size, groups * size], groups, grain)


def bigcode_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    hidden: int | None,
    heads: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut q and give every rank the one key/value head whole (GPTBigCode, multi-query attention).

    The replicas of k and v receive different gradients and drift apart in training; rebuilding
    compares them.

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        hidden: Rows of q: the hidden size of the model (DeepSpeed's `n_embd`).
        heads: Key/value heads as the model's config has them, where they are known.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: `hidden` is not given, or leaves no rows for k and v.

    Examples:
        >>> layout = bigcode_qkv((8, 2), mesh={"tp": 2}, hidden=6)
        >>> layout.shard_shape(0), [piece.full_base for piece in layout.pieces(1)]
        ((5, 2), [6, 12])
    """
    full = fused_shape(shape)
    target = find_mesh_axis(mesh, axis)
    query = require_count("hidden", hidden, why="it says where the query rows end")
    if query >= full[0]:
        raise RuleError(f"{query} query rows leave no rows for k and v of the {full[0]} there are")
    widths = autotp_sizes(query, target.size, heads=heads, grain=grain)
    segments: list[Segment] = [(query, widths), (full[0] - query, None)]
    return cut_segments(full, target, segments, 0)
