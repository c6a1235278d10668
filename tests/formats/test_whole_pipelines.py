"""Pipelines without ZeRO, of every kind of optimizer: each state is the right one, or left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.errors import CorruptError, UnsupportedError
from restride.formats.opening import Told, open_catalog
from restride.testing.contents import file_content
from restride.testing.gather import gather
from restride.testing.saved_values import edit_file
from restride.testing.whole_pipelines import (
    Layer,
    WholePipeline,
    cuts,
    whole_pipelines,
    write_whole_pipeline,
)
from restride.testing.zero_files import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.catalog import Catalog
    from restride.conversion import ConvertReport
    from restride.testing.whole_files import WholeKind

SEEN: Counter[str] = Counter()
KINDS: tuple[WholeKind, ...] = ("bare", "unfused", "flat")


def opened(folder: Path, told: dict[str, tuple[int, ...]] | None) -> Catalog | None:
    """A catalog with the states of its optimizer, or nothing where they are left out."""
    try:
        catalog = open_catalog(folder, told=Told(pp_tied=told))
    except UnsupportedError:
        return None
    is_left_out = any(finding.kind == "unmatched-states" for finding in catalog.findings)
    return None if is_left_out else catalog


def by_order(catalog: Catalog) -> set[str]:
    """Parameters that are said to be told apart by their order alone."""
    notes = (own for own in catalog.findings if own.kind == "numbered-states")
    return {name for note in notes for name in note.details["names"]}


def states(catalog: Catalog, without: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Name, state and elements of all that is a state of the optimizer."""
    for tensor in (own for own in catalog.tensors if own.name not in without):
        for state, entry in tensor.states.items():
            if state in {"fp32", "exp_avg", "momentum_buffer"}:
                own = "exp_avg" if state == "momentum_buffer" else state
                yield tensor.name, own, gather(catalog, entry).view(np.float32)[..., 0]


def require_states(
    catalog: Catalog, pipeline: WholePipeline, alike: set[str], *, is_told: bool = True
) -> None:
    """All that is there is what was written, and nothing that was trained is missing.

    Of weights that are the same, such as ones, nothing tells the order of a script that has its
    own: they are said to be told apart by their order alone.
    """
    names = {
        f"{number}.{name}": f"{pipeline.prefix(number)}{name}"
        for number, layer in enumerate(pipeline.layers)
        for name in layer.parameters
    }
    unsure = alike if pipeline.order in {"reversed", "sorted"} else set()
    unsure = unsure | {names.get(name, name) for name in unsure}
    seen = set()
    for name, state, array in states(catalog, unsure):
        own = name if is_told else names.get(name, name)
        expected = pipeline.run.parameters[own].states[state]
        seen.add((own, state))
        assert np.array_equal(array, expected), (name, state)
    trained = {
        (name, "exp_avg")
        for name, own in pipeline.run.parameters.items()
        if name not in pipeline.frozen and own.states["exp_avg"].size
    }
    assert {(name, state) for name, state in trained if name not in unsure} <= seen


def comparable(path: Path) -> Any:
    content = file_content(path)
    return content["optimizer"] if path.name.startswith("mp_rank") else content


def require_same_files(ours: Path, theirs: Path) -> None:
    names = sorted(file.name for file in (theirs / "step").iterdir())
    assert sorted(file.name for file in (ours / "step").iterdir()) == names
    for name in names:
        found, expected = (comparable(folder / "step" / name) for folder in (ours, theirs))
        assert found == expected, name


def converted(
    folder: Path, pipeline: WholePipeline, starts: tuple[int, ...], zero: int
) -> ConvertReport:
    options = {
        "to": "deepspeed",
        "pp_tied": pipeline.ties,
        "tp": pipeline.tp,
        "zero": zero,
        "dp": 1,
    }
    return api.convert(folder / "source", folder / "out", pp_layers=starts, **options)


def are_groups_known(report: ConvertReport, pipeline: WholePipeline) -> bool:
    """Whether the groups of other stages are those that an engine has.

    Of what has a number and no shape it is not known what it is, and this is said. That one group
    is two with the same settings, of which every stage has one, nobody can know.
    """
    is_said = any(finding.kind == "numbering" for finding in report.findings)
    counts = {len([*pipeline.groups(stage, 0)]) for stage in pipeline.stages}
    are_alike = len({*pipeline.rates}) < len(pipeline.rates)
    return not is_said and (not are_alike or counts == {len(pipeline.rates)})


