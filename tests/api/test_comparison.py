"""Differences and fingerprints of real checkpoints, across formats, shardings and budgets."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import restride
from restride import api, comparison
from restride.arrays.fingerprint import finish
from restride.checkpoint.fingerprints import fingerprints_to_json
from restride.errors import (
    BudgetError,
    ExecutionError,
    FormatError,
    PlanError,
    ReplicaError,
    UnsupportedError,
)
from restride.executors.events import NullObserver
from restride.executors.sources import CatalogReader
from restride.storage import fingerprint_files
from restride.storage.ranges import FilePool
from restride.testing.command_line import SAMPLE
from restride.testing.command_line import run as run_command
from restride.testing.fingerprints import digest_slowly
from restride.testing.gather import gather
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

CHECKPOINTS = [
    "bloom_tp2_z1",
    "codegen_fused_tp2dp2_z1",
    "gpt2_tp1dp2_z1",
    "llama_tied_tp2_z1",
    "llama_tp1dp2_z2",
    "llama_unevenkv_tp2_z1",
    "mixtral_ep2_z1",
    "opt_tp2_z1",
]
FUSED = "transformer.h.0.attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The sample as safetensors, all states."""
    folder = tmp_path_factory.mktemp("converted") / "out"
    api.convert(SAMPLE, folder, states="all")
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_and_its_conversion_are_the_same_in_every_array(name, shared, tmp_path):
    source = shared / "checkpoints" / name
    api.convert(source, tmp_path / "out", states="all", max_shard_nbytes=200_000)

    report = restride.diff(source, tmp_path / "out")
    fingerprints = restride.fingerprint(source)

    arrays = sum(len(tensor.states) for tensor in report.a.tensors)
    assert report.verdict == "same"
    assert report.compared_count == arrays > 0
    assert restride.fingerprint(tmp_path / "out") == fingerprints
    assert sum(map(len, fingerprints.values())) == arrays


def test_states_of_an_optimizer_that_nobody_has_heard_of_are_the_same_too(tmp_path):
    def parameter(first):
        states = enumerate(("weight", "fp32", "hessian"))
        return Parameter((4, 3), {name: distinct((4, 3), first + 100 * n) for n, name in states})

    run = ZeroRun(2, 1, {"w": parameter(1000), "w/step": parameter(5000)})
    write_zero_run(tmp_path / "source", run)
    api.convert(tmp_path / "source", tmp_path / "out", states="all")

    report = restride.diff(tmp_path / "source", tmp_path / "out")

    assert report.verdict == "same"
    assert report.compared_count == 8


def drifted(tmp_path):
    """A run of two tensor-parallel ranks, and the same with another norm on the second."""

    def parameter(shape, first, cut=None):
        states = {
            name: distinct(shape, first + 100 * n) for n, name in enumerate(("weight", "fp32"))
        }
        return Parameter(shape, states, cut)

    run = ZeroRun(1, 2, {"up": parameter((4, 3), 1000, (0, (2, 2))), "norm": parameter((3,), 5000)})
    write_zero_run(tmp_path / "right", run)
    shutil.copytree(tmp_path / "right", tmp_path / "drifted")
    other = Array("float32", (3,), np.array([1, 2, 3], "f4").tobytes())
    edit_file(
        tmp_path / "drifted" / "step" / "mp_rank_01_model_states.pt",
        lambda value: value["module"].update({"norm": other}),
    )
    return tmp_path / "right", tmp_path / "drifted"


def test_what_could_not_be_read_is_of_its_own_side():
    pipeline = Path(__file__).parents[1] / "data" / "deepspeed_pipeline" / "fp32_tied_z0"

    assert {side for side, _ in restride.diff(pipeline, SAMPLE).unread} == {"A"}
    assert {side for side, _ in restride.diff(SAMPLE, pipeline).unread} == {"B"}


def test_copies_that_differ_are_no_one_array_to_compare(tmp_path):
    right, wrong = drifted(tmp_path)

    report = restride.diff(right, wrong)

    assert (report.verdict, report.differences) == ("incomplete", ())
    ((side, finding),) = report.unread
    assert (side, finding.kind, finding.where) == (
        "B",
        "replica-drift",
        "tensor 'norm', state 'weight'",
    )
    assert finding.message.endswith("; that of the lowest rank is what was compared")
    assert [side for side, _ in restride.diff(wrong, wrong).unread] == ["A", "B"]
    assert [side for side, _ in restride.diff(wrong, right, states="weights").unread] == ["A"]
    assert restride.diff(right, right).verdict == "same"
    ran = run_command("diff", wrong, right)
    assert ran.code == 1
    assert "A: ranks hold different copies of 1 array, such as tensor 'norm', state" in ran.out
    assert ran.out.splitlines()[-1].startswith("incomplete: ")


