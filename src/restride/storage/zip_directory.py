"""Where the records of a zip file stand, believed only where all that it says about them agrees.

A zip file describes each record twice, in a header before it and in a directory at the end, and two
readers that believe different halves see different files. So this reader accepts what torch writes
and nothing else: stored records, one after the other from the first byte to the directory, each
described the same in both places. Only headers and directory are read.

Of one thing two accounts are taken: the checksum of a short record may differ where both of two
processes that wrote the file at one time left theirs. Then the record is read, and has to be what
one of them wrote; so has every other short record of the file.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.frozen import Frozen
from restride.storage.zip_end import ALL_ONES, find_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from restride.storage.ranges import RangeFile

__all__ = ["ZipRecord", "read_zip_directory"]

_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_DESCRIPTOR: Final = struct.Struct("<4s3L")
_WIDE_DESCRIPTOR: Final = struct.Struct("<4sL2Q")
_EXTRA: Final = struct.Struct("<2H")
_WIDE_EXTRA: Final = 1

_LARGEST_DIRECTORY_NBYTES: Final = 64 << 20
_LONGEST_READ_NBYTES: Final = 16 << 20
_HAS_DESCRIPTOR: Final = 1 << 3
_IS_UTF8: Final = 1 << 11
_IS_ENCRYPTED: Final = 1 << 0 | 1 << 6 | 1 << 13
# Enough for the padding with which torch aligns storages.
_READ_AHEAD_NBYTES: Final = 128


class ZipRecord(Frozen):
    """One record of a zip file.

    Attributes:
        name: Name in the directory.
        start_nbytes: First byte of its content in the file.
        nbytes: Length of its content.
        crc32: Checksum of its content as the file states it. Torch can be told not to compute it,
            so a wrong one proves nothing.
        is_written_twice: Whether the file states another one besides, and the content has one of
            the two.
    """

    name: str
    start_nbytes: int
    nbytes: int
    crc32: int
    is_written_twice: bool = False


class _Entry(Frozen):
    """What the directory says about one record."""

    raw_name: bytes
    flags: int
    crc32: int
    nbytes: int
    header_start: int

    @property
    def name(self) -> str:
        return self.raw_name.decode()


def read_zip_directory(file: RangeFile) -> tuple[ZipRecord, ...]:
    """Find the records of a zip file of stored records.

    Args:
        file: The file. Its headers and its directory are read, and nothing else.

    Returns:
        The records in the order in which they stand in the file. They do not overlap, and no byte
        before the directory belongs to none of them.

    Raises:
        FormatError: The file is no zip file.
        CorruptError: It is cut off, or contradicts itself.
        UnsupportedError: A record is compressed or encrypted, or the file is split.

    Cost:
        O(records) small reads.
    """
    count, start, stop = find_directory(file)
    if stop - start > _LARGEST_DIRECTORY_NBYTES or count * _CENTRAL.size > stop - start:
        raise CorruptError(f"a zip directory of {count} records has {stop - start} bytes")
    entries = sorted(
        _entries(file.read(start, stop - start), count), key=lambda entry: entry.header_start
    )
    followers = [entry.header_start for entry in entries[1:]] + [start]
    records: list[ZipRecord] = []
    at = 0
    for entry, follower in zip(entries, followers, strict=False):
        try:
            if entry.header_start != at:
                raise CorruptError(f"starts at byte {entry.header_start}, not at byte {at}")
            record = _record(file, entry, start)
            other_crc32 = _sum_after(file, entry, record, follower)
            if other_crc32 != entry.crc32:
                record = _written_twice(file, record, other_crc32)
            records.append(record)
        except RestrideError as error:
            raise error.located(f"record {entry.name!r}") from None
        at = follower
    if at != start:
        raise CorruptError(f"no record stands before the zip directory at byte {start}")
    if any(record.is_written_twice for record in records):
        _require_sums(file, records)
    return tuple(records)


def _entries(directory: bytes, count: int) -> Iterator[_Entry]:
    """Parse the directory; names are unique."""
    names: set[bytes] = set()
    at = 0
    for number in range(count):
        try:
            entry, at = _entry(directory, at)
        except RestrideError as error:
            raise error.located(f"zip directory, record {number}") from None
        if entry.raw_name in names:
            raise CorruptError(f"two records have the name {entry.name!r}")
        names.add(entry.raw_name)
        yield entry
    if at != len(directory):
        raise CorruptError(
            f"{len(directory) - at} bytes follow {count} records in the zip directory"
        )


def _entry(directory: bytes, at: int) -> tuple[_Entry, int]:
    if at + _CENTRAL.size > len(directory):
        raise CorruptError("the directory ends inside of it")
    (signature, _, _, flags, method, _, _, crc32, stored_nbytes, nbytes, *rest) = (
        _CENTRAL.unpack_from(directory, at)
    )
    name_nbytes, extra_nbytes, comment_nbytes, disk, _, _, header_start = rest
    name_start = at + _CENTRAL.size
    extra_start = name_start + name_nbytes
    stop = extra_start + extra_nbytes + comment_nbytes
    if signature != b"PK\1\2" or stop > len(directory):
        raise CorruptError("the directory is damaged")
    raw_name = directory[name_start:extra_start]
    _require_name(raw_name)
    _require_plain(raw_name, flags, method, disk)
    words = list(_wide_words(directory[extra_start : extra_start + extra_nbytes]))
    numbers = []
    for number in (nbytes, stored_nbytes, header_start):
        if number == ALL_ONES and not words:
            raise CorruptError(f"{raw_name.decode()!r} refers to a 64-bit number that is not there")
        numbers.append(words.pop(0) if number == ALL_ONES else number)
    nbytes, stored_nbytes, header_start = numbers
    if words or nbytes != stored_nbytes:
        raise CorruptError(f"{raw_name.decode()!r} is stored, yet has two sizes or two places")
    return _Entry(raw_name, flags, crc32, nbytes, header_start), stop


def _require_name(raw_name: bytes) -> None:
    try:
        name = raw_name.decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"the name {raw_name!r} is no UTF-8") from error
    if not name or "\0" in name:
        raise CorruptError(f"{name!r} is no name")


def _require_plain(raw_name: bytes, flags: int, method: int, disk: int) -> None:
    if flags & _IS_ENCRYPTED:
        raise UnsupportedError(f"{raw_name.decode()!r} is encrypted")
    if method:
        raise UnsupportedError(
            f"{raw_name.decode()!r} is compressed (method {method}), which torch.save never does",
            remedy="save the state dict with torch.save; a TorchScript archive is no checkpoint",
        )
    if disk or flags & ~(_HAS_DESCRIPTOR | _IS_UTF8):
        raise UnsupportedError(f"{raw_name.decode()!r} has flags 0x{flags:04x} on disk {disk}")


def _wide_words(extra: bytes) -> tuple[int, ...]:
    """64-bit numbers of an extra field."""
    words: tuple[int, ...] | None = None
    at = 0
    while at < len(extra):
        if at + _EXTRA.size > len(extra):
            raise CorruptError("an extra field is cut off")
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size + nbytes
        if at > len(extra):
            raise CorruptError("an extra field is cut off")
        if kind == _WIDE_EXTRA:
            if words is not None or nbytes % 8:
                raise CorruptError("the 64-bit numbers are given twice, or in part")
            words = struct.unpack(f"<{nbytes // 8}Q", extra[at - nbytes : at])
    return words or ()


def _record(file: RangeFile, entry: _Entry, directory_start: int) -> ZipRecord:
    """Read the header before a record, and check that the directory says the same."""
    room = directory_start - entry.header_start
    wanted = _LOCAL.size + len(entry.raw_name) + _READ_AHEAD_NBYTES
    header = file.read(entry.header_start, max(0, min(room, wanted)))
    if len(header) < _LOCAL.size or not header.startswith(b"PK\3\4"):
        raise CorruptError(f"no header stands at byte {entry.header_start}")
    fields = _LOCAL.unpack_from(header)
    _, _, flags, method, _, _, crc32, stored_nbytes, nbytes, name_nbytes, extra_nbytes = fields
    header_nbytes = _LOCAL.size + name_nbytes + extra_nbytes
    if header_nbytes + entry.nbytes > room:
        raise CorruptError(
            f"{entry.nbytes} bytes of content do not fit between byte "
            f"{entry.header_start + header_nbytes} and the directory at byte {directory_start}"
        )
    if header_nbytes > len(header):
        header = file.read(entry.header_start, header_nbytes)
    raw_name = header[_LOCAL.size : _LOCAL.size + name_nbytes]
    if (flags, method, raw_name) != (entry.flags, 0, entry.raw_name):
        raise CorruptError(
            f"the header calls it {raw_name!r} with flags 0x{flags:04x} and method {method}"
        )
    words = _wide_words(header[_LOCAL.size + name_nbytes : header_nbytes])
    _require_sizes(entry, crc32, (nbytes, stored_nbytes), words)
    start = entry.header_start + header_nbytes
    return ZipRecord(entry.name, start, entry.nbytes, entry.crc32)


def _require_sizes(
    entry: _Entry, crc32: int, sizes: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Check the numbers of a header. Those that a descriptor gives after the content may be 0."""
    left_out = {0} if entry.flags & _HAS_DESCRIPTOR else set()
    # Torch repeats the place of the header here, which other writers leave out, and has 0 for how
    # much is stored: it does not know yet.
    is_wide_right = {*words} <= left_out | {entry.nbytes, entry.header_start}
    wide = sizes.count(ALL_ONES)
    if (
        crc32 not in left_out | {entry.crc32}
        or not is_wide_right
        or (wide and words[:wide] != (entry.nbytes,) * wide)
        or not {*sizes} <= left_out | {entry.nbytes, ALL_ONES}
    ):
        raise CorruptError(
            f"the header gives sizes {sizes} {words} and checksum {crc32}, "
            f"the directory {entry.nbytes} and {entry.crc32}"
        )


