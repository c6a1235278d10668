"""The manifest of an output (`restride-manifest/2`): what its files hold, and by which digests.

It stands beside the files as ``restride.json``. Each file is cut into *parts*: a run that is fixed
(a header, an index), or one shard of one array. A part has a digest for each of its blocks, counted
from its own start; they are those of `restride.arrays.fingerprint`, so the digests of an array that
stands in one part add up to its fingerprint. The manifest has a digest of itself, so that one that
was edited is told from files that were.
"""

from __future__ import annotations

import json
import re
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import field

from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.frozen import Frozen
from restride.strict_json import LARGEST_LIST_NBYTES, kind_of, member_of, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from _typeshed import ReadableBuffer

    from restride.checkpoint.fingerprints import Fingerprints

__all__ = [
    "MANIFEST_NAME",
    "Manifest",
    "ManifestFile",
    "ManifestPart",
    "manifest_from_json",
    "manifest_to_json",
    "spell_manifest",
    "written_nbytes_from_json",
]

MANIFEST_NAME: Final = "restride.json"

_FORMAT: Final = "restride-manifest/2"
_FAMILY: Final = re.compile(r"restride-manifest/\d+")
_SPELLED_NBYTES: Final = 1 << 18
_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_EDITED: Final = "it is not as it was written: its digest is of another content"


class ManifestPart(Frozen):
    """A run of bytes of a file.

    Attributes:
        start_nbytes: First byte in the file.
        nbytes: Number of bytes.
        digests: Digest of each block, the last of which may be shorter.
        tensor: Name of the tensor of which it is a shard; empty for what is fixed.
        state: Name of the state that it was read from; empty likewise.
    """

    start_nbytes: int
    nbytes: int
    digests: tuple[int, ...]
    tensor: str = ""
    state: str = ""


class ManifestFile(Frozen):
    """One file.

    Attributes:
        nbytes: Its size.
        parts: Its parts, which follow each other without gaps.
    """

    nbytes: int
    parts: tuple[ManifestPart, ...]

    @property
    def digest(self) -> str:
        """One digest for the whole file: 32 hexadecimal digits."""
        lines = (f"{part.start_nbytes} {part.nbytes} {part.digests}" for part in self.parts)
        return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


class Manifest(Frozen):
    """What an output holds.

    Attributes:
        version: Version of the package that wrote it.
        job: Digest of what it was made of, how: the same conversion of the same files has the same.
        block_nbytes: Size of a block.
        files: Files by name.
        tensors: Fingerprints by tensor and state, of the arrays that are not cut.
        options: What a user chose, as JSON values; empty where that was not noted.
    """

    version: str
    job: str
    block_nbytes: int
    files: Mapping[str, ManifestFile]
    tensors: Fingerprints
    options: Mapping[str, object] = field(default_factory=dict)


def manifest_to_json(manifest: Manifest) -> bytes:
    """The content of the file; the same for the same output."""
    return b"".join(spell_manifest(manifest))


def spell_manifest(manifest: Manifest) -> Iterator[bytearray]:
    """Yield the content of the file, some at a time: of a thousand ranks it is hundreds of MB."""

    def indented(text: str, depth: int) -> bytes:
        # Not by Python, which takes longer to indent than to digest all files.
        lines = msgspec.json.format(text.encode(), indent=1)
        return lines.replace(b"\n", b"\n" + b" " * depth)

    head = _compact(
        {
            "format": _FORMAT,
            "version": manifest.version,
            "job": manifest.job,
            "options": dict(manifest.options),
            "block_nbytes": manifest.block_nbytes,
        }
    )
    digest = blake2b(head[:-1].encode(), digest_size=16)
    digest.update(b',"files":{')
    content = bytearray(indented(head, 0)[:-2] + b',\n "files": {')
    # File by file: values of Python take ten times the memory of the text, and a second text of all
    # of them without indents as much again.
    spelled = cache(_compact)
    comma = ""
    for name, file in manifest.files.items():
        key, value = _compact(name), _file_to_json(file, spelled)
        digest.update(f"{comma}{key}:{value}".encode())
        content += f"{comma}\n  {key}: ".encode() + indented(value, 2)
        comma = ","
        if len(content) > _SPELLED_NBYTES:
            yield content
            content = bytearray()
    tensors = _compact({name: dict(states) for name, states in manifest.tensors.items()})
    digest.update(f'}},"tensors":{tensors}}}'.encode())
    content += b'\n },\n "tensors": ' if comma else b'},\n "tensors": '
    content += indented(tensors, 1) + f',\n "digest": "{digest.hexdigest()}"\n}}\n'.encode()
    yield content


def manifest_from_json(content: bytes, *, where: str) -> Manifest:
    """Read the content of a file.

    Args:
        content: Its bytes.
        where: Name of the file, for errors.

    Raises:
        FormatError: It is no manifest.
        CorruptError: It was edited, or damaged.
        UnsupportedError: A later version wrote it.
    """
    try:
        return _parsed(parse_object(content, most_nbytes=LARGEST_LIST_NBYTES))
    except RestrideError as error:
        raise error.located(where) from error.__cause__


def written_nbytes_from_json(content: bytes, *, where: str) -> Mapping[str, int]:
    """Read the names and sizes of the files alone.

    Args:
        content: Its bytes.
        where: Name of the file, for errors.

    Raises:
        FormatError: It is no manifest.
        CorruptError: It was edited, or damaged.
        UnsupportedError: A later version wrote it.

    Cost:
        A small part of the time and memory that `manifest_from_json` takes.
    """
    try:
        return _written_nbytes(content)
    except RestrideError as error:
        raise error.located(where) from error.__cause__