def test_copies_that_differ_have_no_one_fingerprint(shared, tmp_path):
    right, wrong = drifted(tmp_path)
    with pytest.raises(ReplicaError, match="and so of 16 arrays in all: they have no one"):
        restride.fingerprint(shared / "checkpoints" / "gptbigcode_tp2_z1")

    with pytest.raises(ReplicaError, match=r"'norm', state 'weight': ranks .* no one fingerprint"):
        restride.fingerprint(wrong)
    assert restride.fingerprint(right)["norm"]


def test_a_weight_that_zero_3_stores_nowhere_is_its_master_copy_rounded(shared, tmp_path):
    source = shared / "checkpoints" / "llama_tp1dp2_z3"
    api.convert(source, tmp_path / "weights")

    report = restride.diff(source, tmp_path / "weights", states="weights")
    fingerprints = restride.fingerprint(source)
    of_weights = restride.fingerprint(tmp_path / "weights")

    assert (report.verdict, report.compared_count) == ("same", 21)
    for tensor, states in of_weights.items():
        assert fingerprints[tensor]["weight"] == states["weight"]
        assert fingerprints[tensor]["fp32"] != states["weight"]


def test_shards_of_one_and_of_two_ranks_have_one_fingerprint(shared):
    # The same weights cut over two ranks, whole in one file, and in the file of the real engine's
    # own conversion, which names every state.
    source = shared / "checkpoints" / "llama_tp2_z1"
    reference = restride.fingerprint(source / "reference.safetensors")

    ours = restride.fingerprint(source)

    compared = 0
    for tensor, states in reference.items():
        for state, digits in states.items():
            assert ours[tensor][state] == digits, (tensor, state)
            compared += 1
    assert compared > 50


def test_a_fingerprint_is_that_of_the_full_tensor_by_definition():
    catalog = api.open(SAMPLE)
    found = restride.fingerprint(SAMPLE)

    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            content = gather(catalog, entry).tobytes()
            shape = entry.layout.full_shape
            total = digest_slowly(content)
            assert found[tensor.name][state] == finish(total, entry.dtype.name, shape)


def test_nothing_depends_on_the_budget(converted):
    smallest = smallest_budget(lambda nbytes: restride.fingerprint(SAMPLE, budget_nbytes=nbytes))

    assert restride.fingerprint(SAMPLE, budget_nbytes=smallest) == restride.fingerprint(SAMPLE)
    changed = changed_copy(converted.parent / "changed")
    least = smallest_budget(lambda nbytes: restride.diff(SAMPLE, changed, budget_nbytes=nbytes))
    reports = [restride.diff(SAMPLE, changed, budget_nbytes=nbytes) for nbytes in (least, 64 << 20)]
    assert reports[0].differences == reports[1].differences != ()


def smallest_budget(use):
    """The budget that a refusal names, which works, and one byte less does not."""
    with pytest.raises(BudgetError) as error:
        use(1000)
    needed = error.value.needed_nbytes
    use(needed)
    with pytest.raises(BudgetError):
        use(needed - 1024)
    return needed


def changed_copy(folder):
    """A copy of the sample in which rank 1 holds one other element of the fused weight."""
    shutil.copytree(SAMPLE, folder)
    catalog = api.open(folder)
    entry = next(t for t in catalog.tensors if t.name == FUSED).states["weight"]
    region = entry.regions[1]
    path = Path(catalog.root, catalog.files[region.file].name)
    content = bytearray(path.read_bytes())
    content[region.start_nbytes + 2 * (5 * 32 + 7) + 1] ^= 0x80
    path.write_bytes(content)
    return folder


def test_one_other_element_is_named_with_its_place_in_the_full_tensor(converted, tmp_path):
    changed = changed_copy(tmp_path / "changed")
    catalog = api.open(changed)
    entry = next(t for t in catalog.tensors if t.name == FUSED).states["weight"]
    before = gather(api.open(SAMPLE), entry).reshape(-1, 2).view(np.uint16)[:, 0]
    after = gather(catalog, entry).reshape(-1, 2).view(np.uint16)[:, 0]
    (index,) = np.flatnonzero(before != after)

    report = restride.diff(converted, changed)

    (found,) = report.differences
    assert report.verdict == "different"
    assert (found.tensor, found.state, found.different_numel) == (FUSED, "weight", 1)
    assert found.first_index == index
    assert found.first_coordinates == divmod(index, 32)
    a, b = found.first_values
    assert a == -b
    assert found.largest == 2 * abs(a)
    assert restride.diff(converted, changed, atol=2 * abs(a)).verdict == "same"
    assert restride.diff(converted, changed, atol=1.9 * abs(a)).verdict == "different"


