"""^C and SIGTERM stop long work at the end of a step; a second one ends the process at once.

What has no steps to keep, such as a check, they end at once, with the same exit code; and so they
do while headers are read and a plan is made, which may take minutes.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["sigterm_interrupts", "stop_on_signals"]

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)
_TOLD: Final = b"restride: stopping at the end of a step; once more to end at once\n"
_ENDED: Final = b"restride: ended at once; run it again with --resume\n"
# The bar of a terminal hides the cursor; a process that is ended has no time to take it away.
_CURSOR: Final = b"\x1b[?25h"
_NO_BAR: Final = b"\r\x1b[K"


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as ^C does: with a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_signals(
    is_begun: Callable[[], bool], *, is_told: bool = True
) -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets while the block runs.

    Args:
        is_begun: Whether there is something to keep. Before that a signal is a KeyboardInterrupt.
        is_told: Whether to write that it was heard.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_begun():
            signal.default_int_handler(number, frame)
        if stop.is_set():
            if is_told:
                _write(_ENDED, ahead=_NO_BAR + _CURSOR)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()
        if is_told:
            _write(_TOLD, ahead=_NO_BAR)

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may say what a signal does
        return
    before = {number: signal.signal(number, handle) for number in _STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(line: bytes, *, ahead: bytes) -> None:
    """Write to standard error from a handler; ahead of it to a terminal what clears the place.

    Whoever is interrupted may be in the middle of writing there, and whoever reads it, such as
    `tee`, may have ended at the same ^C.
    """
    with suppress(OSError):
        os.write(2, ahead + line if os.isatty(2) else line)
