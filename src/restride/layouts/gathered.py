"""Each rank holds a chosen set of equal blocks: expert placements and scattered heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra._checks import require_int
from restride.algebra.fold import fold
from restride.algebra.mesh import Mesh
from restride.errors import RuleError
from restride.layouts._arguments import MeshAxis, as_dim, as_ints, as_shape, find_mesh_axis
from restride.layouts.lifting import along, place
from restride.layouts.sizes import even_sizes
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike

__all__ = ["block_gather", "check_blocks", "experts"]

_SHOWN = 8


def block_gather(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    ids: Sequence[Sequence[int]],
    block: int,
    dim: int = 0,
    allow_shared: bool = False,
    axis: str | None = None,
) -> Layout:
    """Give each rank a list of equal blocks along a dimension, in the order of its shard.

    Args:
        shape: Shape of the full tensor.
        mesh: The ranks.
        ids: For each rank the blocks that it holds, in shard order; ranks may hold none.
        block: Rows of one block.
        dim: Dimension that is cut into blocks.
        allow_shared: Whether several ranks may hold the same block, as replicas.
        axis: Mesh axis that is cut, by default the only one.

    Returns:
        A layout of as few pieces as the ids follow arithmetic progressions, jointly over the ranks;
        a table without any pattern is listed.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The rows do not cut into blocks, the lists are not one per rank, or a block is
            missing, out of range, twice on one rank, or on two ranks without `allow_shared`.

    Cost:
        Polynomial in the number of blocks, as for `fold`. Never walks elements.

    Examples:
        >>> scattered = block_gather((8, 3), mesh={"tp": 2}, ids=[[0, 2], [1, 3]], block=2)
        >>> len(scattered.all_pieces), [piece.full_base for piece in scattered.pieces(1)]
        (1, [6])
    """
    full = as_shape(shape)
    cut = as_dim(dim, full)
    target = find_mesh_axis(mesh, axis)
    require_int("block", block, at_least=1)
    if full[cut] % block:
        raise RuleError(f"{full[cut]} rows do not cut into blocks of {block}")
    tables = check_blocks("block", ids, full[cut] // block, target.size, allow_shared=allow_shared)
    return place(along(fold_blocks(target, full[cut] // block, tables), full, cut), target)


def experts(
    shape: Sequence[int],
    *,
    mesh: MeshLike,
    placement: Sequence[Sequence[int]] | None = None,
    axis: str | None = None,
) -> Layout:
    """Place stacked experts on ranks by any table; an expert may be on several ranks.

    Args:
        shape: Shape of the stacked tensor; dimension 0 counts the experts.
        mesh: The ranks.
        placement: For each rank its experts, in the order of its shard; by default every rank gets
            equally many neighbouring ones.
        axis: Mesh axis that is cut, by default the only one.

    Raises:
        LayoutError: A number is no integer or out of range.
        RuleError: The lists are not one per rank, or an expert is missing, out of range or twice on
            one rank; or there is no table and the experts do not divide evenly.

    Cost:
        Polynomial in the number of experts, as for `fold`. Never walks elements.

    Examples:
        >>> round_robin = experts((4, 6), mesh={"ep": 2}, placement=[[0, 2], [1, 3]])
        >>> len(round_robin.all_pieces), round_robin.pieces(1)[0].full_base
        (1, 6)
    """
    full = as_shape(shape)
    as_dim(0, full)
    target = find_mesh_axis(mesh, axis)
    if placement is None:
        each = even_sizes(full[0], target.size)[0]
        placement = [range(rank * each, (rank + 1) * each) for rank in range(target.size)]
    tables = check_blocks("expert", placement, full[0], target.size, allow_shared=True)
    return place(along(fold_blocks(target, full[0], tables), full, 0), target)


def check_blocks(
    what: str,
    tables: Sequence[Sequence[int]],
    count: int,
    ranks: int,
    *,
    allow_shared: bool,
) -> list[tuple[int, ...]]:
    """Check that lists of block numbers, one per rank, hold every one of `count` blocks.

    Raises:
        LayoutError: A number is no integer or is negative.
        RuleError: A block is missing, out of range, twice on a rank, or shared without permission.
    """
    checked = [as_ints(f"the {what}s of rank {rank}", ids) for rank, ids in enumerate(tables)]
    if len(checked) != ranks:
        raise RuleError(
            f"{what}s are given for {counted(len(checked), 'rank')}, the mesh axis has {ranks}"
        )
    holders: dict[int, int] = {}
    for rank, ids in enumerate(checked):
        for number in ids:
            if not 0 <= number < count:
                raise RuleError(f"rank {rank} holds {what} {number}, there are {count}")
            holder = holders.setdefault(number, rank)
            if holder != rank and not allow_shared:
                raise RuleError(
                    f"{what} {number} is on rank {holder} and on rank {rank}",
                    remedy="pass allow_shared=True if they are replicas",
                )
        if len(set(ids)) != len(ids):
            twice = next(number for number in ids if ids.count(number) > 1)
            raise RuleError(f"rank {rank} holds {what} {twice} more than once")
    if len(holders) != count:
        missing = [number for number in range(count) if number not in holders]
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        raise RuleError(f"no rank holds {what} {shown} ({len(missing)} of {count})")
    return checked


def fold_blocks(target: MeshAxis, count: int, tables: Sequence[Sequence[int]]) -> Layout:
    """Describe checked lists of block numbers as a layout of a vector of `count` blocks."""
    return fold(
        tables,
        mesh=Mesh(((target.name, target.size),)),
        full_shape=(count,),
        shard_shapes=[(len(ids),) for ids in tables],
    )
