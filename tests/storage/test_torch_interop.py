"""Files of the real torch: every structure and every byte is what torch.load gives."""

from __future__ import annotations

import enum
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest

from restride.checkpoint.values import (
    Constructed,
    GlobalName,
    OrderedDictValue,
    SizeValue,
    StoredTensor,
)
from restride.errors import RestrideError, UnsupportedError
from restride.storage.torch_zip import TorchFile, open_torch_zip
from restride.testing.hostile_torch import valid_torch_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.interop


class Stub:
    """Stands for an object of a framework that is not imported here."""

    name: GlobalName
    args: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


class StubUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module.startswith("deepspeed"):
            return type(name, (Stub,), {"name": GlobalName(module, name)})
        return super().find_class(module, name)


STUB_PICKLE = SimpleNamespace(
    Unpickler=StubUnpickler, load=pickle.load, loads=pickle.loads, __name__="pickle"
)


class Comparison:
    """Compares inert values with what torch made of the same file."""

    def __init__(self, file: TorchFile) -> None:
        self.content = Path(file.path).read_bytes()
        self.tensors = 0
        self.calls = 0
        self.places: dict[int, int] = {}

    def same(self, ours: object, theirs: object) -> None:
        match theirs:
            case torch.Tensor():
                self.same_tensor(ours, theirs)
            case torch.dtype():
                assert str(ours) == str(theirs)
            case dict():
                assert isinstance(ours, OrderedDictValue) == isinstance(theirs, OrderedDict)
                assert list(ours) == list(theirs)
                for key, value in theirs.items():
                    self.same(ours[key], value)
                if isinstance(theirs, OrderedDict):
                    self.same(ours.state, theirs.__dict__ or None)
            case list() | tuple():
                expected = SizeValue if isinstance(theirs, torch.Size) else type(theirs)
                assert type(ours) is expected
                for mine, other in zip(ours, theirs, strict=True):
                    self.same(mine, other)
            case Stub():
                self.calls += 1
                assert isinstance(ours, Constructed)
                assert ours.constructor == theirs.name
                self.same(ours.args, theirs.args)
                self.same(ours.state, theirs.state)
            case _:
                assert type(ours) is type(theirs)
                assert ours == theirs

    def same_tensor(self, ours: object, theirs: torch.Tensor) -> None:
        self.tensors += 1
        assert isinstance(ours, StoredTensor)
        assert str(theirs.dtype) == f"torch.{ours.storage.dtype}"
        assert (ours.shape, ours.strides) == (tuple(theirs.shape), tuple(theirs.stride()))
        assert ours.storage_base == theirs.storage_offset()
        place = self.places.setdefault(
            theirs.untyped_storage().data_ptr(), ours.storage.start_nbytes
        )
        assert place == ours.storage.start_nbytes or not theirs.numel()
        start = ours.storage.start_nbytes
        whole = bytearray(self.content[start : start + ours.storage.nbytes])
        if theirs.numel():
            flat = torch.frombuffer(whole, dtype=torch.uint8).view(theirs.dtype)
            read = flat.as_strided(ours.shape, ours.strides, ours.storage_base)
            assert torch.equal(
                read.contiguous().reshape(-1).view(torch.uint8),
                theirs.detach().contiguous().reshape(-1).view(torch.uint8),
            )


def compared(path: Path) -> Comparison:
    file = open_torch_zip(path)
    theirs = torch.load(path, weights_only=False, pickle_module=STUB_PICKLE)
    comparison = Comparison(file)
    comparison.same(file.value, theirs)
    return comparison


def test_every_file_of_the_real_checkpoints_is_read_as_torch_reads_it(shared: Path) -> None:
    paths = sorted((shared / "checkpoints").rglob("*.pt"))
    tensors = calls = 0
    for path in paths:
        comparison = compared(path)
        tensors += comparison.tensors
        calls += comparison.calls

    assert len(paths) >= 80
    assert tensors > 1000
    assert calls > 500


