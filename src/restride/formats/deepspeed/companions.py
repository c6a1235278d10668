"""What goes with the tensors of a ZeRO-1 or ZeRO-2 checkpoint into a universal folder.

DeepSpeed restores a universal folder by what is in it: the state of the optimizer without its
tensors, a copy of the model file of each model-parallel rank, and beside each array a few marks
that say how it was joined (deepspeed 0.19.8 `checkpoint/ds_to_universal.py`). A parameter whose
layout an affine map describes has none of these marks.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.companions import CarriedFile, Companions
from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts import read_experts
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._files import find_tag
from restride.formats.deepspeed._model import read_model_file
from restride.formats.deepspeed._optimizer import read_zero_file
from restride.formats.deepspeed._patterns import PatternTable
from restride.formats.deepspeed._placement import (
    AVERAGED,
    REPLICATED,
    ROW_PARALLEL,
    TWO_SUB_PARAMS,
    VOCABULARY,
)
from restride.storage.torch_zip import open_torch_zip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._experts import ExpertParameter
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._optimizer import ZeroFile

__all__ = ["read_companions"]

_FORMATS: Final = frozenset({"deepspeed zero-1", "deepspeed zero-2"})
_INFO: Final = "universal_checkpoint_info"
_EXPERT_LAYERS: Final = "ds_autoep_layers"
_OLD_EXPERT_LAYERS: Final = "autoep_layers"
_EXPERT_PATTERNS: Final = "expert_parameter_patterns"
_EXPERT_PATTERN: Final = r"\.experts\.w[123]$"
_SUB_PARAMS: Final = "parameter_with_sub_params"
_WIDTHS_SINCE: Final = 0.4
# What is told of a layer of experts where its number of ranks no longer counts.
_EXPERT_FIELDS: Final = (
    "moe_layer_id",
    "module_path",
    "expert_key_prefix",
    "num_experts",
    "num_local_experts",
    "ep_size",
)
# What becomes the files of the parameters.
_SHARDED: Final = frozenset(
    {"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"}
)
_SUB_PARAM_CLASS: Final = GlobalName("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def read_companions(catalog: Catalog) -> Companions:
    """Read again, from the files of a catalog, what its tensors need to be restored.

    Args:
        catalog: What `read_catalog` gave.

    Raises:
        UnsupportedError: It is of another stage, has no optimizer files, or they have no parameter
            groups.
        FormatError, ExecutionError: As for `read_catalog`.

    Cost:
        The metadata of the model files and of one optimizer file is read.
    """
    root = Path(catalog.root)
    if catalog.format not in _FORMATS:
        raise UnsupportedError(
            f"a universal folder cannot be made of {catalog.format} yet",
            where=str(root),
            remedy="it can of deepspeed zero-1 and zero-2; or convert with --to safetensors",
        )
    _, below = find_tag(root)
    names = {file.name.removeprefix(below): n for n, file in enumerate(catalog.files)}
    models = [name for name in names if name.startswith("mp_rank_")]
    optimizer = [
        name for name in names if name.endswith("zero_pp_rank_0_mp_rank_00_optim_states.pt")
    ]
    if not optimizer:
        raise UnsupportedError(
            "has no optimizer file of the first rank; a universal folder is made of them",
            where=str(root / below),
            remedy="convert the weights with --to safetensors",
        )
    roots = {
        name: Field(open_torch_zip(root / below / name).value, below + name) for name in models
    }
    zero_root = Field(open_torch_zip(root / below / optimizer[0]).value, below + optimizer[0])
    zero = read_zero_file(zero_root, below + optimizer[0], 0, 0)
    first = read_model_file(roots[models[0]], below + models[0], 0)
    experts = read_experts(_expert_layers(first.root))
    marks = _Marks(first, experts)
    trained = [name for group in first.param_shapes or () for name in group]
    shapes = {t.name: t.layout.full_shape for t in catalog.tensors}
    return Companions(
        tag=below.removesuffix("/") or root.resolve().name,
        optimizer=_optimizer_state(zero, catalog.mesh.axis_size("dp")),
        files=tuple(CarriedFile(name, names[name], _changed(roots[name])) for name in models),
        marks={name: marks.of(name, shapes[name]) for name in trained if name in shapes},
        shapes=dict(marks.shapes({name: shapes[name] for name in trained if name in shapes})),
        scalars=_scalars(first, zero),
    )


def _expert_layers(root: Field) -> Field | None:
    return root.get(_EXPERT_LAYERS) or root.get(_OLD_EXPERT_LAYERS)


def _optimizer_state(zero: ZeroFile, dp_size: int) -> Value:
    """Everything but the flat tensors, with the hyperparameters of the groups.

    Nothing is padded any more; and every group is counted as one over all data-parallel ranks, as
    the peer does.
    """
    if not zero.param_groups:
        raise UnsupportedError(
            "has no parameter groups: elastic_checkpoint leaves the hyperparameters out, and a "
            "universal folder needs them",
            where=zero.state.where,
            remedy="save the checkpoint without elastic_checkpoint",
        )
    state: dict[Value, Value] = {
        key: entry.value for key, entry in zero.state.items() if key not in _SHARDED
    }
    for key, number in (("group_paddings", 0), ("partition_count", dp_size)):
        stored = zero.state.get(key)
        if stored is not None and stored.is_sequence:
            state[key] = [number] * len(stored.elements())
    return {**state, "param_groups": [group.value for group in zero.param_groups]}


def _changed(root: Field) -> Value:
    """A model file of a run with experts, told how universal folders name them; else None."""
    layers = _expert_layers(root)
    if layers is None:
        return None
    info = root.get(_INFO)
    return {
        **dict(_entries(root)),
        _INFO: {
            **(dict(_entries(info)) if info else {}),
            _EXPERT_PATTERNS: [_EXPERT_PATTERN],
            _EXPERT_LAYERS: [
                {key: entry.at(key).value for key in _EXPERT_FIELDS if entry.get(key)}
                for entry in layers.elements()
            ],
        },
    }


def _entries(mapping: Field) -> Iterator[tuple[str, Value]]:
    """Entries of a mapping; one whose value is None is an entry too."""
    for key, entry in mapping.items():
        yield key, entry.value


def _scalars(model: ModelFile, zero: ZeroFile) -> dict[str, dict[str, Value]]:
    """The step, where the optimizer counts it in a plain number."""
    found: dict[str, dict[str, Value]] = {}
    for group, members in zip(zero.groups, model.param_shapes or (), strict=True):
        step = group.others.get("step")
        if step is not None and type(step.value) in {int, float}:
            found.update((name, {"step": step.value}) for name in members)
    return found


class _Marks:
    """What DeepSpeed's own converter says of each parameter, and in which shape it writes it."""

    def __init__(self, model: ModelFile, experts: Mapping[str, ExpertParameter]) -> None:
        info = model.root.get(_INFO)
        self._experts = experts
        self._categories = PatternTable(
            (pattern, category)
            for category in (REPLICATED, AVERAGED, TWO_SUB_PARAMS, ROW_PARALLEL, VOCABULARY)
            for pattern in _texts(info, category)
        )
        maps = info.get("affine_map") if info else None
        self._maps = PatternTable(maps.at("params").items() if maps else ())
        parts = info.get(_SUB_PARAMS) if info else None
        self._parts = PatternTable(
            (pattern, entry)
            for entry in (parts.elements() if parts else ())
            for pattern in entry.at("patterns").texts()
        )
        version = info.get("universal_checkpoint_version") if info else None
        said = version.value if version else None
        self._has_widths = isinstance(said, int | float) and said >= _WIDTHS_SINCE

    def of(self, name: str, shape: Shape) -> dict[str, Value]:
        """The marks of a parameter of that shape."""
        if name in self._experts:
            count = self._experts[name].expert_count
            return {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": count}
        found = {category for _, category in self._categories.find(name)}
        marks = self._joining(name, shape, found)
        return {**marks, "vocab_tensor": True} if VOCABULARY in found else marks

    def _joining(self, name: str, shape: Shape, found: set[str]) -> dict[str, Value]:
        if self._maps.find(name) or {REPLICATED, AVERAGED} & found:
            return {}
        if TWO_SUB_PARAMS in found:
            return {"cat_dim": 0, "param_n_sub_params": 2}
        parts = self._parts.find(name)
        if parts:
            return {"sub_param_shape": self._sub_param_shape(parts[0][1], shape)}
        return {"cat_dim": 1 if ROW_PARALLEL in found else 0}

    def _sub_param_shape(self, stored: Field, shape: Shape) -> Value:
        """An object of DeepSpeed's class; before version 0.4 a plain count meant equal sizes."""
        stored_sides = stored.at("shape").elements()
        sides = [side.value for side in stored_sides]
        dim = stored.at("partition_dim").integer()
        if dim >= len(sides):
            raise CorruptError(
                f"partition_dim is {dim} of {len(sides)} dimensions", where=stored.where
            )
        if not self._has_widths and not stored_sides[dim].is_sequence and dim < len(shape):
            count = stored_sides[dim].integer(at_least=1)
            if shape[dim] % count:
                raise CorruptError(
                    f"{shape[dim]} rows are no {count} sub-parameters of equal size",
                    where=stored.where,
                )
            sides[dim] = (shape[dim] // count,) * count
        state: dict[Value, Value] = {
            "patterns": stored.at("patterns").value,
            "shape": tuple(sides),
            "partition_dim": dim,
        }
        return Constructed(_SUB_PARAM_CLASS, state=state, is_new=True)

    def shapes(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        """Shapes of parameters that are described in dimensions of their own."""
        for name, shape in shapes.items():
            maps, parts = self._maps.find(name), self._parts.find(name)
            if maps:
                logical = maps[0][1].at("logical_shape")
                if prod(logical.shape()) != prod(shape):
                    raise CorruptError(
                        f"{name!r} has shape {shape}, its map is of shape {logical.shape()}",
                        where=logical.where,
                    )
                yield name, logical.shape()
            elif parts and not {REPLICATED, AVERAGED, TWO_SUB_PARAMS} & {
                category for _, category in self._categories.find(name)
            }:
                yield name, _viewed(parts[0][1], shape)


def _viewed(stored: Field, shape: Shape) -> Shape:
    """The shape that a description of sub-parameters gives; one dimension may be left open."""
    sides = [
        sum(side.integers()) if side.is_sequence else side.value
        for side in stored.at("shape").elements()
    ]
    if len(sides) == len(shape):
        return shape
    numel = prod(shape)
    known = [side for side in sides if isinstance(side, int) and side >= 0]
    filled = tuple(
        side if isinstance(side, int) and side >= 0 else numel // max(prod(known), 1)
        for side in sides
    )
    if len(known) < len(sides) - 1 or prod(filled) != numel:
        raise CorruptError(
            f"a tensor of {numel} elements has no view of the shape that is said of it",
            where=stored.where,
        )
    return filled


def _texts(info: Field | None, key: str) -> tuple[str, ...]:
    stored = info.get(key) if info else None
    return () if stored is None else stored.texts()
