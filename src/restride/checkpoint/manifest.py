"""The manifest of an output (`restride-manifest/2`): what its files hold, and by which digests.

It stands beside the files as ``restride.json``. Each file is cut into *parts*: a run that is fixed
(a header, an index), or one shard of one array. A part has a digest for each of its blocks, counted
from its own start; they are those of `restride.arrays.fingerprint`, so the digests of an array that
stands in one part add up to its fingerprint. The manifest has a digest of itself, so that one that
was edited is told from files that were.
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import field

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from restride.checkpoint.fingerprints import Fingerprints

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "Manifest",
    "ManifestFile",
    "ManifestPart",
    "compact_json",
    "manifest_to_json",
    "spell_file",
    "spell_manifest",
]

MANIFEST_NAME: Final = "restride.json"

FORMAT: Final = "restride-manifest/2"

_SPELLED_NBYTES: Final = 1 << 18

compact_json: Final = json.JSONEncoder(separators=(",", ":")).encode
"""JSON without white space, as the digest of a manifest is taken of it."""


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

    head = compact_json(
        {
            "format": FORMAT,
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
    spelled = cache(compact_json)
    comma = ""
    for name, file in manifest.files.items():
        key, value = compact_json(name), spell_file(file, spelled)
        digest.update(f"{comma}{key}:{value}".encode())
        content += f"{comma}\n  {key}: ".encode() + indented(value, 2)
        comma = ","
        if len(content) > _SPELLED_NBYTES:
            yield content
            content = bytearray()
    tensors = compact_json({name: dict(states) for name, states in manifest.tensors.items()})
    digest.update(f'}},"tensors":{tensors}}}'.encode())
    content += b'\n },\n "tensors": ' if comma else b'},\n "tensors": '
    content += indented(tensors, 1) + f',\n "digest": "{digest.hexdigest()}"\n}}\n'.encode()
    yield content


def spell_file(file: ManifestFile, spelled: Callable[[str], str]) -> str:
    """What a manifest says of a file, without white space.

    Args:
        file: The file.
        spelled: Writes a text as JSON; names of tensors come again and again.
    """
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
