"""Weights that are known to be fused, by name and shape, and whether a layout cuts them rightly.

A fused weight that is cut as plain rows trains without an error and computes another function than
the model on one rank: transformers 5.24 cuts CodeGen's QKV so. Nothing in the checkpoint says that
the weight is fused, so `restride check` goes by the name and the shape.

Only weights whose name and shape leave no doubt are here. Those that interleave q, k and v head by
head (Bloom, Falcon, GPT-NeoX) are cut rightly by plain rows and have no entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra.intersect import intersect
from restride.algebra.piece import Piece
from restride.algebra.signature import same_layout
from restride.frozen import Frozen
from restride.layouts._arguments import MeshAxis
from restride.layouts._runs import read_row_cut
from restride.layouts.codegen import codegen_qkv
from restride.layouts.lifting import axes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.layout import Layout, Shape

__all__ = ["FUSED_WEIGHTS", "FusedWeight", "find_fused", "find_split_head", "find_wrong_cut"]

_Parts: TypeAlias = "tuple[int, tuple[int, ...]]"
_FindParts: TypeAlias = Callable[["Shape"], "_Parts | None"]
_Judge: TypeAlias = Callable[["Layout", "_Parts"], "str | None"]


class FusedWeight(Frozen):
    """A weight that is several sub-parameters in one.

    Attributes:
        family: Models that have it.
        pattern: The whole name of the parameter.
        layout: Name in the catalogue of the layout that cuts it rightly.
        parts: Which dimension is fused and how many rows each part has, or None where the shape is
            not that of the fused weight.
        judge: What is wrong with a layout of these parts, or None.
    """

    family: str
    pattern: re.Pattern[str]
    layout: str
    parts: _FindParts
    judge: _Judge


def find_fused(name: str, shape: Shape) -> FusedWeight | None:
    """Find the fused weight that `name` and `shape` belong to.

    Examples:
        >>> find_fused("transformer.h.3.attn.qkv_proj.weight", (96, 32)).layout
        'codegen-qkv'
        >>> find_fused("model.layers.3.self_attn.q_proj.weight", (96, 32)) is None
        True
    """
    for weight in FUSED_WEIGHTS:
        if weight.pattern.fullmatch(name) and weight.parts(shape) is not None:
            return weight
    return None


def find_wrong_cut(name: str, layout: Layout) -> str | None:
    """Say how a layout cuts a weight known to be fused against its parts.

    Args:
        name: Name of the parameter.
        layout: How the tensor-parallel ranks cut it. Data-parallel cuts may run anywhere: a layout
            with flat shards is not judged.

    Returns:
        One sentence with the numbers, or None where the weight is not known, not cut, or cut as it
        should be.

    Cost:
        O(pieces * ranks). Never walks elements.

    Examples:
        >>> from restride.layouts import split
        >>> find_wrong_cut("h.0.attn.qkv_proj.weight", split((96, 32), mesh={"tp": 2}))[:49]
        "CodeGen's qkv_proj is fused and cut against its h"
    """
    weight = find_fused(name, layout.full_shape)
    full = layout.full_shape
    is_whole = all(shape == full for _, shape in layout.shard_shapes)
    is_flat = any(len(shape) != len(full) for _, shape in layout.shard_shapes)
    if weight is None or is_whole or is_flat:
        return None
    parts = weight.parts(full)
    fault = weight.judge(layout, parts) if parts else None
    if fault is None:
        return None
    stem = name.split(".")[-2]
    return (
        f"{weight.family}'s {stem} is fused and cut against its heads: {fault}; "
        f"the layout {weight.layout} would keep them together"
    )


def find_split_head(layout: Layout, heads: int) -> str | None:
    """Say where a layout cuts rows that interleave q, k and v head by head inside a head.

    Bloom, Falcon and GPT-NeoX have such weights: whole heads may be cut anywhere, a head nowhere.

    Args:
        layout: How the tensor-parallel ranks cut the weight or its bias.
        heads: Key/value heads of the model.

    Returns:
        One sentence with the numbers, or None where no head is split, or the rows are not that
        many heads.

    Examples:
        >>> from restride.layouts import split
        >>> find_split_head(split((36, 2), mesh={"tp": 2}), 3)
        'rank 1 begins at row 18, inside head 1 of 12 rows'
        >>> find_split_head(split((36, 2), mesh={"tp": 2}, sizes=[24, 12]), 3) is None
        True
    """
    for name, size in layout.mesh.axes:
        cut = read_row_cut(layout, MeshAxis(layout.mesh, name, size)) if size > 1 else None
        if cut is None or cut.dim or cut.rows % heads:
            continue
        head = cut.rows // heads
        for rank, runs in enumerate(cut.runs):
            for first, _ in runs:
                if first % head:
                    return (
                        f"rank {rank} begins at row {first}, inside head {first // head} of "
                        f"{head} rows"
                    )
    return None


def _is_permuted(layout: Layout, parts: _Parts) -> str | None:
    """CodeGen: the one legal cut is known exactly, whatever the number of heads."""
    del parts
    shape, mesh = layout.full_shape, layout.mesh
    for name, size in mesh.axes:
        if size < 2 or shape[0] % (12 * size):  # noqa: PLR2004 - 12 blocks a rank
            continue
        expected = codegen_qkv(shape, mesh=mesh, heads=4 * size, axis=name)
        if same_layout(layout, expected):
            return None
    return (
        f"its {shape[0]} rows are four blocks of q, k and v, which are to be permuted before they "
        f"are cut over {layout.rank_count} ranks"
    )


def _has_some_of_each(layout: Layout, parts: _Parts) -> str | None:
    """Every rank that holds anything holds rows of every part."""
    for rank in range(layout.rank_count):
        held = list(_held(layout, rank, parts))
        if any(held) and not all(held):
            missing = held.index(0)
            return (
                f"rank {rank} holds nothing of part {missing} of {len(held)} "
                f"(rows {list(parts[1])} along dimension {parts[0]})"
            )
    return None


def _has_last_whole(layout: Layout, parts: _Parts) -> str | None:
    """GPTBigCode: the one key/value head is whole on every rank."""
    dim, rows = parts
    whole = rows[-1] * prod(layout.full_shape) // layout.full_shape[dim]
    for rank in range(layout.rank_count):
        held = list(_held(layout, rank, parts))[-1]
        if held != whole:
            return f"rank {rank} holds {held} of the {whole} elements of k and v"
    return None


def _held(layout: Layout, rank: int, parts: _Parts) -> Iterator[int]:
    """Elements that a rank holds of each part."""
    dim, rows = parts
    shape = layout.full_shape
    outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
    pieces = layout.pieces(rank)
    first = 0
    for count in rows:
        axes = axes_of((outer, shape[dim] * inner, 0, count * inner), (count * inner, 1, 0, 1))
        part = Piece(axes, first * inner)
        yield sum(transfer.numel for piece in pieces for transfer in intersect(piece, part))
        first += count


def _thirds(dim: int) -> _FindParts:
    """Exactly three times as many rows as the other dimension: equal q, k and v."""

    def find(shape: Shape) -> _Parts | None:
        if len(shape) != 2 or not shape[0] or shape[dim] != 3 * shape[1 - dim]:  # noqa: PLR2004
            return None
        return dim, (shape[1 - dim],) * 3

    return find


def _halves(shape: Shape) -> _Parts | None:
    if len(shape) != 2 or shape[0] < 2 or shape[0] % 2:  # noqa: PLR2004
        return None
    return 0, (shape[0] // 2,) * 2


def _grouped(shape: Shape) -> _Parts | None:
    """As many query rows as columns, and fewer (or as many) rows of k and of v."""
    if len(shape) != 2 or not shape[1] < shape[0] <= 3 * shape[1]:  # noqa: PLR2004
        return None
    rest, odd = divmod(shape[0] - shape[1], 2)
    return None if odd else (0, (shape[1], rest, rest))


def _multi_query(shape: Shape) -> _Parts | None:
    """As many query rows as columns, then one head of k and v together."""
    if len(shape) != 2 or not shape[1] < shape[0] < 3 * shape[1]:  # noqa: PLR2004
        return None
    return 0, (shape[1], shape[0] - shape[1])


def _fused(
    family: str, name: str, layout: str, parts: _FindParts, judge: _Judge = _has_some_of_each
) -> FusedWeight:
    return FusedWeight(family, re.compile(r"(?:.*\.)?" + name), layout, parts, judge)


_WQKV: Final = r"blocks\.\d+\.(?:.*\.)?attn\.Wqkv\.weight"

FUSED_WEIGHTS: Final[Sequence[FusedWeight]] = (
    _fused("CodeGen", r"h\.\d+\.attn\.qkv_proj\.weight", "codegen-qkv", _thirds(0), _is_permuted),
    _fused("GPT-2", r"h\.\d+\.attn\.c_attn\.weight", "sub-params", _thirds(1)),
    _fused(
        "GPTBigCode", r"h\.\d+\.attn\.c_attn\.weight", "bigcode-qkv", _multi_query, _has_last_whole
    ),
    _fused("Phi-3", r"layers\.\d+\.self_attn\.qkv_proj\.weight", "phi3-qkv", _grouped),
    _fused("Phi-3", r"layers\.\d+\.mlp\.gate_up_proj\.weight", "gate-up", _halves),
    _fused("Baichuan", r"layers\.\d+\.self_attn\.W_pack\.weight", "glm-qkv", _thirds(0)),
    _fused("MPT", _WQKV, "glm-qkv", _thirds(0)),
    _fused("MPT", _WQKV, "phi3-qkv", _grouped),
    _fused(
        "ChatGLM",
        r"encoder\.layers\.\d+\.self_attention\.query_key_value\.weight",
        "chatglm-qkv",
        _grouped,
    ),
    _fused("ChatGLM", r"encoder\.layers\.\d+\.mlp\.dense_h_to_4h\.weight", "gate-up", _halves),
)
"""Known fused weights; the first that fits is taken."""
