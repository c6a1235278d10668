"""What a finished value must look like so that nobody who walks it gets lost.

Sharing is kept: a value that the stream refers to twice is one value. A walk that does not know of
sharing sees it twice, and ten lists of ten references each to the next are ten thousand million
values to it. So the size of that walk is computed, without walking it, and bounded; so is its
depth; and a value that contains itself is refused.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    Storage,
    StoredTensor,
)
from restride.errors import CorruptError
from restride.storage.pickle_machine import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.values import Value
    from restride.storage.pickle_machine import Limits

__all__ = ["require_walkable"]

# Containers; everything else is a leaf.
_Node: TypeAlias = "list[Value] | tuple[Value, ...] | dict[Value, Value] | set[Value] | frozenset[Value] | Constructed"  # noqa: E501
_NODES = (list, tuple, dict, set, frozenset, Constructed)
# The types of almost all leaves, which are almost all values: told by one look.
_LEAVES: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), GlobalName, Storage, StoredTensor}
)
# Shapes and the like are shared, which makes them few values more to a walk that visits them again.
_VISITS_PER_VALUE: Final = 4


class _Frame:
    """A container that is being walked."""

    __slots__ = ("children", "levels", "node", "size")

    def __init__(self, node: _Node) -> None:
        self.node = node
        self.children = _children(node)
        self.levels = 1
        self.size = 1


def require_walkable(root: Value, limits: Limits, *, made: int = 0) -> None:
    """Refuse a value that contains itself, is nested too deep, or expands into too many values.

    Args:
        root: The value.
        limits: How deep and how large it may be.
        made: About how many values there are, each shared one counted once. A walk that does not
            know of sharing may visit a few times as many: where that is enough, it is faster.

    Raises:
        CorruptError: One of the above, with the place inside the value.

    Cost:
        O(values), each shared value once; no recursion.
    """
    if not isinstance(root, _NODES) or _can_be_walked(root, limits, _VISITS_PER_VALUE * made):
        return
    known: dict[int, tuple[int, int]] = {}
    frames = [_Frame(root)]
    walking = {id(root)}
    while frames:
        frame = frames[-1]
        inner = _next_unknown(frame, known)
        if frame.size > limits.expanded:
            raise _refusal(
                f"expands into more than {limits.expanded} values where shared ones are repeated",
                frames,
            )
        if frame.levels + len(frames) - 1 > limits.depth:
            raise _refusal(f"is nested deeper than {limits.depth} levels", frames)
        if inner is None:
            frames.pop()
            walking.discard(id(frame.node))
            known[id(frame.node)] = (frame.levels, frame.size)
            if frames:
                _account(frames[-1], known[id(frame.node)])
        elif id(inner) in walking:
            raise _refusal(f"contains itself (a {type(inner).__name__})", frames)
        else:
            walking.add(id(inner))
            frames.append(_Frame(inner))


def _can_be_walked(root: _Node, limits: Limits, most: int) -> bool:
    """Walk a value level by level without regard to sharing, but not for long.

    Returns:
        Whether that came to an end within the limits. If not, the value may be sound all the same.
    """
    level: list[Value] = [root]
    size, most = 1, min(most, limits.expanded)
    for _ in range(limits.depth):
        children: list[Value] = []
        for node in level:
            if type(node) is list or type(node) is tuple:
                children.extend(node)
            elif type(node) is dict:
                children.extend(node)
                children.extend(node.values())
            elif isinstance(node, _NODES):
                children.extend(_children(node))
            if size + len(children) > most:
                return False
        size += len(children)
        level = [child for child in children if type(child) not in _LEAVES]
        if not level:
            return True
    return False


def _next_unknown(frame: _Frame, known: dict[int, tuple[int, int]]) -> _Node | None:
    """Account for children until one comes that has not been walked."""
    for child in frame.children:
        if type(child) in _LEAVES:
            frame.size += 1
        elif (size := known.get(id(child))) is not None:
            _account(frame, size)
        elif isinstance(child, _NODES):
            return child
        else:
            frame.size += 1
    return None


def _account(frame: _Frame, child: tuple[int, int]) -> None:
    levels, size = child
    if levels >= frame.levels:
        frame.levels = levels + 1
    frame.size += size


def _children(node: _Node) -> Iterator[Value]:
    match node:
        case dict():
            yield from node
            yield from node.values()
            if isinstance(node, OrderedDictValue):
                yield node.state
        case Constructed():
            yield from (node.constructor, node.args, node.kwargs, node.state)
            yield node.items
            for pair in node.pairs:
                yield from pair
        case _:
            yield from node


def _refusal(problem: str, frames: list[_Frame]) -> CorruptError:
    """Name the place by the way down to it; only the first steps, where it is long."""
    steps = [_step(outer.node, inner.node) for outer, inner in pairwise(frames)]
    shown = "".join(steps[:8]) + ("..." if len(steps) > 8 else "")  # noqa: PLR2004
    return CorruptError(f"value{shown} {problem}")


def _step(outer: _Node, inner: _Node) -> str:
    match outer:
        case dict():
            return next(
                (f"[{shown(key)}]" for key, value in outer.items() if value is inner), ".key"
            )
        case list() | tuple():
            return next(f"[{index}]" for index, value in enumerate(outer) if value is inner)
        case Constructed():
            names = ("constructor", "args", "kwargs", "state", "items")
            return next((f".{name}" for name in names if getattr(outer, name) is inner), ".pairs")
        case _:
            return ".item"
