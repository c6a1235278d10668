"""One ``*_model_states.pt``: weights, shapes in flat order, what is tied or frozen.

Under ZeRO-3 every (dp, tp) rank writes one. Its module has the names and dtypes of the parameters,
and of each an empty tensor instead of the weight: the values are in the optimizer's partitions, or
for frozen parameters in `frozen_param_fragments`.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import Constructed, GlobalName, StoredTensor
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.formats.deepspeed._settings import is_enabled
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._fields import Field

__all__ = ["CONSUMED_KEYS", "ModelFile", "Shapes", "configured_dtype", "read_model_file"]

Shapes: TypeAlias = "Mapping[str, Shape]"

CONSUMED_KEYS: Final = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
    }
)
"""Top-level keys that become tensors and layouts; all others are carried as values."""

# Where torch keeps the functions that make a tensor again of what it was saved as.
_REBUILDING: Final = frozenset({"torch._utils", "torch._tensor"})
_PRECISIONS: Final = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16",)}


class ModelFile(Frozen):
    """What the model file of one tensor-parallel rank says; of one (dp, tp) rank under ZeRO-3.

    Attributes:
        name: Name of the file below the root of the checkpoint.
        dp: Data-parallel rank under ZeRO-3, else None: the file is that of all.
        tp: Tensor-parallel rank, from the name.
        root: Everything in the file.
        dtypes: Type of every tensor of the module, in its order.
        weights: Tensors of the module, and of the frozen fragments that it lacks. The empty tensors
            that ZeRO-3 leaves of partitioned parameters are not among them.
        fragments: This rank's chunks of frozen parameters, under ZeRO-3.
        optimizer: The optimizer's state, where it is in the model file: without ZeRO.
        extras: Entries of the module that are no tensors.
        param_shapes: For each optimizer group the shapes of this rank's shards, in the order of the
            flat buffer. None where there is no ZeRO optimizer.
        frozen: Parameters that the optimizer does not own, with their shapes.
        buffer_names: Names of the buffers.
        aliases: Other names of parameters: name that is not stored to name that is.
        dp_size: Data-parallel world size, where it is said.
        tp_size: Model-parallel world size, where it is said.
    """

    name: str
    dp: int | None
    tp: int
    root: Field
    dtypes: Mapping[str, DType]
    weights: Mapping[str, StoredTensor]
    fragments: Mapping[str, StoredTensor]
    optimizer: Field | None
    extras: tuple[Field, ...]
    param_shapes: tuple[Shapes, ...] | None
    frozen: Shapes
    buffer_names: frozenset[str]
    aliases: Mapping[str, str]
    dp_size: int | None
    tp_size: int | None


def read_model_file(
    root: Field, name: str, tp: int, dp: int | None = None, *, before: ModelFile | None = None
) -> ModelFile:
    """Read the inert content of a model file.

    Args:
        root: The content.
        name: Name of the file.
        tp: Tensor-parallel rank.
        dp: Data-parallel rank, where the file is that of one: under ZeRO-3.
        before: What another file was read as. Those of a thousand ranks may have one value for
            the shapes, which are read once then.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: Parts of it contradict each other.
        UnsupportedError: A tensor of the module is not what its bytes say.
    """
    _refuse_others(root)
    stored, extras = _module(root)
    dtypes = {key: tensor.storage.dtype for key, tensor in stored.items()}
    frozen = _shapes(root.get("frozen_param_shapes"))
    fragments = root.get("frozen_param_fragments")
    chunks = {key: entry.tensor() for key, entry in fragments.items()} if fragments else {}
    groups = root.get("param_shapes")
    buffers, shared = root.get("buffer_names"), root.get("shared_params")
    buffer_names = frozenset(buffers.texts() if buffers else ())
    if dp is None:
        _add_whole(stored, chunks, frozen, root)
        weights, chunks = stored, {}
    else:
        weights = _without_placeholders(stored, frozen, buffer_names)
    param_shapes = None
    if groups is not None and before is not None and _is_same(groups, before.root):
        param_shapes = before.param_shapes
    elif groups is not None:
        param_shapes = tuple(_shapes(group) for group in groups.elements())
    parameters = {*frozen, *chain.from_iterable(param_shapes or ())}
    _check_names(root, parameters, buffer_names, extras)
    model = ModelFile(
        name=name,
        dp=dp,
        tp=tp,
        root=root,
        dtypes=dtypes,
        weights=weights,
        fragments=chunks,
        optimizer=root.get("optimizer"),
        extras=extras,
        param_shapes=param_shapes,
        frozen=frozen,
        buffer_names=buffer_names,
        aliases={key: entry.text() for key, entry in shared.items()} if shared else {},
        dp_size=_world_size(root, "dp_world_size"),
        tp_size=_world_size(root, "mp_world_size"),
    )
    _check_shapes(model)
    return model


def configured_dtype(root: Field) -> DType | None:
    """Return the type that the configuration trains in, where there is a configuration."""
    config = root.get("ds_config")
    if config is None or not config.is_mapping:
        return None
    for dtype, keys in _PRECISIONS.items():
        for key in keys:
            section = config.get(key)
            if section and section.is_mapping and is_enabled(section.get("enabled")):
                return DTYPES[dtype]
    return DTYPES["float32"]


def _refuse_others(root: Field) -> None:
    if not root.is_mapping:
        raise root.wrong("the dict of a model file")
    if root.get("module") is None:
        raise FormatError(
            "has no 'module': it is no model file of DeepSpeed, or one of a pipeline-parallel run "
            "with its weights in layer files",
            where=root.where,
        )


def _module(root: Field) -> tuple[dict[str, StoredTensor], tuple[Field, ...]]:
    """The tensors of the module, and its entries that are none."""
    tensors: dict[str, StoredTensor] = {}
    extras: list[Field] = []
    for key, entry in root.at("module").items():
        if isinstance(entry.value, StoredTensor):
            tensors[key] = entry.value
        elif _is_tensor_of_a_kind(entry.value):
            raise UnsupportedError(
                "is a tensor of a subclass, or a sparse, quantized or empty kind of one: its "
                "elements are not its bytes",
                where=entry.where,
                remedy="save it as a plain tensor",
            )
        else:
            extras.append(entry)
    return tensors, tuple(extras)


def _is_tensor_of_a_kind(value: Value) -> bool:
    """Whether torch would make a tensor of it, and it is not read as one."""
    made = value.constructor if isinstance(value, Constructed) else None
    return (
        isinstance(made, GlobalName)
        and made.module in _REBUILDING
        and made.name.startswith("_rebuild")
    )


def _is_same(stored: Field, root: Field) -> bool:
    """Whether another file has the very same value in that place."""
    known = root.get(str(stored.step))
    return known is not None and known.value is stored.value


def _shapes(stored: Field | None) -> dict[str, Shape]:
    return {} if stored is None else {name: entry.shape() for name, entry in stored.items()}


def _add_whole(
    weights: dict[str, StoredTensor],
    fragments: Mapping[str, StoredTensor],
    frozen: Shapes,
    root: Field,
) -> None:
    """Use the separate copy of a frozen parameter where the module does not have it."""
    for name, tensor in fragments.items():
        if name in frozen and tensor.shape != frozen[name]:
            raise CorruptError(
                f"has shape {tensor.shape}, frozen_param_shapes says {frozen[name]}",
                where=f"{root.where}: frozen_param_fragments[{name!r}]",
            )
        weights.setdefault(name, tensor)


def _without_placeholders(
    stored: Mapping[str, StoredTensor], frozen: Shapes, buffers: frozenset[str]
) -> dict[str, StoredTensor]:
    """Keep what the module has of itself; a parameter may really be without elements."""
    return {
        name: tensor
        for name, tensor in stored.items()
        if prod(tensor.shape) or name in buffers or frozen.get(name) == tensor.shape
    }


def _world_size(root: Field, key: str) -> int | None:
    size = root.get(key)
    return None if size is None else size.integer(at_least=1)


def _check_names(
    root: Field,
    parameters: AbstractSet[str],
    buffers: AbstractSet[str],
    extras: Sequence[Field],
) -> None:
    """What the file calls a parameter or a buffer is one of both, and a tensor in the module."""
    for name in sorted(parameters & buffers):
        raise CorruptError(
            f"{name!r} is a buffer here, and a parameter where shapes are given",
            where=f"{root.where}: buffer_names",
        )
    for entry in extras:
        if entry.value is not None and (entry.step in parameters or entry.step in buffers):
            entry.tensor()


def _check_shapes(model: ModelFile) -> None:
    where = model.root.where
    for alias, name in model.aliases.items():
        if name in model.aliases or name == alias:
            raise CorruptError(
                f"{alias!r} is shared with {name!r}, which is an alias itself",
                where=f"{where}: shared_params",
            )
        known = model.weights.get(alias), model.weights.get(name)
        if known[0] is not None and known[1] is not None and known[0].shape != known[1].shape:
            raise CorruptError(
                f"{alias!r} of shape {known[0].shape} is shared with {name!r} "
                f"of shape {known[1].shape}",
                where=f"{where}: shared_params",
            )
    seen: dict[str, int] = {}
    for number, shapes in enumerate(model.param_shapes or ()):
        for name, shape in shapes.items():
            if name in seen:
                raise CorruptError(
                    f"{name!r} is in group {seen[name]} as well",
                    where=f"{where}: param_shapes[{number}]",
                )
            seen[name] = number
            weight = model.weights.get(name)
            if weight is not None and weight.shape != shape:
                raise CorruptError(
                    f"{name!r} has shape {weight.shape} in the module, {shape} in param_shapes",
                    where=f"{where}: param_shapes[{number}]",
                )
    for name, shape in model.frozen.items():
        weight = model.weights.get(name)
        if weight is not None and weight.shape != shape:
            raise CorruptError(
                f"{name!r} has shape {weight.shape} in the module, {shape} in frozen_param_shapes",
                where=f"{where}: frozen_param_shapes",
            )
