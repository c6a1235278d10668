"""The parameter groups of experts of DeepSpeed's own layers, for an engine with other ranks.

The groups of the optimizer have experts in the order of the model, so that an engine with other
expert-parallel ranks has other experts between those of two layers; and it splits the groups anew,
by the size of what one rank has (`_expert_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from restride.errors import UnsupportedError
from restride.formats.deepspeed._expert_groups import MOST_GROUP_NUMEL, joined_groups, split_group
from restride.formats.deepspeed._native_experts import expert_name
from restride.formats.deepspeed.expert_settings import any_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup

__all__ = ["ExpertOrder"]


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Experts of all layers, and how many ranks share them before and after.

    Attributes:
        counts: Experts of each layer, by what their names begin with.
        names: Tensors of the experts.
        before: Expert-parallel ranks of the source.
        after: Those of the target.
    """

    counts: Mapping[str, int]
    names: frozenset[str]
    before: int
    after: int

    def retold(
        self,
        groups: Iterable[ParameterGroup],
        before: Mapping[str, int],
        after: Sequence[Mapping[str, int]],
        *,
        most: int = MOST_GROUP_NUMEL,
    ) -> tuple[ParameterGroup, ...]:
        """The parameter groups that an engine of the target has.

        Args:
            groups: Those of the source.
            before: Elements that a rank of the source has of each tensor of an expert.
            after: The same of the target, for each tensor-parallel rank that has other numbers.
            most: Elements that a group has at most on a rank.

        Raises:
            UnsupportedError: Nothing says how an engine with other expert-parallel ranks orders
                them, or its tensor-parallel ranks would split them differently.
        """
        if self.before == self.after and all(own == before for own in after):
            return tuple(groups)
        # The bounds between groups are those of what one rank has.
        local = [
            replace(
                group,
                names=self._first(group.names),
                listed=None if group.listed is None else self._first(group.listed),
            )
            for group in groups
        ]
        found: list[ParameterGroup] = []
        for group in joined_groups(local, before, 1, most=most):
            for part in self._split(self._moved_group(group), after, most):
                names = tuple(self.everywhere(part.names, self.after))
                listed = part.listed and tuple(self.everywhere(part.listed, self.after))
                found.append(replace(part, names=names, listed=listed))
        return tuple(found)

    def everywhere(self, names: Iterable[str], ranks: int) -> Iterator[str]:
        """What all ranks have, where the first one has these: one rank after the other."""
        for prefix, block in groupby(names, self._prefix):
            own = [*block]
            held = self.counts[prefix] // ranks if prefix else 0
            for rank in range(ranks if prefix else 1):
                for name in own:
                    parts = self._parts(name)
                    number = "" if parts is None else parts[1] + rank * held
                    yield name if parts is None else f"{prefix}.{number}.{parts[2]}"

    def _split(
        self, group: ParameterGroup, sizes: Sequence[Mapping[str, int]], most: int
    ) -> list[ParameterGroup]:
        """Split a group by its size on a rank; all tensor-parallel ranks have to do it alike."""
        ways = [
            [*split_group(group, own, 1, before=self.before, after=self.after, most=most)]
            for own in sizes
        ]
        if any([part.names for part in way] != [part.names for part in ways[0]] for way in ways):
            raise UnsupportedError(
                f"tensor-parallel ranks have unequal parts of the experts, and split a group of "
                f"more than {most} elements after different ones: the files of the first speak for "
                "all",
                remedy="choose --tp so that the parts are equal",
            )
        return ways[0]

    def _first(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of some names that the first rank of the source has."""
        return tuple(
            name
            for name, parts in ((name, self._parts(name)) for name in names)
            if parts is None or parts[1] < self.counts[parts[0]] // self.before
        )

    def _moved_group(self, group: ParameterGroup) -> ParameterGroup:
        if self.before == self.after:
            return group
        listed = None if group.listed is None else self._moved(group.listed)
        return replace(group, names=self._moved(group.names), listed=listed)

    def _moved(self, names: Sequence[str]) -> tuple[str, ...]:
        """What the first rank of the target has, where that of the source has these."""
        found: list[str] = []
        seen: set[str] = set()
        for prefix, block in groupby(names, self._prefix):
            own = [*block]
            if not prefix:
                found.extend(own)
                continue
            known = [parts[1:] for name in own if (parts := self._parts(name))]
            numbers = [number for number, _ in known]
            if prefix in seen or numbers != sorted(numbers) or len({*known}) < len(known):
                raise UnsupportedError(
                    f"a parameter group does not have all experts of {prefix!r} one after the "
                    "other: how an engine with other expert-parallel ranks orders them is not "
                    "known",
                    remedy=f"choose --ep {self.before}",
                )
            moved = self._regrouped(prefix, known)
            seen.add(prefix)
            found += [f"{prefix}.{number}.{rest}" for number, rest in moved]
        return tuple(found)

    def _regrouped(self, prefix: str, known: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """What the first rank of the target has of a layer, where that of the source has these.

        Experts may be trained in other parts, as long as every rank has the same at the same
        places: model files have the names of the first one, which speak for all.

        Raises:
            UnsupportedError: They have not.
        """
        count = self.counts[prefix]
        before, after = count // self.before, count // self.after
        full = [
            (number + first, rest) for first in range(0, count, before) for number, rest in known
        ]
        ranks = [
            [(number - first, rest) for number, rest in full if first <= number < first + after]
            for first in range(0, count, after)
        ]
        other = next((rank for rank, own in enumerate(ranks) if own != ranks[0]), None)
        if other is not None:
            raise UnsupportedError(
                f"a parameter group has other tensors of the experts of {prefix!r} that rank "
                f"{other} of {self.after} holds than of those of rank 0, whose names speak for "
                "all ranks in DeepSpeed's files: parts of them are frozen",
                remedy=f"choose --ep {any_of(sorted({1, self.before}))}",
            )
        return ranks[0]

    def _prefix(self, name: str) -> str:
        parts = self._parts(name)
        return parts[0] if parts else ""

    def _parts(self, name: str) -> tuple[str, int, str] | None:
        """Layer, number and rest of the name of an expert's tensor."""
        return expert_name(name) if name in self.names else None
