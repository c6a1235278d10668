"""The optimizer files of ZeRO-1 and ZeRO-2: every parameter group one flat buffer, cut evenly.

The buffer of a group on one tensor-parallel rank is laid out by `restride.layouts.zero_group`, and
the layout of a state is the tensor's own with that one behind it. The rules, and what each key
means, are those of deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`: the padding at the end is cut
off the master weights and kept on the states. BF16_Optimizer, which some configurations of ZeRO-1
choose (`runtime/bf16_optimizer.py`), cuts nothing off, and books all padding on the last rank.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.checkpoint.values import Constructed, GlobalName, keyed
from restride.errors import UnsupportedError
from restride.formats.deepspeed._momentum import copies_layout, states_kept_whole
from restride.formats.deepspeed._settings import parameter_alignment
from restride.formats.deepspeed._writing.elastic import STEP, step_of
from restride.formats.deepspeed._writing.folding import optimizer_folding
from restride.formats.deepspeed._writing.groups import (
    group_states,
    optimizer_file,
    param_groups,
    states_of,
)
from restride.formats.deepspeed._writing.model import flat_members, ordered, said_by
from restride.formats.deepspeed._writing.writing import FP32, optimizer_key
from restride.frozen import Frozen
from restride.layouts.flat import FlatGroup, zero_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.training import ParameterGroup
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.storage.torch_output import FileDraft, OutputArray

__all__ = ["write_partitions"]

_STAGE: Final = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
_FRAGMENT: Final = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")


def write_partitions(writing: Writing) -> None:
    """Add the optimizer file of every rank.

    Raises:
        CoverageError: A layout of the target is not whole.
        UnsupportedError: A state is missing, or is not one of a flat partition.
    """
    groups = [_FlatGroupWriter(writing, n, g) for n, g in enumerate(writing.training.groups)]
    for dp in range(writing.target.dp):
        for tp in range(writing.target.tp):
            _write_file(writing, groups, dp, tp)


def _write_file(writing: Writing, groups: list[_FlatGroupWriter], dp: int, tp: int) -> None:
    draft = writing.draft(writing.optimizer_name(tp, dp))
    target_rank = writing.target.rank(dp, tp)
    states = [group.states(draft, target_rank) for group in groups]
    rank = writing.source_rank(dp, tp, dp_size=writing.target.dp)
    state: dict[Value, Value] = {
        **keyed(writing.training.optimizer),
        "base_optimizer_state": _base_state(writing, states),
        "single_partition_of_fp32_groups": [group.masters(draft, target_rank) for group in groups],
        "group_paddings": [group.padding(target_rank) for group in groups],
        "partition_count": [group.spread.partitions for group in groups],
        "param_slice_mappings": [group.fragments(target_rank) for group in groups],
    }
    if writing.is_lean:
        state["zero_stage"] = Constructed(_STAGE, (writing.target.zero,))
        state["param_alignment_paddings"] = [group.alignments(target_rank) for group in groups]
    if writing.is_elastic:
        state[STEP] = step_of(writing)
    folding = optimizer_folding(writing, target_rank)
    alike = None
    if writing.experts is None and writing.stage is None:  # which have names of their own
        alike = ("optimizer", *(group.kind(target_rank) for group in groups), *said_by(rank))
    writing.output.add(draft, {**optimizer_file(rank, state), **folding}, alike=alike)


def _base_state(writing: Writing, states: list[dict[Value, Value]]) -> Value:
    """The state of the wrapped optimizer: its own form, or one without hyperparameters."""
    if writing.is_elastic:
        return [*states]
    numbered: dict[Value, Value] = {number: own for number, own in enumerate(states) if own}
    return {"state": numbered, "param_groups": param_groups(writing)}


class _Buffer(Frozen):
    """The flat buffer of a group on one cutter of its spread.

    Attributes:
        places: Number of each parameter in the buffer.
        numels: Elements of each parameter.
        flat: Where they stand, over the ranks that share the buffer.
        stop: Element after the last parameter.
        kind: The same for cutters whose buffers hold the same parameters, in the same places.
    """

    places: Mapping[str, int]
    numels: tuple[int, ...]
    flat: FlatGroup
    stop: int
    kind: int


class _FlatGroupWriter:
    """Lays out the buffers of one parameter group, and what goes into them.

    Attributes:
        spread: Which ranks hold the shards of its parameters, and which share each buffer.
    """

    def __init__(self, writing: Writing, number: int, group: ParameterGroup) -> None:
        self._writing = writing
        self._number = number
        self._group = group
        self._known: dict[tuple[int, ...], FlatGroup] = {}
        self._kinds: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._chained: dict[tuple[Layout, tuple[Layout, ...]], Layout] = {}  # layers are cut alike
        self._names = states_of(writing, number, group)
        self._whole = states_kept_whole(group, writing.config, writing.target.zero)
        itemsize = writing.weights[group.names[0]].dtype.itemsize_nbytes if group.names else 1
        is_aligned = writing.is_lean
        self._alignment = parameter_alignment(writing.config, itemsize) if is_aligned else 1
        self.spread = writing.group_spread(number, group)
        self._buffers = [
            self._buffer(flat_members(writing, number, group, cutter), cutter)
            for cutter in range(self.spread.cutters)
        ]
        self._arrays = {name: self._announce(name) for name in group.names}
        self._scalars = group_states(writing, number, group)

    def kind(self, rank: int) -> tuple[int, int]:
        """What all that a file says of the partition of a rank follows from."""
        buffer, partition = self._place(rank)
        return buffer.kind, partition

    def states(self, draft: FileDraft, rank: int) -> dict[Value, Value]:
        """State of the wrapped optimizer for the partition of a rank."""
        made: dict[Value, Value] = {
            optimizer_key(state): draft.tensor(array, rank)
            for state, array in self._scalars.items()
        }
        for state in self._names:
            if state in self._whole:
                if self._held(rank):
                    made[optimizer_key(state)] = self._copies(draft, state, rank)
            elif state != FP32:
                made[optimizer_key(state)] = self._partition(
                    draft, state, rank, padded=not self._writing.is_elastic
                )
        return {**made, **keyed(self._group.numbers)}

    def masters(self, draft: FileDraft, rank: int) -> Value:
        """Partition of the master weights, as a rule without the padding at its end."""
        return self._partition(draft, FP32, rank, padded=not self._writing.is_lean)

    def padding(self, rank: int) -> int:
        """Elements of a partition that lie behind the last parameter."""
        buffer, partition = self._place(rank)
        width, count = buffer.flat.partition_numel, self.spread.partitions
        if not self._writing.is_lean:
            return width * count - buffer.stop if partition == count - 1 else 0
        return width - max(0, min(buffer.stop - partition * width, width))

    def alignments(self, rank: int) -> Value:
        """Padding after each parameter, in the order of the buffer."""
        buffer, _ = self._place(rank)
        starts = [member.start for member in buffer.flat.members]
        ends = [start + numel for start, numel in zip(starts, buffer.numels, strict=True)]
        return [
            *(start - end for start, end in zip(starts[1:], ends[:-1], strict=True)),
            0,
        ]

    def fragments(self, rank: int) -> Value:
        """What this rank's partition holds of each parameter, in the order of the group."""
        cutter, partition = self.spread.place(rank)
        buffer, placed = self._buffers[cutter], self._writing.experts
        found: dict[str, Value] = {}
        for name in self._group.names:
            if name not in buffer.places:
                continue
            member = buffer.flat.members[buffer.places[name]]
            start = member.shard_starts[partition]
            if start is not None:
                state: dict[Value, Value] = {
                    "numel": member.layout.shard_numel(partition),
                    "start": start,
                }
                own = name if placed is None else placed.local_name(name, cutter)
                found[own] = Constructed(_FRAGMENT, state=state, is_new=True)
        return ordered(found)

    def _place(self, rank: int) -> tuple[_Buffer, int]:
        """The buffer that a rank has a partition of, and which one."""
        cutter, partition = self.spread.place(rank)
        return self._buffers[cutter], partition

    def _buffer(self, members: Mapping[str, Shape], cutter: int) -> _Buffer:
        numels = tuple(prod(shape) for shape in members.values())
        if not numels:
            raise UnsupportedError(
                f"parameter group {self._number} has no element on tensor-parallel rank {cutter} "
                f"of {self.spread.cutters}, and an engine cannot have an empty group",
                remedy="choose fewer tensor-parallel ranks",
            )
        if numels not in self._known:
            self._known[numels] = zero_group(
                [(numel,) for numel in numels],
                mesh={"dp": self.spread.partitions},
                parameter_alignment=self._alignment,
            )
        flat = self._known[numels]
        places = {name: place for place, name in enumerate(members)}
        kind = self._kinds.setdefault((tuple(members), numels), len(self._kinds))
        return _Buffer(places, numels, flat, flat.members[-1].start + numels[-1], kind)

    def _announce(self, name: str) -> dict[str, OutputArray]:
        """Announce all states of a parameter, over the ranks ``dp, tp``."""
        tensor = self._writing.tensors[name]
        return {
            state: self._writing.state(
                tensor, state, self._layout(name, is_whole=state in self._whole)
            )
            for state in self._names
        }

    def _layout(self, name: str, *, is_whole: bool) -> Layout:
        """How the ranks ``dp, tp`` hold a state of a parameter."""
        whole = self._writing.layouts[name]
        inner = tuple(
            self._cut(name, cutter, is_whole=is_whole) for cutter in range(self.spread.cutters)
        )
        layout = self._chained.get((whole, inner))
        if layout is None:
            layout = self.spread.chain(whole, dict(enumerate(inner)), self._writing.target)
            self._chained[whole, inner] = layout
        return layout

    def _cut(self, name: str, cutter: int, *, is_whole: bool) -> Layout:
        buffer = self._buffers[cutter]
        if name in buffer.places:
            place = buffer.places[name]
            member = buffer.flat.members[place]
            if not is_whole:
                return member.layout
            held = [n for n, start in enumerate(member.shard_starts) if start is not None]
            holders = range(held[0], held[-1] + 1)
            return copies_layout(buffer.numels[place], holders, self.spread.partitions)
        ranks = Mesh((("dp", self.spread.partitions),))
        return Layout(ranks, (0,), ((ranks.size, (0,)),), ())

    def _held(self, rank: int) -> dict[str, int]:
        """Parameters that a rank's partition has a part of, and their elements, in its order."""
        buffer, partition = self._place(rank)
        return {
            name: buffer.numels[place]
            for name, place in buffer.places.items()
            if buffer.flat.members[place].shard_starts[partition] is not None
        }

    def _copies(self, draft: FileDraft, state: str, rank: int) -> Value:
        """A state that is kept whole: of each parameter all of it, end to end."""
        held = self._held(rank)
        made = draft.buffer(self._dtype(state), sum(held.values()))
        start = 0
        for name, numel in held.items():
            draft.put(made, self._arrays[name][state], rank, start)
            start += numel
        return made

    def _dtype(self, state: str) -> DType:
        return next(iter(self._arrays.values()))[state].selected.dtype

    def _partition(self, draft: FileDraft, state: str, rank: int, *, padded: bool) -> Value:
        buffer, partition = self._place(rank)
        width = buffer.flat.partition_numel
        numel = width if padded else max(0, min(buffer.stop - partition * width, width))
        made = draft.buffer(self._dtype(state), numel)
        for name, place in buffer.places.items():
            start = buffer.flat.members[place].shard_starts[partition]
            if start is not None:
                draft.put(made, self._arrays[name][state], rank, start)
        return made
