"""A manifest comes back as it was written, or is refused."""

from __future__ import annotations

import json
import re
from hashlib import blake2b

import msgspec
import pytest
from msgspec.structs import replace

from restride.checkpoint import manifest_reading
from restride.checkpoint.manifest import (
    Manifest,
    ManifestFile,
    ManifestPart,
    manifest_to_json,
)
from restride.checkpoint.manifest_reading import ListedFiles, sizes_of
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.testing.contents import manifest_from_json, signed

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


def changed(change):
    """The content with a change that its digest knows of."""
    value = json.loads(manifest_to_json(MANIFEST))
    change(value)
    return signed(value)


def at(*path, to):
    def change(value):
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


HEAD = [
    (at("format", to="restride-manifest/1"), UnsupportedError, "restride-manifest/1"),
    (at("format", to="other"), FormatError, "m: it is no manifest"),
    (at("format", to=None), FormatError, "it is no manifest"),
    (at("version", to=1), CorruptError, r"\$.version: .* a text"),
    (at("job", to=None), CorruptError, r"\$.job"),
    (at("options", to=[]), CorruptError, r"\$.options: .* an object"),
    (at("block_nbytes", to=0), CorruptError, "number of bytes"),
    (at("block_nbytes", to=-4), CorruptError, "number of bytes"),
    (at("block_nbytes", to=True), CorruptError, "number of bytes"),
    (at("files", to=[]), CorruptError, "not as it was written"),
    (at("files", "../x", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at("files", "/etc/passwd", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at("files", "a\0b", to={"nbytes": 0, "parts": []}), CorruptError, "no path below"),
    (at("files", "a/empty", to={"parts": []}), CorruptError, "missing required field `nbytes`"),
    (at("files", "a/empty", to={"nbytes": -1}), CorruptError, ">= 0"),
    (at("files", "a/empty", to={"nbytes": "3"}), CorruptError, "got `str`"),
    (at("tensors", "wte", to=7), CorruptError, "an object"),
    (at("tensors", "wte", "weight", to=7), CorruptError, "a text"),
    (at("more", to=7), CorruptError, "not as it was written"),
]


@pytest.mark.parametrize(("change", "error", "problem"), HEAD)
def test_what_cannot_be_is_refused_with_its_place(change, error, problem):
    with pytest.raises(error, match=problem) as caught:
        manifest_from_json(changed(change), where="m")
    assert caught.value.where.startswith("m")


FILE = ("files", "model.safetensors")
FILES = [
    (at(*FILE, to={"nbytes": 13}), "missing required field"),
    (at(*FILE, "more", to=1), "unknown field `more`"),
    (at(*FILE, "digest", to="0" * 32), "not as it was written"),
    (at(*FILE, "nbytes", to=14), "parts end at byte 13 of 14"),
    (at(*FILE, "parts", to={}), r"got `object` - at `\$\[\.\.\.\]\.parts`"),
    (at(*FILE, "parts", 1, "start_nbytes", to=4), "starts at byte 4, not 3"),
    (at(*FILE, "parts", 1, "nbytes", to=100), "3 blocks are given for 100 bytes"),
    (at(*FILE, "parts", 1, "nbytes", to=-1), ">= 1"),
    (at(*FILE, "parts", 1, "nbytes", to=10.0), "got `float`"),
    (at(*FILE, "parts", 1, "blocks", 0, to="1"), "matching regex"),
    (at(*FILE, "parts", 1, "blocks", 0, to="G" * 32), "matching regex"),
    (at(*FILE, "parts", 1, "blocks", 0, to="0" * 32 + "\n"), "matching regex"),
    (at(*FILE, "parts", 1, "blocks", 0, to=7), "got `int`"),
    (at(*FILE, "parts", 1, "tensor", to=7), "got `int`"),
    (at(*FILE, "parts", 1, "tensor", to=""), "only one of tensor and state"),
    (at(*FILE, "parts", 0, "state", to="weight"), "only one of tensor and state"),
    (at(*FILE, "parts", 0, "tensor", to=""), "not as it was written"),
]


@pytest.mark.parametrize(("change", "problem"), FILES)
def test_what_cannot_be_of_a_file_is_refused_when_it_is_asked_for(change, problem):
    manifest = manifest_from_json(changed(change), where="m")

    assert manifest.files["a/empty"] == MANIFEST.files["a/empty"]
    with pytest.raises(CorruptError, match=problem) as caught:
        manifest.files["model.safetensors"]
    assert caught.value.where == "$.files['model.safetensors']"


def test_what_two_readers_could_understand_differently_is_refused():
    content = bytes(manifest_to_json(MANIFEST))
    for line, other in (
        (b'"nbytes": 0,', b'"nbytes": 1,\n   "nbytes": 0,'),
        (b'  "a/empty"', b'  "a\\/empty"'),
    ):
        assert line in content
        with pytest.raises(CorruptError, match="not as it was written"):
            dict(resigned(content.replace(line, other)).files)
    with pytest.raises(CorruptError, match="'a/empty' comes twice"):
        resigned(content.replace(b'"model.safetensors"', b'"a/empty"'))


def resigned(content):
    """Read a text with the digest that it should have; spelled as it is, white space apart."""
    compact = msgspec.json.format(content, indent=-1)
    said, _, _ = compact.rpartition(b',"digest":')
    found = blake2b(said + b"}", digest_size=16).hexdigest().encode()
    signed_again = re.sub(rb'"digest": "\w+"\n}\n', b'"digest": "%b"\n}\n' % found, content)
    return manifest_from_json(signed_again, where="m")


def test_one_that_was_edited_is_told_from_its_digest():
    content = bytes(manifest_to_json(MANIFEST)).replace(b"1.2.3", b"1.2.4")

    with pytest.raises(CorruptError, match="m: it is not as it was written: its digest"):
        manifest_from_json(content, where="m")
    with pytest.raises(CorruptError, match="m: it is not as it was written"):
        manifest_from_json(b'{"format": "restride-manifest/2"}', where="m")


def test_one_that_ends_anywhere_or_has_more_after_its_end_is_refused():
    content = bytes(manifest_to_json(MANIFEST))

    for end in range(len(content) - 1):
        with pytest.raises(FormatError, match=r"^m: "):
            manifest_from_json(content[:end], where="m")
    with pytest.raises(CorruptError, match=r"^m: "):
        manifest_from_json(content + b"{}", where="m")


def test_one_that_another_program_wrote_again_is_refused():
    value = json.loads(manifest_to_json(MANIFEST))

    for content in (json.dumps(value), json.dumps(value, indent=2)):
        with pytest.raises(CorruptError, match=r"^m: it is not .*: it is cut off, or another prog"):
            manifest_from_json(content.encode(), where="m")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**5])
