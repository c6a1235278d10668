"""Where parameters stand in the flat buffers of `FP16_Optimizer`: the weights themselves tell.

The wrapper of DeepSpeed's fused Adam joins the weights of each parameter group end to end, makes
every parameter of the model a view of that buffer, and keeps one fp32 buffer of the same order
(deepspeed 0.19.8 `runtime/fp16/fused_optimizer.py`). A saved file keeps the views: weights with one
storage are one group, and their places in it are their places among the master weights.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.checkpoint.values import StoredTensor
from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.values import Storage
    from restride.formats.deepspeed._whole.file import Numbered
    from restride.formats.deepspeed._witness import Witness

__all__ = ["Place", "find_places", "view_of"]


class Place(Frozen):
    """Where a parameter stands in the buffer of its group.

    Attributes:
        name: The parameter.
        start: First element.
        shape: Its shape.
    """

    name: str
    start: int
    shape: Shape


def find_places(
    weights: Mapping[str, StoredTensor],
    groups: Sequence[Sequence[Numbered]],
    witness: Witness,
) -> tuple[tuple[Place, ...], ...] | Unmatched:
    """Find the parameters of each flat group.

    Args:
        weights: Weights of the model, each once, in its order.
        groups: For each parameter group its one buffer.
        witness: Tells buffers of one size apart.

    Returns:
        Places by group, or the reason why they cannot be found.
    """
    buffers = {
        storage: places
        for storage, places in _by_storage(weights).items()
        if _tiles(places, storage.nbytes // storage.dtype.itemsize_nbytes)
    }
    candidates = [
        Candidate(storage.key, witness.token(_whole(storage)))
        for storage in buffers
        if storage.dtype.kind == "float"
    ]
    dtypes = {storage.dtype for storage in buffers if storage.dtype.kind == "float"}
    slots = [
        [
            Slot(
                f"the flat buffer of group {entry.group} with {prod(entry.shape or ())} elements",
                frozenset(witness.rounded_tokens(entry.master, dtypes)),
            )
            for entry in group
            if entry.master is not None
        ]
        for group in groups
    ]
    found = match(candidates, slots, [None] * len(slots))
    if isinstance(found, Unmatched):
        return Unmatched(f"{found.reason} (storages of weights that are joined end to end)")
    if found.by_order:
        return Unmatched("flat buffers of several groups hold the same weights")
    return tuple(_places_of(found, buffers))


def _places_of(
    found: Matched, buffers: Mapping[Storage, Sequence[Place]]
) -> Iterator[tuple[Place, ...]]:
    by_key = {storage.key: tuple(places) for storage, places in buffers.items()}
    for names in found.names:
        yield tuple(place for name in names if name is not None for place in by_key[name])


def view_of(flat: StoredTensor, place: Place) -> StoredTensor:
    """The part of a flat buffer that is a parameter's."""
    (step,) = flat.strides or (1,)
    strides = tuple(step * prod(place.shape[dim + 1 :]) for dim in range(len(place.shape)))
    base = flat.storage_base + step * place.start
    return replace(flat, storage_base=base, shape=place.shape, strides=strides)


def _by_storage(weights: Mapping[str, StoredTensor]) -> dict[Storage, list[Place]]:
    """Dense weights by the storage they are views of, in its order."""
    found: dict[Storage, list[Place]] = defaultdict(list)
    for name, tensor in weights.items():
        if prod(tensor.shape) and tensor.is_dense:
            found[tensor.storage].append(Place(name, tensor.storage_base, tensor.shape))
    return {
        storage: sorted(places, key=lambda place: place.start) for storage, places in found.items()
    }


def _tiles(places: Sequence[Place], numel: int) -> bool:
    """Whether the places follow one another and fill the storage."""
    stop = 0
    for place in places:
        if place.start != stop:
            return False
        stop += prod(place.shape)
    return stop == numel


def _whole(storage: Storage) -> StoredTensor:
    return StoredTensor(storage, 0, (storage.nbytes // storage.dtype.itemsize_nbytes,), (1,))
