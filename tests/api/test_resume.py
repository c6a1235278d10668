"""What is done once is not done again, and only where it is the same work."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import restride
from restride import api
from restride.errors import (
    BudgetError,
    CorruptError,
    ExecutionError,
    ExistsError,
    ReplicaError,
    StoppedError,
)
from restride.executors import blocks, manifests, resuming
from restride.executors.events import NullObserver
from restride.exports import Wanted
from restride.storage import reserving
from restride.storage.journal import Journal, read_journal
from restride.storage.output_files import OutputFiles
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE, run
from restride.testing.contents import tree
from restride.wording import format_size

BLOCK = 16 << 10
SMALL = {"workers": 1, "sync_nbytes": 1, "budget_nbytes": 1 << 21}


class StopsAfter(NullObserver):
    """Asks to stop, or raises, when so many steps are done."""

    def __init__(self, steps, error=None):
        self.stop = threading.Event()
        self.left = steps
        self.error = error
        self.events = []

    def on_plan(self, event, /):
        self.events.append(event)

    def on_step(self, event, /):
        self.events.append(event)
        self.left -= 1
        if self.left <= 0:
            self.stop.set()
            if self.error is not None:
                raise self.error


def stopped(source, out, steps, **options):
    observer = StopsAfter(steps)
    with pytest.raises(StoppedError) as caught:
        api.convert(source, out, observer=observer, stop=observer.stop, **{**SMALL, **options})
    return caught.value


def test_who_stops_does_not_wait_for_files_that_nobody_has_written_to(tmp_path, monkeypatch):
    out, created, create = tmp_path / "out", [], OutputFiles._create
    end = time.monotonic() + 20

    def late(files, file, **options):
        """Create the first file at once, and all others when somebody has given up."""
        while created and files._is_creating and time.monotonic() < end:
            time.sleep(0.01)
        created.append(file.name)
        create(files, file, **options)

    monkeypatch.setattr(OutputFiles, "_create", late)
    stopped(SAMPLE, out, 1, states="all", to="universal", workers=1)
    monkeypatch.undo()

    assert 1 <= len(created) <= 2
    api.convert(SAMPLE, out, states="all", to="universal", resume=True)
    api.convert(SAMPLE, tmp_path / "whole", states="all", to="universal")
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    "options", [{}, {"to": "universal"}, {"to": "deepspeed", "tp": 1, "dp": 3}]
)
def test_a_conversion_that_was_stopped_goes_on_with_any_memory_and_threads(tmp_path, options):
    options = {"states": "all", **options}
    api.convert(SAMPLE, tmp_path / "whole", **options)
    out = tmp_path / "out"
    steps = [5, 9]
    for number, count in enumerate(steps):
        error = stopped(SAMPLE, out, count, resume=number > 0, **options)
        assert str(error).startswith("stopped; ")
        assert str(error).endswith(f"kept in {partial_folder(out)}: run it again with --resume")
        assert not out.exists()
    done = sum(r.get("nbytes", 0) for r in read_journal(partial_folder(out) / "journal")[1:])

    report = api.convert(
        SAMPLE, out, resume=True, budget_nbytes=64 << 20, workers=3, sync_nbytes=1 << 30, **options
    )

    assert tree(out) == tree(tmp_path / "whole")
    assert report.resumed_nbytes == done > 0
    assert report.read_nbytes > 0
    assert not partial_folder(out).exists()


def test_a_leftover_is_reported_and_never_clobbered(tmp_path):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 3)
    before = tree(partial_folder(out))

    with pytest.raises(ExistsError) as error:
        api.convert(SAMPLE, out)
    ran = run("convert", SAMPLE, out)

    done = sum(r.get("nbytes", 0) for r in read_journal(partial_folder(out) / "journal")[1:])
    assert str(error.value) == (
        f"{out}: an unfinished conversion of {SAMPLE} is here, {format_size(done)} of 29.3 kB "
        f"done; add --resume to continue or remove {partial_folder(out)}"
    )
    assert ran.code == 2
    assert ran.err == f"restride: {error.value}\n"
    assert {k: v for k, v in tree(partial_folder(out)).items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }


@pytest.mark.parametrize("options", [{"to": "universal"}, {"to": "deepspeed", "tp": 1, "dp": 3}])
def test_what_nobody_writes_is_zero_whatever_a_file_had_there_before(tmp_path, options):
    """After a loss of power there may be anything; the digests are those of the arrays alone."""
    api.convert(SAMPLE, tmp_path / "whole", **options)
    out = tmp_path / "out"
    stopped(SAMPLE, out, 6, **options)
    for path in (partial_folder(out) / "files").rglob("*.pt"):
        path.write_bytes(b"\xff" * path.stat().st_size)

    api.convert(SAMPLE, out, resume=True, **SMALL, **options)

    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "step/x.pt"])
def test_a_file_of_somebody_else_among_those_of_the_output_is_not_published(tmp_path, name):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 3)
    stranger = partial_folder(out) / "files" / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"x")

    for _ in range(2):
        with pytest.raises(ExistsError, match=f"holds {name}, 1 in all") as error:
            api.convert(SAMPLE, out, resume=True, **SMALL)

        assert "move that away, or start anew with --force" in str(error.value)
        assert not out.exists()
    stranger.unlink()
    assert api.convert(SAMPLE, out, resume=True, **SMALL).resumed_nbytes > 0


def test_a_file_that_appears_among_those_of_the_output_is_not_published(tmp_path):
    out = tmp_path / "out"

    class Intrudes(NullObserver):
        def on_step(self, _, /):
            (partial_folder(out) / "files" / "model.bin").write_text("x")

    with pytest.raises(ExistsError, match=r"holds model\.bin"):
        api.convert(SAMPLE, out, observer=Intrudes(), **SMALL)

    assert not out.exists()


def test_what_was_replaced_is_a_folder_or_somebody_elses(tmp_path):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 3)
    (partial_folder(out) / "replaced").write_bytes(b"")

    for options in ({"resume": True}, {"force": True}):
        with pytest.raises(ExistsError, match=r"is in the way: .* and holds replaced"):
            api.convert(SAMPLE, out, **options)

    assert not out.exists()


def test_force_starts_anew(tmp_path):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 3)

    report = api.convert(SAMPLE, out, force=True)

    assert report.resumed_nbytes == 0
    assert not partial_folder(out).exists()
    api.convert(SAMPLE, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def test_a_folder_that_appears_under_the_final_name_meanwhile_costs_nothing(tmp_path):
    out = tmp_path / "out"

    class Intrudes(NullObserver):
        def on_step(self, _, /):
            out.mkdir(exist_ok=True)
            (out / "theirs").write_text("precious")

    with pytest.raises(ExistsError, match=r"out: something appeared here meanwhile; .*--resume"):
        api.convert(SAMPLE, out, observer=Intrudes())
    assert tree(out) == {"theirs": b"precious"}

    with pytest.raises(ExistsError, match=r"out: holds theirs, which restride did not write;"):
        api.convert(SAMPLE, out, resume=True, force=True)
    assert tree(out) == {"theirs": b"precious"}
    (out / "theirs").unlink()

    report = api.convert(SAMPLE, out, resume=True)

    assert report.resumed_nbytes == report.written_nbytes


@pytest.mark.parametrize("to", ["safetensors", "universal", "deepspeed"])
def test_what_is_saved_into_an_output_while_it_is_replaced_is_not_lost(tmp_path, to):
    out = tmp_path / "out"
    api.convert(SAMPLE, out, to=to)
    saved = out / "global_step7" / "mp_rank_00_model_states.pt"

    class Saves(NullObserver):
        def on_step(self, _, /):
            saved.parent.mkdir(exist_ok=True)
            saved.write_text("precious")

    name = saved.relative_to(out)
    said = rf"out: holds {name}, which restride did not write; move it away .*--resume"
    with pytest.raises(ExistsError, match=said):
        api.convert(SAMPLE, out, to=to, force=True, observer=Saves())
    assert saved.read_text() == "precious"
    shutil.move(saved.parent, tmp_path)

    report = api.convert(SAMPLE, out, to=to, force=True, resume=True)

    assert report.resumed_nbytes == report.written_nbytes
    assert not saved.parent.exists()
    assert api.check(out).verdict == "ok"
    assert tree(tmp_path / "global_step7") == {saved.name: b"precious"}


@pytest.mark.parametrize("to", ["safetensors", "universal", "deepspeed"])
def test_an_output_is_replaced_by_force_and_nothing_in_which_anybody_wrote(tmp_path, to):
    out = tmp_path / "out"
    api.convert(SAMPLE, out, states="all")
    for _ in range(2):  # what is there is of another form, and of this one
        api.convert(SAMPLE, out, to=to, force=True)
    (out / "config.json").write_text("{}")
    before = tree(out)

    for act in (api.convert, partial(api.dry_run, wanted=Wanted(to=to))):
        with pytest.raises(ExistsError, match=r"holds config\.json, which restride did not write"):
            act(SAMPLE, out, force=True)

    assert tree(out) == before
    assert not partial_folder(out).exists()


@pytest.mark.parametrize(
    "record",
    [
        {"region": 0, "block": 0, "digests": ["zz" * 16], "nbytes": 5},
        {"region": -1, "block": 0, "digests": ["0" * 32]},
        {"region": 10**9, "block": 0, "digests": ["0" * 32]},
        {"region": 0, "block": -1, "digests": ["0" * 32]},
        {"region": 0, "block": 10**9, "digests": ["0" * 32]},
        {"region": "0", "block": None, "digests": 3},
        {"drift": {"tensor": "x"}},
        {"drift": 3},
        {"nbytes": "many"},
        {},
    ],
)
def test_a_record_that_means_nothing_is_not_believed(tmp_path, record):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 3)
    journal = Journal(partial_folder(out) / "journal")
    journal.append([record])
    journal.close()

    api.convert(SAMPLE, out, resume=True)

    assert api.check(out).verdict == "ok"


def test_resuming_nothing_is_starting(tmp_path):
    report = api.convert(SAMPLE, tmp_path / "out", resume=True)

    assert report.resumed_nbytes == 0


def test_another_job_is_refused_with_what_differs(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(SAMPLE, source)
    stopped(source, out, 3)
    weights = min(source.rglob("mp_rank_00_model_states.pt"))
    name = weights.relative_to(source)
    status = weights.stat()

    def refusal(**options):
        with pytest.raises(ExistsError) as error:
            api.convert(source, out, resume=True, **options)
        assert f"remove {partial_folder(out)}, or start anew with --force" in str(error.value)
        return error.value.problem

    assert "it was started without --states all" in refusal(states="all")
    assert "it was started without --dtype float32" in refusal(dtype="float32")
    assert "it was started without --replicas first" in refusal(replicas="first")
    os.utime(weights, ns=(1, 1))
    assert f"source file {name} was written to since then" in refusal()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    optimizer = min(source.rglob("*optim_states.pt"))
    content, status = optimizer.read_bytes(), optimizer.stat()
    optimizer.write_bytes(content[:-1000].replace(b"\x3c", b"\x3d") + content[-1000:])
    os.utime(optimizer, ns=(status.st_atime_ns, status.st_mtime_ns))
    name = optimizer.relative_to(source)
    assert f"source file {name} has other bytes, with the same time of change" in refusal()
    optimizer.write_bytes(content)
    os.utime(optimizer, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert api.convert(source, out, resume=True).resumed_nbytes > 0


def test_a_finished_output_of_other_options_is_not_taken_for_this_one(tmp_path):
    out = tmp_path / "out"
    api.convert(SAMPLE, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def refusal(source=SAMPLE, **options):
        with pytest.raises(ExistsError) as caught:
            api.convert(source, out, resume=True, **options)
        assert "name another output, or replace all of it with --force" in str(caught.value)
        return caught.value.problem

    begin = f"the directory exists and is the output of restride {restride.__version__}"
    told = f"{begin} without --dtype float32"
    assert refusal(dtype="float32") == told
    assert refusal(to="universal").endswith(
        f" {restride.__version__} with --to safetensors, not universal"
    )
    others = refusal(states="all", dtype="float32", replicas="first", max_shard_nbytes=1 << 20)
    assert others.endswith(" and 1 more")
    shutil.copytree(SAMPLE, tmp_path / "changed")
    edited = min((tmp_path / "changed").rglob("*model_states.pt"))
    os.utime(edited, ns=(1, 1))
    told = f"{begin} with these options, of another source or of one that was changed since"
    assert refusal(tmp_path / "changed") == told
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert api.convert(SAMPLE, out, resume=True).read_nbytes == 0
    (out / "model.safetensors").unlink()
    told = "for this source and these options, and model.safetensors: the file is missing"
    assert refusal() == f"{begin} {told}"
    manifest = json.loads((out / "restride.json").read_text())
    assert manifest["options"]["to"] == "safetensors"


def test_bytes_that_are_not_those_that_were_noted_are_written_again(tmp_path):
    api.convert(SAMPLE, tmp_path / "whole", states="all", **SMALL)
    out = tmp_path / "out"
    stopped(SAMPLE, out, 40, states="all")
    files = partial_folder(out) / "files"
    records = read_journal(partial_folder(out) / "journal")[1:]
    done = sum(record.get("nbytes", 0) for record in records)
    model = files / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-2000] ^= 1  # in the last weight but some
    model.write_bytes(content)

    report = api.convert(SAMPLE, out, states="all", resume=True, **SMALL)

    assert 0 < report.resumed_nbytes < done
    assert tree(out) == tree(tmp_path / "whole")


def test_files_that_are_gone_are_written_again(tmp_path):
    api.convert(SAMPLE, tmp_path / "whole", states="all", **SMALL)
    out = tmp_path / "out"
    stopped(SAMPLE, out, 40, states="all")
    shutil.rmtree(partial_folder(out) / "files")

    assert api.convert(SAMPLE, out, states="all", resume=True).resumed_nbytes == 0
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["header", "claim"])
def test_a_journal_that_is_damaged_costs_what_it_noted(tmp_path, damage):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 8)
    path = partial_folder(out) / "journal"
    content = bytearray(path.read_bytes())
    content[20 if damage == "header" else content.index(b'"region"')] ^= 1
    path.write_bytes(content)

    report = api.convert(SAMPLE, out, resume=True)

    assert report.resumed_nbytes == 0
    api.convert(SAMPLE, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def test_a_folder_that_only_has_the_name_is_left_alone(tmp_path):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")

    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(ExistsError, match=r"out.partial: is in the way: .*holds thesis.tex"):
            api.convert(SAMPLE, tmp_path / "out", **options)

    assert tree(tmp_path) == {"out.partial/thesis.tex": b"precious"}


@pytest.fixture
def drifted(tmp_path):
    """The sample, with other values in the second copy of a weight that two ranks hold."""
    source = tmp_path / "source"
    shutil.copytree(SAMPLE, source)
    catalog = api.open(source)
    entry = next(t for t in catalog.tensors if t.name == "transformer.wte.weight").states["weight"]
    region = entry.regions[1]
    path = source / catalog.files[region.file].name
    content = bytearray(path.read_bytes())
    for element in range(0, entry.layout.full_numel, 100):
        content[region.start_nbytes + 2 * element] ^= 1
    path.write_bytes(content)
    return source


@pytest.mark.parametrize("policy", ["first", "mean"])
def test_what_drifted_is_reported_whole_wherever_it_was_stopped(
    tmp_path, drifted, policy, monkeypatch
):
    for module in (blocks, manifests, resuming):
        monkeypatch.setattr(module, "BLOCK_NBYTES", 512)
    options = {**SMALL, "replicas": policy}
    with pytest.raises(BudgetError) as caught:
        api.convert(drifted, tmp_path / "whole", **{**options, "budget_nbytes": 1})
    options["budget_nbytes"] = caught.value.needed_nbytes  # so that there are many steps
    whole = api.convert(drifted, tmp_path / "whole", **options)
    drift = [f for f in whole.findings if f.kind == "replica-drift"]
    assert [f.details["different_numel"] for f in drift] == [11]
    resumed = 0
    for steps in range(1, 13):
        out = tmp_path / f"out{steps}"
        stopped(drifted, out, steps, **options)

        # Records need room, too.
        report = api.convert(
            drifted, out, resume=True, **{**options, "budget_nbytes": SMALL["budget_nbytes"]}
        )

        resumed += report.resumed_nbytes
        assert [f for f in report.findings if f.kind == "replica-drift"] == drift
        assert tree(out) == tree(tmp_path / "whole")
    assert resumed > 0


def test_replicas_that_must_agree_and_do_not_leave_nothing(tmp_path, drifted):
    with pytest.raises(ReplicaError):
        api.convert(drifted, tmp_path / "out", **SMALL)

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_progress_counts_what_was_done_before(tmp_path):
    out = tmp_path / "out"
    stopped(SAMPLE, out, 8)
    observer = StopsAfter(10**9)

    report = api.convert(SAMPLE, out, resume=True, observer=observer)

    plan, *steps = observer.events
    assert steps[-1].done_nbytes == plan.total_nbytes == report.written_nbytes
    counts = [step.done_nbytes for step in steps]
    assert counts == sorted(counts)
    assert steps[0].tensor == "what is there already"


def test_an_interrupt_says_how_to_go_on(tmp_path):
    out = tmp_path / "out"

    with pytest.raises(KeyboardInterrupt) as caught:
        api.convert(SAMPLE, out, observer=StopsAfter(8, KeyboardInterrupt()), **SMALL)

    (note,) = caught.value.__notes__
    assert note.endswith("run it again with --resume")
    assert api.convert(SAMPLE, out, resume=True).resumed_nbytes > 0


def test_a_stop_before_anything_is_done_leaves_nothing(tmp_path):
    stop = threading.Event()
    stop.set()

    with pytest.raises(StoppedError, match=r"^stopped$"):
        api.convert(SAMPLE, tmp_path / "out", stop=stop)

    assert list(tmp_path.iterdir()) == []


def test_a_source_that_shrinks_meanwhile_is_an_error_and_what_was_read_before_is_kept(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(SAMPLE, source)
    api.convert(source, tmp_path / "whole", states="all")
    victims = list(source.rglob("*optim_states.pt"))
    contents = {path: (path.read_bytes(), path.stat()) for path in victims}

    class Truncates(NullObserver):
        count = 0

        def on_step(self, _, /):
            self.count += 1
            if self.count == 20:
                wait_for(lambda: len(read_journal(partial_folder(out) / "journal")) > 1)
                for path in victims:
                    os.truncate(path, 4096)

    with pytest.raises((CorruptError, ExecutionError), match=r"optim_states.pt: .*--resume"):
        api.convert(source, out, states="all", observer=Truncates(), **SMALL)
    for path, (content, status) in contents.items():
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert api.convert(source, out, states="all", resume=True).resumed_nbytes > 0
    assert tree(out) == tree(tmp_path / "whole")


def test_what_was_read_of_a_source_that_changed_is_not_believed(tmp_path):
    """The source is put back with its old time, so that only the run itself could notice."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(SAMPLE, source)
    api.convert(source, tmp_path / "whole", states="all")
    victims = list(source.rglob("*optim_states.pt"))
    before = {path: (path.read_bytes(), path.stat()) for path in victims}

    class Changes(NullObserver):
        def on_plan(self, _, /):
            for path, (content, _) in before.items():
                path.write_bytes(content[:10_000] + bytes(10_000) + content[20_000:])

    with pytest.raises(ExecutionError, match="changed while it was read"):
        api.convert(source, out, states="all", observer=Changes(), **SMALL)
    for path, (content, status) in before.items():
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    api.convert(source, out, states="all", resume=True)

    assert tree(out) == tree(tmp_path / "whole")


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_killed_at_twenty_random_moments_conversions_end_the_same():
    script = Path(__file__).resolve().parents[2] / "scripts" / "kill_conversions.py"
    memory = ["--folder", "/dev/shm"] if os.access("/dev/shm", os.W_OK) else []  # noqa: S108
    child = start(script, "--kills", "20", "--seed", str(time.time_ns()), *memory)
    told, problem = child.communicate(timeout=120)

    assert child.returncode == 0, problem
    assert json.loads(told)["kills"] == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_at_a_signal_and_says_how_to_go_on(tmp_path, number):
    source, out = big(tmp_path), tmp_path / "out"
    child = start("-m", "restride", "convert", source, out, "--workers", "1", "--memory", "1MB")
    wait_for(lambda: size_of(partial_folder(out) / "files") > 0)
    child.send_signal(number)
    written, told = (stream.decode() for stream in child.communicate(timeout=60))

    assert child.returncode == 130, told
    assert written == ""
    first, last = told.splitlines()
    assert first == "restride: stopping at the end of a step; once more to end at once"
    assert last.startswith("restride: stopped")
    assert not out.exists()
    ran = run("convert", source, out, "--resume")
    assert ran.code == 0, ran.err
    assert run("diff", source, out).code == 0


