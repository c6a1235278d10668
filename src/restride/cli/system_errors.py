"""What to do about what the system says, where nothing that is nearer to it said so."""

from __future__ import annotations

import errno
import os
import pwd
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.cli.nearest import closest

if TYPE_CHECKING:
    from restride.errors import RestrideError

__all__ = ["os_sentence", "with_remedy"]

_MOST_LOOKED_AT: Final = 1000

_REMEDIES: Final = {
    errno.ENOSPC: "make room, or name another place (df -h and df -i tell which of both is full)",
    errno.EDQUOT: "make room in the quota of this user, or name another place",
    errno.EROFS: "its file system is read-only: name another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n): 32 are enough",
    errno.ENFILE: "the machine has too many open files: end what keeps them, or wait for it",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ELOOP: "its symbolic links lead in a circle: name what they should lead to",
    errno.EIO: "the disk or what leads to it fails: see the log of the kernel (dmesg)",
    errno.ESTALE: "the file server has another file there by now: run it again",
    errno.ETIMEDOUT: "the file server does not answer: run it again when it does",
}


def with_remedy(error: RestrideError) -> str:
    """Sentence of an error; with what would work where only the system said what is wrong."""
    cause = error.__cause__
    if not error.remedy and isinstance(cause, OSError):
        error.remedy = remedy_of(cause)
    return str(error)


def os_sentence(error: OSError) -> str:
    """Sentence of what the system says, with the file and what would work."""
    reason = (error.strerror or str(error)).lower()
    where = f"{error.filename}: " if error.filename is not None else ""
    if not where and error.errno == errno.ENOSPC:
        where = "standard output: "  # errors of files have their names
    remedy = remedy_of(error)
    return f"{where}{reason}; {remedy}" if remedy else f"{where}{reason}"


def remedy_of(error: OSError) -> str:
    """What would work against an error of the system; empty where nobody can say."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"have its owner give {_user()} access, or run this as somebody who has it"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | os.PathLike):
        return _what_is_there(Path(error.filename))
    return _REMEDIES.get(error.errno or 0, "")


def _what_is_there(path: Path) -> str:
    """Where a path ends that is not there, or which names beside it are like its own."""
    with suppress(OSError):
        if path.is_symlink():
            return f"bring back {os.readlink(path)!r}, to which it leads, or copy the file"  # noqa: PTH115 - as it is written
        there = next(folder for folder in path.absolute().parents if folder.exists())
        missing, *rest = path.absolute().relative_to(there).parts
        names = [entry.name for entry in islice(there.iterdir(), _MOST_LOOKED_AT)]
        as_given = Path(*path.parts[: -1 - len(rest)])
        if f"{missing}.partial" in names:
            unfinished = str(as_given / f"{missing}.partial")
            return f"it is not finished, in {unfinished!r}: if that was stopped, --resume goes on"
        if close := closest(missing, names):
            return f"did you mean {str(Path(as_given, close[0], *rest))!r}?"
        if there != path.absolute().parent:
            return f"{there} is there, and has no {missing!r}"
    return ""


def _user() -> str:
    number = os.geteuid()
    with suppress(KeyError):  # a container may run as a number without a name
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"
