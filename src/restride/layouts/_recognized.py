"""The families that layouts are recognized as: how each is named, and built again."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Protocol, TypeAlias

from restride.errors import RuleError
from restride.frozen import Frozen
from restride.layouts.flat import flat_chunks
from restride.layouts.permuted import transposed
from restride.layouts.replicated import replicated
from restride.layouts.split import padded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Fill, Layout, Shape
    from restride.layouts._arguments import MeshAxis

__all__ = ["Family", "Flat", "Numbers", "Padded", "Replicated", "Transposed"]

Numbers: TypeAlias = "Mapping[str, int]"
"""Numbers of the model by name: heads, grain."""


class Family(Protocol):
    """What every family can do."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the catalogue, the commonest first."""

    @property
    def text(self) -> str:
        """The family with its numbers, in one line."""

    @property
    def apart(self) -> str:
        """What tells it from other families that fit."""

    @property
    def takes(self) -> str:
        """The number that `on` may be given, ``"heads"`` or ``"grain"``; empty where none."""

    def same(self, target: MeshAxis) -> Layout:
        """The layout on the mesh that it was recognized on."""

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        """The layout on any mesh, with the numbers of the model that are given."""


class Replicated(Frozen):
    """Everything on every rank, scaled perhaps."""

    shape: Shape
    scale: Fraction = Fraction(1)
    is_divided: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return ("replicated",)

    @property
    def text(self) -> str:
        if self.is_divided:
            return "replicated, divided by the number of ranks"
        return "replicated" + ("" if self.scale == 1 else f", times {self.scale}")

    @property
    def apart(self) -> str:
        return f"whether the factor {self.scale} changes with the number of ranks"

    @property
    def takes(self) -> str:
        return ""

    def same(self, target: MeshAxis) -> Layout:
        return replicated(self.shape, mesh=target.mesh, scale=self.scale)

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        del given
        scale = Fraction(1, target.size) if self.is_divided else self.scale
        return replicated(self.shape, mesh=target.mesh, scale=scale)


class Padded(Frozen):
    """A dimension padded at its end until it cuts evenly."""

    shape: Shape
    dim: int
    rows: int
    fill: Fill

    @property
    def names(self) -> tuple[str, ...]:
        return ("padded",)

    @property
    def text(self) -> str:
        return f"padded: dimension {self.dim} to {self.rows} rows, {self.fill}"

    @property
    def apart(self) -> str:
        return "told apart on other ranks: rows are padded once, for all of them"

    @property
    def takes(self) -> str:
        return ""

    def same(self, target: MeshAxis) -> Layout:
        return padded(
            self.shape,
            mesh=target.mesh,
            rows=self.rows,
            dim=self.dim,
            fill=self.fill,
            axis=target.name,
        )

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        del given
        if self.rows % target.size:
            raise RuleError(
                f"{self.rows} padded rows do not cut into {target.size} equal parts",
                remedy=f"pad the {self.shape[self.dim]} rows anew: padded(rows=...)",
            )
        return self.same(target)


class Flat(Frozen):
    """One parameter cut by element."""

    shape: Shape
    alignment: int
    fill: Fill

    @classmethod
    def of(cls, shape: Shape, width: int, ranks: int, fill: Fill) -> Flat:
        """The family with the alignment that gives shards of this width."""
        least = -(-prod(shape) // ranks)
        return cls(shape, 1 if width == least else max(width, 1), fill)

    @property
    def names(self) -> tuple[str, ...]:
        return ("flat-chunks",)

    @property
    def text(self) -> str:
        aligned = f", {self.alignment} elements at a time" if self.alignment > 1 else ""
        return f"flat-chunks{aligned}, padding {self.fill}"

    @property
    def apart(self) -> str:
        return "told apart on other ranks: elements are padded anew for each number of them"

    @property
    def takes(self) -> str:
        return ""

    def same(self, target: MeshAxis) -> Layout:
        return flat_chunks(
            self.shape,
            mesh=target.mesh,
            alignment=self.alignment,
            fill=self.fill,
            axis=target.name,
        )

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        del given
        if self.alignment > 1:
            raise RuleError(
                f"shards of {self.alignment} elements are longer than {prod(self.shape)} elements "
                "need, by an alignment that the layout does not say",
                remedy="pass the alignment to flat_chunks",
            )
        return self.same(target)


class Transposed(Frozen):
    """A tensor whose copy with the last two dimensions exchanged is of another family."""

    inner: Family

    @property
    def names(self) -> tuple[str, ...]:
        return ("transposed", "conv1d-row")

    @property
    def text(self) -> str:
        return f"transposed, then {self.inner.text}"

    @property
    def apart(self) -> str:
        return self.inner.apart

    @property
    def takes(self) -> str:
        return self.inner.takes

    def same(self, target: MeshAxis) -> Layout:
        return transposed(self.inner.same(target))

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        return transposed(self.inner.on(target, given))
