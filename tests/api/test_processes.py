"""Several processes write one output: the bytes of one, whoever dies, and whoever goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from restride import api, conversion
from restride.errors import (
    ExecutionError,
    ExistsError,
    MissingProcessError,
    ReplicaError,
    RestrideError,
    StoppedError,
)
from restride.executors import members, streaming
from restride.executors.events import NullObserver
from restride.executors.leading import Host
from restride.storage import joining
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE
from restride.testing.contents import tree
from restride.testing.faults import FailingFiles, failing_files

pytestmark = pytest.mark.usefixtures("small_blocks")

OPTIONS = {
    "states": "all",
    "workers": 1,
    "sync_nbytes": 1,
    "budget_nbytes": 5 << 19,
    "wait_seconds": 0.5,
}


@pytest.fixture(autouse=True)
def each_step_by_itself(monkeypatch):
    """The sample has few steps, and they are small: all of a part would be done together."""
    monkeypatch.setattr(streaming, "_MOST_BUNDLES", 1)


@pytest.fixture(autouse=True)
def locks_that_all_see_at_once(monkeypatch):
    """On a file system of this machine nobody has to wait for what another client knows."""
    monkeypatch.setattr(members, "_FREE_SECONDS", 0.1)


class Dies(NullObserver):
    """Ends the process, as `kill -9` does, when so many steps are done."""

    def __init__(self, steps):
        self.left = steps

    def on_step(self, event, /):
        if event.done_steps:
            self.left -= 1
            if not self.left:
                time.sleep(0.05)  # some of it is noted
                os.kill(os.getpid(), signal.SIGKILL)


class Rests(NullObserver):
    """Takes its time at each step, and does not come to the end."""

    def __init__(self):
        Host.wait = lambda *_: time.sleep(60)

    def on_step(self, event, /):
        if event.done_steps:
            time.sleep(0.05)


class Hears(NullObserver):
    def __init__(self):
        self.notices = []
        self.steps = []

    def on_notice(self, event, /):
        self.notices.append(event.message)

    def on_step(self, event, /):
        self.steps.append(event)


def start(out, number, count, *, source=SAMPLE, dies_after=0, rests=False, **options):
    """A process of its own that writes a part; it ends with 0, or 3 after an error of ours.

    Returns when it is ready to say hello.
    """
    reads, writes = os.pipe()
    child = os.fork()
    os.close(writes if child else reads)
    if child:
        if number:
            os.read(reads, 1)
        os.close(reads)
        return child
    code = 1
    try:
        join = conversion.joined_output

        def joined_output(*arguments, **options):
            os.write(writes, b".")
            return join(*arguments, **options)

        conversion.joined_output = joined_output
        observer = Dies(dies_after) if dies_after else Rests() if rests else None
        options = {**OPTIONS, "wait_seconds": 20, **options}
        api.convert(source, out, process=(number, count), observer=observer, **options)
        code = 0
    except RestrideError:
        code = 3
    finally:
        os._exit(code)


def start_and_kill_the_first(out, count):
    """The others do all of their parts, and the first something of its own."""
    children = [start(out, number, count, rests=not number) for number in range(count)]
    journals = [partial_folder(out) / f"journal.{number}" for number in range(1, count)]
    wait_for(lambda: all(journal.exists() for journal in journals))
    os.kill(children[0], signal.SIGKILL)
    assert [end_of(child) for child in children] == [-signal.SIGKILL, *[0] * (count - 1)]
    assert not out.exists()


def has_ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_of(child):
    """Exit code, or the number of the signal, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def leads(out, count, *, source=SAMPLE, **options):
    return api.convert(source, out, process=(0, count), **{**OPTIONS, **options})


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def in_background(function, *arguments, **options):
    """What a call returns or raises, while the block runs: a list that is filled at the end."""
    found = []

    def call():
        try:
            found.append(function(*arguments, **options))
        except RestrideError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield found
    finally:
        thread.join(60)


