"""Of what is under the name of an output, nothing is deleted that restride did not write."""

from __future__ import annotations

import os
import shutil

import pytest

from restride.errors import ExecutionError, ExistsError
from restride.storage import _strangers
from restride.storage._strangers import say_strangers
from restride.storage.unfinished import (
    Purpose,
    partial_folder,
    require_startable,
    unfinished_output,
)
from restride.testing.contents import sign, tree

FIRST = {"what": "it"}
PURPOSE = Purpose(FIRST, lambda _: "", lambda _: False)
WAYS = [{}, {"force": True}, {"resume": True}, {"resume": True, "force": True}]


@pytest.fixture
def out(tmp_path):
    """An output of three files."""
    folder = tmp_path / "out"
    for name in ("a.bin", "d/b.bin", "d/e/c.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    sign(folder)
    return folder


def write(out, *, meanwhile=lambda: None, **options):
    with unfinished_output(out, PURPOSE, **options) as place:
        if not place.is_resumed:
            place.begin([FIRST])
        place.files.preallocate("new", 1, resume=True)
        meanwhile()
        place.keeps = True
        place.publish()


def entries(folder):
    return sorted((str(path), os.lstat(path).st_size) for path in folder.rglob("*"))


def test_of_what_restride_wrote_nothing_is_a_stranger_nor_of_what_is_missing(out):
    assert say_strangers(out) == ""
    (out / "d/b.bin").unlink()
    assert say_strangers(out) == ""
    write(out, force=True)
    assert tree(out) == {"new": b"\0"}


def file_beside(out):
    (out / "mine").touch()
    return "holds mine, which restride did not write;"


def files_below(out):
    (out / "d/step").mkdir()
    for name in ("x.pt", "y.pt", "z.pt"):
        (out / "d/step" / name).touch()
    return "holds d/step/x.pt, which restride did not write, and 2 others;"


def empty_folder(out):
    (out / "step").mkdir()
    return "holds step/, which restride did not write;"


def dangling_link(out):
    (out / "link").symlink_to("nowhere")
    return "holds link, which restride did not write;"


def link_in_place_of_a_file(out):
    (out / "d/b.bin").rename(out.parent / "b.bin")
    (out / "d/b.bin").symlink_to(out.parent / "b.bin")
    return "holds d/b.bin, which restride did not write;"


def link_to_a_folder(out):
    (out / "d").rename(out.parent / "d")
    (out / "d").symlink_to(out.parent / "d")
    return "holds d, which restride did not write;"


def pipe(out):
    os.mkfifo(out / "pipe")
    return "holds pipe, which restride did not write;"


def another_size(out):
    (out / "d/b.bin").write_bytes(b"more than that")
    return "holds d/b.bin, which was changed since restride wrote it;"


def same_size_later(out):
    later = (out / "restride.json").stat().st_mtime + 3
    os.utime(out / "d/b.bin", (later, later))
    return "holds d/b.bin, which was changed since restride wrote it;"


def no_manifest(out):
    (out / "restride.json").unlink()
    return "holds a.bin, which restride did not write, and 2 others;"


def edited_manifest(out):
    path = out / "restride.json"
    path.write_bytes(path.read_bytes().replace(b"d/b.bin", b"d/B.bin"))
    return (
        r"holds a.bin, of which nothing says that restride wrote it, and 3 others "
        r"\(restride.json: it is not as it was written: its digest is of another content\);"
    )


def manifest_of_another_version(out):
    path = out / "restride.json"
    path.write_bytes(path.read_bytes().replace(b"manifest/2", b"manifest/1"))
    return r"and 3 others \(restride.json: \$.format: the format is 'restride-manifest/1'"


def pipe_as_manifest(out):
    (out / "restride.json").unlink()
    os.mkfifo(out / "restride.json")
    return "holds a.bin, which restride did not write, and 3 others;"


def manifest_of_something_else(out):
    shutil.rmtree(out)
    out.mkdir()
    (out / "restride.json").write_text("{}")
    return r"holds restride.json, of which nothing says that restride wrote it \(.*no manifest"


CHANGES = [
    file_beside,
    files_below,
    empty_folder,
    dangling_link,
    link_in_place_of_a_file,
    link_to_a_folder,
    pipe,
    another_size,
    same_size_later,
    no_manifest,
    edited_manifest,
    manifest_of_another_version,
    pipe_as_manifest,
    manifest_of_something_else,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_folder_with_anything_of_somebody_else_is_never_replaced(tmp_path, out, change, options):
    said = change(out)
    before = entries(tmp_path)
    (tmp_path / "link").symlink_to("out")

    for name in (out, tmp_path / "link"):
        with pytest.raises(ExistsError, match=f"^{out}: .*{said}") as caught:
            write(name, **options)
        # --force is not proposed where it is refused.
        assert caught.value.remedy == "move it away or remove it yourself, or name another output"

    (tmp_path / "link").unlink()
    assert entries(tmp_path) == before


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_saved_there_while_an_output_is_written_is_not_lost(out, change):
    found = []
    with pytest.raises(ExistsError) as caught:
        write(out, force=True, meanwhile=lambda: found.extend([change(out), entries(out)]))
    said, before = found
    assert caught.match(said)
    assert entries(out) == before

    for options in WAYS:  # what was written waits until that is moved away
        with pytest.raises(ExistsError, match=said):
            write(out, **options)
    out.rename(out.with_name("theirs"))
    write(out, resume=True)
    assert tree(out) == {"new": b"\0"}
    assert len(entries(out.with_name("theirs"))) == len(before)
    assert not partial_folder(out).exists()


def test_the_first_by_its_name_is_told_and_files_before_those_in_folders(out):
    for name in ("z/mine", "d/z/mine", "d/f/mine", "d/mine"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
        said = f"holds {name}, which restride did not write"
        assert say_strangers(out).startswith(said), name


def test_what_is_in_the_way_of_an_unfinished_output_is_told_first(out):
    """Neither going on nor beginning anew would work beside it."""
    with unfinished_output(out, PURPOSE, force=True) as place:
        place.begin([FIRST])
        place.keeps = True
    with pytest.raises(ExistsError, match="add --resume"):
        require_startable(out)
    (out / "mine").touch()
    for options in WAYS:
        with pytest.raises(ExistsError, match="holds mine, which restride did not write;"):
            require_startable(out, **options)


def test_no_more_is_counted_than_anybody_wants_to_know(out, monkeypatch):
    monkeypatch.setattr(_strangers, "_MOST_COUNTED", 2)
    (out / "restride.json").unlink()
    assert say_strangers(out) == "holds a.bin, which restride did not write, and at least 2 others"
    (out / "a.bin").unlink()
    assert say_strangers(out) == "holds d/b.bin, which restride did not write, and 1 other"


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(out, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ExecutionError, match=r"out: cannot be looked at \(Permission denied\)"):
        write(out, force=True)
    monkeypatch.undo()
    assert sorted(tree(out)) == ["a.bin", "d/b.bin", "d/e/c.bin", "restride.json"]
