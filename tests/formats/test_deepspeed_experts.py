"""AutoEP: what describes the experts, and what happens where it is wrong or missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from restride import api
from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather_all
from restride.testing.saved_values import Array, edit_file

FOLDED = Path(__file__).parents[1] / "data" / "deepspeed" / "experts_folded_z1"
RECORDED = Path(__file__).parents[1] / "data" / "deepspeed" / "experts_z1"
NAME = "model.layers.0.mlp.experts.w1"


@pytest.fixture
def saved(tmp_path) -> Path:
    """Four experts on two expert-parallel ranks, each twice data-parallel; the real engine's."""
    shutil.copytree(RECORDED, tmp_path / "run")
    return tmp_path / "run"


def model(folder: Path) -> Path:
    return folder / "step" / "mp_rank_00_model_states.pt"


def expert(folder: Path, number: int) -> Path:
    return folder / "step" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"


def refused(folder: Path, *words: str, error: type[RestrideError] = CorruptError) -> None:
    with pytest.raises(error) as caught:
        read_catalog(folder)
    assert type(caught.value) is error, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def edit_layer(folder: Path, change) -> None:
    edit_file(model(folder), lambda root: change(root["ds_autoep_layers"][0]))


def test_the_weight_of_each_expert_is_in_its_own_file(saved):
    catalog = read_catalog(saved)
    tensor = next(tensor for tensor in catalog.tensors if tensor.name == NAME)
    weight = tensor.states["weight"]

    assert weight.layout.full_shape == tensor.layout.full_shape == (4, 8, 8)
    assert [catalog.files[region.file].name for region in weight.regions] == [
        f"step/layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in range(4)
    ]


def test_a_checkpoint_without_maps_and_placement_has_neighbouring_experts(saved):
    def strip(layer):
        del layer["affine_maps"]
        del layer["expert_placement"]

    before = gather_all(read_catalog(saved))
    edit_layer(saved, strip)
    after = gather_all(read_catalog(saved))

    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_missing_expert_costs_the_weights_and_not_the_masters(saved):
    expert(saved, 2).unlink()
    catalog = read_catalog(saved)
    tensor = next(tensor for tensor in catalog.tensors if tensor.name == NAME)

    found = [finding for finding in catalog.findings if finding.kind == "missing-file"]
    assert len(found) == 3
    assert all(finding.severity == "error" for finding in found)
    assert f"'{NAME}.2'" in found[0].message
    assert list(tensor.states) == ["fp32", "exp_avg", "exp_avg_sq", "step"]


def test_two_files_of_one_expert(saved):
    shutil.copy(expert(saved, 1), saved / "step" / "layer_0_expert_1_mp_rank_01_model_states.pt")

    refused(saved, "layer 0, expert 1 has two files")


def test_an_expert_of_another_shape(saved):
    edit_file(
        expert(saved, 3),
        lambda root: root.update({f"{NAME}.3": Array("bfloat16", (64,), bytes(128))}),
    )

    refused(saved, "layer_0_expert_3", f"tensor '{NAME}'", "(64,)", "(8, 8)")


def test_what_else_an_expert_file_holds_is_carried(saved):
    edit_file(expert(saved, 0), lambda root: root.update(note="x"))

    values = read_catalog(saved).values

    assert values["other_files"] == {
        "step/layer_0_expert_0_mp_rank_00_model_states.pt": {"note": "x"}
    }


def test_experts_that_nothing_describes_are_refused(saved):
    edit_file(model(saved), lambda root: root.update(ds_autoep_layers=None))

    refused(saved, "no ds_autoep_layers", "AutoEP", error=UnsupportedError)


# AutoEP with AutoTP: expert-parallel ranks fold tensor-parallel ones.


@pytest.fixture
def folded(tmp_path) -> Path:
    """Four experts on two expert-parallel ranks, which fold two tensor-parallel ones."""
    shutil.copytree(FOLDED, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["experts_folded_z0", "experts_folded_z1", "experts_folded_z3"])
