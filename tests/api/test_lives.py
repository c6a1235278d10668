"""Who lives, who is believed, and what an error of a part is, where several processes write."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from restride import api, conversion
from restride.errors import MissingProcessError
from restride.executors.events import NullObserver
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE

pytestmark = pytest.mark.usefixtures("small_blocks")

OPTIONS = {
    "states": "all",
    "workers": 1,
    "sync_nbytes": 1,
    "budget_nbytes": 1 << 21,
    "resume": True,
}


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as pool:
        yield pool


class Dies(NullObserver):
    """Fails at the first step for which `when` is true."""

    def __init__(self, when, error=OSError):
        self.when = when
        self.error = error

    def on_step(self, event, /):
        if event.done_steps and self.when():
            raise self.error("died here")


class Waits(NullObserver):
    """Holds the work up at the first step."""

    def __init__(self):
        self.go = threading.Event()
        self.is_there = threading.Event()

    def on_step(self, _, /):
        self.is_there.set()
        self.go.wait(30)


class Hears(NullObserver):
    def __init__(self):
        self.notices = []

    def on_notice(self, event, /):
        self.notices.append(event.message)


def takes_part(out, number, *, wait_seconds=30, **options):
    options = {**OPTIONS, "wait_seconds": wait_seconds, **options}
    return api.convert(SAMPLE, out, process=(number, 2), **options)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_looks(looks, count):
    """Return when process 0 has looked at the other one so many times more."""
    seen = len(looks)
    wait_for(lambda: len(looks) >= seen + count)


def written_alone(tmp_path):
    api.convert(SAMPLE, tmp_path / "alone", **OPTIONS)
    return tree(tmp_path / "alone")


def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_whoever_works_on_when_the_first_comes_back_is_not_missed(tmp_path, threads, looks, until):
    out, works = tmp_path / "out", Waits()
    leader = threads.submit(takes_part, out, 0, observer=Dies(works.is_there.is_set))
    member = threads.submit(takes_part, out, 1, observer=works)
    assert isinstance(leader.exception(30), OSError)

    back = Hears()
    looks.clear()
    patience = until(lambda: looks and not works.go.is_set())
    leader = threads.submit(takes_part, out, 0, observer=back, wait_seconds=patience)
    wait_for_looks(looks, 4)
    assert not leader.done()
    works.go.set()

    assert member.result(30).written_nbytes
    assert leader.result(30).resumed_nbytes
    assert tree(out) == written_alone(tmp_path)
    assert back.notices == []


def test_what_a_process_noted_that_died_before_it_looked_is_not_believed(
    tmp_path, threads, looks, until
):
    out = tmp_path / "out"
    done = threading.Event()
    leader = threads.submit(takes_part, out, 0, observer=Dies(done.wait))
    assert takes_part(out, 1).written_nbytes
    done.set()
    assert isinstance(leader.exception(30), OSError)
    damaged = partial_folder(out) / "files" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    def dies(*_, **__):
        wait_for_looks(looks, 2)  # process 0 sees its lock
        raise OSError("died here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "write_part", dies)
        member = threads.submit(takes_part, out, 1)
        with pytest.raises(MissingProcessError, match=r"process 1 of 2 ended before .* are left"):
            takes_part(out, 0, wait_seconds=until(member.done))
        assert isinstance(member.exception(30), OSError)
    assert not out.exists()

    api.convert(SAMPLE, out, **OPTIONS)
    assert tree(out) == written_alone(tmp_path)


def test_an_error_of_who_is_told_of_another_process_ends_the_run(tmp_path, threads):
    class Cannot(NullObserver):
        def on_notice(self, event, /):
            raise ValueError(event.message)

    out = tmp_path / "out"
    leader = threads.submit(takes_part, out, 0, observer=Cannot())
    member = threads.submit(takes_part, out, 1, observer=Dies(lambda: True))

    assert isinstance(member.exception(30), OSError)
    with pytest.raises(ValueError, match="process 1 of 2 failed: died here"):
        leader.result(20)


def test_the_source_may_have_other_names_for_other_processes(tmp_path, threads):
    out, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(Path(SAMPLE).resolve())
    options = {**OPTIONS, "wait_seconds": 30}
    member = threads.submit(
        api.convert, link, tmp_path / "x" / ".." / "out", process=(1, 2), **options
    )

    takes_part(out, 0)

    assert member.result(30).written_nbytes
    assert tree(out) == written_alone(tmp_path)
    assert api.convert(link, out, **options).read_nbytes == 0


def test_a_missing_file_of_whoever_watches_a_part_is_that_error_and_no_absence_of_the_first(
    tmp_path, threads, until
):
    out, is_dead = tmp_path / "out", threading.Event()
    leader = threads.submit(takes_part, out, 0, wait_seconds=until(is_dead.is_set))
    with pytest.raises(FileNotFoundError, match="died here"):
        takes_part(out, 1, observer=Dies(lambda: True, FileNotFoundError))
    is_dead.set()

    assert isinstance(leader.exception(30), MissingProcessError)
