"""Read a manifest file by file: of a thousand ranks it has a GB, and as objects ten times as much.

`restride.checkpoint.manifest.spell_manifest` starts each file on a line of its own, with two
spaces, and ends it likewise. No text of JSON has a line feed in it: those lines are found without
parsing what is between them, and a text that has them elsewhere is not as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from restride.checkpoint.manifest import (
    FORMAT,
    Manifest,
    ManifestFile,
    ManifestPart,
    compact_json,
    spell_file,
)
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.frozen import Frozen
from restride.strict_json import LARGEST_LIST_NBYTES, kind_of, member_of, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = [
    "ListedFiles",
    "ManifestText",
    "OpenText",
    "manifest_of",
    "sizes_of",
]

_READ_NBYTES: Final = 1 << 20
_MOST_FORMAT_NBYTES: Final = 256
_FORMAT: Final = re.compile(rb'\s*\{\s*"format"\s*:\s*"(restride-manifest/\d+)"')
_FILES: Final = b'\n "files": {'
_FILE_ENDS: Final = b"\n  }"
_EDITED: Final = "it is not as it was written"
_OTHER_DIGEST: Final = f"{_EDITED}: its digest is of another content"


class OpenText(Protocol):
    """A manifest that is open."""

    nbytes: int

    def read(self, start_nbytes: int, nbytes: int, /) -> bytes:
        """So many bytes from there."""


class ManifestText(Protocol):
    """Where a manifest is read from, again and again: it has to be the same each time."""

    def __call__(self) -> AbstractContextManager[OpenText]:
        """Open it."""


class ListedFiles(Mapping[str, ManifestFile]):
    """The files of a manifest. Each is read when it is asked for, and not kept.

    Attributes:
        sizes: Bytes of each file, by name.
    """

    def __init__(
        self,
        text: ManifestText,
        places: Mapping[str, tuple[int, int]],
        sizes: Mapping[str, int],
        block_nbytes: int,
    ) -> None:
        self.sizes = sizes
        self._text = text
        self._places = places
        self._block_nbytes = block_nbytes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __getitem__(self, name: str) -> ManifestFile:
        """Read one file.

        Raises:
            CorruptError: It is not described as restride does.
        """
        place = self._places[name]
        with self._text() as text:
            content = text.read(*place)
        where = member_of("$.files", name)
        try:
            compact = _compact_member(content)
            (found,) = msgspec.json.decode(compact, type=dict[str, _File]).values()
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CorruptError(f"it is no file of a manifest ({error})", where=where) from None
        file = _file(found, self._block_nbytes, where)
        # A second member of one name, or another spelling of a number, may be read either way.
        key = compact_json(name)
        if f"{{{key}:{spell_file(file, cache(compact_json))}}}".encode() != compact:
            raise CorruptError(_EDITED, where=where)
        return file


def manifest_of(text: ManifestText, *, where: str) -> Manifest:
    """Read a manifest, all but what it says of each file.

    Args:
        text: Opens it.
        where: What it is, for errors.

    Returns:
        The manifest; `Manifest.files` are `ListedFiles`.

    Raises:
        FormatError: It is no manifest.
        CorruptError: It was edited, or damaged.
        UnsupportedError: Another version wrote it.

    Cost:
        One pass over its bytes, in the memory of what it says of one file.
    """
    with text() as opened:
        try:
            return _manifest(text, opened)
        except (FormatError, UnsupportedError) as error:
            raise error.located(where) from error.__cause__


def sizes_of(manifest: Manifest) -> Mapping[str, int]:
    """Bytes of each file of a manifest, which are known without reading what it says of them."""
    if isinstance(manifest.files, ListedFiles):
        return manifest.files.sizes
    return {name: file.nbytes for name, file in manifest.files.items()}


class _Part(Frozen, forbid_unknown_fields=True):
    start_nbytes: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=1)]
    blocks: list[Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]]
    tensor: str = ""
    state: str = ""


class _File(Frozen, forbid_unknown_fields=True):
    nbytes: int
    digest: str
    parts: list[_Part]


class _Sized(Frozen):
    """What is looked at of a file in passing."""

    nbytes: Annotated[int, Meta(ge=0)]


class _Window:
    """The bytes of a text from one place on, as far as they were read."""

    def __init__(self, text: OpenText) -> None:
        self._text = text
        self._content = bytearray()
        self.start_nbytes = 0

    def find(self, wanted: bytes) -> int:
        """Number of bytes from here to `wanted`; -1 where it does not come.

        Raises:
            UnsupportedError: It does not come in as much as is read at one time.
        """
        looked = 0
        while (found := self._content.find(wanted, looked)) < 0:
            looked = max(0, len(self._content) - len(wanted))
            if not self._more():
                return -1
        return found

    def take(self, nbytes: int) -> bytes:
        """The next bytes, past which it goes; fewer at the end."""
        while len(self._content) < nbytes and self._more():
            pass
        taken = bytes(self._content[:nbytes])
        del self._content[:nbytes]
        self.start_nbytes += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self._text.nbytes - self.start_nbytes)

    def _more(self) -> bool:
        end = self.start_nbytes + len(self._content)
        if len(self._content) > LARGEST_LIST_NBYTES:
            raise UnsupportedError(
                f"more than {LARGEST_LIST_NBYTES} bytes from byte {self.start_nbytes} are of one "
                "thing, which is more than is read"
            )
        more = self._text.read(end, min(_READ_NBYTES, self._text.nbytes - end))
        self._content += more
        return bool(more)


def _manifest(text: ManifestText, opened: OpenText) -> Manifest:
    _require_format(opened.read(0, min(_MOST_FORMAT_NBYTES, opened.nbytes)))
    window = _Window(opened)
    head = _members(window.take(_found(window, _FILES)).removesuffix(b",") + b"}")
    window.take(len(_FILES))
    digest = blake2b(compact_json(head)[:-1].encode() + b',"files":{', digest_size=16)
    places: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    ends = window.take(1)
    while ends in (b"\n", b",\n"):
        start_nbytes = window.start_nbytes
        content = window.take(_found(window, _FILE_ENDS) + len(_FILE_ENDS))
        name, nbytes, compact = _sized(content)
        if name in sizes:
            raise CorruptError(f"{_EDITED}: {name!r} comes twice", where="$.files")
        places[name], sizes[name] = (start_nbytes, len(content)), nbytes
        digest.update(ends[:-1] + compact[1:-1])
        ends = window.take(2)
    if ends == b"\n ":
        ends = window.take(1)
    if ends != b"}":
        raise CorruptError(_EDITED, where="$.files")
    tail = _members(b"{" + window.rest().removeprefix(b","))
    found = tail.pop("digest", None)
    digest.update(b"}," + compact_json(tail)[1:].encode())
    if found != digest.hexdigest() or tail.keys() != {"tensors"}:
        raise CorruptError(_OTHER_DIGEST)
    return _with_files(head, tail["tensors"], text, places, sizes)


def _with_files(
    head: dict[str, object],
    tensors: object,
    text: ManifestText,
    places: Mapping[str, tuple[int, int]],
    sizes: Mapping[str, int],
) -> Manifest:
    block_nbytes = head.get("block_nbytes")
    if type(block_nbytes) is not int or block_nbytes <= 0:
        raise CorruptError("this should be a number of bytes", where="$.block_nbytes")
    fingerprints = {
        name: {
            state: _text(digits, member_of(member_of("$.tensors", name), state))
            for state, digits in _object(states, member_of("$.tensors", name)).items()
        }
        for name, states in _object(tensors, "$.tensors").items()
    }
    version, job = (_text(head.get(key), f"$.{key}") for key in ("version", "job"))
    options = _object(head.get("options", {}), "$.options")
    files = ListedFiles(text, places, sizes, block_nbytes)
    return Manifest(version, job, block_nbytes, files, fingerprints, options)


def _require_format(start: bytes) -> None:
    found = _FORMAT.match(start)
    if not found:
        raise FormatError(f"it is no manifest: those start with the format {FORMAT!r}")
    if (name := found[1].decode()) != FORMAT:
        raise UnsupportedError(
            f"the format is {name!r}, this version reads {FORMAT!r}", where="$.format"
        )


def _found(window: _Window, wanted: bytes) -> int:
    found = window.find(wanted)
    if found < 0:
        start = f"from byte {window.start_nbytes} on " if window.start_nbytes else ""
        raise CorruptError(f"{_EDITED}: {start}it is cut off, or another program wrote it again")
    return found


def _members(content: bytes) -> dict[str, object]:
    try:
        return parse_object(content, most_nbytes=LARGEST_LIST_NBYTES)
    except FormatError as error:
        raise CorruptError(f"{_EDITED}: {error.problem}", where=error.where) from None


def _sized(content: bytes) -> tuple[str, int, bytes]:
    """Name and size of a file, and what is said of it without white space."""
    try:
        compact = _compact_member(content)
        ((name, file),) = msgspec.json.decode(compact, type=dict[str, _Sized]).items()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptError(f"it is no file of a manifest ({error})", where="$.files") from None
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise CorruptError(f"{name!r} is no path below the folder", where="$.files")
    return name, file.nbytes, compact


def _compact_member(content: bytes) -> bytes:
    return msgspec.json.format(b"{" + content + b"}", indent=-1)


def _file(found: _File, block_nbytes: int, where: str) -> ManifestFile:
    end = 0
    for part in found.parts:
        if part.start_nbytes != end:
            raise CorruptError(f"a part starts at byte {part.start_nbytes}, not {end}", where=where)
        end += part.nbytes
        if len(part.blocks) != -(-part.nbytes // block_nbytes):
            raise CorruptError(
                f"{len(part.blocks)} blocks are given for {part.nbytes} bytes", where=where
            )
        if bool(part.tensor) != bool(part.state):
            raise CorruptError("only one of tensor and state is given", where=where)
    if end != found.nbytes:
        raise CorruptError(f"its parts end at byte {end} of {found.nbytes}", where=where)
    parts = (
        ManifestPart(
            part.start_nbytes,
            part.nbytes,
            tuple([int(block, 16) for block in part.blocks]),
            part.tensor,
            part.state,
        )
        for part in found.parts
    )
    return ManifestFile(found.nbytes, tuple(parts))


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CorruptError(f"this should be an object, it is {kind_of(value)}", where=where)
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CorruptError(f"this should be a text, it is {kind_of(value)}", where=where)
    return value
