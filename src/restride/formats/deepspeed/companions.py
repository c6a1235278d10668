"""What a universal folder says of the tensors beside their elements, and of the source's geometry.

DeepSpeed restores a universal folder by what is in it: beside each array a few marks that say how
it was joined, and the state of the optimizer without its arrays (deepspeed 0.19.8
`checkpoint/ds_to_universal.py`). A parameter whose layout an affine map describes has no marks.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from msgspec import field

from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.autoep import read_experts
from restride.formats.deepspeed._experts.native_cut import names_on_ranks
from restride.formats.deepspeed._patterns import PatternTable
from restride.formats.deepspeed._placement import (
    AVERAGED,
    REPLICATED,
    ROW_PARALLEL,
    TWO_SUB_PARAMS,
    VOCABULARY,
)
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._experts.autoep import ExpertParameter
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._run import Run

__all__ = ["Companions", "described_shapes", "read_companions", "read_geometry"]

_INFO: Final = "universal_checkpoint_info"
_SUB_PARAMS: Final = "parameter_with_sub_params"
_WIDTHS_SINCE: Final = 0.4
# What the peer leaves in the optimizer's state although it is of the source's ranks.
_GEOMETRY: Final = (
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "ds_zero_partition_groups",
    _INFO,
)
_SUB_PARAM_CLASS: Final = GlobalName("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


class Companions(Frozen):
    """What goes with the arrays of a checkpoint into a universal folder.

    Attributes:
        marks: For each trained tensor, what its files say of it besides the array.
        shapes: For some tensors, the shape that the array has in its files: the same elements in
            the same order.
        experts: Stacked parameters of mixture-of-experts layers, by name.
    """

    marks: Mapping[str, Mapping[str, Value]]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    experts: Mapping[str, ExpertParameter] = field(default_factory=dict)


def read_companions(run: Run, catalog: Catalog, training: Training) -> Companions:
    """Find out how the peer would mark each trained tensor.

    Args:
        run: The model files: of a sharded checkpoint, or those in a universal folder.
        catalog: What the checkpoint holds.
        training: What goes with the tensors.

    Raises:
        FormatError: The model files describe parameters in another way than they must.
        CorruptError: What they say does not fit the shapes.
    """
    first = run.models[0]
    experts = _experts(first)
    marks = _Marks(first, experts, names_on_ranks(catalog))
    trained = {name for group in training.groups for name in group.names}
    shapes = {
        tensor.name: tensor.layout.full_shape
        for tensor in catalog.tensors
        if tensor.name in trained
    }
    return Companions(
        marks={name: marks.of(name, shape) for name, shape in shapes.items()},
        shapes=dict(marks.shapes(shapes)),
        experts=experts,
    )


def described_shapes(run: Run, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes that parameters have in a universal folder, where these are not their own.

    Args:
        run: The model files.
        shapes: Shape of each parameter, by name.

    Raises:
        FormatError: The model files describe parameters in another way than they must.
        CorruptError: What they say does not fit the shapes.
    """
    return dict(_Marks(run.models[0], _experts(run.models[0])).shapes(shapes))


def read_geometry(state: Field, dp_size: int) -> dict[str, Value]:
    """Read what an optimizer's state says of the ranks of the source, as the peer leaves it.

    Nothing is padded any more; and every group of ZeRO-1 and ZeRO-2 is counted as one over all
    data-parallel ranks.

    Args:
        state: The state of the optimizer as a whole.
        dp_size: Data-parallel ranks of the source.
    """
    found = {key: entry.value for key in _GEOMETRY if (entry := state.get(key)) is not None}
    for key, number in (("group_paddings", 0), ("partition_count", dp_size)):
        stored = state.get(key)
        if stored is not None and stored.is_sequence:
            found[key] = [number] * len(stored.elements())
    return found


def _experts(model: ModelFile) -> dict[str, ExpertParameter]:
    return read_experts(model.root.get("ds_autoep_layers") or model.root.get("autoep_layers"))


class _Marks:
    """What DeepSpeed's own converter says of each parameter, and in which shape it writes it."""

    def __init__(
        self,
        model: ModelFile,
        experts: Mapping[str, ExpertParameter],
        native: Mapping[str, str | None] | None = None,
    ) -> None:
        info = model.root.get(_INFO)
        self._experts = experts
        self._native = native or {}
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
        said = self._native.get(name, name)
        if said is None:
            return {}
        name = said
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
            said = self._native.get(name, name)
            if name in self._experts or said is None:  # mapped as what one rank has of the stack
                continue
            maps, parts = self._maps.find(said), self._parts.find(said)
            if maps:
                logical = maps[0][1].at("logical_shape")
                if prod(logical.shape()) != prod(shape):
                    raise CorruptError(
                        f"{name!r} has shape {shape}, its map is of shape {logical.shape()}",
                        where=logical.where,
                    )
                yield name, logical.shape()
            elif parts and not {REPLICATED, AVERAGED, TWO_SUB_PARAMS} & {
                category for _, category in self._categories.find(said)
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
