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