def big(tmp_path):
    """A checkpoint that takes a while: 64 MiB, in steps of some KiB."""
    nbytes = 64 << 20
    header = {"wte": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    text = json.dumps(header).encode()
    folder = tmp_path / "source"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(np.arange(nbytes // 8).tobytes())
    return folder


def size_of(folder):
    try:
        return sum(path.stat().st_blocks for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_two_conversions_into_one_place_are_one_and_an_error(tmp_path):
    out = tmp_path / "out"
    entered, leave = threading.Event(), threading.Event()

    class Waits(NullObserver):
        def on_step(self, _, /):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=lambda: api.convert(SAMPLE, out, observer=Waits()))
    thread.start()
    entered.wait(60)
    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(ExecutionError, match=f"out: process {os.getpid()} on .* is writing it"):
            api.convert(SAMPLE, out, **options)
    leave.set()
    thread.join()

    assert api.check(out).verdict == "ok"


def test_a_file_that_cannot_be_created_leaves_nothing_of_those_that_were_written_to_before(
    tmp_path, monkeypatch
):
    observer = StopsAfter(1)
    journal = partial_folder(tmp_path / "out") / "journal"
    real = reserving.fallocate

    def reserve(descriptor, nbytes):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "latest_universal":
            assert observer.stop.wait(60)  # some step of another file is done
            wait_for(lambda: len(read_journal(journal)) > 1)  # and noted
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, nbytes)

    monkeypatch.setattr(reserving, "fallocate", reserve)

    with pytest.raises(ExecutionError, match="latest_universal: no room for"):
        api.convert(SAMPLE, tmp_path / "out", to="universal", observer=observer, **SMALL)

    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_size_of_files_is_an_error_that_leaves_nothing(tmp_path):
    source = big(tmp_path)
    limited = (
        "import resource, sys, restride.cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "sys.exit(restride.cli.main(sys.argv[1:]))\n"
    )
    child = start("-c", limited, "convert", source, tmp_path / "out")
    _, told = child.communicate(timeout=60)

    assert child.returncode == 2
    assert b"model.safetensors: no room for 67.1 MB" in told
    assert b"raise the limit of this process (ulimit -f) or file system" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
