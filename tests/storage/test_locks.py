"""One holder at a time, and none that is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from restride.errors import ExecutionError
from restride.storage.locks import locked

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from restride.storage.locks import locked\n"
    "with locked(Path(sys.argv[1]), what='x'):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdout.readline() == b"held\n"
    yield child
    child.kill()
    child.communicate()


def test_a_second_holder_is_refused_with_the_process_of_the_first(tmp_path, holder):
    with (
        pytest.raises(ExecutionError) as error,
        locked(tmp_path / "lock", what="/models/out"),
    ):
        pass

    assert str(error.value) == (
        f"/models/out: process {holder.pid} on {os.uname().nodename} is writing it; "
        "wait until it is done, or name another output"
    )


def test_a_holder_that_is_killed_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)

    with locked(tmp_path / "lock", what="x"):
        content = (tmp_path / "lock").read_text()

    assert content.startswith(f"process {os.getpid()} on ")


def test_threads_of_one_process_keep_each_other_out(tmp_path):
    with (
        locked(tmp_path / "lock", what="x"),
        pytest.raises(ExecutionError, match=f"process {os.getpid()} "),
        locked(tmp_path / "lock", what="x"),
    ):
        pass


def test_a_file_that_was_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    real = fcntl.flock
    calls = []

    def flock(descriptor, what):
        if not calls:  # its last holder cleans up between our opening and our locking
            path.unlink()
        calls.append(what)
        real(descriptor, what)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path, what="x"):
        assert path.exists()

    assert len(calls) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", what="x"), locked(tmp_path / "lock", what="x"):
        assert (tmp_path / "lock").exists()


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path / "none" / "lock", what="x"):
        pass
