"""The parameter groups of experts of DeepSpeed's own layers, for an engine with other ranks.

The groups of the optimizer have experts in the order of the model, so that an engine with other
expert-parallel ranks has other experts between those of two layers. It splits what a script gives
it by the number of ranks that layers are on, and again by the size of what one rank has
(`groups`, `group_order`).
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import UnsupportedError
from restride.formats.deepspeed._experts.groups import MOST_GROUP_NUMEL, joined_groups, split_group
from restride.formats.deepspeed._experts.native import expert_name
from restride.formats.deepspeed.expert_settings import any_of
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup
    from restride.checkpoint.values import Value

__all__ = ["ExpertOrder"]

_NAME: Final = "name"
_MOE: Final = "moe"


class ExpertOrder(Frozen):
    """Experts of all layers, and how many ranks share them before and after.

    Attributes:
        counts: Experts of each layer in the order of the model, by what their names begin with.
        names: Tensors of the experts.
        before: Expert-parallel ranks of the source, of each layer.
        after: Those of the target.
        sizes: The numbers of ranks of the target, in the order that its engine has them in.
    """

    counts: Mapping[str, int]
    names: frozenset[str]
    before: Mapping[str, int]
    after: Mapping[str, int]
    sizes: Sequence[int]

    def retold(
        self,
        groups: Sequence[ParameterGroup],
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
        is_same = self.before == self.after and all(own == before for own in after)
        if is_same and len(self.sizes) <= 1:
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
        for given in self._given(joined_groups(local, before, 1, most=most)):
            for group in self._by_size(given):
                for part in self._split(group, after, most):
                    names = tuple(self.everywhere(part.names, self.after))
                    listed = part.listed and tuple(self.everywhere(part.listed, self.after))
                    found.append(replace(part, names=names, listed=listed))
        return tuple(found)

    def everywhere(self, names: Iterable[str], ranks: Mapping[str, int]) -> Iterator[str]:
        """What all ranks have, where the first one has these: one rank after the other.

        Args:
            names: Names of the first rank.
            ranks: Expert-parallel ranks of each layer.
        """
        for prefix, block in groupby(names, self._prefix):
            own = [*block]
            count = ranks[prefix] if prefix else 1
            held = self.counts[prefix] // count if prefix else 0
            for rank in range(count):
                for name in own:
                    parts = self._parts(name)
                    number = "" if parts is None else parts[1] + rank * held
                    yield name if parts is None else f"{prefix}.{number}.{parts[2]}"

    def _given(self, groups: Sequence[ParameterGroup]) -> Iterator[list[ParameterGroup]]:
        """What a script gave as one group: what is left of it, or all that has experts of it.

        Only the names of these groups differ. Where several were given with the same settings, each
        must have experts on all numbers of ranks, or it is not known which belong together.
        """
        dense = [_settings(group) for group in groups if not self._has_experts(group)]
        taken: set[int] = set()
        for place, group in enumerate(groups):
            if place in taken:
                continue
            if not self._has_experts(group):
                yield [group]
                continue
            own = _settings(group)
            alike = [
                n for n, g in enumerate(groups) if self._has_experts(g) and _settings(g) == own
            ]
            by_name: dict[Value, list[int]] = {}
            for n in alike:
                by_name.setdefault(groups[n].settings.get(_NAME), []).append(n)
            counts = {len(places) for places in by_name.values()}
            if len(by_name) > 1 and (len(counts) > 1 or counts != {max(dense.count(own), 1)}):
                raise UnsupportedError(
                    "parameter groups with the same settings have experts on different numbers of "
                    "ranks, and nothing says which of them the script gave as one",
                    remedy="give every group of the script a setting of its own, and save again",
                )
            number = by_name[group.settings.get(_NAME)].index(place)
            together = sorted(places[number] for places in by_name.values())
            taken.update(together)
            yield [groups[n] for n in together]

    def _by_size(self, given: Sequence[ParameterGroup]) -> Iterator[ParameterGroup]:
        """Split what a script gave as one group by the number of ranks that layers are on."""
        first = given[0]
        if not self._has_experts(first):
            listed = None if first.listed is None else self._moved(first.listed)
            yield replace(first, names=self._moved(first.names), listed=listed)
            return
        names = self._merged([self._moved(group.names) for group in given])
        all_listed = [group.listed for group in given if group.listed is not None]
        listed = None
        if len(all_listed) == len(given):
            listed = self._merged([self._moved(own) for own in all_listed])
        if any(dict(group.numbers) != dict(first.numbers) for group in given):
            raise UnsupportedError(
                "parameter groups that become one have different numbers",
                remedy="convert a checkpoint whose parameters were all trained alike",
            )
        for size in self.sizes:
            own = tuple(name for name in names if self.after[self._prefix(name)] == size)
            if own:
                settings = dict(first.settings)
                if _NAME in settings:
                    settings[_NAME] = f"ep_size_{size}"
                kept = listed and tuple(n for n in listed if self.after[self._prefix(n)] == size)
                yield replace(first, names=own, settings=settings, listed=kept)

    def _merged(self, parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Put together what was split by ranks: layer by layer, as the model has them."""
        if len(parts) == 1:
            return parts[0]
        layers = {prefix: number for number, prefix in enumerate(self.counts)}
        for names in parts:
            numbers = [layers[self._prefix(name)] for name in names]
            if numbers != sorted(numbers):
                raise UnsupportedError(
                    "a parameter group does not have its experts in the order of the layers: how "
                    "those on other numbers of ranks stand between them is not known",
                    remedy="leave out --ep",
                )
        joined = (name for own in parts for name in own)
        return tuple(sorted(joined, key=lambda name: layers[self._prefix(name)]))

    def _split(
        self, group: ParameterGroup, sizes: Sequence[Mapping[str, int]], most: int
    ) -> list[ParameterGroup]:
        """Split a group by its size on a rank; all tensor-parallel ranks have to do it alike."""
        ways = [[*split_group(group, own, 1, before=0, after=0, most=most)] for own in sizes]
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
            if parts is None or parts[1] < self.counts[parts[0]] // self.before[parts[0]]
        )

    def _moved(self, names: Sequence[str]) -> tuple[str, ...]:
        """What the first rank of the target has, where that of the source has these."""
        found: list[str] = []
        seen: set[str] = set()
        for prefix, block in groupby(names, self._prefix):
            own = [*block]
            if not prefix or self.before[prefix] == self.after[prefix]:
                found.extend(own)
                continue
            known = [parts[1:] for name in own if (parts := self._parts(name))]
            numbers = [number for number, _ in known]
            if prefix in seen or numbers != sorted(numbers) or len({*known}) < len(known):
                raise UnsupportedError(
                    f"a parameter group does not have all experts of {prefix!r} one after the "
                    "other: how an engine with other expert-parallel ranks orders them is not "
                    "known",
                    remedy=f"choose --ep {self.before[prefix]}",
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
        before, after = count // self.before[prefix], count // self.after[prefix]
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
                f"{other} of {self.after[prefix]} holds than of those of rank 0, whose names speak "
                "for all ranks in DeepSpeed's files: parts of them are frozen",
                remedy=f"choose --ep {any_of(sorted({1, self.before[prefix]}))}",
            )
        return ranks[0]

    def _has_experts(self, group: ParameterGroup) -> bool:
        is_said = group.settings.get(_MOE) is True or not group.settings
        return is_said and bool(group.names) and all(name in self.names for name in group.names)

    def _prefix(self, name: str) -> str:
        parts = self._parts(name)
        return parts[0] if parts else ""

    def _parts(self, name: str) -> tuple[str, int, str] | None:
        """Layer, number and rest of the name of an expert's tensor."""
        return expert_name(name) if name in self.names else None


def _settings(group: ParameterGroup) -> dict[str, Value]:
    """Settings that a group has from the script: not what DeepSpeed calls groups of experts."""
    return {key: value for key, value in group.settings.items() if key not in {_NAME, _MOE}}
