"""The model files alone: what a folder says whose optimizer states are somewhere else.

A universal folder carries the model files of the run that it was made of. They have the weights as
they were trained, cut by the tensor-parallel ranks, the buffers, the order of the model, and all
that is no tensor; under ZeRO-3 only shapes and dtypes instead of the weights.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import FileEntry, Finding
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._exchanged import files_of_other_ranks
from restride.formats.deepspeed._experts.files import files_written_twice, open_experts
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._files import list_files
from restride.formats.deepspeed._partitions import Partitions
from restride.formats.deepspeed._run import open_run
from restride.formats.deepspeed._state_values import read_values
from restride.formats.deepspeed._tensors import read_tensors
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from restride.checkpoint.catalog import TensorEntry
    from restride.formats.deepspeed._experts.files import Expert
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._values import Json
    from restride.storage.torch_zip import TorchFiles

__all__ = ["ModelFiles", "read_model_files"]

# What these tell of is in other files here.
_EXPECTED: Final = frozenset({"missing-file", "no-weight"})


class ModelFiles(Frozen):
    """What the model files of a folder say.

    Attributes:
        run: The files, opened.
        files: The same as entries of a catalog, with their names below what was opened.
        tensors: Parameters and buffers in the order of the model, with the states that the model
            files have. Empty where they do not say how the ranks cut them.
        order: Names of the parameters in the order of the model.
        trained: For each tensor-parallel rank, the names in each entry of its ``param_shapes``:
            parameters that the optimizer has states of.
        experts: Stacked experts by name.
        aliases: Other names, with the one that has the states.
        values: What is no tensor.
        findings: What was noticed.
    """

    run: Run
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    order: tuple[str, ...]
    trained: tuple[tuple[tuple[str, ...], ...], ...]
    experts: Mapping[str, Expert]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    findings: tuple[Finding, ...]

    @property
    def has_modules(self) -> bool:
        """Whether the model is in them; a pipeline has it in layer files."""
        return any(model.dtypes for model in self.run.models)

    @property
    def is_partitioned(self) -> bool:
        """Whether they are of ZeRO-3."""
        return self.run.is_partitioned

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Every parameter that the optimizer of some rank has states of."""
        return tuple(dict.fromkeys(chain(*chain(*self.trained))))

    def partition_count(self, members: Sequence[str]) -> int:
        """Count the data-parallel ranks that shared the buffer of a group in the source.

        Raises:
            CorruptError: It mixes experts with other parameters.
        """
        ranks = ExpertRanks(self.run, self.experts)
        return ranks.partition_count(members, self.run.models[0].name)


def read_model_files(folder: Path, below: str, opened: TorchFiles) -> ModelFiles | None:
    """Read the model files of a folder, or None where it has none.

    Args:
        folder: Where they are.
        below: Name of the folder below what was opened, with a slash, or empty.
        opened: What they are opened by.

    Raises:
        FormatError: A file is not what its name says.
        CorruptError: Files are damaged or contradict each other.
        ExecutionError: The system cannot read a file.
    """
    listed = list_files(folder, "")
    if not listed.models and not listed.partitioned:
        return None
    run = open_run(folder, opened, has_weights=False)
    first = run.models[0]
    findings, told = [*run.findings], len(run.findings)
    for model in run.models:
        if model.optimizer is not None:
            raise CorruptError(
                "has the optimizer's state in it, which a universal folder has in files of its own",
                where=f"{below}{model.name}",
                remedy="convert the checkpoint that it is of",
            )
    experts, expert_files = open_experts(run)
    has_modules = any(model.dtypes for model in run.models)  # a pipeline has them in layer files
    try:
        tensors = (
            tuple(read_tensors(run, experts, expert_files, Partitions())) if has_modules else ()
        )
    except UnsupportedError as error:
        message = f"the weights as they were trained are left out: {error}"
        findings.append(Finding("warning", "not-read", message, first.name))
        tensors = ()
    trained = tuple(tuple(map(tuple, model.param_shapes or ())) for model in run.models)
    values = read_values((run,), ((),), expert_files.extras)
    findings += [f for f in run.findings[told:] if f.kind not in _EXPECTED]
    findings += files_written_twice(opened)
    findings += files_of_other_ranks(opened, is_partitioned=run.is_partitioned)
    return ModelFiles(
        run,
        tuple(replace(entry, name=below + entry.name) for entry in run.files.entries),
        tensors,
        tuple(dict.fromkeys([*first.dtypes, *chain(*chain(*trained))])),
        trained,
        experts,
        _aliases(run, tensors),
        values,
        tuple(findings),
    )


def _aliases(run: Run, tensors: Iterable[TensorEntry]) -> dict[str, str]:
    """Second names that are said, and those that share their bytes with another tensor."""
    said = {alias: name for model in run.models for alias, name in model.aliases.items()}
    return said | {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
