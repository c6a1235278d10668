"""What each stage of a pipeline without ZeRO numbers: its module, put together from the layers.

In fp32 the optimizer of a stage saves numbers and no names (deepspeed 0.19.8 `runtime/pipe`), so
that the files of a stage say how many parameters it has, of what shapes and in which groups, and
not which layers they are of. A module has its tied modules first, in the order of their first use,
and then its layers, and stages are runs of layers. So once it is told which layers are tied, every
cut of the layers into stages is tried, and all that fit have to give every number the same name.

Where nothing is told, every module may be tied: to a layer of the stage, or to one that uses it
through a function and has no file. All orders that this leaves are tried as well, and the numbers
are named where there is only the one in which nothing is tied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.formats.deepspeed._stage_layers import TIED, tied_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape

__all__ = ["LayerShapes", "NumberedStage", "number_stages"]

# Orders that are looked at before nothing is proved; every step is a comparison of shapes.
_MOST_STEPS: Final = 200_000
_ASKED: Final = (
    "the tied layers of a pipeline have the first numbers of their stage, and nothing says which "
    "layers are tied: convert with --pp-tied none if none are, or name all layers that use a tied "
    "module, as --pp-tied {key}=0,{last}"
)
_Names = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """The parameters of a layer.

    Attributes:
        number: Its place among all layers.
        shapes: By name in its file, the shape on each tensor-parallel rank.
    """

    number: int
    shapes: Mapping[str, tuple[Shape, ...]]


@dataclass(frozen=True, slots=True)
class NumberedStage:
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
    def tokens(self) -> list[tuple[Shape, ...]] | None:
        """Shapes of one group on all ranks; None where there are several, or shapes not known."""
        if any(len(groups) != 1 for groups in self.ranks):
            return None
        found: list[tuple[Shape, ...]] = []
        for slots in zip(*(groups[0] for groups in self.ranks), strict=True):
            shapes = [_shape(slot) for slot in slots]
            known = tuple(shape for shape in shapes if shape is not None)
            if len(known) < len(shapes):
                return None
            found.append(known)
        return found


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of layers that fits a stage.

    Attributes:
        begin: Its first layer, among those with parameters.
        end: The first behind it.
        order: Names of the module.
        names: What is numbered: every way that fits.
    """

    begin: int
    end: int
    order: tuple[str, ...]
    names: frozenset[_Names]

    @property
    def numbered(self) -> frozenset[str | None]:
        """Everything that has a number."""
        return frozenset(name for names in self.names for own in names for name in own)


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
        >>> table, norm = (Slot("0", frozenset({s})) for s in ((5, 2), (2,)))
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
    spans = search.spans(search.plain)
    if isinstance(spans, int):
        return search.unfitting(spans)
    spans = [search.trained_alike(own, spans) for own in spans]
    if not all(spans):
        return search.unfitting([bool(own) for own in spans].index(False))
    for stage, own in enumerate(spans):
        if len({names for span in own for names in span.names}) > 1:
            return Unmatched(
                f"what stage {stage} numbers fits several runs of layers, and nothing says which "
                "of them it has"
            )
    if told is None and not search.is_proved(spans):
        return search.asked()
    return tuple(own[0].order for own in spans)


