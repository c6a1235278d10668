"""A file whose pickle was read in another is what it would be if it were read by itself."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import CorruptError
from restride.storage.pickle_writer import write_pickle
from restride.storage.torch_zip import TorchFiles, open_torch_zip
from restride.testing.opcodes import (
    call,
    dictionary,
    integer,
    listed,
    name,
    storage,
    stream,
    tensor,
    text,
    tuple_of,
)
from restride.testing.torch_files import torch_records, zip_file

STORAGES = {"0": struct.pack("<6f", *range(6)), "1": bytes(5)}
FLOATS = storage("0", 6)
BYTES = storage("1", 5, "torch.ByteStorage")
WEIGHT = tensor(FLOATS, (2, 3), (3, 1))
STATE = call("collections.OrderedDict") + b"(" + text("w") + WEIGHT + b"u"


def written(folder: Path, name: str, body: bytes, storages=STORAGES, top: str = "") -> Path:
    path = folder / f"{name}.pt"
    path.write_bytes(zip_file(torch_records(stream(body), storages, top=top or name)))
    return path


def lowered(value: Storage | StoredTensor) -> object:
    if isinstance(value, Storage):
        parts = (value.file, value.key, value.dtype.name, value.start_nbytes, value.nbytes)
    else:
        parts = (value.storage, value.storage_base, value.shape, value.strides)
    return Constructed(GlobalName("a", type(value).__name__), parts)


def spelled(file) -> bytes:
    """All of a value: what is in it, in which order, and what is shared."""
    return write_pickle([file.value, dict(file.storages)], lower=lowered)


def require_twin(body: bytes) -> None:
    with TemporaryDirectory() as folder:
        # Names of other lengths, so that the storages do not stand in the same places.
        first = written(Path(folder), "a", body)
        second = written(Path(folder), "much_longer_than_the_other_name" * 4, body)
        files = TorchFiles()
        before = spelled(files.open(first))

        assert spelled(files.open(second)) == spelled(open_torch_zip(second))
        assert spelled(files.open(first)) == before == spelled(open_torch_zip(first))


LEAVES = st.sampled_from([text("x"), integer(7), b"N", b")", WEIGHT, FLOATS, BYTES, name("a.B")])
BODIES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: listed(*parts))
        | st.lists(inner, max_size=4).map(lambda parts: tuple_of(*parts))
        | inner.map(lambda part: dictionary((text("k"), part), (text("l"), integer(1))))
        | st.lists(inner, max_size=3).map(lambda parts: call("a.B", *parts))
    ),
    max_leaves=12,
)


@given(BODIES)
def test_any_value_is_found_as_it_is_read(body: bytes) -> None:
    require_twin(body)


@pytest.mark.parametrize(
    "body",
    [
        b"N",
        WEIGHT,
        FLOATS,
        STATE,
        STATE + dictionary((text("_metadata"), listed(WEIGHT))) + b"b",
        dictionary((tuple_of(integer(1), FLOATS), integer(2))),
        # Lists and storages that are in the value twice.
        listed(listed(WEIGHT) + b"q\x07", b"h\x07", listed(integer(1)) + b"q\x08", b"h\x08"),
        # An object with items, pairs and a state.
        call("a.B")
        + b"("
        + WEIGHT
        + b"Ne"
        + b"("
        + text("k")
        + WEIGHT
        + b"u"
        + listed(WEIGHT)
        + b"b",
        call("a.B") + b"(" + WEIGHT + integer(1) + b"u",
        # What is called, and its keyword arguments.
        call("a.B", WEIGHT) + b")R",
        name("a.B") + b")" + dictionary((text("k"), WEIGHT)) + b"\x92",
        call("a.B", WEIGHT) + b"(" + tuple_of(FLOATS) + integer(1) + b"u",
        call("collections.OrderedDict") + b"(" + tuple_of(FLOATS) + integer(1) + b"u",
        call("builtins.set", listed(FLOATS, integer(1))),
        call("builtins.frozenset", listed(FLOATS)),
        # Bytes that are read as another type than their storage's.
        call(
            "torch._utils._rebuild_tensor_v3",
            storage("0", 24, "torch.UntypedStorage"),
            *(integer(0), tuple_of(integer(3)), tuple_of(integer(1))),
            *(b"\x89", call("collections.OrderedDict"), name("torch.uint16")),
        ),
        b"]" * 120 + WEIGHT + b"a" * 120,
    ],
)
def test_every_kind_of_value_is_found_as_it_is_read(body: bytes) -> None:
    require_twin(body)


def chained_under_keys(levels: int) -> bytes:
    """A long chain of lists; each link is the part of a key, too, where it is met first."""
    links = (
        listed(WEIGHT, *[b"j" + struct.pack("<I", 1000 + n - 1)] * (n > 0))
        + (b"r" + struct.pack("<I", 1000 + n) + b"0")
        for n in range(levels)
    )
    keys = (call("a.B", b"j" + struct.pack("<I", 1000 + n)) + b"N" for n in range(levels))
    last = b"j" + struct.pack("<I", 1000 + levels - 1)
    return b"".join(links) + b"}(" + call("a.B") + last + b"".join(keys) + b"u"


@pytest.mark.parametrize("levels", [5, 46, 47, 48, 49, 50, 51, 190])
def test_a_chain_that_is_met_at_all_its_links_first_is_found_as_it_is_read(levels: int) -> None:
    require_twin(chained_under_keys(levels))


@pytest.mark.parametrize("body", [chained_under_keys(190), b"]" * 190 + WEIGHT + b"a" * 190])
def test_what_is_nested_deep_is_not_followed(tmp_path: Path, body: bytes) -> None:
    """Python's stack may be full to the half where a file is opened."""

    def deep_down(calls: int, files: TorchFiles, path: Path):
        return files.open(path) if not calls else deep_down(calls - 1, files, path)

    files = TorchFiles()
    first, second = (written(tmp_path, name, body) for name in "ab")
    files.open(first)

    assert deep_down(600, files, second).value


