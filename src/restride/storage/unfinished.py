"""An output folder that appears complete or not at all, and whose progress outlives its writer.

Everything about an output ``OUT`` that is not finished stands in a folder beside it:

    OUT.partial/lock       held by the process that writes
    OUT.partial/journal    what the output will be, then what of it is durable
    OUT.partial/files/     the files of the output
    OUT.partial/replaced/  what was under the final name, while the two change places

Several processes may write one output; what they leave for each other is said in
`restride.storage.companions`.

At the end, when every byte and every name is durable, ``files`` becomes ``OUT`` by a rename. A
process may die at any moment: what is under the final name is then what was there before or the
whole new output, and the next process continues from the journal, or removes the folder.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError, ExistsError
from restride.frozen import Frozen
from restride.storage import companions
from restride.storage._places import (
    make_parents,
    put_in_place,
    remove_folder,
    require_free,
    require_no_input,
    require_replaceable,
    require_writable,
)
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import locked
from restride.storage.output_files import OutputFiles, sync_path, translated
from restride.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from restride.storage.companions import Team
    from restride.storage.journal import Record

__all__ = ["Purpose", "Unfinished", "partial_folder", "require_startable", "unfinished_output"]

_LOCK: Final = companions.LOCK
_JOURNAL: Final = companions.JOURNAL
_NEW_JOURNAL: Final = "journal.new"
_FILES: Final = "files"
_REPLACED: Final = "replaced"
_KNOWN: Final = frozenset({_LOCK, _JOURNAL, _NEW_JOURNAL, _FILES, _REPLACED})
_PUBLISHED: Final = "published"
# What NFS and FUSE call a file that was removed while somebody has it open.
_REMOVED_WHILE_OPEN: Final = (".nfs", ".fuse_hidden")
_LONGEST_STEM: Final = 200
_MOST_TRIES: Final = 100


class Purpose(Frozen):
    """What an output will be.

    Attributes:
        first: The first record of its journal. ``what`` is the words for it, ``nbytes`` how much
            is to be written; the ``nbytes`` of later records add up to what is done.
        differs: Says how the first record of an earlier process means something else; empty where
            both mean the same.
        is_written: Whether a folder is this very output, finished.
        told_of: Says what a folder is that is not; empty where nothing tells.
    """

    first: Record
    differs: Callable[[Record], str]
    is_written: Callable[[Path], bool]
    told_of: Callable[[Path], str] = lambda _: ""


class Unfinished:
    """An output while it is being written; made by `unfinished_output`.

    Args:
        folder: The folder beside the final name.
        target: The final name.
        force: Whether what has that name may be replaced.
        durable: Whether to wait for the disk.
        number: Of the process, where several write.

    Attributes:
        folder: The folder beside the final name.
        files: The files of the output, to be written into.
        records: What earlier processes noted, without the first record; empty for a new output.
        is_published: Whether the output has its final name. True at the start where an earlier
            process had done everything but clean up.
        is_resumed: Whether there are files of an earlier process.
        keeps: Whether there is progress that an error must not throw away.
        is_durable: Whether to wait for the disk.
        done_nbytes: Sum of the ``nbytes`` of all records so far.
        done_elsewhere_nbytes: The same of other processes, as far as this one was told.
    """

    def __init__(
        self, folder: Path, target: Path, *, force: bool, durable: bool, number: int = 0
    ) -> None:
        self.folder = folder
        self.files = OutputFiles(folder / _FILES, durable=durable)
        self.records: tuple[Record, ...] = ()
        self.is_published = False
        self.keeps = False
        self.is_resumed = False
        self.is_durable = durable
        self.done_nbytes = 0
        self.done_elsewhere_nbytes = 0
        self._target = target
        self._force = force
        self._journal: Journal | None = None
        self._journal_path = folder / _JOURNAL
        if number:
            self._journal_path = companions.file_of(folder, companions.JOURNAL, number)
        self._lock = Lock()

    @property
    def team(self) -> tuple[int, Team] | None:
        """The processes that wrote before, and the place of their record among `records`."""
        return companions.last_team(self.records)

    @contextmanager
    def without_others(self) -> Iterator[None]:
        """Keep other processes of an earlier run out; at the end, what they noted is removed.

        Raises:
            ExecutionError: One of them is still writing.
        """
        found = self.team
        what = str(self._target)
        with (
            translated("cannot be opened", self.folder),
            companions.without_others(self.folder, found and found[1], what=what),
        ):
            yield

    def begin_part(self, records: Iterable[Record], *, keeps: bool = False) -> None:
        """Start the journal of a process that is not the first, in the place of an older one.

        Raises:
            ExecutionError: The system cannot write.
        """
        self._replace_journal(records)
        with translated("cannot be created", self.folder):
            self._fresh_path.rename(self._journal_path)
        if self.is_durable:
            sync_path(self.folder)
        self.keeps = keeps

    def begin(self, records: Iterable[Record], *, keeps: bool = False) -> None:
        """Start a new journal with some records, in the place of one that may be there.

        Raises:
            ExecutionError: The system cannot write.
        """
        self._replace_journal(records)
        with translated("cannot be created", self.folder):
            if not keeps:
                remove_folder(self.files.path)
            self._fresh_path.rename(self._journal_path)
            self.files.path.mkdir(exist_ok=True)
        if self.is_durable:
            sync_path(self.folder)
            sync_path(self.folder.parent)
        self.keeps = keeps

    @property
    def _fresh_path(self) -> Path:
        return self._journal_path.with_name(f"{self._journal_path.name}.new")

    def _replace_journal(self, records: Iterable[Record]) -> None:
        """Write the journal that will be, under another name."""
        self._close_journal()
        with translated("cannot be replaced", self._fresh_path):
            self._fresh_path.unlink(missing_ok=True)
        self._journal = Journal(self._fresh_path, durable=self.is_durable)
        self.done_nbytes = 0
        first, *others = records
        self._journal.append([first])
        self.note(others)

    def resume(self, records: Sequence[Record]) -> None:
        """Go on with the journal that is there, and what it holds behind its first record."""
        self.records = tuple(records[1:])
        self.keeps = self.is_resumed = True
        self.done_nbytes = _done_nbytes(self.records)
        self._journal = Journal(self._journal_path, durable=self.is_durable)
        with translated("cannot be created", self.files.path):
            self.files.path.mkdir(exist_ok=True)

    def note(self, records: Iterable[Record]) -> None:
        """Append records to the journal; they are as durable as the output when this returns.

        Any thread may call it.

        Raises:
            ExecutionError: The system cannot write.
        """
        if self._journal is None:
            raise ExecutionError("the journal is not open", where=str(self.folder))
        records = tuple(records)
        with self._lock:
            self._journal.append(records)
            self.done_nbytes += _done_nbytes(records)

    def publish(self, told: Record | None = None) -> None:
        """Make everything durable, and give it its final name.

        Args:
            told: What the last record of the journal shall say besides.

        Raises:
            ExistsError: Something appeared under the final name meanwhile.
            ExecutionError: The system cannot do it.
        """
        self.files.sync()
        self.note([{_PUBLISHED: True, **(told or {})}])
        replaced = self.folder / _REPLACED
        put_in_place(
            *(self.files.path, self._target),
            replaced=replaced,
            force=self._force,
            durable=self.is_durable,
        )
        self.is_published = True

    def close(self) -> None:
        """Close all files."""
        self.files.close()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()


@contextmanager
def unfinished_output(
    final: str | PathLike[str],
    purpose: Purpose,
    *,
    force: bool = False,
    resume: bool = False,
    inputs: Iterable[str | PathLike[str]] = (),
    durable: bool = True,
    patience_seconds: float = 0.0,
) -> Iterator[Unfinished]:
    """Write a folder beside its final name, or go on with one that an earlier process left.

    When the block ends without `Unfinished.publish`, by an error or not, what was written is
    removed unless `Unfinished.keeps` is set. An empty folder under the final name is used up
    without asking: nothing is lost.

    Args:
        final: Where the output shall be. Its parents are made as needed.
        purpose: What it will be.
        force: Replace an output that is there, all of it, once the new one is durable, and throw
            away what an earlier process left. What restride did not write is never replaced.
        resume: Go on where an earlier process stopped; if it had finished, nothing is left to do.
            Without one, start.
        inputs: What is being read; an output that would replace it is refused, even with `force`.
        durable: Whether to wait for the disk before an output gets its name. Without it nothing is
            lost when the process dies; when the machine does, an output may be there in part.
        patience_seconds: How long to wait for another process that has the place.

    Yields:
        The output to write into.

    Raises:
        ExistsError: Something is there and `force` is not set, or would be lost that must not be;
            or an earlier process left something and neither `force` nor `resume` is set, or it is
            the beginning of another output.
        ExecutionError: The system cannot write it, or another process does.
    """
    # A symbolic link is followed: the rename must happen where the folder is.
    target = Path(os.path.realpath(final))
    if not target.name:
        raise ExistsError("cannot be replaced", where=str(target), remedy="name another output")
    place = Unfinished(partial_folder(target), target, force=force, durable=durable)
    kept = [Path(os.path.realpath(path)) for path in inputs]
    if not os.path.lexists(place.folder) and not (resume and purpose.is_written(target)):
        told = purpose.told_of(target) if resume and not force else ""
        require_free(target, force=force, inputs=kept, told=told)
    fresh = make_parents(target, durable=durable)
    is_removed = False
    try:
        with _held(place.folder, target, patience_seconds):
            records = read_journal(place.folder / _JOURNAL)
            place.keeps = bool(records)
            try:
                _enter(place, purpose, records, target, force, resume, kept)
                yield place
            finally:
                place.close()
                is_removed = place.is_published or not (
                    place.keeps or companions.anybody_in(place.folder)
                )
                if is_removed:
                    _remove(place.folder, target)
    finally:
        if is_removed:
            # Not sooner: where a file that is open is removed, as the lock has to be, NFS and FUSE
            # keep it in its folder under another name until it is closed.
            companions.remove_if_unused(place.folder)
        if is_removed and not place.is_published:
            for folder in fresh:
                with suppress(OSError):
                    folder.rmdir()


def require_startable(
    final: str | PathLike[str],
    *,
    force: bool = False,
    resume: bool = False,
    inputs: Iterable[str | PathLike[str]] = (),
) -> None:
    """Refuse what `unfinished_output` would refuse at once; nothing is made or locked.

    Raises:
        ExistsError, ExecutionError: As for `unfinished_output`, as far as it can be said without
            the first record.
    """
    target = Path(os.path.realpath(final))
    require_writable(target)
    folder = partial_folder(target)
    records = read_journal(folder / _JOURNAL)
    kept = [Path(os.path.realpath(path)) for path in inputs]
    has_files = bool(records) and (folder / _FILES).exists()
    if has_files and not force and not resume:
        require_replaceable(target, kept)
        raise _left(folder, target, records)
    if has_files or not (records and resume):
        require_free(target, force=force, inputs=kept)


def partial_folder(target: Path) -> Path:
    """The folder of an output that is not finished.

    Examples:
        >>> partial_folder(Path("models/llama")).as_posix()
        'models/llama.partial'
    """
    stem = target.name
    if len(os.fsencode(stem)) > _LONGEST_STEM:
        stem = f"{stem[:40]}.{blake2b(os.fsencode(stem), digest_size=16).hexdigest()}"
    return target.with_name(f"{stem}.partial")


def _enter(
    place: Unfinished,
    purpose: Purpose,
    records: Sequence[Record],
    target: Path,
    force: bool,  # noqa: FBT001 - handed on
    resume: bool,  # noqa: FBT001
    inputs: Sequence[Path],
) -> None:
    """Begin, or go on with what an earlier process left, if there are records of it."""
    require_no_input(place.folder, inputs)
    replaced = place.folder / _REPLACED
    if os.path.lexists(replaced) and not os.path.lexists(target):
        # It died between the two renames.
        with translated(f"cannot get back what was here, which is now {replaced}", target):
            replaced.rename(target)
        sync_path(target.parent)
    was_published = bool(records) and _PUBLISHED in records[-1]
    is_done = (
        (was_published or (resume and not force))
        and not place.files.path.exists()
        and purpose.is_written(target)
    )
    place.keeps = place.keeps and not is_done
    if is_done and resume:
        place.records = tuple(records[1:])
        place.is_published = True
        return
    require_replaceable(target, inputs)  # first: beside it, nothing of the following would work
    difference = purpose.differs(records[0]) if records else ""
    if records and not is_done:
        if resume and difference:
            raise ExistsError(
                f"the unfinished output cannot be resumed: {difference}",
                where=str(place.folder),
                remedy=f"remove {place.folder}, or start anew with --force",
            )
        if not force and not resume:
            raise _left(place.folder, target, records)
    if not force:
        require_free(target, force=False, inputs=inputs)
    if records and resume:
        place.resume(records)
        return
    place.records = tuple(records[1:])
    with place.without_others():
        place.begin([purpose.first])
    place.records = ()


def _left(folder: Path, target: Path, records: Sequence[Record]) -> ExistsError:
    first, *others = records
    total = _done_nbytes([first])
    done = _done_nbytes(others)
    if team := companions.last_team(others):
        done += sum(map(_done_nbytes, companions.journals_of(folder, team[1])))
    removing = f" or remove {folder}"
    if os.path.lexists(folder / _REPLACED) and not os.path.lexists(target):
        removing = f"; what was here is in {folder / _REPLACED}"
    return ExistsError(
        f"an unfinished {first.get('what', 'output')} is here, {format_size(done)} of "
        f"{format_size(total)} done",
        where=str(target),
        remedy=f"add --resume to continue{removing}",
    )


def _done_nbytes(records: Iterable[Record]) -> int:
    counts = (record.get("nbytes", 0) for record in records)
    return sum(count for count in counts if isinstance(count, int))


@contextmanager
def _held(folder: Path, target: Path, patience_seconds: float) -> Iterator[None]:
    """Make the folder where it is missing, and lock it."""
    for _ in range(_MOST_TRIES):
        with ExitStack() as stack:
            with translated("cannot be created", folder):
                folder.mkdir(exist_ok=True)
                try:
                    _require_ours(folder)
                    stack.enter_context(
                        locked(folder / _LOCK, what=str(target), patience_seconds=patience_seconds)
                    )
                except FileNotFoundError:
                    continue  # its last holder has just removed it
                except OSError:
                    companions.remove_if_unused(folder)
                    raise
            yield
            return
    raise ExecutionError("other processes come and go there", where=str(target))


def _require_ours(folder: Path) -> None:
    """Refuse a folder that merely has the name: something in it is not ours to delete."""
    names = {entry.name for entry in folder.iterdir()} - _KNOWN
    strangers = sorted(
        name
        for name in names
        if not (companions.is_of_companions(name) or name.startswith(_REMOVED_WHILE_OPEN))
    )
    if os.path.lexists(folder / _REPLACED) and not (folder / _REPLACED).is_dir():
        strangers.append(_REPLACED)  # only folders are replaced
    if strangers or folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        holds = f"holds {', '.join(strangers[:3])}" if strangers else "belongs to somebody else"
        raise ExistsError(
            f"is in the way: it has the name of an unfinished output, and {holds}",
            where=str(folder),
            remedy="name another output",
        )


def _remove(folder: Path, target: Path) -> None:
    """Remove what is in the folder; what cannot be removed is in nobody's way."""
    if os.path.lexists(folder / _REPLACED) and not os.path.lexists(target):
        return  # it could not be put back, and the next process tries again
    for name in (_FILES, _REPLACED):
        remove_folder(folder / name, ignore_errors=True)
    with suppress(OSError):
        companions.remove_all(folder)
        for name in (_NEW_JOURNAL, _JOURNAL, _LOCK):
            (folder / name).unlink(missing_ok=True)
        for path in folder.glob(f"{companions.HELLO}.*"):
            path.unlink(missing_ok=True)  # said before the lock was gone
