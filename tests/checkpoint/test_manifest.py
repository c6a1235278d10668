"""A manifest comes back as it was written, or is refused."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from restride.checkpoint.manifest import (
    Manifest,
    ManifestFile,
    ManifestPart,
    manifest_from_json,
    manifest_to_json,
    written_nbytes_from_json,
)
from restride.errors import CorruptError, FormatError, UnsupportedError

DIGEST = (1 << 127) - 2
MANIFEST = Manifest(
    version="1.2.3",
    job="0" * 32,
    block_nbytes=4,
    files={
        "model.safetensors": ManifestFile(
            13,
            (
                ManifestPart(0, 3, (0,)),
                ManifestPart(3, 10, (1, DIGEST, 3), "wte", "weight"),
            ),
        ),
        "a/empty": ManifestFile(0, ()),
    },
    tensors={"wte": {"weight": "0" * 32}},
)


def test_a_manifest_is_read_as_it_was_written():
    content = bytes(manifest_to_json(MANIFEST))

    assert manifest_from_json(content, where="m") == MANIFEST
    assert manifest_to_json(manifest_from_json(content, where="m")) == content
    assert f'"{DIGEST:032x}"'.encode() in content


def test_that_of_many_ranks_is_read_as_well():
    """723 parameters with three states on 128 ranks are four times as many."""
    name = "model.layers.40.mlp.down_proj.weight"
    parts = tuple(ManifestPart(4 * n, 4, (n,), name, "exp_avg") for n in range(90_000))
    manifest = replace(MANIFEST, files={"a": ManifestFile(4 * len(parts), parts)})

    content = bytes(manifest_to_json(manifest))

    assert len(content) > 16 << 20
    assert manifest_from_json(content, where="m") == manifest


def test_it_is_json_with_one_member_a_line():
    content = bytes(manifest_to_json(MANIFEST))

    assert content == json.dumps(json.loads(content), indent=1).encode() + b"\n"


def test_files_that_differ_in_a_block_have_different_digests():
    file = MANIFEST.files["model.safetensors"]
    other = ManifestFile(13, (file.parts[0], ManifestPart(3, 10, (1, 2, 3), "wte", "weight")))

    assert file.digest != other.digest
    assert len(file.digest) == 32


def signed(change):
    """The content with a change that its digest knows of."""
    value = json.loads(manifest_to_json(MANIFEST))
    del value["digest"]
    change(value)
    from restride.checkpoint.manifest import _digest

    return json.dumps({**value, "digest": _digest(value)}).encode()


def at(*path, to):
    def change(value):
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


FILE = ("files", "model.safetensors")
REFUSED = [
    (at("format", to="restride-manifest/1"), UnsupportedError, "restride-manifest/1"),
    (at("format", to="other"), FormatError, r"m: \$.format: it is no manifest"),
    (at("format", to=None), FormatError, "it is no manifest"),
    (at("version", to=1), CorruptError, r"\$.version: .* a text"),
    (at("job", to=None), CorruptError, r"\$.job"),
    (at("block_nbytes", to=0), CorruptError, "blocks of 0 bytes"),
    (at("block_nbytes", to=-4), CorruptError, "number of bytes"),
    (at("block_nbytes", to=True), CorruptError, "number of bytes"),
    (at("files", to=[]), CorruptError, r"\$.files: .* an object"),
    (at("files", "../x", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at("files", "/etc/passwd", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at("files", "a\0b", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at(*FILE, to=3), CorruptError, "an object"),
    (at(*FILE, "nbytes", to=14), CorruptError, "parts end at byte 13 of 14"),
    (at(*FILE, "parts", to={}), CorruptError, "a list"),
    (at(*FILE, "parts", 1, "start_nbytes", to=4), CorruptError, "starts at byte 4, not 3"),
    (at(*FILE, "parts", 1, "nbytes", to=100), CorruptError, "3 blocks are given for 100 bytes"),
    (at(*FILE, "parts", 1, "blocks", 0, to="1"), CorruptError, "32 hexadecimal digits"),
    (at(*FILE, "parts", 1, "blocks", 0, to="G" * 32), CorruptError, "32 hexadecimal digits"),
    (at(*FILE, "parts", 1, "blocks", 0, to=7), CorruptError, "a text"),
    (at(*FILE, "parts", 1, "tensor", to=7), CorruptError, "a text"),
    (at(*FILE, "parts", 1, "tensor", to=""), CorruptError, "only one of tensor and state"),
    (at(*FILE, "parts", 0, "state", to="weight"), CorruptError, "only one of tensor and state"),
    (at("tensors", "wte", to=7), CorruptError, "an object"),
    (at("tensors", "wte", "weight", to=7), CorruptError, "a text"),
]


@pytest.mark.parametrize(("change", "error", "problem"), REFUSED)
def test_what_cannot_be_is_refused_with_its_place(change, error, problem):
    with pytest.raises(error, match=problem):
        manifest_from_json(signed(change), where="m")


@pytest.mark.parametrize("read", [manifest_from_json, written_nbytes_from_json])
def test_one_that_was_edited_is_told_from_its_digest(read):
    content = bytes(manifest_to_json(MANIFEST)).replace(b"1.2.3", b"1.2.4")

    with pytest.raises(CorruptError, match="m: it is not as it was written"):
        read(content, where="m")
    with pytest.raises(CorruptError, match="m: it is not as it was written"):
        read(b'{"format": "restride-manifest/2"}', where="m")


@pytest.mark.parametrize("read", [manifest_from_json, written_nbytes_from_json])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**5])
def test_what_is_no_json_object_is_refused(read, content):
    with pytest.raises(FormatError, match=r"^m: "):
        read(content, where="m")


NAMES = ["a", 'quoted "\\', "\u00e9\u4e2d\U0001f600", "a b\t/c", "files", "digest"]


@pytest.mark.parametrize("names", [[], NAMES[:1], NAMES])
def test_sizes_alone_are_those_of_all_of_it(names):
    manifest = replace(
        MANIFEST,
        files=dict.fromkeys(names, MANIFEST.files["model.safetensors"]),
        options={"x": 1e-05, "y": [1.0, None, {}], "digest": "0" * 32, "\u00e9": "\u00e9"},
    )
    content = bytes(manifest_to_json(manifest))

    assert manifest_from_json(content, where="m") == manifest
    assert written_nbytes_from_json(content, where="m") == dict.fromkeys(names, 13)


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        *REFUSED[:3],
        (at("files", to=[]), FormatError, "it is no manifest"),
        (at(*FILE, to=3), FormatError, "it is no manifest"),
        (at(*FILE, "nbytes", to="3"), FormatError, "it is no manifest"),
    ],
)
def test_sizes_alone_are_read_of_nothing_else(change, error, problem):
    with pytest.raises(error, match=problem):
        written_nbytes_from_json(signed(change), where="m")


def test_a_manifest_that_is_too_long_is_not_looked_into(monkeypatch):
    monkeypatch.setattr("restride.checkpoint.manifest.LARGEST_LIST_NBYTES", 99)
    with pytest.raises(UnsupportedError, match="m: it has more than the 99 bytes"):
        written_nbytes_from_json(bytes(manifest_to_json(MANIFEST)), where="m")
