"""A dtype is a name and a width, and nothing more: bytes are copied.

Names are those of PyTorch without the prefix, which are also NumPy's where NumPy has the type.
Formats translate to and from their own spelling at their edge.
"""

from __future__ import annotations

from typing import Final, Literal

from restride.errors import UnsupportedError
from restride.frozen import Frozen

__all__ = ["DTYPES", "DType", "Kind", "dtype_named"]

Kind = Literal["float", "int", "uint", "bool", "complex"]


class DType(Frozen):
    """An element type.

    Attributes:
        name: Name as in ``torch.<name>``.
        itemsize_nbytes: Bytes of one element.
        kind: What the bits mean; only casts and differences ask.
    """

    name: str
    itemsize_nbytes: int
    kind: Kind

    def __str__(self) -> str:
        return self.name


_ROWS: Final[tuple[tuple[str, int, Kind], ...]] = (
    ("float64", 8, "float"),
    ("float32", 4, "float"),
    ("float16", 2, "float"),
    ("bfloat16", 2, "float"),
    ("float8_e4m3fn", 1, "float"),
    ("float8_e5m2", 1, "float"),
    ("float8_e4m3fnuz", 1, "float"),
    ("float8_e5m2fnuz", 1, "float"),
    ("float8_e8m0fnu", 1, "float"),
    ("complex64", 8, "complex"),
    ("complex128", 16, "complex"),
    ("int64", 8, "int"),
    ("int32", 4, "int"),
    ("int16", 2, "int"),
    ("int8", 1, "int"),
    ("uint64", 8, "uint"),
    ("uint32", 4, "uint"),
    ("uint16", 2, "uint"),
    ("uint8", 1, "uint"),
    ("bool", 1, "bool"),
)
DTYPES: Final[dict[str, DType]] = {row[0]: DType(*row) for row in _ROWS}


def dtype_named(name: str) -> DType:
    """Look a dtype up by its name.

    Raises:
        UnsupportedError: No such dtype.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(
            f"dtype {name!r} is not known", remedy=f"known ones are {', '.join(DTYPES)}"
        ) from None
