"""An output directory appears complete or not at all, and nothing else is touched."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from restride.checkpoint.output import Output, OutputFile
from restride.errors import ExecutionError, ExistsError, PlanError
from restride.storage import output_files, reserving
from restride.storage.companions import Team
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import locked
from restride.storage.output_files import OutputFiles
from restride.storage.unfinished import Purpose, require_startable, unfinished_output
from restride.testing.contents import sign
from restride.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST = {"what": "conversion of ckpt", "nbytes": 100}


@contextmanager
def atomic_directory(final: Path, **options: object) -> Iterator[OutputFiles]:
    """An output of one block, which is published at its end."""
    purpose = Purpose(FIRST, lambda _: "", lambda _: False)
    with unfinished_output(final, purpose, **options) as place:
        place.begin([FIRST])
        yield place.files
        place.publish()


def tree(root: Path) -> dict[str, bytes]:
    """All files but manifests."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "restride.json"
    }


def write(final: Path, content: bytes, **options: object) -> None:
    with atomic_directory(final, **options) as directory:
        directory.preallocate("a/b.bin", len(content))
        directory.write_exact("a/b.bin", 0, content)
    sign(final)


def test_nothing_is_under_the_final_name_before_the_end(tmp_path: Path) -> None:
    final = tmp_path / "out"

    with atomic_directory(final) as directory:
        directory.preallocate("a.bin", 3)
        assert not final.exists()
        directory.write_exact("a.bin", 0, b"abc")

    assert tree(tmp_path) == {"out/a.bin": b"abc"}


def test_a_preallocated_file_is_zero_where_nobody_writes(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        directory.preallocate("a.bin", 10_000)
        directory.preallocate("empty", 0)
        directory.write_exact("a.bin", 5000, b"abc")

    assert tree(tmp_path / "out") == {
        "a.bin": bytes(5000) + b"abc" + bytes(4997),
        "empty": b"",
    }


def test_an_output_is_created_with_its_fixed_parts(tmp_path: Path) -> None:
    output = Output((OutputFile("a", 6, ((0, b"ab"), (4, b"ef"))), OutputFile("b", 1)))

    with atomic_directory(tmp_path / "out") as directory:
        directory.create(output)

    assert tree(tmp_path / "out") == {"a": b"ab\0\0ef", "b": b"\0"}


def test_threads_write_into_the_same_files(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory, ThreadPoolExecutor(4) as threads:
        for name in "abc":
            directory.preallocate(name, 4000)
        places = [(name, start) for start in range(0, 4000, 100) for name in "abc"]
        list(threads.map(lambda p: directory.write_exact(p[0], p[1], b"%100d" % p[1]), places))

    for content in tree(tmp_path / "out").values():
        assert content == b"".join(b"%100d" % start for start in range(0, 4000, 100))


@pytest.mark.usefixtures("kept_while_open")
@pytest.mark.parametrize("is_published", [True, False])
def test_nothing_is_left_beside_an_output_where_removed_files_stay_while_they_are_open(
    tmp_path: Path, *, is_published: bool
) -> None:
    with suppress(KeyError), atomic_directory(tmp_path / "out") as directory:
        directory.preallocate("a/b.bin", 1)
        directory.write_exact("a/b.bin", 0, b"x")
        if not is_published:
            raise KeyError

    assert [path.name for path in tmp_path.iterdir()] == ["out"] * is_published


@pytest.mark.parametrize("name", [".nfs000000000001", ".fuse_hidden0000000100000001"])
def test_what_a_file_system_keeps_of_removed_files_is_in_nobodys_way(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / name).write_bytes(b"")

    write(tmp_path / "out", b"x")

    assert tree(tmp_path / "out") == {"a/b.bin": b"x"}


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), ExecutionError("x")])
@pytest.mark.parametrize("force", [False, True])
def test_an_error_leaves_everything_as_it_was(
    tmp_path: Path, error: BaseException, *, force: bool
) -> None:
    final = tmp_path / "deep" / "er" / "out"
    if force:
        write(final, b"old")
    before = tree(tmp_path)

    def fail() -> None:
        with atomic_directory(final, force=force) as directory:
            directory.preallocate("a/b.bin", 100)
            raise error

    with pytest.raises(type(error)):
        fail()

    assert tree(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["deep"] if force else [])


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write(tmp_path / "out", b"old")

    with pytest.raises(ExistsError, match=r"out: the directory exists and is not empty; .*--force"):
        write(tmp_path / "out", b"new")

    assert tree(tmp_path) == {"out/a/b.bin": b"old"}