def _sum_after(file: RangeFile, entry: _Entry, record: ZipRecord, follower: int) -> int:
    """Check what stands between the content of a record and what follows it.

    Returns:
        The checksum of the content that is stated there, or that of the directory.
    """
    end = record.start_nbytes + record.nbytes
    if follower < end:
        raise CorruptError(
            f"{record.nbytes} bytes of content at byte {record.start_nbytes} overlap what starts "
            f"at byte {follower}"
        )
    if not entry.flags & _HAS_DESCRIPTOR:
        if follower != end:
            raise CorruptError(f"{follower - end} bytes at byte {end} belong to no record")
        return entry.crc32
    form = {d.size: d for d in (_DESCRIPTOR, _WIDE_DESCRIPTOR)}.get(follower - end)
    if form is None:
        raise CorruptError(f"{follower - end} bytes at byte {end} are no descriptor")
    crc32: int
    signature, crc32, *sizes = form.unpack(file.read(end, form.size))
    if signature != b"PK\7\10" or sizes != [entry.nbytes, entry.nbytes]:
        raise CorruptError(
            f"the descriptor after it gives sizes {tuple(sizes)} and checksum {crc32}, "
            f"the directory {entry.nbytes} and {entry.crc32}"
        )
    return crc32


def _written_twice(file: RangeFile, record: ZipRecord, other_crc32: int) -> ZipRecord:
    """Accept a record with two checksums that is what one of two processes wrote.

    Of ranks that hold the same experts DeepSpeed 0.19.8 lets several write one file at one time,
    where experts are folded into tensor parallelism (`runtime/engine.py`,
    `autoep_expert_writer`); what they write differs in a number. Every some ten saves of small
    experts leave such a file, and torch, which looks at no checksum, loads it.
    """
    stated = f"the descriptor after it gives checksum {other_crc32}, the directory {record.crc32}"
    if record.nbytes > _LONGEST_READ_NBYTES:
        raise CorruptError(f"{stated}: two processes wrote the file at one time")
    crc32 = zlib.crc32(file.read(record.start_nbytes, record.nbytes))
    if crc32 not in {record.crc32, other_crc32}:
        raise CorruptError(f"{stated}, and the content has {crc32}")
    return replace(record, crc32=crc32, is_written_twice=True)


def _require_sums(file: RangeFile, records: Iterable[ZipRecord]) -> None:
    """Refuse a short record whose two accounts one process left, and its content another.

    Elsewhere no checksum is looked at. In a file that two processes wrote at one time, it is all
    that tells whose a record is.
    """
    for record in records:
        if record.is_written_twice or record.nbytes > _LONGEST_READ_NBYTES:
            continue
        crc32 = zlib.crc32(file.read(record.start_nbytes, record.nbytes))
        if crc32 != record.crc32:
            raise CorruptError(
                f"the content has checksum {crc32}, the file states {record.crc32}: two processes "
                "wrote the file at one time",
                where=f"record {record.name!r}",
            )
