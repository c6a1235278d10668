"""Read a universal folder into a catalog: every state is a file with one whole tensor.

The model files of the run stand beside them. They say the order of the model, how the ranks of the
source cut every parameter, its shape where the file has none (ZeRO-3), and all that is no tensor.
"""

from __future__ import annotations

import os
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

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
from restride.formats.deepspeed._exchanged import OTHER_RANK, saved_elsewhere
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._files import is_below
from restride.formats.deepspeed.companions import described_shapes
from restride.formats.deepspeed.model_files import read_model_files
from restride.formats.universal._optimizer_state import OPTIMIZER_STATE, read_optimizer_state
from restride.formats.universal._values import read_values
from restride.layouts.replicated import replicated
from restride.storage.ranges import why_not_opened
from restride.storage.torch_zip import TorchFiles
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import Severity
    from restride.formats.deepspeed.model_files import ModelFiles
    from restride.formats.universal._optimizer_state import OptimizerState
    from restride.storage.torch_zip import TorchFile

__all__ = ["FORMAT", "LATEST", "PARTITIONED", "find_folder", "read_catalog", "whole_tensor"]

FORMAT: Final = "deepspeed universal"
"""Format of a folder in the shape of ZeRO-1 and ZeRO-2."""

PARTITIONED: Final = f"{FORMAT} zero-3"
"""Format of a folder in the shape of ZeRO-3."""

LATEST: Final = "latest_universal"
"""File that names the folder."""

_PARAMETERS: Final = "zero"
_SUFFIX: Final = ".pt"
_PARAM: Final = "param"
_STEP: Final = "step"
_MASTER: Final = "fp32"
_COUNTING: Final = frozenset({"float", "int", "uint"})
_LONGEST_TAG: Final = 1024
_MOST_NAMED: Final = 5
_ONE_RANK: Final = Mesh(())


def read_catalog(path: str | PathLike[str], opened: TorchFiles | None = None) -> Catalog:
    """Find out what is in a universal folder, in either shape that DeepSpeed writes.

    Args:
        path: The folder with ``latest_universal``, or the one that it names.
        opened: What its files are opened by, where others ask for them again. Those of arrays,
            which nobody does, are only looked into.

    Returns:
        Master copies and optimizer states, whole, in the order of the model; weights and buffers
        from the model files, cut as the tensor-parallel ranks of the source cut them. The layout of
        a parameter is that cut, where the model files say one. What is no tensor is in the values,
        as in the catalog of the source.

    Raises:
        FormatError: It is no universal folder, or a file is not what it must be.
        CorruptError: A file is damaged, or files contradict each other.
        UnsupportedError: A tensor is flat, and no model file says its shape.
        ExecutionError: The system cannot read a file.

    Cost:
        The directory and the pickle of every file are read; O(parameters * states).
    """
    root = Path(path)
    below = find_folder(root)
    folder = root / below if below else root
    opened = opened or TorchFiles()
    models = read_model_files(folder, below, opened)
    reader = _Reader(root, below, models, opened)
    if models is None:
        message = (
            "no model file is there: weights, buffers, frozen parameters and what is no tensor are "
            "missing, and no engine resumes from the folder without them"
        )
        reader.findings.append(Finding("warning", "missing-file", message))
    tensors = tuple(reader.read())
    is_partitioned = models is not None and models.is_partitioned
    return Catalog(
        format=PARTITIONED if is_partitioned else FORMAT,
        root=str(root),
        files=tuple(reader.files),
        mesh=_mesh(models),
        tensors=tensors,
        values=read_values(models, reader.optimizer, reader.findings),
        findings=tuple(reader.findings),
    )


def find_folder(root: Path) -> str:
    """Name of the folder with the parameters below `root`, with a slash, or empty.

    Raises:
        FormatError: There is none.
    """
    if (root / _PARAMETERS).is_dir():
        return ""
    try:
        with (root / LATEST).open("rb") as file:
            text = file.read(_LONGEST_TAG + 1)
    except OSError as error:
        if os.path.lexists(root / LATEST):
            why = why_not_opened(error, root / LATEST)
            raise ExecutionError(f"cannot be read ({why})", where=str(root / LATEST)) from error
        raise FormatError(
            f"is no universal folder: it has neither {_PARAMETERS!r} nor {LATEST!r}",
            where=str(root),
        ) from error
    tag = text.decode("utf-8", "replace").strip()
    is_tag = len(text) <= _LONGEST_TAG and is_below(root, tag)
    if not is_tag or not (root / tag / _PARAMETERS).is_dir():
        raise FormatError(
            f"names {tag[:80]!r}, which is no universal folder beside it",
            where=str(root / LATEST),
            remedy="open the universal folder itself",
        )
    return f"{tag}/"


