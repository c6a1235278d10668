"""Muon's momentum: kept whole by every rank that updates a part of the parameter.

Muon orthogonalizes the update of a whole matrix. Under ZeRO-1 and ZeRO-2 every rank whose partition
has any element of a parameter therefore keeps the momentum of all of it, and its buffer is these
parameters end to end (deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `_muon_momentum_buffer`).
Parameters of 5 and 4 elements on two ranks, in partitions of 5::

    partition 0  a a a a a b     momentum  a a a a a b b b b
    partition 1  b b b . . .               b b b b

With the optimizer on the CPU, and under ZeRO-3, the momentum is cut like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from restride.checkpoint.values import StoredTensor
from restride.formats.deepspeed._flat import Fragment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.formats.deepspeed._flat import Slot
    from restride.formats.deepspeed._optimizer import Group, ZeroFile

__all__ = [
    "Taken",
    "is_muon",
    "may_be_cut",
    "may_be_whole",
    "take_momentum",
    "whole_fragments",
]

_MOMENTUM: Final = "momentum_buffer"
_USES_MUON: Final = "use_muon"
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class Taken:
    """A partition whose momentum is not cut as the partition is.

    Attributes:
        group: The partition without the momentum.
        momentum: The momentum alone.
    """

    group: Group
    momentum: Group


def is_muon(zero: ZeroFile, number: int) -> bool:
    """Whether a parameter group is one that Muon updates."""
    if number >= len(zero.param_groups):
        return False
    stored = zero.param_groups[number].get(_USES_MUON)
    return stored is not None and stored.value is True


def may_be_whole(groups: Mapping[int, Group], slots: Sequence[Slot], width: int) -> bool:
    """Whether the momentum of every partition is as long as its parameters are whole.

    Args:
        groups: The partition of each number that has a file.
        slots: The parameters in the buffer.
        width: Elements of a partition.
    """
    return all(
        tensor is not None and tensor.shape == (_held_numel(slots, width, partition),)
        for partition, tensor in ((n, _stored(group)) for n, group in groups.items())
    )


def may_be_cut(groups: Mapping[int, Group], slots: Sequence[Slot], width: int) -> bool:
    """Whether it may be cut like the weights as well, and stand elsewhere then.

    With the files of all ranks it cannot: no buffer is as long as its partition and whole, unless
    no parameter is cut, and then both are the same.
    """
    return all(_MOMENTUM in group.arrays for group in groups.values()) and any(
        slot.start // width != (slot.start + slot.numel - 1) // width
        for partition in groups
        for slot in _held(slots, width, partition)
    )


def take_momentum(group: Group) -> Taken:
    """Take the momentum out of a partition."""
    tensor = _stored(group)
    return Taken(
        replace(group, arrays=_without(group.arrays), others=_without(group.others)),
        replace(
            group,
            arrays={} if tensor is None else {_MOMENTUM: tensor},
            scalars={},
            others={},
            where=f"{group.where}: {_MOMENTUM}",
        ),
    )


def whole_fragments(slot: Slot, slots: Sequence[Slot], width: int) -> Iterator[Fragment]:
    """Yield the copies of a whole parameter, one for each partition with a part of it."""
    if not slot.numel:
        return
    for partition in range(slot.start // width, (slot.start + slot.numel - 1) // width + 1):
        before = (
            other.numel for other in _held(slots, width, partition) if other.start < slot.start
        )
        yield Fragment(partition, 0, sum(before), slot.numel)


def _stored(group: Group) -> StoredTensor | None:
    if _MOMENTUM in group.arrays:
        return group.arrays[_MOMENTUM]
    entry = group.others.get(_MOMENTUM)
    value = entry.value if entry is not None else None
    if not isinstance(value, StoredTensor) or len(value.shape) != 1:
        return None
    return value if value.strides == (1,) or value.shape[0] <= 1 else None


def _held(slots: Sequence[Slot], width: int, partition: int) -> Iterator[Slot]:
    """Parameters that have an element in a partition."""
    low, high = partition * width, (partition + 1) * width
    for slot in slots:
        if max(slot.start, low) < min(slot.start + slot.numel, high):
            yield slot


def _held_numel(slots: Sequence[Slot], width: int, partition: int) -> int:
    return sum(slot.numel for slot in _held(slots, width, partition))


def _without(states: Mapping[str, _Entry]) -> dict[str, _Entry]:
    return {name: entry for name, entry in states.items() if name != _MOMENTUM}
