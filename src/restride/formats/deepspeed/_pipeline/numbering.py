"""What each stage of a pipeline without ZeRO numbers: its module, put together from the layers.

In fp32 the optimizer of a stage saves numbers and no names (deepspeed 0.19.8 `runtime/pipe`), so
that the files of a stage say how many parameters it has, of what shapes and in which groups, and
not which layers they are of. A module has its tied modules first, in the order of their first use,
and then its layers, and stages are runs of layers. So once it is told which layers are tied, every
cut of the layers into stages is tried, and all that fit have to give every number the same name.
Frozen parameters may have no number: a run of layers with more parameters than a stage numbers
fits as well, and which of them are trained is only known where shapes tell, or in half precision
what the master weights round to.

Where nothing is told, every module may be tied: to a layer of the stage, or to one that uses it
through a function and has no file. The numbers are named where no module but the next one of the
stage could be the next that is tied (`proof`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, field

from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.formats.deepspeed._pipeline.known_layers import TIED, tied_prefix
from restride.formats.deepspeed._pipeline.proof import Tied, Tokens, none_can_be_tied
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape

__all__ = ["LayerShapes", "NumberedStage", "number_stages"]

# Comparisons of shapes before nothing is proved.
_MOST_STEPS: Final = 1_000_000
_MOST_DIGITS: Final = 7
_ASKED: Final = (
    "the tied layers of a pipeline have the first numbers of their stage, and nothing says which "
    "layers are tied: say --pp-tied none if none are, or name all layers that use a tied "
    "module, as --pp-tied {key}=0,{last}"
)
_Names: TypeAlias = tuple[tuple[str | None, ...], ...]
# What is counted: parameters of a shape on the first tensor-parallel rank, or under None all.
_Key: TypeAlias = "Shape | None"


class LayerShapes(Frozen):
    """The parameters of a layer.

    Attributes:
        number: Its place among all layers.
        shapes: By name in its file, the shape on each tensor-parallel rank.
        tokens: By name, what identifies it on each of them; empty where that is the shape.
    """

    number: int
    shapes: Mapping[str, tuple[Shape, ...]]
    tokens: Mapping[str, tuple[Hashable, ...]] = field(default_factory=dict)


class NumberedStage(Frozen):
    """What the optimizer of a stage numbers.

    Attributes:
        ranks: For each tensor-parallel rank what is numbered in each group, in its order.
        buffers: Names of the buffers of the stage's module.
        by_muon: Numbers of the groups that Muon sorted by shape.
    """

    ranks: tuple[tuple[tuple[Slot, ...], ...], ...]
    buffers: frozenset[str]
    by_muon: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How much is numbered."""
        return sum(map(len, self.ranks[0]))

    @property
    def shapes(self) -> Counter[Shape | None]:
        """How much of each shape is numbered at least, and under None how much in all."""
        known = (slot.shape for group in self.ranks[0] for slot in group)
        return Counter({None: self.count}) + Counter(own for own in known if own is not None)

    @property
    def has_shapes(self) -> bool:
        """Whether there is one group on all ranks, and its shapes are known."""
        return all(
            len(groups) == 1 and all(slot.shape is not None for slot in groups[0])
            for groups in self.ranks
        )


class _Span(Frozen):
    """A run of layers that fits a stage.

    Attributes:
        begin: Its first layer, among those with parameters.
        end: The first behind it.
        order: Names of the module.
        names: What is numbered; None where it may be this or that.
        problem: Why.
    """

    begin: int
    end: int
    order: tuple[str, ...]
    names: _Names | None
    problem: str = ""

    @property
    def numbered(self) -> frozenset[str | None]:
        """Everything that is known to have a number."""
        return frozenset(name for own in self.names or () for name in own)


