"""Torch files whose container or tensors lie; see `restride.testing.hostile`."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from restride.testing.hostile import Hostile
from restride.testing.opcodes import (
    call,
    dictionary,
    integer,
    listed,
    name,
    storage,
    stream,
    tensor,
    text,
    tuple_of,
)
from restride.testing.torch_files import Record, torch_file, torch_records, zip_file

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hostile_torch_files", "valid_torch_file"]

_FLOATS: Final = struct.pack("<6f", *range(6))
_VALUE: Final = dictionary(
    (text("weight"), tensor(storage("0", 6), (2, 3), (3, 1))),
    (text("step"), integer(7)),
)
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


def valid_torch_file() -> bytes:
    """A small torch file with one tensor of two rows, from which the others are made."""
    return torch_file(stream(_VALUE), {"0": _FLOATS})


def hostile_torch_files() -> tuple[Hostile, ...]:
    """Torch files that must be refused."""
    return (*_other_files(), *_cut(), *_records(), *_ends(), *_contents(), *_tensors())


def _other_files() -> Iterator[Hostile]:
    """Files that are something else."""
    yield Hostile("empty_file", b"", "is empty: a save that was interrupted")
    yield Hostile("text_file", b"#!/bin/sh\n", "is not a file of torch.save")
    yield Hostile("bare_pickle", stream(_VALUE), "bare pickle")
    yield Hostile("legacy", _LEGACY + bytes(600), "torch before 1.6")
    yield Hostile("tar", bytes(257) + b"ustar" + bytes(300), "torch before 1.6")
    yield Hostile("empty_zip", zip_file([]), "without data.pkl")
    yield Hostile("other_zip", zip_file([Record("archive/a.txt", b"a")]), "without data.pkl")


def _cut() -> Iterator[Hostile]:
    """A valid file that was cut off, or that something was added to."""
    content = valid_torch_file()
    for kept in (4, 21, 30, 600, len(content) - 22, len(content) - 1):
        yield Hostile(f"cut_at_{kept}", content[:kept], "")
    yield Hostile("something_after", content + b"\0", "does not end with a zip directory")
    yield Hostile("something_before", b"PK\3\4" + content, "")
    yield Hostile("hole", content[:-400] + bytes(64) + content[-400:], "")


def _records() -> Iterator[Hostile]:
    """Records that are described in two ways, overlap, or are hidden."""
    right = torch_records(stream(_VALUE), {"0": _FLOATS})

    def lying(number: int = 4, **lies: Any) -> bytes:
        return zip_file([*right[:number], replace(right[number], **lies), *right[number + 1 :]])

    later = right[5]
    yield Hostile("compressed", lying(method=8, central={"method": 8}), "is compressed (method 8)")
    yield Hostile("compressed_in_secret", lying(header={"method": 8}), "the header calls it")
    yield Hostile("encrypted", lying(flags=0x0809), "is encrypted")
    yield Hostile("strongly_encrypted", lying(flags=0x0848), "is encrypted")
    yield Hostile("masked", lying(flags=0x2808), "is encrypted")
    yield Hostile("patched", lying(flags=0x0828), "has flags 0x0828")
    yield Hostile("on_another_disk", lying(central={"disk": 1}), "on disk 1")
    yield Hostile("two_of_a_name", zip_file([*right, right[4]]), "two records have the name")
    yield Hostile("another_name_before", lying(header={"name": b"archive/data/9"}), "calls it")
    yield Hostile("no_utf8", lying(central={"name": b"archive/data/\xff"}), "is no UTF-8")
    yield Hostile("no_name", lying(central={"name": b""}), "is no name")
    yield Hostile("zero_in_name", lying(central={"name": b"archive/\0"}), "is no name")
    yield Hostile("no_header", lying(header={"signature": b"PK\0\0"}), "no header stands")
    yield Hostile("no_entry", lying(central={"signature": b"PK\0\0"}), "directory is damaged")
    yield Hostile("same_place", lying(central={"start": 0}), "")
    yield Hostile("place_beyond_the_end", lying(central={"start": 1 << 30}), "")
    yield Hostile("place_in_another", lying(central={"start": 70}), "")
    yield Hostile("one_byte_more", lying(central={"nbytes": 25, "stored": 25}), "")
    yield Hostile("one_byte_less", lying(central={"nbytes": 23, "stored": 23}), "")
    yield Hostile("reaches_into_the_next", lying(central={"nbytes": 99, "stored": 99}), "overlap")
    yield Hostile("longer_than_the_file", lying(central={"nbytes": 1 << 31, "stored": 1 << 31}), "")
    yield Hostile("two_sizes", lying(central={"nbytes": 25}), "two sizes")
    yield Hostile("another_size_before", lying(header={"nbytes": 25}), "the header gives sizes")
    yield Hostile("another_checksum_before", lying(header={"crc32": 1}), "the header gives sizes")
    yield Hostile("no_descriptor", lying(descriptor=b""), "are no descriptor")
    yield Hostile("wrong_descriptor", lying(descriptor=b"PK\7\10" + bytes(12)), "the descriptor")
    yield Hostile(
        "neither_sum", lying(central={"crc32": 1}, descriptor=_descriptor(2)), "the content has"
    )
    yield Hostile("odd_descriptor", lying(descriptor=bytes(20)), "are no descriptor")
    yield Hostile("bytes_of_nobody", lying(flags=0x0800, descriptor=bytes(8)), "to no record")
    yield Hostile("no_wide_size", lying(central={"nbytes": 0xFFFFFFFF}), "is not there")
    yield Hostile("wide_size_too_many", lying(central={"extra": _wide(24)}), "two sizes")
    yield Hostile("wide_size_before", lying(header={"extra": _wide(1 << 40)}), "header gives sizes")
    yield Hostile("wide_sizes_twice", lying(central={"extra": _wide(24) * 2}), "given twice")
    yield Hostile("cut_wide_size", lying(central={"extra": _wide(24)[:-1]}), "cut off")
    yield Hostile("cut_extra", lying(central={"extra": b"FB"}), "cut off")
    yield Hostile("part_of_wide_size", lying(central={"extra": b"\1\0\4\0abcd"}), "in part")
    yield Hostile("two_folders", zip_file([*right, replace(later, name="b/c")]), "2 top folders")


def _ends() -> Iterator[Hostile]:
    """Directories that are not where, or not what, the end says."""
    right = torch_records(stream(_VALUE), {"0": _FLOATS})
    for lies, says in (
        ({"count": 6, "wide_count": 6}, "bytes follow 6 records"),
        ({"count": 8, "wide_count": 8}, "ends inside of it"),
        ({"count": 60_000, "wide_count": 60_000}, "of 60000 records"),
        ({"wide_count": 1 << 60}, "described by"),
        ({"count": 0xFFFF, "wide_count": 1 << 60}, "records has"),
        ({"wide_start": 0}, "described by"),
        ({"start": 0xFFFFFFFF, "wide_start": 1 << 60}, "does not end at byte"),
        ({"start": 0, "wide_start": 0}, "does not end at byte"),
        ({"nbytes": 1, "wide_nbytes": 1}, "does not end at byte"),
        ({"nbytes": 0xFFFFFFFF, "wide_nbytes": 1 << 60}, "does not end at byte"),
        ({"wide_at": 0}, "64-bit end"),
        ({"comment": 5}, "does not end with a zip directory"),
    ):
        label = "_".join(f"{key}_{value}" for key, value in lies.items())
        yield Hostile(f"end_{label}", zip_file(right, end=lies), says)
    narrow = zip_file(right, end={"start": 0xFFFFFFFF}, is_wide=False)
    yield Hostile("no_wide_end", narrow, "refers to a 64-bit one")
    content = bytearray(valid_torch_file())
    content[-18] = 1
    yield Hostile("one_of_several", bytes(content), "one part of several")


def _contents() -> Iterator[Hostile]:
    """Records that torch does not write, or not this way."""
    right = torch_records(stream(_VALUE), {"0": _FLOATS})
    for label, changed, content, says in (
        ("big_endian", "byteorder", b"big", "big-endian"),
        ("no_byte_order", "byteorder", b"middle", "byte order is b'middle'"),
        ("long_byte_order", "byteorder", b"little" * 20, "has 120 bytes"),
        ("newer_version", "version", b"11\n", "has version 11"),
        ("no_version_number", "version", b"abc", "the version is b'abc'"),
    ):
        records = [
            replace(record, content=content) if record.name.endswith(changed) else record
            for record in right
        ]
        yield Hostile(label, zip_file(records), says)
    yield Hostile("without_version", zip_file(right[:5]), "without a version")
    script = [*right, Record("archive/constants.pkl", b"N.")]
    yield Hostile("torch_script", zip_file(script), "TorchScript")


def _tensors() -> Iterator[Hostile]:
    """Tensors that reach out of their storage, or are none."""
    place = storage("0", 6)
    rebuild = "torch._utils._rebuild_tensor_v2"
    for label, value, says in (
        ("no_record", tensor(storage("1", 6), (2,), (1,)), "has no record"),
        ("path_as_key", tensor(storage("../../etc/passwd", 6), (2,), (1,)), "has no record"),
        ("longer_storage", tensor(storage("0", 7), (7,), (1,)), "has 7 elements of float32"),
        ("shorter_storage", tensor(storage("0", 5), (5,), (1,)), "has 5 elements of float32"),
        ("negative_storage", tensor(storage("0", -6), (5,), (1,)), "-6 elements"),
        ("unknown_type", tensor(storage("0", 6, "torch.EvilStorage"), (2,), (1,)), "not known"),
        ("foreign_type", tensor(storage("0", 6, "os.FloatStorage"), (2,), (1,)), "not known"),
        (
            "two_types",
            listed(place, storage("0", 6, "torch.IntStorage")),
            "is read as float32 and as int32",
        ),
        ("no_storage", tuple_of(text("module"), text("a")) + b"Q", "not that of a storage"),
        ("one_row_more", tensor(place, (3, 3), (3, 1)), "reaches element 8"),
        ("base_beyond", tensor(place, (1,), (1,), base=6), "reaches element 6"),
        ("wide_stride", tensor(place, (2, 3), (1 << 62, 1)), "reaches element"),
        ("huge_shape", tensor(place, (1 << 62, 4), (0, 0)), "more elements than can be counted"),
        ("huge_size", tensor(place, (1 << 70,), (1,)), "shape of a tensor has"),
        ("negative_size", tensor(place, (-1,), (1,)), "shape of a tensor has -1"),
        ("negative_stride", tensor(place, (2,), (-1,), base=5), "strides of a tensor has -1"),
        ("negative_base", tensor(place, (2,), (1,), base=-1), "has -1"),
        ("strides_left_out", tensor(place, (2, 3), (1,)), "2 sizes and 1 strides"),
        ("many_dimensions", tensor(place, (1,) * 65, (1,) * 65), "has 65 dimensions"),
        ("shape_of_texts", call(rebuild, place, b"K\0", b"Va\n\x85", b"NN", b"N"), "has 'a'"),
        ("no_arguments", call(rebuild), "make no tensor"),
        ("old_without_arguments", call("torch._utils._rebuild_tensor"), "make no tensor"),
        ("new_without_dtype", call("torch._utils._rebuild_tensor_v3", place), "make no tensor"),
        ("arguments_of_a_list", call(rebuild, *[listed()] * 6), "make no tensor"),
        ("size_of_a_text", call("torch.Size", text("ab")), "make no tensor"),
        ("size_of_texts", call("torch.Size", tuple_of(text("ab"))), "torch.Size"),
        ("conjugate", _v3("complex64", dictionary((text("conj"), b"\x88"))), "conjugate"),
        ("unknown_dtype", _v3("float99"), "dtype 'float99'"),
        ("too_wide_dtype", _v3("complex128"), "reaches element"),
    ):
        content = torch_file(stream(value), {"0": _FLOATS})
        yield Hostile(f"tensor_{label}", content, says)


def _v3(dtype: str, *metadata: bytes) -> bytes:
    return call(
        "torch._utils._rebuild_tensor_v3",
        storage("0", 24, "torch.storage.UntypedStorage"),
        integer(0),
        tuple_of(integer(2)),
        tuple_of(integer(1)),
        b"\x89",
        call("collections.OrderedDict"),
        name(f"torch.{dtype}"),
        *metadata,
    )


def _descriptor(crc32: int, nbytes: int = 24) -> bytes:
    return struct.pack("<4s3L", b"PK\7\10", crc32, nbytes, nbytes)


def _wide(*words: int) -> bytes:
    return struct.pack(f"<2H{len(words)}Q", 1, 8 * len(words), *words)
