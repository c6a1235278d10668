"""What a checkpoint has beside its tensors, in a form that can be written again.

`Catalog.values` is for people and for JSON; it cannot be turned back. A writer whose files are read
by the framework that wrote the source needs the values themselves: inert, with every object as it
was spelled, and with the tensors in them as places in the source files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.values import Value

__all__ = ["CarriedFile", "Companions"]


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that goes over into the output.

    Attributes:
        name: Its name, without folders.
        source: Index into `Catalog.files`.
        value: What it shall hold instead, or None: it is copied byte for byte.
    """

    name: str
    source: int
    value: Value = None


@dataclass(frozen=True, slots=True)
class Companions:
    """What goes with the tensors of a checkpoint into a universal folder.

    Attributes:
        tag: Name of the save, such as ``global_step10``.
        optimizer: State of the optimizer as a whole: its loss scaler, its parameter groups.
        files: Files of the model-parallel ranks: the step, the scheduler, the client's state.
        marks: For each tensor, what its files say of it besides the array.
        shapes: For some tensors, the shape that the array has in its files: the same elements in
            the same order.
        scalars: For some tensors, states that are plain numbers, by name.
    """

    tag: str
    optimizer: Value
    files: tuple[CarriedFile, ...]
    marks: Mapping[str, Mapping[str, Value]]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
