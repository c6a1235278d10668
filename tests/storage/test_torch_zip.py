"""Torch files are read by their directory and their pickle, and every lie in them is found."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import Constructed, GlobalName, Storage, StoredTensor
from restride.errors import CorruptError, ExecutionError, FormatError, RestrideError
from restride.storage import zip_directory
from restride.storage.pickle_vm import Limits
from restride.storage.ranges import RangeFile
from restride.storage.torch_zip import TorchFile, open_torch_zip
from restride.storage.zip_directory import read_zip_directory
from restride.testing.hostile import Hostile, callers, hostile_pickles
from restride.testing.hostile_torch import hostile_torch_files, valid_torch_file
from restride.testing.mutations import damaged, damaged_pickles
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
from restride.testing.torch_files import Record, torch_file, torch_records, write_zip, zip_file

FLOATS = struct.pack("<6f", *range(6))
PLACE = storage("0", 6)
WEIGHT = tensor(PLACE, (2, 3), (3, 1))


def opened(folder: Path, content: bytes, limits: Limits | None = None) -> TorchFile:
    path = folder / "a.pt"
    path.write_bytes(content)
    return open_torch_zip(path, limits=limits or Limits())


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("directory_of", [0, 1])
def test_a_record_that_two_processes_wrote_is_what_one_of_them_wrote(
    tmp_path: Path, last: int, directory_of: int
) -> None:
    """Both write the same bytes but for a number, and the checksums of it."""
    pickles = [stream(dictionary((text("rank"), integer(n)), (text("w"), WEIGHT))) for n in (0, 1)]
    sums = [zlib.crc32(content) for content in pickles]
    first, *others = torch_records(pickles[last], {"0": FLOATS})
    length = len(pickles[0])
    torn = replace(
        first,
        central={"crc32": sums[directory_of]},
        descriptor=struct.pack("<4s3L", b"PK\7\10", sums[1 - directory_of], length, length),
    )

    file = opened(tmp_path, zip_file([torn, *others]))

    assert file.value["rank"] == last
    assert file.is_written_twice
    assert file.records["data.pkl"].crc32 == sums[last]
    assert not opened(tmp_path, zip_file([first, *others])).is_written_twice


@pytest.mark.parametrize("where", [0, 3, 4])
def test_a_file_that_two_processes_wrote_has_no_record_with_the_sum_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    """Both accounts of a record may be of one process, and its content of the other."""
    records = torch_records(stream(WEIGHT), {"0": FLOATS})
    other = records[where].crc32 ^ 1
    length = len(records[where].content)
    records[where] = replace(
        records[where],
        central={"crc32": other},
        descriptor=struct.pack("<4s3L", b"PK\7\10", other, length, length),
    )
    assert not opened(tmp_path, zip_file(records)).is_written_twice

    records[5] = replace(records[5], central={"crc32": 1})
    with pytest.raises(
        CorruptError, match=rf"record '{records[where].name}': the content has"
    ) as e:
        opened(tmp_path, zip_file(records))
    assert f"the file states {other}" in str(e.value)
    # Long ones are not read through for it.
    monkeypatch.setattr(zip_directory, "_LONGEST_READ_NBYTES", len(records[5].content))
    assert opened(tmp_path, zip_file(records)).is_written_twice


def test_a_tensor_that_two_processes_wrote_is_not_read_through_for_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = torch_records(stream(WEIGHT), {"0": FLOATS})
    records[4] = replace(records[4], central={"crc32": 1})
    content = zip_file(records)
    assert opened(tmp_path, content).is_written_twice

    monkeypatch.setattr(zip_directory, "_LONGEST_READ_NBYTES", len(FLOATS) - 1)
    with pytest.raises(CorruptError, match=r"data/0.*two processes wrote the file at one time"):
        opened(tmp_path, content)


def value_of(folder: Path, body: bytes) -> object:
    return opened(folder, torch_file(stream(body), {"0": FLOATS})).value


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is empty: a save that was interrupted"):
        opened(tmp_path, b"")


def test_a_tensor_is_the_place_of_its_bytes(tmp_path: Path) -> None:
    file = opened(tmp_path, torch_file(stream(dictionary((text("w"), WEIGHT))), {"0": FLOATS}))

    assert set(file.value) == {"w"}
    weight = file.value["w"]
    assert weight == StoredTensor(file.storages["0"], 0, (2, 3), (3, 1))
    assert weight.storage.file == file.path == str(tmp_path / "a.pt")
    assert weight.storage.dtype == DTYPES["float32"]
    content = Path(file.path).read_bytes()
    assert content[weight.start_nbytes :][: weight.storage.nbytes] == FLOATS
    assert file.nbytes == len(content)
    assert file.records["data/0"].start_nbytes % 64 == 0


def test_views_share_their_storage(tmp_path: Path) -> None:
    body = listed(WEIGHT, tensor(PLACE, (2,), (3,), base=2), tensor(PLACE, (), (), base=5))

    first, column, last = value_of(tmp_path, body)

    assert first.storage is column.storage is last.storage
    assert column.start_nbytes == first.start_nbytes + 8
    assert (last.shape, last.start_nbytes) == ((), first.start_nbytes + 20)


def test_an_expanded_tensor_reads_one_element_again_and_again(tmp_path: Path) -> None:
    assert value_of(tmp_path, tensor(PLACE, (1 << 40,), (0,), base=5)).strides == (0,)


@pytest.mark.parametrize("base", [0, 6, 100])
def test_a_tensor_without_elements_may_stand_anywhere(tmp_path: Path, base: int) -> None:
    assert value_of(tmp_path, tensor(PLACE, (3, 0), (1, 1), base=base)).shape == (3, 0)


def test_parameters_and_tensors_with_attributes_are_tensors(tmp_path: Path) -> None:
    no_hooks = call("collections.OrderedDict")
    rebuild = WEIGHT[: WEIGHT.index(b"(")]
    args = WEIGHT[len(rebuild) : -1]
    state = dictionary((text("ds_id"), integer(3)))
    rows = [
        call("torch._utils._rebuild_parameter", WEIGHT, b"\x88", no_hooks),
        call("torch._utils._rebuild_parameter_with_state", WEIGHT, b"\x88", no_hooks, state),
        call("torch._tensor._rebuild_from_type_v2", rebuild, name("torch.Tensor"), args, state),
        call(
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            *(WEIGHT, name("torch.float32"), text("xla:0"), b"\x89"),
        ),
    ]

    values = value_of(tmp_path, listed(WEIGHT, *rows))

    assert all(value == values[0] for value in values)


def test_tensors_of_classes_of_their_own_stay_calls(tmp_path: Path) -> None:
    rebuild = WEIGHT[: WEIGHT.index(b"(")]
    args = WEIGHT[len(rebuild) : -1]
    typed = "torch._tensor._rebuild_from_type_v2"
    rows = [
        call(typed, rebuild, name("my.Tensor"), args, b"N"),
        call(typed, name("my.rebuild"), name("torch.Tensor"), args, b"N"),
        call("torch._utils._rebuild_parameter", call("my.tensor"), b"\x88", b"N"),
        call("torch._utils._rebuild_qtensor", PLACE, integer(0)),
        call("torch.device", text("cuda"), integer(0)),
    ]

    values = value_of(tmp_path, listed(*rows))

    assert [type(value) for value in values] == [Constructed] * 5
    assert values[0].args[1] == GlobalName("my", "Tensor")
    assert isinstance(values[3].args[0], Storage)


def test_older_and_longer_spellings_of_a_tensor_are_read(tmp_path: Path) -> None:
    old_id = tuple_of(
        *(text("storage"), name("torch.FloatStorage"), text("0"), text("cpu"), integer(6), b"N")
    )
    plain = dictionary((text("conj"), b"\x89"))
    no_hooks = call("collections.OrderedDict")
    view = (integer(0), tuple_of(integer(6)), tuple_of(integer(1)))
    rebuild = "torch._utils._rebuild_tensor"
    rows = [
        call(rebuild, PLACE, *view),
        call(rebuild, old_id + b"Q", *view),
        call(f"{rebuild}_v2", PLACE, *view, b"\x89", no_hooks, b"N"),
        call(f"{rebuild}_v2", PLACE, *view, b"\x89", no_hooks, plain),
    ]

    values = value_of(tmp_path, listed(*rows))

    assert [(value.shape, value.storage.key) for value in values] == [((6,), "0")] * 4


def test_a_tensor_that_would_be_cast_on_its_device_stays_a_call(tmp_path: Path) -> None:
    body = call(
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        *(WEIGHT, name("torch.float16"), text("xla:0"), b"\x89"),
    )

    assert isinstance(value_of(tmp_path, body), Constructed)


def test_types_without_a_storage_class_view_bytes(tmp_path: Path) -> None:
    rebuilt = call(
        "torch._utils._rebuild_tensor_v3",
        storage("0", 24, "torch.storage.UntypedStorage"),
        integer(4),
        tuple_of(integer(4)),
        tuple_of(integer(2)),
        b"\x89",
        call("collections.OrderedDict"),
        name("torch.uint16"),
    )

    value = value_of(tmp_path, rebuilt)

    assert (value.storage.dtype, value.storage.nbytes) == (DTYPES["uint16"], 24)
    assert value.start_nbytes == value.storage.start_nbytes + 8


def test_sizes_and_dtypes_are_tuples_and_names(tmp_path: Path) -> None:
    body = listed(call("torch.Size", tuple_of(integer(2), integer(3))), name("torch.bfloat16"))

    assert value_of(tmp_path, body) == [(2, 3), GlobalName("torch", "bfloat16")]


def test_bytes_after_the_last_whole_element_are_no_element(tmp_path: Path) -> None:
    content = torch_file(stream(tensor(storage("0", 1), (1,), (1,))), {"0": b"\0\0\x80?xx"})

    value = opened(tmp_path, content).value

    assert value.storage.nbytes == 4


def test_a_file_from_before_the_byte_order_record_is_little_endian(tmp_path: Path) -> None:
    records = [r for r in torch_records(stream(b"N")) if not r.name.endswith("byteorder")]

    assert opened(tmp_path, zip_file(records)).value is None


def test_zip_files_of_other_writers_are_read_if_they_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for record in torch_records(stream(WEIGHT), {"0": FLOATS}):
            file.writestr(record.name, record.content)

    value = open_torch_zip(path).value

    assert path.read_bytes()[value.start_nbytes :][:24] == FLOATS


def test_zip_files_that_were_written_into_a_pipe_are_read(tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.content = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:
            self.content += data
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as file:
        for record in torch_records(stream(WEIGHT), {"0": FLOATS}):
            file.writestr(record.name, record.content)

    assert opened(tmp_path, bytes(pipe.content)).value.shape == (2, 3)


@given(
    contents=st.lists(st.binary(max_size=200), max_size=6),
    wide=st.booleans(),
    descriptors=st.booleans(),
)
def test_every_record_is_found_where_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    contents: list[bytes],
    wide: bool,
    descriptors: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "records.zip"
    flags = 0x0808 if descriptors else 0x0800
    records = [Record(f"a/{i}", content, flags=flags) for i, content in enumerate(contents)]
    path.write_bytes(zip_file(records, is_wide=wide))

    with RangeFile(path) as file:
        found = read_zip_directory(file)
        read = [file.read(record.start_nbytes, record.nbytes) for record in found]

    assert read == contents
    assert [record.name for record in found] == [record.name for record in records]
    with zipfile.ZipFile(path) as oracle:
        assert [record.crc32 for record in found] == [info.CRC for info in oracle.infolist()]


def test_storages_beyond_4_gib_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    huge = 5 << 30
    body = listed(
        tensor(storage("0", huge // 4), (huge // 4,), (1,)), tensor(storage("1", 6), (6,), (1,))
    )
    records = torch_records(stream(body), {"0": b"", "1": FLOATS})
    records[4] = replace(records[4], hole_nbytes=huge)
    with path.open("wb") as file:
        write_zip(file, records)

    large, small = open_torch_zip(path).value

    assert path.stat().st_blocks * 512 < 1 << 20
    assert large.storage.nbytes == huge
    assert small.start_nbytes > huge
    with RangeFile(path) as file:
        assert file.read(small.start_nbytes, 24) == FLOATS


def test_a_tensor_that_stands_beyond_4_gib_in_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    records = torch_records(stream(b"N"), {"0": b"", "1": FLOATS})
    records[4] = replace(records[4], hole_nbytes=5 << 30)
    extra = struct.pack("<2HQ", 1, 8, 64)
    records[5] = replace(records[5], central={"extra": extra})
    with path.open("wb") as file:
        write_zip(file, records)

    with pytest.raises(CorruptError):
        open_torch_zip(path)


def test_only_headers_directory_and_pickle_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 1 << 20
    content = torch_file(
        stream(tensor(storage("0", numel), (numel,), (1,))), {"0": bytes(4 * numel)}
    )
    read = []
    original = RangeFile.read

    def counting(self: RangeFile, start_nbytes: int, nbytes: int) -> bytes:
        read.append(nbytes)
        return original(self, start_nbytes, nbytes)

    monkeypatch.setattr(RangeFile, "read", counting)
    opened(tmp_path, content)

    assert sum(read) < 5000


@pytest.mark.parametrize("case", hostile_torch_files(), ids=lambda case: case.name)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, case: Hostile) -> None:
    with pytest.raises(RestrideError) as caught:
        opened(tmp_path, case.content)

    assert case.says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: ")
    assert str(caught.value).count(str(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("case", hostile_pickles(), ids=lambda case: case.name)
def test_a_hostile_pickle_in_a_right_file_is_one_clear_error(tmp_path: Path, case: Hostile) -> None:
    with pytest.raises(RestrideError) as caught:
        opened(tmp_path, torch_file(case.content))

    assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: data.pkl: byte ")


def test_nothing_that_a_file_names_is_called(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for content in callers(f"touch {canary}").values():
        opened(tmp_path, torch_file(content))

        assert not canary.exists()


def test_a_pickle_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    content = torch_file(stream(text("x" * 1000)))

    with pytest.raises(CorruptError, match=r"data\.pkl of \d+ bytes is longer than the limit"):
        opened(tmp_path, content, Limits(stream_nbytes=100))


def test_what_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="absent: cannot be opened"):
        open_torch_zip(tmp_path / "absent")
    with pytest.raises(FormatError, match="is a folder"):
        open_torch_zip(tmp_path)


def test_a_plain_pickle_is_told_from_a_torch_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a bare pickle"):
        opened(tmp_path, pickle.dumps({"a": 1}))


SMALL = Limits(work=100_000, expanded=100_000)
PICKLE = stream(dictionary((text("w"), WEIGHT), (text("x"), tuple_of(integer(1), b"N"))))


@given(damaged(valid_torch_file()) | damaged_pickles(PICKLE, {"0": FLOATS}))
def test_nothing_but_our_errors_comes_out_of_a_damaged_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    try:
        file = open_torch_zip(path, limits=SMALL)
    except RestrideError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - some damage goes unnoticed
    else:
        assert all(s.start_nbytes + s.nbytes <= len(content) for s in file.storages.values())
