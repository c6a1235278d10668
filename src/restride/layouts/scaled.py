"""Layouts of what follows the scale of a tensor: its master copy, its optimizer states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.scales import STATE_POWERS
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from restride.algebra.layout import Layout

__all__ = ["scaled_state"]


def scaled_state(layout: Layout, state: str, where: str) -> Layout:
    """Give the layout of a tensor the power of its scale that one of its states follows.

    Args:
        layout: How the tensor is cut, or its state, with the scale of the tensor.
        state: Name of the state.
        where: Tensor, for errors.

    Raises:
        UnsupportedError: The tensor is stored scaled, and how this state follows is not known.

    Examples:
        >>> from fractions import Fraction
        >>> from restride.layouts.replicated import replicated
        >>> bias = replicated((6,), mesh={"tp": 2}, scale=Fraction(1, 2))
        >>> scaled_state(bias, "exp_avg_sq", "bias").all_pieces[0].scale
        Fraction(4, 1)
    """
    if layout.is_exact or state == "fp32":
        return layout
    if state not in STATE_POWERS:
        raise UnsupportedError(
            f"is stored scaled by {layout.all_pieces[0].scale}, and how its state {state!r} "
            "scales is not known",
            where=where,
        )
    power = STATE_POWERS[state]
    return replace(
        layout,
        all_pieces=tuple(replace(piece, scale=piece.scale**power) for piece in layout.all_pieces),
    )
