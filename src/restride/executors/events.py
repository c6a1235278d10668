"""What an executor tells its observers. No logging, no printing."""

from __future__ import annotations

from typing import Protocol

from restride.frozen import Frozen

__all__ = [
    "Forwarding",
    "Notice",
    "NullObserver",
    "Observer",
    "PlanFinished",
    "PlanStarted",
    "ReplicaDrift",
    "StepFinished",
]


class PlanStarted(Frozen):
    """A plan is about to be carried out.

    Attributes:
        steps: Number of steps.
        total_nbytes: Bytes that the steps will write (or compare, when checking).
        projected_nbytes: Upper bound of the memory that buffers and plan will take.
    """

    steps: int
    total_nbytes: int
    projected_nbytes: int


class StepFinished(Frozen):
    """One step is done.

    Attributes:
        done_steps: Steps done so far.
        done_nbytes: Bytes written (or compared) so far.
        read_nbytes: Bytes read so far.
        tensor: Name of the tensor the step belonged to.
    """

    done_steps: int
    done_nbytes: int
    read_nbytes: int
    tensor: str


class ReplicaDrift(Frozen):
    """Ranks that should hold the same elements hold different ones.

    Attributes:
        tensor: Name of the tensor.
        state: Name of its state.
        ranks: Ranks that were compared: the one that was read first, then the one that differs.
        numel: Elements that were compared.
        different_numel: Elements that differ, bit for bit.
        largest: Largest absolute difference, or None where the dtype has none.
    """

    tensor: str
    state: str
    ranks: tuple[int, int]
    numel: int
    different_numel: int
    largest: float | None


class PlanFinished(Frozen):
    """Everything is done.

    Attributes:
        read_nbytes: Bytes read from the sources.
        written_nbytes: Bytes written to the target.
        seconds: Wall time.
    """

    read_nbytes: int
    written_nbytes: int
    seconds: float


class Notice(Frozen):
    """Something that a user who waits should know at once; the work goes on.

    Attributes:
        message: One sentence, as of an error.
    """

    message: str


class Observer(Protocol):
    """Receives events from an executor, one call at a time. Must not raise."""

    def on_plan(self, event: PlanStarted, /) -> None:
        """Called once, before the first byte moves."""

    def on_step(self, event: StepFinished, /) -> None:
        """Called after each step."""

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Called for each pair of replicas that differ, where the policy lets the run go on."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Called once, after the last step."""

    def on_notice(self, event: Notice, /) -> None:
        """Called where something happened that is no error yet."""


class NullObserver:
    """Ignores every event."""

    def on_plan(self, event: PlanStarted, /) -> None:
        """Ignore it."""

    def on_step(self, event: StepFinished, /) -> None:
        """Ignore it."""

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Ignore it."""

    def on_finish(self, event: PlanFinished, /) -> None:
        """Ignore it."""

    def on_notice(self, event: Notice, /) -> None:
        """Ignore it."""


class Forwarding:
    """Hands every event on. Those in which something is to be seen to, a subclass takes itself.

    Args:
        observer: Who gets them.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_plan(self, event: PlanStarted, /) -> None:
        """Hand it on."""
        self._observer.on_plan(event)

    def on_step(self, event: StepFinished, /) -> None:
        """Hand it on."""
        self._observer.on_step(event)

    def on_drift(self, event: ReplicaDrift, /) -> None:
        """Hand it on."""
        self._observer.on_drift(event)

    def on_finish(self, event: PlanFinished, /) -> None:
        """Hand it on."""
        self._observer.on_finish(event)

    def on_notice(self, event: Notice, /) -> None:
        """Hand it on."""
        self._observer.on_notice(event)
