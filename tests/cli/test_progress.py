"""Progress is reported on standard error, and leaves nothing behind when the work fails."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import nullcontext
from threading import Event
from typing import TYPE_CHECKING

import pytest

from restride.cli import waiting
from restride.cli.progress import BarProgress, LineProgress, open_progress
from restride.cli.waiting import Waiting
from restride.executors.events import PlanFinished, PlanStarted, ReplicaDrift, StepFinished

if TYPE_CHECKING:
    from restride.executors.events import Observer

PLAN = PlanStarted(steps=4, total_nbytes=4_000_000_000, projected_nbytes=1000)


def step(number: int) -> StepFinished:
    return StepFinished(
        done_steps=number,
        done_nbytes=number * 1_000_000_000,
        read_nbytes=number * 1_000_000_000,
        tensor=f"h.{number}.weight",
    )


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_every_ten_seconds_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with LineProgress("converting", clock=clock) as observer:
        observer.on_plan(PLAN)
        for number, now in ((1, 105.0), (2, 110.0), (3, 115.0)):
            clock.now = now
            observer.on_step(step(number))
        observer.on_finish(PlanFinished(1, 1, 15.0))
    captured = capsys.readouterr()

    assert captured.out == ""
    assert captured.err == (
        "restride: converting h.2.weight: 2.00 GB of 4.00 GB, 200 MB/s, 10.0 s left\n"
    )


def test_short_work_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress("checking", clock=Clock()) as observer:
        observer.on_plan(PLAN)
        observer.on_step(step(4))
        observer.on_drift(ReplicaDrift("a", "weight", (0, 1), 4, 2, 0.5))

    assert capsys.readouterr().err == ""


def test_what_an_earlier_run_did_makes_this_one_no_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with LineProgress("converting", clock=clock) as observer:
        observer.on_plan(PLAN)
        observer.on_step(step(2))  # of which the journal says so
        clock.now += 10
        observer.on_step(step(3))

    assert capsys.readouterr().err == (
        "restride: converting h.3.weight: 3.00 GB of 4.00 GB, 100 MB/s, 10.0 s left\n"
    )


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, r"converting [━╸╺]+ 3\.00 GB of 4\.00 GB, 100 MB/s, 10\.0 s left"),
        (80, r"converting [━╸╺]+ 3\.00 GB of 4\.00 GB, 100 MB/s, 10\.0 s left"),
        (70, r"converting 3\.00 GB of 4\.00 GB, 100 MB/s, 10\.0 s left"),
        (50, r"converting 75%, 10\.0 s left"),
        (20, r"75%, 10\.0 s left"),
    ],
)
def test_the_bar_is_one_line_that_says_what_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int,
    shown: str,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    clock = Clock()
    with BarProgress("converting", clock=clock) as bar:
        bar.on_plan(PLAN)
        bar.on_step(step(2))
        clock.now += 10
        bar.on_step(step(3))
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    *_, last = [line for line in re.split(r"[\r\n]+", drawn) if line.strip()]

    assert re.fullmatch(rf"{shown} *", last), last
    assert len(last) <= width


def test_the_bar_is_finishing_once_every_byte_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with BarProgress("converting") as bar:
        bar.on_plan(PLAN)
        bar.on_step(step(4))

    assert "4.00 GB of 4.00 GB, finishing" in capsys.readouterr().err


def test_a_step_that_wrote_nothing_yet_does_not_divide_by_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with LineProgress("checking", clock=clock) as observer:
        observer.on_plan(PLAN)
        clock.now += 60
        observer.on_step(step(0))

    assert capsys.readouterr().err == ""


def test_a_pipe_gets_lines_and_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, kind in ((False, LineProgress), (True, BarProgress)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)

        assert type(open_progress("converting")) is kind


@pytest.mark.parametrize("fails", [False, True])
def test_the_bar_gives_the_cursor_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, fails: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (
        pytest.raises(KeyboardInterrupt) if fails else nullcontext(),
        BarProgress("converting") as bar,
    ):
        run(bar)
        if fails:
            raise KeyboardInterrupt
    shown = capsys.readouterr().err

    assert "converting" in shown
    assert "GB" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def run(observer: Observer) -> None:
    observer.on_plan(PLAN)
    for number in range(1, 5):
        observer.on_step(step(number))
    observer.on_drift(ReplicaDrift("a", "weight", (0, 1), 4, 2, None))
    observer.on_finish(PlanFinished(1, 1, 1.0))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told at once, and again and again."""
    monkeypatch.setattr(waiting, "_SECONDS_IN_LOG", (0.01, 0.01))
    monkeypatch.setattr(waiting, "_SECONDS_ON_TERMINAL", (0.01, 0.01))


class Told:
    """Standard error of which somebody waits for a line."""

    def __init__(self) -> None:
        self.text = ""
        self.has_line = Event()

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        self.text += text
        self.has_line.set()

    def flush(self) -> None:
        """Nothing is kept back."""


def replaced(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Standard error, from now on; a fixture would put it in the place of another one."""
    stream = Told()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.usefixtures("hasty")
def test_reading_headers_and_planning_are_told_while_they_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = replaced(monkeypatch)
    with LineProgress("converting") as observer:
        assert told.has_line.wait(10)
        observer.on_plan(PLAN)
        assert "restride: reading headers and planning, 0.0" in told.text
        told.text = ""
        observer.on_step(step(1))

        assert told.text == ""
    assert not who_waits()


@pytest.mark.usefixtures("hasty")
def test_finishing_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = replaced(monkeypatch)
    with LineProgress("converting") as observer:
        observer.on_plan(PLAN)
        told.has_line.clear()
        observer.on_step(step(4))

        assert told.has_line.wait(10)
        assert "restride: converting: finishing, 0.0" in told.text
    assert not who_waits()


@pytest.mark.usefixtures("hasty")
def test_the_line_of_a_terminal_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    is_drawn = Event()

    def draw(text: str) -> None:
        drawn.append(text)
        is_drawn.set()

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(waiting, "_draw", draw)
    with Waiting("reading headers"):
        assert is_drawn.wait(10)

    assert drawn[0].startswith("\r\x1b[Krestride: reading headers, 0.0")
    assert drawn[-1] == "\r\x1b[K"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_soon_over_is_not_told(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    told = replaced(monkeypatch)
    drawn: list[str] = []
    monkeypatch.setattr(waiting, "_draw", drawn.append)
    monkeypatch.setattr(told, "isatty", lambda: is_terminal)
    with Waiting("reading headers"):
        pass

    assert (told.text, drawn) == ("", [])


def who_waits() -> list[str]:
    """Threads that would still tell of something."""
    return [thread.name for thread in threading.enumerate() if thread.name == "Waiting"]
