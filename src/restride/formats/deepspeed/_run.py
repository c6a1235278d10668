"""All files of one checkpoint, opened and matched to the ranks that wrote them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from msgspec import field
from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import FileEntry, Finding, Region
from restride.errors import CorruptError, FormatError
from restride.formats.deepspeed._experts.group_order import in_one_order
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._files import find_tag, list_files
from restride.formats.deepspeed._optimizer import read_zero_file, unsaid_widths
from restride.formats.deepspeed._pipeline.stages import OpenedModel, agreed, find_grid, read_stages
from restride.formats.deepspeed._settings import is_bf16
from restride.frozen import Frozen
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from pathlib import Path

    from restride.checkpoint.training import PipelineLayer
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._files import OptimizerFile, TagFolder
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._optimizer import ZeroFile
    from restride.formats.deepspeed._pipeline.optimizers import StageNames
    from restride.formats.deepspeed._pipeline.stages import Grid
    from restride.storage.torch_zip import TorchFiles

__all__ = ["FileTable", "Run", "joined_run", "open_run", "open_stages"]

_MOST_NAMED: Final = 5
_MOST_RANKS: Final = 1 << 20


class FileTable:
    """The files that were opened, in the order of the catalog."""

    def __init__(self, folder: TagFolder, opened: TorchFiles) -> None:
        self._folder = folder
        self._opened = opened
        self._numbers: dict[str, int] = {}
        self.entries: list[FileEntry] = []

    def open(self, name: str) -> Field:
        """Open one file of the tag folder and return what it holds.

        Raises:
            FormatError: It is no file of ``torch.save``.
        """
        file = self._opened.open(self._folder.path / name)
        self._numbers[file.path] = len(self.entries)
        self.entries.append(FileEntry(self._folder.below + name, file.nbytes, file.stamp))
        return Field(file.value, self._folder.below + name)

    def region(self, tensor: StoredTensor) -> Region:
        """Return the place of a tensor."""
        return Region(self._numbers[tensor.storage.file], tensor.start_nbytes)


class Run(Frozen):
    """The files of a checkpoint, by rank; those of one stage, where it is of a pipeline.

    Attributes:
        root: What was opened.
        folder: The files of the tag.
        files: Those that were opened.
        dp_size: Data-parallel ranks.
        tp_size: Tensor-parallel ranks.
        models: Model file of each tensor-parallel rank; under ZeRO-3 that of its first
            data-parallel rank.
        partitioned: Model file of each (dp, tp) rank that has one, under ZeRO-3.
        zeros: Optimizer file of each (dp, tp) rank that has one.
        stage: ZeRO stage, where it is said.
        findings: What was noticed; readers add to it. All stages of a pipeline have one list.
        pipe: Number of the pipeline stage.
        layers: Layers of a pipeline that have a file of their own.
        stage_count: Pipeline stages that it is of all at once, each with its own parameters; then
            the model-parallel ranks of all of them count as tensor-parallel ranks.
        copies: Further copies of weights that several layers of this stage are tied to: the shard
            of each tensor-parallel rank.
        elsewhere: Tied weights that only other stages store, with the shard of each tensor-parallel
            rank.
        names: Without ZeRO, what the stages of a pipeline are known to train.
    """

    root: Path
    folder: TagFolder
    files: FileTable
    dp_size: int
    tp_size: int
    models: tuple[ModelFile, ...]
    partitioned: dict[tuple[int, int], ModelFile]
    zeros: dict[tuple[int, int], ZeroFile]
    stage: int | None
    findings: list[Finding] = field(default_factory=list)
    pipe: int = 0
    copies: Mapping[str, Sequence[tuple[StoredTensor, ...]]] = field(default_factory=dict)
    elsewhere: Mapping[str, Sequence[StoredTensor]] = field(default_factory=dict)
    names: StageNames | None = None
    layers: tuple[PipelineLayer, ...] = ()
    stage_count: int = 1

    @property
    def is_partitioned(self) -> bool:
        """Whether it is of ZeRO-3: no model file has the weights."""
        return bool(self.partitioned)

    @property
    def is_of_pipeline(self) -> bool:
        """Whether the weights are in layer files."""
        return bool(self.folder.layers)

    @property
    def all_models(self) -> tuple[ModelFile, ...]:
        """Model files of all ranks that wrote one."""
        return tuple(self.partitioned.values()) or self.models

    @property
    def mesh(self) -> Mesh:
        """The ranks; tensor parallelism is the fastest."""
        return Mesh((("dp", self.dp_size), ("tp", self.tp_size)))

    def rank(self, dp: int, tp: int) -> int:
        """Rank on the mesh ``dp, tp``."""
        return dp * self.tp_size + tp


def open_run(
    root: Path,
    opened: TorchFiles,
    *,
    has_weights: bool = True,
    tied: Mapping[str, tuple[int, ...]] | None = None,
) -> Run:
    """Open the files of a checkpoint; those of all pipeline stages are one run.

    It does for what is not cut: values, groups, names. The tensors of a pipeline are read from each
    stage by itself.

    Args:
        root: The checkpoint folder, or that of one tag.
        opened: What its files are opened by.
        has_weights: Whether the weights of a pipeline must be there; universal folders lack them.
        tied: What is told of the layers of a pipeline that share a module.

    Raises:
        FormatError: It is no DeepSpeed checkpoint, or a file is not what its name says.
        CorruptError: Files contradict each other, or the weights of a rank are missing.
        UnsupportedError: It is a DeepSpeed checkpoint of a kind that cannot be read.
    """
    return joined_run(open_stages(root, opened, has_weights=has_weights, tied=tied))


def joined_run(runs: Sequence[Run]) -> Run:
    """The runs of all stages as one."""
    first, tp_size = runs[0], runs[0].tp_size
    if len(runs) == 1:
        return first
    return replace(
        first,
        tp_size=tp_size * len(runs),
        models=tuple(
            replace(model, tp=run.pipe * tp_size + model.tp) for run in runs for model in run.models
        ),
        zeros={
            (dp, run.pipe * tp_size + tp): replace(zero, tp=run.pipe * tp_size + tp)
            for run in runs
            for (dp, tp), zero in run.zeros.items()
        },
        layers=tuple(layer for run in runs for layer in run.layers),
        stage_count=len(runs),
    )


def open_stages(
    root: Path,
    opened: TorchFiles,
    *,
    has_weights: bool = True,
    tied: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Run, ...]:
    """Open the files of a checkpoint; those of each pipeline stage are a run of their own.

    Args:
        root: The checkpoint folder, or that of one tag.
        opened: What its files are opened by.
        has_weights: Whether the weights of a pipeline must be there, and the optimizer files;
            universal folders lack them.
        tied: What is told of the layers of a pipeline that share a module.

    Raises:
        FormatError: It is no DeepSpeed checkpoint, or a file is not what its name says.
        CorruptError: Files contradict each other, or the weights of a rank are missing.
        UnsupportedError: It is a DeepSpeed checkpoint of a kind that cannot be read.
    """
    folder = list_files(*find_tag(root))
    files = FileTable(folder, opened)
    models = _open_models(folder, files)
    grid = find_grid(folder, models)
    own = [model for model in models if model.mp < grid.size]
    dp_size = _data_size(folder, grid, own)
    findings = list(_strangers(models, grid, folder, dp_size))
    own = [model for model in own if model.dp is None or model.dp < dp_size]
    zeros = _open_zeros(folder, files, own, grid, dp_size)
    findings.extend(_passed_over(folder, zeros))
    stage = agreed(((zero.stage, zero.name) for zero in zeros.values()), "zero_stage")
    runs: list[Run] = []
    stages = read_stages(folder, files.open, grid, own, zeros, has_weights=has_weights, tied=tied)
    for pipe, read in enumerate(stages):
        own_models, own_zeros = read.models, _of_stage(zeros, grid, pipe)
        if not read.partitioned:
            own_models, own_zeros = in_one_order(own_models, own_zeros)
        run = Run(
            root=root,
            folder=folder,
            files=files,
            dp_size=dp_size,
            tp_size=grid.tp_size,
            models=own_models,
            partitioned=read.partitioned,
            zeros=own_zeros,
            stage=stage,
            findings=findings,
            pipe=pipe,
            copies=read.layers.copies if read.layers else {},
            elsewhere=read.layers.elsewhere if read.layers else {},
            names=read.names,
            layers=tuple(read.layers.layers if read.layers else ()),
        )
        # Without ZeRO the optimizer has numbers, and what it trained is found out later.
        findings.extend(_unnamed(read.layers.unnamed if read.layers and zeros else ()))
        _check_stage(run)
        missing = _missing(run, has_optimizer=bool(zeros))
        findings.extend(missing if has_weights else _missing_in_universal(run))
        runs.append(run)
    return tuple(runs)


def _open_zeros(
    folder: TagFolder,
    files: FileTable,
    opened: Sequence[OpenedModel],
    grid: Grid,
    dp_size: int,
) -> dict[tuple[int, int], ZeroFile]:
    """Optimizer file of each (dp, mp) rank that has one."""
    chosen = sorted(_choose(folder, opened, grid.size, dp_size).items())
    roots = {rank: files.open(file.name) for rank, file in chosen}
    widths = {
        mp: unsaid_widths(root for (_, own), root in roots.items() if own == mp)
        for mp in range(grid.size)
    }
    return {
        (dp, mp): read_zero_file(
            roots[dp, mp], folder.below + file.name, dp, mp % grid.tp_size, widths[mp]
        )
        for (dp, mp), file in chosen
    }


def _of_stage(
    zeros: Mapping[tuple[int, int], ZeroFile], grid: Grid, pipe: int
) -> dict[tuple[int, int], ZeroFile]:
    """Those of the ranks of one pipeline stage, by (dp, tp)."""
    return {
        (dp, mp % grid.tp_size): zero
        for (dp, mp), zero in zeros.items()
        if mp // grid.tp_size == pipe
    }


def _data_size(folder: TagFolder, grid: Grid, opened: Sequence[OpenedModel]) -> int:
    """Count the data-parallel ranks: what the model files say, or what the names of files do."""
    said = agreed(((model.count("dp_world_size"), model.name) for model in opened), "dp_world_size")
    size = said or 1 + max(_data_ranks(folder), default=0)
    if size * grid.size > _MOST_RANKS:
        raise CorruptError(
            f"dp_world_size is {size} with {grid.size} model-parallel ranks, no run has more than "
            f"{_MOST_RANKS} ranks",
            where=str(folder.path),
        )
    return size


def _open_models(folder: TagFolder, files: FileTable) -> list[OpenedModel]:
    if not folder.models and not folder.partitioned:
        raise FormatError(
            "has no *mp_rank_*_model_states.pt with the weights",
            where=str(folder.path),
        )
    opened = [
        OpenedModel(folder.below + name, None, mp, files.open(name))
        for mp, name in sorted(folder.models.items())
    ]
    return opened + [
        OpenedModel(folder.below + name, dp, mp, files.open(name))
        for (dp, mp), name in sorted(folder.partitioned.items())
    ]


def _check_stage(run: Run) -> None:
    """The two kinds of files of a rank are of one stage, or of two saves."""
    for zero in run.zeros.values():
        model = run.models[zero.tp]
        problem = ""
        if zero.is_partitioned != run.is_partitioned:
            problem = f"is of ZeRO-{zero.stage or 1}, {model.name} is not"
        elif model.optimizer is not None:
            problem = f"is an optimizer file, and {model.name} has the optimizer's state in it"
        if problem:
            raise CorruptError(
                problem, where=zero.name, remedy="put only the files of one save into the folder"
            )


def _data_ranks(folder: TagFolder) -> Iterable[int]:
    yield from (file.dp for file in folder.optimizers)
    yield from (dp for dp, _ in folder.partitioned)


def _choose(
    folder: TagFolder, opened: Sequence[OpenedModel], mp_size: int, dp_size: int
) -> dict[tuple[int, int], OptimizerFile]:
    """Pick the optimizer file of each rank; the precision of the run decides between prefixes."""
    found: dict[tuple[int, int], list[OptimizerFile]] = defaultdict(list)
    for file in folder.optimizers:
        if file.dp < dp_size and file.mp < mp_size:
            found[file.dp, file.mp].append(file)
    chosen: dict[tuple[int, int], OptimizerFile] = {}
    for rank, files in found.items():
        wanted = [file for file in files if file.prefix == _prefix(opened)]
        picked = files if len(files) == 1 else wanted
        if len(picked) != 1:
            raise CorruptError(
                f"dp rank {rank[0]}, mp rank {rank[1]} has {len(files)} optimizer files: "
                f"{', '.join(file.name for file in files)}",
                where=str(folder.path),
                remedy="put only the files of one save into the folder",
            )
        chosen[rank] = picked[0]
    return chosen


def _prefix(opened: Sequence[OpenedModel]) -> str:
    """Prefix that a run with this configuration writes (deepspeed 0.19.8 `runtime/engine.py`)."""
    return "bf16_" if opened and is_bf16(opened[0].root.get("ds_config")) else ""


def _strangers(
    opened: Sequence[OpenedModel], grid: Grid, folder: TagFolder, dp_size: int
) -> Iterable[Finding]:
    """Tell of files that the ranks of this save did not write."""
    stale = [model.name for model in opened if model.mp >= grid.size or (model.dp or 0) >= dp_size]
    stale += [
        folder.below + file.name
        for file in folder.optimizers
        if file.dp >= dp_size or file.mp >= grid.size
    ]
    stale += [folder.below + file.name for file in folder.layers if file.tp >= grid.tp_size]
    pipe = f"pp={grid.stage_count}, " if grid.stage_count > 1 else ""
    for name in stale:
        yield Finding(
            "warning",
            "stale-file",
            f"{name} is of a rank that a run with {pipe}dp={dp_size}, tp={grid.tp_size} does not "
            "have; it is left out",
            name,
        )
    for name in folder.unknown:
        yield Finding("note", "unknown-file", f"{name} is no file of DeepSpeed's", name)


def _passed_over(folder: TagFolder, zeros: Mapping[tuple[int, int], ZeroFile]) -> Iterable[Finding]:
    """Tell of optimizer files of a rank that has another one, of the precision of the run."""
    for file in folder.optimizers:
        name = folder.below + file.name
        chosen = zeros.get((file.dp, file.mp))
        if chosen is not None and chosen.name != name:
            message = (
                f"{name} is of a rank that has {chosen.name} as well, of the precision that is "
                "configured; it is left out"
            )
            yield Finding("warning", "stale-file", message, name)


def _unnamed(layers: Iterable[str]) -> Iterable[Finding]:
    """Tell of layers behind those that are trained: files of a run with more layers stay there."""
    for name in layers:
        message = (
            f"{name} is of a layer behind the last one of which anything is trained: it is frozen, "
            "or left of a run with more layers; it is read as frozen"
        )
        yield Finding("warning", "stale-file", message, name)


def _missing(run: Run, *, has_optimizer: bool) -> Iterable[Finding]:
    if run.is_partitioned:
        yield from _missing_files(run, run.partitioned, "model", "the frozen weights")
        # Without weights in the model files, no optimizer files are no smaller loss than some.
        yield from _missing_files(run, run.zeros, "optimizer", "the weights and states")
    elif has_optimizer:
        yield from _missing_files(run, run.zeros, "optimizer", "the states")
    elif run.models[0].optimizer is None and not run.pipe:
        message = "there are no optimizer files: only the weights can be read"
        yield Finding("note", "no-optimizer", message, str(run.folder.path))


def _missing_in_universal(run: Run) -> Iterable[Finding]:
    """Model files of ZeRO-3 that are not there: but for frozen weights, no tensor is in them.

    Engines read those of the first data-parallel rank (deepspeed 0.19.8 `runtime/engine.py`,
    `_get_all_ckpt_names`).
    """
    if not run.is_partitioned:
        return
    known = run.partitioned
    if any(model.fragments for model in known.values()):
        yield from _missing_files(run, known, "model", "the frozen weights")
    elif all((0, tp) in known for tp in range(run.tp_size)):
        unread = "engines do without, and what no other one says is left out"
        yield from _missing_files(run, known, "model", warning=unread)
    else:
        stops = "engines of ZeRO-3 do not resume without those of dp 0"
        yield from _missing_files(run, known, "model", warning=stops)


def _missing_files(
    run: Run, known: Container[tuple[int, int]], kind: str, lost: str = "", *, warning: str = ""
) -> Iterable[Finding]:
    """Tell of files that are missing: an error where something is lost, else a warning."""
    missing = [
        (dp, tp) for dp in range(run.dp_size) for tp in range(run.tp_size) if (dp, tp) not in known
    ]
    if missing:
        named = ", ".join(f"dp {dp} tp {tp}" for dp, tp in missing[:_MOST_NAMED])
        lost_one = _name_of(run, kind, *missing[0])
        such = f", {'such as ' if missing[1:] else ''}{lost_one}" if lost_one else ""
        part = {"part": "optimizer"} if kind == "optimizer" and not run.is_partitioned else {}
        kind += f" files of stage {run.pipe}" if run.is_of_pipeline else " files"
        holds = which(len(missing), "it holds", "they hold")
        yield Finding(
            "warning" if warning else "error",
            "missing-file",
            f"{len(missing)} of {run.dp_size * run.tp_size} {kind} "
            f"{which(len(missing), 'is', 'are')} missing ({named}){such}; "
            f"{warning or f'{lost} that {holds} parts of are left out'}",
            str(run.folder.path),
            {"ranks": [list(rank) for rank in missing], **part},
        )


def _name_of(run: Run, kind: str, dp: int, tp: int) -> str:
    """Name of the file of a rank; empty where no other one shows how they begin."""
    place = f"zero_pp_rank_{dp}_mp_rank_{run.pipe * run.tp_size + tp:02d}"
    if kind == "model":
        return f"{place}_model_states.pt"
    others = run.folder.optimizers
    return f"{others[0].prefix}{place}_optim_states.pt" if others else ""