@pytest.mark.usefixtures("kept_while_open")
@pytest.mark.parametrize(
    ("to", "count"), [("safetensors", 2), ("universal", 3), ("deepspeed", 4), ("safetensors", 40)]
)
def test_any_number_of_processes_writes_what_one_writes(tmp_path, to, count):
    whole = api.convert(SAMPLE, tmp_path / "whole", to=to, **OPTIONS)
    out = tmp_path / "out"

    with ThreadPoolExecutor(count) as threads:
        parts = list(
            threads.map(
                lambda number: api.convert(
                    SAMPLE, out, to=to, process=(number, count), **{**OPTIONS, "wait_seconds": 30}
                ),
                range(count),
            )
        )

    assert tree(out) == tree(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    assert parts[0].written_nbytes == whole.written_nbytes
    assert parts[0].files == whole.files
    assert parts[0].read_nbytes >= whole.read_nbytes
    assert sum(part.read_nbytes for part in parts[1:]) < parts[0].read_nbytes
    assert sum(part.written_nbytes for part in parts[1:]) < whole.written_nbytes


def test_the_progress_of_the_first_is_that_of_all(tmp_path):
    observer = Hears()
    child = start(tmp_path / "out", 1, 2)

    report = leads(tmp_path / "out", 2, observer=observer, wait_seconds=30)

    assert end_of(child) == 0
    counts = [step.done_nbytes for step in observer.steps]
    assert counts == sorted(counts)
    assert counts[-1] == report.written_nbytes
    assert observer.notices == []


@pytest.mark.parametrize("steps", [1, 4])
def test_a_process_that_is_killed_and_started_again_goes_on(tmp_path, reference, steps):
    out, observer = tmp_path / "out", Hears()
    children = [start(out, 1, 3, dies_after=steps), start(out, 2, 3)]
    with in_background(leads, out, 3, observer=observer, wait_seconds=30) as found:
        assert end_of(children[0]) == -signal.SIGKILL
        wait_for(lambda: observer.notices)
        assert end_of(children[1]) == 0
        assert end_of(start(out, 1, 3)) == 0

    assert found[0].written_nbytes > found[0].resumed_nbytes
    assert tree(out) == reference
    assert not partial_folder(out).exists()
    (told,) = observer.notices
    assert told.startswith("process 1 of 3 ended before its part was done, ")


def killed_and_given_up(out, until, count=2):
    child = start(out, 1, count, dies_after=4)
    with pytest.raises(MissingProcessError) as error:
        leads(out, count, wait_seconds=until(lambda: has_ended(child)))
    assert end_of(child) == -signal.SIGKILL
    assert not out.exists()
    return error.value


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_given_up_is_resumed_by_any_number(tmp_path, reference, until, count):
    out = tmp_path / "out"
    error = killed_and_given_up(out, until)
    assert error.missing == (1,)
    assert "process 1 of 2 ended before its part was done" in str(error)
    assert f"kept in {partial_folder(out)}: run it again with --resume" in str(error)

    children = [start(out, number, count, resume=True) for number in range(1, count)]
    report = leads(out, count, resume=True, wait_seconds=30)

    assert [end_of(child) for child in children] == [0] * (count - 1)
    assert report.resumed_nbytes > 0
    assert tree(out) == reference
    assert not partial_folder(out).exists()


def test_what_is_given_up_is_resumed_by_an_executor(tmp_path, reference, until):
    out = tmp_path / "out"
    killed_and_given_up(out, until)

    with ThreadPoolExecutor(2) as executor:
        options = {**OPTIONS, "wait_seconds": 30}
        report = api.convert(SAMPLE, out, executor=executor, parts=3, resume=True, **options)

    assert report.resumed_nbytes > 0
    assert tree(out) == reference


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_where_there_are_no_locks_a_death_is_told_by_silence(
    tmp_path, reference, monkeypatch, number
):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(members, "_SILENT_SECONDS", 1.5)
    out, observer = tmp_path / "out", Hears()
    child = start(out, 1, 2, dies_after=4)
    with in_background(leads, out, 2, observer=observer, wait_seconds=30):
        assert end_of(child) == -signal.SIGKILL
        wait_for(lambda: observer.notices)
        assert end_of(start(out, 1, 2)) == 0

    assert "process 1 of 2 ended before its part was done" in observer.notices[0]
    assert tree(out) == reference


def test_a_leftover_of_several_is_reported_with_what_all_of_them_did(tmp_path, until):
    out = tmp_path / "out"
    error = killed_and_given_up(out, until)
    done = str(error).split("; ")[-1].split(" of ")[0]

    with pytest.raises(ExistsError, match=f"an unfinished .* is here, {done} of 205 kB done"):
        api.convert(SAMPLE, out, **OPTIONS)


@pytest.mark.parametrize("resumes", [(0,), (0, 1, 2)])
def test_a_leader_that_is_killed_is_started_again_alone_or_with_all(tmp_path, reference, resumes):
    out = tmp_path / "out"
    start_and_kill_the_first(out, 3)

    children = [start(out, number, 3, resume=True) for number in resumes[1:]]
    report = leads(out, 3, resume=True, wait_seconds=30)

    assert [end_of(child) for child in children] == [0] * len(children)
    assert report.resumed_nbytes > report.written_nbytes / 2
    assert tree(out) == reference


def test_a_leader_that_finds_all_parts_of_the_others_done_waits_for_none_of_them(
    tmp_path, reference
):
    out = tmp_path / "out"
    start_and_kill_the_first(out, 3)

    report = leads(out, 3, resume=True, wait_seconds=0)

    assert report.resumed_nbytes > report.written_nbytes / 2
    assert tree(out) == reference


def test_a_leader_comes_back_while_the_others_write(tmp_path, reference):
    out = tmp_path / "out"
    leader = start(out, 0, 2, rests=True)
    slow = Slow()
    with in_background(
        api.convert, SAMPLE, out, process=(1, 2), observer=slow, **{**OPTIONS, "wait_seconds": 30}
    ) as found:
        assert slow.is_there.wait(30)
        os.kill(leader, signal.SIGKILL)
        assert end_of(leader) == -signal.SIGKILL
        with pytest.raises(ExecutionError, match=r"out: process \d+ on .* is writing it"):
            api.convert(SAMPLE, out, resume=True, **OPTIONS)
        with pytest.raises(ExecutionError, match=r"is writing it"):
            api.convert(SAMPLE, out, force=True, **OPTIONS)
        slow.go.set()
        leads(out, 2, resume=True)

    assert found[0].written_nbytes > 0
    assert tree(out) == reference


class Slow(NullObserver):
    """Holds the work up at the first step until it may go on."""

    def __init__(self):
        self.go = threading.Event()
        self.is_there = threading.Event()

    def on_step(self, _, /):
        self.is_there.set()
        self.go.wait(30)


def test_what_a_process_noted_and_is_not_so_any_more_is_written_again(tmp_path, reference):
    out = tmp_path / "out"
    start_and_kill_the_first(out, 2)
    optimizer = partial_folder(out) / "files" / "optimizer.safetensors"
    content = bytearray(optimizer.read_bytes())
    content[-100] ^= 1
    optimizer.write_bytes(content)

    with pytest.raises(MissingProcessError, match="process 1 of 2 did not come"):
        leads(out, 2, resume=True)
    child = start(out, 1, 2, resume=True)
    leads(out, 2, resume=True, wait_seconds=30)

    assert end_of(child) == 0
    assert tree(out) == reference


def test_what_the_first_noted_and_is_not_so_any_more_is_written_again_by_it(tmp_path, reference):
    out = tmp_path / "out"
    start_and_kill_the_first(out, 2)
    model = partial_folder(out) / "files" / "model.safetensors"
    content = bytearray(model.read_bytes())
    header_nbytes = 8 + int.from_bytes(content[:8], "little")
    for place in range(header_nbytes, len(content), 64):
        content[place] ^= 1
    model.write_bytes(content)

    report = leads(out, 2, resume=True)

    assert tree(out) == reference
    assert 0 < report.resumed_nbytes < report.written_nbytes


def test_others_that_never_come_are_named_and_nothing_is_left_where_nothing_was_done(tmp_path):
    with pytest.raises(MissingProcessError) as error:
        leads(tmp_path / "out", 8)
    assert str(error.value).startswith(
        f"{tmp_path}/out.partial: processes 1 to 7 of 8 did not come within 0 s; "
    )
    assert error.value.missing == tuple(range(1, 8))
    shutil.rmtree(partial_folder(tmp_path / "out"))

    with pytest.raises(MissingProcessError, match="process 0 of 8 gave no sign for 0 s"):
        api.convert(SAMPLE, tmp_path / "out", process=(3, 8), **OPTIONS)

    assert list(tmp_path.iterdir()) == []


def test_a_process_with_other_options_is_turned_away_with_what_differs(tmp_path, reference):
    out, observer, options = tmp_path / "out", Hears(), {**OPTIONS, "wait_seconds": 30}
    with in_background(leads, out, 2, observer=observer, wait_seconds=30) as found:
        with pytest.raises(ExistsError) as error:
            api.convert(SAMPLE, out, process=(1, 2), dtype="float32", **options)
        with pytest.raises(ExistsError, match="it is one of 2 processes, this one of 3"):
            api.convert(SAMPLE, out, process=(1, 3), **options)
        assert end_of(start(out, 1, 2)) == 0

    assert str(error.value) == (
        f"{out}: process 0 writes something else: it was started without --dtype float32, "
        "and goes on only so; start all processes with the same options"
    )
    assert found[0].written_nbytes == 205236
    assert tree(out) == reference
    assert observer.notices[0] == (
        "process 1 of 2 has other options or sees another source, and was turned away"
    )


@pytest.mark.parametrize("waits", [True, False])
def test_all_processes_wait_for_the_disk_or_none_as_the_first_was_told_to(
    tmp_path, monkeypatch, waits
):
    made, observer = [], Hears()

    class Seen(joining.Unfinished):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(joining, "Unfinished", Seen)
    out = tmp_path / "out"
    with in_background(leads, out, 2, observer=observer, wait_seconds=30, durable=waits):
        options = {**OPTIONS, "wait_seconds": 30}
        api.convert(SAMPLE, out, process=(1, 2), durable=not waits, **options)

    assert [place.is_durable for place in made] == [waits]
    told = {
        True: "was told not to wait for the disk (--no-sync), and does, as process 0 does",
        False: "was told to wait for the disk, and does not, as process 0 does not (--no-sync)",
    }
    assert observer.notices == [f"process 1 of 2 {told[waits]}"]


def test_a_number_is_taken_once(tmp_path, reference):
    out, slow, options = tmp_path / "out", Slow(), {**OPTIONS, "wait_seconds": 30}
    with (
        in_background(leads, out, 2, wait_seconds=30),
        in_background(api.convert, SAMPLE, out, process=(1, 2), observer=slow, **options),
    ):
        assert slow.is_there.wait(30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("restride.storage.joining.LOCK_SECONDS", 0.1)
            with pytest.raises(
                ExecutionError, match=r"part 1 of 2 of .*: process \d+ on .* is wri"
            ):
                api.convert(SAMPLE, out, process=(1, 2), **options)
        slow.go.set()

    assert tree(out) == reference


def test_a_process_that_comes_when_all_is_done_has_nothing_to_do(tmp_path):
    out = tmp_path / "out"
    api.convert(SAMPLE, out, **OPTIONS)

    for options in ({}, {"resume": True}, {"force": True}):
        report = api.convert(SAMPLE, out, process=(1, 2), **options, **OPTIONS)
        assert report.read_nbytes == report.written_nbytes == 0
    assert leads(out, 2, resume=True).read_nbytes == 0
    (out / "model.safetensors").unlink()
    with pytest.raises(ExistsError, match="the directory exists and is not empty"):
        api.convert(SAMPLE, out, process=(1, 2), **OPTIONS)


def test_a_stop_of_any_process_leaves_what_is_done(tmp_path, reference, until):
    out, stop = tmp_path / "out", threading.Event()

    class Stops(NullObserver):
        def on_step(self, event, /):
            if event.done_steps == 5:
                stop.set()

    observer = Hears()
    options = {**OPTIONS, "wait_seconds": 30}
    leads_until_told = in_background(
        leads, out, 2, observer=observer, wait_seconds=until(lambda: observer.notices)
    )
    with leads_until_told, pytest.raises(StoppedError):
        api.convert(SAMPLE, out, process=(1, 2), observer=Stops(), stop=stop, **options)

    assert observer.notices == ["process 1 of 2 failed: stopped"]
    assert api.convert(SAMPLE, out, resume=True, **OPTIONS).resumed_nbytes > 0
    assert tree(out) == reference


@pytest.fixture
def drifted(tmp_path, shared):
    """A checkpoint in which two ranks went on with copies of their own."""
    source = tmp_path / "source"
    shutil.copytree(shared / "checkpoints" / "gptbigcode_tp2_z1", source)
    return source


@pytest.mark.parametrize(("policy", "deaths"), [("first", (3, 8)), ("mean", (5,))])
def test_what_drifted_is_added_up_over_the_processes_and_their_deaths(
    tmp_path, drifted, policy, deaths
):
    options = {"replicas": policy, "source": drifted}
    whole = api.convert(drifted, tmp_path / "whole", replicas=policy, **OPTIONS)
    drift = [f for f in whole.findings if f.kind == "replica-drift"]
    assert len(drift) > 3
    out = tmp_path / "out"
    for number, steps in enumerate(deaths):
        children = [
            start(out, 0, 3, **options, resume=number > 0),
            start(out, 1, 3, dies_after=steps, **options, resume=number > 0),
            start(out, 2, 3, **options, resume=number > 0),
        ]
        assert end_of(children[1]) == -signal.SIGKILL
        os.kill(children[0], signal.SIGKILL)
        for child in (children[0], children[2]):
            end_of(child)
        shutil.copytree(partial_folder(out), tmp_path / "kept")

        for count in (1, 2, 3) if number else (3,):
            children = [start(out, n, count, resume=True, **options) for n in range(1, count)]
            report = leads(out, count, resume=True, wait_seconds=30, **options)
            assert [end_of(child) for child in children] == [0] * (count - 1)
            assert [f for f in report.findings if f.kind == "replica-drift"] == drift
            assert tree(out) == tree(tmp_path / "whole")
            shutil.rmtree(out)
            shutil.copytree(tmp_path / "kept", partial_folder(out))
        shutil.rmtree(tmp_path / "kept")


def test_replicas_that_must_agree_end_all_processes_and_leave_nothing(
    tmp_path, drifted, monkeypatch
):
    with pytest.raises(ReplicaError) as alone:
        api.convert(drifted, tmp_path / "out", **OPTIONS)
    monkeypatch.setattr("restride.storage.joining._GONE_SECONDS", 0.5)
    out = tmp_path / "out"
    # One that sees nothing of the first, as its life was so short, waits for all of this.
    children = [start(out, number, 3, source=drifted, wait_seconds=10) for number in (1, 2)]

    with pytest.raises(RestrideError, match="different") as error:
        leads(out, 3, source=drifted, wait_seconds=30)

    assert {end_of(child) for child in children} == {3}
    assert "--resume" not in str(error.value)
    assert alone.value.remedy == error.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_threads_take_the_parts_of_an_executor(tmp_path, reference):
    with ThreadPoolExecutor(2) as executor:
        report = api.convert(
            SAMPLE, tmp_path / "out", executor=executor, parts=5, **{**OPTIONS, "wait_seconds": 30}
        )

    assert tree(tmp_path / "out") == reference
    assert report.written_nbytes == 205236
    assert report.read_nbytes > 200_000


def dies_at(out, number, at, count=2):
    """A process that is killed at one of the operations on files that it does below a folder."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        FailingFiles._die = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        with failing_files(out.parent, at=at, is_torn=at % 2 == 0):
            api.convert(
                SAMPLE,
                out,
                process=(number, count),
                resume=True,
                **{**OPTIONS, "wait_seconds": 1},
            )
        code = 0
    except RestrideError:
        code = 3
    finally:
        os._exit(code)


def resumed_after_deaths(folder, reference, number, points):
    """How many of the processes died at their point, and did not get further."""
    deaths = 0
    for at in points:
        out = folder / f"out{at}"
        out.parent.mkdir(exist_ok=True)
        other = start(out, 1 - number, 2, resume=True, wait_seconds=1)
        child = dies_at(out, number, at)
        code = end_of(child)
        deaths += code == -signal.SIGKILL
        assert code in {-signal.SIGKILL, 0, 3}
        assert end_of(other) in {0, 3}
        assert not out.exists() or tree(out) == reference
        count = 1 + at % 3
        children = [start(out, n, count, resume=True) for n in range(1, count)]
        leads(out, count, resume=True, wait_seconds=30)
        assert [end_of(child) for child in children] == [0] * (count - 1)
        assert tree(out) == reference
        assert not partial_folder(out).exists()
        shutil.rmtree(out)
    return deaths


@pytest.mark.parametrize(("number", "at"), [(0, 8), (1, 47)])
def test_after_a_death_at_an_operation_any_number_goes_on(tmp_path, reference, number, at):
    assert resumed_after_deaths(tmp_path / "run", reference, number, [at]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 1])
def test_after_a_death_at_any_operation_any_number_goes_on(tmp_path, reference, number):
    assert resumed_after_deaths(tmp_path / "run", reference, number, range(1, 150)) > 50
