"""Read files of ``torch.save`` without torch: structure as inert values, tensors as byte ranges.

Only the directory, the pickle and two short records are read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.frozen import Frozen
from restride.storage.pickle_vm import Limits, read_pickle
from restride.storage.ranges import RangeFile
from restride.storage.torch_twins import Twin, Twins
from restride.storage.torch_values import TORCH_RULES, StorageTable
from restride.storage.zip_directory import ZipRecord, read_zip_directory

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from os import PathLike

    from restride.checkpoint.values import Storage, Value

__all__ = ["TorchFile", "TorchFiles", "open_torch_zip"]

_DEFAULT_LIMITS: Final = Limits()
_NEWEST_VERSION: Final = 10
_SHORT_RECORD_NBYTES: Final = 64
# What torch wrote before version 1.6: a pickle of this number, then others.
_LEGACY_START: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_RESAVE: Final = "load it with torch.load(..., weights_only=True) and save it again with torch.save"


class TorchFile(Frozen):
    """What a file of ``torch.save`` holds.

    Attributes:
        path: The file, as the reader was given it.
        nbytes: Its size.
        value: What was saved, as inert values; tensors are `StoredTensor`.
        storages: The storages that tensors are views of, by key.
        records: Every record of the file, by its name without the top folder.
        saved_as: What the file is called inside: its name without suffix, when torch wrote it.
        stamp: As of `FileEntry`.
    """

    path: str
    nbytes: int
    value: Value
    storages: Mapping[str, Storage]
    records: Mapping[str, ZipRecord]
    saved_as: str
    stamp: tuple[int, int, int] | None = None

    @property
    def is_written_twice(self) -> bool:
        """Whether two processes wrote the file at one time, each record as one of them had it."""
        return any(record.is_written_twice for record in self.records.values())


class TorchFiles:
    """Opens files of ``torch.save``, each of them once: what it held is kept as long as this is.

    A conversion asks three times what a file holds: for its tensors, for the training that goes
    with them, and for what is carried over. All of them get one value, which nobody may change.

    Args:
        headers: For files by path what they are called inside and all other bytes that are of no
            tensor, as far as these are known. Of those that have the same ones the first is read.
    """

    def __init__(self, headers: Mapping[str, tuple[str, Hashable]] | None = None) -> None:
        self._opened: dict[str, TorchFile] = {}
        self._twins = Twins()
        self._headers = headers or {}
        self._read: dict[Hashable, tuple[TorchFile, Twin]] = {}

    def open(self, path: str | PathLike[str]) -> TorchFile:
        """Read the structure of a file, or return what was read of it before.

        Raises:
            ExecutionError, FormatError, CorruptError, UnsupportedError: As for `open_torch_zip`.
        """
        name = os.fspath(path)
        if name not in self._opened:
            known = self._alike(name)
            if known is None:
                with RangeFile(name) as file:
                    known = self._remembered(_read(file, _DEFAULT_LIMITS, self._twins))
            self._opened[name] = known
        return self._opened[name]

    def look(self, path: str | PathLike[str]) -> TorchFile:
        """The same of a file that nobody asks for again, of which there may be thousands.

        Raises:
            ExecutionError, FormatError, CorruptError, UnsupportedError: As for `open_torch_zip`.
        """
        name = os.fspath(path)
        return self._alike(name) or self._remembered(open_torch_zip(name))

    def _alike(self, name: str) -> TorchFile | None:
        """What a file holds by what was read of another one with the same header."""
        saved_as, header = self._headers.get(name, ("", None))
        if header is None or header not in self._read:
            return None
        other, twin = self._read[header]
        table = StorageTable(name, other.records, {})
        with suppress(RestrideError):  # it is nested strangely deep, and read itself
            value = twin.moved_to(table)
            return TorchFile(name, other.nbytes, value, table.storages, other.records, saved_as)
        return None

    def _remembered(self, file: TorchFile) -> TorchFile:
        _, header = self._headers.get(file.path, ("", None))
        if header is not None:
            self._read[header] = file, Twin(file.value, file.storages)
        return file

    def written_twice(self) -> tuple[str, ...]:
        """Paths of the files that two processes wrote at one time."""
        return tuple(path for path, file in self._opened.items() if file.is_written_twice)

    def saved_as(self) -> Mapping[str, str]:
        """What each file that was opened is called inside, by its path."""
        return {path: file.saved_as for path, file in self._opened.items()}


def open_torch_zip(path: str | PathLike[str], *, limits: Limits = _DEFAULT_LIMITS) -> TorchFile:
    """Read the structure of a file that ``torch.save`` wrote (torch 1.6 or newer).

    Nothing that the file names is looked up, imported or called, and no tensor is read.

    Args:
        path: The file.
        limits: What its pickle may cost.

    Raises:
        ExecutionError: The system cannot read the file.
        FormatError: The file is something else.
        CorruptError: The file is damaged or was built to mislead.
        UnsupportedError: The file is valid, but of an older or stranger kind.

    Cost:
        O(records) small reads, and memory for the pickle and what it says.
    """
    with RangeFile(path) as file:
        return _read(file, limits)


def _read(file: RangeFile, limits: Limits, twins: Twins | None = None) -> TorchFile:
    _require_zip(file)
    top, records = _by_name(read_zip_directory(file))
    if "data.pkl" not in records:
        raise FormatError("is a zip file without data.pkl, so not one of torch.save")
    if "constants.pkl" in records:
        raise UnsupportedError(
            "is a TorchScript archive", remedy="save the state dict of the module instead"
        )
    _require_version(_short_record(file, records, "version"))
    _require_little_endian(_short_record(file, records, "byteorder"))
    record = records["data.pkl"]
    if record.nbytes > limits.stream_nbytes:
        raise CorruptError(
            f"data.pkl of {record.nbytes} bytes is longer than the limit of "
            f"{limits.stream_nbytes} bytes"
        )
    table = StorageTable(file.path, records, {})
    stream = file.read(record.start_nbytes, record.nbytes)

    def read() -> Value:
        return read_pickle(stream, persistent=table.resolve, rules=TORCH_RULES, limits=limits)

    try:
        value = read() if twins is None else twins.value(stream, table, read)
    except RestrideError as error:
        raise error.located("data.pkl") from None
    return TorchFile(file.path, file.nbytes, value, table.storages, records, top, file.stamp)


def _require_zip(file: RangeFile) -> None:
    """Tell what else a checkpoint may be apart from a zip file, and say what to do."""
    if not file.nbytes:
        raise FormatError("is empty: a save that was interrupted, or a copy that failed")
    start = file.read(0, min(file.nbytes, 512))
    if start.startswith(_LEGACY_START) or start[257:262] == b"ustar":
        raise UnsupportedError("was saved in the format of torch before 1.6", remedy=_RESAVE)
    if start.startswith(b"\x80"):
        raise FormatError("is a bare pickle, not a file of torch.save")
    if not start.startswith(b"PK"):
        raise FormatError(f"starts with {start[:4]!r}, so it is not a file of torch.save")


def _by_name(records: tuple[ZipRecord, ...]) -> tuple[str, dict[str, ZipRecord]]:
    """The one top folder that all records are in, and their names without it."""
    folders = {record.name.partition("/")[0] for record in records}
    if len(folders) > 1:
        raise FormatError(f"records are in {len(folders)} top folders, torch.save writes one")
    top = next(iter(folders), "")
    return top, {record.name.partition("/")[2]: record for record in records}


def _short_record(file: RangeFile, records: Mapping[str, ZipRecord], name: str) -> bytes | None:
    record = records.get(name)
    if record is None:
        return None
    if record.nbytes > _SHORT_RECORD_NBYTES:
        raise CorruptError(f"record {name!r} has {record.nbytes} bytes")
    return file.read(record.start_nbytes, record.nbytes)


def _require_version(version: bytes | None) -> None:
    if version is None:
        raise FormatError("is a zip file without a version, so not one of torch.save")
    text = version.strip()
    if not text.isdigit():
        raise CorruptError(f"the version is {version!r}")
    if int(text) > _NEWEST_VERSION:
        raise UnsupportedError(
            f"has version {int(text)}, known ones go up to {_NEWEST_VERSION}", remedy=_RESAVE
        )


def _require_little_endian(byteorder: bytes | None) -> None:
    # Files from before the record existed are little-endian, as the machines of then.
    if byteorder == b"big":
        raise UnsupportedError(
            "was saved on a big-endian machine", remedy=f"{_RESAVE} on a little-endian one"
        )
    if byteorder not in {None, b"little"}:
        raise CorruptError(f"the byte order is {byteorder!r}")
