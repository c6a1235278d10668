"""The real engine resumes experts of its own MoE layer on other ranks and at other stages."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.comparison import diff

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

# How tensor-parallel ranks cut experts, and the one beside them; all else is whole.
RULES = """
format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "**.up.{weight,bias}"
layout = "column"
[[rules]]
match = "**.down.weight"
layout = "row"
"""


def test_training_in_float32_goes_on_bit_for_bit_on_more_ranks_and_on_fewer_again(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Every rank sees the same tokens, and so every expert gets the same gradients."""
    model = {"model": "native_residual_moe", "dtype": "fp32"}
    two, four = ({**model, "world": ranks, "ep": ranks} for ranks in (2, 4))
    never_stopped = engine(**two, zero=1, steps=1, save=tmp_path / "source", more=2)

    api.convert(tmp_path / "source", tmp_path / "four", to="deepspeed", dp=4, ep=4, zero=2)
    job = {**four, "zero": 2, "skip": 1, "steps": 1, "save": tmp_path / "later"}
    on_four = engine(**job, load=tmp_path / "four", resave=tmp_path / "four again")

    api.convert(tmp_path / "later", tmp_path / "one", to="deepspeed", dp=1, ep=1, zero=0)
    job = {**model, "world": 1, "ep": 1, "zero": 0, "skip": 2, "steps": 1}
    on_one = engine(**job, load=tmp_path / "one", resave=tmp_path / "one again")

    assert [*never_stopped[:1], *on_four, *on_one] == never_stopped
    require_saved_again(tmp_path / "four", tmp_path / "four again")
    require_saved_again(tmp_path / "one", tmp_path / "one again")


