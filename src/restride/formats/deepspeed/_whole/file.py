"""The optimizer's state inside a model file, as runs without ZeRO save it.

Four classes write it (deepspeed 0.19.8 `runtime/engine.py`, `_configure_optimizer`). Trained in
fp32, it is the ``state_dict`` of the optimizer itself, and the weights are their own master copies.
Trained in bf16 or fp16, a wrapper adds the master weights: `FP16_UnfusedOptimizer` in
``fp32_groups``, one tensor for each parameter; `FP16_Optimizer`, which wraps DeepSpeed's fused
Adam, in ``fp32_groups_flat``, one flat buffer for each group.

Parameters are numbered from group to group. Nothing says which parameter of the model a number is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, FormatError
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field

__all__ = [
    "CASTABLE",
    "CONSUMED_KEYS",
    "Numbered",
    "WholeFile",
    "WholeKind",
    "read_whole_file",
    "sort_states",
]

WholeKind: TypeAlias = Literal["bare", "unfused", "flat"]

_WRAPPED: Final = "optimizer_state_dict"
_MASTERS: Final = "fp32_groups"
_FLAT_MASTERS: Final = "fp32_groups_flat"
_GROUPS: Final = "param_groups"

CASTABLE: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types of weights and of their master copies: one can be rounded to the other."""

CONSUMED_KEYS: Final = frozenset({_WRAPPED, _MASTERS, _FLAT_MASTERS, "state", _GROUPS})
"""Keys of the optimizer's dict that become tensors and groups; all others are carried."""


class Numbered(Frozen):
    """What the optimizer keeps under one number: of one parameter, or of one flat group.

    Attributes:
        group: Number of its parameter group.
        number: The number.
        master: The master weights; None where the weights are their own.
        state: The optimizer's own entries; None before the first step, and of frozen parameters.
        where: File and path, for errors.
    """

    group: int
    number: int
    master: StoredTensor | None
    state: Field | None
    where: str

    @property
    def shape(self) -> Shape | None:
        """Shape of the parameter, where any array tells it."""
        if self.master is not None:
            return self.master.shape
        return next((tensor.shape for _, tensor in _tensors(self.state) if tensor.shape), None)


class WholeFile(Frozen):
    """What one file says of the optimizer.

    Attributes:
        where: The file and the path to the optimizer's dict.
        kind: Which class wrote it: the optimizer itself, or one of the two wrappers.
        state: The dict.
        groups: For each parameter group what is numbered in it, in its order.
        settings: The parameter groups, with their learning rates and numbers.
        names: For each group the names that the optimizer was told, or None. A wrapper takes frozen
            parameters out of the group and leaves their names.
    """

    where: str
    kind: WholeKind
    state: Field
    groups: tuple[tuple[Numbered, ...], ...]
    settings: tuple[Field, ...]
    names: tuple[tuple[str, ...] | None, ...]

    @property
    def is_stepped(self) -> bool:
        """Whether the optimizer has a state of any parameter."""
        return any(entry.state is not None for group in self.groups for entry in group)


def read_whole_file(state: Field) -> WholeFile:
    """Read the optimizer's dict of a model file.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: Parts of it contradict each other.
    """
    if not state.is_mapping:
        raise state.wrong("the state dict of an optimizer")
    wrapped = state.get(_WRAPPED)
    base = wrapped or state
    if state.get("state") is None and wrapped is None:
        keys = ", ".join(repr(key) for key, _ in state.items()) or "none"
        raise FormatError(
            f"is the state of no optimizer that DeepSpeed saves without ZeRO: its keys are {keys}",
            where=state.where,
        )
    kind: WholeKind = "bare"
    masters: tuple[tuple[Field, ...], ...] | None = None
    if state.get(_FLAT_MASTERS) is not None:
        kind = "flat"
        masters = tuple((entry,) for entry in state.at(_FLAT_MASTERS).elements())
    elif wrapped is not None:
        kind = "unfused"
        masters = tuple(group.elements() for group in state.at(_MASTERS).elements())
    settings = base.at(_GROUPS).elements()
    if masters is not None and len(masters) != len(settings):
        raise CorruptError(
            f"has master weights of {counted(len(masters), 'group')} and "
            f"{counted(len(settings), 'entry')} in param_groups",
            where=state.where,
        )
    groups = _groups(base, settings, masters)
    names = tuple(_names(entry, own, kind) for entry, own in zip(settings, groups, strict=True))
    return WholeFile(state.where, kind, state, groups, settings, names)