def test_folded_experts_are_what_the_ranks_that_hold_them_say(name):
    catalog = read_catalog(RECORDED.parent / name)
    states = gather_all(catalog)
    with safe_open(RECORDED.parent / name / "experts.safetensors", "numpy") as reference:
        expected = {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118

    stages = ("fp32", "exp_avg", "exp_avg_sq")
    weights = ("w1", "w2", "w3")
    assert {f"{NAME[:-1]}{weight[1]}/{state}" for weight in weights for state in stages} <= {
        *expected
    }
    for key, values in expected.items():
        if not key.endswith("/weight"):
            assert np.array_equal(states[key].view(np.float32)[..., 0], values), key


def test_folded_experts_are_whole_and_other_weights_are_cut(folded):
    catalog = read_catalog(folded)
    layouts = {tensor.name: tensor.layout for tensor in catalog.tensors}

    assert str(catalog.mesh) == "dp=2,tp=2"
    assert layouts[NAME].mesh.axes == (("ep", 2),)
    assert layouts["model.layers.0.self_attn.q_proj.weight"].shard_shapes == ((2, (4, 8)),)


def test_a_file_that_two_ranks_wrote_at_one_time_is_told_of_and_read(folded):
    """As DeepSpeed leaves it: the checksum of one rank, and in its directory that of the other."""
    before = read_catalog(folded)
    path = folded / "step" / "layer_0_expert_0_mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")
    content[entry + 16] ^= 1
    path.write_bytes(content)

    catalog = read_catalog(folded)

    (finding,) = (found for found in catalog.findings if found not in before.findings)
    assert (finding.severity, finding.kind) == ("warning", "written-twice")
    assert finding.where == path.name
    assert catalog.tensors == before.tensors


def copied(folder: Path, number: int) -> Path:
    """The file of an expert once more, of the other tensor-parallel rank."""
    name = f"layer_0_expert_{number}_mp_rank_0{{}}_model_states.pt"
    rank = number // 2
    path = folder / "step" / name.format(1 - rank)
    shutil.copy(folder / "step" / name.format(rank), path)
    edit_file(path, lambda root: root.get("folding", {}).update(tp_rank=1 - rank))
    return path


@pytest.mark.parametrize(
    ("name", "first", "second", "words"),
    [
        (
            "experts_folded_z1",
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
            "folding['zero_partition_rank']: is 1, the file has the name of 0",
        ),
        (
            "experts_folded_z1",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
            "folding['tp_rank']: is 1, the file has the name of 0",
        ),
        (
            "experts_folded_z3",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            "folding['zero_partition_rank']: is 1, the file has the name of 0",
        ),
    ],
)
def test_files_that_changed_their_names_are_found_by_what_they_say(
    name, first, second, words, tmp_path
):
    """Their partitions are of one shape, and weights would be those of other experts."""
    shutil.copytree(FOLDED.with_name(name), tmp_path / "run")
    a, b = (tmp_path / "run" / "step" / own for own in (first, second))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)

    refused(tmp_path / "run", f"{first}: {words}")


def test_the_expert_rank_that_an_optimizer_file_says_is_that_of_its_name(folded):
    """Of two expert-parallel ranks, rank 2 of four is the first."""
    path = folded / "step" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit_file(path, lambda root: root["folding"].update(ep_rank=1))

    refused(folded, f"{path.name}: folding['ep_rank']: is 1, the file has the name of 0")


def test_every_copy_of_an_expert_is_compared(folded):
    """With more tensor-parallel ranks than expert-parallel ones, several write the same."""
    files = [copied(folded, number) for number in range(4)]
    tensor = next(t for t in read_catalog(folded).tensors if t.name == NAME)
    same = [f for f in api.check(folded).findings if f.severity == "error"]
    edit_file(
        files[3], lambda root: root.update({f"{NAME}.3": Array("bfloat16", (8, 8), bytes(128))})
    )

    drifted = [f for f in api.check(folded).findings if f.severity == "error"]

    assert tensor.states["weight"].layout.mesh.axes == (("copy", 2), ("expert", 4))
    assert not same
    assert NAME in drifted[0].message


def test_an_expert_with_more_files_than_another(folded):
    copied(folded, 3)

    refused(folded, f"'{NAME}.3' is in 2 files", f"'{NAME}.0' in 1")


