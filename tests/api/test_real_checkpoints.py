"""The real checkpoints, from the command's point of view: converted bit for bit, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import restride
from recorded import DRIFTED, WITHOUT_ZERO, shared_but
from restride import api, exports
from restride.arrays.casts import cast
from restride.checkpoint.dtypes import DTYPES
from restride.errors import ExistsError, PlanError, ReplicaError, UnsupportedError
from restride.testing.command_line import SAMPLE
from restride.testing.gather import gather, gather_all

WITHOUT_REFERENCE = ["gpt2_tp1dp2_z1", "llama_tp1dp2_z2"]
WITH_REFERENCE = shared_but(WITHOUT_ZERO, DRIFTED, *WITHOUT_REFERENCE)


def contents(folder):
    """Every array below a converted folder, by its key in the file."""
    found = {}
    for key, array in gather_all(api.open(folder)).items():
        found[key.removesuffix("/weight")] = array
    return found


def widened(array):
    """A bfloat16 array as float32 bytes: exact."""
    flat = cast(array.reshape(-1), DTYPES["bfloat16"], DTYPES["float32"])
    return flat.reshape(*array.shape[:-1], 4)


def files_below(folder):
    return sorted(path.name for path in Path(folder).rglob("*"))


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_all_states_are_those_of_the_peer_bit_for_bit(name, shared, tmp_path):
    source = shared / "checkpoints" / name
    aliases = {
        alias: tensor.name for tensor in api.open(source).tensors for alias in tensor.aliases
    }

    report = api.convert(source, tmp_path / "out", states="all")

    ours = contents(tmp_path / "out")
    reference = contents(source / "reference.safetensors")
    for key, wanted in reference.items():
        tensor, _, state = key.rpartition("/")
        if key in ours:
            # Of ZeRO-3 without tensor parallelism the peer writes flat tensors, we the real shapes.
            assert wanted.ndim == 2 or ours[key].shape == wanted.shape
            assert ours[key].tobytes() == wanted.tobytes(), key
        else:
            # A tied name, or a second name of a router, has no master copy of its own. The peer
            # makes one by widening the trained weight, and so loses the bits that its owner has;
            # here the name has the weight that was trained, and only that.
            assert state == "fp32"
            assert np.array_equal(widened(ours[aliases.get(tensor, tensor)]), wanted), key
    names = {t.name for t in api.open(source).tensors}
    # Of ZeRO-3 the peer leaves the step out.
    steps = {f"{name}/step" for name in names if source.name.endswith("_z3")}
    assert set(ours) - set(reference) == names | steps
    assert report.tensor_count == len(ours)


@pytest.mark.parametrize("name", [*WITH_REFERENCE, *WITHOUT_REFERENCE])
def test_the_weights_are_the_master_copies_as_rounded_in_training(name, shared, tmp_path):
    # An argument that needs no reference: weights and master copies are in different files, cut
    # differently (whole shards, flat slices), and agree in every element after one rounding.
    api.convert(shared / "checkpoints" / name, tmp_path / "out", states="all")

    ours = contents(tmp_path / "out")
    masters = {key.removesuffix("/fp32"): a for key, a in ours.items() if key.endswith("/fp32")}
    assert masters
    for tensor, master in masters.items():
        weight = ours[tensor]
        dtype = {2: "bfloat16", 4: "float32"}[weight.shape[-1]]
        rounded = cast(master.reshape(-1), DTYPES["float32"], DTYPES[dtype])
        assert np.array_equal(rounded, weight.reshape(-1)), tensor


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_states_without_a_reference_are_what_walking_every_element_gives(name, shared, tmp_path):
    source = shared / "checkpoints" / name

    api.convert(source, tmp_path / "out", states="all")

    ours = contents(tmp_path / "out")
    walked = gather_all(api.open(source))
    assert {key.removesuffix("/weight") for key in walked} == set(ours)
    for key, wanted in walked.items():
        assert np.array_equal(ours[key.removesuffix("/weight")], wanted), key


def test_zero_1_and_zero_2_of_the_same_run_hold_the_same_shapes(shared):
    one, two = (api.open(shared / "checkpoints" / f"llama_tp1dp2_z{stage}") for stage in (1, 2))

    assert {(t.name, t.layout.full_shape, *t.states) for t in one.tensors} == {
        (t.name, t.layout.full_shape, *t.states) for t in two.tensors
    }


def test_float32_weights_are_the_master_copies(shared, tmp_path):
    source = shared / "checkpoints" / "llama_tp2_z1"

    api.convert(source, tmp_path / "out", dtype="float32")

    reference = contents(source / "reference.safetensors")
    for name, weight in contents(tmp_path / "out").items():
        assert np.array_equal(weight, reference[f"{name}/fp32"])


def test_float16_weights_are_rounded_once_from_the_master_copies(shared, tmp_path):
    source = shared / "checkpoints" / "llama_tp2_z1"

    api.convert(source, tmp_path / "out", dtype="float16")

    reference = contents(source / "reference.safetensors")
    for name, weight in contents(tmp_path / "out").items():
        master = reference[f"{name}/fp32"].reshape(-1).view(np.float32)
        assert weight.tobytes() == master.astype(np.float16).tobytes()


def test_drifted_replicas_are_listed_by_check_and_refused_by_convert(shared, tmp_path):
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"

    report = api.check(source)

    drifted = {f.details["tensor"] for f in report.findings if f.kind == "replica-drift"}
    assert report.verdict == "findings"
    assert drifted == {
        f"transformer.h.{layer}.attn.c_attn.{kind}"
        for layer in (0, 1)
        for kind in ("weight", "bias")
    }
    weight = next(f for f in report.findings if f.details.get("state") == "fp32")
    assert (weight.details["ranks"], weight.details["different_numel"]) == ([0, 1], 2048)
    assert weight.details["largest"] == pytest.approx(0.002, rel=0.01)
    with pytest.raises(ReplicaError, match="--replicas first or mean, or the rank whose copy"):
        api.convert(source, tmp_path / "out")
    assert files_below(tmp_path) == []


KV = {
    "first": lambda shards: shards[0][-32:],
    "mean": lambda shards: (shards[0][-32:] + shards[1][-32:]) / 2,
    "tp=0": lambda shards: shards[0][-32:],
    "tp=1": lambda shards: shards[1][-32:],
    1: lambda shards: shards[1][-32:],
}


@pytest.mark.parametrize("policy", KV)
def test_drifted_replicas_are_decided_as_the_user_says(policy, shared, tmp_path):
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"
    name = "transformer.h.0.attn.c_attn.bias"
    entry = next(t for t in api.open(source).tensors if t.name == name).states["fp32"]

    report = api.convert(source, tmp_path / "out", states="all", replicas=policy)

    shards = []
    for rank in (0, 1):
        region = entry.regions[rank]
        path = source / api.open(source).files[region.file].name
        numel = entry.layout.shard_numel(rank)
        shards.append(np.fromfile(path, np.float32, numel, offset=region.start_nbytes))
    # The bias is 64 query elements of rank 0, then 32 key/value elements of both.
    written = contents(tmp_path / "out")[f"{name}/fp32"].reshape(-1).view(np.float32)
    assert np.array_equal(written, np.concatenate([shards[0][:64], KV[policy](shards)]))
    assert {f.severity for f in report.findings} == {"warning"}
    said = "dp=0,tp=1" if policy == 1 else policy
    assert {f.details["decided"] for f in report.findings} == {said}


def test_replicas_are_decided_by_pattern_and_the_report_says_how(shared, tmp_path):
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"
    rules = [("*", "first"), ("*.bias", "mean"), ("*.h.1.*/exp_avg", "tp=1")]

    report = api.convert(source, tmp_path / "out", states="all", replicas=rules)

    decided = {
        (f.details["tensor"], f.details["state"]): (f.details["decided"], f.details["ranks"])
        for f in report.findings
    }
    attention = "transformer.h.{}.attn.c_attn.{}".format
    # A weight beside its master copy is the mean of those, rounded: none of its own is taken.
    assert len(decided) == 16 - 2
    assert (attention(0, "bias"), "weight") not in decided
    assert decided[attention(0, "weight"), "exp_avg"] == ("first", [0, 1])
    assert decided[attention(1, "bias"), "fp32"] == ("mean", [0, 1])
    assert decided[attention(1, "bias"), "exp_avg"] == ("tp=1", [1, 0])
    written = contents(tmp_path / "out")
    for rule, folder in (("first", "one"), ("mean", "two"), ("tp=1", "three")):
        api.convert(source, tmp_path / folder, states="all", replicas=rule)
        alone = contents(tmp_path / folder)
        for (tensor, state), (policy, _) in decided.items():
            key = tensor if state == "weight" else f"{tensor}/{state}"
            if policy == rule:
                assert np.array_equal(written[key], alone[key]), key


def test_a_rank_that_holds_no_copy_of_something_is_refused_with_the_numbers(tmp_path):
    """The master copies of the sample are cut over dp as well: no rank has them all."""
    with pytest.raises(PlanError) as error:
        api.convert(SAMPLE, tmp_path / "out", states="all", replicas="dp=0,tp=1")

    words = ("fc_out.bias", "state 'fp32'", "dp=0,tp=1 has no copy of 32 of the 32 elements")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert files_below(tmp_path) == []
    assert api.convert(SAMPLE, tmp_path / "out", states="all", replicas="tp=1").files


def test_codegen_cut_as_plain_rows_is_warned_about(shared):
    source = shared / "checkpoints" / "codegen_rowcut_tp2_z1"

    report = api.check(source)

    assert report.verdict == "findings"
    assert {f.severity for f in report.findings} == {"warning"}
    assert all("qkv_proj" in f.message for f in report.findings)
    assert api.check(shared / "checkpoints" / "codegen_fused_tp2_z1").findings == ()


def test_one_piece_describes_the_fused_weight_on_all_ranks(shared):
    catalog = api.open(shared / "checkpoints" / "codegen_fused_tp2dp2_z1")
    fused = next(t for t in catalog.tensors if t.name == "transformer.h.0.attn.qkv_proj.weight")

    assert len(fused.layout.all_pieces) == 1
    assert restride.signature(fused.layout) == restride.signature(
        restride.layouts.codegen_qkv((192, 64), mesh={"tp": 2}, heads=8)
    )


def test_what_is_not_a_tensor_is_carried_as_json(shared, tmp_path):
    api.convert(shared / "checkpoints" / "llama_tp2_z1", tmp_path / "out", states="all")

    values = json.loads((tmp_path / "out" / "state.json").read_text())
    assert files_below(tmp_path / "out") == [
        "model.safetensors",
        "optimizer.safetensors",
        "restride.json",
        "state.json",
    ]
    assert "0.19.8" in json.dumps(values)
    assert "global_steps" in json.dumps(values)


@pytest.mark.parametrize("is_said", [True, False])
def test_a_large_model_is_split_with_an_index_also_where_nothing_is_said(
    shared, tmp_path, monkeypatch, is_said
):
    source = shared / "checkpoints" / "llama_tp2_z1"
    api.convert(source, tmp_path / "one")
    assert exports._SHARD_NBYTES == 2_000_000_000
    if not is_said:
        monkeypatch.setattr(exports, "_SHARD_NBYTES", 50_000)

    report = api.convert(source, tmp_path / "split", max_shard_nbytes=50_000 if is_said else None)

    assert "model.safetensors.index.json" in report.files
    assert len(report.files) > 3
    split, one = contents(tmp_path / "split"), contents(tmp_path / "one")
    assert split.keys() == one.keys()
    assert all(np.array_equal(split[key], one[key]) for key in one)


def test_the_output_can_be_converted_again_to_the_same_bytes(shared, tmp_path):
    source = shared / "checkpoints" / "llama_unevenkv_tp2_z1"

    api.convert(source, tmp_path / "first")
    api.convert(tmp_path / "first", tmp_path / "second")

    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert contents(first).keys() == contents(second).keys()
    assert first.read_bytes() == second.read_bytes()


def test_the_smallest_budget_gives_the_same_bytes(shared, tmp_path):
    source = shared / "checkpoints" / "codegen_fused_tp2dp2_z1"

    api.convert(source, tmp_path / "large", states="all")
    api.convert(source, tmp_path / "small", states="all", budget_nbytes=1 << 21)

    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "large" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()


def test_nothing_is_overwritten_without_being_asked(shared, tmp_path):
    source = shared / "checkpoints" / "llama_tp2_z1"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")

    for force in (False, True):
        with pytest.raises(ExistsError, match="holds precious, which restride did not write"):
            api.convert(source, tmp_path / "out", force=force)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    (tmp_path / "out" / "precious").unlink()
    api.convert(source, tmp_path / "out")
    with pytest.raises(ExistsError, match="--force"):
        api.convert(source, tmp_path / "out")
    api.convert(source, tmp_path / "out", force=True)
    assert files_below(tmp_path / "out") == ["model.safetensors", "restride.json"]


@pytest.mark.parametrize("name", ["llama_tp2_z3", "mixtral_ep2_z3"])
def test_weights_that_zero_3_does_not_keep_have_the_dtype_of_the_training(name, shared, tmp_path):
    report = api.convert(shared / "checkpoints" / name, tmp_path / "out")

    catalog = api.open(tmp_path / "out")
    assert {tensor.states["weight"].dtype.name for tensor in catalog.tensors} == {"bfloat16"}
    assert report.tensor_count == len(catalog.tensors)


def test_a_format_that_cannot_be_written_is_refused(shared, tmp_path):
    with pytest.raises(UnsupportedError, match="safetensors"):
        api.convert(shared / "checkpoints" / "llama_tp2_z1", tmp_path / "out", to="gguf")


def test_gathering_one_state_needs_no_other(shared):
    catalog = api.open(shared / "checkpoints" / "llama_tp2_z1")
    step = catalog.tensors[0].states["step"]

    assert gather(catalog, step).view(np.float32).item() == 2.0