def test_with_force_the_old_content_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "out"
    write(final, b"old")
    final.chmod(0o750)

    with atomic_directory(final, force=True) as directory:
        directory.preallocate("new", 1)
        assert tree(final) == {"a/b.bin": b"old"}

    assert tree(tmp_path) == {"out/new": b"\0"}
    assert final.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_directory_is_used_up(tmp_path: Path, *, force: bool) -> None:
    (tmp_path / "out").mkdir()

    write(tmp_path / "out", b"new", force=force)

    assert tree(tmp_path) == {"out/a/b.bin": b"new"}


def test_something_that_appears_meanwhile_is_not_lost(tmp_path: Path) -> None:
    final = tmp_path / "out"

    def collide() -> None:
        with atomic_directory(final):
            final.mkdir()
            (final / "other").write_bytes(b"theirs")

    with pytest.raises(ExistsError, match="appeared here meanwhile"):
        collide()

    assert tree(tmp_path) == {"out/other": b"theirs"}


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced_by_a_directory(tmp_path: Path, *, force: bool) -> None:
    (tmp_path / "out").write_bytes(b"precious")

    with pytest.raises(ExistsError, match="is not a directory"):
        write(tmp_path / "out", b"new", force=force)

    assert tree(tmp_path) == {"out": b"precious"}


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").write_bytes(b"old")
    sign(tmp_path / "real")
    (tmp_path / "out").symlink_to("real")

    write(tmp_path / "out", b"new", force=True)

    assert (tmp_path / "out").is_symlink()
    assert tree(tmp_path / "real") == {"a/b.bin": b"new"}


def test_an_output_that_would_delete_its_input_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", b"input")
    before = tree(tmp_path)

    for final in (tmp_path / "checkpoint", tmp_path):
        for force in (False, True):  # --force is not proposed where it is refused
            with pytest.raises(ExistsError, match=r"what is read.*, and must stay; name another"):
                write(final, b"new", force=force, inputs=[tmp_path / "checkpoint"])

    assert tree(tmp_path) == before


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", b"old")
    (tmp_path / "empty").mkdir()
    for name in ("out", "empty"):  # a shell would stand in a folder that is gone
        monkeypatch.chdir(tmp_path / name)

        with pytest.raises(ExistsError, match=f"{name}: is the working directory, and must stay"):
            write(Path(), b"new", force=True)


def test_a_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")

    for call in (require_startable, partial(write, content=b"new", force=True)):
        with pytest.raises(ExistsError, match=r"disk: is where a file.* name a folder in it, as '"):
            call(tmp_path / "disk")

    assert tree(tmp_path) == {}
    write(tmp_path / "disk" / "out", b"new")


@pytest.mark.parametrize(
    ("mode", "owner", "has_something", "is_refused"),
    [
        (0o777, 7, False, False),
        (0o777, 7, True, True),  # to move a folder is to write its entry "..": nobody may here
        (0o1777, 7, False, True),
        (0o1777, 1, False, False),
    ],
)
def test_a_folder_of_somebody_else_is_refused_where_the_last_rename_would_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    owner: int,
    has_something: bool,  # noqa: FBT001
    is_refused: bool,  # noqa: FBT001
) -> None:
    final = tmp_path / "shared" / "out"
    if has_something:
        write(final, b"old")
    final.mkdir(parents=True, exist_ok=True)
    final.parent.chmod(mode)
    real = os.stat
    owners = {final: owner, final.parent: 8}

    def stat(path: Path, **options: bool) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result([*found[:4], owners.get(path, found.st_uid), *found[5:]])

    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "access", lambda path, _: path != final or owner == 1)
    monkeypatch.setattr(os, "stat", stat)

    if is_refused:
        with pytest.raises(ExistsError, match="out: belongs to user 7, and user 1 may not replace"):
            require_startable(final, force=True)
    else:
        require_startable(final, force=True)


