"""What earlier processes noted is taken up exactly where the bytes are still those they wrote."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride.arrays.fingerprint import Digester
from restride.executors import blocks, parts, resuming
from restride.executors.blocks import Block, BlockTable
from restride.executors.events import ReplicaDrift
from restride.executors.journaled import claim_records, drift_records
from restride.executors.parts import Part
from restride.executors.resuming import noted_blocks, read_back

SIZE = 2048
ARRAYS = [("a", 0, 2), ("b", 0, 1), ("c", 0, 0), ("a", 1, 3), ("d", 1, 1)]
"""Tensor, file and whole blocks of each region; half a block follows, where there is one."""
EVERY = [(n, b) for n, (_, _, count) in enumerate(ARRAYS) if count for b in range(count + 1)]


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, parts.counting, resuming):
            patch.setattr(module, "BLOCK_NBYTES", SIZE)
        yield


@pytest.fixture(scope="module")
def written(small_blocks, tmp_path_factory):  # noqa: ARG001 - they have these blocks
    """An output of two files, its regions, and all its blocks."""
    folder = tmp_path_factory.mktemp("files")
    ends, regions = [24, 8], []
    for tensor, file, count in ARRAYS:
        nbytes = count * SIZE + SIZE // 2 if count else 0
        regions.append(
            SimpleNamespace(
                tensor=tensor,
                state="weight",
                nbytes=nbytes,
                target_file=file,
                target_start_nbytes=ends[file],
            )
        )
        ends[file] += nbytes
    rng = np.random.default_rng(3)
    names = ["one", "two"]
    for name, nbytes in zip(names, ends, strict=True):
        (folder / name).write_bytes(rng.bytes(nbytes))
    found = {
        place: Block(*place, digest_of(folder / names[at.target_file], at, place[1]))
        for place in EVERY
        for at in (regions[place[0]],)
    }
    output = SimpleNamespace(files=[SimpleNamespace(name=name) for name in names])
    return SimpleNamespace(folder=folder, output=output, regions=regions, blocks=found)


def digest_of(path, region, number):
    start, stop = number * SIZE, min(region.nbytes, (number + 1) * SIZE)
    content = path.read_bytes()[region.target_start_nbytes :][start:stop]
    return Digester().digest(content, start)


def read(written, journals, **options):
    nbytes = []
    back = read_back(
        *(journals, SimpleNamespace(path=written.folder), written.output, written.regions),
        **{"workers": 2, "rows": 1, "on_read": nbytes.append, **options},
    )
    return back, sum(nbytes)


def table_of(written):
    return BlockTable(written.regions, digest_rows=1)


def places(back):
    return {(block.region, block.number) for block in back.blocks}


def drift_of(tensor, ranks=(0, 1), **found):
    counts = {"numel": 100, "different_numel": 3, "largest": 1.0, **found}
    return ReplicaDrift(tensor, "weight", ranks, **counts)


@settings(max_examples=25)
@given(
    noted=st.sets(st.sampled_from(EVERY)),
    wrong=st.sets(st.sampled_from(EVERY)),
    others=st.sets(st.sampled_from(EVERY)),
    drifted=st.sets(st.sampled_from("abd")),
    part=st.none() | st.tuples(st.sampled_from(EVERY), st.sampled_from(EVERY)),
)
def test_what_is_as_it_was_noted_is_kept_but_for_drifted_arrays_that_are_not_whole(
    written, noted, wrong, others, drifted, part
):
    table = table_of(written)
    part = part and Part(min(part), max(part))
    digests = {
        place: Block(*place, block.digest ^ (place in wrong))
        for place, block in written.blocks.items()
    }
    claims = (claim_records([digests[place] for place in some], table) for some in (noted, others))
    first, second = (list(records) for records in claims)
    rows = {tensor: drift_of(tensor) for tensor in sorted(drifted)}
    journals = [[*drift_records(rows.values()), *first], second]

    back, nbytes = read(written, journals, part=part)

    good = (noted | others) - wrong
    arrays = {tensor: [(n, b) for n, b in EVERY if ARRAYS[n][0] == tensor] for tensor in "abd"}
    for tensor in drifted:
        needed = [place for place in arrays[tensor] if part is None or place in part]
        if not good.issuperset(needed):
            good -= set(arrays[tensor])
    kept = {tensor for tensor in drifted if good & set(arrays[tensor])}
    assert places(back) == good
    assert all(block == written.blocks[block.region, block.number] for block in back.blocks)
    assert {key[0] for key in back.rows} == kept
    assert back.is_whole == (good == noted | others and kept == drifted)
    assert nbytes == table.nbytes(Block(*place, 0) for place in noted | others)
    again, _ = read(written, [list(back.records(table))], part=part)
    assert (places(again), again.rows, again.is_whole) == (good, back.rows, True)


def test_the_last_sums_of_each_process_are_added_up(written):
    every = list(claim_records(list(written.blocks.values()), table_of(written)))
    journals = [
        [*drift_records([drift_of("a", largest=9.0), drift_of("a", different_numel=4)]), *every],
        [*drift_records([drift_of("a", largest=2.0), drift_of("a", (0, 2))])],
        [{"drift": {"tensor": "a"}}, {"drift": 5}],
    ]
    back, _ = read(written, journals)
    assert back.rows == {
        ("a", "weight", (0, 1)): drift_of("a", numel=200, different_numel=7, largest=2.0),
        ("a", "weight", (0, 2)): drift_of("a", (0, 2)),
    }
    assert back.is_whole


def test_what_is_taken_up_is_done_and_counted(written):
    some = [EVERY[0], EVERY[-1]]
    records = [
        *drift_records([drift_of("c")]),  # of which no byte is there
        *claim_records([written.blocks[place] for place in some], table_of(written)),
    ]
    back, _ = read(written, [records])
    table, drift = table_of(written), SimpleNamespace(rows={})
    assert back.take(table, drift) == SIZE + SIZE // 2
    assert table.left_nbytes() == sum(r.nbytes for r in written.regions) - SIZE - SIZE // 2
    assert table.digests(0)[0] == written.blocks[0, 0].digest
    assert drift.rows == {}
    assert not back.is_whole


def test_records_that_name_no_block_of_the_plan_are_not_believed(written):
    digits = f"{written.blocks[0, 0].digest:032x}"
    good = {"region": 0, "block": 0, "digests": [digits]}
    strange = [
        *({**good, "region": number} for number in (-1, len(ARRAYS), True, "0", 2)),
        *({**good, "block": number} for number in (-1, 3, None)),
        *(
            {**good, "digests": some}
            for some in ([digits[1:]], [5], ["g" * 32], digits, [digits + "0"])
        ),
        {"region": 0, "block": 0},
        {},
    ]
    for record in strange:
        assert (0, 0) not in noted_blocks([record], written.regions), record
        assert all(0 <= n < 3 for _, n in noted_blocks([record], written.regions))
    found = noted_blocks([*strange, {**good, "digests": [digits] * 9}], written.regions)
    assert {place for place in found if place[0] == 0} == {(0, 0), (0, 1), (0, 2)}


def test_the_later_of_two_records_of_one_block_counts(written):
    """A block that was found damaged is written again, and noted again."""
    wrong = Block(0, 0, written.blocks[0, 0].digest ^ 1)
    table = table_of(written)
    records = [*claim_records([wrong], table), *claim_records([written.blocks[0, 0]], table)]
    assert read(written, [records])[0].is_whole
    assert not read(written, [records[::-1]])[0].blocks


def test_files_that_are_gone_have_nothing_of_what_was_noted(written, tmp_path):
    (tmp_path / "two").write_bytes((written.folder / "two").read_bytes()[:-1])
    records = list(claim_records(list(written.blocks.values()), table_of(written)))
    back = read_back(
        *([records], SimpleNamespace(path=tmp_path), written.output, written.regions),
        workers=1,
        rows=1,
        on_read=lambda _: None,
    )
    assert places(back) == {place for place in EVERY if ARRAYS[place[0]][1] == 1} - {EVERY[-1]}
