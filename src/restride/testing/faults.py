"""A layer below the files: any operation may fail, or be the last one that happens.

Everything that restride does to files goes through a few functions of `os`, and one that reserves
space; the kernel's programs, which do not, are not run meanwhile. In the block of `failing_files`
those that change something below a folder are counted, and one of them

* raises an error of the system (no space, a broken disk, no permission), or
* is where the process dies: it happens half or not at all, and nothing after it happens, whatever
  the program does to clean up. What is on the disk then is what a ``kill -9`` leaves; with
  `loses`, it is what is left when the power goes: all that was not synced is taken back.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from restride.executors.direct import Direct
from restride.storage import reserving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

__all__ = ["Died", "FailingFiles", "failing_files"]

_ON_DESCRIPTORS = ("pwrite", "write", "fsync", "fdatasync", "ftruncate", "fallocate")
_ON_PATHS = ("open", "mkdir", "rename", "unlink", "rmdir")
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Died(BaseException):
    """The process is dead. Only a test can see this."""


@dataclass
class FailingFiles:
    """What happens below a folder.

    Attributes:
        folder: The folder; nothing outside of it fails.
        at: The operation that fails: its number, counted from 1, or its name and the last part of
            its path, such as ``"rename files"``; 0 for none.
        number: `errno` of the failure; 0 for the death of the process.
        is_lasting: Whether all later operations of the same kind fail likewise, as on a full disk.
        is_torn: Whether a write that is the last one happens by half.
        loses: Whether what is not synced is lost when the process dies.
        calls: Operations so far: their names, with the last part of the path.
        has_failed: Whether the operation was reached.
        is_dead: Whether the process has died.
    """

    folder: Path
    at: int | str = 0
    number: int = 0
    is_lasting: bool = False
    is_torn: bool = False
    loses: bool = False
    calls: list[str] = field(default_factory=list)
    has_failed: bool = False
    is_dead: bool = False
    _undo: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def die(self) -> None:
        """End the process here, between two operations.

        Raises:
            Died: Always.
        """
        with self._lock:
            self._die()

    def _die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            if self.loses:
                for _, undo in reversed(self._undo):
                    undo()
        raise Died

    def _call(self, name: str, path: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            if self.is_dead:
                raise Died
            self.calls.append(f"{name} {Path(path).name}")
            is_it = not self.has_failed and self.at in {len(self.calls), self.calls[-1]}
            has_failed, self.has_failed = self.has_failed, self.has_failed or is_it
            if is_it and not self.number:
                if self.is_torn and name in {"pwrite", "write"}:
                    half = memoryview(arguments[1])[: len(arguments[1]) // 2]
                    self._do(name, path, arguments[0], half, *arguments[2:], **options)
                self._die()
            if is_it or (has_failed and self._lasts(name)):
                raise OSError(self.number, os.strerror(self.number), path)
            return self._do(name, path, *arguments, **options)

    def _lasts(self, name: str) -> bool:
        return self.is_lasting and name in {"pwrite", "write", "fallocate", "mkdir"}

    def _do(self, name: str, path: str, *arguments: Any, **options: Any) -> Any:
        """Carry out an operation, and note how it is taken back until it is synced."""
        if name in {"fsync", "fdatasync"}:
            self._undo = [entry for entry in self._undo if entry[0] != path]
        elif name in {"pwrite", "write", "ftruncate", "fallocate"}:
            self._undo.append((path, self._old_content(path, name, arguments)))
        elif name in {"open", "mkdir"} and not os.path.lexists(path):
            self._undo.append((str(Path(path).parent), lambda: self._take_away(path)))
        elif name == "rename":
            source, target = map(str, arguments[:2])
            parent = str(Path(target).resolve().parent)
            self._undo.append((parent, lambda: self._real["rename"](target, source)))
        return self._real[name](*arguments, **options)

    def _old_content(self, path: str, name: str, arguments: tuple[Any, ...]) -> Callable[[], None]:
        old_nbytes = Path(path).stat().st_size
        start, old = 0, b""
        if name == "pwrite":
            start = arguments[2]
            with Path(path).open("rb") as file:
                file.seek(start)
                old = file.read(len(memoryview(arguments[1]).cast("B")))

        def undo() -> None:
            with Path(path).open("r+b") as file:
                file.seek(start)
                file.write(old)
                file.truncate(old_nbytes)

        return undo

    def _take_away(self, path: str) -> None:
        """Remove a name that was never synced; what is below it has gone before."""
        with suppress(FileNotFoundError):
            if Path(path).is_dir():
                self._real["rmdir"](path)
            else:
                self._real["unlink"](path)

    def patched(self, name: str) -> Callable[..., Any]:
        """The function that stands in for one."""
        real = self._real[name] = getattr(_home(name), name)

        def stand_in(first: Any, *arguments: Any, **options: Any) -> Any:
            path = _path_of(first, options.get("dir_fd"))
            is_reading = name == "open" and not (arguments and arguments[0] & _CHANGING)
            if is_reading or not path.is_relative_to(self.folder):
                return real(first, *arguments, **options)
            return self._call(name, str(path), first, *arguments, **options)

        return stand_in


def _home(name: str) -> ModuleType:
    """The module whose function of a name is called."""
    return reserving if name == "fallocate" else os


def _path_of(named: Any, folder: int | None) -> Path:
    """Path of what a call names: by a descriptor, or by a path that may be below one."""
    if isinstance(named, int):
        return Path(os.readlink(f"/proc/self/fd/{named}"))  # noqa: PTH115 - no Path for this
    if folder is not None:
        return _path_of(folder, None) / os.fsdecode(named)
    return Path(os.path.abspath(os.fsdecode(named)))  # noqa: PTH100 - links are not followed


@contextmanager
def failing_files(
    folder: Path,
    *,
    at: int | str = 0,
    number: int = 0,
    kind: Literal["once", "lasting"] = "once",
    is_torn: bool = False,
    loses: bool = False,
) -> Iterator[FailingFiles]:
    """Let an operation below a folder fail, or end the process.

    Args:
        folder: The folder.
        at: The operation, by number or name; 0 only counts.
        number: `errno` of the error; 0 ends the process there.
        kind: Whether later operations that need room fail likewise.
        is_torn: Whether a write at which the process ends happens by half.
        loses: Whether what is not synced is lost when the process ends.

    Examples:
        >>> import errno, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         with failing_files(Path(folder), at=2, number=errno.ENOSPC) as files:
        ...             os.mkdir(f"{folder}/a")
        ...             os.mkdir(f"{folder}/b")
        ...     except OSError as error:
        ...         print(error.strerror, files.calls)
        No space left on device ['mkdir a', 'mkdir b']
    """
    files = FailingFiles(
        folder, at, number, is_lasting=kind == "lasting", is_torn=is_torn, loses=loses
    )
    before = {name: getattr(_home(name), name) for name in (*_ON_DESCRIPTORS, *_ON_PATHS)}
    carry_out = Direct.carry_out
    try:
        Direct.carry_out = lambda *_: False  # type: ignore[method-assign]
        for name in before:
            setattr(_home(name), name, files.patched(name))
        yield files
    finally:
        Direct.carry_out = carry_out  # type: ignore[method-assign]
        for name, function in before.items():
            setattr(_home(name), name, function)
