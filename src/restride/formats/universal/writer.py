"""Describe a universal folder before it is written.

    latest_universal                       name of the folder beside it
    TAG_universal/zero/PARAMETER/fp32.pt   the whole tensor, and what marks it
    TAG_universal/zero/PARAMETER/STATE.pt  the same for each state of the optimizer
    TAG_universal/zero/PARAMETER/step.pt   the step, bare
    TAG_universal/zero/optimizer_state.pt  loss scaler, parameter groups
    TAG_universal/mp_rank_TT_model_states.pt

``load_checkpoint`` of an engine whose configuration says ``"checkpoint": {"load_universal": true}``
takes it from here. DeepSpeed 0.19.8 gives checkpoints of ZeRO-1 and ZeRO-2 this shape, and those of
ZeRO-3 another one, which its ZeRO-3 engine insists on: model files by data-parallel rank, steps in
``optimizer_state.pt``, and where nothing cuts the tensors, they are flat and without any marks.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.selection import Selected
from restride.checkpoint.soundness import require_sound
from restride.checkpoint.values import keyed
from restride.errors import UnsupportedError
from restride.formats.deepspeed._experts.native import expert_name
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._pipeline.cut import require_known_ties
from restride.formats.deepspeed._run import open_run
from restride.formats.deepspeed._writing.findings import rank_findings
from restride.formats.deepspeed._writing.groups import require_numbers
from restride.formats.deepspeed._writing.native_target import on_one_rank
from restride.formats.deepspeed.companions import read_companions
from restride.formats.deepspeed.model_copies import ModelCopies
from restride.formats.universal._optimizer_state import OPTIMIZER_STATE
from restride.formats.universal._write_optimizer import (
    SourceState,
    read_source_state,
    write_optimizer,
    write_partitioned_optimizer,
)
from restride.formats.universal.reader import FORMAT, LATEST, find_folder, whole_tensor
from restride.storage.torch_output import FileDraft, TorchOutput
from restride.storage.torch_zip import TorchFiles
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog, StateEntry, TensorEntry
    from restride.checkpoint.selection import Export
    from restride.checkpoint.training import ParameterGroup, Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed.companions import Companions

__all__ = ["lay_out"]

_MASTER: Final = DTYPES["float32"]
_PARAM: Final = "param"
_STEP: Final = "step"
_WEIGHT: Final = "weight"
_MUON: Final = (
    "a parameter group is updated by Muon: an engine of ZeRO-1 or ZeRO-2 keeps its momentum whole "
    "and takes a part of it from a universal folder; on several data-parallel ranks it stops, "
    "unless its optimizer is offloaded (seen with deepspeed 0.19.8); convert with --to deepspeed, "
    "for any ranks and stage"
)
_CASTABLE: Final = frozenset({"float32", "bfloat16", "float16", "float64"})
# What an engine of ZeRO-3 opens of every parameter (deepspeed 0.19.8 `runtime/zero/stage3.py`).
_ADAM: Final = ("fp32", "exp_avg", "exp_avg_sq")
_MOST_SHOWN: Final = 8


def lay_out(
    catalog: Catalog,
    training: Training,
    *,
    is_partitioned: bool,
    opened: TorchFiles | None = None,
) -> Export:
    """Describe the universal folder of a checkpoint.

    Args:
        catalog: What the checkpoint holds.
        training: What goes with the tensors.
        is_partitioned: Whether it is for an engine of ZeRO-3.
        opened: What the source's files were opened by; without it they are opened again.

    Returns:
        Files in the order of the model. A parameter without a master copy (a frozen one, another
        name of a tied one) has its weight, widened; for ZeRO-3, which does not look for it, it is
        in the model files only. So are buffers.

    Raises:
        CorruptError: The checkpoint is not whole.
        UnsupportedError: A name of a tensor or state cannot be the name of a folder or file, or an
            engine of ZeRO-3 would miss a state.

    Cost:
        O(tensors * states).
    """
    require_sound(catalog.findings, only_weights=False)
    opened = opened or TorchFiles()
    root = Path(catalog.root)
    is_universal = catalog.format.startswith(FORMAT)
    folder = root / find_folder(root) if is_universal else root
    run = open_run(folder, opened, has_weights=not is_universal, tied=catalog.tied)
    if run.stage_count > 1 and is_partitioned:
        raise UnsupportedError(
            f"is of {run.stage_count} pipeline stages, which an engine of ZeRO-3 does not have",
            where=str(root),
            remedy="choose --stage 1",
        )
    if training.pipeline is not None:
        require_known_ties(training.pipeline, str(root))
    for number, group in enumerate(training.groups):
        require_numbers(number, group, str(root))
    native = on_one_rank(catalog, training)
    if native is not None:
        _require_stage_of_experts(catalog, is_partitioned=is_partitioned)
        training = native
    companions = read_companions(run, catalog, training)
    source = read_source_state(run, opened, is_universal=is_universal)
    if run.is_partitioned != is_partitioned:
        source = SourceState(source.dp_size)
    top = f"{training.tag}_universal"
    writer = _Writer(catalog, training, companions, top)
    name = f"{top}/zero/{OPTIMIZER_STATE}"
    if is_partitioned:
        # Made of another stage, there is no folder of the peer's to be like; and shapes let engines
        # with tensor parallelism load it, which refuse what is flat.
        writer.add_partitioned(is_flat=run.is_partitioned and run.tp_size == 1)
        writer.findings.extend(
            write_partitioned_optimizer(writer.output, name, catalog, training, source)
        )
    else:
        writer.add_parameters()
        shared = {*write_optimizer(writer.output, name, catalog, training, source)}
        if shared:
            message = (
                f"no engine loads {', '.join(sorted(shared))} again from a universal folder; it is "
                f"in {OPTIMIZER_STATE}, for a conversion with --to deepspeed"
            )
            writer.findings.append(Finding("warning", "not-loaded", message))
    if native is not None:
        writer.findings.extend(_of_experts(catalog))
    copies = ModelCopies(run, catalog, training, companions.experts, has_native=native is not None)
    copies.write(writer.output, top, is_partitioned=is_partitioned)
    writer.findings.extend(_findings(run, catalog, training, is_partitioned=is_partitioned))
    writer.output.add_file(LATEST, top.encode())
    return writer.output.finish(tuple(writer.findings))


def _lacking_stages(training: Training) -> Iterator[Finding]:
    """Tell of stages of a pipeline that lack a group: an engine counts groups, by position.

    deepspeed 0.19.8 `runtime/base_optimizer.py`, `load_hp_checkpoint_state_from_checkpoint_dir`.
    """
    stages = training.pipeline.stages if training.pipeline else ()
    count = len(training.groups)
    lacking = [number for number, stage in enumerate(stages) if len(stage.groups) < count]
    if lacking:
        shown = ", ".join(map(str, lacking[:_MOST_SHOWN]))
        message = (
            f"not every stage trains all {count} parameter groups (stages {shown} do not), and "
            "engines that load a universal folder take settings by position: such stages would get "
            "those of other groups; --to deepspeed writes each stage its own"
        )
        yield Finding("warning", "stage-groups", message, "", {"stages": lacking})


def _findings(
    run: Run, catalog: Catalog, training: Training, *, is_partitioned: bool
) -> Iterator[Finding]:
    """Tell of what the folder does not have, and of what an engine does not take from it."""
    yield from _lacking_stages(training)
    if not all(group.settings for group in training.groups):
        message = (
            "the checkpoint has no hyperparameters (elastic_checkpoint leaves them out): an engine "
            "that loads the folder keeps those of its own configuration; --hyperparameters FILE "
            "gives them"
        )
        yield Finding("warning", "no-settings", message)
    if run.is_partitioned and not is_partitioned:
        yield from rank_findings(training, range(run.tp_size))
    if not is_partitioned and any(g.settings.get("use_muon") is True for g in training.groups):
        yield Finding("warning", "not-loaded", _MUON)
    folding = run.models[0].root.get("folding")
    if folding is not None:
        # deepspeed 0.19.8 `runtime/engine.py`, `_validate_autoep_folding_checkpoint_metadata`
        said = (("tp", "tp_size"), ("dp", "zero_partition_count"), ("ep", "ep_size"))
        ranks = ", ".join(f"{axis}={shown(folding.at(key).value)}" for axis, key in said)
        message = (
            f"the experts are folded into tensor parallelism, and only an engine with {ranks} "
            "loads the folder; for others, convert with --to deepspeed"
        )
        yield Finding("warning", "folded", message)
    if run.is_of_pipeline:
        yield from _lost_buffers(catalog)


def _require_stage_of_experts(catalog: Catalog, *, is_partitioned: bool) -> None:
    if is_partitioned:
        raise UnsupportedError(
            "has experts of DeepSpeed's own MoE layer, which DeepSpeed does not train with ZeRO-3",
            where=catalog.root,
            remedy="choose --stage 1",
        )


def _of_experts(catalog: Catalog) -> Iterator[Finding]:
    """Tell of what an engine makes of a folder with experts of DeepSpeed's own layers."""
    message = (
        "experts have the numbers that they have among all: a model whose layers have ep_size=1 "
        "resumes from this folder, and one with more gives every rank the experts of the first, "
        "without a word (seen with deepspeed 0.19.8); for that, convert with --to deepspeed --ep N"
    )
    yield Finding("warning", "own-moe", message)
    names = [t.name for t in catalog.tensors if t.kind == "buffer" and expert_name(t.name)]
    if names:
        message = (
            f"a universal folder has no place for {counted(len(names), 'buffer')} of experts, "
            "such as "
            f"{names[0]!r}: an engine that loads it keeps those that the model starts with"
        )
        yield Finding("warning", "not-carried", message, details={"names": names})


