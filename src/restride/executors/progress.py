"""Progress of work in several parts, told as that of one."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.executors.events import Forwarding, StepFinished

if TYPE_CHECKING:
    from restride.executors.events import Notice, Observer, PlanStarted, ReplicaDrift

__all__ = ["Continued"]


class Continued(Forwarding):
    """An observer that hands events on, and counts bytes in front of and behind those of a plan.

    Any thread may call it; the observer behind it is called by one at a time.

    Args:
        observer: Who wants to know.
        more_nbytes: Bytes that no plan counts, for the total.
    """

    def __init__(self, observer: Observer, *, more_nbytes: int = 0) -> None:
        super().__init__(observer)
        self._more_nbytes = more_nbytes
        self._before_nbytes = 0
        self._last = StepFinished(0, 0, 0, "")
        self._lock = Lock()

    def skip(self, nbytes: int, what: str) -> None:
        """Count bytes that no step stands for.

        Args:
            nbytes: How many.
            what: What they are, where a step has the name of its tensor.
        """
        with self._lock:
            self._before_nbytes += nbytes
            done_nbytes = self._last.done_nbytes + nbytes
            self._last = replace(self._last, done_nbytes=done_nbytes, tensor=what)
            self._observer.on_step(self._last)

    def start_from(self, nbytes: int) -> None:
        """Count the bytes of the steps to come on top of so many."""
        with self._lock:
            self._before_nbytes = nbytes

    def on_plan(self, event: PlanStarted, /) -> None:
        """Hand it on, with all bytes that are to be counted."""
        total_nbytes = event.total_nbytes + self._more_nbytes
        self._observer.on_plan(replace(event, total_nbytes=total_nbytes))

    def on_step(self, event: StepFinished, /) -> None:
        """Hand it on, with what was done before."""
        with self._lock:
            # `replace` takes longer than all the rest of it.
            done_nbytes = event.done_nbytes + self._before_nbytes
            self._last = StepFinished(
                event.done_steps, done_nbytes, event.read_nbytes, event.tensor
            )
            self._observer.on_step(self._last)

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Hand it on."""
        with self._lock:
            super().on_drift(event)

    def on_notice(self, event: Notice, /) -> None:
        """Hand it on."""
        with self._lock:
            super().on_notice(event)
