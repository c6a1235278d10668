"""Progress of long work on standard error: a bar on a terminal, now and then a line elsewhere.

What comes before the plan, and after the last byte, has no measure: it is told how long it takes.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Final, Self

from restride.cli.output import printable, tell
from restride.cli.sizes import format_duration, format_rate, format_size
from restride.cli.waiting import Waiting
from restride.executors.events import NullObserver

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.progress import Progress, TaskID

    from restride.executors.events import (
        Notice,
        PlanFinished,
        PlanStarted,
        ReplicaDrift,
        StepFinished,
    )

__all__ = ["BarProgress", "LineProgress", "NoProgress", "open_progress"]

_SECONDS_BETWEEN_LINES: Final = 10.0
# A bar is drawn ten times in a second; steps may be a thousand.
_SECONDS_BETWEEN_WORDS: Final = 0.05
# Columns of a terminal from which on there is room for the verb, for sizes and rate, for a bar.
_WIDTH_OF_VERB: Final = 44
_WIDTH_OF_WORDS: Final = 70
_WIDTH_OF_BAR: Final = 78
_PREPARING: Final = "reading headers and planning"


def open_progress(verb: str, *, is_shown: bool = True) -> BarProgress | LineProgress | NoProgress:
    """Observer that reports on standard error, to be used in a ``with`` block.

    Args:
        verb: What is done, such as ``"converting"``.
        is_shown: Whether anything is to be seen of it.
    """
    if not is_shown:
        return NoProgress()
    return BarProgress(verb) if sys.stderr.isatty() else LineProgress(verb)


class _Pace:
    """How fast the work goes, from its first step on: what an earlier run did took no time."""

    def __init__(self, total_nbytes: int, clock: Callable[[], float]) -> None:
        self.total_nbytes = total_nbytes
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def step(self, done_nbytes: int) -> float:
        """Take note of a step; return the time."""
        now = self._clock()
        if self._first is None:
            self._first = now, done_nbytes
        return now

    def words(self, done_nbytes: int, now: float) -> tuple[str, str]:
        """Say how much is done, and in short, for a narrow terminal, how much in a hundred."""
        started, before_nbytes = self._first or (now, done_nbytes)
        share = f"{done_nbytes * 100 // max(self.total_nbytes, 1)}%"
        sizes = f"{format_size(done_nbytes)} of {format_size(self.total_nbytes)}"
        nbytes, seconds = done_nbytes - before_nbytes, now - started
        if done_nbytes >= self.total_nbytes:  # what is written has to reach the disk, and its name
            return f"{sizes}, finishing", f"{share}, finishing"
        if not nbytes or not seconds:
            return sizes, share
        left = format_duration(seconds * (self.total_nbytes - done_nbytes) / nbytes)
        return f"{sizes}, {format_rate(nbytes, seconds)}, {left} left", f"{share}, {left} left"


class NoProgress(NullObserver):
    """Shows nothing, as the processes do that another one leads.

    Attributes:
        is_planned: Whether the work itself has begun.
    """

    is_planned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left open."""

    def on_plan(self, _event: PlanStarted, /) -> None:
        """Note that the work begins."""
        self.is_planned = True


class LineProgress:
    """Writes one line every ten seconds: enough for a log, and nothing at all for short work.

    Attributes:
        clock: Seconds from any start; tests hand in their own.
        is_planned: Whether the work itself has begun.
    """

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.is_planned = False
        self._verb = verb
        self._pace = _Pace(0, clock)
        self._reported = clock()
        self._waiting = Waiting(_PREPARING)

    def __enter__(self) -> Self:
        self._waiting.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say nothing more."""
        self._waiting.end()

    def on_plan(self, event: PlanStarted, /) -> None:
        """Note how much there is to do."""
        self._waiting.end()
        self.is_planned = True
        self._pace = _Pace(event.total_nbytes, self.clock)
        self._reported = self.clock()

    def on_step(self, event: StepFinished, /) -> None:
        """Write a line if the last one is old."""
        now = self._pace.step(event.done_nbytes)
        if event.done_nbytes >= self._pace.total_nbytes:
            self._waiting.end()
            self._waiting = Waiting(f"{self._verb}: finishing")
            self._waiting.begin()
        if now - self._reported < _SECONDS_BETWEEN_LINES or not event.done_nbytes:
            return
        self._reported = now
        words, _ = self._pace.words(event.done_nbytes, now)
        tell(f"{self._verb} {event.tensor}: {words}")

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Leave it to the report, which lists every drift once."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Leave it to the report, which says how long it took."""

    def on_notice(self, event: Notice, /) -> None:
        """Write it."""
        tell(event.message)


class BarProgress:
    """A bar with the rate and the time left, gone when the work is done or has failed.

    Attributes:
        is_planned: Whether the work itself has begun.
    """

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_planned = False
        self._waiting = Waiting(_PREPARING)
        self._clock = clock
        self._verb = verb
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._pace = _Pace(0, clock)
        self._worded = -math.inf

    def __enter__(self) -> Self:
        self._waiting.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away and give the cursor back."""
        self._waiting.end()
        if self._progress is not None:
            self._progress.stop()

    def on_plan(self, event: PlanStarted, /) -> None:
        """Draw the bar."""
        self._waiting.end()
        self.is_planned = True
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415

        console = Console(stderr=True)
        words = "words" if console.width >= _WIDTH_OF_WORDS else "short"
        # What does not fit would go on in a second line, with half a number in each.
        whole = Column(no_wrap=True, overflow="crop")
        verb = TextColumn("{task.description}", markup=False, table_column=whole)
        self._pace = _Pace(event.total_nbytes, self._clock)
        self._progress = Progress(
            *([verb] if console.width >= _WIDTH_OF_VERB else []),
            *([BarColumn()] if console.width >= _WIDTH_OF_BAR else []),
            TextColumn(f"{{task.fields[{words}]}}", markup=False, table_column=whole.copy()),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(
            self._verb, total=event.total_nbytes, words="", short=""
        )
        self._progress.start()

    def on_step(self, event: StepFinished, /) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            now = self._pace.step(event.done_nbytes)
            is_last = event.done_nbytes >= self._pace.total_nbytes
            if now - self._worded < _SECONDS_BETWEEN_WORDS and not is_last:
                return
            self._worded = now
            words, short = self._pace.words(event.done_nbytes, now)
            self._progress.update(self._task, completed=event.done_nbytes, words=words, short=short)

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Leave it to the report, which lists every drift once."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Leave it to the report, which says how long it took."""

    def on_notice(self, event: Notice, /) -> None:
        """Write it above the bar."""
        if self._progress is None:
            self._waiting.end()
            tell(event.message)
        else:
            self._progress.console.print(f"restride: {printable(event.message)}", markup=False)
