"""Read the training that a universal folder carries: all that a writer needs but tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.training import ParameterGroup
from restride.checkpoint.values import StoredTensor, difference
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._optimizer import CONSUMED_KEYS
from restride.formats.deepspeed._pipeline.described_layers import described_pipeline
from restride.formats.deepspeed.model_files import read_model_files
from restride.formats.deepspeed.training import read_model_training
from restride.formats.universal._optimizer_state import OPTIMIZER_STATE, read_optimizer_state
from restride.formats.universal._order import in_order
from restride.formats.universal.reader import find_folder
from restride.storage.torch_zip import TorchFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed.model_files import ModelFiles
    from restride.formats.universal._optimizer_state import OptimizerState

__all__ = ["read_training"]

_SUFFIX: Final = "_universal"
_NOT_OF_THE_WHOLE: Final = CONSUMED_KEYS | {"zero_stage", "param_groups"}


def read_training(catalog: Catalog, opened: TorchFiles | None = None) -> Training:
    """Read, from the files of a universal folder, what goes with its tensors.

    Args:
        catalog: What `read_catalog` gave for the folder.
        opened: What its files were opened by; without it they are opened again.

    Raises:
        UnsupportedError: It has no model files, or no state of the optimizer.
        FormatError, CorruptError, ExecutionError: As for `read_catalog`.

    Cost:
        O(metadata of the model files + parameters); no tensor is read.
    """
    opened = opened or TorchFiles()
    root = Path(catalog.root)
    below = find_folder(root)
    folder = root / below if below else root
    models = read_model_files(folder, below, opened)
    path = folder / "zero" / OPTIMIZER_STATE
    if models is None or not os.path.lexists(path):
        missing = "no model files" if models is None else f"no zero/{OPTIMIZER_STATE}"
        raise UnsupportedError(
            f"has {missing}, and a training does not go on without",
            where=str(folder),
            remedy="convert the weights with --to safetensors",
        )
    state = read_optimizer_state(path, f"{below}zero/{OPTIMIZER_STATE}", opened)
    training = read_model_training(models.run, catalog)
    groups = tuple(_groups(models, state, folder, opened))
    is_staged = not models.has_modules and not models.is_partitioned
    parameters = (tensor.name for tensor in catalog.tensors if tensor.kind == "parameter")
    return replace(
        training,
        pipeline=described_pipeline(models.run, groups, parameters) if is_staged else None,
        tag=training.tag.removesuffix(_SUFFIX) or training.tag,
        groups=groups,
        optimizer={
            key: entry.value for key, entry in state.root.items() if key not in _NOT_OF_THE_WHOLE
        },
    )


def _groups(
    models: ModelFiles, state: OptimizerState, folder: Path, opened: TorchFiles
) -> Iterator[ParameterGroup]:
    members = state.members(in_order(models, state), models.order)
    for number, group in enumerate(state.groups):
        names = members[number]
        shared = [
            part
            for part, parent in zip(state.parts, state.parents or (), strict=True)
            if parent == number
        ]
        yield ParameterGroup(
            names=names,
            settings={key: entry.value for key, entry in group.items() if key != "params"},
            numbers=_steps(folder, names, opened) | _of_parts(shared),
        )


def _of_parts(parts: Sequence[Mapping[str, Field]]) -> dict[str, Value]:
    """States of the sub-groups of one group that are no arrays."""
    found: dict[str, Field] = {}
    for part in parts:
        for key, entry in part.items():
            if isinstance(entry.value, StoredTensor):
                continue
            first = found.setdefault(key, entry)
            different = difference(entry.value, first.value)
            if different is not None:
                place, one, other = different
                raise UnsupportedError(
                    f"is {shown(one)}, {first.where}{place} of the same group is {shown(other)}",
                    where=f"{entry.where}{place}",
                    remedy="convert a folder whose parameters were all trained alike",
                )
    return {key: entry.value for key, entry in found.items()}


def _steps(folder: Path, names: Sequence[str], opened: TorchFiles) -> dict[str, Value]:
    """The step of a group, where it is a plain number; every parameter has a copy."""
    found: dict[str, Value] = {}
    for name in names:
        path = folder / "zero" / name / "step.pt"
        value = opened.open(path).value if os.path.lexists(path) else None
        if isinstance(value, StoredTensor):
            return {}
        if value is None:
            continue
        if type(value) not in {int, float} or found.setdefault("step", value) != value:
            raise CorruptError(
                f"the step is {value!r}, that of {names[0]!r} in the same group is "
                f"{found.get('step')!r}",
                where=f"zero/{name}/step.pt",
            )
    return found
