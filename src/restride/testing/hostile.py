"""Files that were built to mislead, to crash, or to run something.

Each of them must be refused with one clear error, and none of them may run anything, allocate what
it announces, or leave anything behind. `callers` are the exception: they are harmless as long as
nobody calls what they name, so a reader may as well return them as inert values.
"""

from __future__ import annotations

import struct
from typing import Final

from restride.frozen import Frozen
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

__all__ = ["Hostile", "callers", "hostile_pickles"]

_LONG: Final = 100_000


class Hostile(Frozen):
    """A file that must be refused.

    Attributes:
        name: What is wrong with it.
        content: Its bytes.
        says: Words that the error must contain.
    """

    name: str
    content: bytes
    says: str


def callers(command: str) -> dict[str, bytes]:
    """Pickles that run a shell command in whoever unpickles them."""
    system, argument = name("os.system"), text(command)
    lambda_text = text(f"__import__('os').system({command!r})")
    return {
        "reduce": stream(call("os.system", argument)),
        "stack_global": stream(text("os") + text("system") + b"\x93" + argument + b"\x85R"),
        "inst": b"(V" + command.encode() + b"\nios\nsystem\n.",
        "obj": stream(b"(" + system + argument + b"o"),
        "eval": stream(call("builtins.eval", lambda_text)),
        "partial": stream(call("functools.partial", system, argument) + b")R"),
        "map": stream(call("builtins.list", call("builtins.map", system, listed(argument)))),
        "as_key": stream(dictionary((call("os.system", argument), integer(1)))),
        "in_memo": stream(call("os.system", argument) + b"q\x000N"),
        "as_state": stream(call("fractions.Fraction") + call("os.system", argument) + b"0"),
        "as_persistent_id": stream(
            tuple_of(text("x"), call("os.system", argument)) + b"0" + integer(1)
        ),
        "tensor_of_a_type": stream(
            call(
                "torch._tensor._rebuild_from_type_v2",
                *(system, name("torch.Tensor"), tuple_of(argument), b"N"),
            )
        ),
        "keyword_arguments": stream(
            name("subprocess.Popen") + b")" + dictionary((text("args"), argument)) + b"\x92",
            protocol=4,
        ),
        "nested_pickle": stream(
            call("torch.storage._load_from_bytes", text(f"cos\nsystem\n(V{command}\ntR."))
        ),
    }


def hostile_pickles() -> tuple[Hostile, ...]:
    """Pickles that must be refused whatever file they are in."""
    return tuple(
        Hostile(*row) for row in (*_loops(), *_bombs(), *_keys(), *_nonsense(), *_damaged())
    )


_Rows = tuple[tuple[str, bytes, str], ...]


def _loops() -> _Rows:
    """Values without end."""
    return (
        ("list_in_itself", stream(b"]q\0h\0a"), "contains itself"),
        ("dict_in_itself", stream(b"}q\0" + integer(1) + b"h\0s"), "contains itself"),
        ("object_in_itself", stream(call("a.b") + b"q\0h\0b"), "contains itself"),
        ("tuple_in_itself", stream(b"]q\0h\0\x85a"), "contains itself"),
        ("items_in_itself", stream(call("a.b") + b"q\0h\0a"), "contains itself"),
        ("pairs_in_itself", stream(call("a.b") + b"q\0h\0" + integer(1) + b"s"), "contains itself"),
        ("deep_lists", stream(b"]" * _LONG + b"a" * (_LONG - 1)), "nested deeper than 200"),
        ("deep_tuples", stream(b")" + b"\x85" * _LONG), "nested deeper than 200"),
        ("deep_marks", stream(b"(" * _LONG), "nested deeper than 200"),
        ("deep_objects", stream(name("a.b") + b")R" * 9000), "nested deeper than 200"),
        ("deep_through_memo", stream(_doubled(b"h", 250, 1)), "nested deeper than 200"),
    )