def number_stages(
    layers: Sequence[LayerShapes],
    stages: Sequence[NumberedStage],
    told: Mapping[str, tuple[int, ...]] | None,
) -> tuple[tuple[str, ...], ...] | Unmatched:
    """Tell the parameters of the module of every stage, in its order.

    Args:
        layers: Those that have a file.
        stages: What each of them numbers.
        told: For the key of each tied module, all layers that use it; None where nothing is told.

    Returns:
        For each stage the names of its module. Or the reason why they are not known: nothing fits,
        or several things do.

    Cost:
        O(stages * layers * parameters) where the shapes leave few cuts.

    Examples:
        >>> shapes = [LayerShapes(0, {"weight": ((5, 2),)}), LayerShapes(2, {"weight": ((2,),)})]
        >>> table, norm = (Slot("0", frozenset({s}), s) for s in ((5, 2), (2,)))
        >>> none = frozenset()
        >>> plain = [NumberedStage((((table,),),), none), NumberedStage((((norm,),),), none)]
        >>> number_stages(shapes, plain, None)
        (('0.weight',), ('2.weight',))
        >>> tied = [plain[0], NumberedStage((((table, norm),),), none)]
        >>> number_stages(shapes, tied, {"table": (0, 3)})[1]
        ('tied_modules.table.weight', '2.weight')
    """
    search = _Search(layers, stages, told)
    problem = search.problem()
    if problem is not None:
        return problem
    try:
        return search.names()
    except _TooManyError:
        return Unmatched("more runs of layers fit the stages than can be tried")


def _way(spans: Sequence[Sequence[_Span]]) -> Iterator[_Span]:
    """One run of layers after the other, where every one is on a way through all stages."""
    begin = 0
    for own in spans:
        span = next(span for span in own if span.begin == begin)
        begin = span.end
        yield span


