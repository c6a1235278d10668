"""Names of files and folders, as users give them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["as_path", "require_paths"]

# With one slash too: a Path("s3://bucket") has no more.
_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.ASCII | re.IGNORECASE)


def as_path(path: str | PathLike[str]) -> str:
    """The name of a file or folder, if it is one.

    What is none would name something else: nothing the working directory, an address a folder
    called ``s3:`` in it, and ``~`` one called so.

    Raises:
        UnsupportedError: It is an address, nothing, or what only a shell understands.

    Examples:
        >>> as_path("run/global_step500")
        'run/global_step500'
    """
    name = os.fspath(path)
    if not name:
        raise UnsupportedError("a path is empty", remedy="is a variable not set?")
    if "\0" in name:
        raise UnsupportedError(f"{name!r} is the name of no file")
    if address := _ADDRESS.match(name):
        if address[1].lower() == "file":
            remedy = f"name {'/' + name[address.end() :]!r}"
        else:
            remedy = "mount it, or copy it here"
        raise UnsupportedError(f"{name!r} is an address, and no file or folder", remedy=remedy)
    if name.partition("/")[0] == "~":
        raise UnsupportedError(
            f"{name!r} is no path: a shell alone knows what ~ is, and only where it is not quoted",
            remedy=f"name {os.path.expanduser(name)!r}",  # noqa: PTH111 - a name as it is shown
        )
    return name


def require_paths(*paths: str | PathLike[str] | None) -> None:
    """As `as_path`, for those that are given."""
    for path in paths:
        if path is not None:
            as_path(path)
