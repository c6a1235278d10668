"""Read a universal folder into a catalog: every state is a file with one whole tensor."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import (
    Catalog,
    FileEntry,
    Finding,
    Region,
    StateEntry,
    TensorEntry,
)
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, ExecutionError, FormatError, UnsupportedError
from restride.layouts.replicated import replicated
from restride.storage.torch_zip import open_torch_zip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import Severity
    from restride.checkpoint.values import Value

__all__ = ["read_catalog"]

_LATEST: Final = "latest_universal"
_PARAMETERS: Final = "zero"
_SUFFIX: Final = ".pt"
_PARAM: Final = "param"
_STEP: Final = "step"
_MASTER: Final = "fp32"
_MODEL_FILE: Final = re.compile(r"mp_rank_\d{1,6}_model_states\.pt")
_LONGEST_TAG: Final = 1024
_MOST_NAMED: Final = 5
_ONE_RANK: Final = Mesh(())


def read_catalog(path: str | PathLike[str]) -> Catalog:
    """Find out what is in a universal folder, in the shape of ZeRO-1 and ZeRO-2.

    Args:
        path: The folder with ``latest_universal``, or the one that it names.

    Returns:
        Master copies and optimizer states, whole, on a mesh of one rank and in the order of the
        model. The weights as they were trained are in the model files, cut; they are not read, and
        neither is what is no tensor.

    Raises:
        FormatError: It is no universal folder, or a file is not what it must be.
        CorruptError: A file is damaged, or the states of a parameter have different shapes.
        UnsupportedError: It is in the shape of ZeRO-3: flat tensors without shapes.
        ExecutionError: The system cannot read a file.

    Cost:
        The directory and the pickle of every file are read; O(parameters * states).
    """
    root = Path(path)
    below = _find(root)
    reader = _Reader(root, below)
    order = _model_order(root / below)
    names = _entries(root / below / _PARAMETERS, is_folder=True)
    tensors = [reader.tensor(name) for name in _ordered(names, order)]
    reader.tell_missing(order, names)
    note = (
        "what is no tensor (the step of the training, its scheduler, hyperparameters) stays in "
        "the files: it is not read from universal folders"
    )
    reader.findings.append(Finding("note", "not-carried", note))
    return Catalog(
        format="deepspeed universal",
        root=str(root),
        files=tuple(reader.files),
        mesh=_ONE_RANK,
        tensors=tuple(tensors),
        values={},
        findings=tuple(reader.findings),
    )


def _find(root: Path) -> str:
    """Name of the folder with the parameters below `root`, with a slash, or empty."""
    if (root / _PARAMETERS).is_dir():
        return ""
    try:
        with (root / _LATEST).open("rb") as file:
            text = file.read(_LONGEST_TAG + 1)
    except OSError as error:
        raise FormatError(
            f"is no universal folder: it has neither {_PARAMETERS!r} nor {_LATEST!r}",
            where=str(root),
        ) from error
    tag = text.decode("utf-8", "replace").strip()
    if len(text) > _LONGEST_TAG or not _is_name(tag) or not (root / tag / _PARAMETERS).is_dir():
        raise FormatError(
            f"names {tag[:80]!r}, which is no universal folder beside it",
            where=str(root / _LATEST),
            remedy="open the universal folder itself",
        )
    return f"{tag}/"


def _is_name(text: str) -> bool:
    return text not in {"", ".", ".."} and {"/", "\\", "\0"}.isdisjoint(text)


def _entries(folder: Path, *, is_folder: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() == is_folder]
    except OSError as error:
        raise ExecutionError(f"cannot be listed ({error.strerror})", where=str(folder)) from error


@dataclass(slots=True)
class _Order:
    """What the model files say of the parameters.

    Attributes:
        names: In the order of the model.
        trained: Those that the optimizer has states of.
        aliases: Other names, with the one that has the states.
    """

    names: dict[str, None] = field(default_factory=dict)
    trained: dict[str, None] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def _model_order(folder: Path) -> _Order:
    """Read the names in the model files; a folder without them is in no order."""
    order = _Order()
    for name in sorted(filter(_MODEL_FILE.fullmatch, _entries(folder, is_folder=False))):
        value = open_torch_zip(folder / name).value
        if not isinstance(value, dict):
            raise FormatError("is no model file of DeepSpeed", where=str(folder / name))
        order.names.update(dict.fromkeys(_names(value.get("module"))))
        shapes = value.get("param_shapes")
        for group in shapes if isinstance(shapes, list) else ():
            order.trained.update(dict.fromkeys(_names(group)))
        shared = value.get("shared_params")
        for alias, target in shared.items() if isinstance(shared, dict) else ():
            if isinstance(alias, str) and isinstance(target, str):
                order.aliases[alias] = target
    order.names |= order.trained
    return order


def _names(value: Value) -> Iterator[str]:
    yield from (key for key in value if isinstance(key, str)) if isinstance(value, dict) else ()


def _ordered(names: Iterable[str], order: _Order) -> list[str]:
    """Parameters in the order of the model, then all others; no second names."""
    places = {name: place for place, name in enumerate(order.names)}
    known = set(names)
    kept = (name for name in known if order.aliases.get(name) not in known)
    return sorted(kept, key=lambda name: (places.get(name, len(places)), name))


class _Reader:
    def __init__(self, root: Path, below: str) -> None:
        self._root = root
        self._below = f"{below}{_PARAMETERS}/"
        self.files: list[FileEntry] = []
        self.findings: list[Finding] = []

    def tensor(self, name: str) -> TensorEntry:
        """Read the folder of one parameter."""
        states: dict[str, StateEntry] = {}
        scalars: dict[str, StateEntry] = {}
        for file in sorted(_entries(self._root / self._below / name, is_folder=False), key=_rank):
            state = file.removesuffix(_SUFFIX)
            if state == file:
                self._tell("note", "unknown-file", f"{self._below}{name}/{file} is not read", name)
                continue
            self._read(f"{self._below}{name}/{file}", state, states, scalars)
        if not states:
            raise FormatError("has no state of a parameter", where=f"{self._below}{name}")
        layout = next(iter(states.values())).layout
        for state, entry in states.items():
            if entry.layout.full_shape != layout.full_shape:
                raise CorruptError(
                    f"state {state!r} has shape {entry.layout.full_shape}, {next(iter(states))!r} "
                    f"has {layout.full_shape}",
                    where=f"{self._below}{name}",
                )
        return TensorEntry(name, "parameter", layout, states | scalars)

    def tell_missing(self, order: _Order, names: list[str]) -> None:
        """Tell of parameters that the optimizer had states of, and the folder has nothing of."""
        missing = [name for name in order.trained if name not in set(names)]
        if missing:
            named = ", ".join(map(repr, missing[:_MOST_NAMED]))
            message = f"{len(missing)} of {len(order.trained)} parameters have no folder: {named}"
            self._tell("error", "missing-file", message, missing[0])

    def _tell(self, severity: Severity, kind: str, message: str, name: str) -> None:
        self.findings.append(Finding(severity, kind, message, f"tensor {name!r}"))

    def _read(
        self,
        file: str,
        state: str,
        states: dict[str, StateEntry],
        scalars: dict[str, StateEntry],
    ) -> None:
        opened = open_torch_zip(self._root / file)
        value = opened.value
        if state == _STEP:
            # A plain number is no array; it stays where it is, as everything that is none.
            if isinstance(value, StoredTensor):
                scalars[state] = self._entry(file, opened.nbytes, value)
            return
        if isinstance(value, StoredTensor):
            raise UnsupportedError(
                f"holds a bare tensor of shape {value.shape}: universal folders of ZeRO-3 are "
                "flat, without the shapes of the parameters",
                where=file,
                remedy="convert the checkpoint that the folder was made of",
            )
        tensor = value.get(_PARAM) if isinstance(value, dict) else None
        if not isinstance(tensor, StoredTensor):
            raise FormatError(f"has no tensor {_PARAM!r}", where=file)
        states[state] = self._entry(file, opened.nbytes, tensor)

    def _entry(self, file: str, nbytes: int, tensor: StoredTensor) -> StateEntry:
        if not _is_dense(tensor.shape, tensor.strides):
            raise UnsupportedError(
                f"is a view of shape {tensor.shape} with strides {tensor.strides}",
                where=file,
                remedy="save it after .contiguous()",
            )
        region = Region(len(self.files), tensor.start_nbytes) if prod(tensor.shape) else None
        self.files.append(FileEntry(file, nbytes))
        return StateEntry(tensor.storage.dtype, _whole(tensor.shape), (region,))


def _rank(file: str) -> tuple[int, str]:
    """The master copy first, the step last."""
    return {f"{_MASTER}{_SUFFIX}": 0, f"{_STEP}{_SUFFIX}": 2}.get(file, 1), file


@lru_cache(maxsize=1024)
def _whole(shape: Shape) -> Layout:
    """Tensors of one shape share their layout."""
    return replicated(shape, mesh=_ONE_RANK)


def _is_dense(shape: Shape, strides: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return not prod(shape)
        expected *= size
    return True
