"""One ``mp_rank_TT_model_states.pt``: weights, shapes in flat order, what is tied or frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field

__all__ = ["CONSUMED_KEYS", "ModelFile", "Shapes", "read_model_file"]

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


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the model file of one tensor-parallel rank says.

    Attributes:
        name: Name of the file below the root of the checkpoint.
        tp: Tensor-parallel rank, from the name.
        root: Everything in the file.
        weights: Tensors of the module, and of the frozen fragments that it lacks.
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
    tp: int
    root: Field
    weights: Mapping[str, StoredTensor]
    extras: tuple[Field, ...]
    param_shapes: tuple[Shapes, ...] | None
    frozen: Shapes
    buffer_names: frozenset[str]
    aliases: Mapping[str, str]
    dp_size: int | None
    tp_size: int | None


def read_model_file(root: Field, name: str, tp: int) -> ModelFile:
    """Read the inert content of a model file.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: Parts of it contradict each other.
        UnsupportedError: It is of a pipeline-parallel or ZeRO-0 run.
    """
    _refuse_others(root)
    weights: dict[str, StoredTensor] = {}
    extras: list[Field] = []
    for key, entry in root.at("module").items():
        if isinstance(entry.value, StoredTensor):
            weights[key] = entry.value
        else:
            extras.append(entry)
    frozen = _shapes(root.get("frozen_param_shapes"))
    _add_fragments(weights, frozen, root)
    groups = root.get("param_shapes")
    buffers, shared = root.get("buffer_names"), root.get("shared_params")
    model = ModelFile(
        name,
        tp,
        root,
        weights,
        tuple(extras),
        None if groups is None else tuple(_shapes(group) for group in groups.elements()),
        frozen,
        frozenset(buffers.texts() if buffers else ()),
        {key: entry.text() for key, entry in shared.items()} if shared else {},
        _world_size(root, "dp_world_size"),
        _world_size(root, "mp_world_size"),
    )
    _check_shapes(model)
    return model


def _refuse_others(root: Field) -> None:
    if not root.is_mapping:
        raise root.wrong("the dict of a model file")
    dimensions = root.get("checkpoint_parallel_dimensions")
    stages = dimensions.get("pp_degree") if dimensions else None
    if stages is not None and stages.integer(at_least=1) > 1:
        raise UnsupportedError(
            f"is of a run with {stages.integer()} pipeline stages",
            where=root.where,
            remedy="checkpoints of one stage can be read",
        )
    if root.get("optimizer") is not None:
        raise UnsupportedError(
            "is a ZeRO-0 checkpoint: the optimizer state is inside the model file, by number and "
            "without names",
            where=root.where,
            remedy="ZeRO-1 and ZeRO-2 checkpoints can be read",
        )
    if root.get("module") is None:
        raise FormatError(
            "has no 'module': it is no model file of DeepSpeed, or one of a pipeline-parallel run "
            "with its weights in layer files",
            where=root.where,
        )


def _shapes(stored: Field | None) -> dict[str, Shape]:
    return {} if stored is None else {name: entry.shape() for name, entry in stored.items()}


def _add_fragments(weights: dict[str, StoredTensor], frozen: Shapes, root: Field) -> None:
    """Use the separate copy of a frozen parameter where the module does not have it."""
    fragments = root.get("frozen_param_fragments")
    if fragments is None:
        return
    for name, entry in fragments.items():
        tensor = entry.tensor()
        if name in frozen and tensor.shape != frozen[name]:
            raise CorruptError(
                f"has shape {tensor.shape}, frozen_param_shapes says {frozen[name]}",
                where=entry.where,
            )
        weights.setdefault(name, tensor)


def _world_size(root: Field, key: str) -> int | None:
    size = root.get(key)
    return None if size is None else size.integer(at_least=1)


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
