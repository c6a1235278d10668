"""The optimizer's parameter groups: which states they have, and what a group has in common."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import keyed
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._writing.writing import FP32, WEIGHT
from restride.layouts.replicated import replicated
from restride.storage.holders import has_tensor
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from restride.checkpoint.catalog import StateEntry, TensorEntry
    from restride.checkpoint.training import ModelRank, ParameterGroup
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.storage.torch_output import OutputArray

__all__ = [
    "group_states",
    "optimizer_file",
    "param_groups",
    "require_numbers",
    "scalar_states",
    "states_of",
]

_CONFIG: Final = "ds_config"
_VERSION: Final = "ds_version"
_STEP: Final = "step"
# Whose form it is that is written; engines refuse files that name no version.
_WRITTEN_VERSION: Final = "0.19.8"


def optimizer_file(rank: ModelRank, state: dict[Value, Value]) -> dict[Value, Value]:
    """An optimizer file around the state of the optimizer.

    Args:
        rank: The rank of the source whose configuration is carried.
        state: What the optimizer's own class keeps; gets the version where it has none.
    """
    version = rank.values.get(_VERSION) or state.get(_VERSION) or _WRITTEN_VERSION
    state.setdefault(_VERSION, version)
    made: dict[Value, Value] = {"optimizer_state_dict": state}
    if _CONFIG in rank.values:
        made[_CONFIG] = rank.values[_CONFIG]
    return {**made, _VERSION: version}


def param_groups(writing: Writing) -> list[Value]:
    """Hyperparameters of each group; its one flat parameter is numbered as the group."""
    return [
        {**keyed(group.settings), "params": [number]}
        for number, group in enumerate(writing.training.groups)
    ]


def require_numbers(number: int, group: ParameterGroup, where: str) -> None:
    """Refuse a group with a state that is neither an array of each parameter nor plain.

    One rank's tensors, alone or in a list, would be given to all ranks: matrices that precondition
    a gradient, tables and scales of quantized states.

    Args:
        number: Number of the group.
        group: The group.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: It has one.
    """
    for key, value in group.numbers.items():
        if has_tensor(value):
            raise UnsupportedError(
                f"state {key!r} of parameter group {number} is {shown(value)}, and no array of "
                "each parameter: how it is cut is not known",
                where=where,
                remedy="convert the weights with --to safetensors",
            )


def states_of(writing: Writing, number: int, group: ParameterGroup) -> tuple[str, ...]:
    """Name the states that every parameter of a group has, as large as itself; masters first.

    Raises:
        UnsupportedError: Parameters of the group have different states or dtypes, or a state that
            is neither as large as the parameter nor one number for the group.
    """
    require_numbers(number, group, writing.catalog.root)
    found: dict[str, str] = {}
    for name in group.names:
        tensor = writing.tensors[name]
        own = {FP32: writing.entry(tensor, FP32), **_arrays(tensor)}
        if not found:
            found = {state: entry.dtype.name for state, entry in own.items()}
        for state in {*found, *own}:
            # An entry that is missing is refused by name.
            dtype = writing.entry(tensor, state).dtype.name
            known = found.get(state, "not there")
            if dtype != known:
                raise UnsupportedError(
                    f"its state {state!r} is {dtype}, in {group.names[0]!r} of the same group it "
                    f"is {known}: a flat partition has one dtype for all of them",
                    where=f"tensor {name!r}",
                    remedy="convert a checkpoint whose parameters were all trained alike",
                )
    return tuple(found)


def group_states(writing: Writing, number: int, group: ParameterGroup) -> dict[str, OutputArray]:
    """Announce the states that are one number for the whole group, such as the step.

    They are replicated over all ranks of the target.

    Raises:
        UnsupportedError: Parameters of the group have different numbers.
        ExecutionError: A file cannot be read.
    """
    mesh = writing.target.mesh
    return {
        state: writing.state(writing.tensors[group.names[0]], state, replicated((), mesh=mesh))
        for state in scalar_states(writing, number, group)
    }


def scalar_states(writing: Writing, number: int, group: ParameterGroup) -> tuple[str, ...]:
    """Name the states that are one number for the whole group, such as the step.

    Raises:
        UnsupportedError: Parameters of the group have different numbers.
        ExecutionError: A file cannot be read.
    """
    if not group.names:
        return ()
    found = (_scalars(writing.tensors[name]) for name in group.names)
    states = tuple(dict.fromkeys(chain.from_iterable(found)))
    for state in states:
        _require_equal(writing, number, group, state)
    return states


def _arrays(tensor: TensorEntry) -> dict[str, StateEntry]:
    arrays: dict[str, StateEntry] = {}
    for state, entry in tensor.states.items():
        if state in {WEIGHT, FP32} or _is_scalar(tensor, state):
            continue
        if entry.layout.full_shape != tensor.layout.full_shape:
            raise UnsupportedError(
                f"its state {state!r} has shape {entry.layout.full_shape}, the parameter has "
                f"{tensor.layout.full_shape}: how it is cut is not known",
                where=f"tensor {tensor.name!r}",
                remedy="convert the weights with --to safetensors",
            )
        arrays[state] = entry
    return arrays


def _scalars(tensor: TensorEntry) -> list[str]:
    return [
        state
        for state in tensor.states
        if state not in {WEIGHT, FP32} and _is_scalar(tensor, state)
    ]


def _is_scalar(tensor: TensorEntry, state: str) -> bool:
    """Whether a state is one number for a whole group.

    A parameter may be one number itself. Flat partitions then tell its states, which have a place
    in one of them, from numbers that every rank has; where nothing is flat, the name does.
    """
    entry = tensor.states[state]
    if entry.layout.full_shape or tensor.layout.full_shape:
        return not entry.layout.full_shape
    master = tensor.states.get(FP32)
    if master is not None and not _is_whole(master):
        return _is_whole(entry)
    return state == _STEP


def _is_whole(entry: StateEntry) -> bool:
    return all(not shape for _, shape in entry.layout.shard_shapes)


def _require_equal(writing: Writing, number: int, group: ParameterGroup, state: str) -> None:
    """Compare a number over the parameters of a group: a few bytes of each file that has one."""
    root = Path(writing.catalog.root)
    seen: dict[tuple[int, int], bytes] = {}
    expected: tuple[str, bytes] | None = None
    with FilePool() as pool:
        for name in group.names:
            entry = writing.entry(writing.tensors[name], state)
            region = next((region for region in entry.regions if region is not None), None)
            if region is None:
                raise CorruptError(f"state {state!r} is in no file", where=f"tensor {name!r}")
            place = region.file, region.start_nbytes
            if place not in seen:
                buffer = bytearray(entry.dtype.itemsize_nbytes)
                file = str(root / writing.catalog.files[region.file].name)
                pool.read_exact(file, region.start_nbytes, buffer)
                seen[place] = bytes(buffer)
            if expected is None:
                expected = name, seen[place]
            if seen[place] != expected[1]:
                raise UnsupportedError(
                    f"its state {state!r} is not that of {expected[0]!r}, and parameter group "
                    f"{number} has one for all of its parameters",
                    where=f"tensor {name!r}",
                    remedy="convert a checkpoint whose parameters were all trained alike",
                )
