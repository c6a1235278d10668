"""Which layers, tied modules and parameter groups each stage of a target has.

The stages of the source are kept where their number stays. For another number the layers are dealt
out anew, as the module of the engine that resumes does it: by a method that can be computed from
what the layers train, or as the user says. A module has its tied modules first, in the order of
their first use, and then its layers (deepspeed 0.19.8 `runtime/pipe/module.py`, `_build`); a script
that gives the optimizer its parameters in another order can keep its stages, and cannot change
them.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError
from restride.formats.deepspeed._momentum import trains_by_muon
from restride.formats.deepspeed._pipeline.groups import require_one_order
from restride.formats.deepspeed._pipeline.known_layers import TIED, KnownLayers, tied_prefix
from restride.formats.deepspeed._pipeline.muon import (
    Cuts,
    is_sorted_by_muon,
    kept_by_muon,
    sorted_by_muon,
)
from restride.formats.deepspeed._pipeline.partition_methods import balanced_starts, uniform_starts
from restride.frozen import Frozen
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup, Pipeline, PipelineLayer, Training
    from restride.formats.deepspeed.stage_cut import PartitionMethod, StageCut

__all__ = ["CutStages", "OptimizerForm", "TargetStage", "cut_stages", "require_known_ties"]

OptimizerForm: TypeAlias = Literal["bare", "wrapped", "zero"]
"""The class of the engine: the optimizer itself, a wrapper of it, or one of ZeRO."""

_MOST_SHOWN: Final = 16
# The method takes the square of the layers times the stages; no pipeline comes near.
_MOST_BALANCED: Final = 512
_LIGHT: Final = 2
_BY_HAND: Final = "give the first layer of each stage, as --pp-layers 0,3,6"
_Key = tuple[int, int, int]


class TargetStage(Frozen):
    """One stage of what is written.

    Attributes:
        number: Which one.
        source: The stage of the source whose ranks speak for its ranks.
        names: Trained parameters and buffers of its module.
        groups: Its parameter groups; none that is empty.
        layers: Its layers that have a file.
    """

    number: int
    source: int
    names: frozenset[str]
    groups: tuple[ParameterGroup, ...]
    layers: tuple[PipelineLayer, ...]


class CutStages(Frozen):
    """All stages, and what to tell of them."""

    stages: tuple[TargetStage, ...]
    findings: tuple[Finding, ...]


def cut_stages(
    training: Training,
    pipeline: Pipeline,
    cut: StageCut,
    count: int,
    numels: Callable[[str], Sequence[int]],
    cuts: Cuts,
    where: str,
    *,
    form: OptimizerForm,
) -> CutStages:
    """Deal the layers of a pipeline out to the stages of a target.

    Args:
        training: The source.
        pipeline: Its layers and stages.
        cut: What the user says.
        count: Stages of the target.
        numels: Elements of a parameter on each tensor-parallel rank of the target; nothing of what
            is no parameter.
        cuts: How tensor-parallel ranks cut each parameter.
        where: The checkpoint, for errors.
        form: Which class loads what is written. The optimizer itself numbers all that it is given:
            a group of frozen parameters and of those without elements is not empty then.

    Raises:
        UnsupportedError: Nothing tells what a stage has, or what is said does not fit.
    """
    if count == len(pipeline.stages) and not cut.is_said:
        KnownLayers(pipeline, cut.tied, where)  # what is told has to be so all the same
        return _kept(pipeline, cuts, where)
    require_known_ties(pipeline, where)
    return _Cutter(training, pipeline, cut, count, numels, cuts, where, form=form).run()


def require_known_ties(pipeline: Pipeline, where: str) -> None:
    """Refuse names that may be others, where an engine looks for names, or modules are dealt out.

    Raises:
        UnsupportedError: The first module of a stage may be tied.
    """
    if not pipeline.are_ties_known:
        last = max((layer.number for layer in pipeline.layers), default=0)
        raise UnsupportedError(
            "an optimizer without ZeRO has no names, and nothing says whether a layer is tied, "
            "which would be called otherwise and be on all stages that use it",
            where=where,
            remedy="say --pp-tied none if none is, or name all layers that use a tied module, as "
            f"--pp-tied embed=0,{last + 1}",
        )


def _kept(pipeline: Pipeline, cuts: Cuts, where: str) -> CutStages:
    key = module_key(pipeline)
    stages = tuple(
        TargetStage(
            number,
            number,
            frozenset(stage.names),
            tuple(
                kept_by_muon(group, sorted(group.names, key=key), cuts, where)
                if trains_by_muon(group)
                else group
                for group in stage.groups
            ),
            tuple(layer for layer in pipeline.layers if layer.stage == number),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    shown = "; ".join(_spans(stage.layers) for stage in stages[:_MOST_SHOWN])
    more = "; ..." if len(stages) > _MOST_SHOWN else ""
    message = (
        f"the {counted(len(stages), 'stage')} {which(len(stages), 'keeps', 'keep')} the layers "
        f"that {which(len(stages), 'it has', 'they have')} ({shown}{more}): the "
        "PipelineModule that resumes must deal them out as that of the source did"
    )
    note = Finding("note", "stages", message)
    return CutStages(stages, (note,) if len(stages) > 1 else ())


def module_key(pipeline: Pipeline, tied: Sequence[str] | None = None) -> Callable[[str], _Key]:
    """Where a module has a name: tied modules first, then layers.

    Args:
        pipeline: The layers.
        tied: What the names of its tied modules begin with, in their order; None for the order of
            their files.
    """
    if tied is None:
        prefixes = (layer.prefix for layer in pipeline.layers)
        tied = tuple(dict.fromkeys(own for own in prefixes if own.startswith(TIED)))
    places: dict[str, _Key] = {}
    for layer in pipeline.layers:
        is_tied = layer.prefix.startswith(TIED)
        if is_tied and layer.prefix not in tied:
            continue
        first = (0, tied.index(layer.prefix)) if is_tied else (1, layer.number)
        for number, name in enumerate(layer.names):
            places.setdefault(name, (*first, number))
    return places.__getitem__


def _spans(layers: Sequence[PipelineLayer]) -> str:
    if not layers:
        return "none with a file"
    numbers = sorted(layer.number for layer in layers)
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


class _Cutter:
    def __init__(
        self,
        training: Training,
        pipeline: Pipeline,
        cut: StageCut,
        count: int,
        numels: Callable[[str], Sequence[int]],
        cuts: Cuts,
        where: str,
        *,
        form: OptimizerForm,
    ) -> None:
        self._groups = training.groups
        self._pipeline = pipeline
        self._cut = cut
        self._count = count
        self._numels = numels
        self._cuts = cuts
        self._where = where
        self._form = form
        self._known = KnownLayers(pipeline, cut.tied, where)
        self._trained = {name for group in training.groups for name in group.names}

    def run(self) -> CutStages:
        """Deal everything out."""
        self._require_module_order()
        self._require_trained()
        if len(self._groups) > 1:
            require_one_order([stage.groups for stage in self._pipeline.stages], self._where)
        starts, how = self._starts()
        holders = {
            prefix: self._known.stages_with(prefix, partial(_stage_of, starts), starts[-1])
            for prefix in self._known.tied
        }
        stages = tuple(self._stage(number, starts, holders) for number in range(self._count))
        note = Finding("note", "stages", _told(starts, how), "", {"starts": list(starts)})
        notes = (note,) if self._count > 1 else ()
        return CutStages(stages, (*notes, *self._unsure(stages)))

    def _unsure(self, stages: Sequence[TargetStage]) -> Iterator[Finding]:
        """Tell of stages that have another group if what is not trained was given to it.

        A wrapper has no number for it, and its group is there all the same; the optimizer itself
        has one, of which nothing tells what it is.
        """
        for number, group in enumerate(self._groups):
            if self._form == "bare" and not group.names and group.listed is None:
                yield Finding(
                    "warning",
                    "numbering",
                    f"parameter group {number} numbers parameters that have no state, and nothing "
                    "says which they are: it is left out, so resume with an optimizer that is not "
                    "given them",
                )
        for stage in stages if self._form == "wrapped" else ():
            own = {name for layer in stage.layers for name in layer.names if self._numels(name)}
            others = sorted(own - self._trained)
            if others and len(stage.groups) < len(self._groups):
                yield Finding(
                    "warning",
                    "numbering",
                    f"stage {stage.number} has {len(stage.groups)} of "
                    f"{counted(len(self._groups), 'parameter group')}: resume with an optimizer "
                    f"that is not given what is not trained there, such as {others[0]!r}, or an "
                    "engine may look for more",
                )

    def _stage(
        self, number: int, starts: Sequence[int], holders: Mapping[str, frozenset[int]]
    ) -> TargetStage:
        layers = tuple(
            layer for layer in self._pipeline.layers if _stage_of(starts, layer.number) == number
        )
        own = [prefix for prefix, stages in holders.items() if number in stages]
        tied = self._in_order(own, number, starts)
        places = {name: (1, layer.number, 0) for layer in layers for name in layer.names}
        names = {
            name
            for name in self._all_names()
            if (prefix := tied_prefix(name)) in tied or (prefix is None and name in places)
        }
        groups = tuple(
            sorted_by_muon(
                replace(group, names=members, listed=self._listed(group, names, tied)),
                *(members, self._cuts.target, self._where),
            )
            for group in self._groups
            if (members := self._sorted((name for name in group.names if name in names), tied))
            or self._has_frozen(group, names, tied)
        )
        if not any(group.names for group in groups):
            raise UnsupportedError(
                f"stage {number} of {self._count} would have no parameter to train (layers "
                f"{starts[number]} to {self._stop(number, starts) - 1})",
                where=self._where,
                remedy="choose fewer stages with --pp, or give the first layer of each as "
                "--pp-layers 0,3,6",
            )
        source = number * len(self._pipeline.stages) // self._count
        return TargetStage(number, source, frozenset(names), groups, layers)

    def _has_frozen(
        self, group: ParameterGroup, names: Collection[str], tied: Sequence[str]
    ) -> bool:
        """Whether a script gives parameters of a group to the optimizer that are not trained."""
        return self._form == "bare" and bool(self._listed(group, names, tied))

    def _sorted(self, names: Iterable[str], tied: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self._key(tied)))

    def _listed(
        self, group: ParameterGroup, names: Collection[str], tied: Sequence[str]
    ) -> tuple[str, ...] | None:
        """What a script gives to the optimizer of a stage, frozen or not."""
        if group.listed is None:
            return None
        return self._sorted((name for name in group.listed if name in names), tied)

    def _stop(self, number: int, starts: Sequence[int]) -> int:
        return starts[number + 1] if number + 1 < len(starts) else self._known.count

    def _all_names(self) -> dict[str, None]:
        return dict.fromkeys(name for stage in self._pipeline.stages for name in stage.names)

    def _in_order(
        self, prefixes: Sequence[str], number: int, starts: Sequence[int]
    ) -> tuple[str, ...]:
        """Tied modules of a stage in the order in which its layers use them first."""
        if len(prefixes) <= 1 or self._count == 1:
            return tuple(prefixes)  # of one stage it is the order of the source's stages
        first: dict[str, int] = {}
        for prefix in prefixes:
            uses = self._known.uses(prefix)
            hidden = self._known.hidden_uses(prefix, starts[-1])
            own, unsure = (
                [use for use in numbers if _stage_of(starts, use) == number]
                for numbers in (uses, hidden)
            )
            first[prefix] = min(own, default=self._known.count)
            if unsure and min(unsure) < first[prefix]:
                raise self._known.untold_error(prefix, min(unsure))
        return tuple(sorted(prefixes, key=first.__getitem__))

    def _key(self, tied: Sequence[str]) -> Callable[[str], _Key]:
        """Where a module has a name: tied modules first, then layers."""
        return module_key(self._pipeline, tied)

    def _require_module_order(self) -> None:
        """Other stages have the parameters of a group in the order of the module, or nobody knows.

        That the source has them so is taken for a script that gives them to the optimizer so.
        """
        for number, stage in enumerate(self._pipeline.stages):
            for place, group in enumerate(stage.groups):
                tied = dict.fromkeys(filter(None, map(tied_prefix, group.names)))
                key = self._key([*tied])
                by_module = sorted(group.names, key=key)
                if trains_by_muon(group) and is_sorted_by_muon(
                    group.names, by_module, self._cuts.source
                ):
                    continue
                for first, second in pairwise(group.names):
                    if key(first) > key(second):
                        raise UnsupportedError(
                            f"parameter group {place} of stage {number} has {second!r} after "
                            f"{first!r}, which is not the order of the module: nothing says in "
                            "which order an optimizer of other stages has them",
                            where=self._where,
                            remedy="keep the stages of the source, or convert with --to universal",
                        )

    def _require_trained(self) -> None:
        """Refuse groups of which it is not known what stages they are on.

        A wrapper leaves frozen parameters out, and the group where a script gave it these alone.
        """
        for number, stage in enumerate(self._pipeline.stages):
            for place, group in enumerate(stage.groups):
                if self._form == "wrapped" and not group.names:
                    raise UnsupportedError(
                        f"parameter group {place} of stage {number} has no parameter that is "
                        "trained: nothing says on which stages of another cut it is",
                        where=self._where,
                        remedy="keep the stages of the source, or choose --zero 1",
                    )

    def _starts(self) -> tuple[tuple[int, ...], str]:
        """First layer of each stage, and who says so."""
        starts = self._cut.starts
        if starts is not None:
            if len(starts) != self._count:
                raise UnsupportedError(
                    f"{counted(len(starts), 'first layer')} {which(len(starts), 'is', 'are')} "
                    f"given for {counted(self._count, 'stage')}",
                    remedy=f"give {self._count} of them, or leave out --pp",
                )
            return starts, "as said"
        if self._count == 1:
            return (0,), "all of them"
        return self._computed(self._cut.method or "parameters")

    def _computed(self, method: PartitionMethod) -> tuple[tuple[int, ...], str]:
        """The stages of a method, where the layers that are not known do not change them."""
        counts = self._counts(method)
        compute = self._uniform if method == "uniform" else self._by_parameters
        found = {count: compute(count) for count in counts}
        starts, known = found[counts[0]], self._known.count
        if len({self._dealt(own) for own in found.values()}) > 1:
            raise UnsupportedError(
                f"the method {method!r} has other stages for {counted(counts[0], 'layer')} than "
                f"for {counts[-1]}, and nothing says how many functions without a file come after "
                f"layer {known - 1}",
                where=self._where,
                remedy=f"give the number of all layers, as --pp-layers {method}:{known}, or the "
                "first layer of each stage",
            )
        return starts, f"partition_method {method!r} of {counted(counts[0], 'layer')}"

    def _counts(self, method: PartitionMethod) -> Sequence[int]:
        """How many layers there may be: those that are known, and functions behind them."""
        said, known = self._cut.layer_count, self._known.count
        if said is not None and said < known:
            raise UnsupportedError(
                f"the pipeline has at least {counted(known, 'layer')}, {said} are said",
                where=self._where,
                remedy=f"give their number, as --pp-layers {method}:{known}",
            )
        if (said or known) > _MOST_BALANCED and method != "uniform":
            raise UnsupportedError(
                f"stages of {said or known} layers are not balanced by what the layers train",
                where=self._where,
                remedy=_BY_HAND,
            )
        if said is not None:
            return (said,)
        # Functions train nothing: where there are more layers than stages, one or two of them
        # balance as any number does.
        is_short = method == "uniform" or known <= self._count
        return range(known, known + (self._count + 1 if is_short else _LIGHT + 1))

    def _dealt(self, starts: Sequence[int]) -> tuple[int, ...]:
        """The stage of each layer that is known."""
        return tuple(_stage_of(starts, number) for number in range(self._known.count))

    def _uniform(self, count: int) -> tuple[int, ...]:
        return uniform_starts(count, self._count)

    def _by_parameters(self, count: int) -> tuple[int, ...]:
        """Balance what the layers train, as each tensor-parallel rank does for itself.

        A module counts when it is made. What was frozen after that counts as well, and a checkpoint
        does not tell it from what was frozen before.
        """
        for prefix in self._known.untold:
            raise self._known.untold_error(prefix)
        every = {name for layer in self._pipeline.layers for name in layer.names}
        parameters = {name for name in every if self._numels(name)}
        ranks = range(len(self._numels(next(iter(self._trained)))))
        counted = {  # ranks mostly hold shards of the same sizes
            self._weights(count, names, rank): len(names)
            for names in (self._trained, parameters)
            for rank in ranks
        }
        found = {balanced_starts(own, self._count): names for own, names in counted.items()}
        if len(found) > 1:
            is_frozen = len({*found.values()}) > 1
            why = (
                "some weights are frozen, and the stages depend on whether they were so when the "
                "module was made"
                if is_frozen
                else "the tensor-parallel ranks hold shards of different sizes, and would each "
                "balance the stages otherwise"
            )
            raise UnsupportedError(why, where=self._where, remedy=_BY_HAND)
        return next(iter(found))

    def _weights(self, count: int, names: Collection[str], rank: int) -> tuple[int, ...]:
        """Elements of these parameters in each layer, on one tensor-parallel rank."""
        numels: dict[str, int] = {}
        prefixes: dict[int, str] = {}
        for layer in self._pipeline.layers:
            prefixes[layer.number] = layer.prefix
            if layer.prefix not in numels:
                own = [name for name in layer.names if name in names]
                numels[layer.prefix] = sum(self._numels(name)[rank] for name in own)
        for prefix in self._known.tied:
            prefixes |= dict.fromkeys(self._known.uses(prefix), prefix)
        return tuple(numels.get(prefixes.get(number, ""), 0) for number in range(count))


def _stage_of(starts: Sequence[int], layer: int) -> int:
    return bisect_right(starts, layer) - 1


def _told(starts: Sequence[int], how: str) -> str:
    shown = ", ".join(map(str, starts[:_MOST_SHOWN])) + (
        ", ..." if len(starts) > _MOST_SHOWN else ""
    )
    second = f"{starts[1]}" if len(starts) > 1 else "all"
    return (
        f"the stages begin with layers {shown} ({how}): the PipelineModule that resumes must deal "
        f"them out so too, and says it when it starts (stage=0 layers={second})"
    )
