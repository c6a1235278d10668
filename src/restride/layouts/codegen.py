"""CodeGen's fused QKV: rows permuted, then cut evenly. The layout that Restride began with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.errors import RuleError
from restride.layouts._arguments import as_shape, find_mesh_axis, require_count
from restride.layouts.lifting import along, place, reshaped
from restride.layouts.permuted import permuted
from restride.layouts.split import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike

__all__ = ["codegen_qkv"]

# The model file of CodeGen was cut for four cores; the number is fixed there (`mp_num = 4`).
_MODEL_BLOCKS = 4


def codegen_qkv(
    shape: Sequence[int], *, mesh: MeshLike, heads: int | None, axis: str | None = None
) -> Layout:
    """Permute the rows of CodeGen's fused QKV weight as DeepSpeed does, and cut them evenly.

    CodeGen stores four blocks, each with its own thirds; DeepSpeed cuts every third over the ranks
    and puts the parts of one block side by side again. With B = rows / 24, on two ranks::

        full    block 0: q0 q1 | k0 k1 | v0 v1    block 1: ...    (q0 has B rows)
        copy    q0 k0 v0 | q1 k1 v1 | block 1 ... | block 2 ... | block 3 ...
        rank 0  the first half of the copy, rank 1 the second

    That is one piece for the whole parameter where the number of ranks and four divide one another
    (TP 2, 4, 8, ...), and a few where they do not (deepspeed 0.19.8
    `module_inject/fusedqkv_utils.py`, `_codegen_type_transpose`).

    Args:
        shape: Shape of the full weight.
        mesh: The ranks.
        heads: Attention heads. The geometry does not depend on them, but the framework cuts only
            where they divide.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or is out of range.
        RuleError: The tensor is a bias, there are fewer than two ranks, the head count is not given
            or not a multiple of 4 * ranks, or the rows do not cut into 12 * ranks equal blocks.

    Cost:
        Constant in the shape. Never walks elements.

    Examples:
        >>> layout = codegen_qkv((12288, 4096), mesh={"tp": 4}, heads=32)
        >>> len(layout.all_pieces), layout.shard_shape(0)
        (1, (3072, 4096))
    """
    full = as_shape(shape, ndim=2)
    target = find_mesh_axis(mesh, axis)
    ranks, rows = target.size, full[0]
    count = require_count("heads", heads, why="the framework cuts CodeGen by whole heads only")
    if ranks < 2:  # noqa: PLR2004 - one rank has nothing to permute
        raise RuleError(
            f"mesh axis {target.name!r} has {ranks} rank; the rows are permuted from two on",
            remedy="on one rank the weight is whole: use replicated",
        )
    if count % (_MODEL_BLOCKS * ranks):
        raise RuleError(
            f"{count} heads are no multiple of {_MODEL_BLOCKS} * {ranks} ranks",
            remedy=_fitting_ranks(count),
        )
    blocks = 3 * _MODEL_BLOCKS * ranks
    if rows % blocks or not rows or not full[1]:
        raise RuleError(f"a weight of shape {full} does not cut into {blocks} equal blocks of rows")
    even = split((blocks,), mesh={target.name: ranks})
    copy = reshaped(even, (_MODEL_BLOCKS, ranks, 3))
    stored = reshaped(permuted(copy, (0, 2, 1)), (blocks,))
    return place(along(stored, full, 0), target)


def _fitting_ranks(heads: int) -> str:
    most = heads // _MODEL_BLOCKS
    if heads % _MODEL_BLOCKS or most < 2:  # noqa: PLR2004 - one rank has nothing to permute
        return "no number of ranks would do; the framework cannot cut this model"
    fitting = [str(ranks) for ranks in range(2, most + 1) if most % ranks == 0]
    return f"{heads} heads are cut over {' or '.join(fitting)} ranks"
