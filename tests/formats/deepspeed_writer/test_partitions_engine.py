"""The real engine resumes from ZeRO-1 and ZeRO-2 files of other ranks than those that trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.testing.contents import file_content
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

STATES = ("/fp32", "/exp_avg", "/exp_avg_sq")


def require_saved_again(ours: Path, theirs: Path, *ignored: str) -> None:
    """What an engine saves before its first step is what it loaded: the very same files.

    Not the same is its own configuration, and what is `ignored`.
    """
    names = sorted(path.name for path in (ours / "step").iterdir())
    assert names == sorted(path.name for path in (theirs / "step").iterdir())
    for name in names:
        found, expected = (file_content(folder / "step" / name) for folder in (ours, theirs))
        for content in (found, expected):
            content.pop("ds_config")
            for key in ignored:
                content.pop(key, None)
                content.get("optimizer_state_dict", {}).pop(key, None)
        assert found == expected, name


def require_same_states(one: Path, other: Path) -> None:
    states = [gather_all(api.open(folder)) for folder in (one, other)]
    assert len(states[0]) > 60
    assert states[0].keys() == states[1].keys()
    for key, array in states[0].items():
        assert array.tobytes() == states[1][key].tobytes(), key


def train_as_from_the_peer(engine, source: Path, folder: Path, target: dict, job: dict) -> None:
    """Resume twice: from our files, and from the universal folder of DeepSpeed's own converter."""
    api.convert(source, folder / "ours", to="deepspeed", **target)
    engine(peer=[source / "step", folder / "peer" / "step"])
    (folder / "peer" / "latest_universal").write_text("step")
    job = {**job, "world": target["tp"] * target["dp"], "steps": 2, **target}
    del job["dp"]

    ours = engine(**job, load=folder / "ours", resave=folder / "again", save=folder / "one")
    theirs = engine(**job, load=folder / "peer", universal=True, save=folder / "other")

    assert ours == theirs
    require_same_states(folder / "one", folder / "other")
    require_saved_again(folder / "ours", folder / "again")


def test_fewer_tensor_parallel_ranks_train_as_from_a_universal_folder(
    engine, shared: Path, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "llama_tp2_z1"
    target = {"tp": 1, "dp": 2, "zero": 2}

    train_as_from_the_peer(engine, source, tmp_path, target, {"model": "llama"})


@pytest.mark.thorough
def test_a_permuted_weight_is_joined(engine, shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "codegen_fused_tp2dp2_z1"
    target = {"tp": 1, "dp": 3, "zero": 1}

    train_as_from_the_peer(engine, source, tmp_path, target, {"model": "codegen"})


def test_more_tensor_parallel_ranks_than_there_were(engine, tmp_path: Path) -> None:
    """The peer has no conversion for it: the engine's own cut is the witness, and the loss."""
    job = {"model": "llama", "dtype": "fp32"}
    before = engine(**job, world=2, zero=2, steps=2, more=1, save=tmp_path / "source")

    api.convert(tmp_path / "source", tmp_path / "ours", to="deepspeed", tp=2, dp=1, zero=1)

    after = engine(
        **job, world=2, tp=2, zero=1, skip=2, steps=1, load=tmp_path / "ours", resave=tmp_path / "x"
    )
    assert float.fromhex(after[0]) == pytest.approx(float.fromhex(before[-1]), rel=1e-6)
    require_saved_again(tmp_path / "ours", tmp_path / "x")
    engine(peer=[tmp_path / "ours" / "step", tmp_path / "universal"])
    torch = pytest.importorskip("torch")
    for key, expected in gather_all(api.open(tmp_path / "source")).items():
        if key.endswith(STATES):
            read = torch.load(tmp_path / "universal" / "zero" / f"{key}.pt", weights_only=False)
            assert read["param"].numpy().tobytes() == expected.tobytes(), key


@pytest.mark.parametrize(
    ("zero", "config"),
    [
        (2, {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}),
        (1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    ],
    ids=["round robin and alignment", "BF16_Optimizer"],
)
def test_training_that_was_elsewhere_meanwhile_goes_on_as_if_it_never_stopped(
    engine, tmp_path: Path, zero: int, config: dict
) -> None:
    """Two ranks, three ranks, and the two again."""
    job = {"model": "gpt2", "zero": zero, "config": config}
    unbroken = engine(**job, world=2, steps=2, more=2, save=tmp_path / "source")

    api.convert(tmp_path / "source", tmp_path / "three", to="deepspeed", dp=3)
    api.convert(tmp_path / "three", tmp_path / "two", to="deepspeed", dp=2)

    engine(**job, world=3, load=tmp_path / "three", resave=tmp_path / "three again")
    # DeepSpeed writes the fragments of a round robin in the order before it, and never reads them.
    ignored = ["param_slice_mappings"] if "zero_optimization" in config else []
    require_saved_again(tmp_path / "three", tmp_path / "three again", *ignored)
    assert engine(**job, world=2, skip=2, steps=2, load=tmp_path / "two") == unbroken[2:]


def test_groups_and_frozen_parameters_are_those_of_the_engine(engine, tmp_path: Path) -> None:
    """Frozen rows become whole; vectors have settings of their own; momentum, and a scheduler."""
    config = {
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    }
    frozen = ["q_proj", "layers.0.input_layernorm"]
    vectors = {"weight_decay": 0.0, "momentum": 0.5}
    job = {"model": "llama", "freeze": frozen, "vectors": vectors, "config": config}
    source = tmp_path / "source"
    engine(**job, world=2, tp=2, zero=1, steps=2, save=source)

    for tp, dp, zero in ((1, 3, 2), (2, 1, 2)):
        out, again = tmp_path / f"{tp}", tmp_path / f"{tp} again"
        api.convert(source, out, to="deepspeed", tp=tp, dp=dp, zero=zero)
        engine(**job, world=tp * dp, tp=tp, zero=zero, load=out, resave=again)
        require_saved_again(out, again)


def test_ranks_without_a_head_list_what_they_do_not_have(engine, tmp_path: Path) -> None:
    """One K/V head on two ranks: the second one has no attention."""
    job = {"model": "llama", "kv_heads": 1, "zero": 2}
    source, same, joined = (tmp_path / name for name in ("source", "same", "joined"))
    engine(**job, world=2, tp=2, steps=2, save=source)

    api.convert(source, same, to="deepspeed")
    api.convert(source, joined, to="deepspeed", tp=1, dp=3)

    # DeepSpeed's map of what a rank has nothing of is a box without elements; ours has no box.
    require_saved_again(same, source, "universal_checkpoint_info")
    engine(**job, world=3, load=joined, resave=tmp_path / "again")
    require_saved_again(joined, tmp_path / "again")
