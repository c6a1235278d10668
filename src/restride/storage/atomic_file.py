"""Write one small file: complete and durable under its name, or not there at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError, ExistsError
from restride.storage.output_files import sync_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

__all__ = ["require_place", "write_small_file"]

# What file systems answer on which a file has one name: FAT, SMB, many in user space.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def write_small_file(
    path: str | PathLike[str],
    content: bytes,
    *,
    objection: Callable[[Path], str],
    force: bool = False,
) -> None:
    """Write a file beside its final name, sync it, and give it its name.

    Args:
        path: Where the file shall be. Its folder must exist; a symbolic link is followed.
        content: What shall be in it.
        objection: Says why a file that is there may not be replaced; empty where it may.
        force: Replace such a file.

    Raises:
        ExistsError: Something is there, and `force` is not set or would not help.
        ExecutionError: The system cannot write it.
    """
    target, beside = _places(path, objection, force=force)
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if force:
            beside.replace(target)
        else:
            _take_name(target, beside)
        sync_path(target.parent)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            beside.unlink()


def require_place(
    path: str | PathLike[str], *, objection: Callable[[Path], str], force: bool = False
) -> None:
    """Refuse what `write_small_file` would refuse, before the long work whose result it is.

    Raises:
        ExistsError, ExecutionError: As of that.
    """
    _, beside = _places(path, objection, force=force)
    try:
        beside.open("xb").close()
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _places(
    path: str | PathLike[str], objection: Callable[[Path], str], *, force: bool
) -> tuple[Path, Path]:
    """Where the file shall be, and where it is until it is complete."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ExistsError("it is a folder", where=str(path), remedy="give the name of a file")
    if os.path.lexists(target):
        # To look into a pipe is to wait for somebody who writes.
        problem = objection(target) if target.is_file() else "is no file"
        if problem:
            raise ExistsError(
                f"it exists already, and {problem}",
                where=str(path),
                remedy="choose another name, or move that away or remove it yourself",
            )
        if not force:
            raise _exists(path)
    return target, target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.restride-tmp")


def _unwritable(path: str | PathLike[str], error: OSError) -> ExecutionError:
    error.filename = os.fspath(path)  # not the name until it is complete, which nobody knows
    return ExecutionError(f"cannot be written ({error.strerror})", where=str(path))


def _exists(path: str | PathLike[str]) -> ExistsError:
    remedy = "choose another name, or --force"
    return ExistsError("it exists already", where=str(path), remedy=remedy)


def _take_name(target: Path, beside: Path) -> None:
    """Give the file its name, unless somebody was faster: a rename would replace theirs."""
    try:
        target.hardlink_to(beside)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.open("xb").close()
        try:
            beside.replace(target)
        except BaseException:
            target.unlink()
            raise
