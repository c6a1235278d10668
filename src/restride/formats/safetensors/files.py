"""Which files make up a checkpoint: one, those of an index, or those of a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import field
from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import CorruptError, ExecutionError, FormatError
from restride.formats.safetensors.spelling import INDEX_SUFFIX, SUFFIX
from restride.frozen import Frozen
from restride.storage.ranges import RangeFile
from restride.storage.typed_json import parse_typed
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from os import PathLike

__all__ = ["MODEL_STEM", "OPTIMIZER_STEM", "FileSet", "Listing", "list_files"]

_LARGEST_INDEX_NBYTES: Final = 100_000_000
# Transformers writes five digits; published models have six of the count too, or what it takes.
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})", re.ASCII)
# Where a folder has a model, other files in it are other forms or parts of it.
MODEL_STEM: Final = "model"
OPTIMIZER_STEM: Final = "optimizer"
_OWN_STEMS: Final = frozenset({MODEL_STEM, OPTIMIZER_STEM})


class _Index(msgspec.Struct, frozen=True):
    """The index of a sharded checkpoint, as Hugging Face writes it."""

    weight_map: dict[str, str]
    metadata: dict[str, object] = {}


class FileSet(Frozen):
    """Files that belong together.

    Attributes:
        names: Names below the root, in order.
        index: Which file each tensor is in, or None where no index says so.
        index_name: Name of the index file; empty without one.
        total_nbytes: Bytes of all tensors as the index states it, if it does.
        is_of_optimizer: Whether they hold states: files that are called a model hold none, and
            those of an optimizer beside them nothing else, as `restride convert` writes them. None
            where the name says nothing.
    """

    names: tuple[str, ...]
    index: Mapping[str, str] | None = None
    index_name: str = ""
    total_nbytes: object = None
    is_of_optimizer: bool | None = None


class Listing(Frozen):
    """What is to be read.

    Attributes:
        root: Folder that the names are relative to.
        sets: Sets of files.
        stems: What the names of each start with; empty where a file was named, and not its folder.
        findings: What was left out.
    """

    root: Path
    sets: tuple[FileSet, ...]
    stems: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)


def list_files(path: str | PathLike[str]) -> Listing:
    """Find the files of a checkpoint.

    Raises:
        FormatError: There is none, or it is not clear which ones are meant.
        CorruptError: An index is damaged, or files that it names are not there.
        ExecutionError: The system cannot read the folder.
    """
    place = Path(path)
    if not place.is_dir():
        if place.name.endswith(INDEX_SUFFIX):
            return _named(place, place.name.removesuffix(INDEX_SUFFIX), _indexed(place))
        stem = place.name.removesuffix(SUFFIX)
        shard = _SHARD.fullmatch(stem)
        return _named(place, shard["stem"] if shard else stem, FileSet((place.name,)))
    try:
        names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ExecutionError(f"cannot be listed ({error.strerror})", where=str(place)) from error
    sets = _sets_by_stem(place, names)
    if not sets:
        raise FormatError(f"has no *{SUFFIX}", where=str(place))
    ignored: list[str] = []
    if MODEL_STEM in sets:
        ignored = sorted(name for stem in sets.keys() - _OWN_STEMS for name in sets[stem].names)
        sets = {
            stem: replace(found, is_of_optimizer=stem == OPTIMIZER_STEM)
            for stem, found in sets.items()
            if stem in _OWN_STEMS
        }
    taken = {name for found in sets.values() for name in found.names}
    ignored += [name for name in names if name.endswith(SUFFIX) and name not in {*taken, *ignored}]
    return Listing(place, tuple(sets.values()), tuple(sets), _ignored(ignored))


def _named(place: Path, stem: str, found: FileSet) -> Listing:
    """What a path to a file means."""
    is_of_optimizer = False if stem == MODEL_STEM else None
    return Listing(place.parent, (replace(found, is_of_optimizer=is_of_optimizer),))


def _sets_by_stem(folder: Path, names: Iterable[str]) -> dict[str, FileSet]:
    """Group the files of a folder by what their names start with; the model comes first."""
    indexes = {
        name.removesuffix(INDEX_SUFFIX): name for name in names if name.endswith(INDEX_SUFFIX)
    }
    sets = {stem: _indexed(folder / name) for stem, name in indexes.items()}
    indexed = {name for found in sets.values() for name in found.names}
    shards: dict[str, list[str]] = {}
    singles: dict[str, str] = {}
    for name in names:
        if not name.endswith(SUFFIX) or name in indexed:
            continue
        stem = name.removesuffix(SUFFIX)
        match = _SHARD.fullmatch(stem)
        if match is None:
            singles[stem] = name
        else:
            shards.setdefault(match["stem"], []).append(name)
    for stem in {*shards, *singles}:
        if stem in singles and (stem in indexes or stem in shards):
            raise FormatError(
                f"holds {singles[stem]!r} and the same in several files; it is not clear which one "
                "is meant",
                where=str(folder),
                remedy="name the file itself, or its index",
            )
        if stem in singles:
            sets[stem] = FileSet((singles[stem],))
        elif stem not in indexes:
            sets[stem] = FileSet(_complete(folder, shards[stem]))
    return dict(sorted(sets.items(), key=lambda found: (found[0] != MODEL_STEM, found[0])))


def _complete(folder: Path, names: list[str]) -> tuple[str, ...]:
    """Check that shards without an index are all there, by their numbers."""
    matches = [match for name in names if (match := _SHARD.fullmatch(name.removesuffix(SUFFIX)))]
    matches.sort(key=lambda match: int(match["number"]))
    counts = {int(match["count"]) for match in matches}
    numbers = [int(match["number"]) for match in matches]
    if counts != {len(names)} or numbers != list(range(1, len(names) + 1)):
        raise CorruptError(
            f"{', '.join(names[:8])} are not all files of one sharded checkpoint, and there is no "
            "index",
            where=str(folder),
        )
    return tuple(f"{match[0]}{SUFFIX}" for match in matches)


def _indexed(path: Path) -> FileSet:
    with RangeFile(path) as file:
        if file.nbytes > _LARGEST_INDEX_NBYTES:
            raise CorruptError(
                f"an index of {file.nbytes} bytes is larger than the limit of "
                f"{_LARGEST_INDEX_NBYTES} bytes"
            )
        index = parse_typed(file.read(0, file.nbytes), _Index)
        names = tuple(sorted(set(index.weight_map.values())))
        for name in names:
            _require_beside(path.parent, name)
    return FileSet(names, index.weight_map, path.name, index.metadata.get("total_size"))


def _require_beside(folder: Path, name: str) -> None:
    """Refuse a name that leads out of the folder of the index, or to nothing."""
    if not name.endswith(SUFFIX) or name.startswith(".") or {"/", "\\", "\0"} & set(name):
        raise CorruptError(f"{name!r} is not the name of a safetensors file beside the index")
    if not (folder / name).exists():
        raise CorruptError(f"{name!r} is named, and is not there", remedy="copy it again")


def _ignored(names: list[str]) -> list[Finding]:
    if not names:
        return []
    return [
        Finding(
            "note",
            "ignored-files",
            f"{counted(len(names), 'safetensors file')} not read, as no part of the model: "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",  # noqa: PLR2004
            details={"files": names},
        )
    ]
