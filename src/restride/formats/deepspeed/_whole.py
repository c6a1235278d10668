"""ZeRO-0: the optimizer's states of every parameter, from inside the model files.

Each tensor-parallel rank saves the states of its own shards, whole; with experts, each
expert-parallel rank does so in a file beside (`_whole_experts`). What is numbered in a file gets
its name in `_numbering`, for each rank by itself, and the ranks have to agree. Where that cannot be
proved the states are left out, with an error among the findings that says why; the weights, which
have names, are there in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._numbering import Candidate, Slot, Unmatched, match
from restride.formats.deepspeed._whole_experts import open_optimizers
from restride.formats.deepspeed._whole_file import read_whole_file, sort_states
from restride.formats.deepspeed._whole_flat import find_places, view_of
from restride.formats.deepspeed._witness import Witness
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._numbering import Matched
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._whole_experts import ExpertRanks
    from restride.formats.deepspeed._whole_file import Numbered, WholeFile

__all__ = ["Owned", "Whole", "WholeRank", "read_whole"]

_CASTABLE: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_MOST_NAMED: Final = 3
_TIED: Final = (
    "the tied layers of a pipeline have the first numbers of their stage, and nothing says which "
    "layers are tied"
)


@dataclass(frozen=True, slots=True)
class Owned:
    """What the optimizer of one rank keeps of one parameter.

    Attributes:
        arrays: By state; ``fp32`` are the master weights.
        scalars: Tensors without a dimension, such as the step.
        others: Everything else.
    """

    arrays: Mapping[str, StoredTensor]
    scalars: Mapping[str, StoredTensor]
    others: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class WholeRank:
    """The optimizer's state of one tensor-parallel or expert-parallel rank.

    Attributes:
        model: The model file.
        file: What it says of the optimizer.
        owned: By parameter.
        members: Trained parameters of each group, in its order.
        idle: Parameters that have no state, where others have: frozen ones.
        listed: The name of every number, group by group; None where nothing tells, and nothing
            has to.
    """

    model: ModelFile
    file: WholeFile
    owned: Mapping[str, Owned]
    members: tuple[tuple[str, ...], ...]
    idle: frozenset[str]
    listed: tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """The optimizer's states of a ZeRO-0 checkpoint.

    Attributes:
        ranks: One for each rank of `mesh`.
        mesh: The tensor-parallel ranks, or the expert-parallel ones.
        members: Trained parameters of each group over all ranks, in the optimizer's order.
        aliases: Second names of tied weights.
        problem: Why the states have no names and are left out; None where they have.
    """

    ranks: tuple[WholeRank, ...]
    mesh: Mesh
    members: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    problem: str | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """Parameters that the optimizer trains."""
        return tuple(name for names in self.members for name in names)

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that it was given, and has no state of on any rank."""
        idle = frozenset[str]().union(*(rank.idle for rank in self.ranks))
        return idle - set(self.trained)