def test_what_only_one_side_has_is_a_difference(converted, tmp_path):
    api.convert(SAMPLE, tmp_path / "weights")

    report = restride.diff(converted, tmp_path / "weights")

    assert report.verdict == "different"
    assert report.differences == report.only_b == ()
    assert {state for _, state in report.only_a} == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    assert restride.diff(converted, tmp_path / "weights", states="weights").verdict == "same"
    assert restride.diff(tmp_path / "weights", converted).only_b == report.only_a


def test_another_dtype_is_a_difference_until_a_tolerance_asks_for_values(tmp_path):
    api.convert(SAMPLE, tmp_path / "narrow")
    api.convert(tmp_path / "narrow", tmp_path / "wide", dtype="float32")
    api.convert(SAMPLE, tmp_path / "master", dtype="float32")

    widened = restride.diff(tmp_path / "narrow", tmp_path / "wide")
    near = restride.diff(SAMPLE, tmp_path / "master", states="weights", rtol=2**-8)
    exact = restride.diff(SAMPLE, tmp_path / "master", states="weights")

    assert {row.dtypes for row in widened.differences} == {("bfloat16", "float32")}
    assert {row.different_numel for row in widened.differences} == {0}
    assert len(widened.differences) == widened.widened_count == 13
    back = restride.diff(tmp_path / "wide", tmp_path / "narrow")
    assert back.compared_nbytes == 2 * widened.compared_nbytes > 0  # of the first side
    assert restride.diff(tmp_path / "narrow", tmp_path / "wide", atol=1e-30).verdict == "same"
    assert near.verdict == "same"
    assert sum(row.different_numel for row in exact.differences) > 10_000


def test_elements_that_are_wider_on_the_other_side_are_compared_within_any_budget(tmp_path):
    numel = 1 << 17
    write_safetensors(tmp_path / "narrow.safetensors", {"w": ("F16", (numel,))})
    write_safetensors(tmp_path / "wide.safetensors", {"w": ("F32", (numel,))})
    content = bytearray((tmp_path / "wide.safetensors").read_bytes())
    content[-4 * 1000] = 1
    (tmp_path / "wide.safetensors").write_bytes(content)
    paths = tmp_path / "narrow.safetensors", tmp_path / "wide.safetensors"
    least = smallest_budget(lambda nbytes: restride.diff(*paths, budget_nbytes=nbytes))

    reports = [restride.diff(*paths, budget_nbytes=n) for n in range(least, 12 << 20, 1 << 18)]

    (found,) = {report.differences for report in reports}
    assert (found[0].different_numel, found[0].first_index) == (1, numel - 1000)


def test_a_shape_that_differs_is_said_and_not_compared(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"w": ("F32", (2, 3)), "x": ("I64", (2,))})
    write_safetensors(tmp_path / "b.safetensors", {"w": ("F32", (3, 2)), "x": ("U64", (2,))})

    report = restride.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=1.0)

    assert [(row.tensor, row.shapes, row.different_numel) for row in report.differences] == [
        ("w", ((2, 3), (3, 2)), None),
        ("x", ((2,), (2,)), None),
    ]
    fingerprints = [restride.fingerprint(tmp_path / f"{n}.safetensors") for n in "ab"]
    assert fingerprints[0]["w"] != fingerprints[1]["w"]


def write_safetensors(path, tensors):
    header, content = {}, b""
    for name, (dtype, shape) in tensors.items():
        nbytes = int(np.prod(shape)) * int(dtype[1:]) // 8
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(content), len(content) + nbytes],
        }
        content += bytes(nbytes)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)


def test_names_are_matched_after_renaming(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"module.h.w": ("F32", (4,))})
    write_safetensors(tmp_path / "b.safetensors", {"model.h.w": ("F32", (4,))})
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"

    assert restride.diff(a, b, rename=[(r"module\.(.*)", r"model.\1")]).verdict == "same"
    assert restride.diff(a, b).only_a == (("module.h.w", "weight"),)
    with pytest.raises(PlanError, match="no tensor has a name"):
        restride.diff(a, b, rename=[("module", "model")])


@pytest.mark.parametrize("tolerance", [{"rtol": -1.0}, {"atol": math.nan}, {"rtol": math.inf}])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(PlanError, match="a tolerance is a finite number"):
        restride.diff(SAMPLE, SAMPLE, **tolerance)