def test_what_is_no_json_object_is_refused(content):
    with pytest.raises(FormatError, match=r"^m: .*it is no manifest"):
        manifest_from_json(content, where="m")


NAMES = ["a", 'quoted "\\', "\u00e9\u4e2d\U0001f600", "a b\t/c", "files", "digest"]


@pytest.mark.parametrize("names", [[], NAMES[:1], NAMES])
def test_sizes_are_known_without_reading_the_files(names, monkeypatch):
    manifest = replace(
        MANIFEST,
        files=dict.fromkeys(names, MANIFEST.files["model.safetensors"]),
        options={"x": 1e-05, "y": [1.0, None, {}], "digest": "0" * 32, "\u00e9": "\u00e9"},
    )
    content = bytes(manifest_to_json(manifest))
    read = manifest_from_json(content, where="m")

    assert read == manifest
    monkeypatch.setattr(ListedFiles, "__getitem__", None)
    assert sizes_of(read) == sizes_of(manifest) == dict.fromkeys(names, 13)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_it_is_the_same_in_whatever_pieces_it_is_read(count, monkeypatch):
    monkeypatch.setattr(manifest_reading, "_READ_NBYTES", count)
    content = bytes(manifest_to_json(MANIFEST))

    assert manifest_from_json(content, where="m") == MANIFEST


def test_what_is_said_of_one_thing_may_not_be_of_any_length(monkeypatch):
    monkeypatch.setattr(manifest_reading, "LARGEST_LIST_NBYTES", 500)
    monkeypatch.setattr(manifest_reading, "_READ_NBYTES", 100)
    part = ManifestPart(0, 4, (1,))
    files = {f"{n}": ManifestFile(4, (part,)) for n in range(100)}
    many = bytes(manifest_to_json(replace(MANIFEST, files=files)))
    one = ManifestFile(40, tuple(ManifestPart(4 * n, 4, (n,)) for n in range(10)))

    assert manifest_from_json(many, where="m").files == files
    with pytest.raises(UnsupportedError, match=r"m: more than 500 bytes from byte \d+ are of one"):
        manifest_from_json(bytes(manifest_to_json(replace(MANIFEST, files={"a": one}))), where="m")