@dataclass(slots=True)
class _Module:
    """A layer with a file, or a tied module of several layers."""

    number: int
    prefix: str
    shapes: Mapping[str, tuple[Shape, ...]]
    tokens: list[tuple[Shape, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.shapes.values())


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
        tied = {key: self._tied(key, numbers) for key, numbers in (told or {}).items()}
        self._modules = {
            layer.number: _Module(layer.number, f"{layer.number}.", layer.shapes)
            for layer in layers
            if layer.shapes and layer.number not in uses
        }
        self._modules |= {
            number: module for number, key in uses.items() if (module := tied[key]) is not None
        }
        self._numbers = sorted(self._modules)
        named = chain.from_iterable(stage.buffers for stage in stages)
        first = (name.partition(".")[0] for name in named)
        self._apart = {int(text) for text in first if text.isdecimal()}
        self._steps = 0
        self._misfits: dict[int, str] = {}

    def _tied(self, key: str, numbers: Sequence[int]) -> _Module | None:
        for number in numbers:
            if number in self._files:
                return _Module(number, f"{TIED}{key}.", self._files[number].shapes)
        return None

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
        wrong = sorted(self._apart.intersection(numbers))
        if wrong:
            return Unmatched(
                f"layer {wrong[0]} is said to use {key!r}, and has buffers under its own name"
            )
        return None

    def asked(self, *prefixes: str) -> Unmatched:
        """It has to be told which layers are tied."""
        key = prefixes[0].removeprefix(TIED).rstrip(".") if prefixes else "embed"
        return Unmatched(_ASKED.format(key=key, last=max(self._files, default=0) + 1))

    def unfitting(self, stage: int) -> Unmatched:
        """Nothing fits what a stage numbers."""
        if self._told is None:
            return self.asked()
        said = ", ".join(f"{key}={','.join(map(str, n))}" for key, n in self._told.items())
        why = self._misfits.get(stage)
        return Unmatched(
            f"no run of layers fits the {self._stages[stage].count} parameters that stage {stage} "
            f"numbers, with --pp-tied {said or 'none'}{f' ({why})' if why else ''}"
        )

    def spans(self, fitting: Callable[[int, int], Iterator[_Span]]) -> list[list[_Span]] | int:
        """Runs of layers that fit each stage and are on a way through all; else a stage of none."""
        reached, forward = {0}, []
        for stage in range(len(self._stages)):
            forward.append([own for begin in sorted(reached) for own in fitting(stage, begin)])
            reached = {own.end for own in forward[-1]}
            if not reached:
                return stage
        ends, found = {len(self._numbers)}, []
        for own_spans in reversed(forward):
            found.append([own for own in own_spans if own.end in ends])
            ends = {own.begin for own in found[-1]}
            if not ends:
                return len(self._stages) - 1
        return found[::-1]

    def trained_alike(self, own: Sequence[_Span], stages: Sequence[Sequence[_Span]]) -> list[_Span]:
        """Runs of layers with tied modules that are trained where other stages train them."""
        trained = {name for spans in stages for span in spans for name in span.numbered}
        tied = {name for name in trained if name is not None and name.startswith(TIED)}
        return [span for span in own if tied.intersection(span.order) <= span.numbered]

    def plain(self, stage: int, begin: int) -> Iterator[_Span]:
        """Runs of layers from `begin` on that fit a stage, with ties as told."""
        slots = self._stages[stage]
        groups = slots.ranks[0]
        shapes = [_shape(slot) for own in groups for slot in own]
        needed = Counter(shape for shape in shapes if shape is not None)
        missing = Counter(needed)
        modules: dict[str, _Module] = {}
        count = 0
        for end in range(begin + 1, len(self._numbers) + 1):
            module = self._modules[self._numbers[end - 1]]
            if module.prefix not in modules:
                modules[module.prefix] = module
                count += len(module.tokens)
                missing.subtract(token[0] for token in module.tokens)
            if any(missing[shape] > 0 for shape in needed):
                continue
            fit = self._fit(stage, _ordered(modules))
            if fit is not None:
                order, names = fit
                yield _Span(begin, end, order, frozenset({names}))
            elif count > slots.count and any(missing[shape] < 0 for shape in needed):
                return

    def _fit(self, stage: int, modules: Sequence[_Module]) -> tuple[tuple[str, ...], _Names] | None:
        """The names of what is numbered, if the module is of these, in this order."""
        slots = self._stages[stage]
        named = {f"{m.prefix}{key}": own for m in modules for key, own in m.shapes.items()}
        found: set[_Names] = set()
        for tp, groups in enumerate(slots.ranks):
            candidates = [Candidate(name, own[tp], shape=own[tp]) for name, own in named.items()]
            matched = match(candidates, groups, [None] * len(groups), slots.by_muon)
            if not isinstance(matched, Matched):
                self._misfits.setdefault(stage, matched.reason)
                return None
            found.add(matched.names)
        return (tuple(named), found.pop()) if len(found) == 1 else None

    def is_proved(self, plain: Sequence[Sequence[_Span]]) -> bool:
        """Whether nothing but what nothing is tied in fits."""
        if self._apart.issuperset(self._modules):
            return True
        if any(stage.tokens is None for stage in self._stages):
            return False
        try:
            spans = self.spans(self._any_order)
        except _TooManyError:
            return False
        wanted = [{names for span in own for names in span.names} for own in plain]
        return not isinstance(spans, int) and wanted == [
            {names for span in own for names in span.names} for own in spans
        ]

    def _any_order(self, stage: int, begin: int) -> Iterator[_Span]:
        tokens = self._stages[stage].tokens or []
        known = {*tokens}
        for end in range(begin, len(self._numbers) + 1):
            own = [self._modules[number] for number in self._numbers[begin:end]]
            if own and not known.issuperset(own[-1].tokens):
                return  # nor will any longer run fit
            names: set[_Names] = set()
            for modules in self._orders(tokens, own):
                names.add((tuple(f"{m.prefix}{key}" for m in modules for key in m.shapes),))
                if len(names) > 1:
                    break
            if names:
                yield _Span(begin, end, (), frozenset(names))

    def _orders(
        self,
        tokens: Sequence[tuple[Shape, ...]],
        own: Sequence[_Module],
        first: tuple[_Module, ...] = (),
        place: int = 0,
    ) -> Iterator[tuple[_Module, ...]]:
        """Modules whose shapes are those, some of all layers first, and then the rest of `own`."""
        self._count()
        left = [module for module in own if module not in first]
        for rest in self._rests(tokens, left, first, place):
            yield (*first, *rest)
        for number in self._numbers:
            module = self._modules[number]
            stop = place + len(module.tokens)
            is_free = module not in first and number not in self._apart
            if is_free and tokens[place:stop] == module.tokens:
                yield from self._orders(tokens, own, (*first, module), stop)

    def _rests(
        self,
        tokens: Sequence[tuple[Shape, ...]],
        left: Sequence[_Module],
        first: Sequence[_Module],
        place: int,
    ) -> Iterator[tuple[_Module, ...]]:
        """Layers that are not tied; what has the shapes of a tied module may be one of its uses."""
        self._count()
        if not left:
            if place == len(tokens):
                yield ()
            return
        module, stop = left[0], place + len(left[0].tokens)
        if tokens[place:stop] == module.tokens:
            for rest in self._rests(tokens, left[1:], first, stop):
                yield (module, *rest)
        is_free = module.number not in self._apart
        if is_free and any(module.shapes == other.shapes for other in first):
            yield from self._rests(tokens, left[1:], first, place)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooManyError


class _TooManyError(Exception):
    """So much may be tied that nothing is proved."""


def _ordered(modules: Mapping[str, _Module]) -> list[_Module]:
    """Modules as a stage has them: the tied ones first."""
    return sorted(modules.values(), key=lambda module: not module.prefix.startswith(TIED))


def _shape(slot: Slot) -> Shape | None:
    """The one shape that a slot may have."""
    found = next(iter(slot.tokens), None) if slot.tokens else None
    return found if isinstance(found, tuple) else None
