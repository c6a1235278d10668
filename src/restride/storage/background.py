"""Calls in threads of their own.

`concurrent.futures` has them too, and importing it, with `logging`, takes as long as a plan.
"""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """A call that runs meanwhile; it begins at once.

    Args:
        name: Of the thread.
        function: What is called. What it returns is lost.
        arguments: What it is called with.

    Raises:
        RuntimeError: The system gives no thread.

    Examples:
        >>> found = []
        >>> call = Background("example", found.append, 3)
        >>> call.wait()
        >>> found, call.is_ended, call.error
        ([3], True, None)
    """

    def __init__(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        self.error: BaseException | None = None
        self._ended = Event()
        Thread(target=self._run, args=(function, *arguments), name=name).start()

    def _run(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - `require_success` raises it
            self.error = error
        finally:
            self._ended.set()

    @property
    def is_ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        self._ended.wait()

    def require_success(self) -> None:
        """Wait until it has ended, and raise what it raised.

        Raises:
            BaseException: What it raised.
        """
        self.wait()
        if self.error is not None:
            raise self.error
