"""Executors of other libraries run the parts of a conversion; their errors are ours."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from restride import api, conversion
from restride.errors import (
    ExecutionError,
    ExistsError,
    MissingProcessError,
    PlanError,
    ReplicaError,
    StoppedError,
)
from restride.executors.events import NullObserver
from restride.executors.leading import Host
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE, run
from restride.testing.contents import tree

pytestmark = pytest.mark.usefixtures("small_blocks")

OPTIONS = {
    "states": "all",
    "workers": 1,
    "sync_nbytes": 1,
    "budget_nbytes": 5 << 19,
    "wait_seconds": 30,
}


class Now:
    """Runs each call when it is submitted, but those of some parts not at all.

    These end when all calls before them have.
    """

    def __init__(self, lost=(), error=None):
        self.lost = lost
        self.error = error
        self.threads = []

    def submit(self, function, *arguments):
        future = Future()
        future.set_running_or_notify_cancel()
        number = getattr(arguments[0], "number", 0) if arguments else 0
        target = self.lose if number in self.lost else self.run
        before = tuple(self.threads)
        self.threads.append(
            threading.Thread(target=target, args=(future, before, function, arguments))
        )
        self.threads[-1].start()
        return future

    def lose(self, future, before, *_):
        for thread in before:
            thread.join()
        if self.error:
            future.set_exception(self.error)
        else:
            future.set_result(None)

    @staticmethod
    def run(future, _, function, arguments):
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the business of the future
            future.set_exception(error)


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_processes_of_a_pool_write_what_one_writes(tmp_path, reference, parts):
    with ProcessPoolExecutor(2) as executor:
        report = api.convert(SAMPLE, tmp_path / "out", executor=executor, parts=parts, **OPTIONS)

    assert tree(tmp_path / "out") == reference
    assert (report.written_nbytes, report.resumed_nbytes) == (205236, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]


def test_parts_that_are_seen_to_be_done_only_when_their_tasks_are_over_end_it(
    tmp_path, reference, monkeypatch
):
    look = Host._look
    monkeypatch.setattr(
        Host, "_look", lambda host: not all(m.has_joined for m in host.members) and look(host)
    )

    api.convert(SAMPLE, tmp_path / "out", executor=Now(), parts=3, **OPTIONS)

    assert tree(tmp_path / "out") == reference


def test_a_cluster_of_dask_writes_what_one_process_writes(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.undo()  # its processes have blocks of the usual size
    source = tmp_path / "source"
    shutil.copytree(SAMPLE, source)
    monkeypatch.chdir(tmp_path)
    api.convert("source", tmp_path / "reference", to="universal")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        api.convert("source", "out", to="universal", executor=executor, parts=3, workers=1)
        with pytest.raises(ExistsError, match="it was started without --stage 3"):
            resumed_with_other_options(executor)

    assert tree(tmp_path / "out") == tree(tmp_path / "reference")


def resumed_with_other_options(executor):
    with pytest.raises(StoppedError):
        stopped("source", "other", to="universal")
    api.convert("source", "other", to="universal", stage=3, resume=True, executor=executor, parts=2)


def stopped(source, out, **options):
    stop = threading.Event()

    class Stops(NullObserver):
        def on_step(self, _, /):
            stop.set()

    api.convert(source, out, observer=Stops(), stop=stop, **options)


def test_a_config_is_found_from_another_folder(tmp_path, monkeypatch):
    """A task has no working directory that means anything, and what is noted has the user's."""
    monkeypatch.chdir(tmp_path)
    seen = []
    original = conversion.prepare

    def prepare(path, wanted, pool, **options):
        seen.append((path, wanted.config))
        return original(path, wanted, pool, **options)

    monkeypatch.setattr(conversion, "prepare", prepare)
    shutil.copytree(SAMPLE, tmp_path / "source")
    Path("config.json").write_text('{"model_type": "codegen", "num_attention_heads": 16}')
    options = {**OPTIONS, "to": "deepspeed", "config": "config.json"}
    api.convert("source", "alone", **options)
    api.convert("source", "out", executor=Now(), parts=2, **options)

    assert seen[1:] == [
        ("source", "config.json"),
        *[(str(tmp_path / "source"), str(tmp_path / "config.json"))] * 2,
    ]
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def test_a_pool_whose_process_dies_is_an_error_from_which_one_goes_on(tmp_path, reference):
    out = tmp_path / "out"
    with ProcessPoolExecutor(2) as executor:

        class Kills(NullObserver):
            def on_step(self, event, /):
                if event.done_nbytes > 50_000:
                    for process in list(executor._processes.values() or ()):
                        os.kill(process.pid, signal.SIGKILL)

        with pytest.raises(MissingProcessError, match=r"part \d failed in the executor .*Broken"):
            api.convert(SAMPLE, out, executor=executor, parts=8, observer=Kills(), **OPTIONS)
    assert not out.exists()

    assert api.convert(SAMPLE, out, resume=True, **OPTIONS).resumed_nbytes > 0
    assert tree(out) == reference


