"""A call in a thread of its own: nobody goes on before it ended, and no error of it is lost."""

from __future__ import annotations

import threading
from threading import Event, Timer

import pytest

from restride.storage.background import Background


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_call_raises_is_raised_again_once_it_ended_and_each_time(error: BaseException):
    go = Event()

    def fail() -> None:
        go.wait(30)
        raise error

    call = Background("fails", fail)
    assert not call.is_ended
    Timer(0.05, go.set).start()

    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            call.require_success()
        assert caught.value is error
    assert call.is_ended
    assert call.error is error


def test_a_call_that_did_well_is_waited_for_and_raises_nothing():
    go, done = Event(), []

    def run(*numbers: int) -> None:
        done.append(threading.current_thread().name)
        go.wait(30)
        done.extend(numbers)

    call = Background("does well", run, 1, 2)
    Timer(0.05, go.set).start()
    call.require_success()

    assert done == ["does well", 1, 2]
    call.wait()
    assert call.is_ended
    assert call.error is None


def test_who_waits_for_a_call_that_failed_is_let_go_on():
    call = Background("fails", [].pop)

    call.wait()

    assert isinstance(call.error, IndexError)
