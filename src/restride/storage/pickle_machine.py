"""The state of the inert pickle interpreter: stream, stack, memo, and the budget that bounds them.

The opcodes themselves are in `pickle_ops`. Nothing here or there looks a name up or calls what the
stream names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import CorruptError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.checkpoint.values import Value

__all__ = ["CONTAINER_WORK", "Limits", "Machine", "Rule", "Rules", "shown"]

# Called with the arguments that the stream would have passed; returns the value, or None where the
# call stays a `Constructed`.
Rule: TypeAlias = Callable[["Machine", tuple["Value", ...]], "Value"]
Rules: TypeAlias = Mapping[GlobalName, Rule]

_LINE_NBYTES: Final = 4096
_PLAIN_KEYS: Final = frozenset({str, bytes, bool, float, type(None), GlobalName, Constructed})
_LEAF_KEYS: Final = _PLAIN_KEYS | {int, complex, Storage, StoredTensor}
# Larger integers, and whatever is made of integers, can be chosen so that their hashes collide.
_PLAIN_INT: Final = 1 << 60
_KEY_NODES: Final = 1024
_COLLISIONS_PER_WORK: Final = 4
CONTAINER_WORK: Final = 3
_COPIED_NBYTES_PER_WORK: Final = 16
_SHOWN_LEN: Final = 80
_LARGEST_MEMO_INDEX: Final = (1 << 32) - 1


class Limits(Frozen):
    """What a pickle stream may cost. A stream beyond any of them is refused as corrupt.

    Attributes:
        stream_nbytes: Length of the stream.
        work: Opcodes, plus some for what is dearer than an opcode; bounds the values as well.
        depth: Levels of nesting.
        string_nbytes: Length of one string or bytes object.
        int_nbytes: Length of one integer.
        expanded: Values that a walk would visit that does not know of sharing.
    """

    stream_nbytes: int = 256 << 20
    work: int = 16_000_000
    depth: int = 200
    string_nbytes: int = 64 << 20
    int_nbytes: int = 1024
    expanded: int = 16_000_000


class Machine:
    """The state that opcodes work on.

    Args:
        stream: The whole pickle.
        persistent: Resolves a persistent id.
        rules: What known globals make of their arguments.
        limits: What the stream may cost.
    """

    __slots__ = (
        "at",
        "budget",
        "limits",
        "marked",
        "memo",
        "persistent",
        "rules",
        "stack",
        "stream",
    )

    def __init__(
        self,
        stream: bytes,
        *,
        persistent: Callable[[Value], Value],
        rules: Rules,
        limits: Limits,
    ) -> None:
        self.stream = stream
        self.at = 0
        self.stack: list[Value] = []
        self.marked: list[list[Value]] = []
        self.memo: dict[int, Value] = {}
        self.budget = limits.work
        self.persistent = persistent
        self.rules = rules
        self.limits = limits

    # The stream.

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes of the stream."""
        start, stop = self.at, self.at + nbytes
        if stop > len(self.stream):
            raise CorruptError(
                f"{nbytes} bytes are announced, the stream has {len(self.stream) - start} left"
            )
        self.at = stop
        return self.stream[start:stop]

    def take_uint(self, nbytes: int) -> int:
        """The next `nbytes` bytes as an unsigned integer."""
        start, stop = self.at, self.at + nbytes
        if stop > len(self.stream):
            self.take(nbytes)  # which refuses
        self.at = stop
        return int.from_bytes(self.stream[start:stop], "little")

    def take_string(self, length_nbytes: int) -> bytes:
        """A length of so many bytes, and what it announces."""
        nbytes = self.take_uint(length_nbytes)
        if nbytes > self.limits.string_nbytes:
            raise CorruptError(
                f"a string of {nbytes} bytes is longer than the limit of "
                f"{self.limits.string_nbytes} bytes"
            )
        return self.take(nbytes)

    def take_line(self, limit_nbytes: int = _LINE_NBYTES) -> bytes:
        """The rest of a line, without its end."""
        stop = self.stream.find(b"\n", self.at, self.at + limit_nbytes + 1)
        if stop < 0:
            raise CorruptError(f"a line does not end within {limit_nbytes} bytes")
        line = self.stream[self.at : stop]
        self.at = stop + 1
        return line

    # The stack. A mark starts a new one, so that nothing reaches below a mark.

    def push(self, value: Value) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self) -> Value:
        """Take the top of the stack."""
        if not self.stack:
            raise CorruptError("the stack is empty")
        return self.stack.pop()

    def top(self) -> Value:
        """The top of the stack, which stays."""
        if not self.stack:
            raise CorruptError("the stack is empty")
        return self.stack[-1]

    def mark(self) -> None:
        """Set a mark."""
        if len(self.marked) >= self.limits.depth:
            raise CorruptError(f"values are nested deeper than {self.limits.depth} levels")
        self.marked.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Value]:
        """Take everything down to the last mark, and the mark."""
        if not self.marked:
            raise CorruptError("no mark is set")
        values, self.stack = self.stack, self.marked.pop()
        return values

    # Values.

    def charge(self, work: int) -> None:
        """Account for what is dearer than an opcode."""
        self.budget -= work
        if self.budget < 0:
            raise CorruptError(f"the stream needs more than {self.limits.work} steps")

    def charge_copy(self, nbytes: int) -> None:
        """Account for a copy: without this, a long string that is shared is copied for nothing."""
        self.charge(nbytes // _COPIED_NBYTES_PER_WORK)

    def push_container(self, container: Value) -> None:
        """Put a new container on the stack; an empty one is the dearest value per opcode."""
        self.charge(CONTAINER_WORK)
        self.stack.append(container)

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        if index > _LARGEST_MEMO_INDEX:
            raise CorruptError(f"memo entry {index} is beyond {_LARGEST_MEMO_INDEX}")
        if not self.stack:
            raise CorruptError("the stack is empty")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push a value from the memo."""
        try:
            value = self.memo[index]
        except KeyError:
            raise CorruptError(f"memo entry {index} has not been set") from None
        self.stack.append(value)

    def construct(self, constructor: Value, args: Value, *, is_new: bool = False) -> Value:
        """The inert image of a call."""
        if not isinstance(args, tuple):
            raise CorruptError(f"a call gets its arguments as {type(args).__name__}, not as tuple")
        if not isinstance(constructor, GlobalName | Constructed):
            raise CorruptError(f"a value of type {type(constructor).__name__} would be called")
        self.charge(CONTAINER_WORK)
        if isinstance(constructor, GlobalName) and constructor in self.rules:
            value = self.rules[constructor](self, args)
            if value is not None:
                return value
        return Constructed(constructor, args, is_new=is_new)

    def hashed(self, values: Iterable[Value]) -> set[Value]:
        """Put values into a set, each of them checked."""
        checked: set[Value] = set()
        for value in values:
            self.require_key(value, len(checked))
            checked.add(value)
        return checked

    def require_key(self, key: Value, container_len: int) -> None:
        """Refuse a key that cannot be hashed, or not cheaply.

        Python hashes a tuple by walking all of it, shared parts again and again and as deep as they
        go, and integers and what is made of them can be chosen to collide. So such keys are small,
        and pay for the collisions that they may cause.
        """
        kind = type(key)
        if kind in _PLAIN_KEYS or (kind is int and -_PLAIN_INT < key < _PLAIN_INT):  # type: ignore[operator]
            return
        left = [key]
        nodes = 0
        while left:
            nodes += 1
            if nodes + len(left) > _KEY_NODES:
                raise CorruptError(f"a key is made of more than {_KEY_NODES} values")
            part = left.pop()
            if isinstance(part, tuple | frozenset):
                if len(part) > _KEY_NODES:
                    raise CorruptError(f"a key is made of more than {_KEY_NODES} values")
                left.extend(part)
            elif type(part) not in _LEAF_KEYS:
                raise CorruptError(f"a value of type {type(part).__name__} cannot be a key")
        self.charge(nodes + container_len // _COLLISIONS_PER_WORK)


def shown(value: Value) -> str:
    """A short text for messages. Never the repr of a container, which may be without end."""
    match value:
        case str():
            return repr(value[:_SHOWN_LEN])
        case bool() | int() | float() | None:
            return repr(value)[:_SHOWN_LEN]
        case GlobalName():
            return str(value)[:_SHOWN_LEN]
        case _:
            return f"a value of type {type(value).__name__}"
