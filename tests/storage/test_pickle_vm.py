"""The inert interpreter agrees with pickle on data, and records what pickle would call."""

from __future__ import annotations

import copyreg
import enum
import fractions
import io
import pickle
import pickletools
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.errors import CorruptError, RestrideError
from restride.storage import pickle_shape, pickle_vm
from restride.storage.pickle_ops import OPCODES, STOP
from restride.storage.pickle_vm import Limits, read_pickle
from restride.storage.pickle_writer import write_pickle
from restride.testing.hostile import Hostile, callers, hostile_pickles
from restride.testing.mutations import damaged
from restride.testing.opcodes import (
    call,
    dictionary,
    integer,
    listed,
    name,
    stream,
    text,
    tuple_of,
)

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def _tuples(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=3).map(tuple)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(), _tuples, max_leaves=4
)


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | _tuples(inner)
        | dicts
        | dicts.map(OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    )


PLAIN = st.recursive(
    KEYS
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.binary().map(bytearray)
    | st.integers(-(1 << 70), 1 << 70),
    _containers,
    max_leaves=20,
)


def kinds(value: object) -> object:
    """The types of a value, all the way down."""
    match value:
        case OrderedDict() | OrderedDictValue():
            return "ordered", [(kinds(key), kinds(item)) for key, item in value.items()]
        case dict():
            return "dict", [(kinds(key), kinds(item)) for key, item in value.items()]
        case list() | tuple():
            return type(value).__name__, [kinds(item) for item in value]
        case set() | frozenset():
            return type(value).__name__, len(value)
        case _:
            return type(value).__name__


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    result = read_pickle(pickle.dumps(value, protocol))

    assert result == value
    assert kinds(result) == kinds(value)


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_optimised_pickles_are_read_alike(value: object, protocol: int) -> None:
    assert read_pickle(pickletools.optimize(pickle.dumps(value, protocol))) == value


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_the_pure_python_pickler_is_read_alike(value: object, protocol: int) -> None:
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)

    assert read_pickle(file.getvalue()) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_at_the_edges_survive(protocol: int) -> None:
    values = [
        *(
            sign * (1 << bits) + step
            for bits in range(130)
            for sign in (1, -1)
            for step in (-1, 0, 1)
        ),
        *(0.0, -0.0, 1e-320, float("inf"), -float("inf"), 0.1),
        1 << 2000,
    ]

    result = read_pickle(pickle.dumps(values, protocol))

    assert repr(result) == repr(values)


def test_every_opcode_of_pickle_is_known_by_its_own_name() -> None:
    known = {code: row[0] for code, row in OPCODES.items()}
    known[STOP] = "STOP"

    assert known == {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_arguments_have_the_length_that_pickletools_gives_them(
    value: object, protocol: int
) -> None:
    content = pickle.dumps(value, protocol)
    for opcode, _, position in pickletools.genops(content):
        if opcode.name != "STOP":
            with pytest.raises(CorruptError) as caught:
                read_pickle(content[:position] + b"\xff" * (len(content) - position))
            assert caught.value.where == f"byte {position} (unknown)"


def test_sharing_is_kept() -> None:
    shared = ["x"]

    result = read_pickle(pickle.dumps([shared, shared, {"a": shared}]))

    assert isinstance(result, list)
    assert result[0] is result[1] is result[2]["a"]


def test_strings_of_python_2_are_text_where_they_can_be() -> None:
    assert read_pickle(b"U\x03abc.") == "abc"
    assert read_pickle(b"T\x02\0\0\0\xc3\xa9.") == "é"
    assert read_pickle(b"U\x01\xff.") == b"\xff"
    assert read_pickle(rb"S'it\'s\n\x41\\'" + b"\n.") == "it's\nA\\"
    assert read_pickle(b'S"a\'b"\n.') == "a'b"
    assert read_pickle(b"I01\n.") is True
    assert read_pickle(b"I00\n.") is False
    assert read_pickle(b"I-7\n.") == read_pickle(b"L-7L\n.") == -7


class Point(namedtuple("Point", "x y")):  # noqa: PYI024 - pickled by its arguments
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


@dataclass
class Address:
    numel: int
    start: int


class Slotted:
    __slots__ = ("a",)


class Keywords:
    def __new__(cls, *, a: int) -> Self:
        made = super().__new__(cls)
        made.a = a
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"a": self.a}


