"""Whatever fails, and wherever the process dies: nothing wrong under a final name, and a way on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from restride import api
from restride.errors import ExistsError, RestrideError
from restride.storage.journal import read_journal
from restride.storage.unfinished import partial_folder
from restride.testing.contents import tree
from restride.testing.faults import Died, failing_files

pytestmark = pytest.mark.usefixtures("small_blocks")

BLOCK = 16 << 10
OPTIONS = {"workers": 1, "sync_nbytes": BLOCK, "budget_nbytes": 1 << 21, "max_shard_nbytes": 50_000}


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a place: hundreds of runs wait for no disk."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own below it
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def source(tmp_path):
    """Three tensors: one of several blocks and steps, one of a few bytes, one of none."""
    sizes = {"model.big": 41_000, "model.empty": 0, "model.small": 24}
    header, start = {}, 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header).encode()
    content = np.random.default_rng(0).integers(0, 256, start, np.uint8).tobytes()
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    return folder


def operations(source, folder, **options):
    """How many operations a conversion takes."""
    folder.mkdir()
    with failing_files(folder) as files:
        api.convert(source, folder / "out", **OPTIONS, **options)
    return len(files.calls)


def require_nothing_wrong(out, reference, old=None):
    """Under the final name is nothing, what was there, or all of the output."""
    if out.exists():
        assert tree(out) in ([reference] if old is None else [reference, old])


def claimed_nbytes(out):
    records = read_journal(partial_folder(out) / "journal")
    return sum(record["nbytes"] for record in records[1:] if "nbytes" in record)


def finish(source, out, reference, **options):
    report = api.convert(source, out, resume=True, **OPTIONS, **options)
    assert tree(out) == reference
    assert not partial_folder(out).exists()
    return report


def die_everywhere(source, tmp_path, reference, *, old=None, **options):
    """Let a conversion die at each of its operations in turn; yield what each leaves.

    A thread of its own makes things durable, so that there may be some operations more or less.
    """
    force = {"force": True} if old else {}
    count = operations(source, tmp_path / "count", **force)
    assert count > 30
    for at in range(1, count + 3):
        folder = tmp_path / f"run{at}"
        folder.mkdir()
        if old:
            shutil.copytree(tmp_path / "old", folder / "out")
        try:
            with failing_files(folder, at=at, **options):
                api.convert(source, folder / "out", **OPTIONS, **force)
        except Died:
            require_nothing_wrong(folder / "out", reference, old)
            yield folder / "out"
        else:
            assert at > 30
            assert tree(folder / "out") == reference
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_torn", [False, True])
def test_after_a_death_at_any_operation_a_resumed_conversion_is_the_same(
    source, tmp_path, reference, is_torn
):
    before = tree(source)
    resumed = 0
    for out in die_everywhere(source, tmp_path, reference, is_torn=is_torn):
        claimed = claimed_nbytes(out)
        report = finish(source, out, reference)
        assert report.resumed_nbytes >= claimed
        resumed += report.resumed_nbytes

    assert resumed > 0
    assert tree(source) == before


def test_what_was_noted_outlives_the_loss_of_power(source, tmp_path, reference):
    for out in die_everywhere(source, tmp_path, reference, loses=True):
        claimed = claimed_nbytes(out)
        report = finish(source, out, reference)
        assert report.resumed_nbytes >= claimed


def test_without_waiting_for_the_disk_a_death_of_the_process_loses_nothing(
    source, tmp_path, reference
):
    (tmp_path / "count").mkdir()
    with failing_files(tmp_path / "count") as files:
        api.convert(source, tmp_path / "count" / "out", durable=False, **OPTIONS)
    assert not any("sync" in call for call in files.calls)
    assert tree(tmp_path / "count" / "out") == reference

    for at in range(2, len(files.calls) - 2, 3):
        folder = tmp_path / f"run{at}"
        folder.mkdir()
        with pytest.raises(Died), failing_files(folder, at=at):
            api.convert(source, folder / "out", durable=False, **OPTIONS)
        require_nothing_wrong(folder / "out", reference)
        claimed = claimed_nbytes(folder / "out")
        report = finish(source, folder / "out", reference)
        assert report.resumed_nbytes >= claimed


@pytest.mark.parametrize("loses", [False, True])
def test_what_is_replaced_is_there_until_the_new_is(source, tmp_path, reference, loses):
    api.convert(source, tmp_path / "old", workers=1, dtype=None)
    old = tree(tmp_path / "old")
    for out in die_everywhere(source, tmp_path, reference, old=old, loses=loses):
        if not out.exists():
            assert tree(partial_folder(out) / "replaced") == old
        finish(source, out, reference, force=True)


def test_after_a_death_between_the_two_names_both_contents_are_there(source, tmp_path, reference):
    out = tmp_path / "out"
    api.convert(source, out, workers=1)
    old = tree(out)
    with pytest.raises(Died), failing_files(tmp_path, at="rename files"):
        api.convert(source, out, force=True, **OPTIONS)
    assert not out.exists()
    assert tree(partial_folder(out) / "replaced") == old

    with pytest.raises(ExistsError, match=r"41.0 kB of 41.0 kB done; add --resume"):
        api.convert(source, out, **OPTIONS)
    assert tree(out) == old != reference

    finish(source, out, reference, force=True)


def test_a_conversion_that_had_finished_is_not_done_again(source, tmp_path, reference):
    out = tmp_path / "out"
    with pytest.raises(Died), failing_files(tmp_path, at="unlink journal"):
        api.convert(source, out, **OPTIONS)
    assert partial_folder(out).exists()

    for _ in range(2):
        report = finish(source, out, reference)
        assert report.read_nbytes == 0
        assert report.resumed_nbytes == 41_024

    with pytest.raises(ExistsError, match="--force"):
        api.convert(source, out, resume=True, dtype="float32", **OPTIONS)


def error_of(source, out, folder, **options):
    with failing_files(folder, **options):
        try:
            api.convert(source, out, **OPTIONS)
        except RestrideError as error:
            return error
    return None


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "lasting"), (errno.EIO, "once"), (errno.EACCES, "once")]
)
def test_after_an_error_at_any_operation_a_resumed_conversion_is_the_same(
    source, tmp_path, reference, number, kind
):
    before = tree(source)
    count = operations(source, tmp_path / "count")
    failed = kept = 0
    for at in range(1, count + 1):
        folder = tmp_path / f"run{at}"
        folder.mkdir()
        out = folder / "out"
        error = error_of(source, out, folder, at=at, number=number, kind=kind)
        require_nothing_wrong(out, reference)
        if error is None:
            assert tree(out) == reference
            continue
        failed += 1
        is_kept = claimed_nbytes(out) > 0
        kept += is_kept
        assert str(folder) in str(error)
        assert ("--resume" in str(error)) == is_kept
        assert is_kept or not partial_folder(out).exists()
        finish(source, out, reference)
        shutil.rmtree(folder)

    assert failed > count / 2
    assert kept > 5
    assert tree(source) == before