class _Module(Struct):
    """A layer with a file, or a layer that uses a tied module, with its own copy or another one."""

    prefix: str
    layer: LayerShapes
    has_file: bool = True
    shapes: Tokens = ()
    counted: Counter[_Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.shapes = tuple(self.layer.shapes.values())
        self.counted = Counter({None: len(self.shapes)}) + Counter(own[0] for own in self.shapes)

    def candidates(self, tp: int) -> Iterator[Candidate]:
        """Its parameters on a tensor-parallel rank."""
        for key, shapes in self.layer.shapes.items():
            token = self.layer.tokens[key][tp] if self.layer.tokens else shapes[tp]
            yield Candidate(f"{self.prefix}{key}", token, shape=shapes[tp])


class _Places:
    """How many parameters are in each place of a row."""

    def __init__(self, row: Sequence[Counter[_Key]]) -> None:
        self._places: dict[_Key, list[int]] = defaultdict(list)
        for place, counter in enumerate(row):
            for key, number in counter.items():
                self._places[key] += [place] * number

    def count(self, key: _Key, begin: int) -> int:
        """Those of a shape from a place on."""
        places = self._places.get(key, ())
        return len(places) - bisect_left(places, begin)


class _Search:
    def __init__(
        self,
        layers: Sequence[LayerShapes],
        stages: Sequence[NumberedStage],
        told: Mapping[str, tuple[int, ...]] | None,
    ) -> None:
        self._stages = stages
        self._told = told
        self._files = {layer.number: layer for layer in layers}
        uses = {number: key for key, numbers in (told or {}).items() for number in numbers}
        self._modules = {
            layer.number: _Module(f"{layer.number}.", layer)
            for layer in layers
            if layer.shapes and layer.number not in uses
        }
        for key, numbers in (told or {}).items():
            self._modules |= self._tied(key, numbers)
        self._numbers = sorted(self._modules)
        # Layers that are not tied, and the stage that says so.
        self._apart = {
            int(text): number
            for number, stage in enumerate(stages)
            for text in {name.partition(".")[0] for name in stage.buffers}
            if text.isdecimal() and len(text) < _MOST_DIGITS
        }
        # Stages that name buffers of a tied module: all that have it do.
        self._buffered: dict[str, set[int]] = defaultdict(set)
        for number, stage in enumerate(stages):
            for name in stage.buffers:
                self._buffered[tied_prefix(name) or ""].add(number)
        self._needed = [stage.shapes for stage in stages]
        self._needs = _Places(self._needed)
        self._holds = _Places([self._modules[number].counted for number in self._numbers])
        self._steps = 0

    def _tied(self, key: str, numbers: Sequence[int]) -> dict[int, _Module]:
        """A tied module in all layers that use it: where it has no file, the first copy of all."""
        prefix = f"{TIED}{key}."
        stored = [self._files[number] for number in numbers if number in self._files]
        return {
            number: _Module(prefix, self._files.get(number, stored[0]), number in self._files)
            for number in numbers
            if stored
        }

    def problem(self) -> Unmatched | None:
        """What is told and is not so, or is not told and has to be."""
        sizes = [[[*map(len, groups)] for groups in stage.ranks] for stage in self._stages]
        if any(own != ranks[0] for ranks in sizes for own in ranks):
            return Unmatched("the tensor-parallel ranks of a stage number different parameters")
        named = {prefix for s in self._stages for b in s.buffers if (prefix := tied_prefix(b))}
        if self._told is None:
            return self.asked(*sorted(named)) if named else None
        for key, numbers in self._told.items():
            named.discard(f"{TIED}{key}.")
            problem = self._problem_of(key, numbers)
            if problem is not None:
                return problem
        return self.asked(*sorted(named)) if named else None

    def _problem_of(self, key: str, numbers: Sequence[int]) -> Unmatched | None:
        """What is told of a tied module, and is not so."""
        stored = [self._files[number] for number in numbers if number in self._files]
        if not stored:
            return Unmatched(f"no layer that is said to use {key!r} has a file")
        for other in stored[1:]:
            if dict(other.shapes) != dict(stored[0].shapes):
                return Unmatched(
                    f"layers {stored[0].number} and {other.number} are said to use {key!r}, and "
                    "have different parameters"
                )
        wrong = sorted({*self._apart}.intersection(numbers))
        if wrong:
            return Unmatched(
                f"layer {wrong[0]} is said to use {key!r}, and has buffers under its own name"
            )
        return None

    def asked(self, *prefixes: str) -> Unmatched:
        """It has to be told which layers are tied."""
        key = prefixes[0].removeprefix(TIED).rstrip(".") if prefixes else "embed"
        return Unmatched(_ASKED.format(key=key, last=max(self._files, default=0) + 1))

    def unfitting(self, stage: int, why: str = "") -> Unmatched:
        """Nothing fits what a stage numbers."""
        if self._told is None:
            return self.asked()
        return Unmatched(
            f"no run of layers fits {counted(self._stages[stage].count, 'parameter')} that stage "
            f"{stage} numbers, with --pp-tied {self._said}{f' ({why})' if why else ''}"
        )

    def _lacking(self) -> Unmatched | None:
        """The layers have too few parameters for all stages, however they are cut."""
        for key in [*sorted({*chain(*self._needed)} - {None}, key=str), None]:
            needed, held = self._needs.count(key, 0), self._holds.count(key, 0)
            if held < needed:
                shape = "" if key is None else f" of shape {key}"
                return Unmatched(
                    f"no run of layers fits: all stages number {counted(needed, 'parameter')}"
                    f"{shape}, and the layers have {held}, with --pp-tied {self._said}"
                )
        return None

    @cached_property
    def _said(self) -> str:
        told = (self._told or {}).items()
        return " ".join(f"{key}={','.join(map(str, n))}" for key, n in told) or "none"

    def several(self, stage: int) -> Unmatched:
        """It is not known what a stage numbers."""
        if self._told is None:
            return self.asked()
        return Unmatched(
            f"what stage {stage} numbers fits several runs of layers, or some of their parameters "
            "are frozen, and nothing says which"
        )

    def names(self) -> tuple[tuple[str, ...], ...] | Unmatched:
        """The names of the module of every stage, or why they are not known."""
        lacking = self._lacking()
        if lacking is not None:
            return self.asked() if self._told is None else lacking
        spans = self.spans()
        if isinstance(spans, int):
            return self.unfitting(spans)
        for stage, own in enumerate(spans):
            if all(span.names is None for span in own):
                return self.unfitting(stage, own[0].problem)
            if len({span.names for span in own}) > 1:
                return self.several(stage)
        way = list(_way(spans))
        if self._told is None and not self.is_proved(way):
            return self.asked()
        return tuple(span.order for span in way)

    def spans(self) -> list[list[_Span]] | int:
        """Runs of layers that fit each stage and are on a way through all; else a stage of none."""
        reached, found = {0}, list[list[_Span]]()
        for stage in range(len(self._stages)):
            found.append([own for begin in sorted(reached) for own in self._fitting(stage, begin)])
            reached = {own.end for own in found[-1]}
            if not reached:
                return stage
        spans = self._on_a_way(found)
        return spans if isinstance(spans, int) else self._on_a_way(_trained_alike(spans))

    def _on_a_way(self, spans: Sequence[Sequence[_Span]]) -> list[list[_Span]] | int:
        """Those that are left of runs of layers where each has to follow another one."""
        reached, forward = {0}, list[list[_Span]]()
        for stage, own_spans in enumerate(spans):
            forward.append([own for own in own_spans if own.begin in reached])
            reached = {own.end for own in forward[-1]}
            if not reached:
                return stage
        ends, found = {len(self._numbers)}, list[list[_Span]]()
        for own_spans in reversed(forward):
            found.append([own for own in own_spans if own.end in ends])
            ends = {own.begin for own in found[-1]}
            if not ends:
                return len(self._stages) - 1
        return found[::-1]

    def _fitting(self, stage: int, begin: int) -> Iterator[_Span]:
        """Runs of layers from `begin` on that have what a stage numbers, with ties as told."""
        missing = Counter(self._needed[stage])
        unmet = len(missing)
        modules: dict[str, _Module] = {}
        for end in range(begin, len(self._numbers) + 1):
            if end > begin:
                number = self._numbers[end - 1]
                if self._apart.get(number, stage) != stage:
                    return
                module = self._modules[number]
                if stage not in self._buffered.get(module.prefix, {stage}):
                    return
                self._count(1 + len(module.counted))
                if not all(self._leaves(stage, end, key) for key in module.counted):
                    return  # nor do longer runs
                held = modules.get(module.prefix)
                if held is None or (module.has_file and not held.has_file):
                    modules[module.prefix] = module
                if held is None:
                    unmet -= sum(0 < missing[key] <= n for key, n in module.counted.items())
                    missing.subtract(module.counted)
            if not unmet:
                yield self._span(stage, begin, end, _ordered(modules))

    def _leaves(self, stage: int, end: int, key: _Key) -> bool:
        """Whether enough parameters are left to the stages behind, if one has those up to here."""
        return self._holds.count(key, end) >= self._needs.count(key, stage + 1)

    def _span(self, stage: int, begin: int, end: int, modules: Sequence[_Module]) -> _Span:
        order = tuple(f"{m.prefix}{key}" for m in modules for key in m.layer.shapes)
        self._count(len(order) * len(self._stages[stage].ranks))
        fit = self._fit(stage, modules)
        if isinstance(fit, Unmatched):
            return _Span(begin, end, order, None, fit.reason)
        return _Span(begin, end, order, fit)

    def _fit(self, stage: int, modules: Sequence[_Module]) -> _Names | Unmatched:
        """The names of what is numbered, if the stage has these modules, in this order."""
        slots = self._stages[stage]
        found: set[_Names] = set()
        for tp, groups in enumerate(slots.ranks):
            candidates = [own for module in modules for own in module.candidates(tp)]
            matched = match(candidates, groups, [None] * len(groups), slots.by_muon)
            if not isinstance(matched, Matched):
                return matched
            found.add(matched.names)
        if len(found) > 1:
            return Unmatched("its tensor-parallel ranks number different parameters")
        return found.pop()

    def is_proved(self, way: Sequence[_Span]) -> bool:
        """Whether nothing but what nothing is tied in fits."""
        if self._apart.keys() >= self._modules.keys():
            return True
        stages: list[list[Tied]] = []
        for stage, span in zip(self._stages, way, strict=True):
            if not stage.has_shapes or stage.by_muon or span.names != (span.order,):
                return False
            own = self._numbers[span.begin : span.end]
            stages.append([Tied(self._modules[n].shapes, n not in self._apart) for n in own])
        return none_can_be_tied(stages)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _TooManyError


class _TooManyError(Exception):
    """So many runs of layers fit that nothing is proved."""


def _trained_alike(stages: Sequence[Sequence[_Span]]) -> list[list[_Span]]:
    """Runs of layers whose tied modules are trained where another stage is sure to train them."""
    sure = {
        name
        for spans in stages
        for name in frozenset.intersection(*(span.numbered for span in spans))
        if name is not None and name.startswith(TIED)
    }
    return [
        [
            span
            for span in own
            if span.names is None or sure.intersection(span.order) <= span.numbered
        ]
        for own in stages
    ]


def _ordered(modules: Mapping[str, _Module]) -> list[_Module]:
    """Modules as a stage has them: the tied ones first."""
    return sorted(modules.values(), key=lambda module: not module.prefix.startswith(TIED))
