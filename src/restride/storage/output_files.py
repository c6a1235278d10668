"""The files of an output while they are written: reserved, filled in any order, made durable."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from stat import S_ISDIR
from threading import Condition
from typing import TYPE_CHECKING, Final, Self

from restride.arrays.program import start_writing
from restride.checkpoint.output import OutputFile
from restride.errors import ExecutionError, ExistsError, RestrideError
from restride.storage.background import Background
from restride.storage.ranges import FilePool, write_exact
from restride.storage.reserving import reserve
from restride.wording import counted, format_size, told_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer

    from restride.checkpoint.output import Output
    from restride.storage.ranges import Lease

__all__ = ["OutputFiles", "sync_path", "translated"]

_MOST_NAMED: Final = 3
# What SMB and some file systems in user space answer when a folder shall be made durable.
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_ZEROS_NBYTES: Final = 1 << 20


class OutputFiles:
    """Files below one folder. Used as a context manager, they are closed at the end.

    Positioned writes may come from any number of threads.

    Args:
        path: The folder.
        durable: Whether to wait until the disk has what was written. Without it, a death of the
            process loses nothing, and one of the machine may.

    Attributes:
        path: The folder.
        is_durable: As given.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        self.is_durable = durable
        # Paths below are texts: `Path` takes longer to join and to hash than a small file to write.
        self._top = str(path)
        self._files: dict[str, str] = {}
        self._pool = FilePool(writable=True)
        self._unsynced: set[str] = set()
        self._folders: set[str] = set()
        self._unsynced_folders: set[str] = set()
        # Also of each file that is created, and of the end of that.
        self._lock = Condition()
        self._creating: Background | None = None
        self._is_creating = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, output: Output, *, resume: bool = False) -> None:
        """Reserve all files of an output, and write their fixed parts.

        Args:
            output: What is to be written.
            resume: Keep what is in the shards of files that are there.

        Raises:
            ExistsError: A file was there before.
            ExecutionError: The system cannot write it, or has no room for it.
        """
        self._require_room([f for f in output.files if not (resume and self._is_there(f))])
        for file in output.files:
            self._create(file, resume=resume)
        # Nothing tells whether these are as a new file has them, as the digests of blocks do.
        for file, start, stop in output.gaps() if resume else ():
            for first in range(start, stop, _ZEROS_NBYTES):
                zeros = bytes(min(_ZEROS_NBYTES, stop - first))
                self.write_exact(file.name, first, zeros)

    def begin_creating(self, output: Output) -> None:
        """Do what `create` does in a thread, while what is there already is written to.

        Who writes to a file that is not there yet waits for it. `finish_creating` is to be called.

        Raises:
            ExecutionError: There is no room for all of it.
        """
        self._require_room(output.files)
        self._is_creating = True
        self._creating = Background("restride-create", self._create_meanwhile, output)

    def finish_creating(self) -> None:
        """Wait until all files are there.

        Raises:
            ExistsError, ExecutionError: As for `create`.
        """
        if self._creating is not None:
            self._creating.require_success()

    @property
    def cannot_be_created(self) -> bool:
        """Whether it is known by now that one of the files cannot."""
        creating = self._creating
        return creating is not None and creating.is_ended and creating.error is not None

    def _create_meanwhile(self, output: Output) -> None:
        try:
            for file in output.files:
                if not self._is_creating:
                    return
                self._create(file, resume=False)
        finally:
            with self._lock:
                self._is_creating = False
                self._lock.notify_all()

    def _require_room(self, missing: Sequence[OutputFile]) -> None:
        """Refuse what cannot fit before the disk is full, on which others may be writing too."""
        nbytes = sum(file.nbytes for file in missing)
        with translated("cannot be created", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            system = os.statvfs(self.path)
        free_nbytes = system.f_bavail * system.f_frsize
        if system.f_blocks and nbytes > free_nbytes:  # some systems do not say
            needed, free = told_apart(nbytes, free_nbytes)
            raise ExecutionError(
                f"no room for {needed} of {counted(len(missing), 'file')}, {free} are free",
                where=str(self.path),
                remedy="make room, or name an output elsewhere",
            )

    def _is_there(self, file: OutputFile) -> bool:
        """Whether an earlier run has reserved a file."""
        try:
            return os.lstat(f"{self._top}/{file.name}").st_size == file.nbytes
        except OSError:
            return False

    def adopt(self, output: Output) -> None:
        """Take the files of an output that another process made, to write into them.

        Raises:
            ExecutionError: One is not there, or has another size: it is not what that process made.
        """
        for file in output.files:
            path = f"{self._top}/{file.name}"
            with translated("cannot be looked at", path):
                size = os.lstat(path).st_size
            if size != file.nbytes:
                problem = f"has {size} bytes, and not the {file.nbytes} that process 0 made"
                raise _failed(problem, path)
            self._files[file.name] = path

    def preallocate(self, name: str, nbytes: int, *, resume: bool = False) -> None:
        """Create a file of zeros, with its space reserved where the file system can do that.

        A disk that is too small is found out here, before the first tensor moves.

        Args:
            name: Path below the folder, with forward slashes. Folders are made as needed.
            nbytes: Size of the file.
            resume: Take the file that is there, and what is in it.

        Raises:
            PlanError: The name would leave the folder.
            ExistsError: The file was there before.
            ExecutionError: The system cannot write it, or has no room for it.
        """
        self._create(OutputFile(name, nbytes), resume=resume)

    def _create(self, file: OutputFile, *, resume: bool) -> None:
        """Create a file as `preallocate` does, with its fixed parts."""
        path = f"{self._top}/{file.name}"
        folder = path.rpartition("/")[0]
        exclusive = 0 if resume else os.O_EXCL
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | exclusive
        try:
            if folder not in self._folders:
                self._add_folders(folder)
            descriptor = os.open(path, flags, 0o666)
        except FileExistsError as error:
            raise ExistsError("the file is written twice", where=path) from error
        except OSError as error:
            raise _failed(f"cannot be created ({error.strerror})", path) from error
        try:
            reserve(descriptor, file.nbytes)
            for start, literal in file.spelled():
                write_exact(descriptor, start, literal, where=path)
        except OSError as error:
            raise _no_room(error, path, file.nbytes) from error
        finally:
            os.close(descriptor)
        with self._lock:
            # Its name may have been made durable by now, from before it was there.
            self._unsynced_folders.add(folder)
            self._unsynced.add(file.name)
            self._files[file.name] = path
            self._lock.notify_all()

    def _add_folders(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a text
        folders = {self._top}
        while folder != self._top:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        with self._lock:
            self._folders |= folders
            self._unsynced_folders |= folders

    def write_exact(self, name: str, start_nbytes: int, buffer: ReadableBuffer) -> None:
        """Write all of `buffer` into a file that was preallocated, from `start_nbytes`.

        Raises:
            ExecutionError: The file was not preallocated, or the system cannot write it.
        """
        self._pool.write_exact(self._path_of(name), start_nbytes, buffer)
        self.set_written(name)

    def hold(self, name: str) -> Lease | None:
        """Keep a file open for somebody who writes into it himself, as `FilePool.hold` does.

        Raises:
            ExecutionError: The file was not preallocated, or the system cannot open it.
        """
        return self._pool.hold(self._path_of(name))

    def set_written(self, name: str) -> None:
        """Note that a file has bytes that are not durable, after they were written."""
        # Only now: a sync that took the mark away before would not have seen these bytes. One that
        # takes it away from now on will.
        if name not in self._unsynced:
            with self._lock:
                self._unsynced.add(name)

    def _path_of(self, name: str) -> str:
        """Path of a file that was created, or is going to be: then it is waited for."""
        creating = self._creating
        if creating is not None:
            if name not in self._files:
                with self._lock:
                    self._lock.wait_for(lambda: name in self._files or not self._is_creating)
            if not self._is_creating:
                creating.require_success()
        if name not in self._files:
            raise ExecutionError("written to before it was created", where=str(self.path / name))
        return self._files[name]

    def start_writing(self, name: str, start_nbytes: int, nbytes: int) -> None:
        """Have the system begin to write bytes of a file to the disk, if it can be told.

        Otherwise it begins when a tenth of the memory waits, and has the writers wait for the disk
        when a fifth does. This call may wait instead, where the disk is busy.

        Raises:
            ExecutionError: The file was not preallocated, or the system cannot open it.
        """
        lease = self.hold(name)
        if lease is not None:
            with lease as file:
                start_writing(file.descriptor, start_nbytes, nbytes)

    def sync_files(self, names: Iterable[str]) -> None:
        """Make durable what was written into some files before this call.

        Raises:
            ExecutionError: The system cannot do it: a write that it had accepted was lost.
        """
        for name in names:
            with self._lock:
                self._unsynced.discard(name)
            if self.is_durable:
                sync_path(self._files[name])

    def sync_folders(self) -> None:
        """Make the names of all files durable that were created.

        Raises:
            ExecutionError: The system cannot do it.
        """
        with self._lock:
            folders, self._unsynced_folders = self._unsynced_folders, set()
        for folder in sorted(folders, reverse=True) if self.is_durable else ():
            sync_path(folder)

    def sync(self) -> None:
        """Make everything durable that is not yet, all files that are being created among it.

        Raises:
            ExistsError: Somebody put another file into the folder.
            ExecutionError: The system cannot do it: a write that it had accepted was lost.
        """
        self.finish_creating()
        self.close()
        self._require_no_other()
        self.sync_files(sorted(self._unsynced))
        self.sync_folders()

    def _require_no_other(self) -> None:
        """Refuse files that are not of the output: a reader would take them for a part of it."""
        other: list[str] = []
        with translated("cannot be listed", self.path):
            for folder, _, names in os.walk(self._top, onerror=_raise):
                below = folder[len(self._top) + 1 :]
                found = (f"{below}/{name}" if below else name for name in names)
                other += (name for name in found if name not in self._files)
        if other:
            raise ExistsError(
                f"holds {', '.join(sorted(other)[:_MOST_NAMED])}, {len(other)} in all, not of the "
                "output",
                where=str(self.path),
                remedy="move that away, or start anew with --force",
            )

    def close(self) -> None:
        """Close all files, and create no more of them."""
        self._is_creating = False
        if self._creating is not None:
            self._creating.wait()
        self._pool.close()


def sync_path(path: str | Path) -> None:
    """Make a file durable, or the names in a folder, where the file system knows of such a thing.

    Raises:
        ExecutionError: The system cannot do it.
    """
    with translated("cannot be made durable", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC or not S_ISDIR(os.fstat(descriptor).st_mode):
                raise
        finally:
            os.close(descriptor)


@contextmanager
def translated(problem: str, path: str | Path) -> Iterator[None]:
    """Turn what the system says into an error that names the file.

    Raises:
        ExecutionError: The block raised an error of the system.
    """
    try:
        yield
    except RestrideError:
        raise
    except OSError as error:
        raise _failed(f"{problem} ({error.strerror})", path) from error


def _no_room(error: OSError, path: str, nbytes: int) -> ExecutionError:
    """Say what the file takes, and what there is or what forbids it."""
    needs, remedy = format_size(nbytes), "make room, or name an output elsewhere"
    if error.errno == errno.EFBIG:
        remedy = "raise the limit of this process (ulimit -f) or file system, or have smaller files"
    elif error.errno == errno.EDQUOT:
        remedy = "make room in the quota of this user, or name an output elsewhere"
    else:
        with suppress(OSError):
            system = os.statvfs(path.rpartition("/")[0])
            needs = "{}, {} are free".format(*told_apart(nbytes, system.f_bavail * system.f_frsize))
        remedy += "; --dry-run says what all files take"
    return ExecutionError(f"no room for {needs} ({error.strerror})", where=path, remedy=remedy)


def _raise(error: OSError) -> None:
    raise error


def _failed(problem: str, path: str | Path) -> ExecutionError:
    return ExecutionError(problem, where=str(path))