def test_a_file_is_written_once_and_inside_of_the_directory(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        directory.preallocate("a", 1)
        with pytest.raises(ExistsError, match="a: the file is written twice"):
            directory.preallocate("a", 1)
        with pytest.raises(PlanError, match="no path below"):
            directory.preallocate("../a", 1)
        with pytest.raises(ExecutionError, match="b: written to before it was created"):
            directory.write_exact("b", 0, b"x")


def test_a_disk_that_is_too_small_is_found_out_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ExecutionError, match=r"huge: no room for 36.0 PB"),
        atomic_directory(tmp_path / "out") as directory,
    ):
        directory.preallocate("huge", 1 << 55)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"huge: no room for 9 B, [\d.]+ .B are free \(.*\); make room, or name"),
        (errno.EDQUOT, r"huge: no room for 9 B \(.*\); make room in the quota"),
        (errno.EFBIG, r"huge: no room for 9 B \(.*\); raise the limit .*\(ulimit -f\)"),
    ],
)
def test_what_there_is_no_room_for_comes_with_what_would_make_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def reserve(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reserving, "fallocate", reserve)

    with (
        pytest.raises(ExecutionError, match=said),
        atomic_directory(tmp_path / "out") as directory,
    ):
        directory.preallocate("huge", 9)


def test_a_place_where_nothing_can_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"/proc(/restride)?: cannot be "):
        write(Path("/proc/restride/out"), b"x")
    (tmp_path / "file").write_bytes(b"")
    for below in ("out", "a/out"):
        with pytest.raises(ExecutionError, match=r"/file: is not a directory; name another output"):
            write(tmp_path / "file" / below, b"x")

    assert tree(tmp_path) == {"file": b""}


def test_a_place_where_no_folder_can_be_made_is_told_as_the_system_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def mkdir(path: str, *mode: int) -> None:
        if str(path).endswith("out.partial"):  # as in `/proc`, which root may write into
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        real(path, *mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ExecutionError, match=r"/out.partial: cannot be created \(No such"):
        write(tmp_path / "out", b"")


def test_a_place_that_cannot_be_written_into_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_startable(tmp_path / "new" / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ExecutionError, match="file: is not a directory; name another output"):
        require_startable(tmp_path / "file" / "out")

    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path)
    with pytest.raises(ExecutionError, match=f"^{tmp_path}: cannot be written into: permission"):
        require_startable(tmp_path / "new" / "out")


def test_a_user_without_a_home_may_replace_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    write(tmp_path / "out", b"old")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)

    write(tmp_path / "out", b"new", force=True)

    assert tree(tmp_path / "out") == {"a/b.bin": b"new"}


def test_the_root_of_all_files_is_not_replaced() -> None:
    for force in (False, True):
        with pytest.raises(ExistsError, match="/: cannot be replaced"):
            write(Path("/"), b"x", force=force)


def test_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 255), b"new")

    assert tree(tmp_path) == {"n" * 255 + "/a/b.bin": b"new"}


def test_an_interrupt_from_the_keyboard_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        # A shell that runs the tests in the background has the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from restride.storage.unfinished import Purpose, require_startable, unfinished_output\n"
        "purpose = Purpose({}, lambda _: '', lambda _: False)\n"
        "with unfinished_output(sys.argv[1], purpose) as place:\n"
        "    place.begin([{}])\n"
        "    place.files.preallocate('a', 1000)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, told = child.communicate(timeout=30)

    assert child.returncode != 0, told
    assert time.monotonic() - started < 30
    assert list(tmp_path.iterdir()) == [], told


def failing_rename(
    monkeypatch: pytest.MonkeyPatch, failures: dict[int, BaseException]
) -> list[Path]:
    """Let some calls of `Path.rename` fail, by their number; return the sources of all calls."""
    calls: list[Path] = []
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "journal.new":
            return original(self, target)
        calls.append(self)
        if len(calls) in failures:
            raise failures[len(calls)]
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    return calls


