"""Progress of long work on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Self

from restride.cli.output import printable, tell
from restride.cli.sizes import format_duration, format_rate, format_size

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

__all__ = ["BarProgress", "LineProgress", "open_progress"]

_SECONDS_BETWEEN_LINES: Final = 10.0


def open_progress(verb: str) -> BarProgress | LineProgress:
    """Observer that reports on standard error, to be used in a ``with`` block.

    Args:
        verb: What is done, such as ``"converting"``.
    """
    return BarProgress(verb) if sys.stderr.isatty() else LineProgress(verb)


class LineProgress:
    """Writes one line every ten seconds: enough for a log, and nothing at all for short work.

    Attributes:
        clock: Seconds from any start; tests hand in their own.
    """

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._verb = verb
        self._total_nbytes = 0
        self._started = self._reported = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is left open."""

    def on_plan(self, event: PlanStarted, /) -> None:
        """Note how much there is to do."""
        self._total_nbytes = event.total_nbytes
        self._started = self._reported = self.clock()

    def on_step(self, event: StepFinished, /) -> None:
        """Write a line if the last one is old."""
        now = self.clock()
        if now - self._reported < _SECONDS_BETWEEN_LINES or not event.done_nbytes:
            return
        self._reported = now
        seconds = now - self._started
        left = seconds * (self._total_nbytes - event.done_nbytes) / event.done_nbytes
        tell(
            f"{self._verb} {event.tensor}: "
            f"{format_size(event.done_nbytes)} of {format_size(self._total_nbytes)}, "
            f"{format_rate(event.done_nbytes, seconds)}, {format_duration(left)} left"
        )

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Leave it to the report, which lists every drift once."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Leave it to the report, which says how long it took."""

    def on_notice(self, event: Notice, /) -> None:
        """Write it."""
        tell(event.message)


class BarProgress:
    """A bar with the rate and the time left, gone when the work is done or has failed."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away and give the cursor back."""
        if self._progress is not None:
            self._progress.stop()

    def on_plan(self, event: PlanStarted, /) -> None:
        """Draw the bar."""
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(self._verb, total=event.total_nbytes)
        self._progress.start()

    def on_step(self, event: StepFinished, /) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=event.done_nbytes)

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Leave it to the report, which lists every drift once."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Leave it to the report, which says how long it took."""

    def on_notice(self, event: Notice, /) -> None:
        """Write it above the bar."""
        if self._progress is None:
            tell(event.message)
        else:
            self._progress.console.print(f"restride: {printable(event.message)}", markup=False)
