"""Make the manifest of an output, and hold files against one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.arrays.fingerprint import MODULUS, Digester, finish
from restride.checkpoint.catalog import Finding
from restride.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    ManifestPart,
)
from restride.checkpoint.manifest_reading import sizes_of
from restride.errors import FormatError, RestrideError, UnsupportedError
from restride.executors.blocks import BLOCK_NBYTES
from restride.executors.identity import job_digest, options_of, package_version
from restride.executors.option_words import changed_options
from restride.executors.verifying import Extent, find_damage
from restride.planning.jobs import whole_layout
from restride.storage.manifest_files import read_manifest
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.fingerprints import Fingerprints
    from restride.checkpoint.output import Output
    from restride.executors.blocks import BlockTable
    from restride.executors.verifying import Damage
    from restride.storage.journal import Record

__all__ = [
    "FoundManifest",
    "WrittenFiles",
    "check_manifest",
    "describe_files",
    "find_manifest",
    "fingerprints_of",
    "is_written",
    "told_of",
]

_MOST_TOLD: Final = 3
_UNUSED: Final = "the bytes are not held against what was written"
# So that the file stays readable, and below what a reader of JSON takes.
_MOST_BLOCKS: Final = 1 << 16


def describe_files(files: WrittenFiles, first: Record) -> Manifest:
    """The manifest of an output, without fingerprints.

    Args:
        files: What was written.
        first: The first record of the journal, which says what the output is.
    """
    return Manifest(
        package_version(), job_digest(first), files.block_nbytes, files, {}, options_of(first)
    )


class WrittenFiles(Mapping[str, ManifestFile]):
    """Files of an output of which every block is done, by name.

    A thousand ranks have a part of every array in their files, and as objects these parts would
    take as much memory as the plan: a file is described when it is asked for, and not kept.

    Args:
        output: The files.
        blocks: Digests of all that is written.

    Attributes:
        block_nbytes: Size of a block of them.
    """

    def __init__(self, output: Output, blocks: BlockTable) -> None:
        total = sum(file.nbytes for file in output.files)
        self.block_nbytes = BLOCK_NBYTES
        while total > self.block_nbytes * _MOST_BLOCKS:
            self.block_nbytes *= 2
        self._files = output.files
        self._blocks = blocks
        self._numbers = {file.name: number for number, file in enumerate(output.files)}
        self._digester = Digester()

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __getitem__(self, name: str) -> ManifestFile:
        number = self._numbers[name]
        file = self._files[number]
        parts = [
            ManifestPart(start, len(literal), _digests(literal, self._digester, self.block_nbytes))
            for start, literal in file.spelled()
            if literal
        ]
        parts += map(self._part, self._blocks.of_file(number))
        return ManifestFile(file.nbytes, _without_gaps(parts, file.nbytes, self.block_nbytes))

    def _part(self, number: int) -> ManifestPart:
        region = self._blocks.regions[number]
        return ManifestPart(
            region.target_start_nbytes,
            region.nbytes,
            _joined(self._blocks.digests(number), self.block_nbytes // BLOCK_NBYTES),
            region.tensor,
            region.state,
        )

    def digest(self, name: str, start_nbytes: int, nbytes: int) -> int | None:
        """Digest of what was written to one place; None where it is no part of its own."""
        number = self._blocks.find(self._numbers[name], start_nbytes)
        if number is None or self._blocks.regions[number].nbytes != nbytes:
            return None
        return sum(self._blocks.digests(number)) % MODULUS


def fingerprints_of(catalog: Catalog, files: WrittenFiles) -> Fingerprints:
    """Fingerprints of the arrays of an output that stand in one part of a file each.

    Args:
        catalog: What a reader finds in the output.
        files: Its files.
    """
    found: dict[str, dict[str, str]] = {}
    is_whole = cache(_is_whole)  # layers have the same layouts
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            shape, region = entry.layout.full_shape, entry.regions[0]
            if region is None or not is_whole(entry.layout):
                continue
            nbytes = entry.layout.full_numel * entry.dtype.itemsize_nbytes
            digest = files.digest(catalog.files[region.file].name, region.start_nbytes, nbytes)
            if digest is not None:
                digits = finish(digest, entry.dtype.name, shape)
                found.setdefault(tensor.name, {})[state] = digits
    return found


def _is_whole(layout: Layout) -> bool:
    """Whether the first rank holds all of a tensor, in its order."""
    return layout.pieces(0) == whole_layout(layout.full_shape).pieces(0)


def _digests(literal: bytes, digester: Digester, block_nbytes: int) -> tuple[int, ...]:
    return tuple(
        digester.digest(literal[low : low + block_nbytes], low)
        for low in range(0, len(literal), block_nbytes)
    )


def _joined(digests: Sequence[int], count: int) -> tuple[int, ...]:
    """Digests of blocks that are so many times as large."""
    return tuple(
        sum(digests[first : first + count]) % MODULUS for first in range(0, len(digests), count)
    )


def _without_gaps(
    parts: list[ManifestPart], nbytes: int, block_nbytes: int
) -> tuple[ManifestPart, ...]:
    """Add the bytes that nobody writes: they are zero, and so is their digest."""
    result: list[ManifestPart] = []
    end = 0
    for part in (*sorted(parts, key=lambda p: p.start_nbytes), ManifestPart(nbytes, 0, ())):
        if part.start_nbytes > end:
            gap = part.start_nbytes - end
            result.append(ManifestPart(end, gap, (0,) * -(-gap // block_nbytes)))
        if part.nbytes:
            result.append(part)
        end = part.start_nbytes + part.nbytes
    return tuple(result)


class FoundManifest:
    """A manifest, and the files of it that are below the folder that is looked at.

    Attributes:
        folder: Where the manifest is.
        files: All files of the manifest, by name.
        sizes: Bytes of each of those that are below.
        block_nbytes: Size of a block.
    """

    def __init__(self, folder: Path, manifest: Manifest, prefix: str) -> None:
        self.folder = folder
        self.block_nbytes = manifest.block_nbytes
        self.files = manifest.files
        self.sizes = {
            name: nbytes for name, nbytes in sizes_of(manifest).items() if name.startswith(prefix)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the files below the folder."""
        return sum(self.sizes.values())