def _lost_buffers(catalog: Catalog) -> Iterator[Finding]:
    """Tell of what is in the layer files of a pipeline alone, which no universal folder has."""
    names = [tensor.name for tensor in catalog.tensors if tensor.kind == "buffer"]
    if names:
        message = (
            f"a universal folder of a pipeline has no place for {counted(len(names), 'buffer')}, "
            "such as "
            f"{names[0]!r}: an engine that loads it keeps those that the model starts with"
        )
        yield Finding("warning", "not-carried", message, details={"names": names})


class _Writer:
    """Adds the folder of each parameter."""

    def __init__(
        self, catalog: Catalog, training: Training, companions: Companions, top: str
    ) -> None:
        self._parameters = [tensor for tensor in catalog.tensors if tensor.kind == "parameter"]
        self._groups = training.groups
        self._companions = companions
        self._top = top
        self.output = TorchOutput(catalog)
        self.findings: list[Finding] = []

    def add_parameters(self) -> None:
        """Add them for an engine of ZeRO-1 or ZeRO-2."""
        numbers = {name: group.numbers for group in self._groups for name in group.names}
        for tensor in self._parameters:
            for state, entry in _arrays(tensor):
                marks = self._companions.marks.get(tensor.name, {})
                self._add(tensor, state, entry, self._path(tensor.name, state), marks)
            self._add_step(tensor, numbers.get(tensor.name, {}))
            self._add_weight(tensor)

    def add_partitioned(self, *, is_flat: bool) -> None:
        """Add them for an engine of ZeRO-3.

        Args:
            is_flat: Whether arrays have neither shape nor marks, but for those of experts.
        """
        trained = {name for group in self._groups for name in group.names}
        ignored: set[str] = set()
        for tensor in self._parameters:
            if tensor.name not in trained or not tensor.layout.full_numel:
                continue
            own = _own_master(tensor)
            known = {*tensor.states, *(() if own is None else ("fp32",))}
            missing = [state for state in _ADAM if state not in known]
            if missing:
                raise UnsupportedError(
                    f"has no state {missing[0]!r} (it has {', '.join(sorted(tensor.states))}), and "
                    f"an engine of ZeRO-3 loads exactly {', '.join(_ADAM)}",
                    where=f"tensor {tensor.name!r}",
                    remedy="choose --stage 1, or convert with --to deepspeed",
                )
            is_bare = is_flat and tensor.name not in self._companions.experts
            marks = None if is_bare else self._companions.marks.get(tensor.name, {})
            if own is not None:
                self._add(tensor, _WEIGHT, own, self._path(tensor.name, "fp32"), marks)
            for state, entry in _arrays(tensor):
                self._add(tensor, state, entry, self._path(tensor.name, state), marks)
                ignored |= {state} - {*_ADAM}
        if ignored:
            message = f"an engine of ZeRO-3 does not load {', '.join(sorted(ignored))} again"
            self.findings.append(Finding("warning", "not-loaded", message))
        self.findings.extend(_different_settings(self._groups))

    def _add_step(self, tensor: TensorEntry, numbers: Mapping[str, Value]) -> None:
        where = f"tensor {tensor.name!r}"
        for state, entry in tensor.states.items():
            if state == _STEP and not entry.layout.full_shape:
                self._add(tensor, state, entry, self._path(tensor.name, state), None)
            elif entry.layout.full_shape not in {tensor.layout.full_shape, ()}:
                message = (
                    f"{where}: its state {state!r} of shape {entry.layout.full_shape} has no place "
                    "in a universal folder"
                )
                self.findings.append(Finding("warning", "not-carried", message, where))
        for state, number in numbers.items():
            if state == _STEP and type(number) in {int, float}:
                self.output.add(FileDraft(self._path(tensor.name, state)), number)

    def _add_weight(self, tensor: TensorEntry) -> None:
        """Add the weight of a parameter, or of another name of it, that has nothing better."""
        weight = tensor.states.get(_WEIGHT)
        names = tensor.aliases if "fp32" in tensor.states else (tensor.name, *tensor.aliases)
        if weight is None or not names:
            return
        where = f"tensor {tensor.name!r}"
        if weight.dtype.name not in _CASTABLE:
            message = f"{where}: a weight of {weight.dtype} has no master copy to be restored from"
            self.findings.append(Finding("warning", "not-carried", message, where))
            return
        for name in names:
            has_states = name == tensor.name and tensor.states.keys() - {_WEIGHT}
            marks = self._companions.marks.get(name, {}) if has_states else {}
            self._add(tensor, _WEIGHT, weight, self._path(name, "fp32"), marks)

    def _add(
        self,
        tensor: TensorEntry,
        state: str,
        entry: StateEntry,
        path: str,
        marks: Mapping[str, Value] | None,
    ) -> None:
        """Add the file of one array: bare where there are no marks, not even none."""
        shape = entry.layout.full_shape
        dtype = _MASTER if state == _WEIGHT else entry.dtype
        selected = Selected(path, tensor.name, state, entry, dtype)
        array = self.output.array(selected, whole_tensor(shape))
        draft = FileDraft(path)
        flat = (prod(shape),) if shape else ()
        stored = flat if marks is None else self._companions.shapes.get(tensor.name, shape)
        made = draft.buffer(dtype, *stored)
        draft.put(made, array, 0)
        value: Value = made if marks is None else {**keyed(marks), _PARAM: made}
        self.output.add(draft, value, alike=(marks is None, tuple((marks or {}).items())))

    def _path(self, name: str, state: str) -> str:
        """Name of a file below the output; names in a checkpoint are somebody else's."""
        for part, what in ((name, "folder"), (state, "file")):
            if part in {"", ".", ".."} or not {"/", "\\", "\0"}.isdisjoint(part):
                raise UnsupportedError(
                    f"{part!r} cannot be the name of a {what} in a universal folder",
                    where=f"tensor {name!r}",
                    remedy="rename it, or convert with --to safetensors",
                )
        if name == OPTIMIZER_STATE:
            raise UnsupportedError(
                "a universal folder keeps this name for itself", where=f"tensor {name!r}"
            )
        return f"{self._top}/zero/{name}/{state}.pt"