def _entries(folder: str | Path, *, is_folder: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            listed = [*entries]
            for entry in listed:
                if entry.is_symlink():
                    entry.stat()  # nothing else tells whether it was a folder
            return [entry.name for entry in listed if entry.is_dir() == is_folder]
    except OSError as error:
        where = str(error.filename or folder)
        why = why_not_opened(error, where)
        raise ExecutionError(f"cannot be listed ({why})", where=where) from error


def _mesh(models: ModelFiles | None) -> Mesh:
    """The ranks that weights are cut over; states are not."""
    if models is not None and not models.has_modules:
        stages, ranks = models.run.stage_count, models.run.tp_size
        return Mesh((("pp", stages), ("tp", ranks // stages)))
    if models is None or models.run.tp_size == 1:
        return _ONE_RANK
    return Mesh((("tp", models.run.tp_size),))


class _Reader:
    def __init__(
        self, root: Path, below: str, models: ModelFiles | None, opened: TorchFiles
    ) -> None:
        self._opened = opened
        self._folder = root / below if below else root
        self._top = str(root) if root.parts else ""
        self._below = f"{below}{_PARAMETERS}/"
        self._models = models
        self.files: list[FileEntry] = list(models.files if models else ())
        self.findings: list[Finding] = list(models.findings if models else ())
        self._described = _described(models)
        self._files: dict[str, set[str]] = {}  # states that have a file, by parameter
        self._dtypes: dict[str, dict[tuple[str, str], str]] = {}
        self.optimizer = self._read_optimizer()
        self._group_states = dict(self._of_groups())

    def read(self) -> Iterator[TensorEntry]:
        """Yield parameters and buffers in the order of the model, then all others by name."""
        names = set(_entries(self._folder / _PARAMETERS, is_folder=True))
        models = self._models
        known = {tensor.name: tensor for tensor in models.tensors} if models else {}
        order = dict.fromkeys([*known, *(models.order if models else ()), *sorted(names)])
        aliases = models.aliases if models else {}
        trained = set(models.trained_names if models else ())
        for name in order:
            entry = known.get(name)
            if aliases.get(name) in order:
                continue
            if entry is not None and entry.kind == "buffer":
                yield entry
            elif entry is not None and self._is_carried(entry, trained):
                if name in names:
                    self._compare_carried(entry)
                yield replace(entry, is_frozen=entry.layout.full_numel > 0)
            elif name in names:
                yield self._parameter(name, entry)
        missing = [name for name in trained if name not in names]
        if missing:
            named = ", ".join(map(repr, sorted(missing)[:_MOST_NAMED]))
            have = which(len(missing), "has", "have")
            message = f"{len(missing)} of {len(trained)} parameters {have} no folder: {named}"
            self._tell("error", "missing-file", message, min(missing))
        self._tell_of_strangers(name for name in sorted(names) if name not in known)
        self._tell_of_lost_states()

    def _tell_of_strangers(self, names: Iterable[str]) -> None:
        """Tell of parameters that no model file names, as of what was in the folder before."""
        models = self._models
        if models is None or not models.tensors:
            return
        said = {*models.trained_names, *models.experts, *models.aliases}
        said.update(name for model in models.run.models for name in (*model.dtypes, *model.frozen))
        for name in names:
            if name not in said:
                message = (
                    f"{self._below}{name} is of no parameter that a model file names, and no "
                    "engine loads it: it was there before, or is of another model"
                )
                self._tell("warning", "stale-file", message, name)

    def _tell_of_lost_states(self) -> None:
        """Tell of parameters that have some states of their group, and not all of them."""
        trained = self._models.trained if self._models else ()
        for names in (names for groups in trained for names in groups):
            self._tell_of_other_dtypes(names)
            known = {name: self._files[name] for name in names if name in self._files}
            every = dict.fromkeys(state for states in known.values() for state in states)
            for name, states in known.items():
                lost = [state for state in every if state not in states]
                if lost and states - {_MASTER}:
                    del self._files[name]  # other ranks name it again
                    other = next(other for other, own in known.items() if lost[0] in own)
                    message = (
                        f"{self._below}{name} has no {', '.join(lost)}, which {other!r} of the "
                        "same group has"
                    )
                    self._tell("warning", "missing-state", message, name)

    def _tell_of_other_dtypes(self, names: Iterable[str]) -> None:
        """Tell of states that have another dtype than in the rest of their group."""
        first: dict[tuple[str, str], tuple[str, str]] = {}
        for name in names:
            for (state, trained), dtype in self._dtypes.pop(name, {}).items():
                other, expected = first.setdefault((state, trained), (name, dtype))
                if dtype != expected:
                    message = (
                        f"{self._below}{name}/{state}{_SUFFIX} is {dtype}, that of {other!r} of "
                        f"the same group is {expected}"
                    )
                    self._tell("warning", "state-dtype", message, name)

    def _is_carried(self, entry: TensorEntry, trained: set[str]) -> bool:
        """Whether the model files have all that there is.

        What the optimizer does not own has a folder with nothing but its weight, widened; of one
        that the ranks cut, the peer writes the first shard only. Where nothing says what the
        optimizer owns, the folders do.
        """
        return bool(trained) and "weight" in entry.states and entry.name not in trained

    def _compare_carried(self, entry: TensorEntry) -> None:
        """Tell of a folder that has a part of a weight: an engine takes it for all of it.

        And of one with states of an optimizer, which is that of a parameter that is trained.
        """
        shape = entry.layout.full_shape
        files = _entries(self._folder / _PARAMETERS / entry.name, is_folder=False)
        moments = {file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX)}
        moments -= {_MASTER, _STEP}
        if moments:
            message = (
                f"{self._below}{entry.name} has {', '.join(sorted(moments))}, by the model files "
                "nobody trains the parameter; they are left out"
            )
            self._tell("error", "untrained-states", message, entry.name)
        file = f"{self._below}{entry.name}/fp32{_SUFFIX}"
        if not os.path.lexists(self._path(file)):
            return
        value = self._opened.look(self._path(file)).value
        stored = value.get(_PARAM) if isinstance(value, dict) else value
        if isinstance(stored, StoredTensor) and prod(stored.shape) != prod(shape):
            message = (
                f"{file} has shape {stored.shape}, by the model files the parameter has {shape}: "
                "an engine that loads the folder takes the part of one rank for the weight of all"
            )
            self._tell("warning", "shape-mismatch", message, entry.name)

    def _parameter(self, name: str, known: TensorEntry | None) -> TensorEntry:
        """Read the folder of one parameter."""
        states: dict[str, StateEntry] = {}
        scalars: dict[str, StateEntry] = {}
        has_step = False
        place = f"{self._below}{name}"
        files = sorted(_entries(self._path(place), is_folder=False), key=_rank)
        for file in files:
            state = file.removesuffix(_SUFFIX)
            if state == file:
                self._tell("note", "unknown-file", f"{place}/{file} is not read", name)
            elif state == _STEP:
                scalars.update(self._step(f"{place}/{file}"))
                has_step = True
            else:
                states[state] = self._state(f"{place}/{file}", known, files)
        if not states:
            raise FormatError("has no state of a parameter", where=place)
        first = next(iter(states))
        shape = states[first].layout.full_shape
        for state, entry in states.items():
            if entry.layout.full_shape != shape:
                raise CorruptError(
                    f"state {state!r} has shape {entry.layout.full_shape}, {first!r} has {shape}",
                    where=place,
                )
        found = self._group_states.get(name, {}) | scalars
        # Moments of a parameter that is trained in bf16 may be in bf16, beside others in fp32.
        weight = known and known.states.get("weight")
        trained = str(weight.dtype) if weight else ""
        dtypes = {(state, trained): str(entry.dtype) for state, entry in states.items()}
        if has_step:
            dtypes[_STEP, ""] = str(scalars[_STEP].dtype) if scalars else "a plain number"
        self._dtypes[name] = dtypes
        self._files[name] = {*states, *([_STEP] if has_step else [])}
        if known is None:
            return TensorEntry(name, "parameter", states[first].layout, states | found)
        return self._joined(known, states, found)

    def _joined(
        self,
        known: TensorEntry,
        states: Mapping[str, StateEntry],
        scalars: Mapping[str, StateEntry],
    ) -> TensorEntry:
        """Put together what the model files and the folder of a parameter have."""
        shape = known.layout.full_shape
        stored = next(iter(states.values())).layout.full_shape
        is_viewed = len(stored) < 2 or stored == self._described.get(known.name)  # noqa: PLR2004
        if prod(stored) != prod(shape) or not (is_viewed or stored == shape):
            message = (
                f"{self._below}{known.name}: the states have shape {stored}, by the model files "
                f"the parameter has {shape}; they are left out"
            )
            self._tell("error", "shape-mismatch", message, known.name)
            states = {}
        # One that is flat, or described in dimensions of its own, has the same elements in order.
        whole = whole_tensor(shape)
        viewed = {
            state: StateEntry(entry.dtype, whole, entry.regions) for state, entry in states.items()
        }
        return TensorEntry(
            known.name,
            "parameter",
            known.layout,
            {**known.states, **viewed, **scalars},
            is_frozen=known.is_frozen,
            aliases=known.aliases,
            trained_dtype=known.trained_dtype,
        )

    def _state(self, file: str, known: TensorEntry | None, files: Sequence[str]) -> StateEntry:
        opened = self._opened.look(self._path(file))
        saved = f"{opened.saved_as}{_SUFFIX}"
        # Others may call a file what they like inside, but hardly like the one beside it.
        if not file.endswith(f"/{saved}") and saved in files:
            self._tell("error", OTHER_RANK, saved_elsewhere(file, saved), file)
        value = opened.value
        if isinstance(value, StoredTensor):
            if known is None:
                raise UnsupportedError(
                    f"holds a bare tensor of shape {value.shape}, as universal folders of ZeRO-3 "
                    "do, and no model file says the shape of the parameter",
                    where=file,
                    remedy="put the *_model_states.pt files of the run into the folder",
                )
            return self._entry(file, opened, value)
        tensor = value.get(_PARAM) if isinstance(value, dict) else None
        if not isinstance(tensor, StoredTensor):
            raise FormatError(f"has no tensor {_PARAM!r}", where=file)
        return self._entry(file, opened, tensor)

    def _step(self, file: str) -> Iterator[tuple[str, StateEntry]]:
        """Yield a step that is a tensor; a plain number is no array."""
        opened = self._opened.open(self._path(file))
        value = opened.value
        if isinstance(value, StoredTensor):
            if prod(value.shape) != 1 or value.storage.dtype.kind not in _COUNTING:
                raise CorruptError(
                    f"is a tensor of {value.storage.dtype} and shape {value.shape}, a step is one "
                    "number",
                    where=file,
                )
            yield _STEP, self._entry(file, opened, value)
        elif (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < 1 << 63
        ):
            raise Field(value, file).wrong("the number of a step")

    def _path(self, name: str) -> str:
        """Path of a file or folder, as `Path` spells it in less time."""
        return os.path.join(self._top, name)  # noqa: PTH118 - there are thousands

    def _entry(self, file: str, opened: TorchFile, tensor: StoredTensor) -> StateEntry:
        number = len(self.files)
        self.files.append(FileEntry(file, opened.nbytes, opened.stamp))
        return _entry_of(tensor, number, file)

    def _read_optimizer(self) -> OptimizerState | None:
        path = self._folder / _PARAMETERS / OPTIMIZER_STATE
        name = f"{self._below}{OPTIMIZER_STATE}"
        if not os.path.lexists(path):
            message = f"{name} is not there: no engine resumes from the folder without it"
            self.findings.append(Finding("warning", "missing-file", message, name))
            return None
        state = read_optimizer_state(path, name, self._opened)
        self.files.append(state.file)
        return state

    def _of_groups(self) -> Iterator[tuple[str, dict[str, StateEntry]]]:
        """Yield what every parameter of a sub-group shares, which in ZeRO-3 is in one file."""
        state, models = self.optimizer, self._models
        if state is None or models is None or state.parents is None:
            return
        number = len(self.files) - 1
        shared = [
            {
                key: _entry_of(entry.value, number, entry.where)
                for key, entry in part.items()
                if isinstance(entry.value, StoredTensor)
            }
            for part in state.parts
        ]
        for name, entry in state.entries(models.trained).items():
            yield name, shared[entry]

    def _tell(self, severity: Severity, kind: str, message: str, name: str) -> None:
        self.findings.append(Finding(severity, kind, message, f"tensor {name!r}"))


def _described(models: ModelFiles | None) -> dict[str, Shape]:
    """Shapes that the model files say parameters have here, where these are not their own."""
    if models is None:
        return {}
    shapes = {tensor.name: tensor.layout.full_shape for tensor in models.tensors}
    return described_shapes(models.run, shapes)


def _rank(file: str) -> tuple[int, str]:
    """The master copy first, the step last."""
    return {f"{_MASTER}{_SUFFIX}": 0, f"{_STEP}{_SUFFIX}": 2}.get(file, 1), file


def _entry_of(tensor: StoredTensor, number: int, where: str) -> StateEntry:
    if not tensor.is_dense:
        raise UnsupportedError(
            f"is a view of shape {tensor.shape} with strides {tensor.strides}",
            where=where,
            remedy="save it after .contiguous()",
        )
    region = Region(number, tensor.start_nbytes) if prod(tensor.shape) else None
    return StateEntry(tensor.storage.dtype, whole_tensor(tensor.shape), (region,))


@lru_cache(maxsize=1024)
def whole_tensor(shape: Shape) -> Layout:
    """The layout of a tensor that is in one file; those of one shape share it."""
    return replicated(shape, mesh=_ONE_RANK)
