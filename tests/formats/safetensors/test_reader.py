"""Safetensors are read into a catalog by their headers, and every lie in them is found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Catalog, Region
from restride.checkpoint.dtypes import DTYPES
from restride.errors import (
    CorruptError,
    ExecutionError,
    FormatError,
    RestrideError,
    UnsupportedError,
)
from restride.formats.safetensors import read_catalog
from restride.testing.hostile_safetensors import (
    hostile_safetensors,
    safetensors_file,
    valid_safetensors,
)
from restride.testing.mutations import damaged, damaged_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from restride.testing.hostile import Hostile


def entry(start: int, stop: int, shape: tuple[int, ...] | None = None) -> dict[str, object]:
    sizes = [stop - start] if shape is None else list(shape)
    return {"dtype": "U8", "shape": sizes, "data_offsets": [start, stop]}


def write_file(path: Path, **tensors: int | tuple[int, ...]) -> None:
    """Write tensors of bytes, by name and shape."""
    header, at = {}, 0
    for name, shape in tensors.items():
        sizes = (shape,) if isinstance(shape, int) else shape
        nbytes = 1
        for size in sizes:
            nbytes *= size
        header[name.replace("__", "/")] = entry(at, at + nbytes, sizes)
        at += nbytes
    path.write_bytes(safetensors_file(header, bytes(at)))


def write_index(path: Path, weight_map: dict[str, str], **other: object) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **other}))


def names(catalog: Catalog) -> list[str]:
    return [tensor.name for tensor in catalog.tensors]


def test_a_file_is_a_catalog_of_whole_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(valid_safetensors())

    catalog = read_catalog(path)

    assert (catalog.format, catalog.root) == ("safetensors", str(tmp_path))
    assert [(file.name, file.nbytes) for file in catalog.files] == [
        ("a.safetensors", path.stat().st_size)
    ]
    assert catalog.mesh == Mesh(())
    assert names(catalog) == ["a", "b"]
    second = catalog.tensors[1].states["weight"]
    assert (second.dtype, second.layout.full_shape) == (DTYPES["float32"], (2,))
    (region,) = second.regions
    assert path.read_bytes()[region.start_nbytes :][:8] == bytes(range(8, 16))
    assert catalog.tensors[1].layout == second.layout
    assert catalog.values == {"safetensors_metadata": {"a.safetensors": {"format": "pt"}}}
    assert catalog.findings == ()


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"late": entry(3, 5), "early": entry(0, 3), "empty": entry(3, 3), "last": entry(5, 6)}
    (tmp_path / "a.safetensors").write_bytes(safetensors_file(header, bytes(6)))

    catalog = read_catalog(tmp_path / "a.safetensors")

    assert names(catalog) == ["early", "empty", "late", "last"]
    assert catalog.tensors[1].states["weight"].regions == (None,)


def test_spaces_after_the_header_and_scalars_are_read(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 1, ()), "b": entry(1, 1, (0, 3))}).encode() + b"   "
    (tmp_path / "a.safetensors").write_bytes(safetensors_file(text, b"\7"))

    scalar, empty = read_catalog(tmp_path / "a.safetensors").tensors

    assert (scalar.layout.full_shape, scalar.layout.pieces(0)[0].numel) == ((), 1)
    assert (empty.layout.full_shape, empty.layout.all_pieces) == ((0, 3), ())


def test_keys_with_a_state_become_states_of_the_parameter(tmp_path: Path) -> None:
    write_file(
        tmp_path / "a.safetensors",
        w=(2, 3),
        w__exp_avg=(2, 3),
        w__step=(),
        v__fp32=(4,),
        v__exp_avg=(4,),
        bert__kernel=(5,),
        step=(1,),
    )

    catalog = read_catalog(tmp_path / "a.safetensors")

    states = {tensor.name: list(tensor.states) for tensor in catalog.tensors}
    assert states == {
        "w": ["weight", "exp_avg", "step"],
        "v": ["fp32", "exp_avg"],
        "bert/kernel": ["weight"],
        "step": ["weight"],
    }
    assert catalog.tensors[0].layout.full_shape == (2, 3)
    assert catalog.tensors[0].states["step"].layout.full_shape == ()


def test_a_state_of_another_shape_is_kept_as_a_tensor_and_noted(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", w=(2, 3), w__exp_avg_sq_row=(2,), w__exp_avg=(2, 3))

    catalog = read_catalog(tmp_path / "a.safetensors")

    assert names(catalog) == ["w", "w/exp_avg_sq_row"]
    assert list(catalog.tensors[0].states) == ["weight", "exp_avg"]
    finding, by_name = catalog.findings
    assert (finding.severity, finding.kind) == ("note", "state-shape")
    assert by_name.message.startswith("1 tensor such as 'w/exp_avg' is read as states of an")
    assert "'exp_avg_sq_row' of tensor 'w' has shape [2], the tensor [2, 3]" in finding.message


def test_the_main_state_gives_the_shape_where_there_is_no_weight(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", w__step=(), w__exp_avg=(3,), v__step=())

    first, second = read_catalog(tmp_path / "a.safetensors").tensors

    assert (first.name, first.layout.full_shape) == ("w", (3,))
    assert (second.name, second.layout.full_shape) == ("v", ())


def test_a_weight_gives_the_shape_where_its_master_copy_has_another(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", a__fp32=4, a=3)

    catalog = read_catalog(tmp_path / "a.safetensors")

    shapes = {tensor.name: tensor.layout.full_shape for tensor in catalog.tensors}
    assert shapes == {"a": (3,), "a/fp32": (4,)}
    assert [finding.kind for finding in catalog.findings] == ["state-shape"]


def test_a_sharded_model_is_read_by_its_index(tmp_path: Path) -> None:
    write_file(tmp_path / "model-00001-of-00002.safetensors", a=3, b=4)
    write_file(tmp_path / "model-00002-of-00002.safetensors", c=5)
    write_index(
        tmp_path / "model.safetensors.index.json",
        {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
        metadata={"total_size": 12},
    )

    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        catalog = read_catalog(path)

        assert names(catalog) == ["a", "b", "c"]
        assert catalog.root == str(tmp_path)
        assert [file.name[:11] for file in catalog.files] == ["model-00001", "model-00002"]
        (region,) = catalog.tensors[2].states["weight"].regions
        assert region is not None
        assert region.file == 1
        assert catalog.findings == ()


@pytest.mark.parametrize(
    "spelling",
    [
        "model-{:05}-of-{:06}",  # DeepSeek-V3
        "model-{}-of-{}",  # Kimi-K2
        "model-{:05}-of-{:05}",
        "part_{:03}_{}",
    ],
)
def test_files_of_an_index_may_have_any_numbers(tmp_path: Path, spelling: str) -> None:
    files = [f"{spelling.format(number, 11)}.safetensors" for number in range(1, 12)]
    for file in files:
        write_file(tmp_path / file, **{file: 1})
    write_index(tmp_path / "model.safetensors.index.json", {file: file for file in files})

    catalog = read_catalog(tmp_path)

    assert sorted(names(catalog)) == sorted(files)
    assert catalog.findings == ()
    if "of" in spelling:
        (tmp_path / "model.safetensors.index.json").unlink()
        assert names(read_catalog(tmp_path)) == files


def test_one_file_may_have_an_index(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", a=1)
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model.safetensors"})

    assert names(read_catalog(tmp_path)) == ["a"]
    assert read_catalog(tmp_path).findings == ()


def test_a_wrong_total_size_is_noted(tmp_path: Path) -> None:
    write_file(tmp_path / "m.safetensors", a=3)
    write_index(
        tmp_path / "x.safetensors.index.json", {"a": "m.safetensors"}, metadata={"total_size": 4.5}
    )

    (finding,) = read_catalog(tmp_path / "x.safetensors.index.json").findings

    assert (finding.severity, finding.kind) == ("note", "index-total-size")
    assert finding.details == {"stated": 4.5, "nbytes": 3}


def test_a_total_size_that_is_no_number_is_noted(tmp_path: Path) -> None:
    write_file(tmp_path / "m.safetensors", a=3)
    index = tmp_path / "x.safetensors.index.json"
    for stated in ([], {}, [3], {"a": [3]}, "3"):
        write_index(index, {"a": "m.safetensors"}, metadata={"total_size": stated})

        (finding,) = read_catalog(index).findings

        assert finding.kind == "index-total-size"
        assert finding.details["stated"] == stated


def test_a_folder_of_weights_states_and_values_is_one_checkpoint(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", w=(2, 3))
    write_file(tmp_path / "optimizer-00001-of-00002.safetensors", w__exp_avg=(2, 3))
    write_file(tmp_path / "optimizer-00002-of-00002.safetensors", w__step=())
    write_file(tmp_path / "consolidated.safetensors", w=(2, 3))
    (tmp_path / "state.json").write_text('{"global_steps": 7}')

    catalog = read_catalog(tmp_path)

    assert names(catalog) == ["w"]
    assert list(catalog.tensors[0].states) == ["weight", "exp_avg", "step"]
    assert catalog.values == {"global_steps": 7}
    (finding,) = catalog.findings
    assert (finding.kind, finding.details) == (
        "ignored-files",
        {"files": ["consolidated.safetensors"]},
    )
    assert read_catalog(tmp_path / "model.safetensors").values == {}


def test_beside_a_model_the_file_says_what_is_a_state(tmp_path: Path) -> None:
    """Optimizers have states of any name, and parameters may be called like one."""
    write_file(tmp_path / "model.safetensors", w=(2, 3), head__sum=(4,), head=(5,))
    write_file(tmp_path / "optimizer.safetensors", w__hessian=(2, 3), head__sum__fp32=(4,))

    catalog = read_catalog(tmp_path)

    assert {tensor.name: list(tensor.states) for tensor in catalog.tensors} == {
        "w": ["weight", "hessian"],
        "head/sum": ["weight", "fp32"],
        "head": ["weight"],
    }


@pytest.mark.parametrize("is_link", [True, False])
def test_values_that_are_no_file_are_refused(tmp_path: Path, is_link: bool) -> None:  # noqa: FBT001
    """As a link is to what was not fetched."""
    write_file(tmp_path / "model.safetensors", w=(2, 3))
    path = tmp_path / "state.json"
    if is_link:
        path.symlink_to("elsewhere")
    else:
        path.mkdir()

    with pytest.raises(RestrideError, match=r"state\.json: (cannot be opened|is a folder)"):
        read_catalog(tmp_path)


def test_a_tensor_and_a_state_of_another_shape_may_not_share_a_name(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", w=(2, 3), w__hessian=(4,))
    write_file(tmp_path / "optimizer.safetensors", w__hessian=(2, 2))

    with pytest.raises(CorruptError, match=r"tensor 'w/hessian': a state of tensor 'w' of another"):
        read_catalog(tmp_path)


@pytest.mark.parametrize("path", ["", "model.safetensors"])
def test_no_key_of_a_model_is_a_state(tmp_path: Path, path: str) -> None:
    write_file(tmp_path / "model.safetensors", a=(6,), a__step=(6,), b__sum=(2,))

    catalog = read_catalog(tmp_path / path)

    assert names(catalog) == ["a", "a/step", "b/sum"]
    assert all(list(tensor.states) == ["weight"] for tensor in catalog.tensors)
    assert not catalog.findings


@pytest.mark.parametrize("name", ["part.safetensors", "models.safetensors"])
def test_states_that_nothing_but_their_names_tells_of_are_noted(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / name, a=(6,), a__step=(6,), b__sum=(2,))

    catalog = read_catalog(tmp_path)

    assert {tensor.name: list(tensor.states) for tensor in catalog.tensors} == {
        "a": ["weight", "step"],
        "b": ["sum"],
    }
    (finding,) = catalog.findings
    assert (finding.severity, finding.kind) == ("note", "states-by-name")
    assert "2 tensors such as 'a/step' are read as states of an optimizer" in finding.message


def test_a_second_state_of_one_name_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", w=(2, 3))
    write_file(tmp_path / "optimizer.safetensors", w__weight=(2, 3))

    with pytest.raises(CorruptError, match=r"'w/weight': is in 'model.safetensors' as well"):
        read_catalog(tmp_path)


def test_a_folder_without_a_model_is_all_its_files(tmp_path: Path) -> None:
    write_file(tmp_path / "adapter_model.safetensors", a=1)
    write_file(tmp_path / "other.safetensors", b=1)
    write_file(tmp_path / ".hidden.safetensors", c=1)

    assert names(read_catalog(tmp_path)) == ["a", "b"]


def test_a_shard_that_no_index_names_is_noted(tmp_path: Path) -> None:
    write_file(tmp_path / "model-00001-of-00001.safetensors", a=1)
    write_file(tmp_path / "model-00003-of-00007.safetensors", a=1)
    write_index(
        tmp_path / "model.safetensors.index.json", {"a": "model-00001-of-00001.safetensors"}
    )

    (finding,) = read_catalog(tmp_path).findings

    assert finding.details == {"files": ["model-00003-of-00007.safetensors"]}


@pytest.mark.parametrize(
    ("files", "index", "says"),
    [
        ([], {}, "has no *.safetensors"),
        (["model", "model-00001-of-00001"], {}, "it is not clear which one is meant"),
        (["model", "x"], {"a": "x.safetensors"}, "it is not clear which one is meant"),
        (["m-1-of-999999999"], {}, "are not all files of one sharded checkpoint"),
        (["m-1-of-2", "m-01-of-2"], {}, "are not all files of one sharded checkpoint"),
        (["model-00001-of-00002"], {}, "are not all files of one sharded checkpoint"),
        (["model-00002-of-00002"], {}, "are not all files of one sharded checkpoint"),
        (["m-00001-of-00001", "m-00002-of-00002"], {}, "are not all files of one sharded"),
        (["a", "b"], {}, "b.safetensors: tensor 'a': is in 'a.safetensors' as well"),
        (["x"], {"a": "y.safetensors"}, "is named, and is not there; copy it again"),
        (["x", "y"], {"a": "y.safetensors", "b": "x.safetensors"}, "places it in 'y.safetensors'"),
        (["x"], {"b": "x.safetensors"}, "tensor 'a': the index has no entry"),
        (["x"], {"a": "x.safetensors", "b": "x.safetensors"}, "1 tensor of the index is not in"),
        (["x"], {"a": "../x.safetensors"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": "/etc/passwd"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": "..\\x.safetensors"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": ".safetensors"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": ""}, "is not the name of a safetensors file beside"),
        (["x"], {"a": "pytorch_model.bin"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": "\0.safetensors"}, "is not the name of a safetensors file beside"),
        (["x"], {"a": 1}, "Expected `str`, got `int`"),
    ],
)
def test_files_that_do_not_agree_are_one_clear_error(
    tmp_path: Path, files: list[str], index: dict[str, object], says: str
) -> None:
    for name in files:
        write_file(tmp_path / f"{name}.safetensors", a=1)
    if index:
        write_index(tmp_path / "model.safetensors.index.json", index)

    with pytest.raises(FormatError) as caught:
        read_catalog(tmp_path)

    assert says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is no JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "required field `weight_map`"),
        ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "key 'a' comes twice"),
        (
            '{"weight_map": {}, "weight_map": {"a": "x.safetensors"}}',
            "key 'weight_map' comes twice",
        ),
        ('{"weight_map": {"a": NaN}}', "NaN"),
        ('{"weight_map": ' + '{"a":' * 50_000 + "1" + "}" * 50_001, "nested too deep"),
    ],
)
def test_a_damaged_index_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    write_file(tmp_path / "x.safetensors", a=1)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)

    with pytest.raises(CorruptError) as caught:
        read_catalog(path)

    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_damaged_state_file_is_one_clear_error(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", a=1)
    (tmp_path / "state.json").write_text("[1]")

    with pytest.raises(CorruptError, match=r"state\.json: Expected `object`"):
        read_catalog(tmp_path)


def test_a_state_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", a=1)
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(100_000_001)

    with pytest.raises(CorruptError, match=r"state\.json: values of 100000001 bytes are larger"):
        read_catalog(tmp_path)


def test_an_index_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(100_000_001)

    with pytest.raises(CorruptError, match="an index of 100000001 bytes is larger than the limit"):
        read_catalog(tmp_path)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_else_is_in_a_folder_hides_no_file(tmp_path: Path, is_sharded: bool) -> None:  # noqa: FBT001
    """Other files come before and between in the order of names, as in published models."""
    for name in ("README.md", "config.json", "model.md", "model-00001-of-00002.txt", "tokenizer"):
        (tmp_path / name).write_text("text")
    stems = [f"model-0000{n}-of-00002" for n in (1, 2)] if is_sharded else ["model"]
    for number, stem in enumerate(stems):
        write_file(tmp_path / f"{stem}.safetensors", **{f"w{number}": 2})

    catalog = read_catalog(tmp_path)

    assert names(catalog) == [f"w{number}" for number in range(len(stems))]
    assert catalog.findings == ()


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)

    with pytest.raises(CorruptError, match="header length 100000001 is larger than the limit"):
        read_catalog(path)


@pytest.mark.parametrize("name", ["", "shard-00001-model-00001-of-00001.safetensors"])
def test_parts_of_tensors_that_one_process_saved_are_not_taken_for_the_tensors(
    tmp_path: Path, name: str
) -> None:
    """As torch 2.13 writes them by ``HuggingFaceStorageWriter(..., save_distributed=True)``."""
    for number in (1, 2):
        places = {"w": {"saved_offsets": [4 * (number - 1)]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        header = {"__metadata__": metadata, "w": entry(0, 4)}
        file = tmp_path / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        file.write_bytes(safetensors_file(header, bytes(4)))

    with pytest.raises(UnsupportedError, match="holds what one process had of each tensor"):
        read_catalog(tmp_path / name)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("absent", "absent.safetensors", "absent.safetensors.index.json"):
        with pytest.raises(ExecutionError, match=f"{name}: cannot be opened"):
            read_catalog(tmp_path / name)


@pytest.mark.parametrize("case", hostile_safetensors(), ids=lambda case: case.name)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, case: Hostile) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(case.content)

    with pytest.raises(RestrideError) as caught:
        read_catalog(path)

    assert case.says in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


HEADER = json.dumps(
    {
        "__metadata__": {"a": "b"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "w/step": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    }
).encode()


@given(damaged(valid_safetensors()) | damaged_safetensors(HEADER, bytes(32)))
def test_nothing_but_our_errors_comes_out_of_a_damaged_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        catalog = read_catalog(path)
    except RestrideError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - some damage goes unnoticed
    else:
        _require_inside(catalog, len(content))


@given(st.text() | st.binary().map(repr))
def test_nothing_but_our_errors_comes_out_of_a_header_of_noise(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(safetensors_file(b'{"' + text.encode(errors="replace") + b'"}', b""))

    with pytest.raises(RestrideError):
        read_catalog(path)


def _require_inside(catalog: Catalog, nbytes: int) -> None:
    for tensor in catalog.tensors:
        for state in tensor.states.values():
            for region in state.regions:
                size = state.layout.full_numel * state.dtype.itemsize_nbytes
                assert isinstance(region, Region) or not size
                if region is not None:
                    assert 0 <= region.start_nbytes <= nbytes - size
