"""The real engine resumes experts on more and on fewer ranks than they were trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.comparison import diff

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

MIXTRAL = {"model": "mixtral", "config": {"expert_parallel": {"preset_model": "mixtral"}}}


def test_training_goes_on_bit_for_bit_on_more_ranks_and_on_fewer_again(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """In float32 the sums over more ranks would round differently, here they do not."""
    two, four = ({**MIXTRAL, "world": ranks, "ep": ranks} for ranks in (2, 4))
    never_stopped = engine(**two, zero=1, steps=1, save=tmp_path / "source", more=2)

    api.convert(tmp_path / "source", tmp_path / "four", to="deepspeed", dp=4, ep=4)
    job = {**four, "zero": 1, "skip": 1, "steps": 1, "save": tmp_path / "later"}
    on_four = engine(**job, load=tmp_path / "four", resave=tmp_path / "four again")

    api.convert(tmp_path / "later", tmp_path / "two", to="deepspeed", dp=2, ep=2, zero=3)
    job = {**two, "zero": 3, "skip": 2, "steps": 1}
    on_two = engine(**job, load=tmp_path / "two", resave=tmp_path / "two again")

    assert [*never_stopped[:1], *on_four, *on_two] == never_stopped
    require_saved_again(tmp_path / "four", tmp_path / "four again")
    require_saved_again(tmp_path / "two", tmp_path / "two again")


def test_without_zero_every_expert_rank_has_an_optimizer_of_its_own(
    engine, require_saved_again, shared: Path, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "mixtral_ep2_z1"

    api.convert(source, tmp_path / "out", to="deepspeed", dp=4, ep=4, zero=0)

    job = {**MIXTRAL, "world": 4, "ep": 4, "zero": 0}
    engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    require_saved_again(tmp_path / "out", tmp_path / "again")


def test_an_engine_in_which_every_rank_has_all_experts_saves_again_what_it_was_given(
    engine, require_saved_again, shared: Path, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "mixtral_ep2_z3"

    api.convert(source, tmp_path / "out", to="deepspeed", ep=1, zero=2)

    job = {**MIXTRAL, "world": 2, "ep": 1, "zero": 2}
    engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    require_saved_again(tmp_path / "out", tmp_path / "again")


def test_training_goes_on_bit_for_bit_where_experts_fold_tensor_parallel_ranks(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Four expert-parallel ranks over two tensor-parallel and two data-parallel ones."""
    preset = {"preset_model": "mixtral"}
    config = {"expert_parallel": preset, "tensor_parallel": preset}
    folded = {"model": "mixtral", "config": config, "tp": 2}
    two, four = {**folded, "world": 2, "ep": 2}, {**folded, "world": 4, "ep": 4}
    never_stopped = engine(**two, zero=1, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "four", to="deepspeed", dp=2, ep=4, zero=2)
    job = {**four, "zero": 2, "skip": 1, "steps": 1}
    on_four = engine(**job, load=tmp_path / "four", resave=tmp_path / "four again")

    assert [*never_stopped[:1], *on_four] == never_stopped
    require_saved_again(tmp_path / "four", tmp_path / "four again")


def test_without_zero_training_goes_on_bit_for_bit_where_experts_fold_others(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Every pair of an expert-parallel and a tensor-parallel rank has an optimizer of its own."""
    preset = {"preset_model": "mixtral"}
    config = {"expert_parallel": preset, "tensor_parallel": preset}
    folded = {"model": "mixtral", "config": config, "tp": 2, "dtype": "fp32"}
    two, four = {**folded, "world": 2, "ep": 2}, {**folded, "world": 4, "ep": 4}
    never_stopped = engine(**two, zero=0, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "four", to="deepspeed", dp=2, ep=4)
    on_four = engine(
        **four, zero=0, skip=1, steps=1, load=tmp_path / "four", resave=tmp_path / "again"
    )

    assert [*never_stopped[:1], *on_four] == never_stopped
    require_saved_again(tmp_path / "four", tmp_path / "again")


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_folded_experts_come_to_an_engine_with_zero_and_to_one_without(
    source: int, target: int, engine, tmp_path: Path
) -> None:
    """In fp32 an optimizer without ZeRO has no loss scale, which that of ZeRO writes again."""
    preset = {"preset_model": "mixtral"}
    config = {"expert_parallel": preset, "tensor_parallel": preset}
    job = {"model": "mixtral", "config": config, "tp": 2, "world": 2, "ep": 2, "dtype": "fp32"}
    never_stopped = engine(**job, zero=source, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", zero=target)
    later = engine(
        **job, zero=target, skip=1, steps=1, load=tmp_path / "out", resave=tmp_path / "again"
    )

    assert [*never_stopped[:1], *later] == never_stopped
    assert diff(tmp_path / "out", tmp_path / "again").verdict == "same"


@pytest.mark.thorough
def test_experts_go_from_ranks_without_tensor_parallelism_to_folded_ones(
    engine, require_saved_again, tmp_path: Path
) -> None:
    """Every one of four tensor-parallel ranks has the experts of one of two groups."""
    engine(**MIXTRAL, world=2, ep=2, zero=2, steps=1, save=tmp_path / "source")

    api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", tp=4, dp=1, ep=2, zero=3)

    preset = {"preset_model": "mixtral"}
    config = {"expert_parallel": preset, "tensor_parallel": preset}
    job = {"model": "mixtral", "config": config, "world": 4, "tp": 4, "ep": 2, "zero": 3}
    engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    require_saved_again(tmp_path / "out", tmp_path / "again")
