"""Parameters as a retargeting sees them: over the tensor-parallel ranks and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.errors import UnsupportedError
from restride.frozen import Frozen
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import TensorEntry

__all__ = ["TP", "LayoutEquality", "Source", "stated_grain", "tp_mesh", "whole"]

TP: Final = "tp"
_TENSOR_PARALLEL: Final = "tensor_parallel"


def tp_mesh(ranks: int) -> Mesh:
    """The mesh of so many tensor-parallel ranks."""
    return Mesh(((TP, ranks),))


class Source(Frozen):
    """A tensor with the cut that it has.

    Attributes:
        tensor: The entry of the catalog.
        layout: Its layout over the axis ``tp`` alone.
    """

    tensor: TensorEntry
    layout: Layout

    @classmethod
    def of(cls, tensor: TensorEntry) -> Source:
        """Take a tensor whose layout is over ``tp``, or over one rank of whatever name.

        Raises:
            UnsupportedError: It is over other ranks.
        """
        layout = tensor.layout
        if layout.rank_count == 1:
            return cls(tensor, replace(layout, mesh=tp_mesh(1)))
        if layout.mesh != tp_mesh(layout.rank_count):
            raise UnsupportedError(
                f"is cut over the mesh {str(layout.mesh)!r}, which is not tensor parallelism alone",
                where=f"tensor {tensor.name!r}",
                remedy="convert without changing the number of tensor-parallel ranks",
            )
        return cls(tensor, layout)

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.tensor.name

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that wrote it."""
        return self.layout.rank_count

    @property
    def is_parameter(self) -> bool:
        """Whether it is trained; buffers are whole everywhere."""
        return self.tensor.kind == "parameter"


def whole(source: Source, mesh: Mesh) -> Layout:
    """The layout that has everything on every rank."""
    built = replicated(source.layout.full_shape, mesh=mesh)
    return replace(built, unit_bits=source.layout.unit_bits)


class LayoutEquality:
    """Whether two layouts mean the same, each pair compared once: layers repeat."""

    def __init__(self) -> None:
        self._known: dict[tuple[Layout, Layout], bool] = {}

    def __call__(self, first: Layout, second: Layout) -> bool:
        """Compare two layouts."""
        key = first, second
        if key not in self._known:
            self._known[key] = same_layout(first, second)
        return self._known[key]


def stated_grain(values: Mapping[str, object]) -> int | None:
    """`tp_grain_size` in the DeepSpeed configuration that a checkpoint carries.

    A training has it a level deeper, under either name of the section (deepspeed 0.19.8
    `runtime/tensor_parallel/config.py`); the engine refuses it beside ``autotp_size``.

    Examples:
        >>> inner = {"tp_grain_size": 64}
        >>> stated_grain({"model": {"ds_config": {"tensor_parallel": {"tp": inner}}}})
        64
    """
    for section in values.values():
        outer = _at(section, "ds_config", _TENSOR_PARALLEL)
        for inner in (_at(outer, "tp"), _at(outer, _TENSOR_PARALLEL), outer):
            found = _at(inner, "tp_grain_size")
            if type(found) is int and found >= 1:
                return found
    return None


def _at(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