@pytest.mark.parametrize("error", [OSError(16, "busy"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 2])
def test_a_replacement_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: int
) -> None:
    write(tmp_path / "out", b"old")
    failing_rename(monkeypatch, {call: error})
    expected = ExecutionError if isinstance(error, OSError) else KeyboardInterrupt

    with pytest.raises(expected) as caught:
        write(tmp_path / "out", b"new", force=True)

    assert tree(tmp_path) == {"out/a/b.bin": b"old"}
    assert expected is KeyboardInterrupt or str(caught.value) == (
        f"{tmp_path / 'out'}: the finished output cannot be put in place (busy); "
        "name a new directory below it as the output"
    )


def test_what_cannot_be_taken_back_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", b"old")
    failing_rename(monkeypatch, {2: OSError(5, "broken"), 3: OSError(5, "broken")})

    with pytest.raises(
        ExecutionError, match=r"cannot get back what was here, which is now (.*)"
    ) as c:
        write(tmp_path / "out", b"new", force=True)

    kept = tmp_path / "out.partial" / "replaced"
    assert str(kept) in str(c.value)
    assert tree(kept) == {"a/b.bin": b"old"}

    monkeypatch.undo()
    with pytest.raises(ExistsError, match=r"out: an unfinished conversion of ckpt is here"):
        write(tmp_path / "out", b"new")
    assert tree(tmp_path / "out") == {"a/b.bin": b"old"}
    write(tmp_path / "out", b"new", force=True)
    assert tree(tmp_path) == {"out/a/b.bin": b"new"}


def test_an_output_that_cannot_be_put_in_place_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_rename(monkeypatch, {1: OSError(18, "another device")})

    with pytest.raises(ExecutionError, match=r"put in place \(another device\)"):
        write(tmp_path / "out", b"new")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [38, 95, 22])
def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, "not supported")

    monkeypatch.setattr(reserving, "fallocate", refuse)

    write(tmp_path / "out", b"new")

    assert tree(tmp_path) == {"out/a/b.bin": b"new"}


def test_space_that_cannot_be_reserved_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserving, "_function", lambda: None)  # as on macOS

    with (tmp_path / "a").open("wb") as file:
        reserving.reserve(file.fileno(), 1 << 40)

        assert os.fstat(file.fileno()).st_size == 1 << 40
        assert os.fstat(file.fileno()).st_blocks == 0


def test_space_is_reserved_where_the_file_system_can(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        try:
            reserving.fallocate(file.fileno(), 1)
        except OSError:
            pytest.skip("the file system of temporary files cannot reserve")

        reserving.reserve(file.fileno(), 1 << 20)

        assert os.fstat(file.fileno()).st_size == 1 << 20
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20


def test_a_call_that_a_signal_interrupts_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [errno.EINTR, errno.EINTR, 0]

    def interrupted(*_: int) -> int:
        number = answers.pop(0)
        ctypes.set_errno(number)
        return -1 if number else 0

    monkeypatch.setattr(reserving, "_function", lambda: interrupted)

    reserving.fallocate(0, 1)

    assert not answers


@pytest.mark.parametrize("how", ["create", "begin_creating"])
def test_what_cannot_fit_in_all_is_refused_before_the_disk_is_full(
    tmp_path: Path, how: str
) -> None:
    system = os.statvfs(tmp_path)
    half = system.f_bavail * system.f_frsize // 2 + (1 << 30)
    output = Output((OutputFile("a", half, ((0, b"x"),)), OutputFile("b", half)))
    left: list[Path] = []

    def create(files: OutputFiles) -> None:
        try:
            getattr(files, how)(output)
        finally:
            left.extend(files.path.iterdir())

    with (
        pytest.raises(
            ExecutionError,
            match=rf"no room for {re.escape(format_size(2 * half))} of 2 files, [\d.]+ .B are",
        ),
        atomic_directory(tmp_path / "out") as directory,
    ):
        create(directory)

    assert left == list(tmp_path.iterdir()) == []


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, number: int = 0) -> Iterator[Event]:
    """Files of two bytes are not created before the event, and then with an error of the system."""
    real, may_go_on = reserving.fallocate, Event()

    def reserve(descriptor: int, nbytes: int) -> None:
        if nbytes == 2:
            assert may_go_on.wait(60)
            if number:
                raise OSError(number, os.strerror(number))
        real(descriptor, nbytes)

    monkeypatch.setattr(reserving, "fallocate", reserve)
    try:
        yield may_go_on
    finally:
        may_go_on.set()


