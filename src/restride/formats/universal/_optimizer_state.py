"""``zero/optimizer_state.pt``: the optimizer without its arrays.

In the shape of ZeRO-1 and ZeRO-2 it has ``param_groups``, one for each group of parameters. In that
of ZeRO-3 it is the whole state that the first rank saved: ``param_groups`` once more inside
``optimizer_state_dict``, where they number the sub-groups that large groups are split into, and for
each sub-group its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import FileEntry
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._fields import Field
from restride.storage.torch_zip import open_torch_zip

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["OPTIMIZER_STATE", "OptimizerState", "read_optimizer_state"]

OPTIMIZER_STATE: Final = "optimizer_state.pt"
_BY_SUB_GROUP: Final = "optimizer_state_dict"
_GROUPS: Final = "param_groups"


@dataclass(frozen=True, slots=True)
class OptimizerState:
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

    def members(self, shapes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """Names of the parameters of each group.

        Args:
            shapes: Names in each entry of ``param_shapes``.

        Raises:
            CorruptError: There are more or fewer of them than this file counts.
        """
        parents = tuple(range(len(self.groups))) if self.parents is None else self.parents
        if len(parents) != len(shapes):
            raise CorruptError(
                f"counts {len(parents)} groups of parameters, param_shapes of the model files has "
                f"{len(shapes)}",
                where=self.root.where,
            )
        found: list[tuple[str, ...]] = [() for _ in self.groups]
        for parent, names in zip(parents, shapes, strict=True):
            found[parent] += tuple(names)
        return found


def read_optimizer_state(path: Path, name: str) -> OptimizerState:
    """Read the file.

    Args:
        path: The file.
        name: Its name below what was opened.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: It is damaged, or numbers sub-groups that it does not have.
        ExecutionError: The system cannot read it.
    """
    opened = open_torch_zip(path)
    root = Field(opened.value, name)
    file = FileEntry(name, opened.nbytes)
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
