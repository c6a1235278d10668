"""Files that another machine replaces or removes while they are looked at."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["again_while_stale"]

T = TypeVar("T")

# What a client of a network file system remembers of a name is a second old at most, or a few.
_PAUSES_SECONDS: Final = (0.0, 0.05, 0.2, 0.75, 2.0)


def again_while_stale(look: Callable[[], T]) -> T:
    """What `look` finds. It looks again where the file server has another file there by now.

    NFS and GlusterFS answer ESTALE where a machine goes on with a file that another one has just
    replaced or removed; the next look finds the new one, or none.

    Args:
        look: Opens the file and reads it; may be called several times.

    Raises:
        OSError: As `look` raises it; ESTALE only if it lasts for three seconds.
    """
    for pause in _PAUSES_SECONDS:
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause)
    return look()