LATE = Output(
    (OutputFile("a", 3, ((2, b"c"),)), OutputFile("d/b", 2, ((0, b"x"),)), OutputFile("d/e", 1))
)


def test_the_first_files_are_written_to_while_others_are_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        held_up(monkeypatch) as others,
        atomic_directory(tmp_path / "out") as directory,
        ThreadPoolExecutor(2) as threads,
    ):
        directory.begin_creating(LATE)
        directory.write_exact("a", 0, b"ab")
        late = [threads.submit(directory.write_exact, "d/b", 1, b"y")]
        late.append(threads.submit(directory.write_exact, "d/e", 0, b"z"))
        directory.sync_folders()
        assert not any(future.done() for future in late)
        assert not (directory.path / "d/e").exists()
        others.set()
        for future in late:
            future.result(60)
        directory.finish_creating()
        with pytest.raises(ExecutionError, match="written to before it was created"):
            directory.write_exact("f", 0, b"x")

    assert tree(tmp_path / "out") == {"a": b"abc", "d/b": b"xy", "d/e": b"z"}


def test_all_files_of_an_output_are_there_when_none_was_written_to(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        assert not directory.cannot_be_created
        directory.begin_creating(LATE)
        directory.finish_creating()
        assert not directory.cannot_be_created

    assert tree(tmp_path / "out") == {"a": b"\0\0c", "d/b": b"x\0", "d/e": b"\0"}


def test_an_output_is_not_published_before_all_of_its_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch) as others, atomic_directory(tmp_path / "out") as directory:
        directory.begin_creating(LATE)
        Timer(0.1, others.set).start()

    assert tree(tmp_path / "out") == {"a": b"\0\0c", "d/b": b"x\0", "d/e": b"\0"}


def test_an_output_is_not_published_of_which_a_file_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish() -> None:
        with (
            held_up(monkeypatch, errno.ENOSPC) as others,
            atomic_directory(tmp_path / "out") as directory,
        ):
            directory.begin_creating(LATE)
            Timer(0.1, others.set).start()

    with pytest.raises(ExecutionError, match=r"d/b: no room for 2 B"):
        publish()
    assert list(tmp_path.iterdir()) == []


def test_whoever_writes_is_told_that_a_file_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = partial(pytest.raises, ExecutionError, match=r"d/b: no room for 2 B")
    with no_room(), atomic_directory(tmp_path / "out") as directory:
        with held_up(monkeypatch, errno.ENOSPC) as others, ThreadPoolExecutor(1) as thread:
            directory.begin_creating(LATE)
            waiting = thread.submit(directory.write_exact, "d/e", 0, b"z")
            others.set()
            with no_room():
                waiting.result()
            assert directory.cannot_be_created
        # A file that is there, the one that failed, and one that never came.
        for name in ("a", "d/b", "d/e"):
            with no_room():
                directory.write_exact(name, 0, b"x")
        directory.finish_creating()

    assert list(tmp_path.iterdir()) == []


def test_no_more_files_are_created_when_somebody_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []
    monkeypatch.setattr(reserving, "fallocate", lambda _, nbytes: created.append(nbytes))

    def give_up(others: Event) -> None:
        with atomic_directory(tmp_path / "out") as directory:
            directory.begin_creating(LATE)
            while not (directory.path / "d/b").exists():
                time.sleep(0.001)
            Timer(0.1, others.set).start()
            raise KeyboardInterrupt

    with held_up(monkeypatch) as others:
        with pytest.raises(KeyboardInterrupt):
            give_up(others)
        # What is removed is not written to any more.
        assert others.is_set()

    assert created == [3, 2]
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_there_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output((OutputFile("a", 5, ((0, b"x"),)), OutputFile("b", 7)))
    with atomic_directory(tmp_path / "out") as directory:
        directory.create(output)
        real = os.statvfs(tmp_path)
        full = SimpleNamespace(f_bavail=6, f_frsize=1, f_blocks=real.f_blocks)
        monkeypatch.setattr(os, "statvfs", lambda _: full)

        directory.create(output, resume=True)
        (directory.path / "a").unlink()
        directory.create(output, resume=True)
        (directory.path / "b").unlink()
        with pytest.raises(ExecutionError, match="no room for 7 B of 1 file, 6 B are free"):
            directory.create(output, resume=True)
        monkeypatch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(**vars(full) | {"f_blocks": 0})
        )
        directory.create(output, resume=True)  # a system that does not say