def is_written(folder: Path, job: str) -> bool:
    """Whether a folder has the manifest of a conversion, and files of the sizes that it names."""
    manifest = _manifest_of(folder)
    return manifest is not None and manifest.job == job and _first_damage(folder, manifest) is None


def told_of(folder: Path, first: Record) -> str:
    """Say what conversion a folder is of, beside the one of a first record.

    Returns:
        What follows after "it is"; empty where the folder says nothing of it.
    """
    manifest = _manifest_of(folder)
    if manifest is None:
        return ""
    made = f"the output of restride {manifest.version}"
    ours, theirs = options_of(first), manifest.options
    if manifest.job == job_digest(first):
        return f"{made} for this source and these options, and {_first_damage(folder, manifest)}"
    changes = [*changed_options(ours, theirs)]
    if theirs and changes:
        more = f" and {len(changes) - _MOST_TOLD} more" if changes[_MOST_TOLD:] else ""
        return f"{made} {', '.join(changes[:_MOST_TOLD])}{more}"
    if theirs and manifest.version == package_version():
        return f"{made} with these options, of another source or of one that was changed since"
    return f"{made} with other options, or of another source"


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder / MANIFEST_NAME, where=MANIFEST_NAME)
    except RestrideError:
        return None


def _first_damage(folder: Path, manifest: Manifest) -> str | None:
    """The first file that has not the size that a manifest says, and what is wrong with it."""
    for name, nbytes in sizes_of(manifest).items():
        problem = _size_problem(folder / name, nbytes)
        if problem:
            return f"{name}: {problem}"
    return None


def find_manifest(catalog: Catalog) -> FoundManifest | Finding | None:
    """The manifest that a checkpoint was written with.

    Returns:
        None where there is none: most checkpoints have none. An error where it is damaged or was
        edited; a note where it says nothing of this checkpoint, because another version wrote it or
        another checkpoint was saved into the same folder.
    """
    root = Path(catalog.root)
    for folder in (root, root.parent):
        path = folder / MANIFEST_NAME
        if not os.path.lexists(path):
            continue
        prefix = "" if folder == root else f"{root.name}/"
        try:
            found = FoundManifest(folder, read_manifest(path, where=MANIFEST_NAME), prefix)
        except UnsupportedError as error:
            return _note(str(error))
        except RestrideError as error:
            return _unreadable(error)
        if {prefix + file.name for file in catalog.files}.isdisjoint(found.sizes):
            if folder == root:
                return _note(f"{MANIFEST_NAME} is of other files than those of this checkpoint")
            return None
        return found
    return None