def _bombs() -> _Rows:
    """Small streams for large values."""
    huge = struct.pack("<Q", 1 << 62)
    return (
        ("billion_laughs", stream(_doubled(b"h", 12, 10)), "expands into more than"),
        ("laughs_as_key", stream(b"}" + _doubled_tuples(60) + integer(1) + b"s"), "more than 1024"),
        ("text_of_4_exabytes", stream(b"\x8d" + huge, protocol=4), "4611686018427387904 bytes"),
        ("bytes_of_4_exabytes", stream(b"\x8e" + huge, protocol=4), "4611686018427387904 bytes"),
        ("array_of_4_exabytes", stream(b"\x96" + huge, protocol=5), "4611686018427387904 bytes"),
        ("frame_of_4_exabytes", stream(b"\x95" + huge, protocol=4), "4611686018427387904 bytes"),
        ("text_of_4_gigabytes", stream(b"X\xff\xff\xff\xff"), "4294967295 bytes"),
        ("int_of_2_gigabytes", stream(b"\x8b\xff\xff\xff\x7f"), "2147483647 bytes"),
        ("int_of_many_digits", stream(b"I" + b"9" * _LONG + b"\n"), "a line does not end"),
        ("memo_of_many_digits", stream(b"Np" + b"9" * 30 + b"\n"), "is beyond"),
        (
            "copies_of_a_long_text",
            stream(
                text("x" * 1_000_000)
                + b"q\0"
                + b"".join(b"0c_codecs\nencode\nh\0Vlatin1\n\x86R" for _ in range(300))
            ),
            "needs more than",
        ),
    )


def _keys() -> _Rows:
    """Keys that cannot be hashed, or not cheaply."""
    return (
        ("list_as_key", stream(b"}]" + integer(1) + b"s"), "list cannot be a key"),
        ("dict_as_key", stream(b"}}" + integer(1) + b"s"), "dict cannot be a key"),
        ("list_in_a_key", stream(b"}]\x85" + integer(1) + b"s"), "list cannot be a key"),
        ("array_as_key", stream(b"}\x96" + bytes(8) + b"Ns", protocol=5), "cannot be a key"),
        ("list_in_a_set", stream(b"\x8f(]\x90", protocol=4), "list cannot be a key"),
        ("list_in_a_frozenset", stream(b"(]\x91", protocol=4), "list cannot be a key"),
        ("list_in_an_old_set", stream(call("__builtin__.set", listed(b"]"))), "cannot be a key"),
        ("deep_key", stream(b"})" + b"\x85" * _LONG + b"Ns"), "more than 1024 values"),
        ("wide_key", stream(b"}(" + b"N" * 5000 + b"tNs"), "more than 1024 values"),
        ("key_twice", stream(dictionary((text("a"), b"N"), (text("a"), b"N"))), "'a' is set twice"),
        ("key_without_value", stream(b"}(" + text("a") + b"u"), "last key has no value"),
        ("old_key_without_value", stream(b"(" + text("a") + b"d"), "last key has no value"),
    )


def _nonsense() -> _Rows:
    """What no pickler writes, since no unpickler could do it."""
    return (
        ("extension_1", stream(b"\x82\x01"), "extension code"),
        ("extension_2", stream(b"\x83\x01\x01"), "extension code"),
        ("extension_4", stream(b"\x84\x01\x01\x01\x01"), "extension code"),
        ("next_buffer", stream(b"\x97", protocol=5), "outside the stream"),
        ("readonly_buffer", stream(b"\x97\x98", protocol=5), "outside the stream"),
        ("newer_protocol", stream(b"N", protocol=6), "protocol 6"),
        ("text_persistent_id", b"Pabc\n.", "persistent id"),
        ("persistent_id_of_nothing", stream(b"NQ"), "persistent id"),
        ("call_of_an_int", stream(integer(1) + b")R"), "of type int would be called"),
        ("call_of_a_text", stream(text("os.system") + b")R"), "of type str would be called"),
        ("call_without_tuple", stream(name("a.b") + b"]R"), "as list, not as tuple"),
        ("obj_of_nothing", stream(b"(o"), "nothing is named"),
        ("obj_of_a_dict", stream(b"(}o"), "of type dict would be called"),
        ("new_of_a_list", stream(b"])\x81"), "of type list would be called"),
        ("keywords_in_a_list", stream(name("a.b") + b")]\x92", protocol=4), "come as list"),
        ("keywords_for_a_dict", stream(_ordered_with_keywords(), protocol=4), "known type"),
        ("state_of_a_name", stream(name("a.b") + b"}b"), "GlobalName would be given a state"),
        ("state_of_a_dict", stream(b"}}b"), "dict would be given a state"),
        ("state_twice", stream(call("a.b") + integer(1) + b"b" + integer(1) + b"b"), "twice"),
        ("append_to_an_int", stream(integer(1) + b"Na"), "int cannot be appended to"),
        ("append_to_a_name", stream(name("a.b") + b"(NNe"), "GlobalName cannot be appended to"),
        ("item_of_a_list", stream(b"]NNs"), "list has no items"),
        ("add_to_a_list", stream(b"](N\x90", protocol=4), "list cannot be added to"),
        ("name_of_ints", stream(integer(1) + integer(1) + b"\x93", protocol=4), "two strings"),
        ("name_without_end", stream(b"cos"), "a line does not end"),
        ("empty_name", stream(b"c\n\n"), "cannot name"),
        ("endless_name", stream(b"c" + b"a" * 3000 + b"\nb\n"), "cannot name"),
        ("negative_memo", b"Np-1\n.", "is negative"),
        ("bytes_that_are_none", stream(call("_codecs.encode", text("€"), text("latin1"))), "255"),
    )


