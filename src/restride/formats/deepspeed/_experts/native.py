"""Experts of DeepSpeed's own MoE layer: every expert a module, named by its place on its rank.

A rank with ``L`` experts of a layer calls them ``...deepspeed_experts.0`` to ``L - 1``, and so do
all other ranks. Expert files have the numbers among all experts; ``param_shapes``, the mappings in
optimizer files and the groups have those on the rank. The catalog calls an expert by its number
among all, as an engine does in which every rank has all of them. Each of its parameters is a tensor
that one expert-parallel rank holds whole (deepspeed 0.19.8 `moe/layer.py`, `moe/experts.py`,
`runtime/engine.py`, `_save_moe_checkpoint`).

Beside tensor-parallel ranks experts are of one of two kinds. Those of a layer without
`enable_expert_tensor_parallelism` are whole: expert-parallel ranks are neighbours among all ranks,
and an expert has one file, of the tensor-parallel rank that its first rank is. With it, they are
neighbours among the data-parallel ranks of each tensor-parallel one, and an expert has a file of
every tensor-parallel rank (deepspeed 0.19.8 `utils/groups.py`).
"""

from __future__ import annotations

import re
from itertools import chain, groupby
from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra.canonical import canonicalize
from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Piece
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.cuts import ExpertCuts
from restride.formats.deepspeed._experts.native_ranks import rank_counts
from restride.formats.deepspeed._rank_blocks import in_block
from restride.frozen import Frozen
from restride.layouts.lifting import axes_of
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = [
    "NativeExpert",
    "expert_name",
    "held_by",
    "in_model_order",
    "is_native",
    "native_experts",
]

_NAME: Final = re.compile(r"(.+\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,6})\.(.+)")
_MODULE: Final = ".deepspeed_moe"
_LAYER: Final = ".experts.deepspeed_experts."
_COUNTS: Final = "num_experts"
_MOST_EXPERTS: Final = 1 << 16


class NativeExpert(Frozen):
    """One tensor of one expert.

    Attributes:
        prefix: What the names of all experts of its layer begin with.
        number: The expert, among all of its layer.
        rest: What its own module calls the tensor.
        layer: Number of the layer in the names of the expert files.
        expert_count: Experts of the layer.
        rank_count: Expert-parallel ranks.
        shape: Shape of the tensor.
        where: File and path, for errors.
        is_buffer: Whether it is a buffer.
        cut: How the tensor-parallel ranks cut it; None where one rank has it whole.
    """

    prefix: str
    number: int
    rest: str
    layer: int
    expert_count: int
    rank_count: int
    shape: Shape
    where: str
    is_buffer: bool = False
    cut: Layout | None = None

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks that cut it."""
        return 1 if self.cut is None else self.cut.rank_count

    @property
    def name(self) -> str:
        """Name with the number among all experts."""
        return f"{self.prefix}.{self.number}.{self.rest}"

    @property
    def rank(self) -> int:
        """The expert-parallel rank that holds it."""
        return self.number // (self.expert_count // self.rank_count)

    def held_shape(self, shape: Shape, rank: int) -> Shape:  # noqa: ARG002 - as for stacks
        """Shape on a rank of what the first rank has in this shape."""
        return shape

    def name_on(self, rank: int) -> str:
        """Full name of what a rank calls by this name.

        Raises:
            CorruptError: A rank has no expert of this number.
        """
        held = self.expert_count // self.rank_count
        if self.number >= held:
            raise CorruptError(
                f"{self.name!r} is expert {self.number} of a rank, and each of {self.rank_count} "
                f"ranks has {held} of {self.expert_count}",
                where=self.where,
            )
        return f"{self.prefix}.{rank * held + self.number}.{self.rest}"

    def layout(self) -> Layout:
        """Describe which rank has it; where it is cut, on the ranks ``ep, tp``."""
        if self.cut is None:
            return held_by(self.shape, Mesh((("ep", self.rank_count),)), [self.rank])
        count = self.cut.rank_count
        mesh = Mesh((("ep", self.rank_count), ("tp", count)))
        return in_block(self.cut, mesh, self.rank * count)


def expert_name(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's tensor: prefix of the layer, number, name in the expert."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def is_native(opened: Mapping[tuple[int, int], Field]) -> bool:
    """Whether expert files are of DeepSpeed's own layer, by the first name in them."""
    names = (name for content in opened.values() for name, _ in content.items())
    return expert_name(next(names, "")) is not None


def held_by(shape: Shape, mesh: Mesh, ranks: Sequence[int]) -> Layout:
    """Some ranks hold all of a tensor, the others nothing.

    Examples:
        >>> layout = held_by((2, 3), Mesh((("ep", 3),)), [1])
        >>> [layout.shard_shape(rank) for rank in range(3)]
        [(0,), (2, 3), (0,)]
    """
    shapes = [shape if rank in ranks else (0,) for rank in range(mesh.size)]
    runs = tuple((len([*run]), own) for own, run in groupby(shapes))
    axes = axes_of((prod(shape), 1, 0, 1))
    pieces = [Piece(axes, rank_base=rank) for rank in ranks] if prod(shape) else []
    return canonicalize(Layout(mesh, shape, runs, tuple(pieces)))


def in_model_order(names: Iterable[str], experts: Iterable[str]) -> tuple[str, ...]:
    """Put the experts of each layer behind its router, where its module has them.

    Args:
        names: The names of a module without its experts, in its order.
        experts: Names of their tensors, layer by layer.

    Examples:
        >>> expert = "a.deepspeed_moe.experts.deepspeed_experts.0.w"
        >>> in_model_order(["a.deepspeed_moe.gate.w", "b"], [expert])[1:] == (expert, "b")
        True
    """
    layers: dict[str, list[str]] = {}
    for name in experts:
        layers.setdefault(name[: name.find(_LAYER)], []).append(name)
    listed = [name for name in dict.fromkeys(names) if expert_name(name) is None]
    last = {
        name[:place]: name
        for name in listed
        if (place := name.find(".", name.find(_MODULE) + len(_MODULE))) > 0 and _MODULE in name
    }
    behind = {last[layer]: own for layer, own in layers.items() if layer in last}
    ordered = chain.from_iterable((name, *behind.get(name, ())) for name in listed)
    return tuple(dict.fromkeys([*ordered, *chain(*layers.values())]))


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
    ranks_of = rank_counts(run, layers, said, expert_name)
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


class _Layer(Frozen):
    number: int
    prefix: str
    count: int
    shapes: Mapping[str, Shape]


def _by_layer(opened: Mapping[tuple[int, int], Field]) -> dict[int, dict[int, Field]]:
    found: dict[int, dict[int, Field]] = {}
    for (layer, expert), content in sorted(opened.items()):
        found.setdefault(layer, {})[expert] = content
    return found


def _layer(number: int, files: Mapping[int, Field], counts: Sequence[int]) -> _Layer:
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
    return _Layer(number, prefix, counts[number], shapes)
