"""Identity of a layout: the same for every way of writing it.

A layout is a finite relation between full index, rank and shard index, and that relation is a
polynomial in three variables: a monomial ``x^full * y^rank * z^shard`` for each step of each piece.
How the relation was cut into pieces, in which order, with which axes, leaves no trace in the
polynomial. A signature is its value at fixed points, hashed together with the shapes.
"""

from __future__ import annotations

from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from restride.algebra._field import MOST_BITS, PRIME, Fingerprint, field_point, points_needed
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.piece import Piece

__all__ = ["same_layout", "signature"]

_Frame: TypeAlias = "tuple[Shape, tuple[tuple[int, Shape], ...], int | None, dict[str, int]]"

_PUBLIC_SEED = b"restride signature 1"


def signature(layout: Layout) -> str:
    """Name a layout by what it means: 40 hexadecimal digits.

    Two layouts have the same signature when every (full index, rank, shard index, scale) of one is
    in the other as often, and their shapes, padding with its fill, `unit_bits` and number of ranks
    are the same. How walks are cut, ordered and nested does not matter, nor how the mesh
    names its axes.

    Different layouts have different signatures except with probability below 2^-150 up to 2^50
    elements, and below 2^-77 beyond. That holds for layouts that were not made for it: the points
    are public and always the same, so somebody who wants two different layouts with one signature
    can construct them. Where the layouts come from an untrusted hand, compare with `same_layout`.

    Returns:
        A string that is stable across processes, machines and releases of the same format version.

    Raises:
        UnsupportedError: The tensor has 2^100 elements or more.

    Cost:
        O(pieces * axes) modular powers, some ten microseconds each. Never walks elements.

    Examples:
        The first of two ranks holds even rows, the second odd ones; in one piece and in two:

        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> def layout(*pieces):
        ...     return Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, pieces)
        >>> axes = Axis(2, 6, 0, 3), Axis(3, 1, 0, 1)
        >>> one = layout(Piece((Axis(2, 3, 1, 0), *axes)))
        >>> two = layout(Piece(axes, 3, 1), Piece(axes))
        >>> signature(one) == signature(two), signature(one)
        (True, '123dd66304b09dbbf25c77fe052138610ba1c18b')
    """
    frame = _frame(layout)
    count = points_needed(_degree(layout)) + 1
    content = _encode(frame), *(f"{_value(layout, _PUBLIC_SEED, k):x}" for k in range(count))
    return blake2b("|".join(content).encode(), digest_size=20).hexdigest()


def same_layout(first: Layout, second: Layout) -> bool:
    """Tell whether two layouts mean the same, however they are written.

    The point at which the polynomials are compared is derived from both layouts, so neither can
    have been made for it short of trying some 2^77 pairs. ``False`` is certain; ``True`` is wrong
    with probability below 2^-77.

    Raises:
        UnsupportedError: A tensor has 2^100 elements or more.

    Cost:
        As for `signature`.

    Examples:
        >>> from restride.algebra.layout import Layout
        >>> from restride.algebra.piece import Axis, Piece
        >>> def layout(axis):
        ...     return Layout.of({"tp": 3}, (6,), [(2,)] * 3, [Piece((axis, Axis(2, 1, 0, 1)))])
        >>> same_layout(layout(Axis(3, 2, 1, 0)), layout(Axis(3, 0, 1, 0)))
        False
    """
    if _frame(first) != _frame(second):
        return False
    if first.all_pieces == second.all_pieces and first.padding == second.padding:
        return True
    seed = "|".join(sorted((_written(first), _written(second)))).encode()
    return all(
        _value(first, seed, number) == _value(second, seed, number)
        for number in range(points_needed(_degree(first)))
    )


def _frame(layout: Layout) -> _Frame:
    """Everything about a layout that is compared as it stands."""
    runs: list[tuple[int, Shape]] = []
    for count, shape in layout.shard_shapes:
        if runs and runs[-1][1] == shape:
            runs[-1] = (runs[-1][0] + count, shape)
        else:
            runs.append((count, shape))
    steps: dict[str, int] = {}
    for kind, piece in _walks(layout):
        steps[kind] = steps.get(kind, 0) + piece.numel
    # Multiplicities stay below the prime.
    bits = max((*map(int.bit_length, steps.values()), _degree(layout).bit_length()))
    if bits > MOST_BITS:
        raise UnsupportedError(
            f"a layout of 2^{bits - 1} elements or more has no signature",
            remedy=f"stay below 2^{MOST_BITS}",
        )
    return layout.full_shape, tuple(runs), layout.unit_bits, dict(sorted(steps.items()))


def _encode(frame: _Frame) -> str:
    full_shape, runs, unit_bits, steps = frame
    return repr((full_shape, runs, unit_bits, list(steps.items())))


def _degree(layout: Layout) -> int:
    width = max((prod(shape) for _, shape in layout.shard_shapes), default=0)
    return layout.full_numel + layout.rank_count + width


def _walks(layout: Layout) -> Iterator[tuple[str, Piece]]:
    """Every walk with the kind of thing that stands on it."""
    for piece in layout.all_pieces:
        yield f"scale {piece.scale.numerator:x}/{piece.scale.denominator:x}", piece
    for padding in layout.padding:
        yield f"padding {padding.fill}", padding.as_piece()


def _value(layout: Layout, seed: bytes, number: int) -> int:
    """Evaluate the polynomial of a layout at the point that a seed gives."""
    sums = Fingerprint([field_point(seed + name, number) for name in (b" x", b" y", b" z")])
    weights: dict[str, int] = {}
    total = 0
    for kind, piece in _walks(layout):
        if kind not in weights:
            weights[kind] = field_point(seed + kind.encode(), number)
        bases = piece.full_base, piece.rank_base, piece.shard_base
        digits = (
            (axis.extent, axis.full_stride, axis.rank_stride, axis.shard_stride)
            for axis in piece.axes
        )
        total += weights[kind] * sums.walk(bases, digits)
    return total % PRIME


def _written(layout: Layout) -> str:
    """The very way in which a layout is written."""
    return repr(
        [
            (
                kind,
                (piece.full_base, piece.rank_base, piece.shard_base),
                [(a.extent, a.full_stride, a.rank_stride, a.shard_stride) for a in piece.axes],
            )
            for kind, piece in _walks(layout)
        ]
    )
