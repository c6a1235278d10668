"""Files of an output are taken up as they are, and everything that was written is made durable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.errors import ExecutionError, ExistsError
from restride.layouts import replicated
from restride.storage import output_files
from restride.storage.output_files import OutputFiles

LAYOUT = replicated((4,), mesh={"tp": 1})
OUTPUT = Output(
    (OutputFile("a", 40, ((2, b"xy"),)), OutputFile("d/b", 11), OutputFile("e", 3, ((0, b"zzz"),))),
    tuple(
        OutputTensor(name, DTYPES["uint8"], LAYOUT, (Region(*region),))
        for name, region in (("s", (0, 11)), ("t", (0, 30)), ("u", (1, 3)))
    ),
)
"""Shards of four bytes; gaps before, between and behind them, and one of a whole file."""

OPEN = Path("/proc/self/fd")
PATHS = [Path(file.name) for file in OUTPUT.files]


@pytest.fixture
def files(tmp_path):
    with OutputFiles(tmp_path / "out") as found:
        yield found


def contents(files):
    return [(files.path / path).read_bytes() for path in PATHS]


def made_dirty(files):
    """All files as an earlier run left them, with something wherever nothing is fixed yet."""
    files.create(OUTPUT)
    files.close()
    for path in PATHS:
        (files.path / path).write_bytes(b"\xff" * (files.path / path).stat().st_size)


@pytest.mark.parametrize("zeros", [1, 3, 1 << 20])
def test_what_is_gone_on_with_keeps_its_shards_and_nothing_else(files, monkeypatch, zeros):
    monkeypatch.setattr(output_files, "_ZEROS_NBYTES", zeros)
    made_dirty(files)
    with OutputFiles(files.path) as later:
        later.create(OUTPUT, resume=True)

    shard = b"\xff" * 4
    assert contents(files) == [
        b"\0\0xy" + bytes(7) + shard + bytes(15) + shard + bytes(6),
        bytes(3) + shard + bytes(4),
        b"zzz",
    ]


def test_a_file_that_is_there_in_part_needs_room_and_is_made_whole(files, monkeypatch):
    made_dirty(files)
    os.truncate(files.path / "d/b", 10)
    with OutputFiles(files.path) as later:
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 9, 9, 10, *[0] * 5)))
        with pytest.raises(ExecutionError, match="no room for 11 B of 1 file, 10 B are free"):
            later.create(OUTPUT, resume=True)
        monkeypatch.undo()
        later.create(OUTPUT, resume=True)
    assert contents(files)[1] == bytes(3) + b"\xff" * 4 + bytes(4)


def test_a_link_in_the_place_of_a_file_is_not_written_through(files, tmp_path):
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    files.path.mkdir()
    (files.path / "e").symlink_to(mine)
    for resume in (False, True):
        with pytest.raises((ExecutionError, ExistsError), match="/e"):
            files.create(Output(OUTPUT.files[2:]), resume=resume)
    assert mine.read_bytes() == b"mine"


def test_files_that_another_process_made_are_written_to_if_they_are_what_it_makes(files):
    files.create(OUTPUT)
    with OutputFiles(files.path) as other:
        other.adopt(OUTPUT)
        other.write_exact("d/b", 3, b"1234")
    assert contents(files)[1] == bytes(3) + b"1234" + bytes(4)

    os.truncate(files.path / "d/b", 12)
    with (
        OutputFiles(files.path) as other,
        pytest.raises(ExecutionError, match=r"d/b: has 12 bytes, and not the 11 that process 0"),
    ):
        other.adopt(OUTPUT)
    (files.path / "d/b").unlink()
    with (
        OutputFiles(files.path) as other,
        pytest.raises(ExecutionError, match=r"d/b: cannot be looked at \(No such file"),
    ):
        other.adopt(OUTPUT)


def test_what_is_written_is_made_durable_once_and_again_after_more(files, monkeypatch):
    synced = []
    monkeypatch.setattr(output_files, "sync_path", lambda path: synced.append(Path(path).name))

    def taken():
        found = sorted(synced)
        synced.clear()
        return found

    files.create(OUTPUT)
    files.sync_files(["a"])
    files.sync_folders()
    assert taken() == ["a", "d", "out"]
    files.sync()
    assert taken() == ["b", "e"]
    files.sync()
    assert taken() == []
    files.write_exact("a", 0, b"1")
    files.set_written("e")  # by somebody who holds it
    files.sync()
    assert taken() == ["a", "e"]


def test_what_is_written_while_a_file_is_made_durable_is_made_durable_after_it(files, monkeypatch):
    synced = []

    def sync(path):
        synced.append(Path(path).name)
        if len(synced) == 1:
            files.write_exact("a", 0, b"1")

    monkeypatch.setattr(output_files, "sync_path", sync)
    files.create(OUTPUT)
    files.sync_files(["a"])
    files.sync()
    assert synced.count("a") == 2


def test_files_that_are_not_of_the_output_are_named_and_keep_it_from_being_published(files):
    files.create(OUTPUT)
    files.sync()
    for name in ("d/w", "d/x", "y", "z"):
        (files.path / name).touch()
    with pytest.raises(ExistsError, match=r"holds d/w, d/x, y, 4 in all, not of the output"):
        files.sync()


def test_a_folder_that_cannot_be_listed_is_an_error(files, monkeypatch):
    files.create(OUTPUT)
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("/d"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ExecutionError, match=r"cannot be listed \(Input/output error\)"):
        files.sync()


def test_no_file_stays_open(files):
    before = len(list(OPEN.iterdir()))
    files.create(OUTPUT)
    files.write_exact("a", 0, b"1")
    files.sync()
    assert len(list(OPEN.iterdir())) == before
