"""The flat partitions of all ranks, checked against each other: which rank has which fragment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._flat import check_partition, fragments_of, lay_out
from restride.formats.deepspeed._momentum import (
    is_muon,
    may_be_cut,
    may_be_whole,
    take_momentum,
    whole_fragments,
)
from restride.formats.deepspeed._settings import is_round_robin
from restride.frozen import Frozen
from restride.storage.holders import has_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.formats.deepspeed._experts.files import Expert
    from restride.formats.deepspeed._flat import Fragment, Slot
    from restride.formats.deepspeed._model import ModelFile, Shapes
    from restride.formats.deepspeed._optimizer import Group, ZeroFile
    from restride.formats.deepspeed._run import Run

__all__ = [
    "FlatCut",
    "Holding",
    "Partitions",
    "files_of",
    "files_of_all",
    "find_uncut",
    "read_partitions",
]


class Holding(Frozen):
    """One fragment of one parameter, in the file of one rank.

    Attributes:
        rank: Rank on the mesh ``dp, tp``.
        cutter: Rank of the layout whose shard is cut: the tensor-parallel or expert-parallel one.
        fragment: The run of that shard, and where it stands in the rank's partition.
        group: The partition, or None where the file is missing.
    """

    rank: int
    cutter: int
    fragment: Fragment
    group: Group | None


class FlatCut(Struct):
    """How the shards of one parameter are cut into fragments.

    Attributes:
        outer_stride: Distance on the mesh between two ranks that hold neighbouring shards.
        inner_stride: Distance on the mesh between two partitions of one buffer.
        block: Neighbouring ranks that cut one tensor, where those that share its shards are
            neighbours as well (`_rank_blocks`); 0 elsewhere.
        is_even: Whether every shard is cut by itself into equal chunks, the last one padded
            (ZeRO-3); then there is a holding for each rank, even where its chunk is all padding.
        holdings: The fragments over all ranks.
    """

    outer_stride: int
    inner_stride: int
    block: int = 0
    is_even: bool = False
    holdings: list[Holding] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all files with a fragment are there."""
        return all(holding.group is not None for holding in self.holdings)


class Partitions(Struct):
    """What the optimizer files hold, by parameter.

    Attributes:
        cuts: The fragments of each parameter.
        whole: The copies of states that are kept whole, of parameters that have such: Muon's
            momentum.
        groups: For each parameter the partitions of its group on all ranks that have a file, for
            states that hold for a whole group.
        members: Names of the parameters of each group, in flat order.
    """

    cuts: dict[str, FlatCut] = field(default_factory=dict)
    whole: dict[str, FlatCut] = field(default_factory=dict)
    groups: dict[str, dict[int, Group]] = field(default_factory=dict)
    members: list[tuple[str, ...]] = field(default_factory=list)

    def add_group(self, names: Iterable[str], groups: Mapping[int, Group]) -> None:
        """Note the partitions of a group of some parameters, by rank on the mesh."""
        for name in names:
            self.groups.setdefault(name, {}).update(groups)


def files_of(run: Run, model: ModelFile, noun: str) -> tuple[dict[int, ZeroFile], Sequence[Shapes]]:
    """Return the optimizer files of one tensor-parallel rank by rank, and the shapes of groups.

    Args:
        run: The files.
        model: The model file of the rank.
        noun: What the groups are called, for errors.

    Raises:
        CorruptError: The model file has no shapes, or counts other groups than an optimizer file.
    """
    tp, shapes = model.tp, model.param_shapes
    files = {
        run.rank(dp, tp): run.zeros[dp, tp] for dp in range(run.dp_size) if (dp, tp) in run.zeros
    }
    if shapes is None:
        raise CorruptError(
            "has no param_shapes, yet there are optimizer files", where=model.root.where
        )
    for zero in files.values():
        if len(zero.groups) != len(shapes):
            raise CorruptError(
                f"has {len(zero.groups)} {noun}, {model.name} has {len(shapes)}",
                where=f"{zero.name} ({zero.rank_name})",
            )
    return files, shapes


def files_of_all(run: Run, members: Shapes, number: int) -> dict[int, ZeroFile]:
    """Return the optimizer files of all ranks by rank, which a group of experts is in.

    Args:
        run: The files.
        members: The group, as the first tensor-parallel rank has it.
        number: Its number.

    Raises:
        CorruptError: Another tensor-parallel rank has other experts, or counts other groups.
    """
    found: dict[int, ZeroFile] = {}
    for model in run.models:
        files, shapes = files_of(run, model, "parameter groups")
        own = shapes[number] if number < len(shapes) else {}
        if list(own.items()) != list(members.items()):
            raise CorruptError(
                f"has other experts than {run.models[0].name}",
                where=f"{model.root.where}: param_shapes[{number}]",
            )
        found |= files
    return found


