"""The end of a zip file: where its directory is, in both of the forms that say so."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, FormatError, UnsupportedError

if TYPE_CHECKING:
    from restride.storage.ranges import RangeFile

__all__ = ["ALL_ONES", "find_directory"]

# A 32-bit field with this value says that the real one is in a 64-bit field elsewhere.
ALL_ONES: Final = 0xFFFFFFFF
_ALL_ONES_16: Final = 0xFFFF
# A record, or the end of a file without any.
_STARTS: Final = frozenset({b"PK\3\4", b"PK\5\6", b"PK\6\6"})
_END: Final = struct.Struct("<4s4H2LH")
_LOCATOR: Final = struct.Struct("<4sLQL")
_WIDE_END: Final = struct.Struct("<4sQ2H2L4Q")
# The record counts neither its signature nor this number itself.
_WIDE_END_STATED_NBYTES: Final = _WIDE_END.size - 12


def find_directory(file: RangeFile) -> tuple[int, int, int]:
    """Find the central directory.

    Returns:
        The number of its entries, its first byte, and its end.

    Raises:
        FormatError: The file is no zip file.
        CorruptError: The file is cut off, something follows its end, or the two ends disagree.
        UnsupportedError: The file is one of several that belong together.
    """
    if file.read(0, min(4, file.nbytes)) not in _STARTS:
        raise FormatError("is not a zip file")
    end_start = max(0, file.nbytes - _END.size)
    end = file.read(end_start, file.nbytes - end_start).ljust(_END.size, b"\0")
    signature, *disks, here, count, nbytes, start, comment_nbytes = _END.unpack(end)
    if signature != b"PK\5\6" or comment_nbytes:
        raise CorruptError(
            f"the file of {file.nbytes} bytes does not end with a zip directory: it was cut off, "
            "or something was added to it"
        )
    narrow = (here, count, nbytes, start)
    wide_start, numbers = _wide_end(file, end_start)
    if numbers is None:
        numbers = narrow
        if _ALL_ONES_16 in narrow[:2] or ALL_ONES in narrow[2:]:
            raise CorruptError("the zip directory refers to a 64-bit one, which is not there")
    limits = (_ALL_ONES_16, _ALL_ONES_16, ALL_ONES, ALL_ONES)
    for value, number, all_ones in zip(narrow, numbers, limits, strict=True):
        if value not in {number, all_ones}:
            raise CorruptError(f"the zip directory is described by {value} and by {number}")
    here, count, nbytes, start = numbers
    if any(disks) or here != count:
        raise UnsupportedError("the zip file is one part of several")
    if start + nbytes != wide_start:
        raise CorruptError(
            f"the zip directory of {nbytes} bytes at byte {start} does not end at byte {wide_start}"
        )
    return count, start, wide_start


def _wide_end(file: RangeFile, end_start: int) -> tuple[int, tuple[int, ...] | None]:
    """Where the end records start, and the numbers of the 64-bit one, if there is one."""
    locator_start = end_start - _LOCATOR.size
    wide_start = locator_start - _WIDE_END.size
    if wide_start < 0:
        return end_start, None
    signature, disk, stated_start, disk_count = _LOCATOR.unpack(
        file.read(locator_start, _LOCATOR.size)
    )
    if signature != b"PK\6\7":
        return end_start, None
    signature, stated_nbytes, _, _, *disks_and_numbers = _WIDE_END.unpack(
        file.read(wide_start, _WIDE_END.size)
    )
    if (
        signature != b"PK\6\6"
        or stated_start != wide_start
        or stated_nbytes != _WIDE_END_STATED_NBYTES
    ):
        raise CorruptError(
            f"the 64-bit end of the zip directory is not at byte {stated_start} "
            f"with {stated_nbytes} bytes"
        )
    if disk or disk_count != 1 or any(disks_and_numbers[:2]):
        raise UnsupportedError("the zip file is one part of several")
    return wide_start, tuple(disks_and_numbers[2:])
