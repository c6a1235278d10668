"""Read a pickle without unpickling it: the stream becomes inert values, and nothing is called.

A pickle is a program. This interpreter runs it on values that cannot act: what the stream would
look up is a `GlobalName`, what it would build by calling something is a `Constructed`. Only a few
calls whose result is plain data are carried out, by code of our own: an ordered dict, a set, bytes
that an old protocol spells as text. What the stream may cost in memory, time and nesting is
bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.errors import CorruptError, RestrideError
from restride.storage.pickle_lane import run_ordinary
from restride.storage.pickle_machine import Limits, Machine, Rule, Rules
from restride.storage.pickle_ops import OPCODES, STOP
from restride.storage.pickle_shape import require_walkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from restride.checkpoint.values import Value

__all__ = ["PLAIN_RULES", "Limits", "Rule", "Rules", "read_pickle"]

_DEFAULT_LIMITS: Final = Limits()
_HANDLERS: Final = {opcode: handler for opcode, (_, handler) in OPCODES.items()}


def _no_persistent_ids(_: Value) -> Value:
    raise CorruptError("a persistent id is used outside of a file that has storages")


def read_pickle(
    stream: bytes,
    *,
    persistent: Callable[[Value], Value] = _no_persistent_ids,
    rules: Rules | None = None,
    limits: Limits = _DEFAULT_LIMITS,
) -> Value:
    r"""Interpret a pickle of any protocol from 0 to 5, calling nothing that it names.

    Args:
        stream: The pickle, all of it and nothing else.
        persistent: Resolves persistent ids; by default there are none.
        rules: What calls of known globals result in; by default `PLAIN_RULES`.
        limits: What the stream may cost.

    Returns:
        The value, with sharing kept; it does not contain itself.

    Raises:
        CorruptError: The stream is damaged, breaks a limit, or would do something no pickle of
            data does. Says at which byte.
        UnsupportedError: The stream needs something that is not in it.

    Cost:
        O(stream) in time and memory.

    Examples:
        >>> read_pickle(b"cposix\nsystem\n(Vrm -rf /\ntR.").constructor
        GlobalName(module='posix', name='system')
    """
    if len(stream) > limits.stream_nbytes:
        raise CorruptError(
            f"a pickle of {len(stream)} bytes is longer than the limit of "
            f"{limits.stream_nbytes} bytes"
        )
    machine = Machine(
        stream,
        persistent=persistent,
        rules=PLAIN_RULES if rules is None else rules,
        limits=limits,
    )
    position, nbytes = 0, len(stream)
    try:
        while True:
            run_ordinary(machine)
            position = machine.at
            if position >= nbytes:
                raise CorruptError(f"the stream ends after {nbytes} bytes without STOP")
            opcode = stream[position]
            machine.at = position + 1
            handler = _HANDLERS.get(opcode)
            if handler is None:
                if opcode == STOP:
                    break
                raise CorruptError(f"0x{opcode:02x} is no opcode")
            machine.budget -= 1
            if machine.budget < 0:
                machine.charge(0)
            handler(machine)
        return _result(machine)
    except RestrideError as error:
        raise error.located(_place(stream, position)) from None


def _result(machine: Machine) -> Value:
    if machine.marked or len(machine.stack) != 1:
        count = len(machine.stack) + sum(map(len, machine.marked))
        raise CorruptError(
            f"{count} values and {len(machine.marked)} marks are left, not one value"
        )
    if machine.at != len(machine.stream):
        raise CorruptError(f"{len(machine.stream) - machine.at} bytes follow the end of the pickle")
    # Without sharing, a value is made of no more values than the stream was charged for.
    made = machine.limits.work - machine.budget
    require_walkable(machine.stack[0], machine.limits, made=made)
    return machine.stack[0]


def _place(stream: bytes, position: int) -> str:
    if position >= len(stream):
        return f"byte {position}"
    opcode = stream[position]
    name = "STOP" if opcode == STOP else OPCODES.get(opcode, ("unknown",))[0]
    return f"byte {position} ({name})"


# Calls whose result is plain data. Each rule computes it, or returns None: the call stays a call.


def _ordered_dict(_: Machine, args: tuple[Value, ...]) -> Value:
    return None if args else OrderedDictValue()


def _encoded(machine: Machine, args: tuple[Value, ...]) -> bytes | None:
    """Protocols below 3 spell bytes as ``codecs.encode(text, "latin1")``."""
    match args:
        case (str(text), "latin1" | "latin-1"):
            machine.charge_copy(len(text))
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                raise CorruptError("bytes are spelled with a character above 255") from None
        case _:
            return None


def _bytes(_: Machine, args: tuple[Value, ...]) -> Value:
    return None if args else b""


def _bytearray(machine: Machine, args: tuple[Value, ...]) -> Value:
    match args:
        case ():
            return bytearray()
        case (bytes(content),):
            machine.charge_copy(len(content))
            return bytearray(content)
        case _:
            encoded = _encoded(machine, args)
            return None if encoded is None else bytearray(encoded)


def _complex(_: Machine, args: tuple[Value, ...]) -> Value:
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
        case _:
            return None


def _set(machine: Machine, args: tuple[Value, ...]) -> set[Value] | None:
    match args:
        case (list(values),):
            machine.charge(len(values))
            return machine.hashed(values)
        case _:
            return None


def _frozenset(machine: Machine, args: tuple[Value, ...]) -> Value:
    values = _set(machine, args)
    return None if values is None else frozenset(values)


def _reconstructed(_: Machine, args: tuple[Value, ...]) -> Value:
    """How protocols 0 and 1 spell an object of a class without a ``__reduce__``."""
    match args:
        case (GlobalName() as cls, GlobalName(_, "object"), None):
            return Constructed(cls, is_new=True)
        case _:
            return None


_BUILTINS: Final[dict[str, Rule]] = {
    "bytearray": _bytearray,
    "bytes": _bytes,
    "complex": _complex,
    "frozenset": _frozenset,
    "set": _set,
}
# Both the modules of Python 3 and, for protocols below 3, those of Python 2.
PLAIN_RULES: Final[Rules] = {
    GlobalName("collections", "OrderedDict"): _ordered_dict,
    GlobalName("_codecs", "encode"): _encoded,
    GlobalName("copyreg", "_reconstructor"): _reconstructed,
    GlobalName("copy_reg", "_reconstructor"): _reconstructed,
    **{GlobalName("builtins", name): rule for name, rule in _BUILTINS.items()},
    **{GlobalName("__builtin__", name): rule for name, rule in _BUILTINS.items()},
}
