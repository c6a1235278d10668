"""Valid files that something happened to: what a reader is fuzzed with.

Blind changes of bytes mostly damage the outermost layer, so there are strategies that keep the
outer layers right and damage what is inside.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from restride.testing.hostile_safetensors import safetensors_file
from restride.testing.torch_files import torch_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hypothesis.strategies import SearchStrategy

__all__ = ["damaged", "damaged_pickles", "damaged_safetensors", "mutated"]

# Numbers at the edges of what fields can hold.
_EDGES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1)
_MOST_CHANGES: Final = 4
_KINDS: Final = ("flip", "set", "insert", "delete", "repeat", "u32", "u64", "cut")


def mutated(content: bytes, kind: str, where: float, value: int, length: int) -> bytes:
    """Change some bytes in the middle of others.

    Args:
        content: What is changed.
        kind: What happens: one of `_KINDS`.
        where: The place, from 0 to 1.
        value: The new byte or number.
        length: How many bytes.
    """
    at = int(where * len(content))
    before, after = content[:at], content[at:]
    byte = bytes([value & 0xFF])
    return {
        "flip": before + bytes(old ^ (1 << value % 8) for old in after[:1]) + after[1:],
        "set": before + byte * min(length, len(after)) + after[length:],
        "insert": before + byte * length + after,
        "delete": before + after[length:],
        "repeat": before + after[:length] + after,
        "u32": before + struct.pack("<I", value & 0xFFFFFFFF) + after[4:],
        "u64": before + struct.pack("<Q", value) + after[8:],
        "cut": before,
    }[kind]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a version of some bytes with a few changes."""
    for _ in range(draw(st.integers(1, _MOST_CHANGES))):
        content = mutated(
            content,
            draw(
                st.sampled_from(("flip", "set", "insert", "delete", "repeat", "cut", "u32", "u64"))
            ),
            draw(st.floats(0, 1)),
            draw(st.sampled_from(_EDGES) | st.integers(0, 255)),
            draw(st.integers(1, 16)),
        )
    return content


def damaged_pickles(pickle: bytes, storages: Mapping[str, bytes]) -> SearchStrategy[bytes]:
    """Draw torch files whose container is right and whose pickle is damaged."""
    return damaged(pickle).map(lambda content: torch_file(content, storages))


def damaged_safetensors(header: bytes, data: bytes) -> SearchStrategy[bytes]:
    """Draw safetensors files whose header has the right length and is damaged."""
    return damaged(header).map(lambda content: safetensors_file(content, data))
