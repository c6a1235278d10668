"""Which of several processes a command is, by its environment and its options."""

from __future__ import annotations

import pytest

from restride.cli.processes import process_of
from restride.testing.command_line import SAMPLE, run

# What `srun` sets for each task, and what Slurm sets in the shell of a batch script.
STEP = {"SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}


@pytest.mark.parametrize(
    ("environment", "number", "count"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 3, 8),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1),
        ({"RANK": "3"}, 0, 1),
        ({"WORLD_SIZE": "8"}, 0, 1),
        ({"RANK": "8", "WORLD_SIZE": "8"}, 0, 1),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, 0, 1),
        ({"RANK": "", "WORLD_SIZE": "8"}, 0, 1),
        ({"RANK": "\u0663", "WORLD_SIZE": "8"}, 0, 1),
        (STEP, 2, 4),
        ({**STEP, "SLURM_NTASKS": "16"}, 2, 4),
        ({"SLURM_PROCID": "2", "SLURM_STEPID": "1", "SLURM_NTASKS": "4"}, 2, 4),
        ({**STEP, "RANK": "1", "WORLD_SIZE": "2"}, 1, 2),
        (BATCH, 0, 1),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, 0, 1),
        ({**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 0, 1),
        ({**BATCH, "SLURM_STEP_ID": "batch"}, 0, 1),
    ],
)
def test_torchrun_and_steps_of_slurm_are_several_and_nothing_else_is(environment, number, count):
    found = process_of(environment)

    assert (found.number, found.count) == (number, count)


def test_a_command_that_is_one_of_several_by_mistake_says_so_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    out = tmp_path / "out"

    ran = run("convert", SAMPLE, out, "--wait", "0.1")

    assert ran.code == 2
    *_, last = ran.err.splitlines()
    assert last.startswith(
        f"restride: process 0 of 4 (RANK and WORLD_SIZE): {out}.partial: processes 1 to 3 of 4 "
        "did not come within 0 s; start all of them, or one alone with --process 0/1; "
    )
    assert last.endswith(f"kept in {out}.partial: run it again with --resume")
    ran = run("convert", SAMPLE, out, "--resume", "--process", "0/1")
    assert ran.code == 0, ran.err


def test_others_write_nothing_but_errors_with_their_number(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run("convert", SAMPLE, out).code == 0
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")

    done = run("convert", SAMPLE, out, "--resume", "--json")
    dry = run("convert", SAMPLE, tmp_path / "other", "--dry-run")
    alone = run("convert", SAMPLE, tmp_path / "other", "--wait", "0.1")
    wrong = run("convert", tmp_path / "nothing", tmp_path / "other")

    assert (done.code, done.out, done.err) == (0, "", "")
    assert (dry.code, dry.out, dry.err) == (0, "", "")
    assert alone.code == wrong.code == 2
    assert alone.out == wrong.out == ""
    assert alone.err == (
        f"restride: process 2 of 4 (RANK and WORLD_SIZE): {tmp_path}/other: process 0 of 4 gave no "
        "sign for 0 s; start all of them, or one alone with --process 0/1\n"
    )
    assert wrong.err.startswith(f"restride: process 2 of 4: {tmp_path}/nothing: ")


@pytest.mark.parametrize("text", ["4/4", "0", "/", "0/0", "-1/2", "1/2/3", "a/b"])
def test_a_process_that_means_nothing_is_refused_with_how_to_write_it(tmp_path, text):
    ran = run("convert", SAMPLE, tmp_path / "out", f"--process={text}")

    assert ran.code == 2
    assert f"{text!r} is no process N/M, counted from 0, such as 0/4 to 3/4" in ran.err
