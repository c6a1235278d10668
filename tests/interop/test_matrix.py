"""Between every pair of eleven real layouts: the moved shards are the real target shards.

The shards come from the partition functions themselves (DeepSpeed's for CodeGen, torch's for the
rest) run on int64 markers, the layouts from folding the same markers.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from restride import move, plan_transfer
from restride.algebra.coverage import Covered, prove
from restride.algebra.fold import fold

pytestmark = pytest.mark.interop

ROWS, COLUMNS = 384, 16
PADDING = -1


def codegen(full, ranks, rank):
    torch = pytest.importorskip("torch")
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    shard = pytest.importorskip("deepspeed.module_inject.tp_shard")
    block = type("Block", (), {"__str__": lambda _: "CodeGenBlock", "__repr__": lambda _: ""})()
    meta = shard.AutoTPMeta(num_kv_heads=32)
    cut = fused.prepare_tp_fused_qkvw(block, torch.from_numpy(full.copy()), ranks, rank, meta)
    return cut.numpy()


def rope(full, ranks, rank):
    size = full.shape[0] // ROWS
    heads = full.reshape(full.shape[0] // (32 * size), -1, 2, full.shape[1])
    return np.split(heads.swapaxes(1, 2).reshape(full.shape), ranks)[rank]


def grouped(full, ranks, rank):
    quarter = full.shape[0] // 4
    query, key, value = full[: 2 * quarter], full[2 * quarter : 3 * quarter], full[3 * quarter :]
    parts = [part.reshape(8, -1, full.shape[1]) for part in (query, key, value)]
    return np.split(np.concatenate(parts, 1).reshape(full.shape), ranks)[rank]


def flat(full, ranks, rank):
    chunk = -(-full.size // ranks)
    padded = np.full(chunk * ranks, PADDING, full.dtype)
    padded[: full.size] = full.reshape(-1)
    return padded[rank * chunk : (rank + 1) * chunk]


def even_odd(full, ranks, rank):
    return np.concatenate([np.split(full[half::2], ranks)[rank] for half in (0, 1)])


CUTS = {
    "columns tp4": (4, lambda full, ranks, rank: np.split(full, ranks)[rank]),
    "columns tp3": (3, lambda full, ranks, rank: np.split(full, ranks)[rank]),
    "rows tp8": (8, lambda full, ranks, rank: np.split(full, ranks, 1)[rank]),
    "codegen tp2": (2, codegen),
    "codegen tp8": (8, codegen),
    "rope halves tp2": (2, rope),
    "megatron gqa tp4": (4, grouped),
    "even/odd tp4": (4, even_odd),
    "transposed tp4": (4, lambda full, ranks, rank: np.split(full.T.copy(), ranks, 1)[rank]),
    "zero-3 flat 5": (5, flat),
    "zero-3 flat 16": (16, flat),
}
ALIGNED = {
    "columns tp4",
    "rows tp8",
    "codegen tp2",
    "codegen tp8",
    "rope halves tp2",
    "even/odd tp4",
    "transposed tp4",
}


@pytest.fixture(scope="module")
def cuts():
    """Shards and layout of every cut, at two sizes."""
    found = {}
    for size, (name, (ranks, cut)) in product((1, 2), CUTS.items()):
        full = np.arange(ROWS * size * COLUMNS * size).reshape(ROWS * size, COLUMNS * size)
        shards = [np.ascontiguousarray(cut(full, ranks, rank)) for rank in range(ranks)]
        layout = fold(
            [shard.reshape(-1).tolist() for shard in shards],
            mesh={"rank": ranks},
            full_shape=full.shape,
            shard_shapes=[shard.shape for shard in shards],
        )
        assert isinstance(prove(layout), Covered)
        found[name, size] = shards, layout
    return found


@pytest.mark.parametrize("target", CUTS)
@pytest.mark.parametrize("source", CUTS)
def test_moved_shards_are_the_real_ones_at_both_sizes(source, target, cuts):
    counts = []
    for size in (1, 2):
        have, source_layout = cuts[source, size]
        want, target_layout = cuts[target, size]

        plan = plan_transfer(target_layout, source_layout)
        moved = move(plan, dict(enumerate(have)))

        counts.append(len(plan.descriptors))
        for rank, wanted in enumerate(want):
            assert np.array_equal(moved[rank], np.where(wanted == PADDING, 0, wanted))
    if {source, target} <= ALIGNED:
        assert counts == [1, 1]
    if "flat 5" not in source + target:
        # Only a cut at a residue of the size moves with the size.
        assert counts[0] == counts[1]
