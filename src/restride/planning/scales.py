"""What becomes of scaled copies: the factor that elements take on their way, or why they cannot."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import TYPE_CHECKING, Literal, TypeAlias

from restride.algebra.scales import SCALABLE, STATE_POWERS, is_rounded_once
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from restride.checkpoint.dtypes import DType

__all__ = ["Use", "factor_of"]

Use: TypeAlias = Literal["resume", "read", "compare"]
"""What elements are read for: a run that goes on with them, their values, or their replicas."""


def factor_of(state: str, scale: Fraction, dtype: DType, use: Use) -> Fraction:
    """Tell by what the elements of a state are multiplied.

    Args:
        state: Name of the state.
        scale: Exact factor between its two layouts: ``target == source * scale``. The layout of a
            state has the power of the tensor's scale that the state follows.
        dtype: Type of the elements.
        use: What they are read for.

    Returns:
        The scale; 1 where replicas are compared, as they are.

    Raises:
        UnsupportedError: A run that resumed with the state would diverge, or the products would be
            rounded more than once, or the dtype has none.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> factor_of("fp32", Fraction(1, 3), DTYPES["float32"], "resume")
        Fraction(1, 3)
    """
    if scale == 1 or use == "compare":
        return Fraction(1)
    power = STATE_POWERS.get(state, 0)
    if power != 1 and use == "resume":
        raise UnsupportedError(
            f"the state {state!r} changes by a factor of {scale} with the scale of its tensor, and "
            "the optimizer would take the same steps only with "
            f"{_settings(_root(scale, power))}, which belong to the other parameters of its group "
            "too",
            remedy="convert the weights alone, keep the number of ranks, or ask for the optimizer "
            "to be transformed where all parameters of the group are scaled alike",
        )
    if dtype.name not in SCALABLE:
        raise UnsupportedError(f"elements of dtype {dtype} are not multiplied by {scale}")
    if not is_rounded_once(scale):
        raise UnsupportedError(
            f"a factor of {scale} would round each element twice",
            remedy="convert to one rank first, then to the number that is wanted",
        )
    return scale


def _settings(scale: Fraction | None) -> str:
    """What Adam needs beside its moments when a parameter is kept as `scale` times itself."""
    return "settings of its own" if scale is None else f"lr * ({scale}) and eps / ({scale})"


def _root(factor: Fraction, power: int) -> Fraction | None:
    """The scale of the tensor, of which a state has this power; None where it is not rational."""
    inverse = 1 / factor
    if power != -2:  # noqa: PLR2004 - the second moment of Adam
        return inverse if power == -1 else None
    parts = isqrt(max(inverse.numerator, 0)), isqrt(inverse.denominator)
    root = Fraction(*parts)
    return root if root**2 == inverse else None
