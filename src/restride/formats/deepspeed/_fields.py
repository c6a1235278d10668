"""Typed access to inert values: what a file says is checked where it is used, and says where.

Everything that a checkpoint stores is somebody else's word. A `Field` is one value together with
its path, such as ``mp_rank_00_model_states.pt: param_shapes[0]['wte']``; asking it for an integer,
a list or a tensor gives that, or a `FormatError` that names the path, what was expected and what is
there.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import FormatError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.values import Value

__all__ = ["Field", "shown"]

# Every number of a checkpoint counts elements, bytes, ranks or steps.
_LARGEST_INT: Final = 2**63 - 1
_SHOWN_LENGTH: Final = 80
_MOST_DIMENSIONS: Final = 64
_INTS: Final = frozenset({int})

# Containers of other classes that are pickled as "build an empty one, then set these items".
_MAPPING_NAMES: Final = frozenset({"OrderedDict", "defaultdict", "Counter"})
_SEQUENCE_NAMES: Final = frozenset({"Size", "deque"})


class Field(Frozen):
    """One inert value and the path that leads to it.

    Attributes:
        value: The value.
        outer: The field that it is in; of a whole file, the file.
        step: How it is found there: by its key or index, or by the name of an attribute, in a
            tuple.
    """

    value: Value
    outer: Field | str
    step: str | int | tuple[str] = ""

    @property
    def where(self) -> str:
        """File and path, for errors: spelled out only when one asks, which is seldom."""
        if isinstance(self.outer, str):
            return self.outer
        outer = self.outer.where
        if isinstance(self.step, tuple):
            return f"{outer}.{self.step[0]}"
        # The first step after a file name reads ``file: key``.
        if outer.endswith(".pt") and type(self.step) is str:
            return f"{outer}: {self.step}"
        return f"{outer}[{self.step!r}]"

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a dict, or an object of a class that is one."""
        value = self.value
        return isinstance(value, dict) or (
            isinstance(value, Constructed) and _class_name(value) in _MAPPING_NAMES
        )

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a list or tuple, or an object of a class that is one."""
        value = self.value
        return isinstance(value, list | tuple) or (
            isinstance(value, Constructed) and _class_name(value) in _SEQUENCE_NAMES
        )

    def wrong(self, expected: str) -> FormatError:
        """Make the error that says what was expected here and what is there instead."""
        return FormatError(f"{expected} is expected, found {shown(self.value)}", where=self.where)

    def get(self, key: str | int) -> Field | None:
        """Return the entry of a mapping, or None where the key is missing or its value is None.

        Raises:
            FormatError: This is no mapping.
        """
        entry = self._mapping().get(key)
        return None if entry is None else Field(entry, self, key)

    def at(self, key: str | int) -> Field:
        """Return the entry of a mapping.

        Raises:
            FormatError: This is no mapping, or it has no such key.
        """
        entry = self.get(key)
        if entry is None:
            keys = ", ".join(shown(known) for known in list(self._mapping())[:8]) or "none"
            raise FormatError(f"has no {key!r}; its keys are {keys}", where=self.where)
        return entry

    def items(self) -> Iterator[tuple[str, Field]]:
        """Yield the entries of a mapping whose keys are all text.

        Raises:
            FormatError: This is no mapping, or a key is no text.
        """
        for key, entry in self._mapping().items():
            if type(key) is not str:
                raise FormatError(
                    f"a name is expected as key, found {shown(key)}", where=self.where
                )
            yield key, Field(entry, self, key)

    def numbered(self) -> Iterator[tuple[int, Field]]:
        """Yield the entries of a mapping whose keys are all integers, or text of digits.

        Raises:
            FormatError: This is no mapping, or a key is no number.
        """
        for key, entry in self._mapping().items():
            number = int(key) if type(key) is str and key.isdecimal() and len(key) < 10 else key  # noqa: PLR2004
            if type(number) is not int:
                raise FormatError(
                    f"a rank is expected as key, found {shown(key)}", where=self.where
                )
            yield number, Field(entry, self, number)

    def elements(self) -> tuple[Field, ...]:
        """Return the elements of a list or tuple.

        Raises:
            FormatError: This is neither.
        """
        return tuple([Field(entry, self, n) for n, entry in enumerate(self._sequence())])

    def integer(self, *, at_least: int = 0) -> int:
        """Return an integer in the range of what can be counted.

        Raises:
            FormatError: This is no integer, below `at_least` or too large.
        """
        value = self.value
        if type(value) is not int or not at_least <= value <= _LARGEST_INT:
            raise self.wrong(f"an integer of at least {at_least}")
        return value

    def text(self) -> str:
        """Return a string.

        Raises:
            FormatError: This is none.
        """
        if type(self.value) is not str:
            raise self.wrong("a text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        """Return a list of strings.

        Raises:
            FormatError: This is none.
        """
        found = self._sequence()
        if all(type(entry) is str for entry in found):
            return tuple(found)  # type: ignore[arg-type]  # just checked
        return tuple(element.text() for element in self.elements())

    def integers(self, *, at_least: int = 0) -> tuple[int, ...]:
        """Return a list of integers.

        Raises:
            FormatError: This is none, or one is below `at_least`.
        """
        found = self._sequence()
        # Most numbers of a file are in lists, and are what they must be.
        if _INTS.issuperset(map(type, found)):
            numbers: tuple[int, ...] = tuple(found)  # type: ignore[arg-type]  # just checked
            if not numbers or (min(numbers) >= at_least and max(numbers) <= _LARGEST_INT):
                return numbers
        return tuple(element.integer(at_least=at_least) for element in self.elements())

    def shape(self) -> tuple[int, ...]:
        """Return the shape of a tensor: sizes whose product can be counted.

        Raises:
            FormatError: This is none.
        """
        if len(self._sequence()) > _MOST_DIMENSIONS:
            raise self.wrong(f"a shape of at most {_MOST_DIMENSIONS} dimensions")
        shape = self.integers()
        if prod(shape) > _LARGEST_INT:
            raise FormatError(f"a tensor of shape {shape} does not exist", where=self.where)
        return shape

    def tensor(self) -> StoredTensor:
        """Return a tensor that the file stores.

        Raises:
            FormatError: This is none.
        """
        if not isinstance(self.value, StoredTensor):
            raise self.wrong("a tensor")
        return self.value

    def attribute(self, name: str) -> Field:
        """Return an attribute of a pickled object, such as a dataclass.

        Raises:
            FormatError: This is no object, or it has no such attribute.
        """
        if not isinstance(self.value, Constructed):
            raise self.wrong(f"an object with an attribute {name!r}")
        state = self.value.state
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # noqa: PLR2004
            state = state[1]  # what an object with __slots__ is pickled with
        if not isinstance(state, dict) or name not in state:
            raise self.wrong(f"an object with an attribute {name!r}")
        return Field(state[name], self, (name,))

    def _sequence(self) -> list[Value] | tuple[Value, ...]:
        value = self.value
        if isinstance(value, (list, tuple)):
            return value
        if isinstance(value, Constructed) and _class_name(value) in _SEQUENCE_NAMES:
            value = value.args[0] if value.args else value.items
        if not isinstance(value, (list, tuple)):
            raise self.wrong("a list")
        return value

    def _mapping(self) -> dict[Value, Value]:
        value = self.value
        if isinstance(value, dict):
            return value
        if not isinstance(value, Constructed) or _class_name(value) not in _MAPPING_NAMES:
            raise self.wrong("a dict")
        try:
            return dict(value.pairs)
        except TypeError:  # a key that cannot be hashed
            raise self.wrong("a dict with plain keys") from None


def shown(value: Value) -> str:
    """Describe a value in a few words, however large or strange it is."""
    match value:
        case int() if abs(value) > _LARGEST_INT:
            # Python refuses to print integers of thousands of digits.
            text = f"an integer of {value.bit_length()} bits"
        case str() if len(value) > _SHOWN_LENGTH:
            text = f"{value[:_SHOWN_LENGTH]!r}... ({len(value)} characters)"
        case None | int() | float() | complex() | str():
            text = repr(value)
        case GlobalName():
            text = f"the name {value}"
        case Constructed():
            text = f"an object of {_class_name(value) or 'some class'}"
        case StoredTensor():
            text = f"a tensor of shape {value.shape} and dtype {value.storage.dtype}"
        case Storage():
            text = "a storage"
        case _:
            text = f"a {type(value).__name__} of {len(value)}"
    return text


def _class_name(value: Constructed) -> str:
    return value.constructor.name if isinstance(value.constructor, GlobalName) else ""
