"""What the expert files say of each of DeepSpeed's own layers, and so of every expert in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.cuts import ExpertCuts
from restride.formats.deepspeed._experts.native import NativeExpert, NativeLayer, expert_name
from restride.formats.deepspeed._experts.native_ranks import rank_counts
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = ["native_experts"]

_COUNTS: Final = "num_experts"
_MOST_EXPERTS: Final = 1 << 16


def native_experts(
    run: Run, files: Mapping[tuple[int, int], Mapping[int, Field]], said: Sequence[int]
) -> dict[str, NativeExpert]:
    """Describe every tensor of every expert, by full name, in the order of the model.

    Args:
        run: The files.
        files: Content of the expert files, by layer and expert, and by tensor-parallel rank.
        said: Numbers of ranks that experts are said to be on; each layer is on one of them.

    Raises:
        CorruptError: The files contradict each other.
        FormatError: Something has another type than it must have.
        UnsupportedError: Nothing says how an expert is cut, or on how many ranks a layer is.
    """
    root = run.models[0].root
    opened = {place: next(iter(own.values())) for place, own in files.items()}
    cuts = ExpertCuts(run, files)
    counts = root.at(_COUNTS).integers(at_least=1)
    layers = [_layer(number, own, counts) for number, own in _by_layer(opened).items()]
    missing = sorted({*range(len(counts))} - {layer.number for layer in layers})
    if missing:
        raise CorruptError(
            f"layer {missing[0]} has {counted(counts[missing[0]], 'expert')}, and no file has any "
            "of them",
            where=root.at(_COUNTS).where,
            remedy=f"add the files layer_{missing[0]}_expert_*_model_states.pt",
        )
    prefixes = [layer.prefix for layer in layers]
    if len({*prefixes}) < len(prefixes):
        raise CorruptError(
            f"two layers have experts of the same names, {prefixes[-1]!r}", where=root.where
        )
    found: dict[str, NativeExpert] = {}
    buffers = run.models[0].buffer_names
    ranks_of = rank_counts(run, layers, said)
    for layer in layers:
        ranks = ranks_of[layer.number]
        for number in range(layer.count):
            for rest, shape in layer.shapes.items():
                # Every rank has a first expert, which speaks for all of them.
                is_buffer = f"{layer.prefix}.0.{rest}" in buffers
                expert = NativeExpert(
                    layer.prefix, number, rest, layer.number, layer.count, ranks, shape,
                    root.where, is_buffer,
                )  # fmt: skip
                found[expert.name] = cuts.of(expert)
    return found


def _by_layer(opened: Mapping[tuple[int, int], Field]) -> dict[int, dict[int, Field]]:
    found: dict[int, dict[int, Field]] = {}
    for (layer, expert), content in sorted(opened.items()):
        found.setdefault(layer, {})[expert] = content
    return found


def _layer(number: int, files: Mapping[int, Field], counts: Sequence[int]) -> NativeLayer:
    """What the files of a layer's experts say of it: all experts are alike."""
    first = next(iter(files.values()))
    if number >= len(counts) or counts[number] > _MOST_EXPERTS or max(files) >= counts[number]:
        said = f"{counts[number]} experts" if number < len(counts) else "no layer of this number"
        raise CorruptError(
            f"is of layer {number}, expert {max(files)}, and {_COUNTS} says {said}",
            where=files[max(files)].where,
            remedy="put only the files of one save into the folder",
        )
    prefix: str | None = None
    shapes: dict[str, Shape] = {}
    for expert, content in files.items():
        for name, entry in content.items():
            parts = expert_name(name)
            if parts is None or not isinstance(entry.value, StoredTensor):
                continue  # carried as it is
            prefix = parts[0] if prefix is None else prefix
            if parts[:2] != (prefix, expert):
                raise CorruptError(
                    f"has {name!r}, which is of expert {parts[1]} of {parts[0]!r}, and is the file "
                    f"of expert {expert} of {prefix!r}",
                    where=content.where,
                )
            known = shapes.setdefault(parts[2], entry.value.shape)
            if known != entry.value.shape:
                raise CorruptError(
                    f"has shape {entry.value.shape}, another expert has {known}: all experts of a "
                    "layer are alike",
                    where=f"{content.where}: tensor {name!r}",
                )
    if prefix is None:
        raise CorruptError("has no tensor of an expert", where=first.where)
    return NativeLayer(number, prefix, counts[number], shapes)
