"""Where an output may go, and how a finished folder gets its name."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISVTX
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError, ExistsError
from restride.storage._strangers import say_strangers
from restride.storage.output_files import sync_path, translated

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "make_parents",
    "put_in_place",
    "remove_folder",
    "require_free",
    "require_no_input",
    "require_replaceable",
    "require_writable",
]

_TARGET_IN_USE: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def require_free(target: Path, *, force: bool, inputs: Iterable[Path], told: str = "") -> None:
    """Refuse early what the rename at the end would refuse, and what nobody can mean.

    Args:
        target: Where the output shall be.
        force: Whether an output that is there may be replaced.
        inputs: What is being read.
        told: What it was seen to be that is there, if it was.

    Raises:
        ExistsError: Something is there and `force` is not set, or would be lost that must not be.
        ExecutionError: The system cannot look.
    """
    require_replaceable(target, inputs)
    if not force and _has_something(target):
        raise ExistsError(
            f"the directory exists and is {told or 'not empty'}",
            where=str(target),
            remedy="name another output, or replace all of it with --force",
        )


def require_replaceable(target: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse to replace anything but an empty folder, or one that restride wrote.

    Raises:
        ExistsError: Something is there that must not be lost, or that cannot be moved.
        ExecutionError: The system cannot look.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ExistsError("is not a directory", where=str(target), remedy="name another output")
    if target.is_mount():
        raise ExistsError(
            "is where a file system is mounted, and no folder can take its place",
            where=str(target),
            remedy=f"name a folder in it, as {str(target / 'out')!r}",
        )
    require_no_input(target, inputs)  # first: it is not to be moved away
    has_something = _has_something(target)
    _require_movable(target, has_something=has_something)
    if not has_something:
        return
    strangers = say_strangers(target)
    if strangers:
        raise ExistsError(
            strangers,
            where=str(target),
            remedy="move it away or remove it yourself, or name another output",
        )


def _require_movable(target: Path, *, has_something: bool) -> None:
    """Refuse a folder of somebody else that the rename at the end, maybe hours later, could not."""
    with translated("cannot be looked at", target):
        above, own = target.parent.stat(), target.stat()
    keepers = {above.st_uid, own.st_uid} if above.st_mode & S_ISVTX else {os.geteuid()}
    may_enter = os.access(target, os.W_OK) or not has_something
    if not may_enter or os.geteuid() not in {0, *keepers}:
        raise ExistsError(
            f"belongs to user {own.st_uid}, and user {os.geteuid()} may not replace it",
            where=str(target),
            remedy="name another output, or have it removed",
        )


def _has_something(target: Path) -> bool:
    """Whether there is a folder that is not empty."""
    with translated("cannot be looked at", target):
        return target.is_dir() and any(target.iterdir())


def require_writable(target: Path) -> None:
    """Refuse a place where nothing can be made, before anything is planned.

    Raises:
        ExecutionError: What of the path is there is no folder, or cannot be written into.
    """
    there = next(parent for parent in target.parents if os.path.lexists(parent))
    if not there.is_dir():
        raise ExecutionError("is not a directory", where=str(there), remedy="name another output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ExecutionError(
            "cannot be written into: permission denied, or a read-only file system",
            where=str(there),
            remedy="name another output",
        )


def require_no_input(folder: Path, inputs: Iterable[Path]) -> None:
    """Refuse to take away a folder that something is needed of.

    Raises:
        ExistsError: It is an input, the working directory or the home directory, or holds one.
    """
    needed = [(path, "what is read") for path in inputs]
    needed.append((Path.cwd(), "the working directory"))
    with suppress(RuntimeError):  # a user without a name, as in a container, may have none
        needed.append((Path.home(), "the home directory"))
    for path, what in needed:
        if path.is_relative_to(folder):
            problem = f"is {what}" if path == folder else f"{what} is in it, {path}"
            raise ExistsError(
                f"{problem}, and must stay", where=str(folder), remedy="name another output"
            )


def make_parents(target: Path, *, durable: bool = True) -> list[Path]:
    """Make the missing parents of `target`; return them, innermost first.

    Args:
        target: Where the output shall be.
        durable: Whether to wait until the disk has their names.

    Raises:
        ExecutionError: What is there is no folder, or the system cannot make them.
    """
    require_writable(target)
    missing = [folder for folder in target.parents if not folder.exists()]
    with translated("cannot be created", target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing if durable else ():
        sync_path(folder.parent)
    return missing


def remove_folder(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder and all that is in it, if it is there.

    Raises:
        OSError: The system cannot do it, and errors are not to be ignored.
    """
    if os.path.lexists(path):
        import shutil  # noqa: PLC0415 - takes long, and most outputs leave nothing behind

        shutil.rmtree(path, ignore_errors=ignore_errors)


def put_in_place(
    path: Path, target: Path, *, replaced: Path, force: bool, durable: bool = True
) -> None:
    """Give a finished folder its final name.

    Args:
        path: The folder.
        target: Its final name.
        replaced: Where to put what has that name now.
        force: Whether an output that has that name may be replaced.
        durable: Whether to wait until the disk has the name.

    Raises:
        ExistsError: Something appeared there, and `force` is not set or restride did not write it.
        ExecutionError: The system cannot do it; what was there is there again, or in `replaced`.
    """
    if target.is_dir():
        with suppress(OSError):
            path.chmod(S_IMODE(target.stat().st_mode))
    if force and _has_something(target):
        require_replaceable(target)  # again: something may have been saved there meanwhile
        _swap(path, target, replaced)
    else:
        try:
            path.rename(target)
        except OSError as error:
            if error.errno in _TARGET_IN_USE:
                raise ExistsError("something appeared here meanwhile", where=str(target)) from error
            raise _cannot_rename(error, target) from error
    if durable:
        sync_path(target.parent)


def _swap(path: Path, target: Path, replaced: Path) -> None:
    """Put the finished folder in the place of another one, which is kept in `replaced`."""
    if os.path.lexists(replaced):
        with translated("what was replaced before cannot be deleted", replaced):
            remove_folder(replaced)
    try:
        target.rename(replaced)
    except OSError as error:
        raise _cannot_rename(error, target) from error
    try:
        path.rename(target)
    except BaseException as error:
        with translated(f"cannot get back what was here, which is now {replaced}", target):
            replaced.rename(target)
        if isinstance(error, OSError):
            raise _cannot_rename(error, target) from error
        raise


def _cannot_rename(error: OSError, target: Path) -> ExecutionError:
    return ExecutionError(
        f"the finished output cannot be put in place ({error.strerror})",
        where=str(target),
        # A mount point is the usual case: it cannot be renamed over.
        remedy="name a new directory below it as the output",
    )
