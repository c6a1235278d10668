"""Inert values: making them up, comparing them with their sharing, and saving them naively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    Storage,
    StoredTensor,
)
from restride.storage.torch_file import lay_out_torch_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.checkpoint.values import Value

__all__ = ["inert_values", "require_same_value", "save_value"]


def inert_values() -> st.SearchStrategy[Any]:
    """Values of every type that a pickle can hold without tensors."""
    return st.recursive(_leaves(), _containers, max_leaves=12)


def _names() -> st.SearchStrategy[GlobalName]:
    words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return st.builds(GlobalName, words, st.lists(words, min_size=1, max_size=2).map(".".join))


def _leaves() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    ints = st.integers() | st.integers(-(1 << 33), 1 << 33)
    floats = st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    data = st.binary(max_size=8) | st.binary(max_size=8).map(bytearray)
    return st.none() | st.booleans() | ints | floats | text | data | _names()


def _keys() -> st.SearchStrategy[Any]:
    return st.integers(-9, 9) | st.text(st.characters(codec="ascii"), max_size=4)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=5)
    dicts = st.dictionaries(_keys(), inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | lists.map(lambda values: [*values, values, values])
        | dicts
        | st.builds(_ordered, dicts, st.none() | dicts)
        | st.sets(_keys(), max_size=4)
        | st.frozensets(_keys(), max_size=4)
        | st.builds(_object, inner, lists, dicts, st.booleans())
    )


def _ordered(values: dict[Value, Value], state: Value) -> OrderedDictValue:
    ordered = OrderedDictValue()
    ordered.update(values)
    ordered.state = state
    return ordered


def _object(
    state: Value,
    values: list[Value],
    entries: dict[Value, Value],
    is_new: bool,  # noqa: FBT001 - hypothesis hands it over by position
) -> Constructed:
    return Constructed(
        GlobalName("framework", "Thing"),
        tuple(values),
        kwargs=entries if is_new else {},
        state=state,
        items=list(values),
        pairs=list(entries.items()),
        is_new=is_new,
    )


def require_same_value(a: Value, b: Value) -> None:
    """Fail where two values differ in a type, a part, an order, or in what is shared."""
    _Comparison().same(a, b, "value")


class _Comparison:
    def __init__(self) -> None:
        self.partners: dict[int, int] = {}
        self.storages: dict[tuple[str, str], tuple[str, str]] = {}

    def same(self, a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
        if isinstance(a, list | dict | Constructed):
            # What one side refers to twice, the other one does too.
            assert self.partners.setdefault(id(a), id(b)) == id(b), f"{where}: shared differently"
            assert self.partners.setdefault(-id(b), id(a)) == id(a), f"{where}: shared differently"
        match a:
            case dict():
                self.same(tuple(a.items()), tuple(b.items()), where)
                self.same(getattr(a, "state", None), getattr(b, "state", None), f"{where}.state")
            case Constructed():
                for part in ("constructor", "args", "kwargs", "state", "items", "pairs", "is_new"):
                    self.same(getattr(a, part), getattr(b, part), f"{where}.{part}")
            case StoredTensor() | Storage():
                self.same_place(a, b, where)
            case list() | tuple():
                assert len(a) == len(b), where
                for number, (one, other) in enumerate(zip(a, b, strict=True)):
                    self.same(one, other, f"{where}[{number}]")
            case _:
                # Unlike ==, the text of a number tells -0.0 from 0.0.
                assert a == b, f"{where}: {a!r} and {b!r}"
                assert isinstance(a, set | frozenset) or repr(a) == repr(b), where

    def same_place(self, a: Any, b: Any, where: str) -> None:
        if isinstance(a, StoredTensor):
            assert (a.shape, a.strides, a.storage_base) == (b.shape, b.strides, b.storage_base)
            a, b = a.storage, b.storage
        assert (a.dtype, a.nbytes) == (b.dtype, b.nbytes), where
        partner = self.storages.setdefault((a.file, a.key), (b.file, b.key))
        assert partner == (b.file, b.key), f"{where}: storages are shared differently"


def save_value(
    path: Path,
    value: Value,
    contents: Mapping[str, bytes] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Write a value as a torch file, storage by storage: the slow way of an executor.

    Args:
        path: The file.
        value: The value.
        contents: Bytes of new storages by their key; those of files are read from there.
        name: Name of the file below its root, where that is not the folder of it.
    """
    layout = lay_out_torch_file(name or path.name, value)
    with path.open("wb") as file:
        file.truncate(layout.file.nbytes)
        for start, literal in layout.file.spelled():
            file.seek(start)
            file.write(literal)
        for storage, start in layout.storages:
            file.seek(start)
            file.write(_content(storage, contents or {}))


def _content(storage: Storage, contents: Mapping[str, bytes]) -> bytes:
    if not storage.file:
        return contents[storage.key]
    with Path(storage.file).open("rb") as file:
        file.seek(storage.start_nbytes)
        return file.read(storage.nbytes)
