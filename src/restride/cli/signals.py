"""^C and SIGTERM stop long work at the end of a step; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["stop_on_signals"]

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)
_TOLD: Final = b"restride: stopping at the end of a step; once more to end at once\n"


@contextmanager
def stop_on_signals(*, is_told: bool = True) -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets while the block runs.

    Args:
        is_told: Whether to write that it was heard.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()
        if is_told:
            os.write(2, _TOLD)  # whoever is interrupted may be in the middle of writing to stderr

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may say what a signal does
        return
    before = {number: signal.signal(number, handle) for number in _STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