def test_an_expert_of_a_rank_that_the_run_does_not_have_is_left_out(folded):
    first = folded / "step" / "layer_0_expert_3_mp_rank_01_model_states.pt"
    shutil.copy(first, first.with_name(first.name.replace("rank_01", "rank_07")))

    catalog = read_catalog(folded)

    (finding,) = (finding for finding in catalog.findings if finding.kind == "stale-file")
    assert "mp_rank_07_model_states.pt is of a rank" in finding.message
    assert len(gather_all(catalog)) == len(gather_all(read_catalog(FOLDED)))


def both(folder: Path, change) -> None:
    for tp in range(2):
        edit_file(folder / "step" / f"mp_rank_{tp:02d}_model_states.pt", change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda root: root.__delitem__("folding"),
            UnsupportedError,
            "and no 'folding': nothing says",
        ),
        (
            lambda root: root["folding"].update(version=2),
            UnsupportedError,
            "is of version 2, with 1 ranks",
        ),
        (
            lambda root: root["folding"].update(etp_size=2),
            UnsupportedError,
            "with 2 ranks that cut each expert",
        ),
        (
            lambda root: root["folding"].update(tp_size=4),
            CorruptError,
            "is of 4 tensor-parallel ranks, there are 2",
        ),
        (
            lambda root: root["param_shapes"][1].clear(),
            CorruptError,
            "param_shapes",
        ),
    ],
)
def test_a_fold_that_is_not_understood(folded, change, error, words):
    both(folded, change)

    refused(folded, words, error=error)


# Without ZeRO each pair of ranks has an optimizer file: four experts' ranks over two others.


@pytest.fixture
def folded_whole(tmp_path) -> Path:
    """The same without ZeRO, on four expert-parallel ranks."""
    shutil.copytree(RECORDED.parent / "experts_folded_z0", tmp_path / "run")
    return tmp_path / "run"


def test_without_zero_dense_states_are_cut_and_repeated_and_those_of_experts_are_whole(
    folded_whole,
):
    catalog = read_catalog(folded_whole)
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    dense = tensors["model.layers.0.self_attn.q_proj.weight"].states["exp_avg"]
    expert = tensors[NAME].states["exp_avg"]

    assert str(catalog.mesh) == str(dense.layout.mesh) == "dp=2,tp=2"
    assert [layout.shard_shape(3) for layout in (dense.layout, expert.layout)] == [
        (4, 8),
        (1, 8, 8),
    ]
    assert [catalog.files[region.file].name for region in dense.regions] == [
        f"step/expp_rank_{rank}_mp_rank_{rank % 2:02d}_optim_states.pt" for rank in range(4)
    ]


def test_every_copy_of_a_dense_state_is_compared(folded_whole):
    first = read_catalog(folded_whole).tensors[0]
    shape = first.states["exp_avg"].layout.shard_shape(2)
    edit_file(
        folded_whole / "step" / "expp_rank_2_mp_rank_00_optim_states.pt",
        lambda root: root["optimizer"]["optimizer_state_dict"]["state"][0].update(
            exp_avg=Array("float32", shape, bytes(4 * shape[0] * shape[1]))
        ),
    )

    drifted = [f for f in api.check(folded_whole).findings if f.severity == "error"]

    assert f"tensor '{first.name}', state 'exp_avg': ranks 0" in drifted[0].message


def test_a_missing_pair_of_ranks_costs_the_states(folded_whole):
    (folded_whole / "step" / "expp_rank_3_mp_rank_01_optim_states.pt").unlink()
    catalog = read_catalog(folded_whole)

    (found,) = [f for f in catalog.findings if f.kind == "missing-file"]
    assert "1 of 4 optimizer files" in found.message
    assert "expp_rank_3_mp_rank_01_optim_states.pt" in found.message
    assert all(list(tensor.states) == ["weight"] for tensor in catalog.tensors if tensor.states)


