"""How the arguments of builders are written as text, on a command line.

==========  ============================================================
kind        example
==========  ============================================================
shape       ``3072x1024``
shapes      ``4x5;3;2x4``
mesh        ``tp=4,dp=2``
int, ints   ``16``, ``3,3,2``
table       ``0,2;1,3``: one list for each rank, or each sub-parameter
segments    ``8:4,4;2``: 8 rows cut 4 + 4, then 2 rows that all hold
fraction    ``1/4``
flag        ``yes``, ``no``
==========  ============================================================
"""

from __future__ import annotations

from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.algebra.mesh import Mesh, as_mesh
from restride.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["READERS", "Kind"]

Kind: TypeAlias = Literal[
    "shape", "shapes", "mesh", "int", "ints", "table", "segments", "fraction", "flag", "text"
]

_FLAGS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}

_Segments: TypeAlias = "list[tuple[int, tuple[int, ...] | None]]"


def _read_int(text: str) -> int:
    digits = text.strip()
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    if not (digits.isascii() and digits.isdigit()):
        raise RuleError(f"{text!r} is no integer")
    return sign * int(digits)


def _read_ints(text: str) -> tuple[int, ...]:
    return tuple(_read_int(part) for part in text.split(",")) if text.strip() else ()


def _read_shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(_read_int(part) for part in text.replace("x", ",").split(","))
    except RuleError as error:
        error.remedy = "write a shape as 3072x1024"
        raise


def _read_shapes(text: str) -> list[tuple[int, ...]]:
    return [_read_shape(part) for part in text.split(";")]


def _read_table(text: str) -> list[tuple[int, ...]]:
    try:
        return [_read_ints(part) for part in text.split(";")]
    except RuleError as error:
        error.remedy = "write one list per rank: 0,2;1,3"
        raise


def _read_segments(text: str) -> _Segments:
    segments: _Segments = []
    for part in text.split(";"):
        rows, colon, widths = part.partition(":")
        segments.append((_read_int(rows), _read_ints(widths) if colon else None))
    return segments


def _read_fraction(text: str) -> Fraction:
    over, slash, under = text.partition("/")
    below = _read_int(under) if slash else 1
    if not below:
        raise RuleError(f"{text!r} divides by zero")
    return Fraction(_read_int(over), below)


def _read_flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _FLAGS:
        raise RuleError(f"{text!r} is neither yes nor no")
    return _FLAGS[word]


def _read_mesh(text: str) -> Mesh:
    return as_mesh(text)


READERS: Final[Mapping[Kind, Callable[[str], object]]] = MappingProxyType(
    {
        "shape": _read_shape,
        "shapes": _read_shapes,
        "mesh": _read_mesh,
        "int": _read_int,
        "ints": _read_ints,
        "table": _read_table,
        "segments": _read_segments,
        "fraction": _read_fraction,
        "flag": _read_flag,
        "text": str,
    }
)
"""The reader of each kind; all raise a `LayoutError` that says how to write the value."""