@dataclass(slots=True)
class _Found:
    """What is known of one rank so far."""

    owned: dict[str, Owned] = field(default_factory=dict)
    members: list[tuple[str, ...]] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)
    listed: list[tuple[str | None, ...]] = field(default_factory=list)
    by_order: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter as a model has it: one tensor, or the experts of a stack."""

    parts: tuple[StoredTensor, ...]
    is_stack: bool = False

    @property
    def dtype(self) -> DType:
        return self.parts[0].storage.dtype

    @property
    def shape(self) -> Shape:
        own = self.parts[0].shape
        return (len(self.parts), *own) if self.is_stack else own

    def token(self, witness: Witness) -> Hashable:
        return witness.stacked_token(self.parts) if self.is_stack else witness.token(self.parts[0])


@dataclass(frozen=True, slots=True)
class _Source:
    """What one rank saved: its weights by name, and its optimizer."""

    model: ModelFile
    file: WholeFile
    weights: Mapping[str, _Weight]


def read_whole(run: Run, experts: ExpertRanks | None = None) -> Whole | None:
    """Read the optimizer's states that a run without ZeRO saved.

    Args:
        run: The files. Findings are added to it.
        experts: What is known of its experts.

    Returns:
        The states; None where no file holds any.

    Raises:
        FormatError: They are none, or a part of them has another type than it must have.
        CorruptError: Files contradict each other.
        ExecutionError: The system cannot read a file.

    Cost:
        Some thousand elements of each master weight and each weight are read.
    """
    aliases = _aliases(run.models)
    mesh, sources = _sources(run, experts, aliases)
    if not sources:
        return None
    if run.is_of_pipeline:
        return _unmatched(run, mesh, sources, {}, _TIED)
    ranks: list[WholeRank] = []
    by_order: set[str] = set()
    with FilePool() as pool:
        witness = Witness(pool)
        for source in sources:
            found = _assign(source, experts, witness)
            if isinstance(found, Unmatched):
                problem = f"{source.file.where}: {found.reason}"
                return _unmatched(run, mesh, sources, aliases, problem)
            by_order |= found.by_order
            ranks.append(
                WholeRank(
                    source.model,
                    source.file,
                    found.owned,
                    tuple(found.members),
                    frozenset(found.idle),
                    tuple(found.listed),
                )
            )
    whole = Whole(tuple(ranks), mesh, _joined(ranks), aliases)
    run.findings.extend(_told_by_order(whole, by_order))
    run.findings.extend(_uncut(whole))
    return whole


def _sources(
    run: Run, experts: ExpertRanks | None, aliases: Mapping[str, str]
) -> tuple[Mesh, list[_Source]]:
    """What each rank saved; nothing where that was no optimizer."""
    if experts is not None and run.folder.expert_optimizers:
        mesh = Mesh((("ep", experts.count),))
        model = run.models[0]
        states = open_optimizers(run, experts) or ()
        return mesh, [
            _source(model, read_whole_file(state), aliases, experts.stacks(rank))
            for rank, state in enumerate(states)
        ]
    mesh = Mesh((("tp", run.tp_size),))
    if all(model.optimizer is None for model in run.models):
        return mesh, []
    first = run.models[0]
    return mesh, [
        _source(model, _read(model, model.optimizer, first), aliases, {}) for model in run.models
    ]


def _source(
    model: ModelFile,
    file: WholeFile,
    aliases: Mapping[str, str],
    stacks: Mapping[str, tuple[StoredTensor, ...]],
) -> _Source:
    weights = {
        name: _Weight((tensor,))
        for name, tensor in model.weights.items()
        if name not in model.buffer_names and name not in aliases
    }
    weights |= {name: _Weight(parts, is_stack=True) for name, parts in stacks.items()}
    if file.kind != "bare":
        weights = {name: own for name, own in weights.items() if own.dtype.name in _CASTABLE}
    return _Source(model, file, weights)


def _read(model: ModelFile, state: Field | None, first: ModelFile) -> WholeFile:
    if state is None or first.optimizer is None:
        holder, other = (first, model) if state is None else (model, first)
        raise CorruptError(
            f"has the optimizer's state in it, {other.name} has not",
            where=holder.name,
            remedy="put only the files of one save into the folder",
        )
    return read_whole_file(state)


def _aliases(models: Sequence[ModelFile]) -> dict[str, str]:
    """Names that are stored as views of the same bytes in the files of all ranks."""
    first: dict[tuple[StoredTensor | None, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in models[0].weights.items():
        views = tuple(model.weights.get(name) for model in models)
        if name in models[0].buffer_names or None in views or not prod(tensor.shape):
            continue
        if first.setdefault(views, name) != name:
            aliases[name] = first[views]
    return aliases


def _assign(source: _Source, experts: ExpertRanks | None, witness: Witness) -> _Found | Unmatched:
    file = source.file
    if file.kind == "flat":
        single = {name: own.parts[0] for name, own in source.weights.items() if not own.is_stack}
        return _assign_flat(single, file, witness)
    matched = _match(source, experts, witness)
    if isinstance(matched, Unmatched):
        return matched
    found = _Found(by_order=matched.by_order)
    is_stepped = any(entry.state is not None for group in file.groups for entry in group)
    for group, names in zip(file.groups, matched.names, strict=True):
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


def _match(source: _Source, experts: ExpertRanks | None, witness: Witness) -> Matched | Unmatched:
    """Match numbers and names, in the order of the model.

    AutoEP gives the parameters of the layers that it made to the optimizer after all others, or in
    the order of the model, as the script has it.
    """
    file, is_bare = source.file, source.file.kind == "bare"
    candidates = {
        name: Candidate(
            name,
            own.shape if is_bare else own.token(witness),
            is_owned=is_bare or prod(own.shape) > 0,
        )
        for name, own in source.weights.items()
    }
    dtypes = {own.dtype for own in source.weights.values()}
    groups = [[_slot(entry, dtypes, witness) for entry in group] for group in file.groups]
    made: dict[str, str] = {}
    if experts is not None:
        made = experts.routers(candidates)
    known = [own for name, own in candidates.items() if name not in made]
    found = match(known, groups, file.names)
    if isinstance(found, Unmatched) and made:
        routers = set(made.values())
        known.sort(key=lambda candidate: candidate.name in routers)
        return match(known, groups, file.names)
    return found


def _slot(entry: Numbered, dtypes: Collection[DType], witness: Witness) -> Slot:
    tokens: frozenset[Hashable] | None = None
    if entry.master is not None:
        tokens = frozenset(witness.token(entry.master, dtype) for dtype in dtypes)
    elif entry.shape is not None:
        tokens = frozenset({entry.shape})
    said = "" if entry.shape is None else f" of shape {entry.shape}"
    return Slot(f"number {entry.number}{said}", tokens)


def _assign_flat(
    weights: Mapping[str, StoredTensor], file: WholeFile, witness: Witness
) -> _Found | Unmatched:
    places = find_places(weights, file.groups, witness)
    if isinstance(places, Unmatched):
        return places
    found = _Found()
    for group, own in zip(file.groups, places, strict=True):
        for entry in group:
            arrays, scalars, others = sort_states(entry, entry.shape or ())
            for place in own:
                views = {key: view_of(tensor, place) for key, tensor in arrays.items()}
                found.owned[place.name] = Owned(views, scalars, others)
        found.members.append(tuple(place.name for place in own))
        found.listed.append(found.members[-1])
    return found


def _owned(entry: Numbered, weight: _Weight) -> Owned:
    """States of one parameter; one that is trained in fp32 is its own master copy."""
    arrays, scalars, others = sort_states(entry, weight.shape)
    if entry.master is None and weight.dtype.name == "float32" and not weight.is_stack:
        arrays = {"fp32": weight.parts[0], **arrays}
    return Owned(arrays, scalars, others)


def _joined(ranks: Sequence[WholeRank]) -> tuple[tuple[str, ...], ...]:
    """Members over all ranks: one does not train what it holds no element of."""
    first = ranks[0]
    groups: dict[str, int] = {}
    merged: list[list[str]] = [[] for _ in first.members]
    for rank in ranks:
        if len(rank.members) != len(merged):
            raise CorruptError(
                f"has {len(rank.members)} parameter groups, {first.file.where} has {len(merged)}",
                where=rank.file.where,
            )
        for number, names in enumerate(rank.members):
            for name in names:
                if groups.setdefault(name, number) != number:
                    raise CorruptError(
                        f"has {name!r} in group {number}, another rank in group {groups[name]}",
                        where=rank.file.where,
                        remedy="put only the files of one save into the folder",
                    )
            merged[number] = _merged(merged[number], names)
    return tuple(map(tuple, merged))


def _merged(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Put names that are not known behind their predecessors."""
    there = set(known)
    behind: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in names:
        if name in there:
            last = name
        else:
            behind.setdefault(last, []).append(name)
    merged = behind.get(None, [])
    for name in known:
        merged += [name, *behind.get(name, ())]
    return merged


