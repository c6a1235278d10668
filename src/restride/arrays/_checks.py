"""Checks of what is handed in, and the padding of what is handed out."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from restride.algebra.coverage import require_covered
from restride.algebra.layout import Layout
from restride.algebra.scales import STATE_POWERS
from restride.arrays._blocks import Block, Side
from restride.arrays._frameworks import framework_of
from restride.errors import LayoutError, RestrideError, ShapeMismatchError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from fractions import Fraction

    from restride.algebra.piece import Piece
    from restride.algebra.transfer import Transfers
    from restride.arrays._frameworks import Array, Framework

__all__ = [
    "admit_out",
    "admit_shards",
    "admit_tensor",
    "block_of",
    "fill_padding",
    "require_unscaled_state",
    "require_written_once",
    "scales_of",
]


def admit_tensor(
    array: Array, shape: tuple[int, ...], what: str, unit_bits: int | None
) -> tuple[Framework, Array]:
    """Return the framework of an array and a plain view of it.

    Raises:
        ShapeMismatchError: The array has another shape than the layout says.
        UnsupportedError: The array is none that strides can reach.
    """
    try:
        framework = framework_of(array)
        admitted = framework.admit(array)
    except RestrideError as error:
        raise error.located(what) from None
    if tuple(admitted.shape) != shape:
        raise ShapeMismatchError(
            f"the array has shape {tuple(admitted.shape)}, the layout says {shape}", where=what
        )
    if unit_bits is not None and admitted.itemsize * 8 < unit_bits:
        raise UnsupportedError(
            f"elements of {admitted.itemsize * 8} bits are too narrow for units of {unit_bits}",
            where=what,
            remedy="hand in one element for each unit of the layout",
        )
    return framework, admitted


def admit_shards(
    layout: Layout, shards: Mapping[int, Array], what: str
) -> tuple[Framework, dict[int, Array]]:
    """Check the shards of some ranks against the layout and each other.

    Raises:
        LayoutError: No shard is given, or one for a rank that does not exist.
        ShapeMismatchError: A shard has another shape than the layout says.
        UnsupportedError: Shards differ in type, framework or device.
    """
    if not shards:
        raise LayoutError("none are given", where=f"{what}s")
    checked: dict[int, tuple[Framework, Array]] = {}
    for rank in sorted(shards):
        try:
            shape = layout.shard_shape(rank)
        except LayoutError as error:
            raise error.located(f"{what}s") from None
        where = f"{what} of rank {rank}"
        checked[rank] = admit_tensor(shards[rank], shape, where, layout.unit_bits)
    first = min(checked)
    for rank, found in checked.items():
        if not _are_alike(found, checked[first]):
            raise UnsupportedError(
                f"the shard is {_kind(*found)}, that of rank {first} is {_kind(*checked[first])}",
                where=f"{what} of rank {rank}",
                remedy="bring all shards to one dtype and device first",
            )
    return checked[first][0], {rank: array for rank, (_, array) in checked.items()}


def admit_out(
    framework: Framework,
    out: Array | None,
    shape: tuple[int, ...],
    like: Array,
    taken: Collection[tuple[int, int]],
    what: str,
) -> Array:
    """Return where to write: `out`, if it is fit for that, else new memory.

    Args:
        framework: That of what is read.
        out: What the caller gave.
        shape: Shape that is written.
        like: An array of the type and place of all that is read.
        taken: Where in memory everything is that is read, or that others write.
        what: What `out` is, for errors.

    Raises:
        ShapeMismatchError: `out` has another shape.
        UnsupportedError: It is of another type or place, is not contiguous, cannot be written, or
            shares memory with what is read.
    """
    if out is None:
        return framework.empty(like, shape)
    given, admitted = admit_tensor(out, shape, what, None)
    if not _are_alike((given, admitted), (framework, like)):
        raise UnsupportedError(
            f"is {_kind(given, admitted)}, what is read is {_kind(framework, like)}", where=what
        )
    if not framework.is_writable(out):
        raise UnsupportedError(
            "is not a contiguous array that can be written",
            where=what,
            remedy="hand in an array of its own, or leave it out",
        )
    start, stop = framework.reach(admitted)
    if any(start < end and first < stop for first, end in taken):
        raise UnsupportedError(
            "shares memory with what is read, which would be overwritten before it is read",
            where=what,
        )
    return admitted


def _are_alike(a: tuple[Framework, Array], b: tuple[Framework, Array]) -> bool:
    """Whether elements of one array may be copied to the other as they are."""
    (one, array), (other, second) = a, b
    return (
        one.name == other.name
        and bool(array.dtype == second.dtype)
        and one.place(array) == other.place(second)
    )


def _kind(framework: Framework, array: Array) -> str:
    # Not the name of the dtype, which is the same in both orders of bytes.
    dtype = str(array.dtype).removeprefix("torch.")
    return f"{framework.name} {dtype} {framework.place(array)}"


@lru_cache(maxsize=64)
def require_written_once(layout: Layout) -> None:
    """Refuse a layout that does not say once for every shard address what stands there.

    Raises:
        CoverageError: With the address.
    """
    require_covered(layout, side="shard")


@lru_cache(maxsize=64)
def scales_of(scaled: Layout | Transfers) -> tuple[Fraction, ...]:
    """The factors by which elements change, other than 1."""
    parts = scaled.all_pieces if isinstance(scaled, Layout) else scaled.descriptors
    return tuple(dict.fromkeys(part.scale for part in parts if part.scale != 1))


def require_unscaled_state(scales: Iterable[Fraction], state: str) -> None:
    """Refuse to scale what is not the weight itself.

    Args:
        scales: Factors by which the tensor changes on its way.
        state: What is on its way.

    Raises:
        UnsupportedError: One of the scales is not 1, and `state` is an optimizer state.
    """
    scale = next((scale for scale in scales if scale != 1), None)
    if scale is None:
        return
    power = STATE_POWERS.get(state)
    if power == 1:
        return
    if power is None:
        raise UnsupportedError(
            f"the tensor changes by a factor of {scale}, and how the state {state!r} follows is "
            "not known",
            remedy=f"known states are {', '.join(STATE_POWERS)}",
        )
    raise UnsupportedError(
        f"the tensor changes by a factor of {scale}, so the state {state!r} by {scale**power}, but "
        f"the optimizer would also need lr * ({scale}) and eps / ({scale}), or a resumed run "
        "diverges",
        remedy="take the state from a layout without scale, or start the optimizer afresh",
    )


def block_of(piece: Piece) -> Block:
    """The concrete piece as a block from the full tensor into the shard."""
    axes = piece.axes
    return Block(
        tuple(axis.extent for axis in axes),
        Side(piece.full_base, tuple(axis.full_stride for axis in axes)),
        Side(piece.shard_base, tuple(axis.shard_stride for axis in axes)),
    )


def fill_padding(framework: Framework, layout: Layout, rank: int, shard: Any) -> None:
    """Write zeros wherever the layout declares padding; nobody may rely on what is undefined."""
    if not layout.padding:
        return
    for padding in layout.paddings(rank):
        extents = [axis.extent for axis in padding.axes]
        strides = [axis.shard_stride for axis in padding.axes]
        framework.fill_zero(framework.view(shard, padding.shard_base, extents, strides))
