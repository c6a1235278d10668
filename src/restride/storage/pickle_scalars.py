"""Pickle opcodes that push one scalar: integers, floats, text and bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.errors import CorruptError

if TYPE_CHECKING:
    from restride.checkpoint.values import Value
    from restride.storage.pickle_machine import Machine

__all__ = [
    "Handler",
    "constant",
    "decoded",
    "push_binary_float",
    "push_bytearray",
    "push_quoted_string",
    "push_raw_text",
    "push_text_float",
    "push_text_int",
    "push_text_long",
    "pushes_bytes",
    "pushes_int",
    "pushes_long",
    "pushes_python2_string",
    "pushes_text",
    "take_decimal",
]

Handler: TypeAlias = Callable[["Machine"], None]

_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
# What Python 2 writes into the repr of a str.
_ESCAPE: Final = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([\\'\"nrt])|(.|$))", re.DOTALL)
_ESCAPED: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def constant(value: Value) -> Handler:
    """Push always the same value."""
    return lambda machine: machine.push(value)


def pushes_int(nbytes: int, *, signed: bool = False) -> Handler:
    """An integer of so many bytes."""

    def push_int(machine: Machine) -> None:
        machine.stack.append(int.from_bytes(machine.take(nbytes), "little", signed=signed))

    def push_uint(machine: Machine) -> None:
        machine.stack.append(machine.take_uint(nbytes))

    return push_int if signed else push_uint


def pushes_long(length_nbytes: int) -> Handler:
    """An integer after its length, which takes so many bytes."""

    def push_long(machine: Machine) -> None:
        nbytes = machine.take_uint(length_nbytes)
        if nbytes > machine.limits.int_nbytes:
            raise CorruptError(
                f"an integer of {nbytes} bytes is longer than the limit of "
                f"{machine.limits.int_nbytes} bytes"
            )
        machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))

    return push_long


def take_decimal(machine: Machine, *, end: bytes = b"") -> int:
    """Read a line of digits."""
    line = machine.take_line(3 * machine.limits.int_nbytes)
    digits = line.removesuffix(end)
    if not _INTEGER.fullmatch(digits):
        raise CorruptError(f"{digits[:40]!r} is no integer")
    try:
        return int(digits)
    except ValueError:  # Python's own limit on the number of digits
        raise CorruptError(f"an integer of {len(digits)} digits is too long") from None


def push_text_int(machine: Machine) -> None:
    """A line of digits; ``00`` and ``01`` are how protocol 0 writes a bool."""
    line = machine.stream[machine.at : machine.at + 3]
    if line in {b"00\n", b"01\n"}:
        machine.at += len(line)
        machine.push(line == b"01\n")
    else:
        machine.push(take_decimal(machine))


def push_text_long(machine: Machine) -> None:
    """A line of digits that ends with an L."""
    machine.push(take_decimal(machine, end=b"L"))


def push_text_float(machine: Machine) -> None:
    """A line with a float in Python's notation."""
    line = machine.take_line()
    try:
        machine.push(float(line))
    except ValueError:
        raise CorruptError(f"{line[:40]!r} is no float") from None


def push_binary_float(machine: Machine) -> None:
    """A double, big-endian."""
    (value,) = struct.unpack(">d", machine.take(8))
    machine.push(value)


def decoded(content: bytes, encoding: str = "utf-8") -> str:
    """Decode text, or refuse it as corrupt."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise CorruptError(f"a string is no {encoding}: {error.reason}") from None


def pushes_text(length_nbytes: int) -> Handler:
    """Text in UTF-8 after its length, which takes so many bytes."""

    def push_text(machine: Machine) -> None:
        machine.push(decoded(machine.take_string(length_nbytes)))

    return push_text


def pushes_bytes(length_nbytes: int) -> Handler:
    """Bytes after their length, which takes so many bytes."""

    def push_bytes(machine: Machine) -> None:
        machine.push(machine.take_string(length_nbytes))

    return push_bytes


def push_bytearray(machine: Machine) -> None:
    """A bytearray after its length."""
    machine.push_container(bytearray(machine.take_string(8)))


def _python2_string(content: bytes) -> Value:
    """A str of Python 2, which is text or bytes; torch reads it as text."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def pushes_python2_string(length_nbytes: int) -> Handler:
    """A str of Python 2 after its length, which takes so many bytes."""

    def push_string(machine: Machine) -> None:
        machine.push(_python2_string(machine.take_string(length_nbytes)))

    return push_string


def push_quoted_string(machine: Machine) -> None:
    """A line with the repr of a str of Python 2."""
    line = machine.take_line(machine.limits.string_nbytes).strip()
    if len(line) < 2 or line[:1] not in {b"'", b'"'} or line[:1] != line[-1:]:  # noqa: PLR2004
        raise CorruptError("a string is not in quotes")
    machine.push(_python2_string(_ESCAPE.sub(_unescaped, line[1:-1])))


def _unescaped(match: re.Match[bytes]) -> bytes:
    code, char, unknown = match.groups()
    if unknown is not None:
        raise CorruptError(f"a string has the escape {match[0]!r}")
    return bytes.fromhex(code.decode()) if code else _ESCAPED.get(char, char)


def push_raw_text(machine: Machine) -> None:
    """A line of text with raw unicode escapes."""
    line = machine.take_line(machine.limits.string_nbytes)
    text = decoded(line, "raw-unicode-escape")
    decoded(text.encode("utf-8", "surrogatepass"))  # half a surrogate pair is no text
    machine.push(text)
