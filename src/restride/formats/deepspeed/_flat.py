"""Where each parameter stands in the flat buffers of ZeRO-1 and ZeRO-2.

A parameter group of one tensor-parallel rank is one buffer: parameters end to end in the order of
``param_shapes``, with the recorded alignment after each, padded at the end and cut into one equal
partition for each data-parallel rank. Parameters of 5 and 4 elements on two ranks::

    partition 0  a a a a a b        fragments  a: 5 at 0   b: 1 at 5
    partition 1  b b b . . .                               b: 3 at 0

`param_slice_mappings` says the same from the side of each rank. It is checked against the buffer,
not believed, for two reasons: files are hostile, and DeepSpeed 0.19.8 itself writes it wrong. With
`round_robin_gradients` the buffer is in round-robin order, and the mapping in the order of the
group (`runtime/zero/stage_1_and_2.py`, `_link_all_hp_params`); the weights of the model files agree
with the buffer. `ds_to_universal` follows the mapping, and writes tensors made of others.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.errors import CorruptError
from restride.frozen import Frozen
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.formats.deepspeed._model import Shapes
    from restride.formats.deepspeed._optimizer import Group

__all__ = ["Fragment", "Slot", "check_partition", "fragments_of", "lay_out"]

# DeepSpeed pads a buffer to a multiple of two elements for each partition; nothing pads more.
_MOST_PADDING: Final = 4096

MappingOrder: TypeAlias = Literal["flat", "group"]


class Slot(Frozen):
    """Place of one parameter in the buffer of its group.

    Attributes:
        name: The parameter.
        start: First element in the buffer.
        numel: Its elements on this tensor-parallel rank.
    """

    name: str
    start: int
    numel: int


class Fragment(Frozen):
    """The run of a parameter that stands in one partition.

    Attributes:
        partition: Number of the partition in the buffer.
        param_base: First element, in the parameter's shard.
        partition_base: The same element, in the partition.
        numel: Length of the run, at least 1.
    """

    partition: int
    param_base: int
    partition_base: int
    numel: int


def lay_out(shapes: Shapes, alignment: Sequence[int] | None, where: str) -> tuple[Slot, ...]:
    """Place the parameters of a group end to end.

    Raises:
        CorruptError: The alignment is not given for each parameter.
    """
    paddings = (0,) * len(shapes) if alignment is None else tuple(alignment)
    if len(paddings) != len(shapes):
        raise CorruptError(
            f"param_alignment_paddings has {counted(len(paddings), 'parameter')}, "
            f"param_shapes {len(shapes)}",
            where=where,
        )
    slots: list[Slot] = []
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        slots.append(Slot(name, start, prod(shape)))
        start += prod(shape) + padding
    return tuple(slots)


def fragments_of(slot: Slot, partition_numel: int) -> Iterator[Fragment]:
    """Cut a parameter where the partitions end."""
    done = 0
    while done < slot.numel:
        partition, base = divmod(slot.start + done, partition_numel)
        numel = min(partition_numel - base, slot.numel - done)
        yield Fragment(partition, done, base, numel)
        done += numel


def check_partition(
    group: Group,
    slots: Sequence[Slot],
    partition: int,
    count: int,
    *,
    is_lean: bool,
    is_round_robin: bool,
) -> MappingOrder:
    """Compare what a file says of its partition with what the buffer makes of it.

    Args:
        group: The partition, as its file describes it.
        slots: The parameters in the buffer.
        partition: Number of the partition.
        count: Number of partitions.
        is_lean: Whether the padding was cut off the master weights.
        is_round_robin: Whether the run reordered its parameters.

    Returns:
        ``"group"`` where the mapping has DeepSpeed's fault with round-robin order.

    Raises:
        CorruptError: Counts, lengths, paddings or fragments contradict the buffer.
    """
    width = group.partition_numel
    if group.partition_count is not None and group.partition_count != count:
        raise CorruptError(
            f"partition_count is {group.partition_count}, files of {counted(count, 'partition')} "
            "are here",
            where=group.where,
            remedy="put all files of one save, and only those, into the folder",
        )
    end = slots[-1].start + slots[-1].numel if slots else 0
    if width * count < end:
        raise CorruptError(
            f"{counted(count, 'partition')} of {width} elements cannot hold the {end} elements "
            "that param_shapes lists",
            where=group.where,
        )
    if width * count - end > _MOST_PADDING * count:
        raise CorruptError(
            f"{counted(count, 'partition')} of {width} elements "
            f"{which(count, 'has', 'have')} far more than the {end} elements that param_shapes "
            "lists",
            where=group.where,
        )
    padding = _expected_padding(width, count, partition, end, is_lean=is_lean)
    if group.padding_numel != padding:
        raise CorruptError(
            f"group_paddings says {counted(group.padding_numel, 'element')}, {padding} are left "
            f"in partition {partition} of {count} after the {end} elements that param_shapes lists",
            where=group.where,
        )
    return _check_fragments(group, slots, partition, count, is_round_robin=is_round_robin)


def _expected_padding(width: int, count: int, partition: int, end: int, *, is_lean: bool) -> int:
    if is_lean:
        return width - max(0, min(end - partition * width, width))
    # BF16_Optimizer books all padding on the last rank, even where it is longer than a partition.
    return width * count - end if partition == count - 1 else 0


def _check_fragments(
    group: Group, slots: Sequence[Slot], partition: int, count: int, *, is_round_robin: bool
) -> MappingOrder:
    if group.fragments is None:
        return "flat"
    expected = _mapping(slots, group.partition_numel, partition)
    if group.fragments == expected:
        return "flat"
    if is_round_robin:
        moved = _group_order(slots, count)
        if group.fragments == _mapping(moved, group.partition_numel, partition):
            return "group"
    for other in range(count):
        if other != partition and group.fragments == _mapping(slots, group.partition_numel, other):
            raise CorruptError(
                f"param_slice_mappings says that it is partition {other} of {count}, by its name "
                f"it is partition {partition}",
                where=group.where,
                remedy="files of two ranks were exchanged, or one was copied over the other: copy "
                "both again",
            )
    raise _first_difference(group.fragments, expected, group.where)


def _mapping(slots: Sequence[Slot], width: int, partition: int) -> dict[str, tuple[int, int]]:
    """(numel, start) of every parameter that a partition has a part of."""
    low, high = partition * width, (partition + 1) * width
    return {
        slot.name: (
            min(slot.start + slot.numel, high) - max(slot.start, low),
            max(slot.start, low) - low,
        )
        for slot in slots
        if max(slot.start, low) < min(slot.start + slot.numel, high)
    }


def _group_order(slots: Sequence[Slot], count: int) -> list[Slot]:
    """Undo the round robin: the buffer has parameters 0, n, 2n, ..., then 1, n + 1, ..."""
    turns = [turn for first in range(count) for turn in range(first, len(slots), count)]
    start = 0
    moved: list[Slot] = []
    for _, slot in sorted(zip(turns, slots, strict=True), key=lambda pair: pair[0]):
        moved.append(Slot(slot.name, start, slot.numel))
        start += slot.numel
    return moved


def _first_difference(
    stored: Mapping[str, tuple[int, int]], expected: Mapping[str, tuple[int, int]], where: str
) -> CorruptError:
    for name in [*expected, *stored]:
        if stored.get(name) != expected.get(name):
            break
    return CorruptError(
        f"param_slice_mappings says {_told(stored.get(name))}, "
        f"by param_shapes there are {_told(expected.get(name))}",
        where=f"{where}: tensor {name!r}",
    )


def _told(fragment: tuple[int, int] | None) -> str:
    return "no elements" if fragment is None else f"{fragment[0]} elements from {fragment[1]} on"