def named(cls: type) -> GlobalName:
    return GlobalName(cls.__module__, cls.__qualname__)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_are_recorded_as_they_would_have_been_built(protocol: int) -> None:
    slotted = Slotted()
    slotted.a = 5
    rows = [
        (Address(3, 4), ((), {"numel": 3, "start": 4}, [], [], True)),
        (Point(1, 2), ((1, 2), None, [], [], True)),
        (Colour.RED, ((1,), None, [], [], False)),
        (slotted, ((), (None, {"a": 5}), [], [], True)),
        (deque([1, 2], 5), (((), 5), None, [1, 2], [], False)),
        (fractions.Fraction(1, 3), (("1/3",), None, [], [], False)),
    ]
    for value, (args, state, items, pairs, is_new) in rows:
        result = read_pickle(pickle.dumps(value, protocol))

        assert isinstance(result, Constructed)
        if not isinstance(value, fractions.Fraction):
            assert result.constructor == named(type(value))
            assert (result.args, result.state, result.is_new) == (args, state, is_new)
            assert (result.items, result.pairs) == (items, pairs)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_default_dict_keeps_its_factory_and_its_pairs(protocol: int) -> None:
    result = read_pickle(pickle.dumps(defaultdict(list, {"a": [1]}), protocol))

    assert isinstance(result, Constructed)
    assert [arg.name for arg in result.args] == ["list"]
    assert result.pairs == [("a", [1])]


@pytest.mark.parametrize("protocol", [0, 1])
def test_objects_of_old_protocols_are_recorded_alike(protocol: int) -> None:
    result = read_pickle(pickle.dumps(Address(3, 4), protocol))

    assert isinstance(result, Constructed)
    assert result.constructor == named(Address)
    assert (result.args, result.state, result.is_new) == ((), {"numel": 3, "start": 4}, True)


@pytest.mark.parametrize("protocol", [4, 5])
def test_keyword_arguments_are_recorded(protocol: int) -> None:
    result = read_pickle(pickle.dumps(Keywords(a=1), protocol))

    assert isinstance(result, Constructed)
    assert (result.constructor, result.kwargs) == (named(Keywords), {"a": 1})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_and_functions_are_names(protocol: int) -> None:
    result = read_pickle(pickle.dumps([Address, Path.cwd], protocol))

    assert isinstance(result, list)
    assert result[0] == named(Address)


def test_the_ways_to_spell_bytes_are_all_read() -> None:
    latin = text("é"), text("latin1")
    for body, expected in (
        (call("_codecs.encode", *latin), b"\xe9"),
        (call("_codecs.encode", text("é"), text("latin-1")), b"\xe9"),
        (call("__builtin__.bytes"), b""),
        (call("builtins.bytearray"), bytearray()),
        (call("__builtin__.bytearray", *latin), bytearray(b"\xe9")),
        (call("builtins.bytearray", b"C\x01\xe9"), bytearray(b"\xe9")),
    ):
        result = read_pickle(stream(body, protocol=4))

        assert result == expected
        assert type(result) is type(expected)


@pytest.mark.parametrize(
    "body",
    [
        call("_codecs.encode", text("a"), text("utf-8")),
        call("_codecs.encode", text("a")),
        call("builtins.bytes", integer(1 << 40)),
        call("builtins.bytearray", integer(1 << 40)),
        call("builtins.complex", text("1j")),
        call("builtins.set", tuple_of(integer(1))),
        call("builtins.frozenset"),
        call("collections.OrderedDict", listed(tuple_of(integer(1), integer(2)))),
        call("copyreg._reconstructor", name("a.b"), name("builtins.list"), listed()),
        call("copyreg._reconstructor", integer(1), name("builtins.object"), b"N"),
    ],
)
def test_calls_with_other_arguments_stay_calls(body: bytes) -> None:
    assert isinstance(read_pickle(stream(body)), Constructed)


def test_attributes_of_an_ordered_dict_stay_with_it() -> None:
    value = OrderedDict(a=1)
    value._metadata = {"version": 1}

    result = read_pickle(pickle.dumps(value, 2))

    assert isinstance(result, OrderedDictValue)
    assert (dict(result), result.state) == ({"a": 1}, {"_metadata": {"version": 1}})


def test_persistent_ids_are_resolved_by_the_caller() -> None:
    seen = []

    def resolve(persistent_id: object) -> str:
        seen.append(persistent_id)
        return "resolved"

    assert read_pickle(b"(K\x01K\x02tQ.", persistent=resolve) == "resolved"
    assert read_pickle(b"Pname\n.", persistent=resolve) == "resolved"
    assert seen == [(1, 2), "name"]


