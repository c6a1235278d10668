"""ZeRO-0: the optimizer's states of every parameter, from inside the model files.

Each tensor-parallel rank saves the states of its own shards, whole; with experts, each
expert-parallel rank does so in a file beside (`experts`). What is numbered in a file gets
its name in `_numbering`, for each rank by itself, and the ranks have to agree. Where that cannot be
proved the states are left out, with an error among the findings that says why; the weights, which
have names, are there in any case.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Finding
from restride.checkpoint.orders import merged_order
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.group_order import alike
from restride.formats.deepspeed._experts.native import expert_name, in_model_order
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._numbering import Unmatched
from restride.formats.deepspeed._whole.experts import open_optimizers
from restride.formats.deepspeed._whole.file import CASTABLE, read_whole_file
from restride.formats.deepspeed._whole.match import Source, Weight, assign
from restride.frozen import Frozen
from restride.storage.holders import has_tensor
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._pipeline.optimizers import StageNames
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._whole.experts import ExpertRanks
    from restride.formats.deepspeed._whole.file import WholeFile
    from restride.formats.deepspeed._whole.match import Owned

__all__ = ["Whole", "WholeRank", "read_whole"]

_MOST_NAMED: Final = 3


class WholeRank(Frozen):
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


class Whole(Frozen):
    """The optimizer's states of a ZeRO-0 checkpoint.

    Attributes:
        ranks: One for each rank of `mesh`.
        mesh: The tensor-parallel ranks, or the expert-parallel ones; where these fold the others,
            the first ranks of the run that have all of both.
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
    if run.names is not None and run.names.problem is not None:
        return _unmatched(run, mesh, sources, {}, run.names.problem)
    ranks: list[WholeRank] = []
    by_order: set[str] = set()
    from restride.formats.deepspeed._witness import Witness  # noqa: PLC0415 - imports NumPy

    with FilePool() as pool:
        witness = Witness(pool)
        for source in sources:
            found = assign(source, experts, witness)
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
    order = in_model_order(run.models[0].weights, experts.parameters if experts else ())
    whole = Whole(tuple(ranks), mesh, _joined(ranks, order), aliases)
    run.findings.extend(_told_by_order(whole, by_order))
    run.findings.extend(_uncut(whole))
    run.findings.extend(_lost(whole))
    return whole


def _sources(
    run: Run, experts: ExpertRanks | None, aliases: Mapping[str, str]
) -> tuple[Mesh, list[Source]]:
    """What each rank saved; nothing where that was no optimizer."""
    if experts is not None and run.folder.expert_optimizers:
        states = open_optimizers(run, experts) or {}
        files = alike([read_whole_file(state) for state in states.values()])
        return experts.mesh(run), [
            _source(run.models[tp], file, aliases, experts.held(ep, tp))
            for (ep, tp), file in zip(states, files, strict=True)
        ]
    mesh = Mesh((("tp", run.tp_size),))
    if all(model.optimizer is None for model in run.models):
        return mesh, []
    first = run.models[0]
    sources = [
        _source(model, _read(model, model.optimizer, first), aliases, {}) for model in run.models
    ]
    if run.names is not None and run.names.stages:
        sources = [_of_stage(run, run.names, tp, source) for tp, source in enumerate(sources)]
    return mesh, sources


def _of_stage(run: Run, names: StageNames, tp: int, source: Source) -> Source:
    """What a stage of a pipeline may own, in the order of its module.

    A tied module that it uses through a function is in the files of another stage.
    """
    elsewhere = {
        name: Weight((shards[tp],), is_elsewhere=True)
        for name, shards in run.elsewhere.items()
        if name not in source.model.buffer_names
    }
    known = {**source.weights, **elsewhere}
    order = dict.fromkeys([*names.stages[run.pipe], *known])
    ordered = {name: known[name] for name in order if name in known}
    cuts = names.cuts[run.pipe][tp] if names.cuts else ()
    return replace(source, weights=ordered, cuts=cuts, is_stepped=names.is_stepped)


def _source(
    model: ModelFile,
    file: WholeFile,
    aliases: Mapping[str, str],
    experts: Mapping[str, tuple[StoredTensor, ...]],
) -> Source:
    weights = {
        name: Weight((tensor,))
        for name, tensor in model.weights.items()
        if name not in model.buffer_names and name not in aliases
    }
    held = {
        name: Weight(parts, is_stack=expert_name(name) is None) for name, parts in experts.items()
    }
    weights = {name: (weights | held)[name] for name in in_model_order([*weights, *held], held)}
    if file.kind != "bare":
        weights = {name: own for name, own in weights.items() if own.dtype.name in CASTABLE}
    return Source(model, file, weights)


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


def _joined(ranks: Sequence[WholeRank], order: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Members over all ranks, in the order of the model: a rank trains only what it has."""
    first = ranks[0]
    groups: dict[str, int] = {}
    count = len(first.members)
    for rank in ranks:
        if len(rank.members) != count:
            raise CorruptError(
                f"has {len(rank.members)} parameter groups, {first.file.where} has {count}",
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
    return tuple(
        merged_order([rank.members[number] for rank in ranks], order) for number in range(count)
    )


def _unmatched(
    run: Run,
    mesh: Mesh,
    sources: Sequence[Source],
    aliases: Mapping[str, str],
    problem: str,
) -> Whole:
    message = (
        f"the optimizer's states are numbered and cannot be matched to the parameters: {problem}; "
        "they are left out (an optimizer made of named_parameters(), or ZeRO-1, saves names)"
    )
    files = [source.file for source in sources]
    details = {"part": "optimizer"}
    # The stages of a pipeline have one list of findings, and one reason where nothing is told.
    if all(finding.message != message for finding in run.findings):
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
                if key not in seen and has_tensor(entry.value):
                    seen.add(key)
                    yield Finding(
                        "warning",
                        "uncut-state",
                        f"{entry.where} is {shown(entry.value)}, and {name!r} has another shape: "
                        "such states are carried as values",
                        rank.model.name,
                    )


def _lost(whole: Whole) -> Iterator[Finding]:
    """Tell of parameters that lack a state which others of their group have."""
    for rank in whole.ranks:
        for names in rank.members:
            owned = {name: _states(rank.owned[name]) for name in names if name in rank.owned}
            for state in dict.fromkeys(state for states in owned.values() for state in states):
                # One that was never updated has none at all, which is right.
                lost = [name for name, states in owned.items() if states and state not in states]
                if lost:
                    other = next(name for name, states in owned.items() if state in states)
                    message = (
                        f"the optimizer has no {state} of {lost[0]!r}, which it has of {other!r} "
                        f"of the same group ({len(lost)} parameters lack it)"
                    )
                    where = f"{rank.file.where}: {message}"
                    yield Finding("warning", "missing-state", where, f"tensor {lost[0]!r}")


def _states(owned: Owned) -> tuple[str, ...]:
    """What the optimizer made of a parameter; a weight in fp32 is its own master copy."""
    return tuple(state for state in (*owned.arrays, *owned.scalars) if state != "fp32")