def test_parts_that_an_executor_never_begins_are_missed_when_nobody_else_works(
    tmp_path, reference, until
):
    begun = []

    class Forgets(ThreadPoolExecutor):
        def submit(self, function, *arguments):
            if arguments and arguments[0].number > 1:
                return Future()
            begun.append(super().submit(function, *arguments))
            return begun[-1]

    out = tmp_path / "out"
    options = {**OPTIONS, "wait_seconds": until(lambda: all(task.done() for task in begun))}
    with (
        Forgets(1) as executor,
        pytest.raises(MissingProcessError, match="parts 2 and 3 of 3 did not come within 30 s"),
    ):
        api.convert(SAMPLE, out, executor=executor, parts=3, **options)

    assert api.convert(SAMPLE, out, resume=True, **OPTIONS).resumed_nbytes
    assert tree(out) == reference


def test_a_pool_that_is_shut_down_between_two_parts_is_an_error_of_ours(tmp_path):
    class ShutDown(ThreadPoolExecutor):
        def submit(self, function, *arguments):
            if arguments and arguments[0].number == 2:
                raise RuntimeError("cannot schedule new futures after shutdown")
            return super().submit(function, *arguments)

    with ShutDown(2) as executor, pytest.raises(ExecutionError, match=r"no more parts \(RuntimeE"):
        api.convert(SAMPLE, tmp_path / "out", executor=executor, parts=3, **OPTIONS)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parts", [2, 3])
def test_an_executor_goes_on_with_what_another_one_left(tmp_path, reference, parts):
    out = tmp_path / "out"
    with pytest.raises(
        MissingProcessError, match="part 2 of 2 ended in the executor before it began"
    ):
        api.convert(SAMPLE, out, executor=Now(lost=[2]), parts=2, **OPTIONS)

    report = api.convert(SAMPLE, out, executor=Now(), parts=parts, resume=True, **OPTIONS)

    assert report.resumed_nbytes > 0
    assert tree(out) == reference


def test_an_error_of_a_part_is_that_of_the_conversion_and_ends_the_others(tmp_path, shared):
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"
    with ThreadPoolExecutor(3) as executor, pytest.raises(ReplicaError, match="different"):
        api.convert(source, tmp_path / "out", executor=executor, parts=3, **OPTIONS)

    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_ours_is_named_with_its_part(tmp_path):
    error = ValueError("no such worker")
    with pytest.raises(MissingProcessError) as caught:
        api.convert(
            SAMPLE, tmp_path / "out", executor=Now(lost=[1, 2], error=error), parts=2, **OPTIONS
        )

    assert caught.value.problem == "part 1 failed in the executor (ValueError: no such worker)"
    assert caught.value.__cause__ is error
    assert list(tmp_path.iterdir()) == []


