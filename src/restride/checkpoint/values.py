"""Inert values: what a hostile file may say, as data. Nothing here can run.

A pickle stream is read into plain Python scalars and containers plus the classes below. A class or
function that the stream names is a `GlobalName`; an object the stream would have built is a
`Constructed`, which records how it would have been built. Tensors are `StoredTensor`: a place in a
file.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, field

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.checkpoint.dtypes import DType

__all__ = [
    "Constructed",
    "GlobalName",
    "OrderedDictValue",
    "SizeValue",
    "Storage",
    "StoredTensor",
    "Value",
    "difference",
    "keyed",
]

_PARTS: Final = ("constructor", "args", "kwargs", "state", "items", "pairs")
_SHOWN_LENGTH: Final = 40
# Python refuses to print integers of thousands of digits.
_LARGEST_KEY: Final = 1 << 63


class GlobalName(Frozen):
    """A name that the stream refers to; it is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Storage(Frozen):
    """One block of bytes of a file that tensors are views of.

    Attributes:
        file: Name of the file, as the reader was given it.
        key: Name of the record inside the file.
        dtype: Element type of the storage.
        start_nbytes: First byte in the file.
        nbytes: Length in bytes.
    """

    file: str
    key: str
    dtype: DType
    start_nbytes: int
    nbytes: int


class StoredTensor(Frozen):
    """A strided view of a storage. Its bounds have been checked.

    Attributes:
        storage: The bytes.
        storage_base: Index, in elements, of the first element inside the storage.
        shape: Sizes.
        strides: Distance between steps of each dimension, in elements, at least 0.
    """

    storage: Storage
    storage_base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def start_nbytes(self) -> int:
        """Byte of the file where the first element stands."""
        return self.storage.start_nbytes + self.storage_base * self.storage.dtype.itemsize_nbytes

    @property
    def is_dense(self) -> bool:
        """Whether its elements follow one another, the last dimension fastest."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return not prod(self.shape)
            expected *= size
        return True


class Constructed(Struct, eq=False):
    """An object that the stream would have built by calling something.

    Attributes:
        constructor: What would have been called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call, where the opcode has them.
        state: What would have been given to ``__setstate__`` or ``__dict__``, or None.
        items: What would have been appended.
        pairs: What would have been set by key.
        is_new: Whether the call would have been ``constructor.__new__(constructor, ...)``, which
            skips ``__init__``.
    """

    constructor: Value
    args: tuple[Value, ...] = ()
    kwargs: dict[Value, Value] = field(default_factory=dict)
    state: Value = None
    items: list[Value] = field(default_factory=list)
    pairs: list[tuple[Value, Value]] = field(default_factory=list)
    is_new: bool = False


class OrderedDictValue(dict["Value", "Value"]):
    """A `collections.OrderedDict` of the stream: a dict that remembers what it was.

    Attributes:
        state: Attributes of the object, such as ``{"_metadata": ...}`` of a state dict, or None.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        super().__init__()
        self.state: Value = None


class SizeValue(tuple[int, ...]):
    """A ``torch.Size`` of the stream: a tuple that remembers what it was.

    Frameworks call methods of it that a tuple does not have, so it is written as it was read.
    """

    __slots__ = ()


Value: TypeAlias = (
    "bool | int | float | complex | str | bytes | bytearray | list[Value] | tuple[Value, ...]"
    " | dict[Value, Value] | set[Value] | frozenset[Value]"
    " | GlobalName | Constructed | Storage | StoredTensor | None"
)


def keyed(entries: Mapping[str, Value]) -> dict[Value, Value]:
    """A dict as files have it, in which a key may be any value."""
    return {key: value for key, value in entries.items()}  # noqa: C416 - the type of the keys


def difference(a: Value, b: Value) -> tuple[str, Value, Value] | None:
    """Find the first place where two values differ. Tensors are not read; a NaN is a NaN.

    Returns:
        How the place is reached, and what each has there, None for nothing; None where the values
        are the same.

    Examples:
        >>> difference({"lr": 1, "betas": (0.9, 0.95)}, {"lr": 1, "betas": [0.9, 0.99]})
        ("['betas'][1]", 0.95, 0.99)
        >>> difference([float("nan")], [float("nan")]) is None
        True
    """
    pairs: Iterable[tuple[str, Value, Value]]
    match a, b:
        case StoredTensor(), StoredTensor():
            return None
        case dict(), dict():
            for key in {**b, **a}:
                if (key in a) != (key in b):
                    return _spelled(key), a.get(key), b.get(key)
            pairs = ((_spelled(key), a[key], b[key]) for key in b)
        case (list() | tuple(), list() | tuple()) if len(a) == len(b):
            pairs = ((f"[{n}]", *both) for n, both in enumerate(zip(a, b, strict=True)))
        case Constructed(), Constructed():
            pairs = ((f".{part}", getattr(a, part), getattr(b, part)) for part in _PARTS)
        case _:
            is_same = a == b or (a != a and b != b)  # noqa: PLR0124 - NaN
            return None if is_same else ("", a, b)
    for step, one, other in pairs:
        found = difference(one, other)
        if found is not None:
            return (step + found[0], *found[1:])
    return None


def _spelled(key: Value) -> str:
    match key:
        case str():
            return f"[{key[:_SHOWN_LENGTH]!r}]"
        case int() if abs(key) <= _LARGEST_KEY:
            return f"[{key}]"
        case _:
            return "[...]"