def _unmatched(
    run: Run,
    mesh: Mesh,
    sources: Sequence[_Source],
    aliases: Mapping[str, str],
    problem: str,
) -> Whole:
    message = (
        f"the optimizer's states are numbered and cannot be matched to the parameters: {problem}; "
        "they are left out (an optimizer made of named_parameters(), or ZeRO-1, saves names)"
    )
    files = [source.file for source in sources]
    details = {"part": "optimizer"}
    run.findings.append(Finding("error", "unmatched-states", message, files[0].where, details))
    ranks = [
        WholeRank(
            source.model,
            source.file,
            {},
            ((),) * len(source.file.groups),
            frozenset(),
            tuple((None,) * len(group) for group in source.file.groups),
        )
        for source in sources
    ]
    return Whole(tuple(ranks), mesh, ((),) * len(files[0].groups), aliases, problem)


def _told_by_order(whole: Whole, by_order: Collection[str]) -> Iterator[Finding]:
    """Say which parameters only their order identifies."""
    first = whole.ranks[0].file
    names = [name for name in whole.trained if name in by_order]
    if not names or all(told is not None for told in first.names):
        return
    trained = len(whole.trained)
    shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    means = "shape" if first.kind == "bare" else "rounded master weights"
    yield Finding(
        "note",
        "numbered-states",
        f"the optimizer's states are numbered; {len(names)} of {trained} parameters share their "
        f"{means} with another one and are told apart by their order in the model alone ({shown})",
        first.where,
        {"names": names},
    )


def _uncut(whole: Whole) -> Iterator[Finding]:
    """Tell of states that have another shape than their parameter: they are carried as values."""
    seen: set[str] = set()
    for rank in whole.ranks:
        for name, owned in rank.owned.items():
            for key, entry in owned.others.items():
                if isinstance(entry.value, StoredTensor) and key not in seen:
                    seen.add(key)
                    yield Finding(
                        "warning",
                        "uncut-state",
                        f"{entry.where} has shape {entry.value.shape}, which is not that of "
                        f"{name!r}: such states are carried as values",
                        rank.model.name,
                    )
