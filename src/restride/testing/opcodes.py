"""Pickle streams spelled by hand, one opcode after the other.

Enough to say anything, including what no pickler would. Nothing here imports pickle.
"""

from __future__ import annotations

import struct

__all__ = [
    "call",
    "dictionary",
    "integer",
    "listed",
    "name",
    "storage",
    "stream",
    "tensor",
    "text",
    "tuple_of",
]


def stream(body: bytes, *, protocol: int = 2) -> bytes:
    """A whole pickle around the opcodes of one value."""
    return b"\x80" + bytes([protocol]) + body + b"."


def text(value: str) -> bytes:
    """A str."""
    content = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def integer(value: int) -> bytes:
    """An int of at most 255 bytes."""
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def tuple_of(*values: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(values) + b"t"


def listed(*values: bytes) -> bytes:
    """A list."""
    return b"](" + b"".join(values) + b"e"


def dictionary(*pairs: tuple[bytes, bytes]) -> bytes:
    """A dict."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def name(path: str) -> bytes:
    """A class or function by its full name."""
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def call(function: str, *args: bytes) -> bytes:
    """What a call of a function by its full name returns."""
    return name(function) + tuple_of(*args) + b"R"


def storage(key: str, numel: int, kind: str = "torch.FloatStorage") -> bytes:
    """A storage of a torch file, by its persistent id."""
    parts = (text("storage"), name(kind), text(key), text("cpu"), integer(numel))
    return tuple_of(*parts) + b"Q"


def tensor(
    place: bytes, shape: tuple[int, ...], strides: tuple[int, ...], *, base: int = 0
) -> bytes:
    """A tensor that is a view of a storage."""
    return call(
        "torch._utils._rebuild_tensor_v2",
        place,
        integer(base),
        tuple_of(*map(integer, shape)),
        tuple_of(*map(integer, strides)),
        b"\x89",
        call("collections.OrderedDict"),
    )
