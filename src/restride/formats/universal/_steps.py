"""Steps of an optimizer: an engine of ZeRO-3 takes one from a universal folder for all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._settings import zero_setting
from restride.formats.deepspeed._sub_groups import DEFAULT_SUB_GROUP_NUMEL
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value

__all__ = ["different_steps", "shared_step"]

_STEP: Final = "step"
_Step: TypeAlias = "tuple[str, bytes] | str | None"


def different_steps(
    catalog: Catalog, parts: Sequence[tuple[Sequence[str], Mapping[str, Value]]]
) -> Iterator[Finding]:
    """Compare the steps of all parameters, in what has one for several of them.

    Args:
        catalog: Where the steps are that are tensors.
        parts: Names of the parameters of each sub-group, and its states that are plain numbers.

    Yields:
        That sub-groups differ: an engine takes the step of the first one for all (deepspeed 0.19.8
        `runtime/zero/stage3.py`, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`).

    Raises:
        UnsupportedError: Parameters of one sub-group have different steps.
        ExecutionError: A file cannot be read.

    Cost:
        A few bytes of each place in a file that has a step.
    """
    with FilePool() as pool:
        reader = _Reader(catalog, pool)
        steps = [reader.step_of(number, *part) for number, part in enumerate(parts)]
    others = [number for number, step in enumerate(steps) if step not in (None, steps[0])]
    if others:
        message = (
            f"{len(others)} of {len(steps)} sub-groups, such as number {others[0]}, have another "
            "step than the first; an engine of ZeRO-3 gives all that of the first when it loads a "
            "universal folder: convert with --to deepspeed to keep them"
        )
        yield Finding("warning", "group-steps", message, details={"sub_groups": others})


def shared_step(catalog: Catalog, training: Training, sub_groups: int) -> Iterator[Finding]:
    """Tell of a step that is a tensor, which an engine of ZeRO-3 hands to all of its sub-groups.

    Every one of them counts it on (seen with deepspeed 0.19.8 and optimizers of torch).

    Args:
        catalog: The parameters.
        training: Their groups.
        sub_groups: How many of them are known of; the engine may make more.
    """
    stored = training.ranks[0].values.get("ds_config")
    limit = zero_setting(None if stored is None else Field(stored, "ds_config"), "sub_group_size")
    most = limit.value if limit is not None else DEFAULT_SUB_GROUP_NUMEL
    numels = {tensor.name: tensor.layout.full_numel for tensor in catalog.tensors}
    largest = max(sum(numels.get(name, 0) for name in group.names) for group in training.groups)
    if sub_groups > 1 or (isinstance(most, int | float) and largest > most):
        message = (
            "the step is a tensor, and an engine of ZeRO-3 that has several sub-groups gives all "
            "of them this one when it loads a universal folder: it is counted once for each "
            "of them at every step (seen with deepspeed 0.19.8); convert with --to deepspeed "
            "--zero 3"
        )
        yield Finding("warning", "shared-step", message)


class _Reader:
    def __init__(self, catalog: Catalog, pool: FilePool) -> None:
        self._catalog = catalog
        self._pool = pool
        self._tensors = {tensor.name: tensor for tensor in catalog.tensors}
        self._known: dict[tuple[int, int], bytes] = {}

    def step_of(self, number: int, names: Sequence[str], numbers: Mapping[str, Value]) -> _Step:
        """The step of a sub-group; None where it has no parameter."""
        plain = numbers.get(_STEP)
        if plain is not None and not isinstance(plain, StoredTensor):
            return repr(plain)
        first: tuple[str, _Step] | None = None
        for name in names:
            if name not in self._tensors:
                continue
            step = self._read(name)
            if first is None:
                first = name, step
            elif step != first[1]:
                raise UnsupportedError(
                    f"its step is not that of {first[0]!r}, and sub-group {number} has one for all "
                    "of its parameters",
                    where=f"tensor {name!r}",
                    remedy="choose --stage 1, where every parameter has its own",
                )
        return first[1] if first else None

    def _read(self, name: str) -> _Step:
        entry = self._tensors[name].states.get(_STEP)
        region = next((r for r in entry.regions if r is not None), None) if entry else None
        if entry is None or region is None or entry.layout.full_shape:
            return None
        place = region.file, region.start_nbytes
        if place not in self._known:
            buffer = bytearray(entry.dtype.itemsize_nbytes)
            file = str(Path(self._catalog.root) / self._catalog.files[region.file].name)
            self._pool.read_exact(file, region.start_nbytes, buffer)
            self._known[place] = bytes(buffer)
        return entry.dtype.name, self._known[place]
