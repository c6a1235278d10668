"""Weights beside their master copies: every element is the one as rounded from the other."""

from __future__ import annotations

import os
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import restride
from restride import api
from restride.algebra.coverage import replication
from restride.checkpoint.dtypes import DTYPES
from restride.errors import BudgetError, CorruptError, ExecutionError, ReplicaError
from restride.executors.events import NullObserver
from restride.executors.masters import compare_masters, plan_masters, spot_check_masters
from restride.testing.command_line import SAMPLE, run
from restride.wording import enough_size

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
BUDGET = 64 << 20
BIAS = "transformer.h.0.mlp.fc_in.bias"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A copy of a real checkpoint of TP2 x DP2."""
    shutil.copytree(SAMPLE, tmp_path / "sample")
    return tmp_path / "sample"


def place(folder, name, state, rank):
    """File, and byte where the shard of a rank starts."""
    catalog = api.open(folder)
    entry = next(tensor for tensor in catalog.tensors if tensor.name == name).states[state]
    region = entry.regions[rank]
    assert region is not None
    return Path(catalog.root, catalog.files[region.file].name), region.start_nbytes, entry


def overwrite(path, start, content):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


@pytest.mark.parametrize(
    "name",
    [
        "aligned_frozen_z2",
        "bf16_optimizer_z1",
        "elastic_z1",
        "experts_z1",
        "experts_data_first_z1",
        "momentum_z1",
        "round_robin_z2",
        "tied_frozen_z1",
    ],
)
def test_what_the_real_engine_saved_belongs_together(name):
    catalog = api.open(RECORDED / name)
    plans = plan_masters(catalog, budget_nbytes=BUDGET)

    assert plans is not None
    assert plans.names
    assert compare_masters(catalog, plans)[0] == ()
    assert spot_check_masters(catalog, budget_nbytes=BUDGET) == ()


def test_there_is_nothing_to_compare_where_no_weights_are_stored():
    catalog = api.open(RECORDED / "partitioned_z3")

    assert plan_masters(catalog, budget_nbytes=BUDGET) is None
    assert spot_check_masters(catalog, budget_nbytes=BUDGET) == ()


def test_one_other_element_is_named_with_tensor_files_rank_and_values(sample):
    path, start, entry = place(sample, BIAS, "fp32", 3)
    rank_numel = entry.layout.shard_numel(3)
    last = rank_numel - 1
    overwrite(path, start + 4 * last, np.float32(99).tobytes())

    report = api.check(sample)

    found, damage = report.findings
    assert damage.kind == "checksum-differs"
    assert (found.severity, found.kind) == ("error", "master-mismatch")
    assert found.details["tensors"] == [BIAS]
    assert found.details["rank"] == 3
    assert found.where.endswith("zero_pp_rank_1_mp_rank_01_optim_states.pt")
    words = (
        repr(BIAS),
        "mp_rank_01_model_states.pt",
        "dp rank 1, tp rank 1",
        "master copy gives 99",
    )
    assert all(word in found.message for word in words), found.message


def test_a_weight_that_was_damaged_is_found_as_well(sample):
    path, start, _ = place(sample, BIAS, "weight", 1)
    overwrite(path, start, b"\x12\x34")

    found, damage = api.check(sample).findings

    assert damage.kind == "checksum-differs"
    assert found.details["tensors"] == [BIAS]
    assert found.details["files"][1].endswith("mp_rank_01_model_states.pt")


def changed(entry, *, scale=None, **fields):
    """An entry with another layout, of which the files are not asked."""
    if scale is not None:
        pieces = tuple(replace(piece, scale=scale) for piece in entry.layout.all_pieces)
        fields["layout"] = replace(entry.layout, all_pieces=pieces)
    return replace(entry, **fields)


@pytest.mark.parametrize(
    ("changes", "is_compared"),
    [
        ({}, True),
        ({"weight": {"scale": Fraction(1, 3)}}, False),
        ({"fp32": {"scale": Fraction(1, 3)}}, False),
        ({"fp32": {"dtype": DTYPES["float16"]}}, False),
        ({"weight": {"dtype": DTYPES["float32"]}}, True),
        ({"weight": {"dtype": DTYPES["float64"]}}, False),
        ({"weight": {"dtype": DTYPES["int16"]}}, False),
        ({"fp32": {"dtype": DTYPES["int32"]}}, False),
    ],
    ids=str,
)
def test_only_what_is_one_rounding_away_is_compared(changes, is_compared):
    """Else a sound checkpoint is called one of two runs."""
    catalog = api.open(SAMPLE)
    (tensor,) = (tensor for tensor in catalog.tensors if tensor.name == BIAS)
    states = {
        state: changed(entry, **changes.get(state, {})) for state, entry in tensor.states.items()
    }
    others = [other for other in catalog.tensors if other is not tensor]

    plans = plan_masters(
        replace(catalog, tensors=(*others, replace(tensor, states=states))), budget_nbytes=BUDGET
    )

    assert plans is not None
    assert (BIAS in plans.names) == is_compared
    assert len(plans.names) == 4 + is_compared


@pytest.mark.parametrize("state", ["weight", "fp32"])
def test_what_is_known_to_be_broken_is_not_read_again(state):
    plans = plan_masters(
        api.open(SAMPLE), budget_nbytes=BUDGET, broken=[f"tensor {BIAS!r}, state {state!r}"]
    )

    assert plans is not None
    assert len(plans.names) == 4
    assert BIAS not in plans.names


@pytest.mark.parametrize(("state", "rank"), [("weight", 1), ("fp32", 3)])
def test_files_that_change_while_they_are_held_together_are_an_error(sample, state, rank):
    path, _, _ = place(sample, BIAS, state, rank)

    class Writing(NullObserver):
        def on_step(self, event, /):
            os.utime(path, ns=(event.done_steps, event.done_steps))

    catalog = api.open(sample)
    plans = plan_masters(catalog, budget_nbytes=BUDGET)

    with pytest.raises(ExecutionError, match="changed while it was read") as caught:
        compare_masters(catalog, plans, Writing())
    assert caught.value.where == str(path)


def test_the_file_of_another_run_is_one_finding_and_refused_by_what_takes_both(sample, tmp_path):
    """All numbers of all headers agree: only the values tell."""
    path, _, _ = place(sample, BIAS, "fp32", 3)
    rng = np.random.default_rng(0)
    catalog = api.open(sample)
    for tensor in catalog.tensors:
        entry = tensor.states["fp32"]
        region = entry.regions[3]
        if region is not None and entry.layout.shard_numel(3):
            values = rng.normal(size=entry.layout.shard_numel(3)).astype(np.float32)
            overwrite(path, region.start_nbytes, values.tobytes())
    name = path.name

    report = api.check(sample)

    mismatches = [finding for finding in report.findings if finding.kind == "master-mismatch"]
    assert {Path(finding.where).name for finding in mismatches} == {name}
    assert f"and {len(mismatches[0].details['tensors']) - 1} tensors more" in mismatches[0].message
    for options in ({"states": "all"}, {"to": "universal"}):
        with pytest.raises(CorruptError, match=name):
            api.convert(sample, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample"]
    assert api.convert(sample, tmp_path / "out").files == ("model.safetensors",)


def test_without_mixed_precision_other_masters_are_a_warning_to_a_conversion(
    shared, tmp_path, copied
):
    """A model may have got other weights after its optimizer was made."""
    copied(shared / "checkpoints" / "llama_tp2_z1_fp32", tmp_path / "saved")
    plans = plan_masters(api.open(tmp_path / "saved"), budget_nbytes=BUDGET)
    assert plans is not None
    name = plans.names[0]
    path, start, _ = place(tmp_path / "saved", name, "fp32", 0)
    overwrite(path, start, np.float32(99).tobytes())

    report = api.convert(tmp_path / "saved", tmp_path / "out", states="all", replicas="first")

    (found,) = [finding for finding in report.findings if finding.kind == "master-mismatch"]
    assert (found.severity, found.details["tensors"]) == ("warning", [name])


def test_the_bytes_that_were_held_together_are_reported(sample):
    report = api.check(sample)
    catalog = report.catalog

    # What both ranks hold whole is compared among them.
    numel = sum(t.layout.full_numel for t in catalog.tensors if not replication(t.layout))
    assert report.rounded_nbytes == 2 * numel > 0
    assert "weights are their master copies, rounded\n" in run("check", sample).out


def test_of_weights_in_full_precision_nothing_is_said_to_be_rounded(shared):
    checked = run("check", shared / "checkpoints" / "llama_tp2_z1_fp32").out

    assert "weights are their master copies\n" in checked


def test_progress_counts_both_comparisons_as_one(sample):
    seen = []

    class Recorder(NullObserver):
        def on_plan(self, event, /):
            seen.append(event)

        def on_step(self, event, /):
            seen.append(event)

        def on_finish(self, event, /):
            seen.append(event)

    report = api.check(sample, observer=Recorder())

    plan, *steps, end = seen
    files = sum(file.nbytes for file in report.catalog.files if file.name.endswith(".pt"))
    assert plan.total_nbytes == report.compared_nbytes + report.rounded_nbytes + files
    steps, sums = steps[: plan.steps], steps[plan.steps :]
    assert [step.done_steps for step in steps] == list(range(1, plan.steps + 1))
    assert steps[-1].done_nbytes == plan.total_nbytes - files
    assert sums[-1].done_nbytes == steps[-1].done_nbytes + report.verified_nbytes
    assert [s.read_nbytes for s in steps] == sorted(s.read_nbytes for s in steps)
    assert end.read_nbytes > steps[-1].read_nbytes > 0


def test_a_budget_that_is_too_small_names_the_one_that_is_enough(sample):
    catalog = api.open(sample)
    with pytest.raises(BudgetError) as error:
        plan_masters(catalog, budget_nbytes=1 << 16)

    needed = error.value.needed_nbytes
    plans = plan_masters(catalog, budget_nbytes=needed)
    assert plans is not None
    assert plans.projected_nbytes <= needed
    with pytest.raises(BudgetError, match=f"--memory {enough_size(needed)} or more"):
        plan_masters(catalog, budget_nbytes=needed - 1)


def test_the_findings_do_not_depend_on_the_budget(sample):
    path, start, _ = place(sample, BIAS, "fp32", 3)
    overwrite(path, start, np.float32(99).tobytes() * 3)
    catalog = api.open(sample)
    found = []
    for budget in (1 << 22, 1 << 27):
        plans = plan_masters(catalog, budget_nbytes=budget)
        assert plans is not None
        found.append(compare_masters(catalog, plans)[0])

    assert found[0] == found[1] != ()


@pytest.mark.parametrize("replicas", ["first", "mean", "tp=1"])
@pytest.mark.parametrize("options", [{"tp": 1, "dp": 2, "zero": 1}, {"tp": 2, "dp": 1, "zero": 2}])
def test_what_was_decided_between_copies_belongs_together_afterwards(
    shared, tmp_path, replicas, options
):
    """Weights of a mean are the mean of the master copies, rounded once; not a mean of rounded."""
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"

    report = api.convert(source, tmp_path / "out", to="deepspeed", replicas=replicas, **options)

    drifts = [finding for finding in report.findings if finding.kind == "replica-drift"]
    fused = [f for f in drifts if f.details["tensor"].endswith("0.attn.c_attn.weight")]
    assert {f.details["state"] for f in fused} >= {"fp32", "exp_avg", "exp_avg_sq"}
    # Of both target ranks, each element counts once.
    assert {(f.details["numel"], f.details["different_numel"]) for f in fused} == {(2048, 2048)}
    assert api.check(tmp_path / "out").verdict == "ok"


@pytest.mark.parametrize("again", ["first", "mean", "tp=0"])
@pytest.mark.parametrize("replicas", ["mean", "tp=1"])
def test_a_universal_folder_of_decided_copies_can_be_converted_on(
    shared, tmp_path, replicas, again
):
    """Its model files still have the weights as the ranks had them, its master copies do not."""
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"
    universal = tmp_path / "universal"
    api.convert(source, universal, to="universal", replicas=replicas)
    once = tmp_path / "once"
    api.convert(source, once, to="deepspeed", tp=1, dp=1, zero=1, replicas=replicas)

    findings = api.check(universal).findings
    with pytest.raises(ReplicaError):
        api.convert(universal, tmp_path / "refused", states="all")
    api.convert(universal, tmp_path / "all", states="all", replicas=again)
    api.convert(universal, tmp_path / "weights", replicas=again)

    assert {finding.kind for finding in findings} == {"replica-drift"}
    assert api.check(tmp_path / "all").verdict == "ok"
    assert restride.diff(once, tmp_path / "all").verdict == "same"
    assert restride.diff(once, tmp_path / "weights", states="weights").verdict == "same"
