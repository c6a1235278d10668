"""``zero/optimizer_state.pt``: the optimizer without its arrays.

In the shape of ZeRO-1 and ZeRO-2 it has ``param_groups``, one for each group of parameters. In that
of ZeRO-3 it is the whole state that the first rank saved: ``param_groups`` once more inside
``optimizer_state_dict``, where they number the sub-groups that large groups are split into, and for
each sub-group its step.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.catalog import FileEntry
from restride.checkpoint.orders import merged_order
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from restride.storage.torch_zip import TorchFiles

__all__ = ["OPTIMIZER_STATE", "OptimizerState", "Trained", "read_optimizer_state"]

Trained: TypeAlias = "Sequence[Sequence[Sequence[str]]]"

OPTIMIZER_STATE: Final = "optimizer_state.pt"
_BY_SUB_GROUP: Final = "optimizer_state_dict"
_GROUPS: Final = "param_groups"


class OptimizerState(Frozen):
    """What the file says.

    Attributes:
        file: The file.
        root: Everything in it.
        groups: Settings of each group of parameters.
        parents: For each entry of ``param_shapes``, the group that it is a part of; None where they
            are the groups themselves.
        parts: For each sub-group, what it has besides arrays, by state.
    """

    file: FileEntry
    root: Field
    groups: tuple[Field, ...]
    parents: tuple[int, ...] | None
    parts: tuple[Mapping[str, Field], ...]

    def entries(self, trained: Trained) -> dict[str, int]:
        """Find the entry of ``param_shapes`` that each parameter is in on the first rank.

        Other tensor-parallel ranks may hold nothing of a parameter and split their groups elsewhere
        (ZeRO-3). Entries are in the order of the groups, so one whose names the first rank does not
        have is of the group of its neighbours, where these agree.

        Args:
            trained: For each rank, the names in each entry of its ``param_shapes``.

        Returns:
            Entries by name, without those that nothing is known of.

        Raises:
            CorruptError: This file counts more or fewer entries than the first rank has.
        """
        count = len(self.groups) if self.parents is None else len(self.parents)
        if len(trained[0]) != count:
            raise CorruptError(
                f"counts {counted(count, 'parameter group')}, param_shapes of the model files has "
                f"{len(trained[0])}",
                where=self.root.where,
            )
        found = {name: number for number, names in enumerate(trained[0]) for name in names}
        for listed in trained[1:]:
            known: list[int | None] = [
                next((found[name] for name in names if name in found), None) for names in listed
            ]
            if len(listed) == count:
                known = [*range(count)]
            for number, names in enumerate(listed):
                before = next((n for n in reversed(known[: number + 1]) if n is not None), 0)
                after = next((n for n in known[number:] if n is not None), count - 1)
                if self.parent(before) == self.parent(after):
                    found.update((name, before) for name in names if name not in found)
        return found

    def members(self, trained: Trained, order: Sequence[str]) -> list[tuple[str, ...]]:
        """Names of the parameters of each group, in the order of the ranks' buffers.

        Args:
            trained: For each rank, the names in each entry of its ``param_shapes``.
            order: Names in the order of the model.

        Raises:
            CorruptError: As for `entries`.
            UnsupportedError: Nothing says which group a parameter is in.
        """
        entries = self.entries(trained)
        by_rank: list[list[list[str]]] = [[[] for _ in self.groups] for _ in trained]
        for listed, groups in zip(trained, by_rank, strict=True):
            for name in chain(*listed):
                if name not in entries:
                    raise UnsupportedError(
                        f"nothing says which of {len(self.groups)} groups of parameters has "
                        f"{name!r}, of which the first rank held no element",
                        where=self.root.where,
                        remedy="convert the checkpoint that the folder was made of",
                    )
                groups[self.parent(entries[name])].append(name)
        return [merged_order(ranks, order) for ranks in zip(*by_rank, strict=True)]

    def parent(self, entry: int) -> int:
        """Group that an entry of ``param_shapes`` is a part of."""
        return entry if self.parents is None else self.parents[entry]


def read_optimizer_state(path: Path, name: str, opened: TorchFiles) -> OptimizerState:
    """Read the file.

    Args:
        path: The file.
        name: Its name below what was opened.
        opened: What it is opened by.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: It is damaged, or numbers sub-groups that it does not have.
        ExecutionError: The system cannot read it.
    """
    content = opened.open(path)
    root = Field(content.value, name)
    file = FileEntry(name, content.nbytes, content.stamp)
    inner = root.get(_BY_SUB_GROUP)
    if inner is None:
        return OptimizerState(file, root, root.at(_GROUPS).elements(), None, ())
    groups = inner.at(_GROUPS).elements()
    numbers = [group.at("params").integers() for group in groups]
    if [number for own in numbers for number in own] != list(range(sum(map(len, numbers)))):
        raise CorruptError(
            f"numbers its sub-groups {[list(own) for own in numbers][:8]}", where=inner.where
        )
    states = dict(inner.at("state").numbered())
    parents = tuple(parent for parent, own in enumerate(numbers) for _ in own)
    parts = tuple(_besides_arrays(states.get(number)) for number in range(len(parents)))
    return OptimizerState(file, root, groups, parents, parts)


def _besides_arrays(state: Field | None) -> dict[str, Field]:
    """Entries of a sub-group's state; flat partitions of the first rank are of no use."""
    return {
        key: entry
        for key, entry in (state.items() if state is not None else ())
        if not isinstance(entry.value, StoredTensor) or not entry.value.shape
    }
