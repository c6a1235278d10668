"""What all files of one save say alike, compared: files of other runs and other steps stand out.

Shapes, partitions and maps are compared where layouts are made of them. Here are the entries that
nothing is made of, but that one training cannot have two of: version, configuration, settings of
the optimizer, the group that a parameter is in.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor, difference
from restride.formats.deepspeed._experts.group_order import said_size, same_order
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._optimizer import CONSUMED_KEYS
from restride.formats.deepspeed._whole.file import CONSUMED_KEYS as WHOLE_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Severity
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = ["find_contradictions"]

_INFO: Final = "universal_checkpoint_info"
# Beside the maps and categories that layouts are made of, and compared through.
_INFO_KEYS: Final = ("universal_checkpoint_version", "original_vocab_size")
_MOST_NAMED: Final = 3
_STEP: Final = "step"
_WRAPPED: Final = "optimizer_state_dict"
_GROUPS: Final = "param_groups"


def find_contradictions(
    run: Run, optimizers: Mapping[str, tuple[str, Field]] | None = None
) -> Iterator[Finding]:
    """Compare what every file of a save must say alike.

    Args:
        run: The files.
        optimizers: The optimizers of expert-parallel ranks without ZeRO, by file: the rank in
            words, and its state.

    Yields:
        ``run-mismatch``: a file is of another DeepSpeed or of a run with another configuration.
        ``settings-mismatch``: the optimizer of a rank has other hyperparameters, or a state that is
        one plain number for a group is another one.
        ``step-mismatch``: a rank counted other steps, where it counts in plain numbers.
        ``optimizer-mismatch``: a rank scales or clips otherwise.
        ``group-mismatch``: a parameter is in another group on another tensor-parallel rank.
        ``info-mismatch``: ranks describe the model differently for universal checkpoints.
    """
    roots = [(model.name, model.root) for model in run.all_models]
    roots += [(zero.name, zero.root) for zero in run.zeros.values()]
    yield from _versions(roots)
    yield from _configurations(roots)
    yield from _settings(run, optimizers or {})
    yield from _plain_steps(run)
    yield from _plain_numbers(run)
    yield from _scaling(run, optimizers or {})
    yield from _groups(run)
    yield from _descriptions(run)


def _versions(roots: Iterable[tuple[str, Field]]) -> Iterator[Finding]:
    first: tuple[str, Field] | None = None
    for name, root in roots:
        stored = root.get("ds_version")
        if stored is None:
            continue
        if first is None:
            first = name, stored
        elif difference(stored.value, first[1].value):
            message = (
                f"{name} is written by DeepSpeed {shown(stored.value)}, {first[0]} by "
                f"{shown(first[1].value)}: the files are of different runs"
            )
            yield Finding("error", "run-mismatch", message, name)


def _configurations(roots: Iterable[tuple[str, Field]]) -> Iterator[Finding]:
    first: tuple[str, Mapping[str, Value]] | None = None
    for name, root in roots:
        stored = root.get("ds_config")
        if stored is None:
            continue
        entries = _entries(stored)
        if first is None:
            first = name, entries
            continue
        keys = _different_keys(entries, first[1])
        if keys:
            message = (
                f"{name} is of a run with another configuration than {first[0]}: "
                f"{_told(keys, entries, first[1])}"
            )
            yield Finding("warning", "run-mismatch", message, name, {"keys": keys})


def _settings(run: Run, optimizers: Mapping[str, tuple[str, Field]]) -> Iterator[Finding]:
    """Hyperparameters of a parameter group are the same on all ranks."""
    first: dict[int, tuple[str, Mapping[str, Value]]] = {}
    for file, rank, groups in _param_groups(run, optimizers):
        for number, group in enumerate(groups):
            entries = _entries(group)
            entries.pop("params", None)
            name, known = first.setdefault(number, (file, entries))
            keys = _different_keys(entries, known)
            if keys:
                message = (
                    f"the optimizer of {rank} has other settings for group {number} in "
                    f"{file} than in {name}: {_told(keys, entries, known)}"
                )
                details = {"group": number, "keys": keys}
                yield _of_optimizer(run, "settings-mismatch", message, file, details)


def _param_groups(
    run: Run, optimizers: Mapping[str, tuple[str, Field]]
) -> Iterator[tuple[str, str, Sequence[Field]]]:
    """The parameter groups of each rank, with its file.

    Without ZeRO they are in model files, and in those of expert-parallel ranks, which engines take.
    """
    for zero in run.zeros.values():
        yield zero.name, zero.rank_name, zero.param_groups
    whole = dict(optimizers)
    for model in run.models:
        if model.optimizer is not None:
            whole[model.name] = f"tp rank {model.tp}", model.optimizer
    wanted: list[int | None] = []
    for name, (rank, state) in whole.items():
        stored = (state.get(_WRAPPED) or state).get(_GROUPS)
        groups = stored.elements() if stored else ()
        sizes = [said_size(group) for group in groups]
        wanted = wanted or sizes
        # Groups of experts on different numbers of ranks are in an order of their own everywhere.
        if Counter(sizes) == Counter(wanted):
            groups = tuple(groups[number] for number in same_order(wanted, sizes, name))
        yield name, rank, groups


def _plain_numbers(run: Run) -> Iterator[Finding]:
    """Other states that are one plain number for a group."""
    first: dict[tuple[int, str], tuple[str, Field]] = {}
    for zero in run.zeros.values():
        for number, group in zip(zero.parents, zero.groups, strict=True):
            for key, entry in group.others.items():
                name, known = first.setdefault((number, key), (zero.name, entry))
                found = difference(entry.value, known.value)
                if key != _STEP and found is not None:
                    place, own, other = found
                    message = (
                        f"state {key!r}{place} of group {number} is {shown(own)} in {zero.name} "
                        f"and {shown(other)} in {name}"
                    )
                    yield _of_optimizer(run, "settings-mismatch", message, zero.name, {})


def _scaling(run: Run, optimizers: Mapping[str, tuple[str, Field]]) -> Iterator[Finding]:
    """What the optimizer has for all parameters: all ranks scale the loss and clip alike."""
    first: tuple[str, Mapping[str, Value]] | None = None
    roots = [(zero.name, zero.state, CONSUMED_KEYS) for zero in run.zeros.values()]
    roots += [(name, state, WHOLE_KEYS) for name, (_, state) in optimizers.items()]
    roots += [(m.name, m.optimizer, WHOLE_KEYS) for m in run.models if m.optimizer is not None]
    for name, state, consumed in roots:
        entries = {key: value for key, value in _entries(state).items() if key not in consumed}
        if first is None:
            first = name, entries
        keys = _different_keys(entries, first[1])
        if keys:
            message = (
                f"the optimizer in {name} is not in the state of that in {first[0]}, which is "
                f"taken for all: {_told(keys, entries, first[1])}"
            )
            yield Finding("warning", "optimizer-mismatch", message, name, {"keys": keys})


def _plain_steps(run: Run) -> Iterator[Finding]:
    """Steps that the optimizer counts in plain numbers; those in tensors are read elsewhere."""
    first: dict[int, tuple[str, Value]] = {}
    for zero in run.zeros.values():
        steps: dict[int, Value] = {
            number: group.others["step"].value if "step" in group.others else group.scalars["step"]
            for number, group in enumerate(zero.groups)
            if "step" in group.others or "step" in group.scalars
        }
        shared = zero.state.get("base_optimizer_state_step")
        if shared is not None:
            steps[-1] = shared.value
        for number, step in steps.items():
            name, known = first.setdefault(number, (zero.name, step))
            if difference(step, known):
                message = (
                    f"the optimizer step is {_counted(step)} in {zero.name} and {_counted(known)} "
                    f"in {name}: the files are of different saves"
                )
                yield _of_optimizer(run, "step-mismatch", message, zero.name, {})


def _counted(step: Value) -> str:
    return "a tensor" if isinstance(step, StoredTensor) else shown(step)


def _groups(run: Run) -> Iterator[Finding]:
    """A rank may lack a parameter (its shard is empty), but not train it with other settings."""
    first: dict[str, tuple[int, str]] = {}
    for model in run.models:
        for number, shapes in enumerate(model.param_shapes or ()):
            for name in shapes:
                known, file = first.setdefault(name, (number, model.name))
                if number != known and not run.is_partitioned:
                    message = (
                        f"tensor {name!r}: {model.name} (tp rank {model.tp}) has it in parameter "
                        f"group {number}, {file} in group {known}"
                    )
                    yield Finding("error", "group-mismatch", message, model.name)


def _descriptions(run: Run) -> Iterator[Finding]:
    first: tuple[str, Field] | None = None
    for model in run.models:
        info = model.root.get(_INFO)
        if info is None:
            continue
        if first is None:
            first = model.name, info
            continue
        own, known = (
            {key: value for key, value in _entries(said).items() if key in _INFO_KEYS}
            for said in (info, first[1])
        )
        keys = _different_keys(own, known)
        if keys:
            message = (
                f"{_INFO} of {model.name} (tp rank {model.tp}) is not that of {first[0]}: "
                f"{_told(keys, own, known)}"
            )
            yield Finding("warning", "info-mismatch", message, model.name, {"keys": keys})


def _of_optimizer(
    run: Run, kind: str, message: str, name: str, details: Mapping[str, object]
) -> Finding:
    """An error in what only the optimizer needs, unless the weights are in its files as well."""
    part = {} if run.is_partitioned else {"part": "optimizer"}
    severity: Severity = "error"
    return Finding(severity, kind, message, name, {**details, **part})


def _entries(stored: Field) -> dict[str, Value]:
    """Entries of a dict, whatever its keys are; none of anything else."""
    value = stored.value
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {}


def _different_keys(own: Mapping[str, Value], known: Mapping[str, Value]) -> list[str]:
    return [
        str(key)
        for key in dict.fromkeys([*known, *own])
        if (key in own) != (key in known) or difference(own[key], known[key])
    ]


def _told(keys: list[str], own: Mapping[str, Value], known: Mapping[str, Value]) -> str:
    """The first keys that differ, with both values."""
    told: list[str] = []
    for key in keys:
        place, one, other = difference(own.get(key), known.get(key)) or ("", None, None)
        told.append(f"{key}{place} is {shown(one)} and not {shown(other)}")
    more = f", and {len(told) - _MOST_NAMED} more" if told[_MOST_NAMED:] else ""
    return ", ".join(told[:_MOST_NAMED]) + more