class _Head(Frozen):
    """What is looked at of a manifest that is read for its sizes alone."""

    format: object = None
    digest: object = None
    files: msgspec.Raw = msgspec.Raw(b"{}")


class _Sized(Frozen):
    """The same of a file."""

    nbytes: int


def _written_nbytes(content: bytes) -> Mapping[str, int]:
    if len(content) > LARGEST_LIST_NBYTES:
        raise UnsupportedError(f"it has more than the {LARGEST_LIST_NBYTES} bytes that are read")
    try:
        compact = msgspec.json.format(content, indent=-1)
        head = msgspec.json.decode(compact, type=_Head)
        _require_format(head.format)
        # What has the digest is all but the last member, which is the digest.
        digest = blake2b(compact[: -len(f',"digest":"{head.digest}"}}')], digest_size=16)
        digest.update(b"}")
        if head.digest != digest.hexdigest():
            raise CorruptError(_EDITED)
        files = msgspec.json.decode(head.files, type=dict[str, _Sized])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"it is no manifest ({error})") from None
    return {name: file.nbytes for name, file in files.items()}


def _file_to_json(file: ManifestFile, spelled: Callable[[str], str]) -> str:
    parts = ",".join([_part_to_json(part, spelled) for part in file.parts])
    return f'{{"nbytes":{file.nbytes},"digest":"{file.digest}","parts":[{parts}]}}'


def _part_to_json(part: ManifestPart, spelled: Callable[[str], str]) -> str:
    holder = ""
    if part.tensor:
        holder = f'"tensor":{spelled(part.tensor)},"state":{spelled(part.state)},'
    blocks = ",".join([f'"{digest:032x}"' for digest in part.digests])
    return (
        f'{{"start_nbytes":{part.start_nbytes},"nbytes":{part.nbytes},{holder}"blocks":[{blocks}]}}'
    )


_compact: Final = json.JSONEncoder(separators=(",", ":")).encode


def _digest(value: Mapping[str, object]) -> str:
    return _digest_of(_compact(value).encode())


def _digest_of(content: ReadableBuffer) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _parsed(value: dict[str, object]) -> Manifest:
    _require_format(value.get("format"))
    digest = value.pop("digest", None)
    if digest != _digest(value):
        raise CorruptError(_EDITED)
    block_nbytes = _size(value.get("block_nbytes"), "$.block_nbytes")
    if not block_nbytes:
        raise CorruptError("blocks of 0 bytes", where="$.block_nbytes")
    files = {
        _path(name): _file(file, block_nbytes, member_of("$.files", name))
        for name, file in _object(value.get("files"), "$.files").items()
    }
    tensors = {
        name: {
            state: _text(digits, member_of(member_of("$.tensors", name), state))
            for state, digits in _object(states, member_of("$.tensors", name)).items()
        }
        for name, states in _object(value.get("tensors"), "$.tensors").items()
    }
    version, job = (_text(value.get(key), f"$.{key}") for key in ("version", "job"))
    options = _object(value.get("options", {}), "$.options")
    return Manifest(version, job, block_nbytes, files, tensors, options)


def _require_format(found: object) -> None:
    if found != _FORMAT:
        if isinstance(found, str) and _FAMILY.fullmatch(found):
            raise UnsupportedError(
                f"the format is {found!r}, this version reads {_FORMAT!r}", where="$.format"
            )
        raise FormatError(f"it is no manifest: those have the format {_FORMAT!r}", where="$.format")


def _path(name: str) -> str:
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise CorruptError(f"{name!r} is no path below the folder", where="$.files")
    return name


def _file(value: object, block_nbytes: int, where: str) -> ManifestFile:
    members = _object(value, where)
    nbytes = _size(members.get("nbytes"), f"{where}.nbytes")
    parts = tuple(
        _part(part, block_nbytes, f"{where}.parts[{place}]")
        for place, part in enumerate(_list(members.get("parts"), f"{where}.parts"))
    )
    end = 0
    for part in parts:
        if part.start_nbytes != end:
            raise CorruptError(f"a part starts at byte {part.start_nbytes}, not {end}", where=where)
        end += part.nbytes
    if end != nbytes:
        raise CorruptError(f"its parts end at byte {end} of {nbytes}", where=where)
    return ManifestFile(nbytes, parts)


def _part(value: object, block_nbytes: int, where: str) -> ManifestPart:
    members = _object(value, where)
    nbytes = _size(members.get("nbytes"), f"{where}.nbytes")
    blocks = _list(members.get("blocks"), f"{where}.blocks")
    if len(blocks) != -(-nbytes // block_nbytes):
        raise CorruptError(f"{len(blocks)} blocks are given for {nbytes} bytes", where=where)
    digests = [_text(block, f"{where}.blocks") for block in blocks]
    if not all(map(_DIGITS.fullmatch, digests)):
        raise CorruptError("a digest has 32 hexadecimal digits", where=where)
    start_nbytes = _size(members.get("start_nbytes"), f"{where}.start_nbytes")
    tensor, state = (_text(members.get(key, ""), f"{where}.{key}") for key in ("tensor", "state"))
    if bool(tensor) != bool(state):
        raise CorruptError("only one of tensor and state is given", where=where)
    return ManifestPart(
        start_nbytes, nbytes, tuple(int(digits, 16) for digits in digests), tensor, state
    )


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CorruptError(f"this should be an object, it is {kind_of(value)}", where=where)
    return value


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise CorruptError(f"this should be a list, it is {kind_of(value)}", where=where)
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CorruptError(f"this should be a text, it is {kind_of(value)}", where=where)
    return value


def _size(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptError("this should be a number of bytes", where=where)
    return value
