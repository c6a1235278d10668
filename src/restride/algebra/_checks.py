"""Checks of single numbers, shared by the types of the algebra."""

from __future__ import annotations

from restride.errors import LayoutError

__all__ = ["require_int"]


def require_int(what: str, value: object, *, at_least: int | None = None) -> None:
    """Refuse anything but a plain integer.

    A float that happens to be whole, a bool or a framework's scalar would be accepted by arithmetic
    and then mean something else one layer up.

    Raises:
        LayoutError: `value` is no plain int, or is below `at_least`.
    """
    if type(value) is not int:
        msg = f"{what} must be an integer, got {value!r} ({type(value).__name__})"
        raise LayoutError(msg)
    if at_least is not None and value < at_least:
        msg = f"{what} must be at least {at_least}, got {value}"
        raise LayoutError(msg)