def read_partitions(run: Run, experts: Mapping[str, Expert]) -> Partitions:
    """Match the partitions of all ranks to the parameters of the model files.

    Raises:
        CorruptError: Files contradict each other or the shapes in the model files.
        UnsupportedError: The parameters are cut in a way that is not known.
    """
    found = Partitions()
    if not run.zeros:
        return found
    reader = _Reader(run, experts, found)
    for tp in range(run.tp_size):
        reader.read(tp)
    if reader.is_reordered:
        message = (
            "round_robin_gradients is on, and param_slice_mappings is in the order before the "
            "round robin (a fault of DeepSpeed): the fragments are taken from param_shapes, which "
            "the weights agree with; ds_to_universal mixes the parameters up"
        )
        run.findings.append(Finding("warning", "slice-mapping-order", message))
    run.findings.extend(find_uncut(run))
    return found


def find_uncut(run: Run) -> Iterator[Finding]:
    """Tell of optimizer states that belong to no parameter: they are carried as values."""
    seen: set[tuple[int, str]] = set()
    for zero in run.zeros.values():
        for number, group in enumerate(zero.groups):
            for name, entry in group.others.items():
                if (number, name) not in seen and has_tensor(entry.value):
                    seen.add((number, name))
                    yield Finding(
                        "warning",
                        "uncut-state",
                        f"{entry.where} is {shown(entry.value)}, the flat partition has "
                        f"{group.partition_numel} elements: the state is of no parameter",
                        zero.name,
                    )


