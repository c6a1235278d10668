"""Bytes that a disk or a copy changed are found by the checksums that files of torch state."""

from __future__ import annotations

import shutil
import zipfile
from itertools import chain
from pathlib import Path
from threading import enumerate as threads

import pytest

from restride import api
from restride.executors import checksums
from restride.executors.checksums import check_sums
from restride.formats.opening import open_catalog

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def saved(tmp_path):
    shutil.copytree(RECORDED / "partitioned_z3", tmp_path / "saved")
    return tmp_path / "saved"


def records(path):
    """Name, first byte and size of each record that is not empty."""
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            with file.open(info) as record:
                if info.file_size:
                    yield info.filename, record._orig_compress_start, info.file_size


def change(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x20
    path.write_bytes(content)


def changed_states(saved):
    """For each storage of a file, what `check` says when its last byte is another one."""
    path = saved / "step" / OPTIMIZER
    content = path.read_bytes()
    for name, start, nbytes in records(path):
        if "/data/" in name:
            change(path, start + nbytes - 1)
            yield name, api.check(saved).findings
            path.write_bytes(content)


def test_a_byte_of_any_storage_is_not_changed_without_a_word(saved):
    """Under ZeRO-3 nothing else has these bytes: `check` said ok of them all."""
    found = dict(changed_states(saved))

    assert len(found) > 4
    for name, findings in found.items():
        (told,) = [finding for finding in findings if finding.kind == "checksum-differs"]
        assert told.severity == "error"
        assert told.where == f"step/{OPTIMIZER}"
        assert f"by the checksum of {name.partition('/')[2]}" in told.message


def test_what_a_changed_record_holds_is_named(saved):
    tensors = {
        (tensor.name, state)
        for tensor in open_catalog(saved).tensors
        for state in tensor.states
        if tensor.kind == "parameter" and not tensor.is_frozen
    }

    named = [
        finding
        for _, findings in changed_states(saved)
        for finding in findings
        if finding.kind == "checksum-differs"
    ]

    arrays = [*chain(*(finding.details["arrays"] for finding in named))]
    assert {(tensor, state) for tensor, state in arrays if state != "step"} == {
        (tensor, state) for tensor, state in tensors if state != "step"
    }
    assert any(
        "which holds state 'exp_avg' of tensor 'embed.weight' and" in finding.message
        for finding in named
    )


def test_a_changed_record_is_said_to_hold_what_begins_in_it_and_no_more(saved):
    catalog = open_catalog(saved)
    path = f"step/{OPTIMIZER}"
    (number,) = [number for number, file in enumerate(catalog.files) if file.name == path]
    begins = {
        (region.start_nbytes, tensor.name, state)
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
        for region in entry.regions
        if region is not None and region.file == number
    }
    of = {name: (start, start + nbytes) for name, start, nbytes in records(saved / path)}

    for name, findings in changed_states(saved):
        (told,) = [finding for finding in findings if finding.kind == "checksum-differs"]
        first, last = of[name]
        held = sorted(found for found in begins if first <= found[0] < last)
        assert (told.details["start_nbytes"], told.details["stop_nbytes"]) == (first, last)
        assert told.details["arrays"] == [[tensor, state] for _, tensor, state in held]
        others = {0: ":", 1: ":", 2: " and 1 other array:"}
        more = others.get(len(held), f" and {len(held) - 1} other arrays:")
        what = f", which holds state {held[0][2]!r} of tensor {held[0][1]!r}" if held else ""
        assert f"{name.partition('/')[2]}{what}{more} copy it again" in told.message


def test_a_model_file_that_was_changed_is_told_of(saved):
    path = saved / "step" / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    (start,) = [start for name, start, _ in records(path) if name.endswith("data.pkl")]
    at = path.read_bytes().index(b"global_steps") + len(b"global_steps") + 3
    assert start < at
    change(path, at)

    assert "checksum-differs" in {finding.kind for finding in api.check(saved).findings}


def test_all_bytes_of_records_are_read_and_told(saved):
    parts = []
    catalog = open_catalog(saved)
    paths = [saved / file.name for file in catalog.files]

    findings, nbytes = check_sums(catalog, workers=2, rows=1, on_read=parts.append)

    assert findings == []
    assert nbytes == sum(parts) == sum(size for path in paths for _, _, size in records(path))
    assert max(parts) == 1024
    assert api.check(saved).verified_nbytes == nbytes < checksums.summed_nbytes(catalog)


def test_files_without_checksums_are_not_read(saved, tmp_path):
    """A conversion does not know them when it begins; its manifest has digests."""
    api.convert(saved, tmp_path / "out", to="deepspeed", dp=2)
    (tmp_path / "out" / "restride.json").unlink()
    catalog = open_catalog(tmp_path / "out")
    path = tmp_path / "out" / "step" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    start = next(start for name, start, size in records(path) if "/data/" in name and size > 100)
    change(path, start + 50)

    findings, nbytes = check_sums(catalog, workers=1, rows=1, on_read=lambda _: None)

    assert findings == []
    assert 0 < nbytes < sum(file.nbytes for file in catalog.files) / 3


def test_an_output_with_its_manifest_is_held_against_that_alone(saved, tmp_path, monkeypatch):
    api.convert(saved, tmp_path / "out", to="universal")
    monkeypatch.setattr("restride.checking.check_sums", None)

    assert api.check(tmp_path / "out").verified_nbytes


def test_reading_ends_with_the_first_error(saved):
    """And no thread goes on behind the back of who asked."""

    def on_read(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_sums(open_catalog(saved), workers=2, rows=1, on_read=on_read)

    assert not [thread for thread in threads() if thread.name.startswith("restride")]
