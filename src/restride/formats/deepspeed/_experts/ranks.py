"""Which ranks hold which part of a parameter group: experts are not everywhere."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from restride.errors import CorruptError
from restride.formats.deepspeed._whole.experts import puts_data_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._experts.files import Expert
    from restride.formats.deepspeed._model import Shapes
    from restride.formats.deepspeed._run import Run

__all__ = ["ExpertRanks"]


class ExpertRanks:
    """Ranks on the mesh ``dp, tp`` as (cutter, partition): whose shard, which partition of it.

    Dense parameters have one cutter on each tensor-parallel rank, whose data-parallel ranks
    partition its shard. Experts have one cutter for each expert-parallel rank, and the ranks with
    the same experts partition theirs. Expert-parallel ranks are neighbours among all ranks: they
    fold tensor-parallel ones, none of which cuts an expert (deepspeed 0.19.8
    `module_inject/auto_ep_folding.py`, `expected_folding_group_tables`). Where tensor-parallel
    ranks cut experts, they are neighbours among the data-parallel ranks of each.

    Args:
        run: The files.
        experts: Tensors of experts by name.
    """

    def __init__(self, run: Run, experts: Mapping[str, Expert]) -> None:
        self._run = run
        self._experts = experts
        self._are_cut = any(own.tp_size > 1 for own in experts.values())
        # The ranks that expert-parallel ones are neighbours among.
        self._world = run.dp_size * (1 if self._are_cut else run.tp_size)
        self._is_data_first = puts_data_first(run)

    def cutters(self, members: Iterable[str], where: str) -> int:
        """Count the expert-parallel ranks that a group is spread over; 1 for dense parameters.

        Raises:
            CorruptError: Its members are spread over different numbers of ranks, or over more than
                there are.
        """
        counts = {
            self._experts[name].rank_count if name in self._experts else 1 for name in members
        }
        if len(counts) > 1:
            raise CorruptError("a parameter group mixes experts with other parameters", where=where)
        cutters = counts.pop() if counts else 1
        if self._world % cutters:
            raise CorruptError(
                f"{self._world} ranks do not hold {cutters} expert-parallel ones", where=where
            )
        return cutters

    def are_experts(self, members: Iterable[str]) -> bool:
        """Whether a group is one of experts, by its first member."""
        return next(iter(members), None) in self._experts

    def are_folded(self, members: Iterable[str]) -> bool:
        """Whether a group is of experts that all tensor-parallel ranks share."""
        return self.are_experts(members) and not self._are_cut

    def partition_count(self, members: Sequence[str], where: str) -> int:
        """Count the ranks that share the shard of a cutter.

        Raises:
            CorruptError: As for `cutters`.
        """
        cutters = self.cutters(members, where)
        return (self._world if self.are_experts(members) else self._run.dp_size) // cutters

    def by_partition(self, members: Iterable[str], cutter: int, cutters: int, tp: int) -> list[int]:
        """List the ranks of a cutter in the order of their partitions.

        Neighbouring ranks hold different experts, unless the run was told to put data parallelism
        first (deepspeed 0.19.8 `utils/groups.py`).
        """
        if not self.are_experts(members):
            return [self._run.rank(dp, tp) for dp in range(self._run.dp_size)]
        count = self._world // cutters
        own = range(cutter, self._world, cutters)
        if self._is_data_first:
            own = range(cutter * count, (cutter + 1) * count)
        return [self._run.rank(n, tp) for n in own] if self._are_cut else list(own)

    def held(self, members: Shapes, cutter: int) -> dict[str, Shape]:
        """Shapes of the shards that a cutter has of a group, by the names of the first one."""
        return {
            name: self._experts[name].held_shape(shape, cutter) if name in self._experts else shape
            for name, shape in members.items()
        }

    def full_name(self, name: str, cutter: int) -> str:
        """Name in the catalog of what a cutter calls by a name.

        Raises:
            CorruptError: No cutter has an expert of its number.
        """
        return self._experts[name].name_on(cutter) if name in self._experts else name

    def full_names(self, members: Iterable[str]) -> tuple[str, ...]:
        """Names in the catalog of all that the cutters call by some names.

        What a layer has on one cutter follows what it has on the one before.

        Raises:
            CorruptError: No cutter has an expert of such a number.
        """
        found: dict[str, None] = {}
        for expert, own in groupby(members, self._layer):
            names = [*own]
            for cutter in range(expert[1]):
                found.update(dict.fromkeys(self.full_name(name, cutter) for name in names))
        return tuple(found)

    def _layer(self, name: str) -> tuple[int | None, int]:
        """Number of the layer of an expert, and how many cutters have one of its name."""
        expert = self._experts.get(name)
        return (None, 1) if expert is None else (expert.layer, expert.rank_count)

    def cutter(self, name: str, cutter: int, tp: int) -> int:
        """Rank of a parameter's layout that a cutter on a tensor-parallel rank is."""
        if name not in self._experts:
            return tp
        return cutter * self._run.tp_size + tp if self._are_cut else cutter

    def strides(self, name: str) -> tuple[int, int, int]:
        """Where the shards of a parameter are on the mesh.

        Returns:
            The distance between neighbouring shards, that between neighbouring partitions, and how
            many neighbours cut one tensor where the ranks that share its shards are neighbours too;
            0 elsewhere.
        """
        if name not in self._experts:
            return 1, self._run.tp_size, 0
        ranks = self._experts[name].rank_count
        if self._are_cut:
            tp = self._run.tp_size
            return (1, tp, tp) if self._is_data_first else (1, ranks * tp, 0)
        return (self._world // ranks, 1, 0) if self._is_data_first else (1, ranks, 0)