def sort_states(
    entry: Numbered, shape: Shape
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, Field]]:
    """Tell arrays of the parameter's shape, scalars, and everything else apart.

    Args:
        entry: What is numbered.
        shape: Shape of the parameter, or of the flat buffer.
    """
    arrays: dict[str, StoredTensor] = {} if entry.master is None else {"fp32": entry.master}
    scalars: dict[str, StoredTensor] = {}
    others: dict[str, Field] = {}
    for stored_key, field in entry.state.items() if entry.state else ():
        # Our own two names mean the weights; no optimizer calls a state so, but a file may.
        key = f"optimizer_{stored_key}" if stored_key in {"fp32", "weight"} else stored_key
        value = field.value
        if isinstance(value, StoredTensor) and value.shape == shape:
            arrays[key] = value
        elif isinstance(value, StoredTensor) and not value.shape:
            scalars[key] = value
        else:
            others[key] = field
    return arrays, scalars, others


def _groups(
    base: Field, settings: tuple[Field, ...], masters: tuple[tuple[Field, ...], ...] | None
) -> tuple[tuple[Numbered, ...], ...]:
    """Pair numbers, names, master weights and states of each group."""
    states = dict(base.at("state").numbered())
    seen: set[int] = set()
    groups: list[tuple[Numbered, ...]] = []
    for position, entry in enumerate(settings):
        numbers = entry.at("params").integers()
        if len({*numbers}) < len(numbers) or seen & {*numbers}:
            raise CorruptError("numbers a parameter twice", where=f"{entry.where}['params']")
        seen.update(numbers)
        copies: tuple[Field | None, ...] = (None,) * len(numbers)
        if masters is not None:
            copies = masters[position]
        if len(copies) != len(numbers):
            raise CorruptError(
                f"numbers {counted(len(numbers), 'parameter')}, the master weights of the group "
                "are "
                f"{len(copies)}",
                where=f"{entry.where}['params']",
            )
        groups.append(
            tuple(
                Numbered(
                    position,
                    number,
                    None if copy is None else _master(copy),
                    states.pop(number, None),
                    f"{base.where}['state'][{number}]" if copy is None else copy.where,
                )
                for number, copy in zip(numbers, copies, strict=True)
            )
        )
    if states:
        raise CorruptError(
            f"has states of parameters {sorted(states)[:8]}, which no group has", where=base.where
        )
    return tuple(groups)


def _names(entry: Field, numbered: tuple[Numbered, ...], kind: WholeKind) -> tuple[str, ...] | None:
    """Names of the parameters of a group: optimizers of PyTorch keep them if they are told."""
    stored = entry.get("param_names")
    if stored is None:
        return None
    names = stored.texts()
    if len({*names}) < len(names):
        raise CorruptError("names a parameter twice", where=stored.where)
    is_short = kind != "flat" and len(names) < len(numbered)
    if is_short or (kind == "bare" and len(names) > len(numbered)):
        raise CorruptError(
            f"names {counted(len(names), 'parameter')}, the group has {len(numbered)}",
            where=stored.where,
        )
    return names


def _master(stored: Field) -> StoredTensor:
    tensor = stored.tensor()
    if tensor.storage.dtype.name not in CASTABLE:
        raise stored.wrong("a master weight of float32")
    return tensor


def _tensors(state: Field | None) -> Iterator[tuple[str, StoredTensor]]:
    entries: Mapping[str, Field] = dict(state.items()) if state else {}
    for key, entry in entries.items():
        if isinstance(entry.value, StoredTensor):
            yield key, entry.value