class _Reader:
    def __init__(self, run: Run, experts: Mapping[str, Expert], found: Partitions) -> None:
        self._run = run
        self._ranks = ExpertRanks(run, experts)
        self._found = found
        self._whole: dict[int, bool] = {}
        self.is_reordered = False

    def read(self, tp: int) -> None:
        """Read the files of one tensor-parallel rank; with the first one, those of experts."""
        model = self._run.models[tp]
        files, shapes = files_of(self._run, model, "parameter groups")
        for number, members in enumerate(shapes):
            if not self._ranks.are_folded(members):
                self._read_group(model, files, number, members)
            elif not tp:
                self._read_group(model, files_of_all(self._run, members, number), number, members)
            if not tp:
                self._found.members.append(self._ranks.full_names(members))

    def _read_group(
        self, model: ModelFile, files: Mapping[int, ZeroFile], number: int, members: Shapes
    ) -> None:
        cutters = self._ranks.cutters(members, f"{model.root.where}: param_shapes[{number}]")
        groups = {rank: zero.groups[number] for rank, zero in files.items()}
        width = _agreed_width(groups)
        for cutter in range(cutters if groups else 0):
            slots = self._slots(self._ranks.held(members, cutter), groups)
            by_partition = self._ranks.by_partition(members, cutter, cutters, model.tp)
            for partition, rank in enumerate(by_partition):
                if rank in files:
                    self._check(files[rank], number, slots, partition, len(by_partition))
            slots = self._full(slots, cutter)
            if self._keeps_whole(number):
                self._take_momentum(slots, width, by_partition, groups, cutter, model.tp, number)
            self._hold(slots, width, by_partition, groups, cutter, model.tp)
        self._found.add_group(self._ranks.full_names(members), groups)

    def _slots(self, held: Shapes, groups: Mapping[int, Group]) -> tuple[Slot, ...]:
        first = next(iter(groups.values()))
        for group in groups.values():
            if group.alignment != first.alignment:
                raise CorruptError(
                    f"param_alignment_paddings are not those of {first.where}", where=group.where
                )
        return lay_out(held, first.alignment, first.where)

    def _full(self, slots: Sequence[Slot], cutter: int) -> tuple[Slot, ...]:
        """The slots under the names that the catalog has for what a cutter has in them."""
        return tuple(replace(slot, name=self._ranks.full_name(slot.name, cutter)) for slot in slots)

    def _check(
        self, zero: ZeroFile, number: int, slots: Sequence[Slot], partition: int, count: int
    ) -> None:
        order = check_partition(
            zero.groups[number],
            slots,
            partition,
            count,
            is_lean=zero.stage is not None,
            is_round_robin=is_round_robin(zero.root.get("ds_config")),
        )
        self.is_reordered |= order == "group"

    def _hold(
        self,
        slots: Sequence[Slot],
        width: int,
        by_partition: Sequence[int],
        groups: Mapping[int, Group],
        cutter: int,
        tp: int,
    ) -> None:
        for slot in slots:
            holdings = self._cut(slot.name).holdings
            for fragment in fragments_of(slot, width):
                rank = by_partition[fragment.partition]
                own = self._ranks.cutter(slot.name, cutter, tp)
                holdings.append(Holding(rank, own, fragment, groups.get(rank)))

    def _keeps_whole(self, number: int) -> bool:
        """Whether the momentum of a group is kept whole: on all ranks, or on none.

        Raises:
            CorruptError: Files are missing, and those that are there leave both possible.
        """
        if number not in self._whole:
            zeros = self._run.zeros
            is_whole, is_open = all(is_muon(zero, number) for zero in zeros.values()), False
            for model in self._run.models if is_whole else ():
                for own, slots, width in self._buffers(model, number):
                    is_whole = is_whole and may_be_whole(own, slots, width)
                    is_open = is_open or may_be_cut(own, slots, width)
            if is_whole and is_open and len(zeros) < self._run.mesh.size:
                raise CorruptError(
                    "optimizer files are missing, and without them nothing says whether Muon keeps "
                    "its momentum whole",
                    where=str(self._run.folder.path),
                    remedy="add the files of all ranks, or remove them all to read the weights",
                )
            self._whole[number] = is_whole
        return self._whole[number]

    def _buffers(
        self, model: ModelFile, number: int
    ) -> Iterator[tuple[dict[int, Group], tuple[Slot, ...], int]]:
        """Yield the partitions of each buffer of a group on one tensor-parallel rank."""
        files, shapes = files_of(self._run, model, "parameter groups")
        if not files or number >= len(shapes):
            return
        if self._ranks.are_folded(shapes[number]):
            files = files_of_all(self._run, shapes[number], number)
        groups = {rank: zero.groups[number] for rank, zero in files.items()}
        width = _agreed_width(groups)
        cutters = self._ranks.cutters(shapes[number], model.root.where)
        for cutter in range(cutters):
            slots = self._slots(self._ranks.held(shapes[number], cutter), groups)
            slots = self._full(slots, cutter)
            ranks = self._ranks.by_partition(shapes[number], cutter, cutters, model.tp)
            yield {n: groups[rank] for n, rank in enumerate(ranks) if rank in groups}, slots, width

    def _take_momentum(
        self,
        slots: Sequence[Slot],
        width: int,
        by_partition: Sequence[int],
        groups: dict[int, Group],
        cutter: int,
        tp: int,
        number: int,
    ) -> None:
        """Hold what Muon keeps whole apart from the partitions; `groups` lose it."""
        taken = {
            partition: take_momentum(groups[rank])
            for partition, rank in enumerate(by_partition)
            if rank in groups
        }
        for partition, found in taken.items():
            rank = by_partition[partition]
            groups[rank] = found.group
            place = divmod(rank, self._run.tp_size)
            zero = self._run.zeros[place]
            changed = (*zero.groups[:number], found.group, *zero.groups[number + 1 :])
            self._run.zeros[place] = replace(zero, groups=changed)
        for slot in slots:
            whole = self._found.whole.setdefault(
                slot.name, FlatCut(*self._ranks.strides(slot.name))
            )
            for fragment in whole_fragments(slot, slots, width):
                held = taken.get(fragment.partition)
                whole.holdings.append(
                    Holding(
                        by_partition[fragment.partition],
                        self._ranks.cutter(slot.name, cutter, tp),
                        fragment,
                        held.momentum if held else None,
                    )
                )

    def _cut(self, name: str) -> FlatCut:
        if name not in self._found.cuts:
            self._found.cuts[name] = FlatCut(*self._ranks.strides(name))
        return self._found.cuts[name]


def _agreed_width(groups: Mapping[int, Group]) -> int:
    """Elements of a partition, which all ranks of a group must have in common."""
    first: Group | None = None
    for group in groups.values():
        if first is None:
            first = group
        elif group.partition_numel != first.partition_numel:
            raise CorruptError(
                f"the partition has {group.partition_numel} elements with its padding, "
                f"{first.where} has {first.partition_numel}",
                where=group.where,
            )
    return first.partition_numel if first else 0
