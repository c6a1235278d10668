"""Inert values are spelled as pickles again: what is read back is what was written."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    Storage,
    StoredTensor,
)
from restride.errors import UnsupportedError
from restride.storage.pickle_vm import read_pickle
from restride.storage.pickle_writer import PersistentId, write_pickle
from restride.storage.torch_file import new_tensor
from restride.storage.torch_values import TORCH_RULES
from restride.storage.torch_zip import open_torch_zip
from restride.testing.inert_values import inert_values, require_same_value, save_value

if TYPE_CHECKING:
    from pathlib import Path


@given(value=inert_values())
def test_what_is_written_is_read_back_with_its_sharing(value: object) -> None:
    written = write_pickle(value)

    require_same_value(read_pickle(written), value)
    pickletools.dis(written, out=io.StringIO())


def test_every_value_of_the_real_checkpoints_survives(shared: Path, tmp_path: Path) -> None:
    paths = sorted((shared / "checkpoints").rglob("*.pt"))
    for path in paths:
        value = open_torch_zip(path).value

        save_value(tmp_path / "again.pt", value)

        require_same_value(open_torch_zip(tmp_path / "again.pt").value, value)
    assert len(paths) >= 80


@pytest.mark.parametrize(
    "value",
    [
        [
            *range(-3, 3),
            255,
            256,
            65535,
            65536,
            2**31 - 1,
            2**31,
            -(2**31),
            -(2**31) - 1,
            1 << 5000,
        ],
        {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": ()},
        [1.5, -0.0, float("inf"), True, False, None, 2 - 1j],
        ["", "text", "ünïcode \U0001f600", "a\nb", b"", b"\x00\xff", bytearray(b"\x80")],
        [{1, 2}, frozenset({"a"}), set(), list(range(2345)), {n: n for n in range(1001)}],
    ],
)
def test_plain_values_are_what_pickle_reads(value: object) -> None:
    assert pickle.loads(write_pickle(value)) == value  # noqa: S301 - written a moment ago


TEXTS = st.text(max_size=4).map(sys.intern)  # pickle tells equal texts apart by identity
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 31), 1 << 70) | st.floats() | TEXTS,
    lambda part: (
        st.lists(part, max_size=5)
        | st.lists(part, max_size=5).map(tuple)
        | st.dictionaries(TEXTS, part, max_size=3)
    ),
    max_leaves=20,
)


@given(value=PLAIN)
@example(value=[(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"a": 1}, {"a": 1, "b": 2}])
@example(value=[[number, (number,)] for number in range(300)])
@example(value=[list(range(1000)), list(range(2002)), {n: n for n in range(2002)}])
@example(value=[1 << 2038, 1 << 2039, 1 << 2040, "x" * 300])
def test_plain_values_are_spelled_as_pickle_spells_them(value: object) -> None:
    assert write_pickle(value) == pickle.dumps(value, 2)


def test_equal_texts_and_names_are_written_once() -> None:
    texts = ["ab" * 100, "".join(["ab"] * 100)]
    names = [GlobalName("package", "Name"), GlobalName("package", "Name")]
    nested = [GlobalName("package", "Outer.Inner"), GlobalName("package", "Outer.Inner")]
    assert texts[0] is not texts[1]

    written = write_pickle([texts, names, nested])

    for text in ("ab" * 100, "cpackage\nName\n", "Outer.Inner"):
        assert written.count(text.encode()) == 1
    require_same_value(read_pickle(written), [[texts[0]] * 2, [names[0]] * 2, [nested[0]] * 2])


def test_the_stream_is_of_protocol_2_as_torch_writes_it() -> None:
    value = {"a": [1, 2], "name": GlobalName("torch", "float32"), "bytes": b"x"}

    highest = {op.proto for op, _, _ in pickletools.genops(write_pickle(value))}

    assert max(highest) == 2


@pytest.mark.parametrize(
    "value",
    [
        GlobalName("package.module", "Outer.Inner"),
        GlobalName("m", "naïve"),
        GlobalName("naïve", "K"),
        GlobalName("m\nK\n.", "K"),
        GlobalName("m", "K\n."),
        Constructed(GlobalName("m", "K"), (1,), kwargs={"x": 2}, is_new=True),
    ],
)
def test_what_protocol_2_cannot_spell_makes_it_protocol_4(value: object) -> None:
    written = write_pickle([value])

    assert written[:2] == b"\x80\x04"
    require_same_value(read_pickle(written), [value])


MEMBERS = st.recursive(
    # Multiples of 8 stand in the same place of a small set, the later one behind the other.
    st.integers(0, 9).map(lambda value: 8 * value) | st.sampled_from(["a", "b", None, 0.5, b"x"]),
    lambda part: st.frozensets(part, max_size=4) | st.tuples(part, part),
    max_leaves=12,
)


@given(
    st.lists(MEMBERS, max_size=6).flatmap(lambda few: st.tuples(st.just(few), st.permutations(few)))
)
def test_equal_sets_are_spelled_alike_in_whatever_order_they_were_filled(
    orders: tuple[list[object], list[object]],
) -> None:
    first, second = ({refilled(member) for member in order} for order in orders)

    assert write_pickle([first, frozenset(first)]) == write_pickle([second, frozenset(second)])


def refilled(value: object) -> object:
    """The same, with its sets filled the other way round."""
    match value:
        case frozenset():
            return frozenset([refilled(member) for member in reversed(list(value))])
        case tuple():
            return tuple(refilled(member) for member in value)
        case _:
            return value


def test_a_set_is_spelled_alike_in_every_process() -> None:
    spell = (
        "from restride.storage.pickle_writer import write_pickle;"
        "print(write_pickle(set('restride')))"
    )

    spelled = {
        subprocess.run(
            [sys.executable, "-c", spell],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(spelled) == 1


def test_tensors_and_storages_in_a_set_have_an_order_of_their_own() -> None:
    storages = [Storage("f", str(8 * key), DTYPES["float32"], 0, 16) for key in range(9)]
    tensors = [StoredTensor(storage, 0, (2,), (1,)) for storage in storages]
    parts = storages + tensors
    numbers = count()

    def number(_: Storage | StoredTensor) -> Constructed:
        return Constructed(GlobalName("a", "b"), (next(numbers),))

    def spelled(order: list[object]) -> bytes:
        nonlocal numbers
        numbers = count()
        return write_pickle(set(order), lower=number)

    assert spelled(parts) == spelled(parts[::-1])
    assert next(numbers) == len(parts)  # asked once each, and not for the order


def test_sets_deeper_than_any_values_are_refused() -> None:
    value: object = frozenset({1, 2})
    for _ in range(31):
        value = frozenset({value, 1})
    assert read_pickle(write_pickle(value)) == value

    with pytest.raises(UnsupportedError, match="sets nested deeper than 32 levels"):
        write_pickle(frozenset({value, 1}))

    alone: object = 7
    for _ in range(100):
        alone = frozenset({alone})
    assert read_pickle(write_pickle(alone)) == alone


def test_a_long_text_is_not_put_in_order_for_ever() -> None:
    """A stream may refer to one text from millions of sets, or from all members of one."""
    text = "x" * (1 << 20)
    few = [{text, number} for number in range(63)]
    again = [few[0]] * 9  # is in order already
    assert read_pickle(write_pickle(few + again)) == few + again

    for many in ([*few, {text, 63}], {(text, number) for number in range(64)}):
        with pytest.raises(UnsupportedError, match=r"sets of more than 64 MiB .* with lists or"):
            write_pickle(many)


def test_nesting_has_no_limit_of_its_own() -> None:
    value: object = 7
    for _ in range(20_000):
        value = [value]

    assert write_pickle(value).count(b"a") >= 20_000


def test_what_is_shared_is_written_once() -> None:
    part = list(range(1000))

    written = write_pickle([part] * 50)

    assert len(written) < 2 * len(write_pickle(part))
    first, *others = read_pickle(written)
    assert all(other is first for other in others)


def test_a_list_that_contains_itself_is_written_as_such() -> None:
    value: list[object] = []
    value.append(value)

    again = pickle.loads(write_pickle(value))  # noqa: S301 - written a moment ago

    assert again[0] is again


def test_sizes_stay_sizes() -> None:
    value = {"a": SizeValue((2, 3)), "b": SizeValue(())}

    again = read_pickle(write_pickle(value), rules=TORCH_RULES)

    require_same_value(again, value)


def test_objects_are_built_in_the_order_in_which_pickle_builds_them() -> None:
    value = Constructed(
        GlobalName("collections", "Counter"), pairs=[("a", 2)], items=[], state=None
    )
    ordered = OrderedDictValue()
    ordered["x"] = value

    again = pickle.loads(write_pickle(ordered))  # noqa: S301 - written a moment ago

    assert dict(again["x"]) == {"a": 2}


def test_storages_become_what_the_caller_says() -> None:
    tensor = new_tensor("7", DTYPES["float32"], (2,))

    written = write_pickle([tensor, tensor], lower=lambda part: PersistentId(("id", part.shape)))

    seen: list[object] = []
    assert read_pickle(written, persistent=lambda key: seen.append(key) or "found") == ["found"] * 2
    assert seen == [("id", (2,))] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (new_tensor("0", DTYPES["int8"], ()), "a tensor cannot be written"),
        (Storage("", "0", DTYPES["int8"], 0, 1), "a storage cannot be written"),
        (object(), "type object cannot be written"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_values_that_no_file_has_are_refused(value: object, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        write_pickle({"a": [value]})


def test_a_tensor_that_is_there_twice_is_one_tensor(tmp_path: Path) -> None:
    tensor = new_tensor("0", DTYPES["int16"], (2,))

    save_value(
        tmp_path / "a.pt", [tensor, tensor, StoredTensor(tensor.storage, 1, (), ())], {"0": b"abcd"}
    )

    first, second, third = open_torch_zip(tmp_path / "a.pt").value
    assert first is second
    assert third.storage is first.storage
