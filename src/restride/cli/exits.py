"""Exit codes."""

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Stable: scripts depend on these numbers."""

    OK = 0
    FINDING = 1
    FAILED = 2
    INTERRUPTED = 130
