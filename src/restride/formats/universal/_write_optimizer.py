"""``zero/optimizer_state.pt`` as it is written: what goes with all arrays of an optimizer.

In the shape of ZeRO-3 the peer copies the whole state that the first rank saved, with the flat
partitions of that one rank. No engine looks at these; they are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field

from restride.algebra.mesh import Mesh
from restride.checkpoint.selection import Selected
from restride.checkpoint.values import Constructed, GlobalName, StoredTensor, keyed
from restride.errors import UnsupportedError
from restride.formats.deepspeed.companions import read_geometry
from restride.formats.universal._optimizer_state import OPTIMIZER_STATE, read_optimizer_state
from restride.formats.universal._steps import different_steps, shared_step
from restride.frozen import Frozen
from restride.layouts.replicated import replicated
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog, Finding, TensorEntry
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._run import Run
    from restride.storage.torch_output import TorchOutput
    from restride.storage.torch_zip import TorchFiles

__all__ = ["SourceState", "read_source_state", "write_optimizer", "write_partitioned_optimizer"]

_STEP: Final = "step"
_VERSION: Final = "ds_version"
_ONE_RANK: Final = Mesh(())
_STAGE: Final = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
_OPTIMIZER_STATES: Final = 1
_PARTITIONED_WEIGHTS: Final = 3


class SourceState(Frozen):
    """The optimizer's state of the source, as far as its own ranks are in it.

    Attributes:
        dp_size: Data-parallel ranks.
        geometry: What it says of them.
        parts: For each sub-group of ZeRO-3, its parameter group and its members.
    """

    dp_size: int
    geometry: Mapping[str, Value] = field(default_factory=dict)
    parts: Sequence[tuple[int, tuple[str, ...]]] = ()


def read_source_state(run: Run, opened: TorchFiles, *, is_universal: bool) -> SourceState:
    """Read the optimizer's state of the source.

    Args:
        run: The files of a checkpoint, or the model files of a universal folder.
        opened: What they were opened by.
        is_universal: Which of the two.

    Raises:
        FormatError, CorruptError, ExecutionError: A file cannot be read.
    """
    if is_universal:
        name = f"zero/{OPTIMIZER_STATE}"
        state = read_optimizer_state(run.root / name, name, opened)
        root, parents = state.root, state.parents or ()
    elif run.zeros:
        zero = next(iter(run.zeros.values()))
        root, parents = zero.state, zero.parents if zero.is_partitioned else ()
    else:
        return SourceState(run.dp_size)
    shapes = [tuple(names) for names in run.models[0].param_shapes or ()]
    parts = tuple(zip(parents, shapes, strict=True)) if parents else ()
    return SourceState(run.dp_size, read_geometry(root, run.dp_size), parts)


def write_optimizer(
    output: TorchOutput, name: str, catalog: Catalog, training: Training, source: SourceState
) -> Iterator[str]:
    """Add the file for an engine of ZeRO-1 or ZeRO-2.

    An engine has the step of each parameter in a file of its own, and looks for no other state that
    a group shares. These are written as in the shape of ZeRO-3, for whoever reads them.

    Args:
        output: Files so far.
        name: Name of the file.
        catalog: What the checkpoint holds.
        training: What goes with the tensors.
        source: The optimizer's state of the source; without geometry where it is of ZeRO-3.

    Yields:
        Names of the states that no engine looks for.
    """
    count = len(training.groups)
    made: dict[str, Value] = {
        "zero_stage": Constructed(_STAGE, (_OPTIMIZER_STATES,)),
        "group_paddings": [0] * count,
        "partition_count": [source.dp_size] * count,
    }
    # The engine refuses a state that does not say which version wrote it.
    version = training.ranks[0].values.get(_VERSION)
    said = {} if version is None else {_VERSION: version}
    state = {**said, **(source.geometry or made), **training.optimizer}
    groups: list[Value] = [
        {**keyed(group.settings), "params": [number]}
        for number, group in enumerate(training.groups)
    ]
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    draft = FileDraft(name)
    shared: dict[Value, Value] = {}
    for number, group in enumerate(training.groups):
        member = next((tensors[key] for key in group.names if key in tensors), None)
        own = {} if member is None else _scalars(output, draft, member, skipped=_STEP)
        own |= {key: value for key, value in group.numbers.items() if key != _STEP}
        shared[number] = keyed(own)
        yield from own
    if any(shared.values()):
        state["optimizer_state_dict"] = {"state": shared, "param_groups": groups}
    output.add(draft, {**keyed(state), "param_groups": groups})


def write_partitioned_optimizer(
    output: TorchOutput, name: str, catalog: Catalog, training: Training, source: SourceState
) -> Iterator[Finding]:
    """Add the file for an engine of ZeRO-3, which has the step of each sub-group in it.

    Args:
        output: Files so far.
        name: Name of the file.
        catalog: What the checkpoint holds.
        training: What goes with the tensors.
        source: The optimizer's state of the source; without geometry and parts where it is not of
            ZeRO-3.

    Yields:
        That an engine takes the step of the first sub-group for all, where others differ, and that
        it counts it for each of them.

    Raises:
        UnsupportedError: There is no step, or parameters of one sub-group have different ones.
        ExecutionError: The step of a parameter cannot be read.
    """
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    draft = FileDraft(name)
    parts = source.parts or [(n, group.names) for n, group in enumerate(training.groups)]
    states: dict[Value, Value] = {}
    first_step: Value = None
    for number, (parent, names) in enumerate(parts):
        numbers = training.groups[parent].numbers
        member = next((tensors[key] for key in names if key in tensors), None)
        own = {} if member is None else _scalars(output, draft, member)
        every = {**own, **numbers}
        if _STEP not in every:
            raise UnsupportedError(
                f"sub-group {number} has no step, and an engine of ZeRO-3 looks for one",
                where=catalog.root,
                remedy="train at least one step before, or choose --stage 1",
            )
        states[number] = keyed(every)
        first_step = every[_STEP] if first_step is None else first_step
    known = [(names, training.groups[parent].numbers) for parent, names in parts]
    yield from different_steps(catalog, known)
    if isinstance(first_step, StoredTensor):
        yield from shared_step(catalog, training, len(parts))
    groups: list[Value] = []
    for number, group in enumerate(training.groups):
        members: list[Value] = [n for n, (parent, _) in enumerate(parts) if parent == number]
        groups.append({**keyed(group.settings), "params": members})
    made: dict[str, Value] = {
        "zero_stage": Constructed(_STAGE, (_PARTITIONED_WEIGHTS,)),
        "partition_count": source.dp_size,
    }
    output.add(
        draft,
        {
            **keyed({**(source.geometry or made), **training.optimizer}),
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "param_groups": groups,
        },
    )


def _scalars(
    output: TorchOutput, draft: FileDraft, tensor: TensorEntry, *, skipped: str = ""
) -> dict[str, Value]:
    """States that one parameter shares with all others of its sub-group."""
    found: dict[str, Value] = {}
    for state, entry in tensor.states.items():
        is_own = tensor.layout.full_shape and state != "weight"
        if state != skipped and not entry.layout.full_shape and (state == _STEP or is_own):
            key = f"{draft.name}/{tensor.name}/{state}"
            selected = Selected(key, tensor.name, state, entry, entry.dtype)
            found[state] = draft.tensor(output.array(selected, replicated((), mesh=_ONE_RANK)), 0)
    return found
