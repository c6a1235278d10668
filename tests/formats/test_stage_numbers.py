"""Which parameter a number of a pipeline stage is: the truth, or a reason why it is not known."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.formats.deepspeed._pipeline.numbering import LayerShapes, NumberedStage, number_stages
from restride.formats.deepspeed._pipeline.proof import Tied, none_can_be_tied

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

Shapes = dict[str, tuple[int, ...]]
KINDS: tuple[Shapes, ...] = (
    {"weight": (5, 2)},
    {"weight": (2,), "bias": (2,)},
    {"weight": (2, 2), "bias": (2,)},
    {"weight": (3, 2), "more": (2, 2)},
    {"weight": (2, 2)},
)
WHERE = "layer {} of {}"


class Pipeline:
    """A pipeline as an engine builds it: every layer with its module, dealt out to stages."""

    def __init__(
        self,
        kinds: list[int | None],
        keys: list[str],
        functions: set[int],
        starts: list[int],
        frozen: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self.frozen = frozen
        self.kinds, self.keys, self.starts = kinds, keys, starts
        self.functions = functions
        self.ties: dict[str, tuple[int, ...]] = {}
        for number, key in enumerate(keys):
            if key:
                self.ties[key] = (*self.ties.get(key, ()), number)
        first = {key: numbers[0] for key, numbers in self.ties.items()}
        # All layers of one module are of the kind of the first.
        self.kinds = [kinds[first[key]] if key else kinds[n] for n, key in enumerate(keys)]

    def shapes(self, number: int) -> Shapes:
        kind = self.kinds[number]
        return {} if kind is None else KINDS[kind]

    def module(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a stage: tied modules first, each once, then the layers."""
        stops = [*self.starts[1:], len(self.kinds)]
        own = range(self.starts[stage], stops[stage])
        tied = {
            f"tied_modules.{self.keys[n]}.{key}": shape
            for n in own
            if self.keys[n]
            for key, shape in self.shapes(n).items()
        }
        return tied | {
            f"{n}.{key}": shape
            for n in own
            if not self.keys[n]
            for key, shape in self.shapes(n).items()
        }

    def trained(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Those of them that have a number."""
        first = {key: numbers[0] for key, numbers in self.ties.items()}
        layer = {f"tied_modules.{key}": number for key, number in first.items()}
        return {
            name: shape
            for name, shape in self.module(stage).items()
            if (
                int(layer.get(name.rpartition(".")[0], name.partition(".")[0])),
                name.rpartition(".")[2],
            )
            not in self.frozen
        }

    @property
    def layers(self) -> list[LayerShapes]:
        return [
            LayerShapes(n, {key: (shape,) for key, shape in self.shapes(n).items()})
            for n in range(len(self.kinds))
            if self.kinds[n] is not None and n not in self.functions
        ]

    def numbered(self, groups: list[set[int]] | None) -> list[NumberedStage]:
        """What the optimizers number: all, or matrices and vectors in groups of their own."""
        made = []
        for stage in range(len(self.starts)):
            shapes = list(self.trained(stage).values())
            split = [[s for s in shapes if len(s) in sizes] for sizes in groups or [{1, 2}]]
            slots = tuple(
                tuple(Slot(f"a {shape}", frozenset({shape}), shape) for shape in own)
                for own in split
                if own
            )
            made.append(NumberedStage((slots,), frozenset()))
        return made

    def names(self, groups: list[set[int]] | None) -> list[tuple[tuple[str, ...], ...]]:
        """The name of every number."""
        made = []
        for stage in range(len(self.starts)):
            module = self.trained(stage)
            split = [[n for n, s in module.items() if len(s) in own] for own in groups or [{1, 2}]]
            made.append(tuple(tuple(own) for own in split if own))
        return made


@st.composite
def pipelines(draw: DrawFn) -> tuple[Pipeline, list[set[int]] | None]:
    count = draw(st.integers(1, 7))
    kind = st.one_of(st.none(), st.sampled_from([0, 1, 2, 2, 3, 4]))
    kinds = draw(st.lists(kind, min_size=count, max_size=count))
    tie = st.sampled_from(["", "", "", "", "a", "b"])
    keys = [draw(tie) if kinds[n] is not None else "" for n in range(count)]
    stages = draw(st.integers(1, min(3, count)))
    starts = [
        0,
        *sorted(
            draw(st.sets(st.integers(1, count - 1), min_size=stages - 1, max_size=stages - 1))
            if stages > 1
            else []
        ),
    ]
    made = Pipeline(kinds, keys, set(), starts)
    later = [n for numbers in made.ties.values() for n in numbers[1:]]
    functions = draw(st.sets(st.sampled_from(later))) if later else set()
    keys_of = [(n, key) for n in range(count) for key in made.shapes(n)]
    whole = draw(st.sets(st.integers(0, count - 1), max_size=2))
    some = draw(st.sets(st.sampled_from(keys_of), max_size=2)) if keys_of else set()
    frozen = some | {own for own in keys_of if own[0] in whole}
    made = Pipeline(kinds, keys, functions, starts, frozenset(frozen))
    groups = draw(st.sampled_from([None, None, [{2}, {1}]]))
    return made, groups


def numbering(found: Any, stages: list[NumberedStage], pipeline: Pipeline) -> Any:
    """The names of all numbers, by the order that was found."""
    shapes = {
        **{name: s for n in range(len(stages)) for name, s in pipeline.module(n).items()},
        **{
            f"{layer.number}.{key}": own[0]
            for layer in pipeline.layers
            for key, own in layer.shapes.items()
        },
    }
    made = []
    for order, stage in zip(found, stages, strict=True):
        candidates = [Candidate(name, shapes[name], shape=shapes[name]) for name in order]
        matched = match(candidates, stage.ranks[0], [None] * len(stage.ranks[0]))
        assert isinstance(matched, Matched)
        made.append(matched.names)
    return made


SEEN: Counter[str] = Counter()


@given(pipelines())
@settings(max_examples=150)
def test_numbers_get_their_own_names_or_none(drawn):
    """Told of its ties, a pipeline is never taken for another one; untold, it is known or not."""
    pipeline, groups = drawn
    stages, truth = pipeline.numbered(groups), pipeline.names(groups)

    told = number_stages(pipeline.layers, stages, pipeline.ties)
    untold = number_stages(pipeline.layers, stages, None)

    if not isinstance(told, Unmatched):
        SEEN["told"] += 1
        assert numbering(told, stages, pipeline) == truth
    if not isinstance(untold, Unmatched):
        SEEN["proved"] += 1
        held = {key: numbers[0] for key, numbers in pipeline.ties.items()}
        plain = [
            tuple(
                tuple(
                    name
                    if not name.startswith("tied")
                    else f"{held[name.split('.')[1]]}.{name.split('.')[2]}"
                    for name in own
                )
                for own in groups_of
            )
            for groups_of in truth
        ]
        assert numbering(untold, stages, pipeline) == plain


def test_the_law_above_met_both_kinds():
    assert SEEN["told"] > 20
    assert SEEN["proved"] > 10


def layers(*kinds: int) -> list[LayerShapes]:
    return [
        LayerShapes(n, {key: (shape,) for key, shape in KINDS[kind].items()})
        for n, kind in enumerate(kinds)
    ]


def stage(*shapes: tuple[int, ...], buffers: frozenset[str] = frozenset()) -> NumberedStage:
    slots = tuple(Slot(f"a {shape}", frozenset({shape}), shape) for shape in shapes)
    return NumberedStage(((slots,),), buffers)


BLOCK = ((2, 2), (2,))


def test_two_layers_alike_on_a_stage_may_be_tied_and_nothing_else_tells():
    found = number_stages(layers(2, 2), [stage(*BLOCK, *BLOCK)], None)

    assert isinstance(found, Unmatched)
    assert "say --pp-tied none" in found.reason


def test_a_frozen_parameter_does_not_make_a_tied_module_a_layer():
    """The table is tied to a function of the last stage, whose layer has one like it, frozen."""
    table, inner = (LayerShapes(n, {"weight": (s,)}) for n, s in enumerate([(5, 2), (2, 2)]))
    last = LayerShapes(2, {"base": ((5, 2),), "weight": ((3, 2),)})
    stages = [stage((5, 2), (2, 2)), stage((5, 2), (3, 2))]

    assert isinstance(number_stages([table, inner, last], stages, None), Unmatched)


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        # Layer 0 or layer 1, and one of them is frozen.
        ((4, 4, 0, 4), [stage((2, 2)), stage((5, 2))]),
        # All of the last layer is frozen, or the last stage is of layers without parameters.
        ((4, 4, 4), [stage((2, 2)), stage((2, 2)), stage()]),
        # Layers 0 and 1, or 1 and 2.
        ((4, 1, 4), [stage((2, 2), (2,), (2,)), stage()]),
    ],
)
def test_one_of_several_layers_alike_is_not_the_one_that_happens_to_fit(kinds, stages):
    found = number_stages(layers(*kinds), stages, {})

    assert isinstance(found, Unmatched)
    assert "fits several runs of layers, or some of their parameters are frozen" in found.reason


def test_a_stage_without_parameters_has_no_layer():
    assert number_stages(layers(0, 1), [stage((5, 2)), stage(), stage((2,), (2,))], {}) == (
        ("0.weight",),
        (),
        ("1.weight", "1.bias"),
    )


def test_numbers_without_a_shape_are_those_of_all_layers_in_their_order():
    """What never had a step, or has no states, is there all the same."""
    slots = (Slot("a", None), Slot("b", None))
    stages = [NumberedStage(((slots,),), frozenset()), NumberedStage(((slots[:1],),), frozenset())]

    assert number_stages(layers(4, 4, 4), stages, {}) == (("0.weight", "1.weight"), ("2.weight",))
    assert isinstance(number_stages(layers(4, 4, 4, 4), stages, {}), Unmatched)


def test_what_muon_sorts_is_not_named_where_nothing_is_told():
    """A tied module is not at the first place then, and could be anywhere."""
    slots = (Slot("a", frozenset({(5, 2)}), (5, 2)), Slot("b", frozenset({(2, 2)}), (2, 2)))
    sorted_stage = NumberedStage(((slots,),), frozenset(), (0,))

    assert isinstance(number_stages(layers(0, 4), [sorted_stage], None), Unmatched)
    assert number_stages(layers(4, 0), [sorted_stage], {}) == (("0.weight", "1.weight"),)


def test_pipelines_of_any_size_are_known_or_refused_at_once():
    """Neither the depth of a stage nor what may be frozen makes the search long."""
    deep, runs = layers(*[2] * 1500), [stage(*BLOCK * 15) for _ in range(100)]
    shapeless = NumberedStage((((Slot("a", None),) * 5,),), frozenset())

    for told in (None, {}):
        for stages in (runs, [stage(*BLOCK * 1500)]):
            assert isinstance(number_stages(deep, stages, told), Unmatched) == (told is None)
    refused = number_stages(deep, [shapeless] * 100, {})

    assert isinstance(refused, Unmatched)
    assert "more runs of layers fit the stages than can be tried" in refused.reason


def test_a_buffer_of_a_number_that_is_too_long_is_of_no_layer():
    buffers = frozenset({"9" * 5000 + ".seen"})

    assert number_stages(layers(0), [stage((5, 2), buffers=buffers)], {}) == (("0.weight",),)


def test_names_of_buffers_say_of_which_layers_they_are():
    buffers = frozenset({"0.positions", "1.positions"})

    found = number_stages(layers(2, 2), [stage(*BLOCK, *BLOCK, buffers=buffers)], None)

    assert found == (("0.weight", "0.bias", "1.weight", "1.bias"),)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"a": (7,)}, "no layer that is said to use 'a' has a file"),
        ({"a": (0, 1)}, "layers 0 and 1 are said to use 'a', and have different parameters"),
        ({"a": (0, 5)}, "no run of layers fits"),
        ({}, "nothing says which layers are tied"),
    ],
)
def test_what_is_told_is_held_against_the_files(told, words):
    buffers = frozenset({"tied_modules.b.seen"} if not told else ())
    stages = [stage((5, 2)), stage((2,), (2,), buffers=buffers)]

    found = number_stages(layers(0, 1), stages, told)

    assert isinstance(found, Unmatched)
    assert words in found.reason


def test_many_distinct_layers_that_may_be_tied_take_no_time():
    shapes = [(n + 2, 3) for n in range(60)]
    many = [LayerShapes(n, {"weight": (shape,)}) for n, shape in enumerate(shapes)]
    halves = [stage(*shapes[:30]), stage(*shapes[30:])]
    alike = [LayerShapes(n, {"weight": ((2, 3),)}) for n in range(60)]

    assert not isinstance(number_stages(many, halves, None), Unmatched)
    assert isinstance(number_stages(alike, [stage(*[(2, 3)] * 60)], None), Unmatched)
    assert list(accumulate(map(len, number_stages(alike, [stage(*[(2, 3)] * 60)], {})))) == [60]


def test_frozen_parameters_are_told_where_they_have_a_number_or_a_shape_of_their_own():
    """One without a number, and of the shape of others, could be any of them."""
    own = [LayerShapes(0, {"weight": ((2, 2),), "bias": ((2,),), "scale": ((2,),)})]
    apart = [LayerShapes(0, {"weight": ((2, 2),), "bias": ((2,),), "scale": ((3,),)})]
    order = (("0.weight", "0.bias", "0.scale"),)
    slots = (*(Slot(f"a {s}", frozenset({s}), s) for s in BLOCK), Slot("frozen", None))

    unknown = number_stages(own, [stage(*BLOCK)], {})

    assert isinstance(unknown, Unmatched)
    assert "(a (2,) fits 2 parameters: 0.bias and 0.scale)" in unknown.reason
    assert number_stages(apart, [stage(*BLOCK)], {}) == order
    assert number_stages(own, [NumberedStage(((slots,),), frozenset())], {}) == order


def test_ranks_of_a_stage_number_the_same():
    one = tuple(Slot(f"a {s}", frozenset({s}), s) for s in BLOCK)
    ranks = NumberedStage(((one,), (one[:1],)), frozenset())
    own = [LayerShapes(0, {"weight": ((2, 2), (2, 2)), "bias": ((2,), (2,))})]

    found = number_stages(own, [ranks], {})

    assert isinstance(found, Unmatched)
    assert "number different parameters" in found.reason


def test_what_is_numbered_first_of_a_layer_that_is_sure_may_be_of_no_tied_one():
    """Its other parameters come later, where a tied module of another stage cannot begin."""
    weight, bias = ((4, 2),), ((4,),)
    sure = Tied((weight, bias), may_be=False)

    assert not none_can_be_tied([[sure], [Tied((weight,), may_be=True)]])
    assert none_can_be_tied([[sure], [Tied((bias,), may_be=True)]])
