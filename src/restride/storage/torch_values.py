"""What torch's own pickles are made of: storages by persistent id, and tensors as views of them.

The names and arguments are those of ``torch._utils`` and ``torch.serialization``, which keep them
for ever, since every file that was ever saved refers to them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from restride.checkpoint.dtypes import DTYPES, dtype_named
from restride.checkpoint.values import GlobalName, SizeValue, Storage, StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.storage.pickle_machine import Rule, Rules, shown
from restride.storage.pickle_vm import PLAIN_RULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Value
    from restride.storage.pickle_machine import Machine
    from restride.storage.zip_directory import ZipRecord

__all__ = ["STORAGE_DTYPES", "TORCH_RULES", "StorageTable", "view_of"]

STORAGE_DTYPES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
    # Quantised ones hold integers; their meaning is in the call that stays a `Constructed`.
    "QUInt8Storage": "uint8",
    "QInt8Storage": "int8",
    "QInt32Storage": "int32",
}
_STORAGE_MODULES: Final = frozenset({"torch", "torch.storage", "torch.cuda"})
_LARGEST: Final = (1 << 63) - 1
_LARGEST_NDIM: Final = 64


class StorageTable(Struct):
    """Resolves the persistent ids of one file.

    Attributes:
        file: Name of the file, as the reader was given it.
        records: Records of the file, by name.
        storages: Storages that were referred to, by key.
    """

    file: str
    records: Mapping[str, ZipRecord]
    storages: dict[str, Storage]

    def resolve(self, persistent_id: Value) -> Value:
        """Find the storage that a persistent id names.

        Raises:
            CorruptError: It names none, or contradicts the record.
            UnsupportedError: Its element type is not known.
        """
        match persistent_id:
            case ("storage", GlobalName() as kind, str(key), str(), int(numel)) | (
                "storage",
                GlobalName() as kind,
                str(key),
                str(),
                int(numel),
                None,
            ):
                return self.storage(_storage_dtype(kind), key, numel)
            case _:
                raise CorruptError("a persistent id is not that of a storage")

    def storage(self, dtype: DType, key: str, numel: int) -> Storage:
        """Find the storage of a key.

        Raises:
            CorruptError: There is none, or it has another size or another type.
        """
        record = self.records.get(f"data/{key}")
        if record is None:
            raise CorruptError(f"storage {shown(key)} has no record in the file")
        # A storage of another type's making may end with bytes that are no whole element.
        if numel != record.nbytes // dtype.itemsize_nbytes:
            raise CorruptError(
                f"storage {key!r} has {numel} elements of {dtype}, its record {record.nbytes} bytes"
            )
        nbytes = numel * dtype.itemsize_nbytes
        storage = Storage(self.file, key, dtype, record.start_nbytes, nbytes)
        if self.storages.setdefault(key, storage) != storage:
            raise CorruptError(
                f"storage {key!r} is read as {self.storages[key].dtype} and as {dtype}"
            )
        return self.storages[key]


def view_of(storage: Storage, storage_base: int, shape: Value, strides: Value) -> StoredTensor:
    """A strided view of a storage, with its bounds checked.

    Raises:
        CorruptError: A number is no index, or an element is outside of the storage.

    Examples:
        >>> from restride.checkpoint.dtypes import DTYPES
        >>> storage = Storage("a.pt", "0", DTYPES["int16"], 64, 12)
        >>> view_of(storage, 1, (2, 2), (3, 1)).start_nbytes
        66
    """
    sizes = _indices("shape", shape)
    steps = _indices("strides", strides)
    if len(sizes) != len(steps):
        raise CorruptError(f"a tensor has {len(sizes)} sizes and {len(steps)} strides")
    _indices("first element", (storage_base,))
    numel = prod(sizes)
    if numel > _LARGEST:
        raise CorruptError(f"a tensor of shape {sizes} has more elements than can be counted")
    last = storage_base + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    holds = storage.nbytes // storage.dtype.itemsize_nbytes
    if numel and last >= holds:
        raise CorruptError(
            f"a tensor of shape {sizes} reaches element {last} of storage {storage.key!r}, "
            f"which has {holds}"
        )
    return StoredTensor(storage, storage_base, sizes, steps)


def _storage_dtype(kind: GlobalName) -> DType:
    if kind.module not in _STORAGE_MODULES or kind.name not in STORAGE_DTYPES:
        raise UnsupportedError(f"storages of type {shown(kind)} are not known")
    return DTYPES[STORAGE_DTYPES[kind.name]]


def _indices(what: str, values: Value) -> tuple[int, ...]:
    """Check that values are plain integers that can index an element."""
    if not isinstance(values, tuple):
        raise CorruptError(f"{what} of a tensor is {shown(values)}")
    if len(values) > _LARGEST_NDIM:
        raise CorruptError(f"{what} of a tensor has {len(values)} dimensions")
    checked: list[int] = []
    for value in values:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise CorruptError(f"{what} of a tensor has {shown(value)}")
        checked.append(value)
    return tuple(checked)


# Calls that make tensors. Whether a gradient is wanted, hooks, and attributes that were set from
# outside say nothing about the bytes.


def _tensor(_: Machine, args: tuple[Value, ...]) -> Value:
    match args:
        case (Storage() as storage, int(base), shape, strides):
            return view_of(storage, base, shape, strides)
        case _:
            raise _malformed("_rebuild_tensor", args)


def _tensor_v2(_: Machine, args: tuple[Value, ...]) -> Value:
    match args:
        case (Storage() as storage, int(base), shape, strides, _, _, *metadata):
            _require_plain(metadata)
            return view_of(storage, base, shape, strides)
        case _:
            raise _malformed("_rebuild_tensor_v2", args)


def _tensor_v3(_: Machine, args: tuple[Value, ...]) -> Value:
    """The version for types that have no storage class: the storage is one of bytes."""
    match args:
        case (
            Storage() as storage,
            int(base),
            shape,
            strides,
            _,
            _,
            GlobalName("torch", name),
            *metadata,
        ):
            _require_plain(metadata)
            return view_of(replace(storage, dtype=dtype_named(name)), base, shape, strides)
        case _:
            raise _malformed("_rebuild_tensor_v3", args)


def _parameter(_: Machine, args: tuple[Value, ...]) -> Value:
    """A parameter is its tensor; one of a class of its own stays a call."""
    match args:
        case (StoredTensor() as tensor, _, _) | (StoredTensor() as tensor, _, _, _):
            return tensor
        case _:
            return None


def _typed(machine: Machine, args: tuple[Value, ...]) -> Value:
    """A tensor with attributes; one of a class of its own stays a call."""
    match args:
        case (GlobalName() as function, GlobalName() as cls, tuple(inner), _) if (
            function in _TENSOR_RULES and cls in _TENSOR_CLASSES
        ):
            return _TENSOR_RULES[function](machine, inner)
        case _:
            return None


def _from_cpu(_: Machine, args: tuple[Value, ...]) -> Value:
    """A tensor of a device that has no storages, saved through the CPU."""
    match args:
        case (StoredTensor() as tensor, GlobalName("torch", name), _, _) if (
            tensor.storage.dtype.name == name
        ):
            return tensor
        case _:
            return None


def _size(_: Machine, args: tuple[Value, ...]) -> Value:
    match args:
        case (tuple(shape),):
            return SizeValue(_indices("torch.Size", shape))
        case _:
            raise _malformed("torch.Size", args)


def _require_plain(metadata: list[Value]) -> None:
    """Refuse a tensor whose elements are not what its bytes say."""
    match metadata:
        case [] | [None]:
            return
        case [dict(flags)] if not any(flags.values()):
            return
        case _:
            raise UnsupportedError(
                "a tensor is stored as the conjugate or the negative of its bytes",
                remedy="save it after .resolve_conj() and .resolve_neg()",
            )


def _malformed(function: str, args: tuple[Value, ...]) -> CorruptError:
    kinds = ", ".join(type(arg).__name__ for arg in args[:_LARGEST_NDIM])
    return CorruptError(f"{function} gets arguments that make no tensor: ({kinds})")


def _named(module: str, **rules: Rule) -> dict[GlobalName, Rule]:
    return {GlobalName(module, name): rule for name, rule in rules.items()}


_TENSOR_CLASSES: Final = frozenset(
    {
        GlobalName("torch", "Tensor"),
        GlobalName("torch._tensor", "Tensor"),
        GlobalName("torch.nn.parameter", "Parameter"),
        GlobalName("torch.nn.parameter", "Buffer"),
    }
)
_TENSOR_RULES: Final = _named(
    "torch._utils",
    _rebuild_tensor=_tensor,
    _rebuild_tensor_v2=_tensor_v2,
    _rebuild_tensor_v3=_tensor_v3,
    _rebuild_parameter=_parameter,
    _rebuild_parameter_with_state=_parameter,
    _rebuild_device_tensor_from_cpu_tensor=_from_cpu,
)
TORCH_RULES: Final[Rules] = {
    **PLAIN_RULES,
    **_TENSOR_RULES,
    **_named("torch._tensor", _rebuild_from_type_v2=_typed),
    **_named("torch", Size=_size),
}