@pytest.mark.parametrize("case", hostile_pickles(), ids=lambda case: case.name)
def test_a_hostile_pickle_is_one_clear_error(case: Hostile) -> None:
    with pytest.raises(RestrideError) as caught:
        read_pickle(case.content)

    assert case.says in str(caught.value)
    assert caught.value.where.startswith("byte ")
    assert len(str(caught.value)) < 400


def test_what_a_pickle_would_call_is_not_called(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    executed = set()
    for label, content in callers(f"touch {canary}").items():
        read_pickle(content)
        assert not canary.exists(), label
        # The canary sings where pickle itself reads the same bytes.
        if label in {"reduce", "stack_global", "inst", "obj", "eval", "partial", "map", "in_memo"}:
            pickle.loads(content)  # noqa: S301 - our own bytes, in a folder of our own
            executed.add(canary.exists())
            canary.unlink()

    assert executed == {True}


def test_a_name_is_recorded_even_if_importing_it_would_act() -> None:
    result = read_pickle(stream(name("antigravity.fly") + name("this.s") + b"\x86"))

    assert result == (GlobalName("antigravity", "fly"), GlobalName("this", "s"))


@pytest.mark.parametrize(
    ("content", "limits", "says"),
    [
        (stream(b"N" * 50 + b"0" * 49), Limits(work=60), "more than 60 steps"),
        (stream(b"]" * 50 + b"0" * 49), Limits(work=150), "more than 150 steps"),
        (stream(listed(*[call("a.b")] * 9)), Limits(work=60), "more than 60 steps"),
        (stream(text("abc")), Limits(string_nbytes=2), "limit of 2 bytes"),
        (stream(integer(1 << 100)), Limits(int_nbytes=8), "limit of 8 bytes"),
        (stream(b"N" * 9), Limits(stream_nbytes=10), "limit of 10 bytes"),
        (stream(listed(listed(listed()))), Limits(depth=2), "deeper than 2"),
        (stream(listed(b"N", b"N", b"N")), Limits(expanded=3), "more than 3 values"),
        (
            stream(
                listed(*[integer(i) for i in range(90)])
                + b"q\0"
                + b"0c__builtin__\nset\nh\0\x85R" * 9
            ),
            Limits(work=500),
            "more than 500 steps",
        ),
        (
            stream(text("x" * 1600) + b"q\0" + b"0c_codecs\nencode\nh\0Vlatin1\n\x86R" * 9),
            Limits(work=500),
            "more than 500 steps",
        ),
    ],
)
def test_what_a_stream_may_cost_is_bounded(content: bytes, limits: Limits, says: str) -> None:
    read_pickle(content) if limits.stream_nbytes > 10 else None
    with pytest.raises(CorruptError, match=says):
        read_pickle(content, limits=limits)


def test_keys_that_are_made_to_collide_pay_for_it() -> None:
    # hash(-1) == hash(-2), so tuples of these collide; a dict of them takes quadratic time.
    keys = [
        b"(" + b"".join(integer(-1 - (number >> bit & 1)) for bit in range(14)) + b"t"
        for number in range(1 << 14)
    ]
    content = stream(dictionary(*[(key, b"N") for key in keys]))

    with pytest.raises(CorruptError, match="more than 1000000 steps"):
        read_pickle(content, limits=Limits(work=1_000_000))


def test_a_value_may_be_as_deep_and_as_shared_as_the_limits_say() -> None:
    shared = stream(listed(listed(b"N") + b"q\0", b"h\0", b"h\0"))

    assert read_pickle(shared, limits=Limits(expanded=7, depth=2)) == [[None]] * 3
    with pytest.raises(CorruptError, match="expands into more than 6 values"):
        read_pickle(shared, limits=Limits(expanded=6))


def test_the_place_inside_the_value_is_named() -> None:
    content = stream(dictionary((text("a"), listed(b"N", b"]q\0h\0a"))))

    with pytest.raises(CorruptError, match=r"value\['a'\]\[1\] contains itself"):
        read_pickle(content)


def test_a_registered_extension_is_not_looked_up() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(RestrideError, match="extension code"):
            read_pickle(stream(b"\x82\xf0"))
    finally:
        copyreg.remove_extension("os", "system", 240)


VALID = [
    pickle.dumps(
        {"a": [1, 2.5, "text", b"bytes", (1 << 80, None, True)], "b": {3, 4}, "c": Address(1, 2)},
        protocol,
    )
    for protocol in PROTOCOLS
]


@given(st.sampled_from(VALID).flatmap(damaged))
def test_nothing_but_our_errors_comes_out_of_a_damaged_stream(content: bytes) -> None:
    try:
        read_pickle(content, limits=Limits(work=100_000, expanded=100_000))
    except RestrideError as error:
        assert error.where.startswith("byte ")  # noqa: PT017 - most damage is refused, not all


@given(st.binary(max_size=200))
def test_nothing_but_our_errors_comes_out_of_noise(content: bytes) -> None:
    try:
        read_pickle(content, limits=Limits(work=100_000, expanded=100_000))
    except RestrideError as error:
        assert str(error)  # noqa: PT017


def outcome(content: bytes, limits: Limits, *, shortcuts: bool = True) -> bytes | str:
    """What comes of a stream: the value, spelled again, or the refusal."""
    with pytest.MonkeyPatch.context() as patch:
        if not shortcuts:
            patch.setattr(pickle_vm, "run_ordinary", lambda _: None)
            patch.setattr(pickle_shape, "_VISITS_PER_VALUE", 0)
        try:
            return write_pickle(read_pickle(content, limits=limits))
        except RestrideError as error:
            return str(error)


LIMITS = st.builds(
    Limits,
    work=st.integers(0, 400) | st.just(100_000),
    depth=st.integers(0, 5) | st.just(200),
    string_nbytes=st.integers(0, 5) | st.just(1 << 20),
    expanded=st.integers(0, 30) | st.just(100_000),
)


@given(st.binary(max_size=200) | st.sampled_from(VALID).flatmap(damaged), LIMITS)
def test_the_fast_lane_does_to_damaged_streams_what_the_handlers_do(
    content: bytes, limits: Limits
) -> None:
    assert outcome(content, limits) == outcome(content, limits, shortcuts=False)


@given(PLAIN, st.sampled_from(PROTOCOLS), LIMITS)
def test_the_fast_lane_does_to_sound_streams_what_the_handlers_do(
    value: object, protocol: int, limits: Limits
) -> None:
    content = pickle.dumps([value, (value, {"a": value}), Address(1, [2])], protocol)

    assert outcome(content, limits) == outcome(content, limits, shortcuts=False)


@pytest.mark.parametrize("case", hostile_pickles(), ids=lambda case: case.name)
def test_the_fast_lane_refuses_what_the_handlers_refuse(case: Hostile) -> None:
    assert outcome(case.content, Limits()) == outcome(case.content, Limits(), shortcuts=False)


def test_a_key_that_comes_twice_late_is_told_of_by_its_name() -> None:
    batch = b"(" + text("a") + b"N" + text("b") + b"N" + text("a") + b"Nu"

    for body in (b"}" + batch, b"}(" + text("b") + b"Nu" + batch):
        with pytest.raises(CorruptError, match=r"key '[ab]' is set twice"):
            read_pickle(stream(body))


def test_nesting_without_marks_is_bounded_alike() -> None:
    for levels in range(1, 8):
        found = outcome(stream(b"N" + b"\x85" * levels), Limits(depth=3))

        assert isinstance(found, bytes) == (levels <= 3)
        assert found == outcome(stream(b"N" + b"\x85" * levels), Limits(depth=3), shortcuts=False)


BIG = [integer((1 << 61) + n) for n in range(9)]


@pytest.mark.parametrize(
    "body",
    [
        *(b"]", b"}", b")", b"N\x85", b"NN\x86"),
        listed(b"]", b"}", listed(integer(1), integer(300), text("a"))),
        dictionary((text("a"), b"]"), (text("b"), b"}"), (text("c"), tuple_of(b"N", b"N"))),
        # Keys whose hashes may be chosen cost more, some of them behind those that do not.
        dictionary(*((key, b"N") for key in BIG)),
        dictionary((text("a"), b"N"), *((key, b"N") for key in BIG)),
        dictionary((tuple_of(tuple_of(tuple_of(b"N", b"N"))), b"N")),
        dictionary((tuple_of(tuple_of(b"N"), b"N"), dictionary((text("a"), listed(b"N"))))),
        call("collections.OrderedDict") + b"(" + text("a") + listed(b"]") + b"u",
        call("a.B", b"N") + b"(" + text("a") + listed(b"]") + b"u" + b"]b",
    ],
)
def test_every_limit_is_reached_at_the_same_value_by_the_fast_lane(body: bytes) -> None:
    content = stream(body)
    cases = [Limits(work=work) for work in range(60)]
    cases += [Limits(depth=depth) for depth in range(8)]
    cases += [Limits(expanded=expanded) for expanded in range(30)]

    for limits in cases:
        assert outcome(content, limits) == outcome(content, limits, shortcuts=False), limits
