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
    from os import PathLike

__all__ = ["write_small_file"]

# What file systems answer on which a file has one name: FAT, SMB, many in user space.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def write_small_file(path: str | PathLike[str], content: bytes, *, force: bool = False) -> None:
    """Write a file beside its final name, sync it, and give it its name.

    Args:
        path: Where the file shall be. Its folder must exist; a symbolic link is followed.
        content: What shall be in it.
        force: Replace a file that is there.

    Raises:
        ExistsError: Something is there and `force` is not set, or it is a folder.
        ExecutionError: The system cannot write it.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.restride-tmp")
    if target.is_dir() or (target.exists() and not force):
        remedy = "choose another name" if target.is_dir() else "choose another name, or --force"
        raise ExistsError("it exists already", where=str(path), remedy=remedy)
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
        raise ExistsError(
            "it exists already", where=str(path), remedy="choose another name, or --force"
        ) from error
    except OSError as error:
        raise ExecutionError(f"cannot be written ({error.strerror})", where=str(path)) from error
    finally:
        with suppress(OSError):
            beside.unlink()


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