def law(pipeline: WholePipeline, starts: tuple[int, ...], zero: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_whole_pipeline(folder / "source", pipeline)
        untold = opened(folder / "source", None)
        if untold is not None:
            SEEN[f"{pipeline.kind} untold"] += 1
            require_states(untold, pipeline, by_order(untold), is_told=False)
        told = opened(folder / "source", pipeline.ties)
        if told is None:
            SEEN[f"{pipeline.kind} refused"] += 1
            return
        SEEN[f"{pipeline.kind} told"] += 1
        require_states(told, pipeline, by_order(told))
        try:
            report = converted(folder, pipeline, starts, zero)
        except UnsupportedError:
            SEEN[f"{pipeline.kind} not cut"] += 1
            return
        SEEN[f"{pipeline.kind} cut"] += 1
        # In another cut, shapes may leave several answers, or a layer may be one of two modules.
        again = opened(folder / "out", None if zero else pipeline.ties)
        if again is not None:
            require_states(again, pipeline, by_order(told))
        if not zero and pipeline.order in {"module", "muon"} and are_groups_known(report, pipeline):
            SEEN["compared"] += 1
            write_whole_pipeline(folder / "target", replace(pipeline, starts=starts))
            require_same_files(folder / "out", folder / "target")


def drawn_law(data: Any, kind: WholeKind) -> None:
    pipeline = data.draw(whole_pipelines(kinds=(kind,)))
    assume(any(layer.has_file and layer.parameters for layer in pipeline.layers))
    starts = data.draw(cuts(len(pipeline.layers)))
    law(pipeline, starts, data.draw(st.sampled_from([0, 1])))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=12)
def test_states_are_right_or_left_out_whatever_the_pipeline_and_its_new_stages(kind, data):
    drawn_law(data, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300)
def test_the_same_of_many_more_pipelines(kind, data):
    drawn_law(data, kind)


def test_the_law_above_met_all_kinds():
    assert all(SEEN[f"{kind} told"] > 0 for kind in KINDS)
    assert sum(SEEN[f"{kind} cut"] for kind in KINDS) > 3
    assert SEEN["compared"] > 2


