"""The real engine of a pipeline resumes from files of other stages and ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from restride import api
from restride.formats.deepspeed._pipeline.partition_methods import balanced_starts, uniform_starts
from restride.storage.torch_zip import open_torch_zip
from restride.testing.gather import gather_all

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_pipeline"
BF16 = {"bf16": {"enabled": True}}
FP32_GRADIENTS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
TIED = ("embed_tied", "block", "function", "block", "norm", "embed_as_head")
HEAD = {"embed": [0, 5]}
PLAIN = ("embed", "block", "block", "norm")
OPTIONS = ("pp_layers", "pp_tied", "replicas", "rules", "hyperparameters")


def job_of(layers: tuple[str, ...], shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A job of the engine for a pipeline of this shape: ``pp``, ``dp``, ``tp``, ``zero``."""
    shape = {key: value for key, value in shape.items() if key not in OPTIONS}
    zero = shape.pop("zero", 1)
    sizes = {"pp": 1, "dp": 1, "tp": 1} | {key: n for key, n in shape.items() if len(key) == 2}
    world = sizes["pp"] * sizes["dp"] * sizes["tp"]
    return {"pipeline": {"layers": layers, **sizes, **shape, **more}, "world": world, "zero": zero}


def convert(source: Path, out: Path, shape: dict[str, Any]) -> Path:
    sizes = {"pp": 1, "dp": 1, "tp": 1, "zero": 1}
    wanted = sizes | {key: shape[key] for key in (*sizes, *OPTIONS) if key in shape}
    api.convert(source, out, to="deepspeed", **wanted)
    return out


def resume_as_from_the_peer(
    engine: Any, require_saved_again: Any, source: Path, folder: Path, target: Any, job: Any
) -> list[str]:
    """Resume from our files, and from the universal folder of DeepSpeed's own converter."""
    out = convert(source, folder / "out", target)
    engine(peer=[source / "step", folder / "peer" / "step"])
    (folder / "peer" / "latest_universal").write_text("step")
    job = {**job, "skip": 2, "steps": 2}

    ours = engine(**job, load=out, resave=folder / "again")
    theirs = engine(**job, load=folder / "peer", universal=True)

    assert ours == theirs
    if target.get("tp", 1) == 1:
        require_saved_again(out, folder / "again")
    else:  # these engines describe their cut by patterns, and we by maps
        expected, held = (gather_all(api.open(path)) for path in (out, folder / "again"))
        assert {key: array.tobytes() for key, array in expected.items()} == {
            key: array.tobytes() for key, array in held.items()
        }
    return ours


def test_more_stages_go_on_as_if_nothing_had_happened(
    engine: Any, require_saved_again: Any, tmp_path: Path
) -> None:
    """The last stage has the tied module of the first, and two stages train no matrix group."""
    source, target = {"pp": 2}, {"pp": 3, "pp_layers": "uniform:6", "pp_tied": HEAD}
    more = {"groups": True, "frozen": True}
    losses = engine(**job_of(TIED, source, **more), steps=2, more=2, save=tmp_path / "source")

    resumed = resume_as_from_the_peer(
        *(engine, require_saved_again, tmp_path / "source", tmp_path, target),
        job_of(TIED, target, **more),
    )

    assert resumed == losses[2:]


