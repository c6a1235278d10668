"""How the experts of a model are split into parameter groups, which depends on their ranks.

DeepSpeed gives experts groups of their own, named after the number of expert-parallel ranks, and
splits them by size (deepspeed 0.19.8 `moe/utils.py`,
`split_params_into_different_moe_groups_for_optimizer`). With more ranks each holds fewer experts,
and the groups are fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup

__all__ = ["MOST_GROUP_NUMEL", "joined_groups", "regrouped", "split_group"]

MOST_GROUP_NUMEL: Final = 178_956_971
"""Elements of one rank's experts that a group has at most, unless it has one parameter."""

_NAME: Final = "name"
_IS_EXPERTS: Final = "moe"


def regrouped(
    groups: Iterable[ParameterGroup],
    numels: Mapping[str, int],
    *,
    before: int,
    after: int,
    most: int = MOST_GROUP_NUMEL,
) -> Iterator[ParameterGroup]:
    """Split the groups of experts as an engine with other expert-parallel ranks does.

    Where two neighbouring groups are alike, and the second one starts with the very parameter that
    did not fit into the first, they were one group of the model. All other bounds stay.

    Args:
        groups: Of the source; those of other parameters are passed on.
        numels: Elements of each stacked parameter, all experts together.
        before: Expert-parallel ranks of the source.
        after: Those of the target.
        most: Elements that a group has at most on a rank.
    """
    for group in joined_groups(groups, numels, before, most=most):
        yield from split_group(group, numels, after, before=before, after=after, most=most)


def joined_groups(
    groups: Iterable[ParameterGroup],
    numels: Mapping[str, int],
    share: int,
    *,
    most: int = MOST_GROUP_NUMEL,
) -> list[ParameterGroup]:
    """Join groups of experts that were one group of the model, and were split by their size.

    Args:
        groups: Of the source; those of other parameters are passed on.
        numels: Elements of each parameter of experts.
        share: One rank has so many times fewer of each.
        most: Elements that a group has at most on a rank.
    """
    joined: list[ParameterGroup] = []
    for group in groups:
        if joined and _is_split(joined[-1], group, numels, share, most):
            joined[-1] = _joined(joined[-1], group)
        else:
            joined.append(group)
    return joined


def split_group(
    group: ParameterGroup,
    numels: Mapping[str, int],
    share: int,
    *,
    before: int,
    after: int,
    most: int = MOST_GROUP_NUMEL,
) -> Iterator[ParameterGroup]:
    """Split a group of experts by its size, and name it after the ranks that it is for.

    Args:
        group: The group; one of other parameters is passed on.
        numels: Elements of each parameter of experts.
        share: One rank has so many times fewer of each.
        before: Expert-parallel ranks of the source.
        after: Those of the target.
        most: Elements that a group has at most on a rank.
    """
    if not _has_experts(group, numels):
        yield group
        return
    settings = dict(group.settings)
    if settings.get(_NAME) == f"ep_size_{before}":
        settings[_NAME] = f"ep_size_{after}"
    parts = _split(group.names, numels, share, most)
    # What stood between the trained ones is in no part in particular.
    listed = group.listed if len(parts) == 1 else None
    for names in parts:
        yield replace(group, names=names, settings=settings, listed=listed)


def _joined(first: ParameterGroup, second: ParameterGroup) -> ParameterGroup:
    listed = None
    if first.listed is not None and second.listed is not None:
        listed = (*first.listed, *second.listed)
    return replace(first, names=(*first.names, *second.names), listed=listed)


def _has_experts(group: ParameterGroup, numels: Mapping[str, int]) -> bool:
    return group.settings.get(_IS_EXPERTS) is True and all(name in numels for name in group.names)


def _is_split(
    first: ParameterGroup,
    second: ParameterGroup,
    numels: Mapping[str, int],
    ranks: int,
    most: int,
) -> bool:
    """Whether two neighbouring groups are parts of one, by the place of the bound."""
    if not (_has_experts(first, numels) and _has_experts(second, numels)):
        return False
    if dict(first.settings) != dict(second.settings):
        return False
    *_, last = _split((*first.names, *second.names[:1]), numels, ranks, most)
    return last == second.names[:1]


def _split(
    names: Sequence[str], numels: Mapping[str, int], ranks: int, most: int
) -> list[tuple[str, ...]]:
    found: list[list[str]] = [[]]
    size = 0
    for name in names:
        numel = numels[name] // ranks
        if size + numel > most and found[-1]:
            found.append([])
            size = 0
        found[-1].append(name)
        size += numel
    return [tuple(members) for members in found]