def test_a_pair_of_ranks_that_no_rank_is_is_left_out(folded_whole):
    first = folded_whole / "step" / "expp_rank_3_mp_rank_01_optim_states.pt"
    shutil.copy(first, first.with_name("expp_rank_3_mp_rank_00_optim_states.pt"))

    (found,) = [f for f in read_catalog(folded_whole).findings if f.kind == "stale-file"]

    assert "4 expert-parallel ranks on 2 tensor-parallel ones" in found.message


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("expp_rank_1_mp_rank_01_optim_states", "expp_rank_3_mp_rank_01_optim_states", "ep_rank"),
        ("expp_rank_0_mp_rank_00_optim_states", "expp_rank_1_mp_rank_01_optim_states", "tp_rank"),
        (
            "layer_0_expert_0_mp_rank_00_model_states",
            "layer_0_expert_0_mp_rank_01_model_states",
            "tp_rank",
        ),
        ("mp_rank_00_model_states", "mp_rank_01_model_states", "tp_rank"),
    ],
)
def test_a_file_of_one_rank_has_not_the_name_of_another(folded_whole, first, second, words):
    """In fp32 the states of an expert look like those of any other."""
    step = folded_whole / "step"
    shutil.copy(step / f"{first}.pt", step / f"{second}.pt")

    refused(folded_whole, f"{second}.pt", words, "the file has the name of")


def test_without_zero_all_layers_have_experts_on_as_many_ranks(folded_whole):
    def second(root: Any) -> None:
        layer = root["ds_autoep_layers"][0]
        known = {key: layer[key] for key in layer if key not in ("affine_maps", "expert_placement")}
        layer = {"moe_layer_id": 1, "module_path": "b", "expert_key_prefix": "b.experts"}
        root["ds_autoep_layers"].append({**known, **layer, "ep_size": 2, "num_local_experts": 2})

    both(folded_whole, second)

    with pytest.raises(UnsupportedError, match="layers of experts on 2 and on 4 ranks"):
        read_catalog(folded_whole)


def test_tensor_parallel_ranks_with_different_experts(folded):
    edit_file(
        folded / "step" / "mp_rank_01_model_states.pt",
        lambda root: root["param_shapes"][1].__delitem__(NAME),
    )

    refused(folded, "has other experts than step/mp_rank_00_model_states.pt")


def place(experts, **more):
    def change(layer):
        placement = layer["expert_placement"]
        placement.update(more)
        for row, held in zip(placement["ranks"], experts, strict=True):
            row["experts"] = held

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (place([[0, 2], [1, 3]]), UnsupportedError, "places experts out of order"),
        (place([[2, 3], [0, 1]]), UnsupportedError, "places experts out of order"),
        (place([[0, 1], [2]]), CorruptError, "does not place each of 4 experts"),
        (place([[0, 1], [2, 9]]), CorruptError, "does not place each of 4 experts"),
        (place([[0, 1], [2, 3, 3]]), CorruptError, "does not place each of 4 experts"),
        (place([[0, 1], [2, 3]], version=2), UnsupportedError, "placement of version 2"),
        (place([[0, 1], [2, 3]], num_experts=8), CorruptError, "is for 8 experts"),
        (lambda layer: layer.update(num_experts=1 << 40), CorruptError, "1099511627776 experts"),
        (lambda layer: layer.update(ep_size=4), CorruptError, "on 2 ranks, the layer has 4 on 4"),
        (lambda layer: layer.update(ep_size=0), FormatError, "ep_size"),
        (lambda layer: layer["affine_maps"].update(version=2), UnsupportedError, "version 2"),
        (
            lambda layer: layer["affine_maps"]["params"][NAME].update(logical_shape=[4, 64]),
            CorruptError,
            NAME,
        ),
    ],
)
def test_a_placement_that_is_none(saved, change, error, words):
    edit_layer(saved, change)

    with pytest.raises(RestrideError) as caught:
        read_catalog(saved)

    assert isinstance(caught.value, error)
    assert words in str(caught.value)
    assert "step/mp_rank_00_model_states.pt" in str(caught.value)


def test_a_layer_that_is_described_twice(saved):
    edit_file(
        model(saved), lambda root: root["ds_autoep_layers"].append(root["ds_autoep_layers"][0])
    )

    refused(saved, "a second time", f"'{NAME}'")


def test_ranks_in_another_order_than_the_run_had_them(saved):
    """Were the order of the ranks another one, the fragments would not be those of the files."""
    edit_file(
        model(saved),
        lambda root: root.update(ds_config={"use_data_before_expert_parallelism": True}),
    )

    refused(saved, "param_slice_mappings says that it is partition 0 of 2")