def drift_law(pipeline: WholePipeline) -> None:
    """The same stages get what each of them had of a tied module."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_whole_pipeline(folder / "source", pipeline)
        options = {"to": "deepspeed", "tp": pipeline.tp, "zero": 0, "dp": 1, "replicas": "own"}
        try:
            report = api.convert(
                folder / "source", folder / "out", pp_tied=pipeline.ties, **options
            )
        except (CorruptError, UnsupportedError):
            return  # the states are left out, or nothing says in which order they are
        if any(finding.kind == "numbering" for finding in report.findings):
            return  # a number without a state is left out, which it says
        SEEN["drifted"] += 1
        require_same_files(folder / "out", folder / "source")


@given(whole_pipelines(kinds=KINDS))
@settings(max_examples=10)
def test_copies_of_a_tied_module_that_drifted_stay_what_each_stage_trained(pipeline):
    assume(any(layer.has_file and layer.key for layer in pipeline.layers))
    drift_law(replace(pipeline, drift=0.25))


def layer(number: int, shapes: dict[str, tuple[int, ...]], **more: Any) -> Layer:
    """A layer of drawn weights, those of another number are others."""
    numbers = np.random.default_rng(number)
    parameters = {}
    for name, shape in shapes.items():
        drawn = {s: numbers.normal(size=shape).astype(np.float32) for s in ("fp32", "exp_avg")}
        parameters[name] = Parameter(shape, {"weight": drawn["fp32"], **drawn})
    return Layer(parameters, **more)


TABLE, NORM = {"weight": (5, 3)}, {"weight": (3,), "bias": (3,)}
MODULES = {"a": NORM, "b": {"up": (4, 3), "down": (3, 4)}}


def outcome(pipeline: WholePipeline, starts: tuple[int, ...], zero: int) -> list[str]:
    """What the law came to, which has to hold."""
    before = Counter(SEEN)
    law(pipeline, starts, zero)
    return sorted((SEEN - before).elements())


@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_that_trains_nothing_has_not_stopped_before_the_first_step(zero: int) -> None:
    """Its numbers have no states: taken for trained ones, they took those of all others away."""
    frozen = layer(0, TABLE, frozen=frozenset({"weight"}))
    layers = (frozen, layer(1, TABLE), layer(2, TABLE))
    pipeline = WholePipeline(layers, (0, 1), "bare", gives_frozen=True)

    assert "bare cut" in outcome(pipeline, (0,), zero)


def test_a_module_may_be_in_two_layers_of_one_stage_and_in_one_of_another() -> None:
    tied = layer(0, TABLE, key="a")
    pipeline = WholePipeline((tied, layer(1, NORM), tied, tied), (0, 1), "bare")

    for starts in ((0, 2), (0, 1, 3), (0,)):
        assert "compared" in outcome(pipeline, starts, 0)


def test_a_buffer_of_a_tied_module_is_no_parameter_where_it_has_no_file() -> None:
    tied = layer(0, TABLE, key="a", buffers=("positions",))
    layers = (tied, layer(1, NORM), replace(tied, has_file=False))
    pipeline = WholePipeline(layers, (0, 1), "bare")

    assert "compared" in outcome(pipeline, (0, 2), 0)


def test_a_frozen_tied_module_has_the_first_numbers_among_tied_modules() -> None:
    """Behind the other one, an engine would give its numbers to the one that is trained."""
    tied = layer(0, NORM, key="b", frozen=frozenset(NORM))
    layers = (tied, *(layer(n, TABLE) for n in (1, 2, 3)), layer(4, TABLE, key="a"))
    pipeline = WholePipeline(layers, (0,), "bare", gives_frozen=True)

    assert "compared" in outcome(pipeline, (0, 3), 0)


def test_a_frozen_layer_is_on_the_stage_that_names_its_buffers() -> None:
    frozen = layer(0, TABLE, frozen=frozenset({"weight"}), buffers=("positions",))
    pipeline = WholePipeline((frozen, layer(1, NORM), layer(2, NORM)), (0, 1), "bare")

    assert "bare told" in outcome(pipeline, (0, 1), 0)


def test_a_group_of_parameters_that_are_not_trained_stays_where_they_are_numbered(
    tmp_path: Path,
) -> None:
    odd = layer(0, {"empty": (0, 3), "bias": (3,)})
    group = replace(odd.parameters["bias"], group=1)
    odd = replace(odd, parameters={**odd.parameters, "bias": group})
    frozen = replace(odd, frozen=frozenset({"bias"}))
    pipelines = [
        WholePipeline((one, layer(1, TABLE)), (0,), kind, 1, (0.5, 0.25), gives_frozen=True)
        for one, kind in ((odd, "bare"), (frozen, "unfused"))
    ]

    assert "compared" in outcome(pipelines[0], (0, 1), 0)
    write_whole_pipeline(tmp_path / "source", pipelines[1])
    with pytest.raises(UnsupportedError, match="nothing says on which stages of another cut"):
        converted(tmp_path, pipelines[1], (0, 1), 0)


@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_a_state_that_the_first_parameter_of_a_group_lacks_is_not_lost(
    state: str, tmp_path: Path
) -> None:
    pipeline = WholePipeline((layer(0, TABLE), layer(1, NORM)), (0,), "unfused")
    write_whole_pipeline(tmp_path / "source", pipeline)

    def forget(root: Any) -> None:
        del root["optimizer"]["optimizer_state_dict"]["state"][0][state]

    edit_file(tmp_path / "source" / "step" / "mp_rank_00_model_states.pt", forget)

    with pytest.raises((CorruptError, UnsupportedError), match=state):
        converted(tmp_path, pipeline, (0,), 1)


def test_stages_may_use_tied_modules_in_different_orders() -> None:
    tied = {key: layer(n, shapes, key=key) for n, (key, shapes) in enumerate(MODULES.items())}
    order = ("a", "b", "b", "a")
    layers = (*(tied[key] for key in order), layer(4, TABLE))

    for starts, other in (((0, 2), (0,)), ((0,), (0, 2)), ((0, 2), (0, 3))):
        pipeline = WholePipeline(layers, starts, "bare", rates=(0.5,))
        assert "compared" in outcome(pipeline, other, 0)


def test_a_frozen_tied_module_is_on_the_stages_that_name_its_buffers() -> None:
    tied = layer(0, TABLE, key="a", frozen=frozenset({"weight"}), buffers=("positions",))
    layers = (layer(1, TABLE), tied, layer(2, NORM), tied, layer(3, TABLE))
    pipeline = WholePipeline(layers, (0, 1, 4), "unfused")

    assert "compared" in outcome(pipeline, (0, 2, 4), 0)


def test_weights_have_the_names_that_are_told_where_their_states_have_none(tmp_path: Path) -> None:
    """Ones and zeros leave several ways through the buffer of the first stage."""
    plain = layer(0, {"weight": (3,), "bias": (6,)}, key="a")
    numbers = {name: np.zeros(own.shape, np.float16) for name, own in plain.parameters.items()}
    same = {
        name: replace(own, states={**own.states, "weight": numbers[name], "fp32": numbers[name]})
        for name, own in plain.parameters.items()
    }
    tied = replace(plain, parameters=same)
    pipeline = WholePipeline((tied, layer(1, NORM), tied), (0, 1), "flat", 2)
    write_whole_pipeline(tmp_path / "source", pipeline)

    catalog = open_catalog(tmp_path / "source", told=Told(pp_tied=pipeline.ties))

    (finding,) = catalog.findings
    assert "is several sequences of weights of layers" in finding.message
    assert {tensor.name for tensor in catalog.tensors} == pipeline.run.parameters.keys()
    assert {state for tensor in catalog.tensors for state in tensor.states} == {"weight"}