def _damaged() -> _Rows:
    """Streams that something happened to."""
    return (
        ("nothing", b"", "ends after 0 bytes"),
        ("no_stop", b"\x80\x02N", "without STOP"),
        ("stop_only", b".", "0 values"),
        ("two_values", stream(b"NN"), "2 values"),
        ("mark_left", stream(b"N(N"), "1 marks"),
        ("bytes_after_stop", stream(b"N") + b"N", "1 bytes follow"),
        ("unknown_opcode", stream(b"\xff"), "0xff is no opcode"),
        ("cut_in_an_int", b"J\0", "4 bytes are announced"),
        ("cut_in_a_text", b"X\x05\0\0\0abc", "5 bytes are announced"),
        ("pop_of_nothing", stream(b"0"), "stack is empty"),
        ("call_of_nothing", stream(b"R"), "stack is empty"),
        ("tuple_of_nothing", stream(b"\x87"), "stack is empty"),
        ("dup_of_nothing", stream(b"2"), "stack is empty"),
        ("below_a_mark", stream(b"N(\x85"), "stack is empty"),
        ("list_without_mark", stream(b"l"), "no mark"),
        ("items_without_mark", stream(b"}u"), "no mark"),
        ("unset_memo", stream(b"h\x05"), "memo entry 5"),
        ("unset_text_memo", b"g5\n.", "memo entry 5"),
        ("memo_of_nothing", stream(b"q\0"), "stack is empty"),
        ("text_of_no_utf8", stream(b"X\x01\0\0\0\xff"), "is no utf-8"),
        ("half_a_surrogate", stream(text("\ud800")), "is no utf-8"),
        ("half_an_escaped_surrogate", b"V\\ud800\n.", "is no utf-8"),
        ("raw_text_of_bad_escapes", b"V\\u12\n.", "is no raw-unicode-escape"),
        ("string_without_quotes", b"Sabc\n.", "not in quotes"),
        ("string_of_bad_escapes", b"S'\\q'\n.", "escape"),
        ("int_of_letters", b"Iabc\n.", "is no integer"),
        ("long_of_letters", b"LabcL\n.", "is no integer"),
        ("float_of_letters", b"Fabc\n.", "is no float"),
        ("memo_of_letters", b"Npabc\n.", "is no integer"),
    )


def _doubled(get: bytes, levels: int, references: int) -> bytes:
    """Lists of so many references each to the next one, on so many levels."""
    body = b"]q\0"
    for level in range(1, levels):
        body += b"](" + (get + bytes([level - 1])) * references + b"eq" + bytes([level])
    return _only_last(body, levels - 1)


def _only_last(body: bytes, count: int) -> bytes:
    """Drop all but the last of `count` + 1 values that the stack holds."""
    return b"(" + body + b"r\xff\xff\0\0" + b"1" + b"j\xff\xff\0\0" if count else body


def _doubled_tuples(levels: int) -> bytes:
    return b")" + b"2\x86" * levels


def _ordered_with_keywords() -> bytes:
    return name("collections.OrderedDict") + b")" + dictionary((text("a"), b"N")) + b"\x92"