def test_two_stages_in_bf16_go_on_in_one(
    engine: Any, require_saved_again: Any, tmp_path: Path
) -> None:
    target = {"pp": 1, "dp": 2}

    resume_as_from_the_peer(
        *(engine, require_saved_again, RECORDED / "tied_z1", tmp_path, target),
        job_of(TIED, target, groups=True, frozen=True, config=BF16),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "source", "target", "more"),
    [
        (TIED, {"pp": 2, "dp": 2}, {"pp": 3, "pp_layers": "parameters", "pp_tied": HEAD}, {}),
        (PLAIN, {"pp": 2}, {"pp": 4, "dp": 2, "pp_layers": "uniform:4"}, {}),
        (PLAIN, {"pp": 2, "dp": 2}, {"pp": 2, "dp": 1}, {"config": FP32_GRADIENTS}),
        (PLAIN, {"pp": 2, "dp": 2}, {"pp": 1, "dp": 3}, {"config": FP32_GRADIENTS}),
        (PLAIN, {"pp": 2, "tp": 2}, {"pp": 1, "tp": 2}, {}),
        (PLAIN, {"pp": 2, "tp": 2}, {"pp": 4, "tp": 1, "pp_layers": "uniform:4"}, {}),
        (
            PLAIN,
            {"pp": 2, "dp": 2},
            {"pp": 1, "dp": 3},
            {"config": {"zero_optimization": {"stage": 1, "parameter_alignment": True}, **BF16}},
        ),
    ],
)
def test_pipelines_of_every_kind_go_on_as_from_the_peer(
    engine: Any,
    require_saved_again: Any,
    tmp_path: Path,
    layers: tuple[str, ...],
    source: dict[str, Any],
    target: dict[str, Any],
    more: dict[str, Any],
) -> None:
    engine(**job_of(layers, source, **more), steps=2, save=tmp_path / "source")
    method = str(target.get("pp_layers", "")).partition(":")[0] or "uniform"

    resume_as_from_the_peer(
        *(engine, require_saved_again, tmp_path / "source", tmp_path, target),
        job_of(layers, target, method=method, **more),
    )