def _own_master(tensor: TensorEntry) -> StateEntry | None:
    """The weight of a parameter that is its own master copy, and is not named twice.

    So are stacks of experts that are trained in float32 without ZeRO: their files are of single
    ones.
    """
    weight = tensor.states.get(_WEIGHT)
    is_master = weight is not None and weight.dtype == _MASTER and "fp32" not in tensor.states
    return weight if is_master else None


def _arrays(tensor: TensorEntry) -> Iterator[tuple[str, StateEntry]]:
    """States of a parameter that have its shape, without the weight."""
    for state, entry in tensor.states.items():
        is_scalar = state == _STEP and not entry.layout.full_shape
        is_whole = entry.layout.full_shape == tensor.layout.full_shape
        if state != _WEIGHT and is_whole and not is_scalar:
            yield state, entry


def _different_settings(groups: Sequence[ParameterGroup]) -> Iterator[Finding]:
    """Tell of hyperparameters that an engine of ZeRO-3 takes from the first group for all."""
    if not groups:
        return
    first = groups[0].settings
    different = sorted(
        {
            key
            for group in groups[1:]
            for key, value in first.items()
            if key != "name" and group.settings.get(key) != value
        }
    )
    if different:
        message = (
            f"parameter groups have different {', '.join(different)}; an engine of ZeRO-3 gives "
            "all groups the values of the first when it loads a universal folder: convert with "
            "--to deepspeed to keep them"
        )
        yield Finding("warning", "group-settings", message)
