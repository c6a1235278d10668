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
from restride.errors import CorruptError
from restride.formats.deepspeed._rank_blocks import in_block
from restride.frozen import Frozen
from restride.layouts.lifting import axes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field

__all__ = [
    "NativeExpert",
    "NativeLayer",
    "expert_name",
    "held_by",
    "in_model_order",
    "is_native",
]

_NAME: Final = re.compile(r"(.+\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,6})\.(.+)")
_MODULE: Final = ".deepspeed_moe"
_LAYER: Final = ".experts.deepspeed_experts."


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


class NativeLayer(Frozen):
    """What the files of a layer's experts say of it.

    Attributes:
        number: Its number in the names of the files.
        prefix: What the names of all of its experts begin with.
        count: Its experts.
        shapes: Shape of each tensor of an expert, by what its own module calls it.
    """

    number: int
    prefix: str
    count: int
    shapes: Mapping[str, Shape]


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
