"""Read a DeepSpeed checkpoint of ZeRO-1 to ZeRO-3 into a catalog; no tensor is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from restride.checkpoint.catalog import Catalog
from restride.errors import UnsupportedError
from restride.formats.deepspeed._chunks import read_chunks
from restride.formats.deepspeed._expert_files import ExpertFiles
from restride.formats.deepspeed._experts import read_experts
from restride.formats.deepspeed._partitions import read_partitions
from restride.formats.deepspeed._run import open_run
from restride.formats.deepspeed._state_values import read_values
from restride.formats.deepspeed._tensors import read_tensors

if TYPE_CHECKING:
    from os import PathLike

    from restride.formats.deepspeed._experts import ExpertParameter
    from restride.formats.deepspeed._run import Run

__all__ = ["read_catalog"]


def read_catalog(path: str | PathLike[str]) -> Catalog:
    """Read what a DeepSpeed checkpoint holds: every tensor, its states, and where they are.

    Args:
        path: The checkpoint folder, where ``latest`` names the tag, or the folder of one tag.

    Returns:
        A catalog over the mesh ``dp, tp``. The layout of a parameter is that of the tensor-parallel
        ranks (of the expert-parallel ones for stacked experts); master weights and optimizer states
        are cut once more over the data-parallel ranks. What is no tensor is in the values, under
        ``model``, ``optimizer`` and ``other_files``.

    Raises:
        FormatError: It is no DeepSpeed checkpoint, or a file is not what it must be.
        CorruptError: Files are damaged or contradict each other.
        UnsupportedError: It is a checkpoint of a kind that cannot be read (ZeRO-0,
            pipeline stages), or nothing in it says how a parameter is cut.
        ExecutionError: The system cannot read a file.

    Cost:
        The metadata of every file is read, no tensor is. O(parameters * ranks).
    """
    run = open_run(Path(path))
    experts = _experts(run)
    files = ExpertFiles(run, experts)
    read = read_chunks if run.is_partitioned else read_partitions
    partitions = read(run, experts)
    tensors = tuple(read_tensors(run, experts, files, partitions))
    values = read_values(run, partitions.members, files.extras)
    return Catalog(
        format=f"deepspeed zero-{_stage(run)}",
        root=str(run.root),
        files=tuple(run.files.entries),
        mesh=run.mesh,
        tensors=tensors,
        values=values,
        findings=tuple(run.findings),
    )


def _experts(run: Run) -> dict[str, ExpertParameter]:
    root = run.models[0].root
    layers = root.get("ds_autoep_layers") or root.get("autoep_layers")
    experts = read_experts(layers)
    if experts and run.tp_size > 1:
        raise UnsupportedError(
            f"folds expert parallelism into {run.tp_size} tensor-parallel ranks",
            where=str(run.folder.path),
            remedy="AutoEP checkpoints without tensor parallelism can be read",
        )
    return experts


def _stage(run: Run) -> int:
    """BF16_Optimizer does not say the stage; the configuration does."""
    if run.stage is not None:
        return run.stage
    config = run.models[0].root.get("ds_config")
    section = config.get("zero_optimization") if config else None
    stage = section.get("stage") if section else None
    return stage.integer() if stage is not None else 1
