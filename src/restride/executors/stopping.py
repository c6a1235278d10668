"""Ask for the end of a run that others may end as well."""

from __future__ import annotations

from threading import Event

__all__ = ["StopsWith"]


class StopsWith(Event):
    """An event that is set when it was set, or when another one is.

    Args:
        other: The other one, if there is one. It is not changed.

    Examples:
        >>> other = Event()
        >>> stop = StopsWith(other)
        >>> stop.is_set(), other.set(), stop.is_set()
        (False, None, True)
    """

    def __init__(self, other: Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        """Whether either of them is set."""
        return super().is_set() or (self._other is not None and self._other.is_set())
