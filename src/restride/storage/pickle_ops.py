"""What each pickle opcode does to the inert interpreter: protocols 0 to 5.

The meaning of the opcodes is that of Python's ``pickletools``, which documents them one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.errors import CorruptError, UnsupportedError
from restride.storage.pickle_machine import shown
from restride.storage.pickle_scalars import (
    Handler,
    constant,
    decoded,
    push_binary_float,
    push_bytearray,
    push_quoted_string,
    push_raw_text,
    push_text_float,
    push_text_int,
    push_text_long,
    pushes_bytes,
    pushes_int,
    pushes_long,
    pushes_python2_string,
    pushes_text,
    take_decimal,
)

if TYPE_CHECKING:
    from restride.checkpoint.values import Value
    from restride.storage.pickle_machine import Machine

__all__ = ["OPCODES", "STOP", "Handler"]

STOP: Final = ord(".")
_HIGHEST_PROTOCOL: Final = 5
_NAME_NBYTES: Final = 1024


# Containers.


def _tuple_of(count: int) -> Handler:
    def push_tuple(machine: Machine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(values)))

    return push_tuple


def _marked_tuple(machine: Machine) -> None:
    machine.push(tuple(machine.pop_mark()))


def _marked_list(machine: Machine) -> None:
    machine.push_container(machine.pop_mark())


def _marked_dict(machine: Machine) -> None:
    values = machine.pop_mark()
    target: dict[Value, Value] = {}
    _set_items(machine, target, values)
    machine.push_container(target)


def _marked_frozenset(machine: Machine) -> None:
    machine.push_container(frozenset(machine.hashed(machine.pop_mark())))


def _empty_list(machine: Machine) -> None:
    machine.push_container([])


def _empty_dict(machine: Machine) -> None:
    machine.push_container({})


def _empty_set(machine: Machine) -> None:
    machine.push_container(set())


def _append(machine: Machine) -> None:
    value = machine.pop()
    _extend(machine.top(), [value])


def _appends(machine: Machine) -> None:
    values = machine.pop_mark()
    _extend(machine.top(), values)


def _extend(target: Value, values: list[Value]) -> None:
    match target:
        case list():
            target.extend(values)
        case Constructed():
            target.items.extend(values)
        case _:
            raise CorruptError(f"a value of type {type(target).__name__} cannot be appended to")


def _set_item(machine: Machine) -> None:
    value = machine.pop()
    key = machine.pop()
    _set_items(machine, machine.top(), [key, value])


def _set_marked_items(machine: Machine) -> None:
    values = machine.pop_mark()
    _set_items(machine, machine.top(), values)


def _set_items(machine: Machine, target: Value, values: list[Value]) -> None:
    if len(values) % 2:
        raise CorruptError("the last key has no value")
    pairs = zip(values[::2], values[1::2], strict=True)
    match target:
        case dict():
            for key, value in pairs:
                machine.require_key(key, len(target))
                # No pickle of a dict says a key twice; what does means to be read in two ways.
                if key in target:
                    raise CorruptError(f"key {shown(key)} is set twice")
                target[key] = value
        case Constructed():
            target.pairs.extend(pairs)
        case _:
            raise CorruptError(f"a value of type {type(target).__name__} has no items to set")


def _add_items(machine: Machine) -> None:
    values = machine.pop_mark()
    target = machine.top()
    if not isinstance(target, set):
        raise CorruptError(f"a value of type {type(target).__name__} cannot be added to")
    for value in values:
        machine.require_key(value, len(target))
        target.add(value)


# Stack and memo.


def _mark(machine: Machine) -> None:
    machine.mark()


def _pop(machine: Machine) -> None:
    # pickle's own writer undoes a mark this way.
    if not machine.stack and machine.marked:
        machine.pop_mark()
    else:
        machine.pop()


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


def _dup(machine: Machine) -> None:
    machine.push(machine.top())


def _text_put(machine: Machine) -> None:
    index = take_decimal(machine)
    if index < 0:
        raise CorruptError(f"memo entry {index} is negative")
    machine.remember(index)


def _put(nbytes: int) -> Handler:
    return lambda machine: machine.remember(machine.take_uint(nbytes))


def _memoize(machine: Machine) -> None:
    machine.remember(len(machine.memo))


def _text_get(machine: Machine) -> None:
    machine.recall(take_decimal(machine))


def _get(nbytes: int) -> Handler:
    return lambda machine: machine.recall(machine.take_uint(nbytes))


# Names and what would have been called.


def _global_name(module: str, name: str) -> GlobalName:
    if not module or not name or len(module) + len(name) > _NAME_NBYTES:
        raise CorruptError(f"{f'{module}.{name}'[:80]!r} cannot name a class or function")
    return GlobalName(module, name)


def _take_global(machine: Machine) -> GlobalName:
    module = decoded(machine.take_line())
    return _global_name(module, decoded(machine.take_line()))


def _push_global(machine: Machine) -> None:
    machine.push(_take_global(machine))


def _stack_global(machine: Machine) -> None:
    name = machine.pop()
    module = machine.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise CorruptError("a name is not made of two strings")
    machine.push(_global_name(module, name))


def _reduce(machine: Machine) -> None:
    args = machine.pop()
    machine.push(machine.construct(machine.pop(), args))


def _new(machine: Machine) -> None:
    args = machine.pop()
    machine.push(machine.construct(machine.pop(), args, is_new=True))


def _new_with_keywords(machine: Machine) -> None:
    kwargs = machine.pop()
    args = machine.pop()
    value = machine.construct(machine.pop(), args, is_new=True)
    if not isinstance(kwargs, dict):
        raise CorruptError(f"keyword arguments come as {type(kwargs).__name__}, not as dict")
    if kwargs and not isinstance(value, Constructed):
        raise CorruptError("a value of a known type would be made with keyword arguments")
    if isinstance(value, Constructed):
        value.kwargs = kwargs
    machine.push(value)


def _inst(machine: Machine) -> None:
    name = _take_global(machine)
    machine.push(machine.construct(name, tuple(machine.pop_mark())))


def _obj(machine: Machine) -> None:
    values = machine.pop_mark()
    if not values:
        raise CorruptError("nothing is named that would be called")
    machine.push(machine.construct(values[0], tuple(values[1:])))


def _build(machine: Machine) -> None:
    state = machine.pop()
    target = machine.top()
    if not isinstance(target, Constructed | OrderedDictValue):
        raise CorruptError(f"a value of type {type(target).__name__} would be given a state")
    if target.state is not None:
        raise CorruptError("an object would be given its state twice")
    target.state = state


def _text_persistent(machine: Machine) -> None:
    machine.push(machine.persistent(decoded(machine.take_line())))


def _persistent(machine: Machine) -> None:
    machine.push(machine.persistent(machine.pop()))


# The stream itself.


def _protocol(machine: Machine) -> None:
    protocol = machine.take_uint(1)
    if protocol > _HIGHEST_PROTOCOL:
        raise UnsupportedError(
            f"pickle protocol {protocol} is newer than {_HIGHEST_PROTOCOL}",
            remedy="save the file again with pickle_protocol=2",
        )


def _frame(machine: Machine) -> None:
    nbytes = machine.take_uint(8)
    left = len(machine.stream) - machine.at
    if nbytes > left:
        raise CorruptError(f"a frame of {nbytes} bytes is announced, the stream has {left} left")


def _refuses(problem: str, remedy: str) -> Handler:
    def refuse(_: Machine) -> None:
        raise UnsupportedError(problem, remedy=remedy)

    return refuse


_extension = _refuses(
    "an extension code can only be named by the process that registered it",
    "save the file again without copyreg.add_extension",
)
_out_of_band = _refuses(
    "a buffer outside the stream is referred to, and there is none",
    "save the file again without a buffer_callback",
)

# The opcode STOP is not here: the loop ends before it.
OPCODES: Final[dict[int, tuple[str, Handler]]] = {
    0x28: ("MARK", _mark),
    0x29: ("EMPTY_TUPLE", constant(())),
    0x30: ("POP", _pop),
    0x31: ("POP_MARK", _pop_mark),
    0x32: ("DUP", _dup),
    0x42: ("BINBYTES", pushes_bytes(4)),
    0x43: ("SHORT_BINBYTES", pushes_bytes(1)),
    0x46: ("FLOAT", push_text_float),
    0x47: ("BINFLOAT", push_binary_float),
    0x49: ("INT", push_text_int),
    0x4A: ("BININT", pushes_int(4, signed=True)),
    0x4B: ("BININT1", pushes_int(1)),
    0x4C: ("LONG", push_text_long),
    0x4D: ("BININT2", pushes_int(2)),
    0x4E: ("NONE", constant(None)),
    0x50: ("PERSID", _text_persistent),
    0x51: ("BINPERSID", _persistent),
    0x52: ("REDUCE", _reduce),
    0x53: ("STRING", push_quoted_string),
    0x54: ("BINSTRING", pushes_python2_string(4)),
    0x55: ("SHORT_BINSTRING", pushes_python2_string(1)),
    0x56: ("UNICODE", push_raw_text),
    0x58: ("BINUNICODE", pushes_text(4)),
    0x5D: ("EMPTY_LIST", _empty_list),
    0x61: ("APPEND", _append),
    0x62: ("BUILD", _build),
    0x63: ("GLOBAL", _push_global),
    0x64: ("DICT", _marked_dict),
    0x65: ("APPENDS", _appends),
    0x67: ("GET", _text_get),
    0x68: ("BINGET", _get(1)),
    0x69: ("INST", _inst),
    0x6A: ("LONG_BINGET", _get(4)),
    0x6C: ("LIST", _marked_list),
    0x6F: ("OBJ", _obj),
    0x70: ("PUT", _text_put),
    0x71: ("BINPUT", _put(1)),
    0x72: ("LONG_BINPUT", _put(4)),
    0x73: ("SETITEM", _set_item),
    0x74: ("TUPLE", _marked_tuple),
    0x75: ("SETITEMS", _set_marked_items),
    0x7D: ("EMPTY_DICT", _empty_dict),
    0x80: ("PROTO", _protocol),
    0x81: ("NEWOBJ", _new),
    0x82: ("EXT1", _extension),
    0x83: ("EXT2", _extension),
    0x84: ("EXT4", _extension),
    0x85: ("TUPLE1", _tuple_of(1)),
    0x86: ("TUPLE2", _tuple_of(2)),
    0x87: ("TUPLE3", _tuple_of(3)),
    0x88: ("NEWTRUE", constant(True)),  # noqa: FBT003 - a value of the stream, not a switch
    0x89: ("NEWFALSE", constant(False)),  # noqa: FBT003
    0x8A: ("LONG1", pushes_long(1)),
    0x8B: ("LONG4", pushes_long(4)),
    0x8C: ("SHORT_BINUNICODE", pushes_text(1)),
    0x8D: ("BINUNICODE8", pushes_text(8)),
    0x8E: ("BINBYTES8", pushes_bytes(8)),
    0x8F: ("EMPTY_SET", _empty_set),
    0x90: ("ADDITEMS", _add_items),
    0x91: ("FROZENSET", _marked_frozenset),
    0x92: ("NEWOBJ_EX", _new_with_keywords),
    0x93: ("STACK_GLOBAL", _stack_global),
    0x94: ("MEMOIZE", _memoize),
    0x95: ("FRAME", _frame),
    0x96: ("BYTEARRAY8", push_bytearray),
    0x97: ("NEXT_BUFFER", _out_of_band),
    0x98: ("READONLY_BUFFER", _out_of_band),
}
