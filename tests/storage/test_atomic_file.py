"""A small file is there whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from restride.errors import ExecutionError, ExistsError
from restride.storage import atomic_file


def write_small_file(path, content, *, objection=lambda _: "", force=False):
    atomic_file.write_small_file(path, content, objection=objection, force=force)


def require_place(path, *, objection=lambda _: "", force=False):
    atomic_file.require_place(path, objection=objection, force=force)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def refusing(number):
    """An operation that the system refuses."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_file_is_written_and_nothing_stays_beside_it(tmp_path):
    write_small_file(tmp_path / "f", b"content")

    assert (tmp_path / "f").read_bytes() == b"content"
    assert names_in(tmp_path) == ["f"]


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "f").write_bytes(b"old")

    with pytest.raises(ExistsError, match="--force"):
        write_small_file(tmp_path / "f", b"new")
    kept = (tmp_path / "f").read_bytes()
    write_small_file(tmp_path / "f", b"new", force=True)

    assert (kept, (tmp_path / "f").read_bytes()) == (b"old", b"new")
    assert names_in(tmp_path) == ["f"]


def test_a_file_of_another_kind_is_replaced_by_nothing(tmp_path):
    (tmp_path / "f").write_bytes(b"theirs")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")

    def objection(path):
        assert path.read_bytes() == b"theirs"  # it is not asked of a pipe
        return "holds poems"

    for name, problem in {"f": "holds poems", "pipe": "is no file", "loop": "is no file"}.items():
        said = f"/{name}: it exists already, and {problem}; choose another name, or move "
        for force in (False, True):  # --force is not proposed where it would be refused
            with pytest.raises(ExistsError, match=said):
                require_place(tmp_path / name, objection=objection, force=force)
            with pytest.raises(ExistsError, match=said):
                write_small_file(tmp_path / name, b"new", objection=objection, force=force)

    assert (tmp_path / "f").read_bytes() == b"theirs"
    assert (tmp_path / "pipe").is_fifo()
    assert names_in(tmp_path) == ["f", "loop", "pipe"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"theirs")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)

    with pytest.raises(ExistsError):
        write_small_file(tmp_path / "f", b"ours")

    assert (tmp_path / "f").read_bytes() == b"theirs"
    assert names_in(tmp_path) == ["f"]


@pytest.mark.parametrize("write", [require_place, lambda path: write_small_file(path, b"x")])
@pytest.mark.parametrize(
    ("name", "error"), [("old", ExistsError), (".", ExistsError), ("no/f", ExecutionError)]
)
def test_what_cannot_be_written_is_refused_before_as_it_would_be_then(tmp_path, write, name, error):
    (tmp_path / "old").write_bytes(b"old")

    with pytest.raises(error):
        write(tmp_path / name)

    assert names_in(tmp_path) == ["old"]


def test_a_place_that_is_free_stays_free(tmp_path):
    require_place(tmp_path / "f")

    assert names_in(tmp_path) == []


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def no_links(request, monkeypatch):
    """A file system on which a file has one name, by all that such ones answer."""
    monkeypatch.setattr(Path, "hardlink_to", refusing(request.param))


@pytest.mark.usefixtures("no_links")
def test_a_file_system_without_hard_links_gets_the_file_and_loses_none(tmp_path, monkeypatch):
    write_small_file(tmp_path / "f", b"content")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)

    with pytest.raises(ExistsError):
        write_small_file(tmp_path / "f", b"another")

    assert (tmp_path / "f").read_bytes() == b"content"
    assert names_in(tmp_path) == ["f"]


@pytest.mark.usefixtures("no_links")
def test_nothing_of_a_file_that_cannot_be_put_in_place_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", refusing(errno.EIO))

    with pytest.raises(ExecutionError, match="Input/output error"):
        write_small_file(tmp_path / "f", b"content")

    assert names_in(tmp_path) == []


def test_an_error_of_a_link_is_not_taken_for_a_file_system_without(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "hardlink_to", refusing(errno.ENOSPC))

    with pytest.raises(ExecutionError, match="No space left"):
        write_small_file(tmp_path / "f", b"content")

    assert names_in(tmp_path) == []


def test_a_folder_is_never_replaced(tmp_path):
    (tmp_path / "f").mkdir()

    with pytest.raises(ExistsError, match="it is a folder"):
        write_small_file(tmp_path / "f", b"new", force=True)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "f").symlink_to(tmp_path / "real")

    write_small_file(tmp_path / "f", b"new", force=True)

    assert (tmp_path / "f").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_an_error_of_the_system_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"old")

    def failing(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)

    with pytest.raises(ExecutionError, match=r"f: cannot be written \(No space left on device\)"):
        write_small_file(tmp_path / "f", b"new", force=True)

    assert (tmp_path / "f").read_bytes() == b"old"
    assert names_in(tmp_path) == ["f"]


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ExecutionError, match="missing/f: cannot be written"):
        write_small_file(tmp_path / "missing" / "f", b"new")
