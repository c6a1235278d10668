"""How many rows each rank gets: the rules of the frameworks, one function each.

Uneven conventions differ (DeepSpeed gives more to the first ranks, torch leaves the last ones
short), so a size is taken from the framework's own rule and never derived again.
"""

from __future__ import annotations

from restride.algebra._checks import require_int
from restride.errors import RuleError

__all__ = ["autotp_sizes", "chunk_sizes", "even_sizes"]

# Names that DeepSpeed cuts near-evenly although they may be a multiple of the head count.
_NEAR_EVEN_EXACT = ("lm_head", "embed_out")
_NEAR_EVEN_PARTS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def even_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Give every rank the same.

    Raises:
        LayoutError: A number is no integer, negative, or no rank is there.
        RuleError: `ranks` does not divide `total`.

    Examples:
        >>> even_sizes(8, 4)
        (2, 2, 2, 2)
    """
    require_int("total", total, at_least=0)
    require_int("ranks", ranks, at_least=1)
    if total % ranks:
        raise RuleError(
            f"{total} rows do not cut into {ranks} equal parts",
            remedy="give the sizes, such as those of autotp_sizes or chunk_sizes",
        )
    return (total // ranks,) * ranks


def chunk_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Cut as `torch.chunk` does: rounded up, so that the last ranks are short or empty.

    FSDP2 and DTensor cut dimension 0 this way. `torch.chunk` returns fewer chunks where ranks are
    left over; here they get 0.

    Raises:
        LayoutError: A number is no integer, negative, or no rank is there.

    Examples:
        >>> chunk_sizes(10, 4), chunk_sizes(5, 4)
        ((3, 3, 3, 1), (2, 2, 1, 0))
    """
    require_int("total", total, at_least=0)
    require_int("ranks", ranks, at_least=1)
    most = -(-total // ranks)
    return tuple(max(0, min(most, total - rank * most)) for rank in range(ranks))


def autotp_sizes(
    total: int,
    ranks: int,
    *,
    heads: int | None = None,
    grain: int = 1,
    name: str | None = None,
) -> tuple[int, ...]:
    """Cut as DeepSpeed's AutoTP does, the larger shards first.

    Three rules, the first that applies (deepspeed 0.19.8 `module_inject/tp_shard.py`,
    `get_shard_size`):

    1. On head boundaries: `heads` is known and divides `total`, and the layer is no MLP and no
       output head by its name. Each rank gets whole heads, the first ``heads % ranks`` one more;
       ranks beyond the head count get nothing.
    2. In grains: `total` is at least one grain. Each rank gets whole grains, the first ranks one
       more; what is left below one grain goes to the **last** rank.
    3. Evenly, the first ``total % ranks`` ranks one more.

    Args:
        total: Rows to cut.
        ranks: Tensor-parallel ranks.
        heads: Key/value heads of the model (DeepSpeed's `num_kv_heads`).
        grain: DeepSpeed's `tp_grain_size`.
        name: Name of the layer, where it has one.

    Returns:
        Rows of each rank; they add up to `total`.

    Raises:
        LayoutError: A number is no integer or out of range.

    Examples:
        >>> autotp_sizes(48, 4, heads=6)
        (16, 16, 8, 8)
        >>> autotp_sizes(100, 3, grain=16), autotp_sizes(10, 4)
        ((32, 32, 36), (3, 3, 2, 2))
    """
    require_int("total", total, at_least=0)
    require_int("ranks", ranks, at_least=1)
    require_int("grain", grain, at_least=1)
    if heads is not None:
        require_int("heads", heads, at_least=1)
        if total % heads == 0 and not _is_near_even(name):
            return tuple(n * (total // heads) for n in _near_even(heads, ranks))
    if total < grain:
        return _near_even(total, ranks)
    grains, left = divmod(total, grain)
    sizes = [n * grain for n in _near_even(grains, ranks)]
    sizes[-1] += left
    return tuple(sizes)


def _near_even(total: int, ranks: int) -> tuple[int, ...]:
    least, more = divmod(total, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def _is_near_even(name: str | None) -> bool:
    """Whether DeepSpeed cuts a layer of this name without regard to heads."""
    return name is not None and (
        name in _NEAR_EVEN_EXACT or any(part in name for part in _NEAR_EVEN_PARTS)
    )