def test_training_in_bfloat16_goes_on_bit_for_bit_on_more_data_parallel_ranks(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Experts on as many ranks as before: gradients are rounded to bfloat16 on the same tokens."""
    model = {"model": "native_moe", "ep": 2}
    never_stopped = engine(**model, world=2, zero=0, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", dp=4, zero=0)

    job = {**model, "world": 4, "zero": 0, "skip": 1, "steps": 1}
    later = engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    assert [*never_stopped[:1], *later] == never_stopped
    require_saved_again(tmp_path / "out", tmp_path / "again")


@pytest.mark.thorough
def test_whole_experts_go_to_more_tensor_parallel_ranks_bit_for_bit(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """These see the same tokens, of which each expert gets as many as before."""
    model = {"model": "native_residual_moe", "dtype": "fp32"}
    two, four = ({**model, "world": 4, "tp": tp, "ep": tp} for tp in (2, 4))
    never_stopped = engine(**two, zero=1, steps=1, save=tmp_path / "source", more=2)

    api.convert(tmp_path / "source", tmp_path / "four", to="deepspeed", tp=4, dp=1, ep=4, zero=2)
    job = {**four, "zero": 2, "skip": 1, "steps": 1, "save": tmp_path / "later"}
    on_four = engine(**job, load=tmp_path / "four", resave=tmp_path / "four again")

    api.convert(tmp_path / "later", tmp_path / "two", to="deepspeed", tp=2, dp=1, ep=2, zero=0)
    job = {**two, "world": 2, "zero": 0, "skip": 2, "steps": 1}
    on_two = engine(**job, load=tmp_path / "two", resave=tmp_path / "two again")

    assert [*never_stopped[:1], *on_four, *on_two] == never_stopped
    for name in ("four", "two"):
        again = tmp_path / f"{name} again"
        require_saved_again(tmp_path / name, again, "universal_checkpoint_info")


def test_experts_come_to_tensor_parallel_ranks_that_cut_them_bit_for_bit(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Five columns, of which two ranks have three and two."""
    model = {"model": "native_residual_moe", "dtype": "fp32", "ep": 2}
    never_stopped = engine(**model, world=2, zero=1, steps=1, save=tmp_path / "source", more=2)
    (tmp_path / "rules.toml").write_text(RULES, "utf-8")

    cut = {**model, "world": 4, "tp": 2, "cut_experts": True, "zero": 1}
    to = {"to": "deepspeed", "rules": tmp_path / "rules.toml"}
    api.convert(tmp_path / "source", tmp_path / "cut", **to, tp=2, dp=2, ep=2, zero=1)
    job = {**cut, "skip": 1, "steps": 1, "save": tmp_path / "later"}
    on_two = engine(**job, load=tmp_path / "cut", resave=tmp_path / "cut again")

    api.convert(tmp_path / "later", tmp_path / "one", to="deepspeed", tp=1, dp=1, ep=1, zero=2)
    job = {**model, "ep": 1, "world": 1, "zero": 2, "skip": 2, "steps": 1}
    on_one = engine(**job, load=tmp_path / "one", resave=tmp_path / "one again")

    assert [*never_stopped[:1], *on_two, *on_one] == never_stopped
    require_saved_again(tmp_path / "cut", tmp_path / "cut again", "universal_checkpoint_info")
    require_saved_again(tmp_path / "one", tmp_path / "one again")


@pytest.mark.thorough
def test_experts_that_are_cut_after_data_parallelism_go_on_bit_for_bit(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Neighbours among the data-parallel ranks of each tensor-parallel one share experts."""
    config = {"use_data_before_expert_parallelism": True}
    model = {"model": "native_moe", "dtype": "fp32", "cut_experts": True, "config": config}
    job = {**model, "world": 4, "tp": 2, "ep": 1, "zero": 1}
    never_stopped = engine(**job, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", tp=2, dp=4, ep=2, zero=2)

    job = {**model, "world": 8, "tp": 2, "ep": 2, "zero": 2, "skip": 1, "steps": 1}
    later = engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    assert [*never_stopped[:1], *later] == never_stopped
    require_saved_again(tmp_path / "out", tmp_path / "again", "universal_checkpoint_info")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tp", "world", "ep", "config", "saved"),
    [
        (2, 2, 1, {}, ["00"]),
        (4, 4, 2, {}, ["00", "01"]),
        (2, 4, 2, {"use_data_before_expert_parallelism": True}, ["00"]),
    ],
)
def test_no_engine_saves_all_of_whole_experts_where_expert_parallel_ranks_do_not_span_the_others(
    engine, tmp_path: Path, tp, world, ep, config, saved
) -> None:
    """So nothing is converted for one: it would lose what it trains."""
    job = {"model": "native_moe", "dtype": "fp32", "world": world, "tp": tp, "ep": ep, "zero": 1}

    engine(**job, config=config, steps=1, save=tmp_path / "out")

    models = sorted((tmp_path / "out" / "step").glob("mp_rank_*_model_states.pt"))
    assert [path.name[8:10] for path in models] == saved


def test_no_engine_trains_such_experts_with_zero_3(engine, tmp_path: Path) -> None:
    """So nothing is converted for one."""
    with pytest.raises(AssertionError, match="Native DeepSpeed MoE is not supported with ZeRO"):
        engine(model="native_moe", world=1, ep=1, zero=3, steps=1, save=tmp_path / "out")


def test_an_engine_with_all_experts_on_every_rank_resumes_from_a_universal_folder(
    engine, tmp_path: Path
) -> None:
    """One with fewer takes the first ones for its own, which the conversion warns of."""
    model = {"model": "native_moe", "zero": 1}
    engine(**model, world=2, ep=2, steps=1, save=tmp_path / "source")
    api.convert(tmp_path / "source", tmp_path / "folder", to="universal")
    tag = (tmp_path / "folder" / "latest_universal").read_text()
    (tmp_path / "folder" / "latest").write_text(tag)

    job = {**model, "world": 2, "universal": True, "load": tmp_path / "folder", "skip": 1}
    (right,) = engine(**job, ep=1, steps=1, resave=tmp_path / "again")
    (wrong,) = engine(**job, ep=2, steps=1)

    report = diff(tmp_path / "source", tmp_path / "again")
    assert report.verdict == "same"
    assert float.fromhex(wrong) != pytest.approx(float.fromhex(right), rel=1e-4)


# Two parameters of experts, on two and on four ranks, as two processes split them into groups.
SPLIT = """
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
for param, ranks in zip(params[1:], (2, 4)):
    param.allreduce, param.group_name = False, f"ep_size_{ranks}"
print(*(group["name"] for group in split({"params": params, "name": "dense"})))
"""


@pytest.mark.thorough
def test_the_engine_orders_groups_of_several_expert_parallel_sizes_by_chance() -> None:
    """Ranks that hash otherwise have them in other orders: model files speak for one rank alone."""
    pytest.importorskip("deepspeed")

    said = [
        subprocess.run(
            [sys.executable, "-c", SPLIT],
            env={**os.environ, "PYTHONHASHSEED": seed, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("0", "1")
    ]

    assert said == ["dense ep_size_2 ep_size_4", "dense ep_size_4 ep_size_2"]
