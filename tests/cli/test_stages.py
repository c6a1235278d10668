"""`restride convert --to deepspeed --pp ...`: what is said of the stages of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restride.testing.command_line import run

PIPELINE = Path(__file__).parents[1] / "data" / "deepspeed_pipeline" / "tied_z1"


def convert(out: Path, *options: str):
    return run("convert", str(PIPELINE), str(out), "--to", "deepspeed", *options)


def test_stages_are_said_by_their_first_layers_and_the_uses_of_tied_modules(tmp_path):
    ran = convert(
        tmp_path / "out", "--pp-layers", "0,3,4", "--pp-tied", "embed=0", "--pp-tied", "embed=5"
    )

    assert ran.code == 0, ran.err
    assert "the stages begin with layers 0, 3, 4 (as said)" in ran.out
    assert "written by 6 ranks (pp=3,dp=2,tp=1)" in run("info", str(tmp_path / "out")).out


def test_a_dry_run_tells_the_stages_and_writes_nothing(tmp_path):
    ran = convert(tmp_path / "out", "--pp", "1", "--dp", "1", "--dry-run", "--json")

    assert ran.code == 0, ran.err
    files = [name for name in json.dumps(json.loads(ran.out)).split('"') if "optim_states" in name]
    assert files == ["step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "said", ["embed", "=1", "embed=", "embed=0,x", "embed=-1", "embed=1234567890"]
)
def test_what_says_no_layers_of_a_tied_module_is_a_wrong_command(said, tmp_path):
    ran = convert(tmp_path / "out", "--pp-tied", said)

    assert ran.code == 2
    assert "does not say which layers use a tied module: as embed=0,8" in " ".join(ran.err.split())


def test_what_is_not_told_is_asked_for(tmp_path):
    ran = convert(tmp_path / "out", "--pp", "3")

    assert ran.code == 2
    assert "as --pp-tied embed=0,5" in ran.err
    assert not any(tmp_path.iterdir())


def test_other_formats_have_no_stages(tmp_path):
    ran = run("convert", str(PIPELINE), str(tmp_path / "out"), "--pp", "3")

    assert ran.code == 2
    assert "safetensors takes no --pp" in ran.err


def test_without_zero_it_is_told_that_no_layer_is_tied(tmp_path):
    source = str(PIPELINE.with_name("fp32_z0"))
    options = (source, str(tmp_path / "out"), "--to", "deepspeed", "--pp", "1")

    asked = run("convert", *options)
    told = run("convert", *options, "--pp-tied", "none")

    assert asked.code == 2
    assert "say --pp-tied none if none are" in " ".join(asked.err.split())
    assert told.code == 0, told.err
    assert (tmp_path / "out").is_dir()
    both = convert(tmp_path / "both", "--pp-tied", "none", "--pp-tied", "embed=0,5")
    assert "or none alone" in " ".join(both.err.split())