def test_pickles_of_one_length_are_no_twins(tmp_path: Path) -> None:
    files = TorchFiles()
    written(tmp_path, "a", dictionary((text("w"), WEIGHT), (text("step"), integer(1))))
    written(tmp_path, "b", dictionary((text("w"), WEIGHT), (text("step"), integer(2))))

    assert [files.open(tmp_path / f"{name}.pt").value["step"] for name in "ab"] == [1, 2]


def test_what_refers_to_no_storage_is_one_value(tmp_path: Path) -> None:
    body = dictionary((text("w"), listed(WEIGHT)), (text("info"), listed(listed(integer(1)))))
    files = TorchFiles()
    first, second = (files.open(written(tmp_path, name, body)).value for name in "ab")

    assert first["info"] is second["info"]
    assert first["w"] is not second["w"]
    assert [value["w"][0].storage.file[-4:] for value in (first, second)] == ["a.pt", "b.pt"]


@pytest.mark.parametrize("storages", [{}, {"1": bytes(5)}, {"0": bytes(20), "1": bytes(5)}])
def test_a_file_without_the_storages_is_refused_as_by_itself(tmp_path: Path, storages) -> None:
    body = listed(BYTES, WEIGHT)
    files = TorchFiles()
    files.open(written(tmp_path, "a", body))
    second = written(tmp_path, "b", body, storages)

    with pytest.raises(CorruptError) as alone:
        open_torch_zip(second)
    with pytest.raises(CorruptError, match=r"data\.pkl: byte \d+ \(BINPERSID\)") as caught:
        files.open(second)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize("way", ["open", "look"])
def test_of_files_that_were_written_with_one_header_the_first_is_read(tmp_path: Path, way) -> None:
    body = dictionary((text("w"), listed(WEIGHT, BYTES)), (text("step"), integer(1)))
    first, second = (written(tmp_path, key, body, top="t") for key in "ab")
    headers = {str(first): ("t", "one header"), str(second): ("second", "one header")}
    files = TorchFiles(headers)
    getattr(files, way)(first)
    expected = replace(open_torch_zip(second), saved_as="second")
    second.write_bytes(b"nobody looks here")

    found = getattr(files, way)(second)
    assert found == replace(expected, stamp=None)
    assert spelled(found) == spelled(replace(expected, stamp=None))


@pytest.mark.parametrize("headers", [{"a": 1, "b": 2}, {"a": 1}, {"b": 1}, {}])
def test_a_file_with_a_header_of_its_own_is_read(tmp_path: Path, headers) -> None:
    paths = {key: written(tmp_path, key, listed(WEIGHT, text(key))) for key in "ab"}
    files = TorchFiles({str(paths[key]): (key, header) for key, header in headers.items()})

    assert [files.look(paths[key]).value[1] for key in "abab"] == [*"abab"]


def test_a_file_that_is_nested_too_deep_to_be_followed_is_read_itself(tmp_path: Path) -> None:
    body = b"]" * 190 + WEIGHT + b"a" * 190
    paths = [written(tmp_path, key, body) for key in "ab"]
    files = TorchFiles(dict.fromkeys(map(str, paths), ("a", "one header")))

    assert [spelled(files.look(path)) for path in paths] == [
        spelled(open_torch_zip(path)) for path in paths
    ]