@pytest.mark.thorough
def test_parameters_that_are_dealt_out_in_turn_go_on_where_the_peer_mixes_them_up(
    engine: Any, tmp_path: Path
) -> None:
    source, target = {"pp": 2, "dp": 2}, {"pp": 1, "dp": 3}
    more = {"config": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}}
    losses = engine(**job_of(PLAIN, source, **more), steps=2, more=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(PLAIN, target, **more), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
@pytest.mark.parametrize("target", [{"pp": 1, "dp": 2}, {"pp": 4, "pp_layers": "uniform:4"}])
def test_stages_go_on_with_the_settings_of_the_groups_that_they_have(
    engine: Any, tmp_path: Path, target: dict[str, Any]
) -> None:
    """From a universal folder, stages of norms would get those of the first group."""
    layers, more = ("block", "norm", "norm", "norm"), {"groups": True, "config": FP32_GRADIENTS}
    losses = engine(**job_of(layers, {"pp": 2}, **more), steps=2, more=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(layers, target, **more), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
def test_a_universal_folder_without_buffers_is_cut_into_stages(engine: Any, tmp_path: Path) -> None:
    layers = ("embed_tied", "norm", "norm", "embed_as_head")
    losses = engine(**job_of(layers, {"pp": 2}), steps=2, more=2, save=tmp_path / "source")
    target = {"pp": 3, "pp_layers": "uniform:4", "pp_tied": {"embed": [0, 3]}}

    api.convert(tmp_path / "source", tmp_path / "universal", to="universal")
    out = convert(tmp_path / "universal", tmp_path / "out", target)

    assert engine(**job_of(layers, target), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
def test_the_engine_of_zero_waits_for_ever_where_stages_have_different_groups(engine: Any) -> None:
    """It is why such files are not written."""
    job = job_of(("block", "norm", "norm", "norm"), {"pp": 2}, groups=True, config=BF16)

    with pytest.raises(AssertionError, match="timeout"):
        engine(**job, steps=1, seconds=30)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}},
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}},
        {
            **BF16,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05},
            },
        },
    ],
    ids=["momentum", "Adagrad", "scheduler"],
)
def test_optimizers_and_schedulers_go_on_on_other_stages(
    engine: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    more = {"config": {**config, "zero_allow_untested_optimizer": True}}
    target = {"pp": 4, "pp_layers": "uniform:4"}
    losses = engine(**job_of(PLAIN, {"pp": 2}, **more), steps=2, more=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(PLAIN, target, **more), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
def test_stages_of_one_layer_are_put_together_where_the_peer_divides_by_zero(
    engine: Any, tmp_path: Path
) -> None:
    losses = engine(**job_of(PLAIN, {"pp": 4}), steps=2, more=2, save=tmp_path / "source")
    target = {"pp": 2, "dp": 3, "pp_layers": "uniform:4"}
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        engine(peer=[tmp_path / "source" / "step", tmp_path / "peer" / "step"])

    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(PLAIN, target), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
def test_stages_go_on_without_zero_and_with_it_again(engine: Any, tmp_path: Path) -> None:
    source = {"pp": 2, "dp": 2}
    losses = engine(**job_of(TIED, source), steps=2, more=2, save=tmp_path / "source")

    whole = convert(tmp_path / "source", tmp_path / "whole", {**source, "zero": 0})

    assert engine(**job_of(TIED, {**source, "zero": 0}), skip=2, steps=2, load=whole) == losses[2:]


@pytest.mark.thorough
def test_tensor_parallel_stages_where_there_were_none(engine: Any, tmp_path: Path) -> None:
    """A rule file says how; the engine's losses are those of its own ranks, to the last bits."""
    (tmp_path / "rules.toml").write_text(
        'format = "restride-rules/1"\nrest = "whole"\n'
        '[[rules]]\nmatch = "*.up.*"\nlayout = "column"\n'
        '[[rules]]\nmatch = "*.down.weight"\nlayout = "row"\n'
    )
    losses = engine(**job_of(PLAIN, {"pp": 2}), steps=2, more=2, save=tmp_path / "source")
    target = {"pp": 2, "tp": 2, "rules": tmp_path / "rules.toml"}

    out = convert(tmp_path / "source", tmp_path / "out", target)

    resumed = engine(**job_of(PLAIN, target), skip=2, steps=2, load=out)
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(resumed, losses[2:], strict=True)]
    assert all(abs(a - b) < 1e-5 * abs(b) for a, b in pairs)


@pytest.mark.thorough
def test_copies_of_a_tied_layer_that_drifted_go_on_drifting(engine: Any, tmp_path: Path) -> None:
    layers, shape = ("embed_tied", "block", "block", "norm", "embed_as_head"), {"pp": 2, "dp": 3}
    job = job_of(layers, shape, config=BF16)
    losses = engine(**job, skip=2, steps=2, load=RECORDED / "uneven_z1")

    out = convert(RECORDED / "uneven_z1", tmp_path / "out", {**shape, "replicas": "own"})

    assert engine(**job, skip=2, steps=2, load=out) == losses


@pytest.mark.thorough
def test_in_bf16_without_zero_the_engine_does_not_load_what_it_saved(
    engine: Any, tmp_path: Path
) -> None:
    """It is why such files are not written."""
    job = job_of(PLAIN, {"pp": 2, "zero": 0}, config=BF16)
    engine(**job, steps=1, save=tmp_path / "source")

    with pytest.raises(AssertionError, match="KeyError"):
        engine(**job, skip=1, steps=1, load=tmp_path / "source")


def test_stages_are_those_that_the_engine_computes() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    numbers = random.Random(0)  # noqa: S311 - a seed that is fixed
    for _ in range(400):
        stages = numbers.randint(1, 7)
        weights = [numbers.choice((0, 0, 1, 2, 5, 66, 122)) for _ in range(numbers.randint(1, 12))]

        balanced = [int(start) for start in partition_balanced(weights, stages)]
        uniform = partition_uniform(len(weights), stages)

        assert [*balanced_starts(weights, stages)] == balanced[:-1], (weights, stages)
        assert [*uniform_starts(len(weights), stages)] == uniform[:-1], (weights, stages)


def test_versions_of_the_modules_of_a_layer_are_carried(tmp_path: Path) -> None:
    """The engine of today loses them when it clones the tensors."""
    import shutil

    folder = tmp_path / "source"
    shutil.copytree(RECORDED / "tied_z1", folder)
    file = folder / "step" / "layer_04-model_states.pt"
    state = torch.nn.LayerNorm(6, dtype=torch.bfloat16).state_dict()
    state.update(torch.load(file, weights_only=False))
    torch.save(state, file)

    out = convert(folder, tmp_path / "out", {"pp": 1})

    written = torch.load(out / "step" / file.name, weights_only=False)
    assert written._metadata == {"": {"version": 1}}
    assert open_torch_zip(out / "step" / "layer_00-model_states.pt").value


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "source", "target", "more"),
    [
        (TIED, {"pp": 2}, {"pp": 3, "pp_layers": "uniform:6", "pp_tied": HEAD}, {"groups": True}),
        (TIED, {"pp": 2, "zero": 0}, {"pp": 1, "dp": 2, "zero": 0, "pp_tied": HEAD}, {}),
        (
            TIED,
            {"pp": 2, "zero": 0},
            {"pp": 3, "dp": 2, "pp_layers": "uniform:6", "pp_tied": HEAD},
            {"groups": True},
        ),
        (PLAIN, {"pp": 2, "tp": 2, "zero": 0}, {"pp": 1, "tp": 2, "pp_tied": {}}, {}),
        (PLAIN, {"pp": 1, "dp": 2, "zero": 0}, {"pp": 2, "zero": 0, "pp_tied": {}}, {}),
        (
            ("tied_block", "norm", "tied_block", "norm"),
            {"pp": 2, "zero": 0},
            {"pp": 2, "dp": 2, "pp_tied": {"block": [0, 2]}},
            {},
        ),
    ],
)
def test_stages_without_zero_go_on_as_if_nothing_had_happened(
    engine: Any,
    tmp_path: Path,
    layers: tuple[str, ...],
    source: dict[str, Any],
    target: dict[str, Any],
    more: dict[str, Any],
) -> None:
    losses = engine(
        **job_of(layers, {"zero": 0, **source}, **more), steps=2, more=2, save=tmp_path / "source"
    )

    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(layers, target, **more), skip=2, steps=2, load=out) == losses[2:]


