"""The states of one rank without ZeRO, under the names of the parameters that they belong to."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec import Struct, field

from restride.formats.deepspeed._experts.group_order import said_size
from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.formats.deepspeed._pipeline.flat import parts_of
from restride.formats.deepspeed._whole.file import sort_states
from restride.formats.deepspeed._whole.flat import Place, find_places, view_of
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Hashable, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._pipeline.flat import FlatCut
    from restride.formats.deepspeed._whole.experts import ExpertRanks
    from restride.formats.deepspeed._whole.file import Numbered, WholeFile
    from restride.formats.deepspeed._witness import Witness

__all__ = ["Found", "Owned", "Source", "Weight", "assign"]


class Owned(Frozen):
    """What the optimizer of one rank keeps of one parameter.

    Attributes:
        arrays: By state; ``fp32`` are the master weights.
        scalars: Tensors without a dimension, such as the step.
        others: Everything else.
    """

    arrays: Mapping[str, StoredTensor]
    scalars: Mapping[str, StoredTensor]
    others: Mapping[str, Field]


class Weight(Frozen):
    """A parameter as a model has it: one tensor, or the experts of a stack.

    Attributes:
        parts: The tensor, or that of each expert.
        is_stack: Whether it is a stack.
        is_elsewhere: Whether only another stage of a pipeline stores it: here it is not.
    """

    parts: tuple[StoredTensor, ...]
    is_stack: bool = False
    is_elsewhere: bool = False

    @property
    def dtype(self) -> DType:
        """Type of the elements."""
        return self.parts[0].storage.dtype

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        own = self.parts[0].shape
        return (len(self.parts), *own) if self.is_stack else own

    def token(self, witness: Witness) -> Hashable:
        """What identifies the parameter by its elements."""
        return witness.stacked_token(self.parts) if self.is_stack else witness.token(self.parts[0])


class Source(Frozen):
    """What one rank saved.

    Attributes:
        model: The model file.
        file: The optimizer.
        weights: What the optimizer may own, by name, in the order of the model.
        cuts: Where parameters begin in each flat buffer of a stage of a pipeline.
        is_stepped: Whether another stage of it has taken a step, and so this one has.
    """

    model: ModelFile
    file: WholeFile
    weights: Mapping[str, Weight]
    cuts: tuple[FlatCut, ...] = ()
    is_stepped: bool = False


class Found(Struct):
    """What one rank has, under its names.

    Attributes:
        owned: By parameter.
        members: Trained parameters of each group, in its order.
        idle: Parameters that have no state, where others have: frozen ones.
        listed: The name of every number, group by group.
        by_order: Names that only their order tells apart from others.
    """

    owned: dict[str, Owned] = field(default_factory=dict)
    members: list[tuple[str, ...]] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)
    listed: list[tuple[str | None, ...]] = field(default_factory=list)
    by_order: frozenset[str] = frozenset()


def assign(source: Source, experts: ExpertRanks | None, witness: Witness) -> Found | Unmatched:
    """Give what one rank's optimizer keeps the names of its parameters.

    Args:
        source: What the rank saved.
        experts: What is known of the experts of the run.
        witness: Reads samples of weights and master weights.

    Returns:
        What it keeps by name, or the reason why the names are not known.
    """
    file = source.file
    if file.kind == "flat" and source.cuts:
        return _assign_cut(source, witness)
    if file.kind == "flat":
        if experts is not None and experts.parameters:
            return _assign_copied(source, experts, witness)
        single = {name: own.parts[0] for name, own in source.weights.items()}
        places = find_places(single, file.groups, witness)
        return places if isinstance(places, Unmatched) else _placed(file, places)
    matched = _match(source, experts, witness)
    if isinstance(matched, Unmatched):
        return matched
    found = Found(by_order=matched.by_order)
    is_stepped = source.is_stepped or file.is_stepped
    for group, names in zip(file.groups, _completed(matched.names, source), strict=True):
        members: list[str] = []
        for entry, name in zip(group, names, strict=True):
            if name is None:
                continue
            weight = source.weights[name]
            if prod(weight.shape) and (entry.state is not None or not is_stepped):
                members.append(name)
                found.owned[name] = _owned(entry, weight)
            else:
                found.idle.add(name)
        found.members.append(tuple(members))
        found.listed.append(names)
    return found


def _completed(
    names: Sequence[tuple[str | None, ...]], source: Source
) -> Sequence[tuple[str | None, ...]]:
    """Name what has a number and no state, where it is all that has no other number.

    It is of one group, and that is in the order of the model with it.
    """
    order = {name: place for place, name in enumerate(source.weights)}
    left = iter([name for name in order if all(name not in own for own in names)])
    lacking = [number for number, own in enumerate(names) if None in own]
    if len(lacking) != 1 or names[lacking[0]].count(None) != len(order) - sum(
        name is not None for own in names for name in own
    ):
        return names
    found = list(names)
    whole = [next(left) if name is None else name for name in names[lacking[0]]]
    if whole == sorted(whole, key=order.__getitem__):
        found[lacking[0]] = tuple(whole)
    return found


def _match(source: Source, experts: ExpertRanks | None, witness: Witness) -> Matched | Unmatched:
    """Match numbers and names: by names and shapes where those tell, else by what the weights are.

    Whoever told the optimizer the names is believed even where weights are no copies of their
    masters, such as averages that were put into the model before it was saved.
    """
    is_bare = source.file.kind == "bare"
    if is_bare or all(source.file.names):
        found = _match_by(source, experts, None)
        if is_bare or (isinstance(found, Matched) and not found.by_order):
            return found
    found = _match_by(source, experts, witness)
    if isinstance(found, Unmatched) and " fits no " in found.reason:
        return Unmatched(
            f"{found.reason}: its master weight rounds to none of the weights, which were changed "
            "after the last step, or saved before the first"
        )
    return found


def _match_by(
    source: Source, experts: ExpertRanks | None, witness: Witness | None
) -> Matched | Unmatched:
    """Match by shapes, or with a witness by samples of the weights.

    AutoEP gives the parameters of the layers that it made to the optimizer after all others, or in
    the order of the model, as the script has it.
    """
    is_bare = source.file.kind == "bare"
    candidates = {
        name: Candidate(
            name,
            own.token(witness) if witness else own.shape,
            is_owned=is_bare or prod(own.shape) > 0,
            shape=own.shape,
        )
        for name, own in source.weights.items()
    }
    dtypes = {own.dtype for own in source.weights.values()}
    groups = [[_slot(entry, dtypes, witness) for entry in own] for own in source.file.groups]
    known = [*candidates.values()]
    if experts is not None and experts.are_single:
        return _match_apart(source, known, groups, experts)
    made = {} if experts is None else experts.routers(candidates)
    known = [own for name, own in candidates.items() if name not in made]
    by_muon = [n for n, own in enumerate(source.file.settings) if _is_of_muon(own)]
    found = match(known, groups, source.file.names, by_muon)
    if isinstance(found, Unmatched) and made:
        routers = set(made.values())
        known.sort(key=lambda candidate: candidate.name in routers)
        return match(known, groups, source.file.names)
    return found


def _is_of_muon(settings: Field) -> bool:
    stored = settings.get("use_muon")
    return stored is not None and stored.value is True


def _match_apart(
    source: Source,
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Slot]],
    experts: ExpertRanks,
) -> Matched | Unmatched:
    """Match groups of single experts, and those of all other parameters: groups say what they are.

    An expert's bias may have the shape of a norm's, and no group has both.
    """
    kinds, own_kinds = _kinds(source.file.settings, experts)
    if not any(kinds):
        return match(candidates, groups, source.file.names)
    names: dict[int, tuple[str | None, ...]] = {}
    by_order: set[str] = set()
    for kind in dict.fromkeys([0, *kinds]):
        numbers = [n for n, own in enumerate(kinds) if own == kind]
        found = match(
            [own for own in candidates if own_kinds.get(own.name, 0) == kind],
            [groups[n] for n in numbers],
            [source.file.names[n] for n in numbers],
        )
        if isinstance(found, Unmatched):
            return found
        names |= dict(zip(numbers, found.names, strict=True))
        by_order |= found.by_order
    return Matched(tuple(names[n] for n in range(len(groups))), frozenset(by_order))


def _kinds(settings: Sequence[Field], experts: ExpertRanks) -> tuple[list[int], dict[str, int]]:
    """What each group has, and what each expert is: 0 are all others.

    Layers that are on different numbers of ranks have groups of their own; where all are on one,
    the number does not count.
    """
    sizes = [said_size(entry) for entry in settings]
    is_one = len({*sizes} - {None}) <= 1
    kinds = [
        (1 if is_one else size or 1) if _is_of_experts(entry) else 0
        for entry, size in zip(settings, sizes, strict=True)
    ]
    return kinds, {
        name: 1 if is_one else own.rank_count for name, own in experts.parameters.items()
    }


def _is_of_experts(settings: Field) -> bool:
    """Whether a parameter group is one of experts, as DeepSpeed marks them."""
    flag = settings.get("moe")
    return flag is not None and flag.value is True


def _slot(entry: Numbered, dtypes: Collection[DType], witness: Witness | None) -> Slot:
    tokens: frozenset[Hashable] | None = None
    if witness is not None and entry.master is not None:
        tokens = frozenset(witness.rounded_tokens(entry.master, dtypes))
    elif entry.shape is not None:
        tokens = frozenset({entry.shape})
    said = "" if entry.shape is None else f" of shape {entry.shape}"
    return Slot(f"number {entry.number}{said}", tokens)


def _assign_cut(source: Source, witness: Witness) -> Found | Unmatched:
    """Give the parts of flat buffers, of which it is known where they begin, their names."""
    dtypes = {own.dtype for own in source.weights.values()}
    parts = parts_of(source.file.groups, source.cuts)
    slots = [[_slot(entry, dtypes, witness) for entry in own] for own in parts]
    candidates = [
        Candidate(name, own.token(witness), is_owned=prod(own.shape) > 0, shape=own.shape)
        for name, own in source.weights.items()
    ]
    matched = match(candidates, slots, source.file.names)
    if isinstance(matched, Unmatched):
        return matched
    named = [
        [Place(name or "", *part) for name, part in zip(names, cut, strict=True)]
        for names, cut in zip(matched.names, source.cuts, strict=True)
    ]
    found = _placed(source.file, named)
    found.by_order = matched.by_order
    return found


def _assign_copied(source: Source, experts: ExpertRanks, witness: Witness) -> Found | Unmatched:
    """Find the parameters of flat groups where the weights are no views of them.

    A model with layers of experts is saved as copies. Where one group has all experts, and another
    one all other parameters, they stand there in the order of the model, if their values do.
    """
    made = experts.routers(source.weights)
    names = [
        name for name, own in source.weights.items() if name not in made and prod(own.shape) > 0
    ]
    routers = set(made.values())
    places = _find_in_order(source, names, experts.parameters, witness)
    if isinstance(places, Unmatched) and made:
        names.sort(key=routers.__contains__)
        places = _find_in_order(source, names, experts.parameters, witness)
    return places if isinstance(places, Unmatched) else _placed(source.file, places)


def _find_in_order(
    source: Source, names: Sequence[str], experts: Container[str], witness: Witness
) -> tuple[tuple[Place, ...], ...] | Unmatched:
    """Place the parameters of flat groups in one order, and hold them against the masters.

    Args:
        source: What the rank saved.
        names: Its parameters in that order.
        experts: Which of them are of experts.
        witness: Reads samples of weights and master weights.
    """
    kinds = [_is_of_experts(entry) for entry in source.file.settings]
    if len({*kinds}) < len(kinds):
        return Unmatched("several flat buffers of one kind have weights that are no views of them")
    found: list[tuple[Place, ...]] = []
    for kind, entries in zip(kinds, source.file.groups, strict=True):
        places: list[Place] = []
        start = 0
        for name in names:
            if len(kinds) == 1 or (name in experts) is kind:
                places.append(Place(name, start, source.weights[name].shape))
                start += prod(source.weights[name].shape)
        master = entries[0].master
        if master is None or master.shape != (start,):
            return Unmatched(
                f"the flat buffer of group {entries[0].group} has shape "
                f"{master.shape if master else None}, its {len(places)} parameters have {start} "
                "elements"
            )
        for place in places:
            weight = source.weights[place.name]
            if weight.token(witness) not in witness.rounded_tokens(
                view_of(master, place), [weight.dtype]
            ):
                return Unmatched(
                    f"{place.name!r} does not stand at element {place.start} of the flat buffer of "
                    f"group {entries[0].group}, where the order of the model has it"
                )
        found.append(tuple(places))
    return tuple(found)


def _placed(file: WholeFile, places: Sequence[Sequence[Place]]) -> Found:
    """What flat groups hold of the parameters that stand in them."""
    found = Found()
    for group, own in zip(file.groups, places, strict=True):
        for entry in group:
            arrays, scalars, others = sort_states(entry, entry.shape or ())
            for place in own:
                views = {key: view_of(tensor, place) for key, tensor in arrays.items()}
                found.owned[place.name] = Owned(views, scalars, others)
        found.members.append(tuple(place.name for place in own))
        found.listed.append(found.members[-1])
    return found


def _owned(entry: Numbered, weight: Weight) -> Owned:
    """States of one parameter; one that is trained in fp32 is its own master copy."""
    arrays, scalars, others = sort_states(entry, weight.shape)
    is_own = not (weight.is_stack or weight.is_elsewhere)
    if entry.master is None and weight.dtype.name == "float32" and is_own:
        arrays = {"fp32": weight.parts[0], **arrays}
    return Owned(arrays, scalars, others)
