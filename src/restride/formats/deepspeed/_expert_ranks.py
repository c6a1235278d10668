"""Which data-parallel ranks hold which part of a parameter group: experts are not everywhere."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from restride.errors import CorruptError
from restride.formats.deepspeed._settings import is_enabled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._expert_files import Expert
    from restride.formats.deepspeed._model import Shapes
    from restride.formats.deepspeed._run import Run

__all__ = ["ExpertRanks"]


class ExpertRanks:
    """Data-parallel ranks as (cutter, partition): whose shard, and which partition of it.

    Dense parameters have one cutter, and all data-parallel ranks partition its shard. Experts have
    one cutter for each expert-parallel rank, and the ranks with the same experts partition theirs.

    Args:
        run: The files.
        experts: Tensors of experts by name.
    """

    def __init__(self, run: Run, experts: Mapping[str, Expert]) -> None:
        self._run = run
        self._experts = experts
        config = run.models[0].root.get("ds_config")
        stored = config.get("use_data_before_expert_parallelism") if config else None
        self._is_data_first = is_enabled(stored)

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
        if self._run.dp_size % cutters:
            raise CorruptError(
                f"{self._run.dp_size} data-parallel ranks do not hold {cutters} expert-parallel "
                "ones",
                where=where,
            )
        return cutters

    def by_partition(self, cutter: int, cutters: int) -> list[int]:
        """List the data-parallel ranks of a cutter in the order of their partitions.

        Neighbouring ranks hold different experts, unless the run was told to put data parallelism
        first (deepspeed 0.19.8 `utils/groups.py`).
        """
        count = self._run.dp_size // cutters
        if self._is_data_first:
            return list(range(cutter * count, (cutter + 1) * count))
        return list(range(cutter, self._run.dp_size, cutters))

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
        return cutter if name in self._experts else tp

    def strides(self, name: str) -> tuple[int, int]:
        """Distance on the mesh between neighbouring shards, and between neighbouring partitions."""
        if name not in self._experts:
            return 1, self._run.tp_size
        ranks = self._experts[name].rank_count
        return (self._run.dp_size // ranks, 1) if self._is_data_first else (1, ranks)