def test_an_executor_that_starts_nothing_or_is_of_another_version_is_refused(tmp_path):
    out = tmp_path / "out"
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with pytest.raises(ExecutionError, match=r"takes no work \(RuntimeError: cannot sche"):
        api.convert(SAMPLE, out, executor=closed, parts=2)

    class Waits:
        def submit(self, *_):
            return Future()

    class Unreachable(Now):
        def submit(self, function, *arguments):
            if self.left:
                self.left -= 1
                return super().submit(function, *arguments)
            raise TimeoutError("no scheduler")

    for left, told in enumerate(["takes no work", "takes no more parts"]):
        away = Unreachable()
        away.left = left
        with pytest.raises(ExecutionError, match=rf"{told} \(TimeoutError: no scheduler\)"):
            api.convert(SAMPLE, out, executor=away, parts=2, **OPTIONS)
    assert list(tmp_path.iterdir()) == []

    with pytest.raises(ExecutionError, match="did not start anything within 0 s; see whether"):
        api.convert(SAMPLE, out, executor=Waits(), parts=2, wait_seconds=0.1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        api.convert(SAMPLE, out, executor=Waits(), parts=2, stop=stop)
    with pytest.raises(ExecutionError, match=r"cannot run restride \(ModuleNotFoundError: x\)"):
        api.convert(SAMPLE, out, executor=Now(lost=[0], error=ModuleNotFoundError("x")), parts=2)
    with pytest.raises(ExecutionError, match="the executor has restride None, and this process"):
        api.convert(SAMPLE, out, executor=Now(lost=[0]), parts=2)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"parts": 2},
        {"executor": Now()},
        {"executor": Now(), "parts": 0},
        {"executor": Now(), "parts": 1 << 20},
        {"executor": Now(), "parts": 2, "process": (0, 2)},
        {"process": (2, 2)},
        {"process": (-1, 2)},
        {"process": (0, 0)},
        {"wait_seconds": float("nan")},
        {"wait_seconds": -1},
    ],
)
def test_numbers_that_mean_nothing_are_refused(tmp_path, options):
    with pytest.raises(PlanError):
        api.convert(SAMPLE, tmp_path / "out", **options)

    assert list(tmp_path.iterdir()) == []


def test_what_was_stopped_while_parts_run_stops_them_all(tmp_path, reference):
    out, stop = tmp_path / "out", threading.Event()

    class Stops(NullObserver):
        def on_step(self, event, /):
            if event.done_nbytes:
                stop.set()

    executor = ThreadPoolExecutor(1)  # the second part is never begun
    with executor, pytest.raises(StoppedError, match="--resume"):
        api.convert(SAMPLE, out, executor=executor, parts=2, observer=Stops(), stop=stop, **OPTIONS)

    assert partial_folder(out).exists()
    api.convert(SAMPLE, out, resume=True, **OPTIONS)
    assert tree(out) == reference


def test_the_command_takes_an_executor_by_its_name(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    Path("cluster.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def pool():\n    return ThreadPoolExecutor(2)\n"
        "class Bare:\n    submit = ThreadPoolExecutor(1).submit\n"
        "number = 7\n"
    )
    words = ["convert", SAMPLE, "out", "--states", "all", "--parts", "2", "--executor"]
    for name in ("cluster:pool", "cluster:Bare"):
        ran = run(*words, name, "--force")
        assert ran.code == 0, ran.err
        assert ran.out.startswith("out: 65 arrays in 3 files, 205 kB written, ")
        assert {k: v for k, v in tree(tmp_path / "out").items() if k != "restride.json"} == {
            k: v for k, v in reference.items() if k != "restride.json"
        }

    for name, problem in {
        "cluster": "names nothing to call; write it as MODULE:FUNCTION, such as",
        "cluster:nothing": "cannot be found (module 'cluster' has no attribute 'nothing')",
        "nowhere:pool": "cannot be found (no module 'nowhere')",
        "cluster:number": "returns int, which has no submit(); name something that returns",
    }.items():
        ran = run(*words, name)
        assert ran.code == 2
        assert ran.err.startswith(f"restride: --executor '{name}' {problem}"), ran.err
