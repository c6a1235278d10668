"""Read safetensors into a catalog: headers only, no tensor is touched."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import (
    Catalog,
    FileEntry,
    Finding,
    Region,
    StateEntry,
    TensorEntry,
)
from restride.errors import CorruptError
from restride.formats.safetensors.files import MODEL_STEM, OPTIMIZER_STEM, list_files
from restride.formats.safetensors.header import HeaderTensor, read_header
from restride.formats.safetensors.spelling import (
    SUFFIX,
    VALUES_NAME,
    WRITTEN_WITH,
    split_state,
    whole_layout,
)
from restride.storage.ranges import RangeFile
from restride.storage.typed_json import parse_typed
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from restride.algebra.layout import Layout, Shape
    from restride.formats.safetensors.files import FileSet, Listing

__all__ = ["read_catalog"]

_LARGEST_VALUES_NBYTES: Final = 100_000_000
# What a conversion writes: a file of values, and sets of files by what their names start with.
_PARTS: Final = frozenset({MODEL_STEM, OPTIMIZER_STEM, VALUES_NAME})
# States that say which shape the tensor has, the best one first.
_MAIN_STATES: Final = ("weight", "fp32")


def read_catalog(path: str | PathLike[str]) -> Catalog:
    """Find out what is in a safetensors file, an index, or a folder of them.

    Keys of the form ``PARAMETER/STATE`` become states of the parameter, but in files of a model. A
    ``state.json`` beside the model gives the values that are no tensors.

    Args:
        path: A file, a ``*.safetensors.index.json``, or a folder.

    Returns:
        Tensors on a mesh of one rank, in the order of the files and of the bytes in them.

    Raises:
        FormatError: There are no safetensors files, or it is not clear which ones are meant.
        CorruptError: A file or an index is damaged, lies about itself, or contradicts the others.
        UnsupportedError: A dtype is not known.
        ExecutionError: The system cannot read a file.

    Cost:
        Reads headers; O(tensors).
    """
    listing = list_files(path)
    collected = _Collected(listing.root)
    for found in listing.sets:
        collected.add(found)
    tensors = _group(collected)
    if collected.split:
        collected.findings.append(_states_by_name([*collected.split.values()]))
    values: dict[str, object] = {}
    if listing.stems:
        if os.path.lexists(listing.root / VALUES_NAME):
            values.update(_read_values(listing.root / VALUES_NAME))
        collected.findings.extend(_missing(listing, collected.written_with))
    if collected.metadata:
        values["safetensors_metadata"] = collected.metadata
    return Catalog(
        format="safetensors",
        root=str(listing.root),
        files=tuple(collected.files),
        mesh=Mesh(()),
        tensors=tensors,
        values=values,
        findings=(*listing.findings, *collected.findings),
    )


class _Collected(Struct):
    """Everything that the files hold.

    Attributes:
        root: Folder that the names are relative to.
        files: Files read so far.
        states: Entry of each parameter and state.
        names: File of each.
        metadata: Texts of each file that has any.
        findings: What was noticed.
        split: Key of each state of which nothing but the key says that it is one.
        written_with: What files say that was written with them, each by the first that says it.
    """

    root: Path
    files: list[FileEntry] = field(default_factory=list)
    states: dict[tuple[str, str], StateEntry] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    metadata: dict[str, Mapping[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    split: dict[tuple[str, str], str] = field(default_factory=dict)
    written_with: dict[str, str] = field(default_factory=dict)

    def add(self, found: FileSet) -> None:
        """Read the headers of files that belong together, and compare them with their index."""
        left = dict(found.index or {})
        total_nbytes = 0
        for name in found.names:
            for tensor in self._read(name, found.is_of_optimizer):
                total_nbytes += tensor.nbytes
                if found.index is not None and left.pop(tensor.name, None) != name:
                    place = found.index.get(tensor.name)
                    raise CorruptError(
                        f"the index places it in {place!r}" if place else "the index has no entry",
                        where=f"{self.root / name}: tensor {tensor.name!r}",
                    )
        if left:
            key, name = next(iter(left.items()))
            raise CorruptError(
                f"{counted(len(left), 'tensor')} of the index {which(len(left), 'is', 'are')} not "
                "in the "
                f"file that is named there, such as {key!r} in {name!r}",
                where=str(self.root / found.index_name),
            )
        if found.total_nbytes is not None and found.total_nbytes != total_nbytes:
            self.findings.append(_wrong_total(found, total_nbytes))

    def _read(self, name: str, is_of_optimizer: bool | None) -> tuple[HeaderTensor, ...]:  # noqa: FBT001
        path = str(self.root / name)
        with RangeFile(path) as file:
            header = read_header(file)
        number = len(self.files)
        self.files.append(FileEntry(name, file.nbytes, file.stamp))
        texts = dict(header.metadata)
        for part in _PARTS.intersection(texts.pop(WRITTEN_WITH, "").split()):
            self.written_with.setdefault(part, name)
        if texts:
            self.metadata[name] = texts
        for tensor in header.tensors:
            key = split_state(tensor.name, is_state=is_of_optimizer)
            if is_of_optimizer is None and key[0] != tensor.name:
                self.split[key] = tensor.name
            if key in self.states:
                raise CorruptError(
                    f"is in {self.names[key]!r} as well",
                    where=f"{path}: tensor {tensor.name!r}",
                )
            region = Region(number, tensor.start_nbytes) if tensor.nbytes else None
            layout = _layout(tensor.shape)
            self.states[key] = StateEntry(tensor.dtype, layout, (region,))
            self.names[key] = name
        return header.tensors


def _group(collected: _Collected) -> tuple[TensorEntry, ...]:
    """Put states beside the weight that they belong to."""
    grouped: dict[str, dict[str, StateEntry]] = {}
    for (name, state), entry in collected.states.items():
        grouped.setdefault(name, {})[state] = entry
    tensors: list[TensorEntry] = []
    for name, states in grouped.items():
        layout = _main_layout(states)
        apart = [
            state
            for state, entry in states.items()
            if entry.layout.full_numel != 1 and entry.layout.full_shape != layout.full_shape
        ]
        kept = {state: entry for state, entry in states.items() if state not in apart}
        tensors.append(TensorEntry(name, "parameter", layout, kept))
        for state in apart:
            collected.split.pop((name, state), None)
            if f"{name}/{state}" in grouped:
                raise CorruptError(
                    f"a state of tensor {name!r} of another shape has this name as well",
                    where=f"{collected.root}: tensor '{name}/{state}'",
                )
            shape = states[state].layout.full_shape
            tensors.append(
                TensorEntry(
                    f"{name}/{state}", "parameter", states[state].layout, {"weight": states[state]}
                )
            )
            collected.findings.append(_other_shape(name, state, shape, layout.full_shape))
    return tuple(tensors)


def _main_layout(states: Mapping[str, StateEntry]) -> Layout:
    """The layout of the weight, or what comes closest to it."""
    for state in _MAIN_STATES:
        if state in states:
            return states[state].layout
    return max((entry.layout for entry in states.values()), key=lambda layout: layout.full_numel)


@lru_cache(maxsize=1024)
def _layout(shape: Shape) -> Layout:
    """Tensors of one shape share their layout."""
    return whole_layout(shape)


def _read_values(path: Path) -> dict[str, object]:
    with RangeFile(path) as file:
        if file.nbytes > _LARGEST_VALUES_NBYTES:
            raise CorruptError(
                f"values of {file.nbytes} bytes are larger than the limit of "
                f"{_LARGEST_VALUES_NBYTES} bytes"
            )
        return parse_typed(file.read(0, file.nbytes), dict[str, object])


def _missing(listing: Listing, written_with: Mapping[str, str]) -> Iterator[Finding]:
    """Tell of what one conversion wrote with these files, and is not there."""
    for part, name in sorted(written_with.items()):
        is_value = part == VALUES_NAME
        if not is_value and part not in listing.stems:
            lost = f"{part}{SUFFIX} (or its parts)"
        elif is_value and not os.path.lexists(listing.root / VALUES_NAME):
            lost = VALUES_NAME
        else:
            continue
        message = (
            f"{name} was written together with {lost}, which is not here; to read the rest alone, "
            "name a file, or its index"
        )
        # Nobody needs more than the model for its weights.
        details = {} if part == MODEL_STEM else {"part": "optimizer"}
        yield Finding("error", "missing-file", message, str(listing.root), details)


def _wrong_total(found: FileSet, total_nbytes: int) -> Finding:
    return Finding(
        "note",
        "index-total-size",
        f"{found.index_name} states {found.total_nbytes} bytes of tensors, the files hold "
        f"{total_nbytes}",
        where=found.index_name,
        details={"stated": found.total_nbytes, "nbytes": total_nbytes},
    )


def _states_by_name(keys: Sequence[str]) -> Finding:
    return Finding(
        "note",
        "states-by-name",
        f"{counted(len(keys), 'tensor')} such as {keys[0]!r} {which(len(keys), 'is', 'are')} read "
        "as states of an optimizer, by the name alone; in a file called model.safetensors all are "
        "tensors of their own",
        details={"tensors": len(keys), "first": keys[0]},
    )


def _other_shape(name: str, state: str, shape: Shape, tensor_shape: Shape) -> Finding:
    return Finding(
        "note",
        "state-shape",
        f"state {state!r} of tensor {name!r} has shape {list(shape)}, the tensor "
        f"{list(tensor_shape)}; it is kept as a tensor of its own",
        where=f"tensor {name!r}, state {state!r}",
        details={"shape": list(shape), "tensor_shape": list(tensor_shape)},
    )
