"""Zip files as torch writes them, built by hand so that every field can lie.

Independent of the reader: it shares no code and no table with it.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO, Final

from msgspec import field

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Record", "torch_file", "torch_records", "write_zip", "zip_file"]

_ALL_ONES: Final = 0xFFFFFFFF
_ALIGNMENT: Final = 64


class Record(Frozen):
    """One record, and the lies that are told about it.

    Attributes:
        name: Its name.
        content: What it holds.
        hole_nbytes: So many zeros follow `content`; a file has a hole there.
        flags: Flags; torch says that a descriptor follows, and that names are UTF-8.
        method: Compression method.
        header: Fields of the header before it that are not what they should be: ``signature``,
            ``name``, ``flags``, ``method``, ``crc32``, ``stored``, ``nbytes``, ``extra``.
        central: The same for the directory; also ``start``, ``disk``.
        descriptor: What follows the content instead of the right descriptor.
    """

    name: str
    content: bytes = b""
    hole_nbytes: int = 0
    flags: int = 0x0808
    method: int = 0
    header: Mapping[str, object] = field(default_factory=dict)
    central: Mapping[str, object] = field(default_factory=dict)
    descriptor: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Length of the content with the hole."""
        return len(self.content) + self.hole_nbytes

    @property
    def crc32(self) -> int:
        """Checksum; 0 where there is a hole, since nobody waits for 4 GiB of zeros."""
        return 0 if self.hole_nbytes else zlib.crc32(self.content)


def torch_records(
    pickle: bytes, storages: Mapping[str, bytes] | None = None, *, top: str = "archive"
) -> list[Record]:
    """The records of a torch file, in the order in which torch writes them."""
    contents = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        **{f"data/{key}": content for key, content in (storages or {}).items()},
        "version": b"3\n",
        ".data/serialization_id": b"0" * 40,
    }
    return [Record(f"{top}/{name}", content) for name, content in contents.items()]


def torch_file(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    """A torch file around a pickle and its storages."""
    return zip_file(torch_records(pickle, storages))


def zip_file(
    records: Sequence[Record], *, end: Mapping[str, int] | None = None, is_wide: bool = True
) -> bytes:
    """A zip file in memory; see `write_zip`."""
    file = io.BytesIO()
    write_zip(file, records, end=end, is_wide=is_wide)
    return file.getvalue()


def write_zip(
    file: BinaryIO,
    records: Sequence[Record],
    *,
    end: Mapping[str, int] | None = None,
    is_wide: bool = True,
) -> None:
    """Write a zip file.

    Args:
        file: Where to; it must be empty.
        records: The records.
        end: Fields of the end that are not what they should be: ``count``, ``nbytes``, ``start``,
            ``comment``, and with ``wide_`` in front those of the 64-bit end; ``wide_at`` for where
            that stands.
        is_wide: Whether there is a 64-bit end, as torch writes it.
    """
    directory = [_write_record(file, record) for record in records]
    start = file.tell()
    file.write(b"".join(directory))
    _write_end(file, start, len(records), dict(end or {}), is_wide=is_wide)


def _write_record(file: BinaryIO, record: Record) -> bytes:
    """Write header, content and descriptor; return the entry of the directory."""
    start = file.tell()
    has_descriptor = bool(record.flags & 8)
    right = {
        "signature": b"PK\3\4",
        "flags": record.flags,
        "method": record.method,
        "crc32": 0 if has_descriptor else record.crc32,
        "stored": 0 if has_descriptor else record.nbytes,
        "nbytes": 0 if has_descriptor else record.nbytes,
        "name": record.name.encode(),
    }
    wide = [n for n in (record.nbytes, record.nbytes, start) if n >= _ALL_ONES]
    # As torch has it, which does not know yet how much it will store.
    stored = 0 if has_descriptor else record.nbytes
    early = (record.nbytes, record.nbytes), (stored, record.nbytes), (start, start)
    extra = _wide_extra([n for n, size in early if size >= _ALL_ONES])
    right["extra"] = _padding(file.tell() + 30 + len(record.name.encode()), extra)
    header = {**right, **record.header}
    file.write(
        struct.pack(
            "<4s5H3L2H",
            *(header["signature"], 0, header["flags"], header["method"], 0, 0),
            *(header["crc32"], header["stored"], header["nbytes"]),
            *(len(_as_bytes(header["name"])), len(_as_bytes(header["extra"]))),
        )
    )
    file.write(_as_bytes(header["name"]) + _as_bytes(header["extra"]) + record.content)
    file.seek(record.hole_nbytes, io.SEEK_CUR)
    if record.descriptor is not None:
        file.write(record.descriptor)
    elif has_descriptor:
        form = "<4sL2Q" if wide else "<4s3L"
        file.write(struct.pack(form, b"PK\7\10", record.crc32, record.nbytes, record.nbytes))
    return _entry(record, start, wide)


def _entry(record: Record, start: int, wide: list[int]) -> bytes:
    right = {
        "signature": b"PK\1\2",
        "flags": record.flags,
        "method": record.method,
        "crc32": record.crc32,
        "stored": min(record.nbytes, _ALL_ONES),
        "nbytes": min(record.nbytes, _ALL_ONES),
        "name": record.name.encode(),
        "extra": _wide_extra(wide),
        "disk": 0,
        "start": min(start, _ALL_ONES),
    }
    entry = {**right, **record.central}
    name, extra = _as_bytes(entry["name"]), _as_bytes(entry["extra"])
    return (
        struct.pack(
            "<4s6H3L5H2L",
            *(entry["signature"], 0, 0, entry["flags"], entry["method"], 0, 0),
            *(entry["crc32"], entry["stored"], entry["nbytes"]),
            *(len(name), len(extra), 0, entry["disk"], 0, 0, entry["start"]),
        )
        + name
        + extra
    )


def _write_end(
    file: BinaryIO, start: int, count: int, lies: dict[str, int], *, is_wide: bool
) -> None:
    stop = file.tell()
    right = {"count": count, "nbytes": stop - start, "start": start}
    if is_wide:
        wide = {**right, **{k.removeprefix("wide_"): v for k, v in lies.items() if "wide_" in k}}
        numbers = (wide["count"], wide["count"], wide["nbytes"], wide["start"])
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 45, 0, 0, *numbers))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, wide.get("at", stop), 1))
    narrow = {**{k: min(v, _ALL_ONES) for k, v in right.items()}, **lies}
    numbers = (narrow["count"], narrow["count"], narrow["nbytes"], narrow["start"])
    file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *numbers, narrow.get("comment", 0)))


def _wide_extra(words: Sequence[int]) -> bytes:
    return struct.pack(f"<2H{len(words)}Q", 1, 8 * len(words), *words) if words else b""


def _padding(content_start: int, extra: bytes) -> bytes:
    """Torch aligns storages with an extra field of its own."""
    left = -(content_start + len(extra) + 4) % _ALIGNMENT
    return extra + struct.pack("<2s1H", b"FB", left) + b"Z" * left


def _as_bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value
