"""The real safetensors library reads what we write, and we read what it writes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from restride.checkpoint.dtypes import DTYPES
from restride.formats.safetensors import lay_out, read_catalog
from restride.formats.safetensors.spelling import DTYPE_BY_CODE
from restride.storage.output_files import OutputFiles
from restride.testing.hostile_safetensors import hostile_safetensors, valid_safetensors
from restride.testing.mutations import damaged

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.interop


def tensors() -> dict[str, torch.Tensor]:
    made = {}
    for number, dtype in enumerate(DTYPE_BY_CODE.values()):
        numel = 5 + number
        content = bytearray(
            i * 7 % 251 % (2 if dtype.name == "bool" else 251)
            for i in range(numel * dtype.itemsize_nbytes)
        )
        flat = torch.frombuffer(content, dtype=torch.uint8).view(getattr(torch, dtype.name))
        made[f"layer.{number}.{dtype}"] = flat
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 4)
    made["deep"] = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
    made["名前"] = torch.ones(2, 2)
    return made


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_every_dtype_that_the_library_writes_is_read(tmp_path: Path) -> None:
    made = tensors()
    save_file(made, tmp_path / "a.safetensors", metadata={"format": "pt"})

    catalog = read_catalog(tmp_path / "a.safetensors")

    content = (tmp_path / "a.safetensors").read_bytes()
    assert {tensor.name for tensor in catalog.tensors} == set(made)
    for tensor in catalog.tensors:
        theirs = made[tensor.name]
        state = tensor.states["weight"]
        (region,) = state.regions
        assert f"torch.{state.dtype}" == str(theirs.dtype)
        assert state.layout.full_shape == tuple(theirs.shape)
        if region is not None:
            assert content[region.start_nbytes :][: theirs.nbytes] == raw(theirs)


@pytest.mark.parametrize("limit", [None, 64, 1])
def test_the_library_reads_what_is_written(tmp_path: Path, limit: int | None) -> None:
    made = tensors()
    wanted = [
        (name, DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in made.items()
    ]
    output = lay_out(wanted, max_shard_nbytes=limit)
    with OutputFiles(tmp_path / "out") as directory:
        directory.create(output)
        for target in output.tensors:
            (region,) = target.regions
            if region is not None:
                name = output.files[region.file].name
                directory.write_exact(name, region.start_nbytes, raw(made[target.name]))

    read = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        read |= load_file(path)

    assert read.keys() == made.keys()
    for name, tensor in read.items():
        assert (tensor.dtype, tensor.shape) == (made[name].dtype, made[name].shape)
        assert raw(tensor) == raw(made[name])


def test_transformers_loads_a_sharded_model_that_was_written(tmp_path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    output = lay_out(
        [(name, DTYPES["float32"], tuple(tensor.shape)) for name, tensor in state.items()],
        max_shard_nbytes=1000,
    )
    with OutputFiles(tmp_path / "out") as directory:
        directory.create(output)
        for target in output.tensors:
            (region,) = target.regions
            assert region is not None
            name = output.files[region.file].name
            directory.write_exact(name, region.start_nbytes, raw(state[target.name]))
    config.save_pretrained(tmp_path / "out")

    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()

    assert len(output.files) > 2
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)


def accepted_by_the_library(path: Path) -> set[str] | None:
    try:
        with safetensors.safe_open(path, "pt") as file:
            return set(file.keys())
    except (safetensors.SafetensorError, UnicodeDecodeError, OverflowError):
        return None


def accepted_by_us(path: Path) -> set[str] | None:
    from restride.errors import RestrideError

    try:
        catalog = read_catalog(path)
    except RestrideError:
        return None
    return {tensor.name for tensor in catalog.tensors}


@given(damaged(valid_safetensors()))
def test_what_we_accept_the_library_accepts(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)

    ours = accepted_by_us(path)

    assert ours is None or ours == accepted_by_the_library(path)


def test_what_the_library_refuses_we_refuse(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    refused = 0
    for case in hostile_safetensors():
        path.write_bytes(case.content)
        refused += accepted_by_the_library(path) is None

        assert accepted_by_us(path) is None

    # The others are what the library lets pass: two readings of one header.
    assert refused > 40


def test_the_references_of_the_real_checkpoints_are_read(shared: Path) -> None:
    paths = sorted((shared / "checkpoints").glob("*/reference.safetensors"))
    for path in paths:
        catalog = read_catalog(path)
        with safetensors.safe_open(path, "pt") as file:
            keys = {
                tensor.name if state == "weight" else f"{tensor.name}/{state}"
                for tensor in catalog.tensors
                for state in tensor.states
            }
            assert keys == set(file.keys())
        assert json.dumps(dict(catalog.values)) == "{}"

    assert len(paths) >= 10
