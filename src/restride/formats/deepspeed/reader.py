"""Read a DeepSpeed checkpoint of any ZeRO stage into a catalog; no tensor is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from restride.checkpoint.catalog import Catalog, Finding
from restride.errors import UnsupportedError
from restride.formats.deepspeed._chunks import read_chunks
from restride.formats.deepspeed._consistency import find_contradictions
from restride.formats.deepspeed._exchanged import files_of_other_ranks
from restride.formats.deepspeed._experts.files import files_written_twice, open_experts
from restride.formats.deepspeed._partitions import read_partitions
from restride.formats.deepspeed._pipeline.tensors import joined_mesh, joined_tensors
from restride.formats.deepspeed._run import open_stages
from restride.formats.deepspeed._settings import zero_setting
from restride.formats.deepspeed._state_values import read_values
from restride.formats.deepspeed._tensors import read_tensors
from restride.formats.deepspeed._whole.experts import (
    ExpertRanks,
    expert_optimizers,
    puts_data_first,
)
from restride.formats.deepspeed._whole.states import read_whole
from restride.storage.torch_zip import TorchFiles

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from os import PathLike

    from restride.formats.deepspeed._experts.files import Expert, ExpertFiles
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed.told_cut import ToldCut

__all__ = ["read_catalog"]


def read_catalog(
    path: str | PathLike[str],
    opened: TorchFiles | None = None,
    tied: Mapping[str, tuple[int, ...]] | None = None,
    told: ToldCut | None = None,
) -> Catalog:
    """Read what a DeepSpeed checkpoint holds: every tensor, its states, and where they are.

    Args:
        path: The checkpoint folder, where ``latest`` names the tag, or the folder of one tag.
        opened: What its files are opened by, where others ask for them again.
        tied: For the key of each tied module of a pipeline, all layers that use it; empty where
            none is tied. Asked for where an optimizer numbers its parameters: without ZeRO.
        told: What a user tells of the cut of parameters. Asked for where the files say nothing.

    Returns:
        A catalog over the mesh ``dp, tp``. The layout of a parameter is that of the tensor-parallel
        ranks (of the expert-parallel ones for stacked experts); master weights and optimizer states
        are cut once more over the data-parallel ranks. What is no tensor is in the values, under
        ``model``, ``optimizer`` and ``other_files``.

        Of a pipeline it is the mesh ``pp, dp, tp``, and a tensor has layouts over the ranks of its
        stage; one that is tied over several stages has them over all ranks, and the stages that
        hold it are replicas.

    Raises:
        FormatError: It is no DeepSpeed checkpoint, or a file is not what it must be.
        CorruptError: Files are damaged or contradict each other.
        UnsupportedError: It is a checkpoint of a kind that cannot be read (experts
            in a pipeline), or nothing in it says how a parameter is cut.
        RuleError: What is told of the cut is not so.
        ExecutionError: The system cannot read a file.

    Cost:
        The metadata of every file is read, no tensor is. O(parameters * ranks).
    """
    opened = opened or TorchFiles()
    runs = open_stages(Path(path), opened, tied=tied)
    run = runs[0]
    experts, files = _experts(run)
    read = read_chunks if run.is_partitioned else read_partitions
    partitions = [read(stage, experts) for stage in runs]
    ranks = ExpertRanks(experts, files, puts_data_first(run))
    wholes = [read_whole(stage, ranks) for stage in runs]
    values = read_values(runs, [held.members for held in partitions], files.extras, wholes)
    if told is not None:
        told.see(_names(runs), values)
    tensors = [
        tuple(read_tensors(stage, experts, files, held, whole, told))
        for stage, held, whole in zip(runs, partitions, wholes, strict=True)
    ]
    if told is not None:
        run.findings.extend(told.findings())
    optimizers = expert_optimizers(run, ranks)
    run.findings.extend(found for stage in runs for found in find_contradictions(stage, optimizers))
    run.findings.extend(_held_back(run))
    run.findings.extend(files_written_twice(opened))
    run.findings.extend(files_of_other_ranks(opened, is_partitioned=run.is_partitioned))
    return Catalog(
        format=f"deepspeed zero-{_stage(run)}",
        root=str(run.root),
        files=tuple(run.files.entries),
        mesh=joined_mesh(runs),
        tensors=joined_tensors(tensors),
        values=values,
        findings=tuple(run.findings),
        is_cut_told=told is not None and bool(told.layouts),
        tied=tied if run.names is not None and run.names.tied_to is not None else None,
    )


def _held_back(run: Run) -> Iterator[Finding]:
    """Tell of a run whose master copies may be of a step before: ZenFlow updates weights alone.

    Of gradients that it holds back until the next update of all, no file has anything (deepspeed
    0.19.8 `runtime/zenflow`).
    """
    if run.zeros and zero_setting(run.models[0].root.get("ds_config"), "zenflow") is not None:
        lost = "nothing else has the weights" if run.is_partitioned else "the weights have these"
        message = (
            "the run trained with ZenFlow, which updates some columns of the weights at once and "
            f"their master copies later: those may lack the last steps, and {lost}"
        )
        yield Finding("warning", "zenflow", message, str(run.folder.path))


def _names(runs: Sequence[Run]) -> Collection[str]:
    """All parameters that are named somewhere."""
    found: dict[str, None] = {}
    for model in (model for run in runs for model in run.models):
        groups = (model.dtypes, model.weights, model.frozen, *(model.param_shapes or ()))
        found |= dict.fromkeys(name for group in groups for name in group)
    return found


def _experts(run: Run) -> tuple[dict[str, Expert], ExpertFiles]:
    root = run.models[0].root
    has_experts = bool(
        run.folder.experts or root.get("ds_autoep_layers") or root.get("autoep_layers")
    )
    if has_experts and run.is_of_pipeline:
        raise UnsupportedError(
            "has experts in the layers of a pipeline",
            where=str(run.folder.path),
            remedy="checkpoints with experts and without pipeline stages can be read",
        )
    return open_experts(run)


def _stage(run: Run) -> int:
    """The stage; where the files do not say it, by where the optimizer is, or the configuration.

    BF16_Optimizer does not say it, and the configuration leaves it out where it is 0.
    """
    if run.stage is not None:
        return run.stage
    if run.models[0].optimizer is not None:
        return 0
    config = run.models[0].root.get("ds_config")
    section = config.get("zero_optimization") if config else None
    stage = section.get("stage") if section else None
    return stage.integer() if stage is not None else int(bool(run.zeros))
