"""Safetensors files that lie about themselves; see `restride.testing.hostile`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from restride.testing.hostile import Hostile

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hostile_safetensors", "safetensors_file", "valid_safetensors"]


def safetensors_file(header: object, data: bytes, *, length: int | None = None) -> bytes:
    """A safetensors file around a header, which may be bytes or what JSON can say."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(text) if length is None else length
    return stated.to_bytes(8, "little") + text + data


def valid_safetensors() -> bytes:
    """A small safetensors file with two tensors and metadata."""
    header = {"__metadata__": {"format": "pt"}, "a": _entry(0, 8), "b": _entry(8, 16)}
    return safetensors_file(header, bytes(range(16)))


def _entry(start: object, stop: object, **other: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [start, stop], **other}


def hostile_safetensors() -> tuple[Hostile, ...]:
    """Safetensors files that must be refused."""
    return (*_lengths(), *_json(), *_entries(), *_places())


def _lengths() -> Iterator[Hostile]:
    """Headers and files of the wrong length."""
    content = valid_safetensors()
    yield Hostile("empty_file", b"", "a file of 0 bytes")
    yield Hostile("seven_bytes", bytes(7), "a file of 7 bytes")
    yield Hostile("empty_header", bytes(8), "the header starts with b''")
    yield Hostile(
        "header_longer_than_the_file",
        safetensors_file({}, b"", length=(1 << 63) - 1),
        "header length 9223372036854775807 is larger than the file",
    )
    yield Hostile("header_one_byte_longer", safetensors_file({}, b"", length=3), "is larger")
    yield Hostile("header_of_all_ones", b"\xff" * 8 + content[8:], "is larger than the file")
    yield Hostile("cut_header", content[:40], "is larger than the file")
    yield Hostile("shorter_header", content[:1].replace(content[:1], b"\x20") + content[1:], "JSON")
    yield Hostile("cut_tensor", content[:-1], "was cut off")
    yield Hostile("cut_tensors", content[:-16], "was cut off")
    yield Hostile("bytes_after", content + b"\0", "belong to no tensor")


def _json() -> Iterator[Hostile]:
    """Headers that are no JSON, or none that everybody reads the same."""
    entry = json.dumps(_entry(0, 8)).encode()
    for label, header, says in (
        ("no_json", b"{hello}", "it is no JSON"),
        ("a_pickle", b"\x80\x02N.", "the header starts with"),
        ("an_array", b"[]", "the header starts with"),
        ("spaces_first", b' {"a": ' + entry + b"}", "the header starts with"),
        ("two_objects", b"{}{}", "it is no JSON"),
        ("zeros_after", b"{}\0\0", "it is no JSON"),
        ("no_utf8", b'{"\xff": 1}', "no UTF-8"),
        ("half_a_surrogate", b'{"\\ud800": ' + entry + b"}", "no UTF-8"),
        ("not_a_number", b'{"a": NaN}', "NaN"),
        ("infinity", b'{"a": -Infinity}', "-Infinity"),
        ("many_digits", b'{"a": ' + b"1" * 5000 + b"}", "it is no JSON"),
        ("deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
        ("deep_array", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        ("tensor_twice", b'{"a": ' + entry + b', "a": ' + entry + b"}", "key 'a' comes twice"),
        (
            "tensor_twice_by_escape",
            b'{"a": ' + entry + b', "\\u0061": ' + entry + b"}",
            "key 'a' comes twice",
        ),
        (
            "field_twice",
            b'{"a": {"dtype": "F16", ' + entry[1:] + b"}",
            "$.a: the key 'dtype' comes twice",
        ),
        (
            "metadata_twice",
            b'{"__metadata__": {}, "__metadata__": {}}',
            "key '__metadata__' comes twice",
        ),
    ):
        yield Hostile(label, safetensors_file(header, bytes(8)), says)


def _entries() -> Iterator[Hostile]:
    """Tensors that are described by something else than a dtype, a shape and a place."""
    right = _entry(0, 8)
    for label, entry, says in (
        ("no_entry", None, "Expected `object`"),
        ("entry_of_a_text", "F32", "Expected `object`"),
        ("no_dtype", {k: v for k, v in right.items() if k != "dtype"}, "`dtype`"),
        ("no_shape", {k: v for k, v in right.items() if k != "shape"}, "`shape`"),
        ("no_place", {k: v for k, v in right.items() if k != "data_offsets"}, "`data_offsets`"),
        ("another_field", {**right, "strides": [1]}, "`strides`"),
        ("unknown_dtype", {**right, "dtype": "F99"}, "dtype 'F99' is not known"),
        ("half_bytes", {**right, "dtype": "F4", "shape": [16]}, "dtype 'F4' is not known"),
        ("dtype_of_a_number", {**right, "dtype": 32}, "Expected `str`"),
        ("shape_of_a_number", {**right, "shape": 2}, "Expected `array`"),
        ("shape_of_fractions", {**right, "shape": [2.0]}, "Expected `int`"),
        ("shape_of_a_bool", {**right, "shape": [True, 2]}, "Expected `int`"),
        ("shape_of_texts", {**right, "shape": ["2"]}, "Expected `int`"),
        ("negative_shape", {**right, "shape": [-1, -2]}, ">= 0"),
        ("huge_shape", {**right, "shape": [1 << 63]}, "<= 9223372036854775807"),
        ("shape_that_overflows", {**right, "shape": [1 << 62, 4]}, "are not the"),
        ("many_dimensions", {**right, "shape": [2] + [1] * 64}, "length <= 64"),
        ("three_places", {**right, "data_offsets": [0, 4, 8]}, "length 2"),
        ("fraction_as_place", _entry(0, 8.0), "Expected `int`"),
        ("negative_place", _entry(-8, 0), ">= 0"),
        ("huge_place", _entry(0, 1 << 64), "9223372036854775807"),
        ("backwards", _entry(8, 0), "are not the 8 bytes"),
        ("one_byte_less", _entry(0, 7), "are not the 8 bytes"),
        ("one_byte_more", _entry(0, 9), "are not the 8 bytes"),
    ):
        yield Hostile(f"tensor_{label}", safetensors_file({"a": entry}, bytes(8)), says)
    for label, metadata in (("a_text", "x"), ("a_number", {"a": 1}), ("depth", {"a": {"b": "c"}})):
        header = {"__metadata__": metadata, "a": right}
        yield Hostile(f"metadata_of_{label}", safetensors_file(header, bytes(8)), "Expected")


def _places() -> Iterator[Hostile]:
    """Tensors that overlap, or leave something between them."""
    for label, places, says in (
        ("same_place", ((0, 8), (0, 8)), "overlaps tensor 'a'"),
        ("overlap", ((0, 8), (4, 12)), "overlaps tensor 'a'"),
        ("hole_at_the_start", ((4, 12), (12, 20)), "leaves a hole after the header"),
        ("hole_between", ((0, 8), (12, 20)), "leaves a hole after tensor 'a'"),
        ("hole_at_the_end", ((0, 8),), "belong to no tensor"),
        ("beyond_the_end", ((0, 8), (8, 16), (16, 24)), "was cut off"),
    ):
        header = {chr(ord("a") + i): _entry(*place) for i, place in enumerate(places)}
        yield Hostile(label, safetensors_file(header, bytes(20)), says)
