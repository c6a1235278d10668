"""The partitions of ZeRO-3: every parameter is cut by itself, into equal chunks.

A rank's chunk has ``ceil(numel / ranks)`` elements; what the last ranks have too many is padding
that nobody writes. The flat partition of a sub-group is the chunks of its parameters end to end, in
the order of ``param_shapes``. Parameters of 5 and 4 elements on two ranks::

    rank 0  a a a b b
    rank 1  a a . b b
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._flat import Fragment
from restride.formats.deepspeed._optimizer import Group
from restride.formats.deepspeed._partitions import (
    FlatCut,
    Holding,
    Partitions,
    files_of,
    files_of_all,
    find_uncut,
)
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.formats.deepspeed._experts.files import Expert
    from restride.formats.deepspeed._model import ModelFile, Shapes
    from restride.formats.deepspeed._optimizer import ZeroFile
    from restride.formats.deepspeed._run import Run

__all__ = ["frozen_chunks", "read_chunks"]

_SHARD_GROUPS: Final = "mics_shard_size"


def read_chunks(run: Run, experts: Mapping[str, Expert]) -> Partitions:
    """Match the partitions of all ranks to the parameters of the model files.

    Raises:
        CorruptError: Files contradict each other or the shapes in the model files.
        UnsupportedError: The parameters are cut over a part of the ranks only.
    """
    _refuse_shard_groups(run)
    found = Partitions()
    reader = _Reader(run, experts, found)
    for tp in range(run.tp_size if run.zeros else 0):
        reader.read(tp)
    run.findings.extend(find_uncut(run))
    return found


def frozen_chunks(run: Run, name: str) -> FlatCut:
    """Describe where the chunks of a frozen parameter are: in the model files of all ranks.

    Raises:
        CorruptError: A chunk has another length than the shape gives.
        UnsupportedError: A chunk has another type than the parameter: it is quantized.
    """
    cut = FlatCut(1, run.tp_size, is_even=True)
    for tp, model in enumerate(run.models):
        numel = prod(model.frozen.get(name, (0,)))
        width = -(-numel // run.dp_size)
        for dp in range(run.dp_size if width else 0):
            file = run.partitioned.get((dp, tp))
            group = None if file is None else _frozen_group(file, name, width)
            holding = Holding(run.rank(dp, tp), tp, _chunk(dp, width, numel, 0), group)
            cut.holdings.append(holding)
    return cut


def _frozen_group(file: ModelFile, name: str, width: int) -> Group | None:
    tensor = file.fragments.get(name)
    if tensor is None:
        return None
    where = f"{file.root.where}: frozen_param_fragments[{name!r}]"
    if tensor.shape != (width,) or (width > 1 and tensor.strides != (1,)):
        raise CorruptError(
            f"has shape {tensor.shape} and strides {tensor.strides}, a chunk of {width} elements "
            "is expected",
            where=where,
        )
    dtype = file.dtypes.get(name)
    if dtype is not None and tensor.storage.dtype != dtype:
        raise UnsupportedError(
            f"is {tensor.storage.dtype}, the parameter is {dtype}: frozen weights are quantized",
            where=where,
            remedy="save the checkpoint without zero_quantized_nontrainable_weights",
        )
    return Group({"weight": tensor}, {}, {}, width, 0, None, None, None, where)


def _refuse_shard_groups(run: Run) -> None:
    config = run.models[0].root.get("ds_config")
    section = config.get("zero_optimization") if config else None
    size = section.get(_SHARD_GROUPS) if section else None
    if size is not None and isinstance(size.value, int) and 0 < size.value != run.dp_size:
        raise UnsupportedError(
            f"cuts parameters over groups of {size.value} of {run.dp_size} data-parallel ranks",
            where=size.where,
            remedy="ZeRO-3 checkpoints that are cut over all data-parallel ranks can be read",
        )


def _chunk(partition: int, width: int, numel: int, base: int) -> Fragment:
    first = min(partition * width, numel)
    return Fragment(partition, first, base, min(width, numel - first))


class _Reader:
    def __init__(self, run: Run, experts: Mapping[str, Expert], found: Partitions) -> None:
        self._run = run
        self._ranks = ExpertRanks(run, experts)
        self._found = found

    def read(self, tp: int) -> None:
        """Read the files of one tensor-parallel rank."""
        model = self._run.models[tp]
        files, shapes = files_of(self._run, model, "sub-groups")
        for number, members in enumerate(shapes):
            if not self._ranks.are_experts(members):
                self._read_sub_group(model, files, number, members)
            elif not tp:
                everyone = files_of_all(self._run, members, number)
                self._read_sub_group(model, everyone, number, members)
        if not tp and files:
            self._found.members.extend(_by_parent(next(iter(files.values())), shapes))

    def _read_sub_group(
        self, model: ModelFile, files: Mapping[int, ZeroFile], number: int, members: Shapes
    ) -> None:
        cutters = self._ranks.cutters(members, f"{model.root.where}: param_shapes[{number}]")
        groups = {rank: zero.groups[number] for rank, zero in files.items()}
        self._found.add_group(members, groups)
        for cutter in range(cutters):
            held = self._ranks.held(members, cutter)
            ranks = self._ranks.by_partition(members, cutter, cutters, model.tp)
            end = sum(-(-prod(shape) // len(ranks)) for shape in held.values())
            for rank in ranks:
                self._compare_model(model, rank, number, held)
                if rank in groups:
                    self._check(groups[rank], ranks, end, len(held))
            self._hold(held, ranks, groups, cutter, model.tp)

    def _compare_model(self, first: ModelFile, rank: int, number: int, held: Shapes) -> None:
        """Every rank says the shapes of its parameters again."""
        model = self._run.partitioned.get(divmod(rank, self._run.tp_size))
        if model is None:
            return
        said = model.param_shapes or ()
        own = said[number] if number < len(said) else {}
        if list(own.items()) != list(held.items()):
            different = (name for name in [*held, *own] if own.get(name) != held.get(name))
            name = next(different, next(iter(held), ""))
            raise CorruptError(
                f"says {own.get(name)}, by {first.name} it is {held.get(name)}, or the order is "
                "another",
                where=f"{model.root.where}: param_shapes[{number}]: tensor {name!r}",
            )

    def _check(self, group: Group, ranks: Sequence[int], end: int, count: int) -> None:
        if group.partition_count not in (None, len(ranks)):
            raise CorruptError(
                f"partition_count is {group.partition_count}, {counted(len(ranks), 'rank')} "
                f"{which(len(ranks), 'shares', 'share')} the "
                "sub-group",
                where=group.where,
                remedy="put all files of one save, and only those, into the folder",
            )
        if group.partition_ranks not in (None, tuple(ranks)):
            raise CorruptError(
                f"is said to be shared by ranks {list(group.partition_ranks or ())[:8]}, by the "
                f"parallelism it is ranks {list(ranks)[:8]}",
                where=group.where,
            )
        if end and not group.partition_numel:
            raise UnsupportedError(
                "is empty: an engine that offloads its optimizer to NVMe (ZeRO-Infinity) saves it "
                "as it stands on the disk, in 'offloaded_tensors'",
                where=group.where,
                remedy="save it from an engine whose optimizer is offloaded to the CPU, or not",
            )
        if group.partition_numel != end:
            raise CorruptError(
                f"has {group.partition_numel} elements, the chunks of "
                f"{counted(count, 'parameter')} in "
                f"param_shapes have {end} on {counted(len(ranks), 'rank')}",
                where=group.where,
            )

    def _hold(
        self,
        held: Shapes,
        ranks: Sequence[int],
        groups: Mapping[int, Group],
        cutter: int,
        tp: int,
    ) -> None:
        base = 0
        for name, shape in held.items():
            numel = prod(shape)
            width = -(-numel // len(ranks))
            cut = self._found.cuts.setdefault(
                name, FlatCut(*self._ranks.strides(name), is_even=True)
            )
            cut.holdings += [
                Holding(
                    rank,
                    self._ranks.cutter(name, cutter, tp),
                    _chunk(partition, width, numel, base),
                    groups.get(rank),
                )
                for partition, rank in enumerate(ranks)
                if width
            ]
            base += width


def _by_parent(zero: ZeroFile, shapes: Sequence[Shapes]) -> list[tuple[str, ...]]:
    """Names of the parameters of each parameter group: those of its sub-groups, in order."""
    members: list[list[str]] = [[] for _ in zero.param_groups]
    for parent, names in zip(zero.parents, shapes, strict=True):
        members[parent] += names
    return [tuple(names) for names in members]
