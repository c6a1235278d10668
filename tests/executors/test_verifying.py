"""Blocks that are read back are held against their digests, in the memory that there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from restride.arrays.fingerprint import MODULUS, Digester, scratch_nbytes
from restride.executors.verifying import ROW_NBYTES, Extent, digest_rows, find_damage


@example(budget=1 << 24, workers=8)
@example(budget=16 * 3 * scratch_nbytes(16), workers=3)
@given(budget=st.integers(1, 1 << 28), workers=st.integers(1, 64))
def test_digesters_are_as_large_as_a_sixteenth_of_a_budget_lets_all_workers_have(budget, workers):
    rows = digest_rows(budget, workers)

    assert rows in {1, 2, 4, 8, 16, 32, 64, 128}
    assert rows == 1 or workers * scratch_nbytes(rows) <= budget // 16
    assert rows == 128 or workers * scratch_nbytes(2 * rows) > budget // 16


@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 3, 8]), workers=st.integers(1, 3))
def test_a_byte_is_missed_in_no_extent_and_no_sound_one_is_damaged(
    tmp_path_factory, seed, rows, workers
):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.getbasetemp() / "blocks"
    content = rng.integers(0, 256, 20 * ROW_NBYTES, np.uint8)
    extents = []
    for _ in range(int(rng.integers(1, 9))):
        start, stop = sorted(map(int, rng.integers(0, content.size + 1, 2)))
        base = int(rng.integers(0, 5 * ROW_NBYTES))
        digest = Digester().digest(content[start:stop], base)
        extents.append(Extent(str(path), start, stop - start, base, digest))
    changed = int(rng.integers(0, content.size))
    content[changed] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(content.tobytes())
    read: list[int] = []

    found = list(find_damage(extents, workers=workers, rows=rows, on_read=read.append))

    expected = [
        number
        for number, extent in enumerate(extents)
        if extent.start_nbytes <= changed < extent.start_nbytes + extent.nbytes
    ]
    assert [damage.position for damage in found] == expected
    assert [damage.extent for damage in found] == [extents[number] for number in expected]
    assert {damage.reason for damage in found} <= {"other bytes than were written"}
    assert read == [extent.nbytes for extent in extents]


def test_files_that_end_early_and_files_that_are_gone_are_damage_of_their_extents(tmp_path):
    (tmp_path / "short").write_bytes(bytes(10))
    extents = [
        Extent(str(tmp_path / "gone"), 0, 5, 0, 0),
        Extent(str(tmp_path / "short"), 0, 10, 0, 0),
        Extent(str(tmp_path / "short"), 5, 10, 0, 0),
    ]

    first, last = find_damage(extents, workers=1, rows=1, on_read=lambda _: None)

    assert (first.position, last.position) == (0, 2)
    assert "No such file" in first.reason
    assert last.reason


COUNT = 300


def extents_of(path, nbytes):
    """A file of so many blocks of one size, and what is known of each."""
    content = bytes(n % 251 for n in range(COUNT * nbytes))
    path.write_bytes(content)
    digester = Digester(1)
    return [
        Extent(
            str(path),
            at,
            nbytes,
            0,
            digester.digest(memoryview(content)[at : at + nbytes], 0) % MODULUS,
        )
        for at in range(0, COUNT * nbytes, nbytes)
    ]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("nbytes", [5, 3000])
def test_every_damaged_block_is_told_of_by_its_number(tmp_path, workers, nbytes):
    path = tmp_path / "a"
    extents = extents_of(path, nbytes)
    damaged = [0, 63, 64, 65, 130, 299]
    with path.open("r+b") as file:
        for number in damaged:
            file.seek(number * nbytes + nbytes - 1)
            file.write(b"\xff")
    read = []

    found = list(find_damage(iter(extents), workers=workers, rows=1, on_read=read.append))

    assert [damage.position for damage in found] == damaged
    assert [damage.extent for damage in found] == [extents[number] for number in damaged]
    assert {damage.reason for damage in found} == {"other bytes than were written"}
    assert read == [nbytes] * COUNT


def test_a_block_that_cannot_be_read_leaves_its_neighbours_to_be_looked_at(tmp_path):
    extents = extents_of(tmp_path / "a", 5)
    extents[2:2] = [Extent(str(tmp_path / "none"), 0, 5, 0, 1)]

    (damage,) = find_damage(extents, workers=1, rows=1, on_read=lambda _: None)

    assert damage.position == 2
    assert "none" in damage.extent.path