@pytest.mark.parametrize("states", ["ALL", "weight", "", None])
def test_states_that_are_none_mean_neither_of_the_two(states, tmp_path):
    with pytest.raises(UnsupportedError, match="does not say which states are meant; say weights"):
        restride.diff(SAMPLE, SAMPLE, states=states)
    with pytest.raises(UnsupportedError, match="does not say which states are meant"):
        restride.fingerprint(SAMPLE, states=states)
    if states is not None:
        with pytest.raises(UnsupportedError, match="does not say which states are meant"):
            api.convert(SAMPLE, tmp_path / "out", states=states)
        assert not (tmp_path / "out").exists()


def test_progress_is_told_in_bytes_of_the_first_side(converted):
    class Recorder(NullObserver):
        planned = done = finished = 0

        def on_plan(self, event, /):
            self.planned = event.total_nbytes

        def on_step(self, event, /):
            self.done = event.done_nbytes

        def on_finish(self, _, /):
            self.finished += 1

    watching_diff, watching_fingerprint = Recorder(), Recorder()
    report = restride.diff(SAMPLE, converted, observer=watching_diff)
    restride.fingerprint(SAMPLE, observer=watching_fingerprint)

    for watching in (watching_diff, watching_fingerprint):
        assert watching.planned == watching.done == report.compared_nbytes > 0
        assert watching.finished == 1


def test_a_checkpoint_is_checked_against_fingerprints_of_another_sharding(converted, tmp_path):
    file = tmp_path / "f.json"
    file.write_text(json.dumps(fingerprints_to_json(restride.fingerprint(SAMPLE))))
    changed = changed_copy(tmp_path / "changed")

    assert comparison.check_against(converted, file) == ()
    (finding,) = comparison.check_against(changed, file)
    assert (finding.severity, finding.kind) == ("error", "fingerprint-differs")
    assert (finding.details["tensor"], finding.details["state"]) == (FUSED, "weight")
    assert finding.details["expected"] in finding.message
    assert finding.details["found"] in finding.message


def test_arrays_that_are_missing_are_errors_and_more_arrays_a_note(converted, tmp_path):
    api.convert(SAMPLE, tmp_path / "weights")
    everything, weights = tmp_path / "all.json", tmp_path / "weights.json"
    everything.write_text(json.dumps(fingerprints_to_json(restride.fingerprint(SAMPLE))))
    weights.write_text(
        json.dumps(fingerprints_to_json(restride.fingerprint(SAMPLE, states="weights")))
    )

    missing = comparison.check_against(tmp_path / "weights", everything)
    more = comparison.check_against(converted, weights)

    assert {finding.kind for finding in missing} == {"fingerprint-missing"}
    assert len(missing) == 52
    assert [(finding.severity, finding.details["arrays"]) for finding in more] == [("note", 52)]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "f.json").write_text("{}")

    with pytest.raises(ExecutionError, match=r"missing\.json: cannot be opened"):
        comparison.check_against(SAMPLE, tmp_path / "missing.json")
    with pytest.raises(FormatError, match=r"f\.json"):
        comparison.check_against(SAMPLE, tmp_path / "f.json")


def test_a_file_too_large_to_hold_fingerprints_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_files, "LARGEST_LIST_NBYTES", 1 << 20)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(FormatError, match="holds no fingerprints: it is larger than 1,048,576"):
        comparison.check_against(SAMPLE, tmp_path / "model.safetensors")


@pytest.mark.parametrize("changed", ["a", "b"])
def test_a_checkpoint_that_changes_while_it_is_compared_is_an_error(changed, shared, tmp_path):
    for name in ("a", "b"):
        api.convert(shared / "checkpoints" / "llama_tp2_z1", tmp_path / name)

    class Writing(NullObserver):
        def on_step(self, event, /):
            path = tmp_path / changed / "model.safetensors"
            os.utime(path, ns=(event.done_steps, event.done_steps))

    with pytest.raises(ExecutionError, match="changed while it was read"):
        comparison.diff(tmp_path / "a", tmp_path / "b", observer=Writing())


@pytest.mark.parametrize("form", ["deepspeed", "universal", "safetensors"])
def test_a_checkpoint_that_changed_since_its_headers_were_read_is_an_error(form, tmp_path):
    path = tmp_path / form
    if form == "deepspeed":
        shutil.copytree(SAMPLE, path)
    else:
        api.convert(SAMPLE, path, to=form)
    catalog = api.open(path)

    with FilePool() as pool:
        CatalogReader(catalog, pool).require_unchanged()
        for file in catalog.files:
            saved = Path(catalog.root, file.name)
            before = saved.stat()
            os.utime(saved, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
            with pytest.raises(ExecutionError, match="changed while it was read") as caught:
                CatalogReader(catalog, pool).require_unchanged()
            assert caught.value.where == str(saved)
            os.utime(saved, ns=(before.st_atime_ns, before.st_mtime_ns))
