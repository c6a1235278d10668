"""What the parameters of a pipeline are, beside their shapes: what their master weights round to.

The layers of a pipeline look alike. Where some of their parameters are frozen, shapes do not tell
which of them have a number; in half precision a number has a master weight, and the layer has what
that rounds to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.formats.deepspeed._numbering import Slot
from restride.formats.deepspeed._whole.file import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._pipeline.layers import OpenedLayer
    from restride.formats.deepspeed._pipeline.numbering import LayerShapes
    from restride.formats.deepspeed._whole.file import Numbered
    from restride.formats.deepspeed._witness import Witness

__all__ = ["LayerWeights"]


class LayerWeights:
    """The parameters of all layers.

    Args:
        layers: Those with a file.
        shapes: What of them are parameters.
    """

    def __init__(self, layers: Sequence[OpenedLayer], shapes: Sequence[LayerShapes]) -> None:
        self._shapes = tuple(shapes)
        self._stored: list[dict[str, list[StoredTensor]]] = [
            {name: [content.at(name).tensor() for content in layer.contents] for name in own.shapes}
            for layer, own in zip(layers, shapes, strict=True)
        ]

    def on(self, tp: int) -> list[StoredTensor]:
        """Those of a tensor-parallel rank that can be rounded from a master weight."""
        tensors = [ranks[tp] for layer in self._stored for ranks in layer.values()]
        return [tensor for tensor in tensors if tensor.storage.dtype.name in CASTABLE]

    def identified(self, witness: Witness) -> tuple[LayerShapes, ...]:
        """The shapes of the layers, with tokens of what the parameters are.

        Args:
            witness: Reads samples of weights.
        """
        return tuple(
            replace(own, tokens={name: _tokens(ranks, witness) for name, ranks in stored.items()})
            for own, stored in zip(self._shapes, self._stored, strict=True)
        )

    def slot(self, entry: Numbered, witness: Witness | None) -> Slot:
        """A number, with what identifies its parameter.

        Args:
            entry: What is numbered.
            witness: Reads samples of master weights; None for its shape alone.
        """
        shape = entry.shape
        tokens: frozenset[Hashable] | None = None
        if witness is not None and entry.master is not None:
            tokens = frozenset(witness.rounded_tokens(entry.master, self._dtypes))
        elif shape is not None:
            tokens = frozenset({shape})
        return Slot(f"number {entry.number}", tokens, shape)

    @property
    def _dtypes(self) -> Collection[DType]:
        return {tensor.storage.dtype for tensor in self.on(0)}


def _tokens(ranks: Sequence[StoredTensor], witness: Witness) -> tuple[Hashable, ...]:
    return tuple(
        witness.token(tensor) if tensor.storage.dtype.name in CASTABLE else tensor.shape
        for tensor in ranks
    )
