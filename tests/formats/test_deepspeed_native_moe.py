"""Experts of DeepSpeed's own MoE layer: every rank numbers its own, the catalog all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from restride import api
from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._experts.group_order import same_order
from restride.testing.gather import gather_all
from restride.testing.saved_values import Array, edit_file

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_native_moe"
NAMES = sorted(path.name for path in RECORDED.iterdir())
EXPERTS = "layers.1.moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.fixture
def saved(tmp_path) -> Path:
    """Layers of two and of four experts on two of four ranks; the real engine's."""
    shutil.copytree(RECORDED / "residual_z1", tmp_path / "run")
    return tmp_path / "run" / "step"


@pytest.fixture
def numbered(tmp_path) -> Path:
    """The same without ZeRO, on two ranks."""
    shutil.copytree(RECORDED / "bf16_z0", tmp_path / "run")
    return tmp_path / "run" / "step"


@pytest.fixture
def several(tmp_path) -> Path:
    """A layer of two experts on two ranks, and one of four on four."""
    shutil.copytree(RECORDED / "several_z1", tmp_path / "run")
    return tmp_path / "run" / "step"


@pytest.fixture
def cut_numbered(tmp_path) -> Path:
    """Without ZeRO on two expert-parallel and two tensor-parallel ranks."""
    shutil.copytree(RECORDED / "tensor_cut_z0", tmp_path / "run")
    return tmp_path / "run" / "step"


def model(folder: Path) -> Path:
    return folder / "mp_rank_00_model_states.pt"


def expert(folder: Path, number: int) -> Path:
    return folder / f"layer_1_expert_{number}_mp_rank_00_model_states.pt"


