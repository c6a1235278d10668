"""Blocks that are done wait to be noted, and not too many of them."""

from __future__ import annotations

import time
import tracemalloc
from threading import Event, Lock, Thread, Timer
from types import SimpleNamespace

import pytest

from restride.errors import ExecutionError
from restride.executors.blocks import Block
from restride.executors.drift import DriftTable
from restride.executors.events import NullObserver
from restride.executors.footprint import noting_nbytes
from restride.executors.journaled import MOST_WAITING, RECORDS_AT_ONE_TIME, JournaledWriter

OUTPUT = SimpleNamespace(files=[SimpleNamespace(name="a")])


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


class Blocks:
    """As many blocks of one byte as are asked for; each part that is counted is one."""

    def __init__(self, count) -> None:
        self.regions = [SimpleNamespace(target_file=0, nbytes=1)] * count
        self._lock = Lock()

    def left_nbytes(self):
        return len(self.regions)

    def nbytes(self, blocks):
        return len(blocks)

    def count(self, parts, digests):
        return [Block(part, 0, digest) for part, digest in zip(parts, digests, strict=True)]


class Files:
    """Files whose sync takes as long as a test wants."""

    is_durable = True

    def __init__(self) -> None:
        self.syncs = 0
        self.may_go_on = Event()

    def hold(self, _):
        return None

    def set_written(self, _):
        pass

    def sync_files(self, _):
        self.syncs += 1
        self.may_go_on.wait()

    def sync_folders(self):
        pass


def writer_of(files, count, note):
    place = SimpleNamespace(files=files, note=note, keeps=False)
    table = DriftTable(NullObserver())
    return JournaledWriter(place, OUTPUT, Blocks(count), table, lambda: None, sync_nbytes=1 << 40)


def write(writer, numbers):
    for number in numbers:
        writer.hold(0)
        writer.count(0, [number], [(1 << 120) + number])


def test_workers_wait_while_a_disk_is_slow_and_all_is_noted_in_the_end():
    files, noted, count = Files(), [], 4 * MOST_WAITING
    done = []
    with writer_of(files, count, noted.extend) as writer:

        def work():
            for number in range(count):
                write(writer, [number])
                done.append(number)

        thread = Thread(target=work)
        thread.start()
        wait_until(lambda: files.syncs == 1 and len(done) >= MOST_WAITING)
        thread.join(0.5)
        waiting = len(done)
        files.may_go_on.set()
        thread.join()

    assert waiting <= 5 * MOST_WAITING // 2
    assert sorted(record["region"] for record in noted) == list(range(count))


def test_the_error_of_a_sync_ends_the_wait_for_it():
    files, count = Files(), 4 * MOST_WAITING

    def fail(_):
        raise ExecutionError("no space")

    def work():
        with writer_of(files, count, fail) as writer:
            write(writer, range(MOST_WAITING // 2))
            wait_until(lambda: files.syncs == 1)
            write(writer, range(MOST_WAITING // 2, 3 * MOST_WAITING // 2))
            Timer(0.2, files.may_go_on.set).start()
            write(writer, range(3 * MOST_WAITING // 2, count))

    with pytest.raises(ExecutionError, match="no space"):
        work()


def test_what_waits_takes_the_memory_that_is_said():
    files, noted = Files(), []
    with writer_of(files, 2 * MOST_WAITING, lambda records: noted.append(len(records))) as writer:
        write(writer, range(MOST_WAITING // 2))
        wait_until(lambda: files.syncs == 1)
        tracemalloc.start()
        try:
            write(writer, range(MOST_WAITING))
            files.may_go_on.set()
            wait_until(lambda: sum(noted) == 3 * MOST_WAITING // 2)
            _, peak_nbytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert max(noted) == RECORDS_AT_ONE_TIME
    assert peak_nbytes <= noting_nbytes(MOST_WAITING) <= 1.4 * peak_nbytes
