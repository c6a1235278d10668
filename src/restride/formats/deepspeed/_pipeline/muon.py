"""The order of Muon's groups on the stages of a pipeline.

Muon sorts what a stage gives it by the shapes of the shards, the largest first, and leaves what is
of one shape in the order of the module (deepspeed 0.19.8 `runtime/zero/muon/original_muon.py`). A
group of another stage has other parameters, so that every stage is sorted by itself.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.errors import UnsupportedError
from restride.formats.deepspeed._momentum import trains_by_muon
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.training import ParameterGroup

__all__ = ["Cuts", "is_sorted_by_muon", "kept_by_muon", "sorted_by_muon"]


class Cuts(Frozen):
    """How tensor-parallel ranks cut each parameter.

    Attributes:
        source: Those of the source.
        target: Those of the target.
    """

    source: Mapping[str, Layout]
    target: Mapping[str, Layout]


def kept_by_muon(
    group: ParameterGroup, given: Sequence[str], cuts: Cuts, where: str
) -> ParameterGroup:
    """A group of a stage that stays, on other tensor-parallel ranks.

    Args:
        group: As the stage of the source has it.
        given: Its names in the order of the module.
        cuts: How ranks cut each parameter.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: The order that the optimizer was given them in is not known.
    """
    is_same = all(cuts.source[name] == cuts.target[name] for name in group.names)
    if not trains_by_muon(group) or is_same:
        return group
    if not is_sorted_by_muon(group.names, given, cuts.source):
        raise UnsupportedError(
            f"the parameter group of {group.names[0]!r} is updated by Muon, which sorts by size, "
            "and was given in another order than the module's: in which order ranks of other "
            "shards have it is not known",
            where=where,
            remedy="choose as many tensor-parallel ranks as the source has",
        )
    return sorted_by_muon(group, given, cuts.target, where)


def is_sorted_by_muon(
    names: Sequence[str], given: Sequence[str], layouts: Mapping[str, Layout]
) -> bool:
    """Whether Muon has the names of a group in this order if it was given them in that one.

    Args:
        names: As a stage of the source has them.
        given: In the order of its module.
        layouts: How the tensor-parallel ranks of the source cut each of them.
    """
    ranks = range(layouts[names[0]].rank_count if names else 0)
    return all(
        _held(_sorted(given, layouts, rank), layouts, rank) == _held(names, layouts, rank)
        for rank in ranks
    )


def sorted_by_muon(
    group: ParameterGroup, given: Sequence[str], layouts: Mapping[str, Layout], where: str
) -> ParameterGroup:
    """A group of a stage as its optimizer has it: sorted where that is Muon.

    Args:
        group: The group.
        given: Its names in the order of the module.
        layouts: How the tensor-parallel ranks of the target cut each parameter.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: The ranks would have different orders.
    """
    if not group.names or not trains_by_muon(group):
        return group
    ranks = range(layouts[group.names[0]].rank_count)
    found = {tuple(_sorted(given, layouts, rank)) for rank in ranks}
    if len(found) > 1:
        raise UnsupportedError(
            f"the parameter group of {group.names[0]!r} is updated by Muon, which sorts by size, "
            f"and its shards are of different sizes on the {len(ranks)} tensor-parallel ranks: "
            "they would have different orders",
            where=where,
            remedy="choose ranks that divide the parameters evenly",
        )
    names = found.pop()
    listed = names if group.listed and {*group.listed} == {*names} else group.listed
    return replace(group, names=names, listed=listed)


def _held(names: Sequence[str], layouts: Mapping[str, Layout], rank: int) -> list[str]:
    """Names of what a rank has an element of."""
    return [name for name in names if prod(layouts[name].shard_shape(rank))]


def _sorted(names: Sequence[str], layouts: Mapping[str, Layout], rank: int) -> list[str]:
    return sorted(names, key=lambda name: layouts[name].shard_shape(rank), reverse=True)
