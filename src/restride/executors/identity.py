"""What makes two conversions the same: sources, options, and every byte that is planned."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError
from restride.executors.option_words import as_kept, changed_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.output import Output
    from restride.executors.sources import CatalogReader
    from restride.planning.plan import Plan
    from restride.storage.journal import Record

__all__ = ["describe_job", "differs_from", "job_digest", "options_of", "package_version"]

_MOST_SHOWN: Final = 60
_PIECES: Final = 4
_PIECE_NBYTES: Final = 4096


def describe_job(
    catalog: Catalog,
    reader: CatalogReader,
    output: Output,
    plan: Plan,
    options: Mapping[str, object],
) -> Record:
    """The first record of a journal.

    A source file is known by its name, its size, the time of its last change, and a few pieces of
    it: not every tool that puts files in place sets a time. What the headers said is part of the
    output and the plan.

    Args:
        catalog: What is read.
        reader: Its files.
        output: The files to write, with all that is fixed in them.
        plan: What moves.
        options: What the user chose, as JSON values.

    Raises:
        ExecutionError: A source file is not there, or cannot be read.

    Cost:
        Four small reads of each source file.
    """
    return {
        "format": "restride-journal/2",
        "what": f"conversion of {catalog.root}",
        "nbytes": plan.total_nbytes,
        "version": package_version(),
        "options": json.loads(json.dumps(as_kept(options), default=str)),
        "source": {
            file.name: [*_stamp(catalog.root, file.name), _sample(reader, number, file.nbytes)]
            for number, file in enumerate(catalog.files)
        },
        "output": _digest_of(output, plan),
    }


def differs_from(ours: Record, theirs: Record) -> str:
    """Say how another job is not this one, in a few words; empty if both are the same.

    Examples:
        >>> differs_from({"options": {"to": "universal"}}, {"options": {"to": "safetensors"}})
        'it was started with --to safetensors, not universal, and goes on only so'
    """
    for key, words in (("format", "the format of the journal"), ("version", "the version")):
        if ours.get(key) != theirs.get(key):
            return f"{words} was {theirs.get(key)!s:.{_MOST_SHOWN}} and is {ours.get(key)}"
    for change in changed_options(options_of(ours), options_of(theirs)):
        return f"it was started {change}, and goes on only so"
    files = _mapping(ours, "source"), _mapping(theirs, "source")
    for name in {**files[0], **files[1]}:
        now, then = (side.get(name) for side in files)
        if now != then:
            return f"source file {name} {_change(then, now)}"
    if ours.get("output") != theirs.get("output"):
        return "the files to write are not the same"
    return ""


def job_digest(first: Record) -> str:
    """32 digits for the first record of a journal, by whatever path the source was named."""
    meant = {key: value for key, value in first.items() if key != "what"}
    content = json.dumps(meant, sort_keys=True).encode()
    return blake2b(content, digest_size=16).hexdigest()


def package_version() -> str:
    """Version of this package."""
    # Not an import: the package knows of every module, and no module of the package.
    return str(import_module("restride").__version__)


def options_of(first: Record) -> dict[str, object]:
    """What a user chose, as the first record of a journal has it."""
    return _mapping(first, "options")


def _mapping(record: Record, key: str) -> dict[str, object]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _change(then: object, now: object) -> str:
    match then, now:
        case None, _:
            return "was not there"
        case _, None:
            return "is not there any more"
        case [int(before), *_], [int(after), *_] if before != after:
            return f"had {before:,} bytes and has {after:,}"
        case [*then_stamp, _], [*now_stamp, _] if then_stamp == now_stamp:
            return "has other bytes, with the same time of change"
    return "was written to since then"


def _stamp(root: str, name: str) -> list[int]:
    path = os.path.join(root, name)  # noqa: PTH118
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise ExecutionError(f"cannot be looked at ({error.strerror})", where=path) from error
    return [status.st_size, status.st_mtime_ns]


def _sample(reader: CatalogReader, number: int, nbytes: int) -> str:
    """Digest of some pieces of a file, evenly spread, the first and the last bytes among them."""
    piece = bytearray(min(_PIECE_NBYTES, nbytes))
    digest = blake2b(digest_size=16)
    for place in range(_PIECES):
        start = place * (nbytes - len(piece)) // (_PIECES - 1)
        reader.read_into(number, start, memoryview(piece))
        digest.update(piece)
    return digest.hexdigest()


def _digest_of(output: Output, plan: Plan) -> str:
    """Identity of everything that will be written, but for the bytes of the tensors."""
    digest = blake2b(digest_size=16)
    for line in _lines(output, plan):
        digest.update(line)
        digest.update(b"\0")
    return digest.hexdigest()


def _lines(output: Output, plan: Plan) -> Iterator[bytes]:
    for file in output.files:
        yield repr((file.name, file.nbytes, file.label, file.label_places)).encode()
        for start, literal in file.literals:
            yield repr((start, len(literal))).encode()
            yield literal
    texts: dict[int, list[tuple[str, int, str]]] = {}
    for region in plan.regions:
        known = texts.get(id(region.pattern))
        if known is None:
            known = [
                (f"({fill.agreeing}, {at.rank}, ", at.rank, f", {at.walks!r} * {fill.scale})")
                for fill in region.fills
                for at in fill.sources
            ]
            texts[id(region.pattern)] = known
        fills = [
            f"{before}{place.file}, {place.start_nbytes}{behind}"
            for before, rank, behind in known
            for place in (region.place(rank),)
        ]
        head = (
            *(region.tensor, region.state, region.target_rank, region.target_file),
            *(region.target_start_nbytes, region.numel, region.replicas),
            *(region.source_dtype.name, region.target_dtype.name),
        )
        yield f"{repr(head)[:-1]}, [{', '.join(fills)}])".encode()