def _note(problem: str) -> Finding:
    return Finding("note", "manifest-unused", f"{problem}; {_UNUSED}", MANIFEST_NAME)


def _unreadable(error: RestrideError) -> Finding:
    # What damaged it, as a loss of power does without a sync, may have damaged the rest.
    message = f"{error}; {_UNUSED}: convert again, or remove it if the rest is known to be sound"
    return Finding("error", "manifest-damaged", message, MANIFEST_NAME)


def check_manifest(
    found: FoundManifest,
    *,
    workers: int,
    rows: int,
    on_read: Callable[[int], None],
    only_sizes: bool = False,
) -> Iterator[Finding]:
    """Hold the size and every byte of the files against a manifest.

    Args:
        found: The manifest.
        workers: Threads.
        rows: Rows of 1 KiB that each of them digests at a time.
        on_read: Called with the number of bytes that were read.
        only_sizes: Whether to read none.

    Yields:
        One error for each file that is missing, has another size, or other bytes.

    Cost:
        Every byte is read once.
    """
    sound = []
    for name, nbytes in found.sizes.items():
        problem = _size_problem(found.folder / name, nbytes)
        if problem:
            yield Finding("error", "manifest-size", f"{name}: {problem}", name)
        else:
            sound.append(name)
    if only_sizes:
        return
    unreadable: list[Finding] = []
    damage: dict[str, tuple[Damage, int]] = {}
    extents = _extents(found, sound, unreadable)
    for damaged in find_damage(extents, workers=workers, rows=rows, on_read=on_read):
        first, count = damage.get(damaged.extent.path, (damaged, 0))
        damage[damaged.extent.path] = first, count + 1
    yield from unreadable
    for name in sound:
        if str(found.folder / name) in damage:
            yield _damaged(name, found.files[name], *damage[str(found.folder / name)])


def _extents(
    found: FoundManifest, names: Iterable[str], unreadable: list[Finding]
) -> Iterator[Extent]:
    """Blocks of files; what cannot be understood of a file is added to `unreadable`."""
    for name in names:
        path = str(found.folder / name)
        try:
            file = found.files[name]
        except FormatError as error:
            unreadable.append(_unreadable(error.located(MANIFEST_NAME)))
            continue
        for part in file.parts:
            for number, digest in enumerate(part.digests):
                base = number * found.block_nbytes
                nbytes = min(found.block_nbytes, part.nbytes - base)
                yield Extent(path, part.start_nbytes + base, nbytes, base, digest)


def _damaged(name: str, file: ManifestFile, first: Damage, count: int) -> Finding:
    start, stop = first.extent.start_nbytes, first.extent.start_nbytes + first.extent.nbytes
    part = next(p for p in file.parts if start < p.start_nbytes + p.nbytes)
    total = sum(len(p.digests) for p in file.parts)
    holder = "a fixed part"
    if part.tensor:
        holder = f"state {part.state!r} of tensor {part.tensor!r}"
    message = (
        f"{name}: {count} of {total} blocks {which(count, 'is', 'are')} not what was written, the "
        "first from byte "
        f"{start} to {stop}, in {holder} ({first.reason})"
    )
    details: dict[str, object] = {"start_nbytes": start, "stop_nbytes": stop, "blocks": count}
    details |= {"tensor": part.tensor, "state": part.state}
    return Finding("error", "manifest-digest", message, name, details)


def _size_problem(path: Path, nbytes: int) -> str:
    try:
        size = os.stat(path).st_size  # noqa: PTH116
    except FileNotFoundError:
        return "the file is missing"
    except OSError as error:
        return f"the file cannot be looked at ({error.strerror})"
    return "" if size == nbytes else f"the file has {size} bytes, {nbytes} were written"
