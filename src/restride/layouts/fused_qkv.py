"""Fused query, key and value weights of equal parts, as DeepSpeed's AutoTP cuts them.

All rules are those of deepspeed 0.19.8 `module_inject/fusedqkv_utils.py` (`prepare_tp_fused_qkvw`),
and a builder refuses what that function refuses. `heads` is always DeepSpeed's `num_kv_heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra._checks import require_int
from restride.errors import RuleError
from restride.layouts._arguments import as_shape, find_mesh_axis, require_count
from restride.layouts.segmented import cut_segments
from restride.layouts.sizes import autotp_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike
    from restride.layouts._arguments import MeshAxis

__all__ = ["bloom_qkv", "chatglm_qkv", "cut_each", "fused_shape", "glm_qkv", "qwen_qkv"]

# DeepSpeed knows ChatGLM2 and 3 by their two key/value heads.
_CHATGLM_HEADS = 2


def bloom_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    heads: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut the rows of a weight that interleaves q, k and v head by head (Bloom, Falcon, NeoX).

    Also what DeepSpeed falls back to for a fused weight that it does not recognise.

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        heads: Key/value heads, where they are known.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The tensor is a scalar.

    Examples:
        >>> [bloom_qkv((36, 2), mesh={"tp": 2}, heads=3).shard_shape(rank) for rank in range(2)]
        [(24, 2), (12, 2)]
    """
    full = fused_shape(shape)
    target = find_mesh_axis(mesh, axis)
    widths = autotp_sizes(full[0], target.size, heads=heads, grain=grain)
    return cut_segments(full, target, [(full[0], widths)], 0)


def glm_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    heads: int | None = None,
    hidden: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut each of three equal thirds q, k, v (GLM, MPT, Baichuan).

    With two key/value heads DeepSpeed takes the weight for ChatGLM's: see `chatglm_qkv`.

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        heads: Key/value heads, where they are known.
        hidden: Hidden size of the model; needed with two key/value heads only.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The rows do not cut into thirds.

    Examples:
        >>> thirds = glm_qkv((12, 2), mesh={"tp": 2}, heads=4)
        >>> len(thirds.all_pieces), thirds.shard_shape(0)
        (1, (6, 2))
    """
    full = fused_shape(shape)
    target = find_mesh_axis(mesh, axis)
    return cut_each(full, target, _thirds(full, heads, hidden), heads, grain)


def chatglm_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    hidden: int | None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut q, then the two heads of k and of v (ChatGLM2 and 3: two key/value heads).

    Widths follow whole key/value heads, so with more than two ranks those from the third on are
    empty.

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        hidden: Rows of q: the hidden size of the model (DeepSpeed's `n_embd`).
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: `hidden` is not given or exceeds the rows, or k and v are not of equal size.

    Examples:
        >>> layout = chatglm_qkv((16, 2), mesh={"tp": 2}, hidden=8)
        >>> layout.shard_shape(0), len(layout.all_pieces)
        ((8, 2), 2)
    """
    full = fused_shape(shape)
    target = find_mesh_axis(mesh, axis)
    sizes = _thirds(full, _CHATGLM_HEADS, hidden)
    return cut_each(full, target, sizes, _CHATGLM_HEADS, grain)


def qwen_qkv(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    heads: int | None = None,
    hidden: int | None = None,
    grain: int = 1,
    axis: str | None = None,
) -> Layout:
    """Cut each of three thirds q, k, v, as `glm_qkv`, but leave no rank without queries (QWen).

    QWen's own code unpacks by the width of its queries and cannot take an empty shard, so DeepSpeed
    refuses one.

    Args:
        shape: Shape of the full tensor, weight or bias.
        mesh: The ranks.
        heads: Key/value heads, where they are known.
        hidden: Hidden size of the model; needed with two key/value heads only.
        grain: DeepSpeed's `tp_grain_size`.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The rows do not cut into thirds, or a rank would get no query rows.

    Examples:
        >>> qwen_qkv((12, 2), mesh={"tp": 2}, heads=4).shard_shape(1)
        (6, 2)
    """
    full = fused_shape(shape)
    target = find_mesh_axis(mesh, axis)
    sizes = _thirds(full, heads, hidden)
    widths = autotp_sizes(sizes[0], target.size, heads=heads, grain=grain)
    if 0 in widths:
        raise RuleError(
            f"rank {widths.index(0)} would get no query rows of a QWen weight of shape {full}",
            remedy="use fewer tensor-parallel ranks, at most one per key/value head",
        )
    return cut_each(full, target, sizes, heads, grain)


def fused_shape(shape: Sequence[int]) -> Shape:
    """Take the shape of a weight or bias that is fused along dimension 0."""
    full = as_shape(shape)
    if not full:
        raise RuleError("a scalar is no fused weight", remedy="use replicated")
    return full


def _thirds(shape: Shape, heads: int | None, hidden: int | None) -> list[int]:
    """Rows of q, k and v."""
    rows = shape[0]
    if heads == _CHATGLM_HEADS:
        query = require_count("hidden", hidden, why="it says where the query rows end")
        rest, odd = divmod(rows - query, 2)
        if rest < 0 or odd:
            raise RuleError(
                f"{rows} rows with {query} query rows do not leave k and v of equal size"
            )
        return [query, rest, rest]
    if rows % 3:
        raise RuleError(
            f"{rows} rows do not cut into equal thirds q, k, v",
            remedy="with fewer key/value than query heads, use phi3_qkv or sub_params",
        )
    return [rows // 3] * 3


def cut_each(
    shape: Shape, target: MeshAxis, sizes: Sequence[int], heads: int | None, grain: int
) -> Layout:
    """Cut parts of `sizes` rows one by one by the framework's rule of sizes."""
    require_int("grain", grain, at_least=1)
    segments = [(size, autotp_sizes(size, target.size, heads=heads, grain=grain)) for size in sizes]
    return cut_segments(shape, target, segments, 0)