@pytest.mark.thorough
def test_a_universal_folder_is_made_of_stages_without_zero(engine: Any, tmp_path: Path) -> None:
    losses = engine(
        **job_of(TIED, {"pp": 2, "zero": 0}, groups=True), steps=2, more=2, save=tmp_path / "source"
    )

    api.convert(tmp_path / "source", tmp_path / "out", to="universal", pp_tied=HEAD)

    job = job_of(TIED, {"pp": 3, "dp": 1}, groups=True)
    assert engine(**job, skip=2, steps=2, load=tmp_path / "out", universal=True) == losses[2:]


ELASTIC = {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}


@pytest.mark.thorough
@pytest.mark.parametrize("target", [{"pp": 1, "dp": 2}, {"pp": 4, "pp_layers": "uniform:4"}])
def test_stages_without_hyperparameters_go_on_with_those_of_the_engine(
    engine: Any, tmp_path: Path, target: dict[str, Any]
) -> None:
    """The engine misses a step in its own files that its optimizer has no use for."""
    job = job_of(PLAIN, {"pp": 2, "dp": 2}, config=ELASTIC)
    losses = engine(**job, steps=2, more=2, save=tmp_path / "source")
    with pytest.raises(AssertionError, match="AssertionError"):
        engine(**job, skip=2, steps=2, load=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", target)

    resumed = engine(**job_of(PLAIN, target, config=ELASTIC), skip=2, steps=2, load=out)
    assert resumed == losses[2:]


@pytest.mark.thorough
def test_stages_with_given_hyperparameters_go_on_without_zero(engine: Any, tmp_path: Path) -> None:
    job = job_of(PLAIN, {"pp": 2}, config=ELASTIC)
    losses = engine(**job, steps=2, more=2, save=tmp_path / "source")
    settings = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    settings["decoupled_weight_decay"] = True
    (tmp_path / "groups.json").write_text(json.dumps([settings]))

    target = {"pp": 1, "zero": 0, "hyperparameters": tmp_path / "groups.json"}
    out = convert(tmp_path / "source", tmp_path / "out", target)

    assert engine(**job_of(PLAIN, target), skip=2, steps=2, load=out) == losses[2:]


MUON = {
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_scatter": False},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"pp": 2}, {"pp": 2, "dp": 2}),
        ({"pp": 2}, {"pp": 1}),
        ({"pp": 1, "dp": 2}, {"pp": 2, "dp": 2, "pp_layers": "uniform:4"}),
        ({"pp": 2, "tp": 2}, {"pp": 1, "tp": 2}),
    ],
)
def test_muon_sorts_the_parameters_of_every_stage(
    engine: Any, tmp_path: Path, source: dict[str, Any], target: dict[str, Any]
) -> None:
    losses = engine(**job_of(PLAIN, source, config=MUON), steps=2, more=2, save=tmp_path / "source")

    out = convert(tmp_path / "source", tmp_path / "out", target)

    resumed = engine(**job_of(PLAIN, target, config=MUON), skip=2, steps=2, load=out)
    assert resumed == losses[2:]
