"""Muon's momentum: kept whole by every rank that updates a part of the parameter.

Muon orthogonalizes the update of a whole matrix. Under ZeRO-1 and ZeRO-2 every rank whose partition
has any element of a parameter therefore keeps the momentum of all of it, and its buffer is these
parameters end to end (deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `_muon_momentum_buffer`).
Parameters of 5 and 4 elements on two ranks, in partitions of 5::

    partition 0  a a a a a b     momentum  a a a a a b b b b
    partition 1  b b b . . .               b b b b

A partition with no element of a parameter has no momentum. With the optimizer on the CPU, under
ZeRO-3, and in BF16_Optimizer, the momentum is cut like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Piece
from restride.checkpoint.values import StoredTensor
from restride.formats.deepspeed._flat import Fragment
from restride.formats.deepspeed._settings import is_offloaded, uses_bf16_optimizer
from restride.frozen import Frozen
from restride.layouts.lifting import axes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._flat import Slot
    from restride.formats.deepspeed._optimizer import Group, ZeroFile

__all__ = [
    "Taken",
    "copies_layout",
    "is_muon",
    "may_be_cut",
    "may_be_whole",
    "states_kept_whole",
    "take_momentum",
    "trains_by_muon",
    "whole_fragments",
]

_MOMENTUM: Final = "momentum_buffer"
_USES_MUON: Final = "use_muon"
_FLAT_STAGES: Final = (1, 2)
_Entry = TypeVar("_Entry")


class Taken(Frozen):
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
        (tensor.shape[0] if tensor is not None else 0) == _held_numel(slots, width, partition)
        for partition, tensor in ((n, _stored(group)) for n, group in groups.items())
    )


def may_be_cut(groups: Mapping[int, Group], slots: Sequence[Slot], width: int) -> bool:
    """Whether it may be cut like the weights as well, and stand elsewhere then.

    With the files of all ranks it cannot: no buffer is as long as its partition and whole, unless
    no parameter is cut, and then both are the same.
    """
    return all(
        _MOMENTUM in group.arrays or not _held_numel(slots, width, partition)
        for partition, group in groups.items()
    ) and any(
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


def trains_by_muon(group: ParameterGroup) -> bool:
    """Whether Muon updates the parameters of a group that is written."""
    return group.settings.get(_USES_MUON) is True


def states_kept_whole(group: ParameterGroup, config: Field | None, zero: int) -> frozenset[str]:
    """Name the states of a group that an engine with this configuration does not cut.

    Args:
        group: The group.
        config: ``ds_config`` of the engine, where it is known.
        zero: Its ZeRO stage.
    """
    is_cut = zero not in _FLAT_STAGES or is_offloaded(config) or uses_bf16_optimizer(config, zero)
    return frozenset({_MOMENTUM}) if trains_by_muon(group) and not is_cut else frozenset()


def copies_layout(numel: int, holders: range, count: int) -> Layout:
    """Lay a whole parameter out over the partitions of its buffer.

    Args:
        numel: Elements of the parameter.
        holders: The partitions with a part of it.
        count: Number of partitions.

    Examples:
        >>> copies = copies_layout(4, range(1, 3), 4)
        >>> [copies.shard_numel(partition) for partition in range(4)]
        [0, 4, 4, 0]
    """
    piece = Piece(axes_of((len(holders), 0, 1, 0), (numel, 1, 0, 1)), 0, holders.start)
    shapes = [(numel if partition in holders else 0,) for partition in range(count)]
    return Layout.of(Mesh((("dp", count),)), (numel,), shapes, [piece])


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
