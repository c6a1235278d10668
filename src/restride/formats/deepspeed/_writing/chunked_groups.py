"""A parameter group as the ZeRO-3 optimizer keeps it: sub-groups of chunks, on every rank."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from restride.algebra.mesh import Mesh
from restride.checkpoint.values import keyed
from restride.formats.deepspeed._sub_groups import sub_groups
from restride.formats.deepspeed._writing.groups import scalar_states, states_of
from restride.formats.deepspeed._writing.writing import FP32, optimizer_key
from restride.layouts.flat import flat_chunks
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.training import ParameterGroup
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._spread import Spread
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.formats.deepspeed.target import DeepSpeedTarget
    from restride.storage.torch_output import FileDraft, OutputArray

__all__ = ["ChunkedGroup", "chunks_of"]


def chunks_of(layout: Layout, spread: Spread, target: DeepSpeedTarget) -> Layout:
    """Cut every shard of a tensor by itself into equal chunks, the last ones padded.

    Args:
        layout: How the cutters of `spread` cut the tensor.
        spread: Which ranks share a shard.
        target: The ranks.

    Examples:
        >>> from restride.formats.deepspeed._spread import spread_dense
        >>> from restride.formats.deepspeed.target import DeepSpeedTarget
        >>> from restride.layouts import split
        >>> target = DeepSpeedTarget(tp=2, dp=3, zero=3)
        >>> cut = chunks_of(split((4, 2), mesh={"tp": 2}, dim=0), spread_dense(target), target)
        >>> [cut.shard_shape(rank) for rank in range(6)] == [(2,)] * 6, cut.pieces(3)[0].full_base
        (True, 6)
    """
    parts = Mesh((("part", spread.partitions),))
    numels = [layout.shard_numel(cutter) for cutter in range(spread.cutters)]
    inner = {cutter: flat_chunks((numel,), mesh=parts) for cutter, numel in enumerate(numels)}
    return spread.chain(layout, inner, target)


class ChunkedGroup:
    """Parameters of one group that are spread alike.

    Args:
        writing: The conversion.
        number: Number of the group.
        group: Its parameters.
        spread: Which ranks hold their shards.
        limit: ``sub_group_size`` of the engine.

    Attributes:
        spread: Which ranks hold their shards.

    Raises:
        CoverageError: A layout of the target is not whole.
        UnsupportedError: A state is missing, or is not one of a flat partition.
        ExecutionError: The step of a parameter cannot be read.
    """

    def __init__(
        self, writing: Writing, number: int, group: ParameterGroup, spread: Spread, limit: int
    ) -> None:
        self._writing = writing
        self._group = group
        self.spread = spread
        self._states = states_of(writing, number, group)
        self._arrays = {name: self._announce(name) for name in group.names}
        self._members = [self._split(cutter, limit) for cutter in range(spread.cutters)]
        scalars = scalar_states(writing, number, group)
        # Every sub-group stores its own copy of what the group has in common.
        self._scalars = [
            [{state: self._scalar(state) for state in scalars} for _ in members]
            for members in self._members
        ]

    @property
    def expert_group_name(self) -> str | None:
        """What DeepSpeed calls the ranks that share experts, or None for other parameters."""
        placed = self._writing.experts
        is_expert = bool(self._group.names) and self._writing.is_expert(self._group.names[0])
        return placed.group_name if placed is not None and is_expert else None

    @property
    def most_sub_groups(self) -> int:
        """Number of sub-groups on the rank that has most."""
        return max(map(len, self._members))

    def shapes(self, rank: int) -> list[dict[str, Shape]]:
        """Shapes of the shards in each sub-group of a rank."""
        cutter, _ = self.spread.place(rank)
        return [
            {name: self._shape(name, cutter) for name in members}
            for members in self._members[cutter]
        ]

    def sub_groups(self, draft: FileDraft, rank: int) -> Iterator[tuple[Value, dict[Value, Value]]]:
        """Make the partition of the master weights and the states of each sub-group of a rank."""
        cutter, partition = self.spread.place(rank)
        numbered = zip(self._members[cutter], self._scalars[cutter], strict=True)
        for members, scalars in numbered:
            own: dict[Value, Value] = {
                optimizer_key(state): draft.tensor(array, partition)
                for state, array in scalars.items()
            }
            for state in self._states:
                if state != FP32:
                    own[optimizer_key(state)] = self._flat(draft, members, state, rank)
            yield self._flat(draft, members, FP32, rank), {**own, **keyed(self._group.numbers)}

    def _split(self, cutter: int, limit: int) -> tuple[tuple[str, ...], ...]:
        """Names of each sub-group on a cutter; the optimizer does not own what is empty there."""
        numels = {name: prod(self._shape(name, cutter)) for name in self._group.names}
        count = self.spread.partitions
        widths = {name: -(-numel // count) for name, numel in numels.items() if numel}
        return tuple(sub_groups(widths, limit))

    def _shape(self, name: str, cutter: int) -> Shape:
        return self._writing.layouts[name].shard_shape(cutter)

    def _announce(self, name: str) -> dict[str, OutputArray]:
        """Announce all states of a parameter, over the ranks ``dp, tp``."""
        writing = self._writing
        layout = chunks_of(writing.layouts[name], self.spread, writing.target)
        tensor = writing.tensors[name]
        return {state: writing.state(tensor, state, layout) for state in self._states}

    def _scalar(self, state: str) -> OutputArray:
        """Announce a number of one sub-group, which the ranks that share it all store."""
        first = self._writing.tensors[self._group.names[0]]
        ranks = Mesh((("part", self.spread.partitions),))
        return self._writing.state(first, state, replicated((), mesh=ranks))

    def _flat(self, draft: FileDraft, members: tuple[str, ...], state: str, rank: int) -> Value:
        """Lay the chunks that a rank has of the members end to end."""
        arrays = [self._arrays[name][state] for name in members]
        widths = [array.layout.shard_numel(rank) for array in arrays]
        made = draft.buffer(arrays[0].selected.dtype, sum(widths))
        start = 0
        for array, width in zip(arrays, widths, strict=True):
            draft.put(made, array, rank, start)
            start += width
        return made
