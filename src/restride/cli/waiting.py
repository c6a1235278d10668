"""Say that something is going on before there is a measure of it: reading headers, planning.

A checkpoint of a thousand ranks is opened and planned in minutes. Whoever waits so long without a
word thinks that it hangs.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, Self

from restride.cli.output import tell
from restride.cli.sizes import format_duration

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Waiting"]

# A line that is drawn again on a terminal, after so long and so often; and lines of a log.
_SECONDS_ON_TERMINAL: Final = (1.5, 0.5)
_SECONDS_IN_LOG: Final = (10.0, 10.0)


class Waiting:
    """Says on standard error what is done and for how long; nothing where that is soon over.

    Used as a context manager; `end` ends it before.

    Args:
        words: What is done, such as ``"reading headers"``.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._is_terminal = sys.stderr.isatty()
        self._ended = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self) -> None:
        """Count from now on."""
        if self._thread is None:
            started = (time.monotonic(),)
            self._thread = Thread(target=self._run, args=started, name="Waiting", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Say nothing more, and take the line away. A second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, started: float) -> None:
        first, later = _SECONDS_ON_TERMINAL if self._is_terminal else _SECONDS_IN_LOG
        seconds = first
        while not self._ended.wait(seconds):
            words = f"{self._words}, {format_duration(time.monotonic() - started)}"
            if self._is_terminal:
                _draw(f"\r\x1b[Krestride: {words}")
            else:
                tell(words)
            seconds = later
        if self._is_terminal and seconds == later:
            _draw("\r\x1b[K")


def _draw(text: str) -> None:
    with suppress(OSError):  # a terminal that is gone ends no work
        os.write(2, text.encode())
