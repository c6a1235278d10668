"""Shards lie inside their files, or are told of rank by rank."""

from __future__ import annotations

import pytest

from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Catalog, FileEntry, Region, StateEntry, TensorEntry
from restride.checkpoint.dtypes import dtype_named
from restride.checkpoint.proofs import prove_catalog

MESH = Mesh((("dp", 4),))
# Twelve elements: three ranks have four each, of which rank 2 has a copy of what rank 1 has, and
# rank 3 has the last four between pairs that are nobody's.
LAYOUT = Layout.of(
    MESH,
    (12,),
    [(4,), (4,), (4,), (8,)],
    [
        Piece((Axis(2, 4, 1, 0), Axis(4, 1, 0, 1))),
        Piece((Axis(4, 1, 0, 1),), full_base=4, rank_base=2),
        Piece((Axis(4, 1, 0, 1),), full_base=8, rank_base=3, shard_base=2),
    ],
)


def findings_of(regions, nbytes):
    entry = StateEntry(dtype_named("float32"), LAYOUT, regions)
    tensor = TensorEntry("w", "parameter", LAYOUT, {"fp32": entry})
    catalog = Catalog("test", "/", (FileEntry("a", nbytes),), MESH, (tensor,), {})
    return [
        (found.kind, found.message)
        for found in prove_catalog(catalog)
        if found.kind in ("missing-shard", "truncated")
    ]


def test_shards_are_whole_whose_last_element_is_the_last_of_the_file():
    regions = [Region(0, 16 * rank) for rank in range(4)]

    assert findings_of(regions, 72) == []


def test_every_shard_that_reaches_past_its_file_is_told_of_with_its_rank():
    regions = [Region(0, 0), Region(0, 16), Region(0, 52), Region(0, 44)]

    first, last = findings_of(regions, 67)

    assert first[0] == last[0] == "truncated"
    assert "the shard of rank 2 ends at byte 68 of a, which has 67" in first[1]
    assert "the shard of rank 3 ends at byte 68 of a" in last[1]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_holds_elements_and_has_no_place_is_told_of(rank):
    regions = [None if place == rank else Region(0, 0) for place in range(4)]

    ((kind, message),) = findings_of(regions, 72)

    assert kind == "missing-shard"
    assert f"rank {rank} holds elements that no file has" in message