def dtypes() -> list[str]:
    return [
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    ]


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    numel = torch.Size(shape).numel()
    if name == "bool":
        return (torch.arange(numel) % 3 == 0).reshape(shape)
    content = bytearray(i * 37 % 251 for i in range(numel * itemsize))
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", dtypes())
def test_every_dtype_is_read_in_every_protocol(tmp_path: Path, name: str, protocol: int) -> None:
    value = {"a": of_dtype(name, 4, 6), "rows": [of_dtype(name, 2)], "dtype": getattr(torch, name)}
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)

    assert compared(tmp_path / "a.pt").tensors == 2


def test_the_smallest_dtypes_of_the_catalogue_are_all_tested() -> None:
    from restride.checkpoint.dtypes import DTYPES

    assert set(dtypes()) == set(DTYPES)


def test_views_of_one_storage_are_read(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    value = {
        "whole": whole,
        "transposed": whole.permute(2, 0, 1),
        "row": whole[1],
        "column": whole[:, :, 3],
        "steps": whole[::2, 1:, ::3],
        "expanded": whole[:, :1].expand(3, 7, 5),
        "scalar": whole[2, 3, 4],
        "empty": whole[:, 4:],
        "beyond": whole[3:, 4:],
        "bool": torch.tensor(data=True),
        "none": torch.empty(0),
        "shape": torch.empty(0, 3, 0),
    }
    torch.save(value, tmp_path / "a.pt")

    comparison = compared(tmp_path / "a.pt")

    assert comparison.tensors == len(value)
    assert len({v.storage.key for v in open_torch_zip(tmp_path / "a.pt").value.values()}) == 4


def test_modules_and_optimizers_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    value = {
        "module": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "shapes": OrderedDict((name, p.shape) for name, p in model.named_parameters()),
        "rng": torch.get_rng_state(),
    }
    torch.save(value, tmp_path / "a.pt")

    comparison = compared(tmp_path / "a.pt")

    assert comparison.tensors > 20
    state = open_torch_zip(tmp_path / "a.pt").value["module"].state
    assert list(state) == ["_metadata"]


class Mode(enum.Enum):
    FAST = 2


class Settings:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.weight.note = "has an attribute"
        self.mode = Mode.FAST
        self.device = torch.device("cuda", 1)


def test_objects_of_any_class_keep_their_tensors(tmp_path: Path) -> None:
    torch.save(Settings(), tmp_path / "a.pt")

    value = open_torch_zip(tmp_path / "a.pt").value

    assert value.constructor.name == "Settings"
    assert isinstance(value.state["weight"], StoredTensor)
    assert (value.state["mode"].constructor.name, value.state["mode"].args) == ("Mode", (2,))
    assert str(value.state["device"].constructor) == "torch.device"


def test_tensors_that_are_not_their_bytes_are_refused(tmp_path: Path) -> None:
    torch.save(torch.tensor([1 + 2j]).conj(), tmp_path / "a.pt")

    with pytest.raises(UnsupportedError, match=r"conjugate .*resolve_conj"):
        open_torch_zip(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_storage_stay_calls(tmp_path: Path) -> None:
    value = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.quint8),
    }
    torch.save(value, tmp_path / "a.pt")

    read = open_torch_zip(tmp_path / "a.pt").value

    assert [type(entry) for entry in read.values()] == [Constructed] * 3


def test_storages_themselves_are_read(tmp_path: Path) -> None:
    torch.save([torch.arange(5, dtype=torch.uint8).untyped_storage()], tmp_path / "a.pt")

    (storage,) = open_torch_zip(tmp_path / "a.pt").value

    content = (tmp_path / "a.pt").read_bytes()
    assert content[storage.start_nbytes :][: storage.nbytes] == bytes(range(5))


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    assert compared(tmp_path / "a.pt").tensors == 1


def test_an_old_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    with pytest.raises(UnsupportedError, match=r"torch before 1\.6; .*torch\.save"):
        open_torch_zip(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore")
def test_a_script_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))

    with pytest.raises(RestrideError, match="TorchScript"):
        open_torch_zip(tmp_path / "a.pt")


def test_the_files_of_the_test_kit_are_files_that_torch_reads() -> None:
    value = torch.load(io.BytesIO(valid_torch_file()))

    assert value["step"] == 7
    assert value["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
