"""The names of what each stage of a pipeline without ZeRO trains, as far as they are known.

Its optimizer is in the model files, with numbers. An optimizer that was given named_parameters()
has the names beside them; else `number_stages` finds out what they are, with the ties of layers
that a user tells, or because nothing else is possible. Of flat buffers it is found out first where
parameters begin (`flat`): from then on they are numbers as any others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from msgspec import field
from msgspec.structs import replace

from restride.errors import UnsupportedError
from restride.formats.deepspeed._numbering import Unmatched
from restride.formats.deepspeed._pipeline.flat import FlatCutter, parts_of
from restride.formats.deepspeed._pipeline.known_layers import TIED, tied_prefix
from restride.formats.deepspeed._pipeline.numbering import LayerShapes, NumberedStage, number_stages
from restride.formats.deepspeed._pipeline.values import LayerWeights
from restride.formats.deepspeed._whole.file import read_whole_file
from restride.frozen import Frozen
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._pipeline.flat import FlatCut
    from restride.formats.deepspeed._pipeline.layers import OpenedLayer
    from restride.formats.deepspeed._whole.file import WholeFile
    from restride.formats.deepspeed._witness import Witness

__all__ = ["StageNames", "name_stages"]

_Cuts: TypeAlias = "tuple[tuple[tuple[FlatCut, ...], ...], ...]"


class StageNames(Frozen):
    """What the stages of a pipeline call their parameters.

    Attributes:
        stages: For each stage the names of its module, in its order; empty where they are not
            known.
        problem: Why they are not.
        tied_to: Where ties are told, the key of its module for each layer that shares one.
        are_ties_known: Whether the names of tied modules are what they are called. Where it is only
            proved that no number is another one, the first module of a stage may be tied, too.
        cuts: For each stage and tensor-parallel rank where parameters begin in each flat buffer.
        is_stepped: Whether the optimizer of any stage has a state: all of them step together, and
            what has none on a stage is frozen.
    """

    stages: tuple[tuple[str, ...], ...] = ()
    problem: str | None = None
    tied_to: Mapping[int, str] | None = None
    are_ties_known: bool = True
    cuts: _Cuts = ()
    is_stepped: bool = False


class _Ranks(Frozen):
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
    is_stepped = any(file.is_stepped for file in files)
    buffers = frozenset().union(*(own.buffers for own in ranks))
    tied_to = None
    if told is not None:
        tied_to = {number: key for key, numbers in told.items() for number in numbers}
    shapes = [_shapes(layer, buffers, tied_to or {}) for layer in layers]
    weights = LayerWeights(layers, shapes)
    from restride.formats.deepspeed._witness import Witness  # noqa: PLC0415 - imports NumPy

    with FilePool() as pool:
        witness = Witness(pool)
        cuts = _cut(ranks, weights, witness)
        if isinstance(cuts, Unmatched):
            return StageNames(problem=cuts.reason, tied_to=tied_to)
        told_names = [names for file in files for names in file.names]
        if all(names is not None and all(map(_is_of_layer, names)) for names in told_names):
            listed = tuple(_named(own) for own in ranks)
            return StageNames(listed, cuts=cuts, is_stepped=is_stepped)
        ranks = [_parted(*own) for own in zip(ranks, cuts, strict=True)]
        found = number_stages(shapes, [_numbered(own, weights) for own in ranks], told)
        if told is not None and isinstance(found, Unmatched) and files[0].kind != "bare":
            numbered = [_numbered(own, weights, witness) for own in ranks]
            found = number_stages(weights.identified(witness), numbered, told)
    if not isinstance(found, Unmatched):
        return StageNames(found, None, tied_to, told is not None, cuts, is_stepped)
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


def _cut(ranks: Sequence[_Ranks], weights: LayerWeights, witness: Witness) -> _Cuts | Unmatched:
    """Find out where parameters begin in the flat buffers of all stages."""
    if all(file.kind != "flat" for own in ranks for file in own.files):
        return tuple(tuple(() for _ in own.files) for own in ranks)
    cutters = [FlatCutter(weights.on(tp), witness) for tp in range(len(ranks[0].files))]
    made: list[tuple[tuple[FlatCut, ...], ...]] = []
    for own in ranks:
        cuts: list[tuple[FlatCut, ...]] = []
        for file, cutter in zip(own.files, cutters, strict=True):
            cut = _cut_file(file, cutter)
            if isinstance(cut, Unmatched):
                return cut
            cuts.append(cut)
        made.append(tuple(cuts))
    return tuple(made)


def _cut_file(file: WholeFile, cutter: FlatCutter) -> tuple[FlatCut, ...] | Unmatched:
    cuts: list[FlatCut] = []
    for (entry,) in file.groups if file.kind == "flat" else ():
        cut = cutter.cut(cast("StoredTensor", entry.master))  # each buffer is one of masters
        if isinstance(cut, Unmatched):
            return Unmatched(f"{entry.where} {cut.reason}")
        cuts.append(cut)
    return tuple(cuts)


def _parted(ranks: _Ranks, cuts: Sequence[Sequence[FlatCut]]) -> _Ranks:
    """The same where every parameter in a flat buffer has a number."""
    files = (
        replace(file, groups=parts_of(file.groups, own)) if file.kind == "flat" else file
        for file, own in zip(ranks.files, cuts, strict=True)
    )
    return replace(ranks, files=tuple(files))


def _numbered(
    ranks: _Ranks, weights: LayerWeights, witness: Witness | None = None
) -> NumberedStage:
    return NumberedStage(
        tuple(
            tuple(tuple(weights.slot(entry, witness) for entry in group) for group in file.groups)
            for file in ranks.files
        ),
        ranks.buffers,
        tuple(
            number
            for number, own in enumerate(ranks.files[0].settings)
            if (flag := own.get("use_muon")) is not None and flag.value is True
        ),
    )
