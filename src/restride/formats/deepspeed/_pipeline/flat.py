"""Where parameters stand in the flat buffers of a pipeline: what their weights are tells.

DeepSpeed's fused Adam in fp16 joins the parameters of a group to one fp32 buffer, and nothing says
where one begins (deepspeed 0.19.8 `runtime/fp16/fused_optimizer.py`). Elsewhere the weights are
views of such a buffer; the files of layers have copies. But a weight is what its part of the buffer
rounds to. So every weight of every layer is looked for at the start of the buffer, then behind each
that was found there, and so on. A cut is known where there is one way through the whole buffer,
which is one for every order that a script may have given to its optimizer.

Weights that are still what they were initialised with, ones and zeros, may leave several ways.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from msgspec.structs import replace

from restride.formats.deepspeed._numbering import Unmatched
from restride.formats.deepspeed._whole.flat import Place, view_of
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._whole.file import Numbered
    from restride.formats.deepspeed._witness import Token, Witness

__all__ = ["FlatCut", "FlatCutter", "parts_of"]

FlatCut: TypeAlias = "tuple[tuple[int, Shape], ...]"
"""Of each parameter in a flat buffer the first element, and its shape."""

# A weight is first looked for by so many of its elements.
_HEAD_NUMEL: Final = 8
# Places that are looked at before nothing is proved; no stage has so many parameters.
_MOST_PLACES: Final = 5_000
_MOST_WAYS: Final = 2


def parts_of(
    groups: Sequence[Sequence[Numbered]], cuts: Sequence[FlatCut]
) -> tuple[tuple[Numbered, ...], ...]:
    """What flat buffers hold of each parameter, as if every one had a number.

    Args:
        groups: For each parameter group its one buffer.
        cuts: Where parameters begin in it.
    """
    found: list[tuple[Numbered, ...]] = []
    for (entry,), cut in zip(groups, cuts, strict=True):
        flat = cast("StoredTensor", entry.master)  # it is made of master weights
        views = [view_of(flat, Place("", start, shape)) for start, shape in cut]
        found.append(tuple(replace(entry, number=n, master=view) for n, view in enumerate(views)))
    return tuple(found)


class FlatCutter:
    """Finds the parameters in the flat buffers of one tensor-parallel rank.

    Args:
        weights: Those of all layers.
        witness: Reads samples of weights and master weights.
    """

    def __init__(self, weights: Sequence[StoredTensor], witness: Witness) -> None:
        self._witness = witness
        self._weights = [tensor for tensor in weights if prod(tensor.shape)]
        self._dtypes = frozenset(tensor.storage.dtype for tensor in self._weights)
        self._tokens = [witness.token(tensor) for tensor in self._weights]
        self._by_head: dict[Token, list[int]] = defaultdict(list)
        for number, tensor in enumerate(self._weights):
            (head,) = witness.heads(tensor, _HEAD_NUMEL, [tensor.storage.dtype])
            self._by_head[head].append(number)
        self._sizes = {min(prod(tensor.shape), _HEAD_NUMEL) for tensor in self._weights}

    def cut(self, flat: StoredTensor) -> FlatCut | Unmatched:
        """Find out where parameters begin in a buffer.

        Args:
            flat: The master weights of a group.

        Returns:
            Where they begin, or the reason why it is not known.

        Cost:
            O(parameters of the buffer) samples of it are read.
        """
        if len(flat.shape) != 1:
            return Unmatched(f"has shape {flat.shape}, which is not flat")
        (numel,) = flat.shape
        ways, places, furthest = _Ways(), [0], 0
        while places and len(ways.at) <= _MOST_PLACES:
            furthest = heappop(places)
            for shape in self._fitting(flat, furthest):
                stop = furthest + prod(shape)
                if stop not in ways.at and stop < numel:
                    heappush(places, stop)
                ways.extend(furthest, shape)
        found = ways.at.get(numel, ())
        if len(found) == 1 and not places:
            return ways.cut(found[0])
        if found or places:
            return Unmatched(
                "is several sequences of weights of layers: some are still what they were "
                "initialised with"
            )
        return Unmatched(
            f"has {counted(numel, 'element')}, and from element {furthest} on it rounds to "
            "no weight of a layer: weights were changed after the last step, or are of another save"
        )

    def _fitting(self, flat: StoredTensor, place: int) -> Iterator[Shape]:
        """Shapes of the weights that the buffer rounds to from a place on."""
        (numel,) = flat.shape
        rest = view_of(flat, Place("", place, (numel - place,)))
        likely: dict[Shape, list[int]] = defaultdict(list)
        for size in self._sizes:
            for head in self._witness.heads(rest, size, self._dtypes):
                for number in self._by_head.get(head, ()):
                    likely[self._weights[number].shape].append(number)
        for shape, numbers in likely.items():
            if place + prod(shape) <= numel:
                view = view_of(flat, Place("", place, shape))
                tokens = self._witness.rounded_tokens(view, self._dtypes)
                if any(self._tokens[number] in tokens for number in numbers):
                    yield shape


class _Ways:
    """At most two different ways to every place in a buffer.

    Attributes:
        at: By place the ways that end there.
    """

    def __init__(self) -> None:
        self.at: dict[int, list[int]] = {0: [0]}
        # Each way is one step after another way; the first one has none.
        self._steps: list[tuple[int, int, Shape]] = [(0, 0, ())]

    def extend(self, place: int, shape: Shape) -> None:
        """Put a shape behind all ways that end at a place; each shape once."""
        held = self.at.setdefault(place + prod(shape), [])
        for way in self.at[place][: _MOST_WAYS - len(held)]:
            held.append(len(self._steps))
            self._steps.append((way, place, shape))

    def cut(self, way: int) -> FlatCut:
        """All steps of a way."""
        found: list[tuple[int, Shape]] = []
        while way:
            way, place, shape = self._steps[way]
            found.append((place, shape))
        return tuple(reversed(found))
