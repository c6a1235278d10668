"""Which parameter a number of the optimizer is: proved, or not said at all.

Optimizers number their parameters in the order in which a training script listed them, and a
checkpoint without ZeRO stores the numbers without the list. Every rule of thumb has scripts that
break it (sets, sorted names, a learning rate for each layer), and a permutation among parameters of
one shape would look like a checkpoint. So a number is matched by what identifies a parameter, its
*token*: the shape, and, where there are master weights, what they round to in the weights' dtype.

Parameters with the same token are told apart by their order in the model, and only where all of
them are in one group, none is left over, and nothing in any group is out of order. Muon has an
order of its own: it sorts by shape, and leaves what is of one shape in the order of the model.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

__all__ = ["Candidate", "Matched", "Slot", "Unmatched", "match"]

_MOST_NAMED: Final = 3


class Candidate(Frozen):
    """A parameter of the model.

    Attributes:
        name: Its name.
        token: What identifies it.
        is_owned: Whether the optimizer must have it. Wrappers leave out what has no element.
        shape: Its shape.
    """

    name: str
    token: Hashable
    is_owned: bool = True
    shape: tuple[int, ...] = ()


class Slot(Frozen):
    """A number of the optimizer.

    Attributes:
        label: What it is called in errors.
        tokens: What it may be the token of; None where it keeps nothing that tells.
        shape: The shape of its parameter, where that is known.
    """

    label: str
    tokens: frozenset[Hashable] | None
    shape: tuple[int, ...] | None = None


class Matched(Frozen):
    """The names of all numbers.

    Attributes:
        names: For each group the name of each slot; None where a slot keeps nothing.
        by_order: Names that only the order of the model tells apart from others.
    """

    names: tuple[tuple[str | None, ...], ...]
    by_order: frozenset[str]


class Unmatched(Frozen):
    """Why numbers cannot be matched."""

    reason: str


_Place: TypeAlias = tuple[int, int]


def match(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Slot]],
    names: Sequence[Sequence[str] | None],
    sorted_groups: Collection[int] = (),
) -> Matched | Unmatched:
    """Give the numbers of an optimizer their parameters.

    Args:
        candidates: Parameters in the order of the model, each once.
        groups: What is numbered, group by group.
        names: For each group the names that the optimizer was told, or None. They may name more
            than the group has, in its order.
        sorted_groups: Numbers of the groups whose optimizer sorts them by shape, the largest first.

    Returns:
        The match, or the reason why there is none. Never a guess.

    Cost:
        O(parameters).

    Examples:
        >>> model = [Candidate("a", (2, 2)), Candidate("bias", (2,)), Candidate("b", (2, 2))]
        >>> match(model, [[Slot("0", frozenset({(2, 2)})), Slot("1", frozenset({(2, 2)}))],
        ...               [Slot("2", frozenset({(2,)}))]], [None, None]).names
        (('a', 'b'), ('bias',))
        >>> match(model, [[Slot("0", frozenset({(2, 2)}))], [Slot("1", frozenset({(2, 2)}))]],
        ...       [None, None]).reason
        '0 and 1 are in different groups, and nothing tells which is which of a and b'
    """
    known = {candidate.name for candidate in candidates}
    if all(told is not None and known.issuperset(told) for told in names):
        return _match_told(candidates, groups, [tuple(told or ()) for told in names])
    owned = [candidate for candidate in candidates if candidate.is_owned]
    if len(groups) == 1 and len(groups[0]) == len(owned) and _fits(owned, groups[0]):
        return Matched((tuple(candidate.name for candidate in owned),), _ambiguous(owned))
    return _match_tokens(owned, groups, sorted_groups)


def _match_told(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Slot]],
    told: Sequence[tuple[str, ...]],
) -> Matched | Unmatched:
    """Use the names; where some of a group are frozen, find out which."""
    by_name = {candidate.name: candidate for candidate in candidates}
    listed = [name for names in told for name in names]
    if len({*listed}) < len(listed):
        return Unmatched("param_names has a parameter in two groups")
    found: list[tuple[str | None, ...]] = []
    by_order: set[str] = set()
    for slots, names in zip(groups, told, strict=True):
        own = [by_name[name] for name in names]
        kept = own if len(slots) == len(own) else [c for c in own if c.is_owned]
        if len(slots) != len(kept):
            part = _match_tokens(kept, [slots])
            if isinstance(part, Unmatched):
                return part
            found.extend(part.names)
            by_order |= part.by_order
        elif not _fits(kept, slots):
            return Unmatched(f"param_names says that {_first_misfit(kept, slots)}")
        else:
            found.append(tuple(candidate.name for candidate in kept))
    return Matched(tuple(found), frozenset(by_order))


def _match_tokens(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Slot]],
    sorted_groups: Collection[int] = (),
) -> Matched | Unmatched:
    members: dict[Hashable, list[int]] = defaultdict(list)
    for position, candidate in enumerate(candidates):
        members[candidate.token].append(position)
    slots: dict[Hashable, list[_Place]] = defaultdict(list)
    for number, group in enumerate(groups):
        for index, slot in enumerate(group):
            fitting = [token for token in slot.tokens or () if token in members]
            if slot.tokens is not None and len(fitting) != 1:
                return Unmatched(f"{slot.label} fits {'several' if fitting else 'no'} parameters")
            if fitting:
                slots[fitting[0]].append((number, index))
    positions: dict[_Place, int] = {}
    for token, places in slots.items():
        problem = _problem(candidates, groups, members[token], places)
        if problem is not None:
            return problem
        positions.update(zip(places, members[token], strict=True))
    found = tuple(
        tuple(
            candidates[positions[number, index]].name if (number, index) in positions else None
            for index in range(len(group))
        )
        for number, group in enumerate(groups)
    )
    by_order = _ambiguous([candidates[position] for position in positions.values()])
    for number, group in enumerate(groups if by_order else ()):
        own = [positions[number, i] for i in range(len(group)) if (number, i) in positions]
        if not _is_ordered(candidates, own, is_by_size=number in sorted_groups):
            names = [own.name for own in candidates if own.name in by_order]
            return Unmatched(
                f"group {number} is not in the order of the model, and nothing else tells "
                f"{_listed(names)} apart"
            )
    return Matched(found, by_order)


def _is_ordered(candidates: Sequence[Candidate], own: list[int], *, is_by_size: bool) -> bool:
    """Whether a group is in the order of the model, or in the one that its optimizer makes."""
    in_order = sorted(own)
    by_size = sorted(in_order, key=lambda position: candidates[position].shape, reverse=True)
    return own == in_order or (is_by_size and own == by_size)


def _problem(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Slot]],
    members: Sequence[int],
    places: Sequence[_Place],
) -> Unmatched | None:
    """Why the slots with one token are not its parameters, in their order."""
    labels = [groups[number][index].label for number, index in places]
    names = [candidates[position].name for position in members]
    if len(members) != len(places):
        return Unmatched(
            f"{_listed(labels)} fit{'s' if len(labels) == 1 else ''} {len(names)} parameters: "
            f"{_listed(names)}"
        )
    if len(members) > 1 and len({number for number, _ in places}) > 1:
        return Unmatched(
            f"{_listed(labels)} are in different groups, and nothing tells which is which of "
            f"{_listed(names)}"
        )
    return None


def _fits(candidates: Sequence[Candidate], slots: Sequence[Slot]) -> bool:
    return _first_misfit(candidates, slots) is None


def _first_misfit(candidates: Sequence[Candidate], slots: Sequence[Slot]) -> str | None:
    for candidate, slot in zip(candidates, slots, strict=True):
        if slot.tokens is not None and candidate.token not in slot.tokens:
            return f"{slot.label} is {candidate.name!r}, which it does not fit"
    return None


def _ambiguous(candidates: Sequence[Candidate]) -> frozenset[str]:
    """Names that share their token with another one."""
    by_token: dict[Hashable, list[str]] = defaultdict(list)
    for candidate in candidates:
        by_token[candidate.token].append(candidate.name)
    return frozenset(name for names in by_token.values() if len(names) > 1 for name in names)


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        shown.append(f"{len(names) - _MOST_NAMED} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
