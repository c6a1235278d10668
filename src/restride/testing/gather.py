"""A slow reader that gathers a tensor by walking its pieces: the oracle for every format.

It knows nothing of plans, budgets or formats: a state is a layout and the place of every shard, so
rebuilding it is two index arrays for each piece.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from restride.algebra.piece import Piece
    from restride.checkpoint.catalog import Catalog, StateEntry

__all__ = ["gather", "gather_all"]


def gather(catalog: Catalog, entry: StateEntry) -> NDArray[np.uint8]:
    """Rebuild one state as raw bytes: its shape, with the bytes of an element as last axis.

    Every element must be in some shard, and replicas must be equal, bit for bit.
    """
    itemsize, shape = entry.dtype.itemsize_nbytes, entry.layout.full_shape
    full = np.zeros((prod(shape), itemsize), np.uint8)
    seen = np.zeros(prod(shape), bool)
    assert len(entry.regions) == entry.layout.rank_count
    for rank, region in enumerate(entry.regions):
        for piece in entry.layout.pieces(rank):
            assert region is not None
            assert piece.scale == 1
            path = Path(catalog.root) / catalog.files[region.file].name
            at_full, at_shard = _walk(piece)
            with path.open("rb") as file:
                file.seek(region.start_nbytes)
                stored = file.read((int(at_shard.max()) + 1) * itemsize)
            shard = np.frombuffer(stored, np.uint8).reshape(-1, itemsize)[at_shard]
            again = seen[at_full]
            assert np.array_equal(full[at_full][again], shard[again]), f"rank {rank} drifted"
            full[at_full], seen[at_full] = shard, True
    assert seen.all(), f"{int((~seen).sum())} elements are nowhere"
    return full.reshape(*shape, itemsize)


def gather_all(catalog: Catalog) -> dict[str, NDArray[np.uint8]]:
    """Rebuild every state of every tensor, under ``TENSOR/STATE``."""
    return {
        f"{tensor.name}/{state}": gather(catalog, entry)
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
    }


def _walk(piece: Piece) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Full and shard index of every step."""
    full, shard = np.array([piece.full_base]), np.array([piece.shard_base])
    for axis in piece.shard_axes:
        steps = np.arange(axis.extent)
        full = (full[:, None] + steps * axis.full_stride).ravel()
        shard = (shard[:, None] + steps * axis.shard_stride).ravel()
    return full, shard