def test_a_lost_write_is_an_error_before_anything_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", b"old")

    def lose(_: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", lose)

    with pytest.raises(ExecutionError, match=r"cannot be made durable \(input/output error\)"):
        write(tmp_path / "out", b"new", force=True)

    assert tree(tmp_path) == {"out/a/b.bin": b"old"}


def test_every_file_and_folder_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    renamed = failing_rename(monkeypatch, {})

    write(tmp_path / "deep" / "er" / "out", b"new")

    (path,) = map(str, renamed)
    files = [name for name in synced if name.startswith(path)]
    assert sorted(files) == [path, f"{path}/a", f"{path}/a/b.bin"]
    assert files[0] == f"{path}/a/b.bin"
    assert synced[-1] == f"{tmp_path}/deep/er"
    # Folders that were made for it: an output in one that is lost is lost.
    assert {f"{tmp_path}", f"{tmp_path}/deep"} <= set(synced)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that were made durable."""
    found: list[Path] = []

    def record(path: str | Path) -> None:
        assert Path(path).exists()
        found.append(Path(path))

    monkeypatch.setattr(output_files, "sync_path", record)
    return found


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answer, os.strerror(answer))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    write(tmp_path / "out", b"x")

    assert tree(tmp_path / "out") == {"a/b.bin": b"x"}


@pytest.mark.parametrize(
    ("answer", "is_of_folder"), [(errno.EIO, True), (errno.EINVAL, False), (errno.EIO, False)]
)
def test_what_cannot_be_made_durable_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, *, is_of_folder: bool
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == is_of_folder:
            raise OSError(answer, os.strerror(answer))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    with pytest.raises(ExecutionError, match=r"cannot be (made durable|written)"):
        write(tmp_path / "out", b"x")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["create", "begin_creating"])
def test_files_that_nobody_wrote_to_are_made_durable_and_then_their_folders(
    tmp_path: Path, synced: list[Path], how: str
) -> None:
    with OutputFiles(tmp_path / "out") as files:
        getattr(files, how)(LATE)
        files.sync()
        made = [str(path.relative_to(tmp_path)) for path in synced]
        files.sync()

    # A folder before the one that has its name.
    assert made == ["out/a", "out/d/b", "out/d/e", "out/d", "out"]
    assert len(synced) == len(made)


@pytest.mark.parametrize("how", ["create", "begin_creating"])
def test_nothing_is_made_durable_where_nobody_waits_for_the_disk(
    tmp_path: Path, synced: list[Path], how: str
) -> None:
    with OutputFiles(tmp_path / "out", durable=False) as files:
        getattr(files, how)(LATE)
        files.sync()

    assert not synced


def test_the_name_of_a_later_file_is_made_durable_again(tmp_path: Path, synced: list[Path]) -> None:
    with OutputFiles(tmp_path / "out") as files:
        files.preallocate("d/a", 1)
        files.sync_folders()
        del synced[:]
        files.preallocate("d/b", 1)
        files.sync_folders()
        files.preallocate("d/e/c", 1)
        files.sync_folders()

    out = tmp_path / "out"
    assert synced == [out / "d", out / "d/e", out / "d", out]


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as directory:
        directory.preallocate("a", 1)
        with pytest.raises(ExistsError):
            directory.preallocate("a/b", 1)
        with pytest.raises(ExecutionError, match="cannot be created"):
            directory.preallocate("n" * 300, 1)


PUBLISHED = {"published": True}


def left(final: Path, *records: dict[str, object], content: bytes | None = None) -> Path:
    """What an earlier process left beside an output."""
    folder = final.with_name(f"{final.name}.partial")
    folder.mkdir()
    journal = Journal(folder / "journal")
    journal.append([FIRST, *records])
    journal.close()
    if content is not None:
        (folder / "files").mkdir()
        (folder / "files" / "f").write_bytes(content)
    return folder


def finished(final: Path) -> Purpose:
    return Purpose(FIRST, lambda _: "", lambda folder: folder == final and (final / "f").exists())


@pytest.mark.parametrize("has_journal", [False, True])
def test_an_output_that_was_finished_is_not_written_again_and_what_is_left_is_removed(
    tmp_path: Path, *, has_journal: bool
) -> None:
    final = tmp_path / "out"
    write_old(final, b"done")
    if has_journal:
        left(final, {"nbytes": 1}, PUBLISHED)
    with unfinished_output(final, finished(final), resume=True) as place:
        assert place.is_published
        assert place.records == (({"nbytes": 1}, PUBLISHED) if has_journal else ())
        assert place.done_nbytes == 0
        with pytest.raises(ExecutionError, match="the journal is not open"):
            place.note([{"nbytes": 1}])
    assert tree(tmp_path) == {"out/f": b"done"}
    assert list(tmp_path.iterdir()) == [final]

    if has_journal:
        left(final, PUBLISHED)
    with (
        pytest.raises(ExistsError, match="out: the directory exists and is not empty"),
        unfinished_output(final, finished(final)),
    ):
        pytest.fail("it was finished")
    assert tree(tmp_path) == {"out/f": b"done"}
    assert list(tmp_path.iterdir()) == [final]


def test_an_output_that_was_finished_is_written_again_with_force(tmp_path: Path) -> None:
    final = tmp_path / "out"
    for resume in (False, True):
        write_old(final, b"done")
        left(final, PUBLISHED)
        with unfinished_output(final, finished(final), force=True, resume=resume) as place:
            if place.is_published:
                assert resume
                continue
            place.files.preallocate("g", 1)
            place.publish()
        assert tree(tmp_path) == {"out/g": b"\0"}
        shutil.rmtree(final)


@pytest.mark.parametrize("is_there", [False, True])
def test_an_output_that_was_not_yet_put_in_place_is_gone_on_with(
    tmp_path: Path, *, is_there: bool
) -> None:
    final = tmp_path / "out"
    folder = left(final, {"nbytes": 40}, PUBLISHED, content=b"new")
    if is_there:  # what it is to replace is the same output, or has the same name
        write_old(final, b"old")
    with (
        pytest.raises(ExistsError, match="is here, 40 B of 100 B done; add --resume"),
        unfinished_output(final, finished(final)),
    ):
        pytest.fail("it was not finished")
    assert tree(folder / "files") == {"f": b"new"}

    with unfinished_output(final, finished(final), resume=True, force=is_there) as place:
        assert not place.is_published
        assert place.is_resumed
        assert place.keeps
        assert (place.records, place.done_nbytes) == (({"nbytes": 40}, PUBLISHED), 40)
        place.files.adopt(Output((OutputFile("f", 3),)))
        place.publish()
    assert tree(tmp_path) == {"out/f": b"new"}


def test_a_finished_output_that_was_spoiled_is_begun_anew(tmp_path: Path) -> None:
    final = tmp_path / "out"
    left(final, PUBLISHED)
    with unfinished_output(final, finished(final), resume=True) as place:
        assert place.is_resumed
        assert not place.is_published
        assert place.files.path.is_dir()


def test_what_was_left_of_a_journal_that_was_never_begun_is_not_believed(tmp_path: Path) -> None:
    """A process died after it had written the new journal, and before that had its name."""
    final = tmp_path / "out"
    folder = left(final, {"nbytes": 40}, content=b"old")
    (folder / "journal").rename(folder / "journal.new")
    with unfinished_output(final, finished(final)):
        assert read_journal(folder / "journal") == [FIRST]


def test_what_would_be_refused_in_the_end_is_refused_before_anything_is_planned(
    tmp_path: Path,
) -> None:
    final = tmp_path / "out"
    require_startable(final)
    folder = left(final, {"nbytes": 40})
    require_startable(final)  # nothing is there but words
    (folder / "files").mkdir()
    with pytest.raises(ExistsError, match="40 B of 100 B done; add --resume"):
        require_startable(final)
    require_startable(final, force=True)
    require_startable(final, resume=True)
    write_old(final, b"mine")
    require_startable(final, force=True)
    require_startable(final, force=True, resume=True)
    with pytest.raises(ExistsError, match=r"exists and is not empty; .*--force"):
        require_startable(final, resume=True)
    with pytest.raises(ExistsError, match=r"what is read is in it, .*f, and must"):
        require_startable(final, force=True, inputs=[final / "f"])
    (folder / "journal").unlink()
    for options in ({}, {"resume": True}):
        with pytest.raises(ExistsError, match="exists and is not empty"):
            require_startable(final, **options)


def test_a_leftover_says_where_that_is_which_was_to_be_replaced(tmp_path: Path) -> None:
    final = tmp_path / "out"
    folder = left(final, content=b"new")
    write_file(folder / "replaced" / "f", b"old")
    with pytest.raises(ExistsError, match=rf"what was here is in {folder}/replaced$"):
        require_startable(final)
    final.mkdir()
    with pytest.raises(ExistsError, match=rf"--resume to continue or remove {folder}$"):
        require_startable(final)


def test_nothing_is_written_or_removed_beside_whoever_writes(tmp_path: Path) -> None:
    final = tmp_path / "out"
    folder = left(final, content=b"new")
    with locked(folder / "lock", what="out"):
        before = tree(tmp_path)
        for options in ({}, {"force": True}, {"resume": True}):
            with (
                pytest.raises(ExecutionError, match="is writing it"),
                unfinished_output(final, finished(final), **options),
            ):
                pytest.fail("two write")
        assert tree(tmp_path) == before


def test_a_leftover_that_holds_the_input_is_not_thrown_away(tmp_path: Path) -> None:
    final = tmp_path / "out"
    folder = left(final, content=b"new")
    for options in ({"force": True}, {"resume": True}):
        with (
            pytest.raises(ExistsError, match=r"what is read is in it, .*/files/f"),
            unfinished_output(final, finished(final), inputs=[folder / "files/f"], **options),
        ):
            pytest.fail("it is needed")
    assert tree(folder / "files") == {"f": b"new"}


def test_what_died_between_two_renames_is_put_back_first(tmp_path: Path) -> None:
    final = tmp_path / "out"
    folder = left(final, PUBLISHED, content=b"new")
    write_old(folder / "replaced", b"old")
    with (
        pytest.raises(ExistsError, match="an unfinished"),
        unfinished_output(final, finished(final), force=False),
    ):
        pytest.fail("something is there")
    assert tree(tmp_path) == {
        "out/f": b"old",
        "out.partial/files/f": b"new",
        "out.partial/journal": (folder / "journal").read_bytes(),
        "out.partial/lock": (folder / "lock").read_bytes(),
    }


def test_nothing_is_begun_anew_while_a_process_of_an_earlier_run_writes(tmp_path: Path) -> None:
    final = tmp_path / "out"
    team = Team("run", ((0, 0), (1, 0), (2, 0)))
    folder = left(final, team.record, content=b"new")
    (folder / "journal.1").touch()
    with locked(folder / "members", what="part", shared=True):
        with (
            pytest.raises(ExecutionError, match="is writing it"),
            unfinished_output(final, finished(final), force=True),
        ):
            pytest.fail("another one writes")
        assert tree(folder / "files") == {"f": b"new"}
        assert (folder / "journal.1").exists()
    with unfinished_output(final, finished(final), force=True) as place:
        assert not (folder / "journal.1").exists()
        assert place.team is None
        assert not list(place.files.path.iterdir())


def write_old(folder: Path, content: bytes) -> None:
    """An output of one file that restride wrote."""
    write_file(folder / "f", content)
    sign(folder)


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
