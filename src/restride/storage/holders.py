"""Which parts of what a file holds refer to a storage of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    Storage,
    StoredTensor,
)
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

    from restride.checkpoint.values import Value

__all__ = ["has_tensor", "holders_in"]

# What refers to no storage, by its type alone.
_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, bytearray, type(None), GlobalName, SizeValue}
)
# Headers of real files are nested some ten levels deep.
_DEEPEST: Final = 50


def has_tensor(value: Value) -> bool:
    """Whether a value is a tensor, or has one inside of it.

    Raises:
        UnsupportedError: It is nested so deep that a recursion may not follow it.
    """
    if isinstance(value, (Storage, StoredTensor)):
        return True
    return type(value) not in _PLAIN and id(value) in holders_in(value)


def holders_in(root: Value) -> Collection[int]:
    """Identities of the containers that refer to a storage, at whatever depth; there is no cycle.

    Raises:
        UnsupportedError: They are nested so deep that a recursion may not follow them.
    """
    known: dict[int, int] = {}

    def levels(value: Value, depth: int) -> int:
        """How far down its storages go, by whatever way; 0 where it refers to none."""
        if isinstance(value, (Storage, StoredTensor)):
            return 1
        if id(value) not in known:
            if depth > _DEEPEST:
                raise _too_deep()
            parts = _parts(value)
            inner = () if _PLAIN.issuperset(map(type, parts)) else parts
            # Each of them is looked into, also behind one that does.
            found = [levels(part, depth + 1) for part in inner if type(part) not in _PLAIN]
            deepest = max(found, default=0)
            # What is shared may have been met first where it is not as deep as elsewhere.
            if deepest > _DEEPEST:
                raise _too_deep()
            known[id(value)] = deepest + 1 if deepest else 0
        return known[id(value)]

    levels(root, 0)
    return {number for number, deepest in known.items() if deepest}


def _too_deep() -> UnsupportedError:
    return UnsupportedError(f"values are nested deeper than {_DEEPEST} levels")


def _parts(value: Value) -> Collection[Value]:
    match value:
        case OrderedDictValue():
            return [*value, *value.values(), value.state]
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set() | frozenset():
            return value
        case Constructed():
            flat = [part for pair in value.pairs for part in pair]
            return [value.constructor, value.args, value.kwargs, value.state, value.items, *flat]
        case _:
            return ()
