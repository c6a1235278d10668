"""Muon's momentum in the files of every stage, and its groups in the order that an engine has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from restride import api
from restride.checkpoint.catalog import TensorEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.training import ModelRank, ParameterGroup, Training
from restride.errors import UnsupportedError
from restride.formats.deepspeed._writing.muon_order import in_muon_order
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.layouts import replicated, split
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_optimizers"
STATES = ("weight", "fp32", "momentum_buffer")
MATRICES = {"0.weight": (7, 6), "3.weight": (5, 7)}
FLOATS = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}


def parameter(shape: tuple[int, ...], number: int, dim: int | None = None) -> Parameter:
    """One that two ranks cut in halves, or have whole."""
    cut = None if dim is None else (dim, (shape[dim] // 2,) * 2)
    states = {s: distinct(shape, 10_000 * number + 1000 * k) for k, s in enumerate(STATES)}
    return Parameter(shape, states, cut)


def layer(number: int) -> dict[str, Parameter]:
    """Two matrices of one shape that become two, and two of two shapes that become one."""
    first = 10 * number
    return {
        f"layer.{number}.down": parameter((4, 8), first, 1),
        f"layer.{number}.q": parameter((4, 4), first + 1, 0),
        f"layer.{number}.o": parameter((4, 4), first + 2, 1),
        f"layer.{number}.up": parameter((8, 4), first + 3, 0),
    }


def members(folder: Path, group: int = 0) -> list[str]:
    """Names of a group, in the order of its buffer."""
    (file,) = (
        path for path in folder.rglob("*mp_rank_00_model_states.pt") if "_1_" not in path.name
    )
    found: list[str] = []
    edit_file(file, lambda root: found.extend(root["param_shapes"][group]))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "target", [{"zero": 0}, {"dp": 1, "zero": 1}, {"dp": 3, "zero": 2}, {"zero": 3}]
)
def test_a_recorded_run_keeps_every_state_at_every_stage(tmp_path, stage, target):
    source = RECORDED / f"muon_z{stage}"

    api.convert(source, tmp_path / "out", to="deepspeed", **target)

    expected, found = (gather_all(api.open(path)) for path in (source, tmp_path / "out"))
    kept = {key for key in expected if key.endswith(("/fp32", "/momentum_buffer", "/exp_avg"))}
    assert len(kept) == 5 + 2 + 3
    for key in kept:
        assert np.array_equal(found[key], expected[key]), key


def test_a_rank_has_the_momentum_of_all_that_it_has_a_part_of(tmp_path):
    """42 and 35 elements, in partitions of 26 on three ranks."""
    api.convert(RECORDED / "muon_z1", tmp_path / "out", to="deepspeed", dp=3)

    entries = {tensor.name: tensor.states for tensor in api.open(tmp_path / "out").tensors}
    held = {
        name: [entries[name]["momentum_buffer"].layout.shard_numel(rank) for rank in range(3)]
        for name in MATRICES
    }
    assert held == {"0.weight": [42, 42, 0], "3.weight": [0, 35, 35]}


def test_a_rank_with_nothing_to_update_has_no_momentum(tmp_path):
    """On 64 ranks partitions are of two elements, and the last 25 have none."""
    api.convert(RECORDED / "muon_z1", tmp_path / "out", to="deepspeed", dp=64)

    seen: list[object] = []
    for rank in (38, 39):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        edit_file(
            tmp_path / "out" / "step" / name,
            lambda root: seen.append(
                [*root["optimizer_state_dict"]["base_optimizer_state"]["state"]]
            ),
        )
    assert seen == [[0, 1], [1]]
    found, expected = (
        gather_all(api.open(path)) for path in (tmp_path / "out", RECORDED / "muon_z1")
    )
    for name in MATRICES:
        key = f"{name}/momentum_buffer"
        assert np.array_equal(found[key], expected[key])


@pytest.mark.parametrize(
    "config",
    [FLOATS, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}],
    ids=["BF16_Optimizer", "offload_optimizer"],
)
def test_where_the_engine_cuts_the_momentum_it_is_cut(tmp_path, config):
    source = shutil.copytree(RECORDED / "muon_z3", tmp_path / "source")
    for file in source.glob("step/*model_states.pt"):
        edit_file(file, lambda root: root["ds_config"].update(config))

    report = api.convert(source, tmp_path / "out", to="deepspeed", zero=1)

    (note,) = (finding.message for finding in report.findings if finding.kind == "muon-momentum")
    assert "cut like the weights" in note
    found, expected = (gather_all(api.open(path)) for path in (tmp_path / "out", source))
    entries = {tensor.name: tensor.states for tensor in api.open(tmp_path / "out").tensors}
    for name, shape in MATRICES.items():
        layout = entries[name]["momentum_buffer"].layout
        assert sum(layout.shard_numel(rank) for rank in range(2)) == np.prod(shape)
        assert np.array_equal(found[f"{name}/momentum_buffer"], expected[f"{name}/momentum_buffer"])


def test_other_ranks_sort_by_the_sizes_of_their_own_shards(tmp_path):
    """Whole, `up` is larger than `down`; halved they are alike, and the model tells the order."""
    run = ZeroRun(1, 2, {**layer(0), **layer(1)}, is_muon=True)
    write_zero_run(tmp_path / "two", run)

    api.convert(tmp_path / "two", tmp_path / "one", to="deepspeed", tp=1)

    assert members(tmp_path / "two") == [
        *("layer.0.down", "layer.0.up", "layer.1.down", "layer.1.up"),
        *("layer.0.o", "layer.1.o", "layer.0.q", "layer.1.q"),
    ]
    assert members(tmp_path / "one") == [
        *("layer.0.up", "layer.1.up"),
        *("layer.0.down", "layer.1.down"),
        *("layer.0.q", "layer.0.o", "layer.1.q", "layer.1.o"),
    ]


# Name: shape, and the dimension that tensor-parallel ranks cut, in the order of the model.
SHAPES = {"down": ((4, 8), 1), "q": ((4, 4), 0), "o": ((4, 4), 1), "up": ((8, 4), 0)}
MUON = {"optimizer": {"type": "Muon"}}


def cut(tp: int, shapes: dict[str, tuple[tuple[int, ...], int]]) -> dict:
    return {
        name: split(shape, mesh={"tp": tp}, dim=dim)
        if tp > 1
        else replicated(shape, mesh={"tp": 1})
        for name, (shape, dim) in shapes.items()
    }


def ordered(names, *, tp, source="deepspeed zero-1", shapes=SHAPES, target=None, **more) -> str:
    """The order of a group for a target, from the one that the source has."""
    held, layouts = cut(tp[0], shapes), target or cut(tp[1], shapes)
    group = ParameterGroup(tuple(names.split()), {"use_muon": True}, {}, tuple(names.split()))
    config = more.pop("config", None)
    rank = ModelRank("file", {} if config is None else {"ds_config": config}, {})
    training = Training("step", DTYPES["float32"], tuple(shapes), (group,), {}, (rank,), {})
    tensors = {name: TensorEntry(name, "parameter", held[name], {}) for name in shapes}
    run = DeepSpeedTarget(tp[1], 1, **{"zero": 1, **more})
    training, findings = in_muon_order(training, tensors, layouts, target=run, source=source)
    (found,) = training.groups
    assert {finding.kind for finding in findings} <= {"muon-order"}
    if more.get("zero") == 3:  # it is told of where an engine could have another order
        by_size = sorted(found.names, key=lambda n: layouts[n].shard_shape(0), reverse=True)
        assert bool(findings) == (" ".join(by_size) != " ".join(n for n in shapes))
    assert found.listed == found.names
    return " ".join(found.names)


def test_sizes_follow_the_ranks_and_ties_follow_the_model():
    assert ordered("up down q o", tp=(1, 2)) == "down up o q"
    assert ordered("down up o q", tp=(2, 1)) == "up down q o"


@pytest.mark.parametrize(("zero_init", "order"), [(False, "down up o q"), (True, "down q o up")])
def test_for_zero_3_somebody_says_whether_the_shapes_were_empty_when_it_sorted(zero_init, order):
    """An engine takes what it reads for the parameter that it has at this place."""
    for given in ("up down q o", "down up o q"):
        tp = (1, 2) if given.startswith("up") else (2, 2)
        with pytest.raises(UnsupportedError, match=r"mix them up .*--zero-init or --no-zero-init"):
            ordered(given, tp=tp, zero=3)
        assert ordered(given, tp=tp, zero=3, zero_init=zero_init) == order


def test_a_source_of_zero_3_shows_it():
    three = {"zero": 3, "source": "deepspeed zero-3"}

    assert ordered("up down q o", tp=(1, 2), **three) == "down up o q"
    assert ordered("down q o up", tp=(1, 2), **three) == "down q o up"
    assert ordered("down q o up", tp=(1, 2), **three, zero_init=False) == "down up o q"
    assert ordered("up down q o", tp=(1, 1), **three, zero_init=True) == "down q o up"


def test_what_is_of_one_order_either_way_needs_no_word():
    shapes = {"up": ((8, 4), 0), "wide": ((6, 8), 1)}

    assert ordered("up wide", tp=(1, 1), zero=3, shapes=shapes) == "up wide"
    with pytest.raises(UnsupportedError, match="--no-zero-init"):  # halved, `wide` is larger
        ordered("up wide", tp=(1, 2), zero=3, source="deepspeed zero-3", shapes=shapes)


def test_an_order_of_the_scripts_own_is_lost_where_nothing_sorts():
    with pytest.raises(UnsupportedError, match="would keep: it is not known"):
        ordered("up down o q", tp=(1, 1), zero=3, zero_init=True)


def test_only_zero_3_empties_shapes():
    with pytest.raises(UnsupportedError, match="not for ZeRO-2"):
        DeepSpeedTarget(1, 1, 2, zero_init=False)


def test_parameters_in_an_order_of_the_scripts_own_keep_it_where_it_tells_all():
    assert ordered("up down o q", tp=(1, 1)) == "up down o q"

    with pytest.raises(
        UnsupportedError, match=r"'(up|down)' or '(up|down)' comes first .*\(4, 4\)"
    ):
        ordered("up down o q", tp=(1, 2))


def test_what_was_made_under_zero_init_is_sorted_by_an_engine_of_another_stage():
    model = "down q o up"

    assert ordered(model, tp=(1, 1), source="deepspeed zero-3", zero=3, config=MUON) == model
    assert ordered(model, tp=(1, 1), zero=2, config=MUON) == "up down q o"
    with pytest.raises(UnsupportedError, match="does not say that it is DeepSpeed's"):
        ordered(model, tp=(1, 1), zero=2)


def test_ranks_with_shards_of_their_own_sizes_have_no_order_in_common():
    """Rows 3 and 2 of one matrix, 2 and 2 of a wider one: the ranks would disagree."""
    target = {
        "a": split((5, 2), mesh={"tp": 2}, sizes=(3, 2)),
        "b": split((4, 4), mesh={"tp": 2}),
    }

    with pytest.raises(UnsupportedError, match="different sizes on the 2 ranks"):
        ordered("a b", tp=(1, 2), shapes={"a": ((5, 2), 0), "b": ((4, 4), 0)}, target=target)
