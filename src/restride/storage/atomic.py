"""An output directory that appears complete or not at all.

Everything is written into a directory beside the final name, synced, and renamed as a whole at the
end. An error or an interrupt on the way removes it again; what stood under the final name is
touched only after the new content is durable.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.output import OutputFile
from restride.errors import ExecutionError, ExistsError
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from _typeshed import ReadableBuffer

    from restride.checkpoint.output import Output

__all__ = ["AtomicDirectory", "atomic_directory"]

# What file systems answer that cannot reserve space ahead.
_CANNOT_RESERVE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_TARGET_IN_USE: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class AtomicDirectory:
    """The directory while it is being written; made by `atomic_directory`.

    Positioned writes may come from any number of threads.

    Attributes:
        path: Where it is now, under its temporary name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self._pool = FilePool(writable=True)

    def create(self, output: Output) -> None:
        """Preallocate all files of an output, and write their fixed parts.

        Raises:
            ExistsError: A file was there before.
            ExecutionError: The system cannot write it, or has no room for it.
        """
        for file in output.files:
            self.preallocate(file.name, file.nbytes)
            for start, literal in file.literals:
                self.write_exact(file.name, start, literal)

    def preallocate(self, name: str, nbytes: int) -> None:
        """Create a file of zeros, with its space reserved where the file system can do that.

        A disk that is too small is found out here, before the first tensor moves.

        Args:
            name: Path below the directory, with forward slashes. Folders are made as needed.
            nbytes: Size of the file.

        Raises:
            PlanError: The name would leave the directory.
            ExistsError: The file was there before.
            ExecutionError: The system cannot write it, or has no room for it.
        """
        path = self.path / OutputFile(name, nbytes).name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise ExistsError("the file is written twice", where=str(path)) from error
        except OSError as error:
            raise _failed(f"cannot be created ({error.strerror})", path) from error
        try:
            _reserve(descriptor, nbytes)
        except OSError as error:
            raise _failed(f"no room for {nbytes} bytes ({error.strerror})", path) from error
        finally:
            os.close(descriptor)
        self._files[name] = path

    def write_exact(self, name: str, start_nbytes: int, buffer: ReadableBuffer) -> None:
        """Write all of `buffer` into a file that was preallocated, from `start_nbytes`.

        Raises:
            ExecutionError: The file was not preallocated, or the system cannot write it.
        """
        if name not in self._files:
            raise ExecutionError("written to before it was created", where=str(self.path / name))
        self._pool.write_exact(self._files[name], start_nbytes, buffer)

    def sync(self) -> None:
        """Make every file and folder durable.

        Raises:
            ExecutionError: The system cannot do it: a write that it had accepted was lost.
        """
        self.close()
        for folder, _, names in os.walk(self.path):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))

    def close(self) -> None:
        """Close all files."""
        self._pool.close()


@contextmanager
def atomic_directory(
    final: str | PathLike[str], *, force: bool = False, inputs: Iterable[str | PathLike[str]] = ()
) -> Iterator[AtomicDirectory]:
    """Write a directory beside its final name, and rename it when the block ends well.

    On an error or an interrupt nothing stays, neither under the final name nor beside it. An empty
    directory under the final name is used up without asking: nothing is lost.

    Args:
        final: Where the directory shall be. Its parents are made as needed.
        force: Replace a directory that is there, all of it, once the new one is durable.
        inputs: What is being read; an output that would replace it is refused, even with `force`.

    Yields:
        The directory to write into.

    Raises:
        ExistsError: Something is there and `force` is not set, or would be lost that must not be.
        ExecutionError: The system cannot write it.
    """
    # A symbolic link is followed: the rename must happen where the directory is.
    target = Path(os.path.realpath(final))
    _require_free(target, force=force, inputs=[Path(os.path.realpath(path)) for path in inputs])
    path = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.restride-tmp")
    fresh = _make_parents(target)
    try:
        with _translated("cannot be created", path):
            path.mkdir()
        directory = AtomicDirectory(path)
        try:
            yield directory
            directory.sync()
        finally:
            directory.close()
        _rename(path, target, force=force)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        for folder in fresh:
            with suppress(OSError):
                folder.rmdir()
        raise


def _require_free(target: Path, *, force: bool, inputs: list[Path]) -> None:
    """Refuse early what the rename at the end would refuse, and what nobody can mean."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ExistsError("is not a directory", where=str(target), remedy="name another output")
    with _translated("cannot be looked at", target):
        is_empty = not any(target.iterdir())
    if is_empty:
        return
    if not force:
        raise ExistsError(
            "the directory exists and is not empty",
            where=str(target),
            remedy="name another output, or replace all of it with --force",
        )
    for kept in (*inputs, Path.cwd(), Path.home()):
        if kept.is_relative_to(target):
            raise ExistsError(
                f"replacing the directory would delete {kept}",
                where=str(target),
                remedy="name another output",
            )


def _make_parents(target: Path) -> list[Path]:
    """Make the missing parents of `target`; return them, innermost first."""
    missing = [folder for folder in target.parents if not folder.exists()]
    with _translated("cannot be created", target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _rename(path: Path, target: Path, *, force: bool) -> None:
    """Give the finished directory its final name."""
    if target.is_dir():
        with suppress(OSError):
            shutil.copymode(target, path)
    if force and target.is_dir() and any(target.iterdir()):
        _swap(path, target)
        return
    try:
        path.rename(target)
    except OSError as error:
        if error.errno in _TARGET_IN_USE:
            raise ExistsError("something appeared here meanwhile", where=str(target)) from error
        raise _cannot_rename(error, target) from error
    _sync(target.parent)


def _swap(path: Path, target: Path) -> None:
    """Put the finished directory in the place of another one, which is deleted afterwards."""
    old = path.with_suffix(".restride-old")
    try:
        target.rename(old)
    except OSError as error:
        raise _cannot_rename(error, target) from error
    try:
        path.rename(target)
    except BaseException as error:
        with _translated(f"cannot get back what was here, which is now {old}", target):
            old.rename(target)
        if isinstance(error, OSError):
            raise _cannot_rename(error, target) from error
        raise
    _sync(target.parent)
    with _translated("the output is complete, but what it replaced cannot be deleted", old):
        shutil.rmtree(old)


def _cannot_rename(error: OSError, target: Path) -> ExecutionError:
    return ExecutionError(
        f"the finished output cannot be put in place ({error.strerror})",
        where=str(target),
        # A mount point is the usual case: it cannot be renamed over.
        remedy="name a new directory below it as the output",
    )


def _reserve(descriptor: int, nbytes: int) -> None:
    if nbytes:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
    os.ftruncate(descriptor, nbytes)


def _sync(path: Path) -> None:
    with _translated("cannot be made durable", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _translated(problem: str, path: Path) -> Iterator[None]:
    """Turn what the system says into an error that names the file."""
    try:
        yield
    except ExecutionError:
        raise
    except OSError as error:
        raise _failed(f"{problem} ({error.strerror})", path) from error


def _failed(problem: str, path: Path) -> ExecutionError:
    return ExecutionError(problem, where=str(path))
