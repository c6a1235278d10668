"""The names of what each stage of a pipeline without ZeRO trains, as far as they are known.

Its optimizer is in the model files, with numbers. An optimizer that was given named_parameters()
has the names beside them; else `number_stages` finds out what they are, with the ties of layers
that a user tells, or because nothing else is possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from restride.errors import UnsupportedError
from restride.formats.deepspeed._numbering import Slot, Unmatched
from restride.formats.deepspeed._stage_layers import TIED, tied_prefix
from restride.formats.deepspeed._stage_numbers import LayerShapes, NumberedStage, number_stages
from restride.formats.deepspeed._whole_file import read_whole_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._layers import OpenedLayer
    from restride.formats.deepspeed._whole_file import WholeFile

__all__ = ["StageNames", "name_stages"]

_COPIED = (
    "DeepSpeed's fused Adam joins the parameters of a group, and the layers of a pipeline are "
    "saved as copies, which do not say where one begins"
)


@dataclass(frozen=True, slots=True)
class StageNames:
    """What the stages of a pipeline call their parameters.

    Attributes:
        stages: For each stage the names of its module, in its order; empty where they are not
            known.
        problem: Why they are not.
        tied_to: Where ties are told, the key of its module for each layer that shares one.
        are_ties_known: Whether the names of tied modules are what they are called. Where it is only
            proved that no number is another one, the first module of a stage may be tied, too.
    """

    stages: tuple[tuple[str, ...], ...] = ()
    problem: str | None = None
    tied_to: Mapping[int, str] | None = None
    are_ties_known: bool = True


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The optimizers of one stage, and the buffers of its module."""

    files: tuple[WholeFile, ...]
    buffers: frozenset[str] = field(default_factory=frozenset)


def name_stages(
    stages: Sequence[Sequence[Field]],
    layers: Sequence[OpenedLayer],
    told: Mapping[str, tuple[int, ...]] | None,
) -> StageNames:
    """Find out what the stages of a pipeline without ZeRO train.

    Args:
        stages: Content of the model files, by stage and tensor-parallel rank.
        layers: Those with a file.
        told: For the key of each tied module, all layers that use it; None where nothing is told.

    Raises:
        FormatError: An optimizer is none, or a part of it has another type than it must have.
        CorruptError: Parts of one contradict each other.
        UnsupportedError: What is told is not so.
    """
    ranks = [_read(roots) for roots in stages]
    files = [file for own in ranks for file in own.files]
    if any(file.kind == "flat" for file in files):
        return StageNames(problem=_COPIED)
    tied_to = None
    if told is not None:
        tied_to = {number: key for key, numbers in told.items() for number in numbers}
    told_names = [names for file in files for names in file.names]
    if all(names is not None and all(map(_is_of_layer, names)) for names in told_names):
        return StageNames(tuple(_named(own) for own in ranks))
    buffers = frozenset().union(*(own.buffers for own in ranks))
    shapes = [_shapes(layer, buffers, tied_to or {}) for layer in layers]
    found = number_stages(shapes, [_numbered(own) for own in ranks], told)
    if not isinstance(found, Unmatched):
        return StageNames(found, None, tied_to, told is not None)
    if told is not None:
        raise UnsupportedError(
            found.reason,
            where=files[0].where,
            remedy="name all layers that use a tied module, by their place in the list that "
            "PipelineModule is given, as --pp-tied embed=0,5, or say --pp-tied none",
        )
    return StageNames(problem=found.reason)


def _is_of_layer(name: str) -> bool:
    """Whether a pipeline calls a parameter so; a script may have given its own names."""
    return name.partition(".")[0].isdecimal() or tied_prefix(name) is not None


def _read(roots: Sequence[Field]) -> _Ranks:
    files = tuple(read_whole_file(root.at("optimizer")) for root in roots)
    stored = [own for root in roots if (own := root.get("buffer_names"))]
    return _Ranks(files, frozenset(name for own in stored for name in own.texts()))


def _named(ranks: _Ranks) -> tuple[str, ...]:
    """What the optimizers of a stage were told."""
    listed = (name for file in ranks.files for names in file.names for name in names or ())
    return tuple(dict.fromkeys(listed))


def _shapes(layer: OpenedLayer, buffers: frozenset[str], tied_to: Mapping[int, str]) -> LayerShapes:
    """The parameters of a layer: all tensors that no stage calls a buffer."""
    key = tied_to.get(layer.number)
    prefix = f"{layer.number}." if key is None else f"{TIED}{key}."
    ranks = [layer.shapes(tp) for tp in range(len(layer.contents))]
    named = [name for name in ranks[0] if f"{prefix}{name}" not in buffers]
    tensors = {name: [shapes[name] for shapes in ranks] for name in named}
    return LayerShapes(
        layer.number,
        {
            name: tuple(shape for shape in shapes if shape is not None)
            for name, shapes in tensors.items()
            if None not in shapes
        },
    )


def _numbered(ranks: _Ranks) -> NumberedStage:
    return NumberedStage(
        tuple(
            tuple(
                tuple(
                    Slot(f"number {e.number}", None if e.shape is None else frozenset({e.shape}))
                    for e in group
                )
                for group in file.groups
            )
            for file in ranks.files
        ),
        ranks.buffers,
        tuple(
            number
            for number, own in enumerate(ranks.files[0].settings)
            if (flag := own.get("use_muon")) is not None and flag.value is True
        ),
    )