def optimizer(folder: Path, dp: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"


def refused(folder: Path, *words: str, error: type[RestrideError] = CorruptError) -> None:
    with pytest.raises(error) as caught:
        read_catalog(folder)
    assert type(caught.value) is error, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def errors_of(folder: Path) -> list[str]:
    return [f.message for f in read_catalog(folder).findings if f.severity == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_what_the_rank_that_has_the_expert_said(name):
    catalog = read_catalog(RECORDED / name)
    states = gather_all(catalog)
    with safe_open(RECORDED / name / "reference.safetensors", "numpy") as reference:
        expected = {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118

    assert states.keys() - {f"{t.name}/step" for t in catalog.tensors} == {
        *expected,
        "positions/weight",
    }
    for key, values in expected.items():
        found = states[key]
        if found.shape[-1] == 2:  # bf16 weights, which the reference has widened
            widened = found.view(np.uint16)[..., 0].astype(np.uint32) << 16
            assert np.array_equal(widened, values.view(np.uint32)), key
        else:
            assert np.array_equal(found.view(np.float32)[..., 0], values), key


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_whole_and_its_order_is_that_of_the_model(name):
    catalog = read_catalog(RECORDED / name)
    with_numbers = [tensor.name for tensor in catalog.tensors if tensor.name.startswith(EXPERTS)]

    assert not [f for f in api.check(RECORDED / name).findings if f.severity == "error"]
    assert with_numbers == [
        f"{EXPERTS}.{number}.{rest}"
        for number in range(4)
        for rest in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    names = [tensor.name for tensor in catalog.tensors]
    assert names[names.index(with_numbers[0]) - 1] == "layers.1.moe.deepspeed_moe.gate.wg.weight"


def test_each_expert_is_whole_on_one_expert_parallel_rank():
    catalog = read_catalog(RECORDED / "residual_z1")
    layouts = {tensor.name: tensor.layout for tensor in catalog.tensors}

    held = [layouts[f"{EXPERTS}.{number}.up.weight"].shard_shapes for number in range(4)]

    first, second = ((1, (5, 6)), (1, (0,))), ((1, (0,)), (1, (5, 6)))
    assert held == [first, first, second, second]
    assert layouts["layers.1.moe.mlp.up.weight"].full_shape == (5, 6)


def test_the_experts_of_a_group_are_named_by_their_numbers_among_all():
    groups = read_catalog(RECORDED / "round_robin_z2").values["optimizer"]["param_groups"]

    assert [group["name"] for group in groups] == ["dense-params", "ep_size_2"]
    assert len(groups[1]["params"]) == (2 + 4) * 4
    assert f"{EXPERTS}.3.down.bias" in groups[1]["params"]


def test_without_optimizer_files_the_weights_are_there(saved):
    for dp in range(4):
        optimizer(saved, dp).unlink()
    before = gather_all(read_catalog(RECORDED / "residual_z1"))

    after = gather_all(read_catalog(saved))

    assert after.keys() == {key for key in before if key.endswith("/weight")}
    assert all(np.array_equal(after[key], before[key]) for key in after)


def test_a_missing_expert_costs_its_weights_and_not_its_masters(saved):
    expert(saved, 2).unlink()
    catalog = read_catalog(saved)
    tensor = next(t for t in catalog.tensors if t.name == f"{EXPERTS}.2.up.weight")

    found = [finding for finding in catalog.findings if finding.kind == "missing-file"]
    assert [finding.severity for finding in found] == ["error"] * 4
    assert "layer_1_expert_2_mp_rank_00_model_states.pt" in found[0].message
    assert list(tensor.states) == ["fp32", "exp_avg", "exp_avg_sq", "step"]


def test_a_missing_rank_costs_the_states_of_its_experts_alone(numbered):
    (numbered / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()

    assert "1 of 2 optimizer files of expert-parallel ranks is missing" in errors_of(numbered)[0]


def state_of(root) -> dict:
    return root["optimizer"]


def optimizer_of(folder: Path, ep: int, tp: int = 0) -> Path:
    return folder / f"expp_rank_{ep}_mp_rank_{tp:02d}_optim_states.pt"


def test_settings_that_the_optimizer_of_one_expert_parallel_rank_has_of_its_own(numbered):
    edit_file(
        optimizer_of(numbered, 1),
        lambda root: state_of(root)["optimizer_state_dict"]["param_groups"][1].update(lr=0.5),
    )

    (found,) = (f for f in read_catalog(numbered.parent).findings if f.kind == "settings-mismatch")

    assert (found.severity, found.where) == ("error", f"step/{optimizer_of(numbered, 1).name}")
    assert "the optimizer of ep rank 1 has other settings for group 1" in found.message
    assert "lr is 0.5 and not 0.01" in found.message
    assert found.details == {"group": 1, "keys": ["lr"], "part": "optimizer"}
    with pytest.raises(CorruptError, match="or convert the weights alone"):
        api.convert(numbered, numbered.parent / "out", to="deepspeed", dp=2, ep=1, zero=1)
    assert api.convert(numbered, numbered.parent / "weights").files == ("model.safetensors",)


def test_a_rank_that_scales_or_clips_otherwise_than_the_first(tmp_path):
    shutil.copytree(RECORDED / "flat_z0", tmp_path / "run")
    folder = tmp_path / "run" / "step"
    edit_file(optimizer_of(folder, 1), lambda root: state_of(root).update(clip_grad=0.5))

    (found,) = (f for f in read_catalog(folder.parent).findings if f.kind == "optimizer-mismatch")

    assert (found.severity, found.where) == ("warning", f"step/{optimizer_of(folder, 1).name}")
    assert "clip_grad is 0.5 and not 1.0" in found.message


def test_model_files_are_held_against_the_optimizers_that_engines_take(cut_numbered):
    edit_file(
        model(cut_numbered),
        lambda root: state_of(root)["optimizer_state_dict"]["param_groups"][0].update(lr=0.5),
    )

    (found,) = (
        f for f in read_catalog(cut_numbered.parent).findings if f.kind == "settings-mismatch"
    )

    assert "the optimizer of tp rank 0 has other settings for group 0" in found.message
    assert "than in step/expp_rank_0_mp_rank_00_optim_states.pt: lr is 0.5" in found.message


def test_what_else_an_expert_file_holds_is_carried(saved):
    edit_file(expert(saved, 0), lambda root: root.update(note="x"))

    values = read_catalog(saved.parent).values

    assert values["other_files"] == {f"step/{expert(saved, 0).name}": {"note": "x"}}


def renamed(folder: Path, number: int, other: int) -> None:
    """Say in the file of an expert that it is another one."""

    def change(root):
        for key in [*root]:
            root[key.replace(f"experts.{number}.", f"experts.{other}.")] = root.pop(key)

    edit_file(expert(folder, number), change)


def test_a_file_of_an_expert_with_another_one_in_it(saved):
    renamed(saved, 3, 1)

    refused(saved, "layer_1_expert_3", "is of expert 1", "is the file of expert 3")


def test_an_expert_of_another_shape(saved):
    edit_file(
        expert(saved, 3),
        lambda root: root.update({f"{EXPERTS}.3.up.bias": Array("bfloat16", (7,), bytes(14))}),
    )

    refused(saved, "layer_1_expert_3", "(7,)", "(5,)", "all experts of a layer are alike")


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        ([2, 3], CorruptError, "expert 3, and num_experts says 3 experts"),
        ([2], CorruptError, "no layer of this number"),
        ([2, 4, 2], CorruptError, "layer 2 has 2 experts, and no file has any of them"),
        ([2, 1 << 40], CorruptError, "1099511627776 experts"),
        ([2, 8], CorruptError, "layer 1 has 8 experts, 2 of them on the first of 2"),
        (None, UnsupportedError, "nothing says what experts these are"),
        ("4", FormatError, "num_experts"),
    ],
)
def test_a_number_of_experts_that_is_none(saved, counts, error, words):
    edit_file(model(saved), lambda root: root.update(num_experts=counts))

    refused(saved, words, error=error)


@pytest.mark.parametrize("ranks", [1, 4])
def test_groups_of_another_number_of_ranks(saved, ranks):
    def change(root):
        for group in root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            if "moe" in group:
                group["name"] = f"ep_size_{ranks}"

    for dp in range(4):
        edit_file(optimizer(saved, dp), change)

    refused(saved, "layer 0 has 2 experts, 1 of them", f"of {ranks} expert-parallel ranks")


def renamed_group(folder: Path, rank: int, number: int, name: str) -> None:
    def change(root):
        state = root["optimizer_state_dict"]["base_optimizer_state"]
        state["param_groups"][number]["name"] = name

    edit_file(optimizer(folder, rank), change)


def test_files_that_put_experts_on_different_numbers_of_ranks(saved):
    renamed_group(saved, 0, 2, "ep_size_1")

    refused(saved, "layers.0.moe", "that its experts are on 1 and on 2 ranks", "files of one save")


def test_groups_are_in_the_order_of_the_first_model_file_whatever_each_process_made_of_it(several):
    """Two processes have the groups of four ranks first, by chance, and two those of two ranks."""
    names = read_catalog(several).values["optimizer"]["param_groups"]

    assert [group["name"] for group in names] == [
        *("matrices", "vectors", "ep_size_2", "ep_size_4", "ep_size_2", "ep_size_4")
    ]
    assert [len(group["params"]) for group in names[2:]] == [4, 8, 4, 8]


def test_a_file_with_more_groups_of_one_number_of_ranks_than_the_first_has():
    with pytest.raises(CorruptError, match=r"has 2 parameter groups of experts on 2 ranks, .* 1$"):
        same_order([None, 2, 4], [None, 2, 2], "file")
    with pytest.raises(CorruptError, match="has 0 parameter groups of other parameters"):
        same_order([None, 2], [2, 2], "file")


@pytest.mark.parametrize("name", ["ep_size_0", "ep_size_", "ep_size_99999999", "experts", 7])
def test_a_group_that_names_no_ranks_has_as_many_as_the_first_rank_lists_of_it(saved, name):
    for rank in range(4):
        for number in (2, 3):
            renamed_group(saved, rank, number, name)

    found, expected = (gather_all(read_catalog(f)) for f in (saved, RECORDED / "residual_z1"))

    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_groups_that_swapped_their_names_are_not_those_of_their_partitions(several):
    for number, name in ((2, "ep_size_2"), (3, "ep_size_4"), (4, "ep_size_2"), (5, "ep_size_4")):
        renamed_group(several, 1, number, name)

    refused(several, "that its experts are on 2 and on 4 ranks")


def test_a_layer_without_zero_is_on_the_ranks_with_which_groups_are_as_large_as_they_are():
    """Of four experts on two ranks each process had eight tensors more in those groups."""
    catalog = read_catalog(RECORDED / "several_z0")

    ranks = {t.name: t.layout.rank_count for t in catalog.tensors if ".up.weight" in t.name}

    assert set(ranks.values()) == {2, 4}
    assert all(count == (2 if name.startswith("layers.0") else 4) for name, count in ranks.items())


def test_the_numbers_on_a_rank_are_those_of_its_experts(saved):
    """A rank has two of the four experts of a layer; what it calls its third one is nowhere."""

    def change(root):
        for group in root["param_shapes"]:
            for key in [*group]:
                group[key.replace(f"{EXPERTS}.1.", f"{EXPERTS}.2.")] = group.pop(key)

    edit_file(model(saved), change)

    refused(saved, "layer 1 has 4 experts, 3 of them on the first of 2")


def test_ranks_in_another_order_than_the_run_had_them(saved):
    """Were the order of the ranks another one, the fragments would not be those of the files."""
    edit_file(
        model(saved),
        lambda root: root["ds_config"].update(use_data_before_expert_parallelism=True),
    )

    refused(saved, "param_slice_mappings says that it is partition 0 of 2")


# Beside tensor-parallel ranks: experts that are whole, and such that these ranks cut.


@pytest.fixture
def cut(tmp_path) -> Path:
    """Every expert cut by two tensor-parallel ranks, into three and two columns."""
    shutil.copytree(RECORDED / "tensor_cut_z2", tmp_path / "run")
    return tmp_path / "run" / "step"


@pytest.fixture
def uncut(tmp_path) -> Path:
    """Whole experts on two of four ranks, of which two are tensor-parallel."""
    shutil.copytree(RECORDED / "tensor_whole_z1", tmp_path / "run")
    return tmp_path / "run" / "step"


@pytest.mark.parametrize("name", ["tensor_cut_z0", "tensor_cut_z2"])
def test_tensor_parallel_ranks_have_their_shard_of_an_expert(name):
    catalog = read_catalog(RECORDED / name)
    tensor = next(t for t in catalog.tensors if t.name == f"{EXPERTS}.3.up.weight")

    assert str(tensor.layout.mesh) == "ep=2,tp=2"
    assert tensor.layout.full_shape == (5, 6)
    assert [tensor.layout.shard_shape(rank) for rank in range(4)] == [(0,), (0,), (3, 6), (2, 6)]
    assert [catalog.files[region.file].name for region in tensor.states["weight"].regions] == [
        f"step/layer_1_expert_3_mp_rank_{tp:02d}_model_states.pt" for tp in range(2)
    ]


def test_experts_of_neighbours_are_whole_where_tensor_parallel_ranks_do_not_cut_them():
    catalog = read_catalog(RECORDED / "tensor_whole_z1")
    tensor = next(t for t in catalog.tensors if t.name == f"{EXPERTS}.3.up.weight")

    assert str(catalog.mesh) == "dp=2,tp=2"
    assert str(tensor.layout.mesh) == "ep=2"
    assert [tensor.layout.shard_shape(rank) for rank in range(2)] == [(0,), (5, 6)]
    assert catalog.files[tensor.states["weight"].regions[0].file].name == (
        "step/layer_1_expert_3_mp_rank_01_model_states.pt"
    )


def test_an_expert_without_the_file_of_a_rank_that_cuts_it(cut):
    (cut / "layer_1_expert_2_mp_rank_01_model_states.pt").unlink()

    refused(cut, "layer 1, expert 2 has no file of tensor-parallel rank 1, others have one of each")


def test_whole_experts_in_files_of_ranks_that_do_not_hold_them(uncut):
    """Such as they are where one rank's files of experts that are cut were lost."""
    first = uncut / "layer_1_expert_3_mp_rank_01_model_states.pt"
    first.rename(expert(uncut, 3))

    refused(uncut, "layer 1, expert 3 has a file of tensor-parallel rank 0", "is rank 1 of 2")


def test_a_shard_of_an_expert_that_is_not_in_its_file(cut):
    edit_file(
        cut / "layer_1_expert_2_mp_rank_01_model_states.pt",
        lambda root: root.__delitem__(f"{EXPERTS}.2.up.bias"),
    )

    refused(cut, "is in 1 of 2 files of its expert", f"{EXPERTS}.2.up.bias")


def both(folder: Path, change) -> None:
    for tp in range(2):
        edit_file(folder / f"mp_rank_{tp:02d}_model_states.pt", change)


def test_experts_that_are_cut_and_of_which_nothing_says_how(cut):
    """A bias of five elements may be cut, or two whole ones of three and two may be there."""
    both(cut, lambda root: root["universal_checkpoint_info"].clear())

    refused(
        cut,
        "how 2 tensor-parallel ranks hold shards of",
        "save it with an affine_map",
        error=UnsupportedError,
    )


def test_whole_experts_need_nothing_that_says_how_they_are_cut(uncut):
    """Their files tell; what the names of their module would match does not count."""
    both(
        uncut,
        lambda root: root["universal_checkpoint_info"].update(
            {
                "tp_replicated_parameter_patterns": ["embed.*", "head.*", ".*norm.*", ".*wg.*"],
                "parameter_with_row_parallelism_patterns": [],
            }
        ),
    )

    found, expected = (gather_all(read_catalog(f)) for f in (uncut, RECORDED / "tensor_whole_z1"))
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_neighbours_share_experts_that_are_cut_after_data_parallelism():
    """Two data-parallel ranks of each tensor-parallel one have the same."""
    catalog = read_catalog(RECORDED / "tensor_cut_data_first_z1")
    layouts = {t.name: t.states["fp32"].layout for t in catalog.tensors if "fp32" in t.states}

    def holders(number: int) -> list[int]:
        layout = layouts[f"{EXPERTS}.{number}.up.weight"]
        return [rank for rank in range(8) if layout.shard_numel(rank)]

    assert {*holders(0), *holders(1)} == {0, 1, 2, 3}
    assert {*holders(2), *holders(3)} == {4, 5, 6, 7}


def test_flat_buffers_in_another_order_than_the_model_are_left_out(tmp_path):
    """Weights are copies there, and only their values say where they stand."""
    shutil.copytree(RECORDED / "flat_z0", tmp_path / "run")
    folder = tmp_path / "run" / "step"

    first, second = expert(folder, 0), expert(folder, 1)
    renamed(folder, 0, 1)
    renamed(folder, 1, 0)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    assert "does not stand at element" in errors_of(tmp_path / "run")[0]
