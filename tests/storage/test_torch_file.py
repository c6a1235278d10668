"""Torch files are described before they are written, byte for byte as torch would write them."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output
from restride.checkpoint.values import Storage, StoredTensor
from restride.errors import PlanError, UnsupportedError
from restride.storage.torch_file import lay_out_torch_file, name_inside, new_tensor
from restride.storage.torch_zip import open_torch_zip
from restride.testing.inert_values import save_value

if TYPE_CHECKING:
    from pathlib import Path

FLOAT = DTYPES["float32"]


def test_storages_stand_on_multiples_of_64_bytes_in_order_of_first_use() -> None:
    tensors = [new_tensor(str(key), FLOAT, (key,)) for key in (3, 0, 5, 1)]

    layout = lay_out_torch_file("a/b.pt", {"list": [*tensors, tensors[0]]})

    assert [storage.key for storage, _ in layout.storages] == ["3", "0", "5", "1"]
    assert all(start % 64 == 0 for _, start in layout.storages)
    assert layout.file.name == "a/b.pt"
    Output((layout.file,))  # literals do not overlap and stay inside


def test_literals_and_storages_cover_the_file_without_a_gap() -> None:
    layout = lay_out_torch_file("a.pt", [new_tensor(str(n), FLOAT, (n,)) for n in range(4)])

    parts = [(start, start + len(content)) for start, content in layout.file.literals]
    parts += [(start, start + storage.nbytes) for storage, start in layout.storages]
    at = 0
    for start, stop in sorted(parts):
        assert start == at
        at = stop
    assert at == layout.file.nbytes


def test_a_file_beyond_4_gib_has_64_bit_numbers_where_they_are_needed(tmp_path: Path) -> None:
    sizes = {"a": (1 << 32) - 1, "b": 5, "c": 1 << 32, "d": 7}
    layout = lay_out_torch_file(
        "a.pt", {key: new_tensor(key, DTYPES["uint8"], (n,)) for key, n in sizes.items()}
    )
    path = tmp_path / "a.pt"
    with path.open("wb") as file:  # with holes for the storages
        file.truncate(layout.file.nbytes)
        for start, literal in layout.file.spelled():
            file.seek(start)
            file.write(literal)

    read = open_torch_zip(path)

    assert {key: t.storage.nbytes for key, t in read.value.items()} == sizes
    assert [t.storage.start_nbytes for t in read.value.values()] == [
        start for _, start in layout.storages
    ]


def test_two_storages_of_one_key_must_be_one() -> None:
    one, other = new_tensor("0", FLOAT, (2,)), new_tensor("0", FLOAT, (3,))

    with pytest.raises(PlanError, match="'0' of 12 bytes has the key of one of 8 bytes"):
        lay_out_torch_file("a.pt", [one, other])


def test_a_value_that_cannot_be_written_names_the_file() -> None:
    with pytest.raises(UnsupportedError, match=r"^a\.pt: a value of type object"):
        lay_out_torch_file("a.pt", [object()])


def test_only_streamed_storages_lack_a_checksum(tmp_path: Path) -> None:
    save_value(tmp_path / "a.pt", {"x": new_tensor("0", FLOAT, (2,))}, {"0": bytes(range(8))})

    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        known = {info.filename for info in file.infolist() if info.CRC}
        assert known == {
            f"a/{name}"
            for name in (
                "data.pkl",
                ".format_version",
                ".storage_alignment",
                "byteorder",
                "version",
            )
        }
        for name in known:
            file.read(name)  # checks the checksum
        assert "a/data/0" in file.namelist()


torch = pytest.importorskip("torch")


def dtypes() -> list[str]:
    return list(DTYPES)


def saved_by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def values() -> dict[str, object]:
    whole = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    return {
        "whole": whole,
        "views": [whole[1], whole.permute(2, 0, 1), whole[::2, 1:], torch.empty(0)],
        "shape": whole.shape,
        "dtype": torch.bfloat16,
        "scalar": torch.tensor(1.5),
        "state": OrderedDict([("weight", torch.ones(3)), ("bias", torch.zeros(2))]),
        "rng": torch.get_rng_state(),
        "storage": torch.ones(5, dtype=torch.uint8).untyped_storage(),
        "one": [1],
        "only": {"key": b"\x00\xff", "set": {1}},
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }


@pytest.mark.interop
def test_pickle_and_places_are_byte_for_byte_those_of_torch(tmp_path: Path) -> None:
    content = saved_by_torch(values())
    (tmp_path / "torch.pt").write_bytes(content)
    read = open_torch_zip(tmp_path / "torch.pt")

    layout = lay_out_torch_file("archive.pt", read.value)  # as torch calls a buffer

    pickle = read.records["data.pkl"]
    start = pickle.start_nbytes
    assert layout.file.literals[0][1][start:][: pickle.nbytes] == content[start:][: pickle.nbytes]
    theirs = [r.start_nbytes for name, r in read.records.items() if name.startswith("data/")]
    assert [at for _, at in layout.storages] == theirs


@pytest.mark.interop
@pytest.mark.parametrize(
    "name",
    [
        *("a.pt", "a.b.pt", "a.", "a..pt", "..a.pt", ".a.pt", "a", "a b.pt", "a:b.pt", "a.b/c.pt"),
        *(f"{'a' * 252}.pt", "mp_rank_00_model_states.pt", "é.pt", "é/fp32.pt"),
    ],
)
def test_a_file_is_called_inside_as_torch_calls_it(tmp_path: Path, name: str) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        (folder / name).parent.mkdir(parents=True)
    torch.save([torch.arange(3)], theirs / name)
    read = open_torch_zip(theirs / name)

    save_value(ours / name, read.value, name=name)

    written = open_torch_zip(ours / name)
    assert written.saved_as == read.saved_as == name_inside(name)
    assert written.records["data/0"].start_nbytes == read.records["data/0"].start_nbytes
    with zipfile.ZipFile(ours / name) as file:
        assert {record.filename.partition("/")[0] for record in file.infolist()} == {read.saved_as}


@pytest.mark.interop
def test_a_file_beyond_4_gib_has_the_headers_that_torch_writes(tmp_path: Path) -> None:
    path = tmp_path / "long.name.pt"
    sizes = (1 << 20, (1 << 32) - 1, 12, (1 << 33) + 5, 7)
    with torch.serialization.skip_data():  # holes for the storages, which take no disk
        torch.save([torch.empty(n, dtype=torch.uint8) for n in sizes], path)
    read = open_torch_zip(path)

    layout = lay_out_torch_file("long.name.pt", read.value)

    assert [t.storage.nbytes for t in read.value] == [*sizes]
    records = {name: record for name, record in read.records.items() if name.startswith("data/")}
    assert [start for _, start in layout.storages] == [r.start_nbytes for r in records.values()]
    with path.open("rb") as file:
        for start, ours in [*layout.file.spelled()][1:-1]:
            file.seek(start)
            assert file.read(len(ours)) == ours


def require_same(ours: object, theirs: object) -> None:
    assert type(ours) is type(theirs)
    match theirs:
        case torch.Tensor():
            assert (ours.dtype, ours.shape, ours.stride()) == (
                theirs.dtype,
                theirs.shape,
                theirs.stride(),
            )
            assert ours.storage_offset() == theirs.storage_offset()
            if theirs.numel():
                left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
                assert torch.equal(left, right)
        case torch.UntypedStorage():
            assert bytes(ours) == bytes(theirs)
        case dict():
            assert list(ours) == list(theirs)
            for key, value in theirs.items():
                require_same(ours[key], value)
        case list() | tuple():
            for one, other in zip(ours, theirs, strict=True):
                require_same(one, other)
        case _ if type(theirs).__module__.startswith("deepspeed"):
            require_same(vars(ours), vars(theirs))
        case _:
            assert ours == theirs


@pytest.mark.interop
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_reads_what_was_written(tmp_path: Path, *, mmap: bool, weights_only: bool) -> None:
    value = values()
    del value["storage"]  # torch itself refuses a bare storage with weights_only
    (tmp_path / "torch.pt").write_bytes(saved_by_torch(value))
    save_value(tmp_path / "ours.pt", open_torch_zip(tmp_path / "torch.pt").value)

    read = torch.load(tmp_path / "ours.pt", weights_only=weights_only, mmap=mmap)

    require_same(read, value)


@pytest.mark.interop
@pytest.mark.parametrize("name", dtypes())
def test_torch_reads_every_dtype(tmp_path: Path, name: str) -> None:
    itemsize = DTYPES[name].itemsize_nbytes
    content = bytes(n % 2 for n in range(6 * itemsize))

    save_value(tmp_path / "a.pt", {"x": new_tensor("k", DTYPES[name], (2, 3))}, {"k": content})

    read = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)["x"]
    assert (str(read.dtype), read.shape) == (f"torch.{name}", (2, 3))
    assert bytes(read.reshape(-1).view(torch.uint8).numpy()) == content


@pytest.mark.interop
def test_torch_reads_a_file_beyond_4_gib(tmp_path: Path) -> None:
    sizes = {"a": (1 << 32) + 5, "b": 6, "c": 7}
    tensors = {key: new_tensor(key, DTYPES["uint8"], (n,)) for key, n in sizes.items()}
    layout = lay_out_torch_file("a.pt", tensors)
    with (tmp_path / "a.pt").open("wb") as file:
        file.truncate(layout.file.nbytes)
        for start, literal in layout.file.spelled():
            file.seek(start)
            file.write(literal)
        for (storage, start), mark in zip(layout.storages, b"xyz", strict=True):
            file.seek(start + storage.nbytes - 1)
            file.write(bytes([mark]))

    read = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)

    assert {key: (t.numel(), int(t[-1])) for key, t in read.items()} == {
        key: (n, mark) for (key, n), mark in zip(sizes.items(), b"xyz", strict=True)
    }


@pytest.mark.interop
def test_every_real_file_is_written_again_as_torch_reads_it(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    paths = sorted((shared / "checkpoints").rglob("*.pt"))
    for path in paths:
        save_value(tmp_path / "again.pt", open_torch_zip(path).value)

        again = torch.load(tmp_path / "again.pt", weights_only=False, mmap=True)
        require_same(again, torch.load(path, weights_only=False, mmap=True))
    assert len(paths) >= 80


def test_views_of_a_new_storage_stay_views(tmp_path: Path) -> None:
    storage = Storage("", "s", DTYPES["int16"], 0, 12)
    value = [StoredTensor(storage, 0, (2, 3), (3, 1)), StoredTensor(storage, 3, (3,), (1,))]

    save_value(tmp_path / "a.pt", value, {"s": bytes(12)})

    whole, row = open_torch_zip(tmp_path / "a.pt").value
    assert whole.storage is row.storage
    assert row.start_nbytes - whole.start_nbytes == 6
