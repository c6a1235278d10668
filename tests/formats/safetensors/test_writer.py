"""Described safetensors files are what the description says, and read back as what went in."""

from __future__ import annotations

import json
import shutil
from math import prod
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES, DType
from restride.errors import PlanError, UnsupportedError
from restride.formats.safetensors import lay_out, read_catalog
from restride.storage.output_files import OutputFiles

if TYPE_CHECKING:
    from pathlib import Path

    from restride.checkpoint.output import Output

Wanted = tuple[str, DType, tuple[int, ...]]
WRITABLE = [dtype for name, dtype in DTYPES.items() if name != "complex128"]


def write(folder: Path, output: Output) -> dict[str, bytes]:
    """Write an output, each tensor as bytes that tell it from the others."""
    contents = {}
    shutil.rmtree(folder, ignore_errors=True)
    with OutputFiles(folder) as directory:
        directory.create(output)
        for number, tensor in enumerate(output.tensors):
            (region,) = tensor.regions
            contents[tensor.name] = bytes([number % 251 + 1]) * tensor.shard_nbytes(0)
            if region is not None:
                name = output.files[region.file].name
                directory.write_exact(name, region.start_nbytes, contents[tensor.name])
    return contents


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1).filter(lambda name: "/" not in name and name != "__metadata__"),
            st.sampled_from(WRITABLE),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    ),
    st.none() | st.integers(1, 300),
    st.dictionaries(st.text(), st.text(), max_size=2),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: list[Wanted],
    limit: int | None,
    metadata: dict[str, str],
) -> None:
    folder = tmp_path_factory.getbasetemp() / "written"
    output = lay_out(wanted, max_shard_nbytes=limit, metadata=metadata)
    contents = write(folder, output)

    catalog = read_catalog(folder)

    read = {
        tensor.name: (state.dtype, state.layout.full_shape, state.regions[0])
        for tensor in catalog.tensors
        for state in tensor.states.values()
    }
    assert {name: row[:2] for name, row in read.items()} == {row[0]: row[1:] for row in wanted}
    for name, (_, _, region) in read.items():
        if region is not None:
            whole = (folder / catalog.files[region.file].name).read_bytes()
            assert whole[region.start_nbytes :][: len(contents[name])] == contents[name]
    assert catalog.findings == ()
    stored = catalog.values.get("safetensors_metadata", {})
    assert all(texts == metadata for texts in stored.values())
    assert [tensor.name for tensor in output.tensors] == [row[0] for row in wanted]


def test_one_file_holds_everything_and_its_data_is_aligned() -> None:
    wanted = [("a", DTYPES["uint8"], (3,)), ("b", DTYPES["float64"], (2,))]

    output = lay_out(wanted)

    (file,) = output.files
    ((start, header),) = file.literals
    assert (file.name, start) == ("model.safetensors", 0)
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
    }
    assert [tensor.regions for tensor in output.tensors] == [
        (Region(0, len(header)),),
        (Region(0, len(header) + 3),),
    ]
    assert file.nbytes == len(header) + 19


def test_the_same_tensors_give_the_same_bytes() -> None:
    wanted = [(f"layer.{i}", DTYPES["bfloat16"], (i, 2)) for i in range(20)]

    assert lay_out(wanted, max_shard_nbytes=99) == lay_out(iter(wanted), max_shard_nbytes=99)


def test_files_are_filled_one_after_the_other() -> None:
    sizes = [4, 4, 3, 20, 1, 8, 2]
    wanted = [(f"t{i}", DTYPES["uint8"], (size,)) for i, size in enumerate(sizes)]

    output = lay_out(wanted, stem="optimizer", max_shard_nbytes=10)

    per_file: dict[int, list[int]] = {}
    for tensor in output.tensors:
        (region,) = tensor.regions
        assert region is not None
        per_file.setdefault(region.file, []).append(prod(tensor.layout.full_shape))
    assert list(per_file.values()) == [[4, 4], [3], [20], [1, 8], [2]]
    assert [file.name for file in output.files] == [
        *(f"optimizer-0000{number}-of-00005.safetensors" for number in range(1, 6)),
        "optimizer.safetensors.index.json",
    ]
    index = json.loads(output.files[-1].literals[0][1])
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert list(index["weight_map"]) == [row[0] for row in wanted]
    assert index["weight_map"]["t3"] == "optimizer-00003-of-00005.safetensors"
    assert output.files[-1].nbytes == len(output.files[-1].literals[0][1])


@pytest.mark.parametrize(("sizes", "limit"), [((20, 3), 10), ((1, 1), 1), ((2, 1), 1)])
def test_no_file_is_empty_and_two_have_an_index(sizes: tuple[int, ...], limit: int) -> None:
    wanted = [(f"t{i}", DTYPES["uint8"], (size,)) for i, size in enumerate(sizes)]

    output = lay_out(wanted, max_shard_nbytes=limit)

    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.name for file in output.files] == [*names, "model.safetensors.index.json"]
    index = json.loads(output.files[-1].literals[0][1])
    assert index["weight_map"] == {"t0": names[0], "t1": names[1]}


def test_a_model_without_tensors_is_a_file_without_tensors(tmp_path: Path) -> None:
    write(tmp_path / "out", lay_out([], max_shard_nbytes=5, metadata={}))

    assert read_catalog(tmp_path / "out").tensors == ()


def test_what_cannot_be_written_is_refused() -> None:
    u8 = DTYPES["uint8"]
    for wanted, error, says in (
        ([("a", u8, ()), ("a", u8, ())], PlanError, "'a': two tensors"),
        ([("__metadata__", u8, ())], UnsupportedError, "keeps this name"),
        ([("a", DTYPES["complex128"], ())], UnsupportedError, "no dtype complex128"),
    ):
        with pytest.raises(error, match=says):
            lay_out(wanted)
    for limit in (0, -1):
        with pytest.raises(PlanError, match=f"at most {limit} bytes"):
            lay_out([], max_shard_nbytes=limit)


def test_a_header_that_no_reader_would_accept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restride.formats.safetensors.writer.LARGEST_HEADER_NBYTES", 1000)
    wanted = [(f"layer.{number}", DTYPES["uint8"], ()) for number in range(20)]

    with pytest.raises(PlanError, match=r"model\.safetensors: 20 tensors need a header of"):
        lay_out(wanted)
    assert len(lay_out(wanted, max_shard_nbytes=5).files) == 5
