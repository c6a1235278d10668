"""Files that lie: each is refused with file, tensor, rank and numbers, or told of in a finding."""

from __future__ import annotations

import shutil
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest

from restride import api
from restride.checkpoint.values import Constructed, GlobalName, OrderedDictValue
from restride.errors import CorruptError, FormatError, RestrideError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
SHAPES = {"wte": (4, 3), "up": (6, 3), "down": (3, 6), "norm": (3,)}
CUTS = {"wte": None, "up": (0, (3, 3)), "down": (1, (2, 4)), "norm": None}


def parameters(shift: float = 0) -> dict[str, Parameter]:
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        states = {
            state: (1000 * number + 100 * place + shift + np.arange(prod(shape))).astype(np.float32)
            for place, state in enumerate(["weight", "fp32", "exp_avg"])
        }
        found[name] = Parameter(shape, states, CUTS[name])
    return found


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of two data-parallel and two tensor-parallel ranks."""
    write_zero_run(tmp_path / "run", ZeroRun(2, 2, parameters()))
    return tmp_path / "run"


@pytest.fixture
def recorded(tmp_path) -> Path:
    """A folder with copies of what the real engine wrote."""
    shutil.copytree(RECORDED, tmp_path / "recorded")
    return tmp_path / "recorded"


def model(folder: Path, tp: int = 0) -> Path:
    return folder / "step" / f"mp_rank_{tp:02d}_model_states.pt"


def optimizer(folder: Path, dp: int = 0, tp: int = 0) -> Path:
    return folder / "step" / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"


def refused(folder: Path, *words: str, error: type[RestrideError] = CorruptError) -> None:
    """The checkpoint is refused, and the message says these words."""
    with pytest.raises(error) as caught:
        read_catalog(folder)
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message


def kinds(folder: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in read_catalog(folder).findings]


def of_state(change):
    """Edit the optimizer's dict of an optimizer file."""
    return lambda root: change(root["optimizer_state_dict"])


def test_the_checkpoint_itself_is_fine(saved):
    assert not read_catalog(saved).findings


# Optimizer files.


def test_a_fragment_that_stands_elsewhere(saved):
    def move(state):
        state["param_slice_mappings"][0]["up"].state["start"] += 1

    edit_file(optimizer(saved, 0, 1), of_state(move))

    refused(
        saved,
        "dp rank 0, tp rank 1",
        "step/zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "tensor 'up'",
        "from 13 on",
        "from 12 on",
    )


def test_a_fragment_that_is_too_long(saved):
    def lengthen(state):
        state["param_slice_mappings"][0]["wte"].state["numel"] = 2**40

    edit_file(optimizer(saved), of_state(lengthen))

    refused(saved, "tensor 'wte'", "1099511627776 elements")


def test_a_fragment_of_nothing_that_exists(saved):
    def invent(state):
        mapping = state["param_slice_mappings"][0]
        mapping["ghost"] = mapping["wte"]

    edit_file(optimizer(saved), of_state(invent))

    refused(saved, "tensor 'ghost'", "there are no elements")


def test_a_round_robin_mapping_in_a_run_without_round_robin(tmp_path):
    run = ZeroRun(2, 1, parameters(), is_round_robin=True)
    write_zero_run(tmp_path / "run", run)
    for dp in range(2):
        edit_file(optimizer(tmp_path / "run", dp), lambda root: root.update(ds_config={}))

    refused(tmp_path / "run", "param_slice_mappings")


@pytest.mark.parametrize("padding", [1, 10**12, 2**62])
def test_a_padding_that_is_not_there(saved, padding):
    edit_file(
        optimizer(saved, 1, 0), of_state(lambda state: state.update(group_paddings=[padding]))
    )

    refused(saved, "step/zero_pp_rank_1_mp_rank_00_optim_states.pt", "elements")


def test_a_padding_that_no_number_can_be(saved):
    edit_file(optimizer(saved), of_state(lambda state: state.update(group_paddings=[10**40])))

    refused(saved, "['group_paddings'][0]", "133 bits", error=FormatError)


def test_a_partition_that_is_too_short(saved):
    def shorten(state):
        state["single_partition_of_fp32_groups"][0] = Array("float32", (3,), bytes(12))

    edit_file(optimizer(saved), of_state(shorten))

    refused(saved, "the partition has 16 elements", "zero_pp_rank_0_mp_rank_00", "has 3")


def test_a_partition_that_is_no_vector(saved):
    def fold(state):
        state["single_partition_of_fp32_groups"][0] = Array("float32", (2, 2), bytes(16))

    edit_file(optimizer(saved), of_state(fold))

    refused(saved, "single_partition_of_fp32_groups'][0]", "a flat tensor", error=FormatError)


def test_a_partition_count_of_another_run(saved):
    edit_file(optimizer(saved, 1, 1), of_state(lambda state: state.update(partition_count=[4])))

    refused(saved, "partition_count is 4", "files of 2 partitions")


def test_an_alignment_for_other_parameters(saved):
    for dp in range(2):
        edit_file(
            optimizer(saved, dp),
            of_state(lambda state: state.update(param_alignment_paddings=[[0, 0]])),
        )

    refused(saved, "param_alignment_paddings has 2 parameters, param_shapes 4")


def test_an_alignment_that_is_not_that_of_the_other_ranks(saved):
    paddings = [[0, 2, 0, 0]]
    edit_file(
        optimizer(saved, 1),
        of_state(lambda state: state.update(param_alignment_paddings=paddings)),
    )

    refused(saved, "param_alignment_paddings are not those of", "dp rank 0, tp rank 0")


@pytest.mark.parametrize(("dp", "padding"), [(0, 4), (1, 0), (1, 7)])
def test_a_padding_that_bf16_optimizer_did_not_book(tmp_path, dp, padding):
    run = ZeroRun(2, 1, parameters(), writer="bf16_optimizer")
    write_zero_run(tmp_path / "run", run)
    assert not read_catalog(tmp_path / "run").findings
    file = optimizer(tmp_path / "run", dp)
    edit_file(file, of_state(lambda state: state.update(group_paddings=[padding])))

    refused(tmp_path / "run", f"group_paddings says {padding} elements", f"dp rank {dp}")


def test_a_padding_that_one_rank_alone_makes_up(tmp_path):
    """With one rank there is no other to disagree."""
    write_zero_run(tmp_path / "run", ZeroRun(1, 1, parameters()))
    edit_file(
        optimizer(tmp_path / "run"),
        of_state(lambda state: state.update(group_paddings=[2**40])),
    )

    refused(tmp_path / "run", "has far more than the 30 elements")


def test_groups_that_the_model_does_not_have(saved):
    def drop(state):
        state["single_partition_of_fp32_groups"].append(Array("float32", (0,), b""))
        state["base_optimizer_state"]["param_groups"].append({"params": [1]})
        for key in ("group_paddings", "partition_count"):
            state[key].append(0 if "padd" in key else 2)
        state["param_slice_mappings"].append(OrderedDictValue())
        state["param_alignment_paddings"].append([])

    edit_file(optimizer(saved), of_state(drop))

    refused(saved, "2 parameter groups", "mp_rank_00_model_states.pt has 1")


def test_a_moment_that_one_rank_lacks(saved):
    def drop(state):
        del state["base_optimizer_state"]["state"][0]["exp_avg"]

    edit_file(optimizer(saved, 1, 0), of_state(drop))

    refused(saved, "zero_pp_rank_1_mp_rank_00", "tensor 'up'", "no state 'exp_avg'")


def test_a_moment_of_another_length_belongs_to_no_parameter(saved):
    def stretch(state):
        for entry in state["base_optimizer_state"]["state"].values():
            entry["row_norms"] = Array("float32", (5,), bytes(20))

    for dp in range(2):
        for tp in range(2):
            edit_file(optimizer(saved, dp, tp), of_state(stretch))
    catalog = read_catalog(saved)

    assert all("row_norms" not in tensor.states for tensor in catalog.tensors)
    assert [f.kind for f in catalog.findings] == ["uncut-state"]
    carried = catalog.values["optimizer"]["state.0.row_norms"]["tensor"]
    assert carried["shape"] == [5]


def test_masters_in_two_dtypes(saved):
    def widen(state):
        master = state["single_partition_of_fp32_groups"][0]
        numel = master.shape[0]
        state["single_partition_of_fp32_groups"][0] = Array("float64", (numel,), bytes(8 * numel))

    edit_file(optimizer(saved, 0, 0), of_state(widen))

    refused(saved, "float64", "float32", "zero_pp_rank_0_mp_rank_00", "tensor 'wte'")


def test_a_state_that_calls_itself_the_weight(saved):
    def rename(state):
        own = state["base_optimizer_state"]["state"][0]
        own["fp32"] = own.pop("exp_avg")

    for dp in range(2):
        for tp in range(2):
            edit_file(optimizer(saved, dp, tp), of_state(rename))
    states = gather_all(read_catalog(saved))

    expected = parameters()["up"].states
    assert np.array_equal(states["up/fp32"].view(np.float32).ravel(), expected["fp32"])
    assert np.array_equal(states["up/optimizer_fp32"].view(np.float32).ravel(), expected["exp_avg"])


# Which files are there.


def test_a_missing_optimizer_file_costs_the_states_that_it_holds(saved):
    optimizer(saved, 1, 1).unlink()
    catalog = read_catalog(saved)
    states = {tensor.name: list(tensor.states) for tensor in catalog.tensors}

    assert kinds(saved) == [("error", "missing-file")]
    assert "dp 1 tp 1" in catalog.findings[0].message
    assert catalog.findings[0].details == {"ranks": [[1, 1]], "part": "optimizer"}
    assert states["wte"] == ["weight", "fp32", "exp_avg", "step"]
    assert states["norm"] == ["weight"]


def test_without_optimizer_files_there_are_weights(saved):
    for file in (saved / "step").glob("*_optim_states.pt"):
        file.unlink()
    catalog = read_catalog(saved)

    assert kinds(saved) == [("note", "no-optimizer")]
    assert all(list(tensor.states) == ["weight"] for tensor in catalog.tensors)


def test_a_missing_model_file(saved):
    model(saved, 1).unlink()

    refused(saved, "1 of 2 model files is missing: mp_rank_01_model_states.pt")


def test_two_model_files_of_one_rank(saved):
    shutil.copy(model(saved), saved / "step" / "mp_rank_000_model_states.pt")

    refused(saved, "two model files of mp rank 0", "mp_rank_000_model_states.pt")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_00-slice_00-model_states.pt", "pipeline layers of ranks with axes of their own"),
        ("expert_0_mp_rank_00_model_states.pt", "experts of an old DeepSpeed"),
    ],
)
def test_files_of_other_kinds_of_runs(saved, name, what):
    (saved / "step" / name).touch()

    refused(saved, what, name, "can be read", error=UnsupportedError)


@pytest.mark.parametrize("latest", [True, False])
def test_a_copy_that_was_stopped_before_the_model_files_is_said_to_be_one(saved, latest):
    for file in (saved / "step").glob("*_model_states.pt"):
        file.unlink()
    if not latest:
        (saved / "latest").unlink()
    says = "step: has 4 files of the optimizer and none of the model", "add them"

    refused(saved, *says, error=FormatError)
    refused(saved / "step", *says, error=FormatError)


def test_a_copy_that_was_stopped_before_any_file_of_the_tag_is_said_to_be_one(saved):
    shutil.copytree(saved / "step", saved / "older")
    for file in (saved / "step").iterdir():
        file.unlink()

    refused(saved, "step: has no file of the model", "add them", error=FormatError)


def test_latest_alone_names_what_is_to_be_copied(saved):
    shutil.rmtree(saved / "step")

    refused(saved, "'step', which is not there; copy the folder of the tag", error=FormatError)


def test_files_of_a_larger_run_are_left_out_with_a_warning(saved):
    shutil.copy(optimizer(saved), optimizer(saved, 2, 0))
    shutil.copy(optimizer(saved), optimizer(saved, 0, 5))
    catalog = read_catalog(saved)

    assert kinds(saved) == [("warning", "stale-file")] * 2
    assert "zero_pp_rank_2_mp_rank_00" in "".join(f.message for f in catalog.findings)
    assert len(catalog.files) == 6


def test_world_sizes_that_disagree(saved):
    edit_file(model(saved, 1), lambda root: root.update(dp_world_size=4))

    refused(saved, "dp_world_size is 2", "mp_rank_01_model_states.pt it is 4")


def test_two_files_of_one_rank(saved):
    shutil.copy(optimizer(saved), saved / "step" / f"fp16_{optimizer(saved).name}")

    assert read_catalog(saved)  # the configuration says that this run writes without a prefix

    for dp in range(2):
        edit_file(model(saved, dp), lambda root: root.update(ds_config={"bf16": {"enabled": True}}))
    refused(saved, "dp rank 0, mp rank 0 has 2 optimizer files")


def test_the_files_of_two_saves(saved):
    edit_file(model(saved, 1), lambda root: root.update(global_steps=7))

    def step(state):
        content = np.float32(9).tobytes()
        state["base_optimizer_state"]["state"][0]["step"] = Array("float32", (), content)

    edit_file(optimizer(saved, 1, 0), of_state(step))

    assert kinds(saved) == [("error", "step-mismatch")] * 2
    assert read_catalog(saved).values["other_files"] == {
        "step/mp_rank_01_model_states.pt": {"global_steps": 7}
    }


def test_a_stranger_in_the_folder_is_noted(saved):
    (saved / "step" / "random_states_0.pt").write_bytes(b"whatever")

    assert kinds(saved) == [("note", "unknown-file")]


def test_latest_names_a_tag_that_is_not_there(saved):
    (saved / "latest").write_text("global_step7")

    refused(saved, "'global_step7', which is not there", "tags here are step", error=FormatError)


def test_latest_is_empty(saved):
    (saved / "latest").write_text("\n")

    refused(saved, "latest: is empty: it names no tag", "tags here are step", error=FormatError)


@pytest.mark.parametrize("tag", ["epoch1/step", "a/b/c"])
def test_a_tag_may_be_a_folder_in_a_folder(saved, tag):
    """An engine makes all folders of ``save_checkpoint(place, tag="epoch1/step")``."""
    known = read_catalog(saved)
    (saved / tag).parent.mkdir(parents=True)
    (saved / "step").rename(saved / tag)
    (saved / "latest").write_text(tag)

    catalog = read_catalog(saved)

    assert catalog.tensors == known.tensors
    assert [file.name for file in catalog.files] == [
        file.name.replace("step/", f"{tag}/", 1) for file in known.files
    ]
    for to in ("universal", "deepspeed"):
        api.convert(saved, saved.parent / to, to=to)
        assert len(api.open(saved.parent / to).tensors) == len(known.tensors)


@pytest.mark.parametrize("tag", ["../run/step", "{}/step", "./step", "step/", "step/../step"])
def test_a_tag_is_below_the_folder_that_names_it(saved, tag):
    (saved / "latest").write_text(tag.format(saved))

    refused(saved, "latest: names the tag", "which is not there", error=FormatError)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * 5000, b"../../etc", b"a\0b"])
def test_latest_holds_no_tag(saved, content):
    (saved / "latest").write_bytes(content)

    refused(saved, "latest", error=FormatError)


def test_two_tags_and_nobody_to_choose(saved):
    (saved / "latest").unlink()
    assert read_catalog(saved)

    shutil.copytree(saved / "step", saved / "step10")
    refused(saved, "2 tags", "step, step10", error=FormatError)
    assert read_catalog(saved / "step10")


# Model files.


def test_a_weight_of_another_shape(saved):
    def reshape(root):
        root["module"]["up"] = Array("float32", (9,), bytes(36))

    edit_file(model(saved), reshape)

    refused(saved, "mp_rank_00_model_states.pt: param_shapes[0]", "'up'", "(9,)", "(3, 3)")


def test_a_tensor_that_one_rank_does_not_have(saved):
    def drop(root):
        del root["module"]["wte"]
        del root["param_shapes"][0]["wte"]

    edit_file(model(saved, 1), drop)

    refused(saved, "param_shapes")


def test_a_parameter_in_two_groups(saved):
    def double(root):
        root["param_shapes"].append(root["param_shapes"][0])

    edit_file(model(saved), double)

    refused(saved, "param_shapes[1]", "'wte' is in group 0 as well")


def test_parameters_in_another_order(saved):
    def swap(root):
        shapes = root["param_shapes"][0]
        moved = OrderedDictValue()
        for name in ["up", "wte", *[n for n in shapes if n not in {"up", "wte"}]]:
            moved[name] = shapes[name]
        root["param_shapes"][0] = moved

    edit_file(model(saved), swap)

    refused(saved, "param_slice_mappings says", "tensor 'up'")


def test_a_tensor_larger_than_can_be_counted(saved):
    def grow(root):
        root["param_shapes"][0]["up"] = (2**40, 2**40)

    edit_file(model(saved), grow)

    refused(saved, "param_shapes[0]['up']", "does not exist", error=FormatError)


def test_ranks_that_disagree_on_how_a_parameter_is_cut(saved):
    def turn(root):
        maps = root["universal_checkpoint_info"]["affine_map"]["params"]
        for rank, entry in maps["^up$"]["ranks"].items():
            entry["pieces"][0]["source"][0] = 9 * (1 - rank)

    edit_file(model(saved, 1), turn)

    refused(saved, "mp_rank_01", "tensor 'up'", "is cut another way than", "mp_rank_00")


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ({"head": "wte", "wte": "norm"}, ("alias itself",)),
        ({"head": "ghost"}, ("'ghost' is not there",)),
        ({"up": "wte"}, ("'up' of shape (3, 3)", "(4, 3)")),
        ({"norm": "norm"}, ("alias itself",)),
    ],
)
def test_ties_that_cannot_be(saved, shared, words):
    edit_file(model(saved), lambda root: root.update(shared_params=shared))

    refused(saved, "shared_params", *words)


def test_a_second_name_of_the_same_bytes_is_an_alias_without_being_declared(saved):
    for tp in range(2):
        edit_file(model(saved, tp), lambda root: root["module"].update(head=root["module"]["wte"]))
    entries = {tensor.name: tensor for tensor in read_catalog(saved).tensors}

    assert entries["wte"].aliases == ("head",)
    assert "head" not in entries


def test_weights_may_be_stored_in_any_memory_order(saved):
    """A transposed view and a slice of something larger: torch saves both as they are."""
    whole = np.arange(18, dtype=np.float32).reshape(3, 6)

    def twist(root):
        root["module"]["up"] = Array("float32", (3, 3), whole.tobytes(), strides=(6, 2), base=1)
        root["module"]["wte"] = Array("float32", (4, 3), bytes(range(48)), strides=(1, 4))

    for tp in range(2):
        edit_file(model(saved, tp), twist)
    states = gather_all(read_catalog(saved))

    sliced = whole[:, 1::2]
    assert np.array_equal(states["up/weight"].view(np.float32)[..., 0], np.tile(sliced, (2, 1)))
    transposed = np.arange(48, dtype=np.uint8).reshape(3, 4, 4).transpose(1, 0, 2)
    assert np.array_equal(states["wte/weight"], transposed)


def test_a_weight_whose_elements_share_an_address_is_refused(saved):
    def spread(root):
        root["module"]["up"] = Array("float32", (3, 3), bytes(12), strides=(0, 1))

    edit_file(model(saved), spread)

    refused(saved, "tensor 'up'", "strides (0, 1)", "share an address", error=UnsupportedError)


def test_buffers_of_different_shapes(saved):
    for tp in range(2):

        def add(root, rows=tp + 1):
            root["buffer_names"].append("mask")
            root["module"]["mask"] = Array("bool", (rows,), bytes(rows))

        edit_file(model(saved, tp), add)

    refused(saved, "tensor 'mask'", "(1,), (2,)", error=UnsupportedError)


def test_buffers_are_held_by_every_rank(saved):
    for tp in range(2):

        def add(root):
            root["buffer_names"].append("mask")
            root["module"]["mask"] = Array("bool", (3,), bytes([1, 0, 1]))

        edit_file(model(saved, tp), add)
    catalog = read_catalog(saved)
    mask = next(tensor for tensor in catalog.tensors if tensor.name == "mask")

    assert mask.kind == "buffer"
    assert gather(catalog, mask.states["weight"]).ravel().tolist() == [1, 0, 1]
    assert not catalog.findings


def test_a_parameter_that_is_called_a_buffer(saved):
    """Its master weights and moments were left out without a word."""
    edit_file(model(saved), lambda root: root["buffer_names"].append("up"))

    refused(saved, "buffer_names: 'up' is a buffer here, and a parameter where shapes are given")


@pytest.mark.parametrize("name", ["up", "mask"])
def test_a_value_in_the_place_of_a_tensor(saved, name):
    def lie(root):
        root["buffer_names"].append("mask")
        root["module"][name] = 7

    edit_file(model(saved), lie)

    refused(saved, f"module['{name}']: a tensor is expected, found 7", error=FormatError)


def test_a_value_in_the_module_that_nothing_else_names_is_told_of(saved):
    edit_file(model(saved), lambda root: root["module"].update(scale=7))
    (finding,) = read_catalog(saved).findings

    assert (finding.severity, finding.kind) == ("warning", "no-tensor")
    assert finding.message.endswith("module['scale'] is no tensor: it is carried as a value")


@pytest.mark.parametrize(
    "function", ["torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_sparse_tensor"]
)
def test_a_tensor_of_a_kind_that_is_not_its_bytes_is_no_value_to_carry(saved, function):
    """The rest of the model was converted without it, with a warning."""
    module, _, name = function.rpartition(".")
    made = Constructed(GlobalName(module, name), (Array("float32", (2,), bytes(8)),))
    edit_file(model(saved), lambda root: root["module"].update(scale=made))

    refused(
        saved,
        "mp_rank_00_model_states.pt",
        "module['scale']: is a tensor of a subclass",
        error=UnsupportedError,
    )


# What is not a lie, but rare.


def test_a_parameter_that_is_in_no_model_file_has_its_masters(saved):
    for tp in range(2):
        edit_file(model(saved, tp), lambda root: root["module"].pop("down") and None)
    catalog = read_catalog(saved)
    entry = next(tensor for tensor in catalog.tensors if tensor.name == "down")

    assert [(f.severity, f.kind) for f in catalog.findings] == [("warning", "no-weight")]
    assert list(entry.states) == ["fp32", "exp_avg", "step"]


def test_a_state_dict_may_hold_what_is_no_tensor(saved):
    edit_file(model(saved), lambda root: root["module"].update(_extra_state=b"abc"))
    values = read_catalog(saved).values

    assert values["model"]["module['_extra_state']"] == {"bytes": "YWJj"}
    assert not read_catalog(saved).findings


@pytest.mark.parametrize("large", [Array("float32", (20_000,), bytes(80_000)), "x" * (34 << 20)])
def test_a_value_that_is_large_is_told_of(saved, large):
    edit_file(model(saved), lambda root: root.update(ema=large))
    catalog = read_catalog(saved)

    assert [(f.severity, f.kind) for f in catalog.findings] == [("warning", "not-carried")]
    assert "step/mp_rank_00_model_states.pt: ema" in catalog.findings[0].message
    assert catalog.values["model"]["global_steps"] == 2


def scale_norm(root):
    maps = root["universal_checkpoint_info"]["affine_map"]["params"]
    for entry in maps["^norm$"]["ranks"].values():
        entry["pieces"][0]["scale"] = 0.5


def test_the_states_of_a_scaled_parameter_carry_the_power_of_the_scale(tmp_path):
    """A gradient is scaled by the reciprocal: Adam's first moment with it, the second twice."""
    states = {s: np.ones(3, np.float32) for s in ("weight", "fp32", "exp_avg", "exp_avg_sq")}
    run = ZeroRun(2, 2, {"norm": Parameter((3,), states)})
    write_zero_run(tmp_path / "run", run)
    for tp in range(2):
        edit_file(model(tmp_path / "run", tp), scale_norm)
    (norm,) = read_catalog(tmp_path / "run").tensors

    scales = {
        state: {piece.scale for piece in entry.layout.all_pieces}
        for state, entry in norm.states.items()
    }
    assert scales == {
        "weight": {Fraction(1, 2)},
        "fp32": {Fraction(1, 2)},
        "exp_avg": {Fraction(2)},
        "exp_avg_sq": {Fraction(4)},
        "step": {Fraction(1)},
    }


def test_a_state_of_a_scaled_parameter_that_scales_in_an_unknown_way(tmp_path):
    states = {s: np.ones(3, np.float32) for s in ("weight", "fp32", "momentum_buffer")}
    write_zero_run(tmp_path / "run", ZeroRun(1, 2, {"norm": Parameter((3,), states)}))
    for tp in range(2):
        edit_file(model(tmp_path / "run", tp), scale_norm)

    words = ("tensor 'norm'", "scaled by 1/2", "'momentum_buffer'")
    refused(tmp_path / "run", *words, error=UnsupportedError)


def test_frozen_parameters_that_the_module_leaves_out_are_read_from_their_fragments(recorded):
    folder = recorded / "aligned_frozen_z2"
    before = gather_all(read_catalog(folder))
    edit_file(model(folder), lambda root: root["module"].pop("base.weight") and None)
    after = gather_all(read_catalog(folder))

    assert np.array_equal(before["base.weight/weight"], after["base.weight/weight"])


def test_a_frozen_fragment_of_another_shape(recorded):
    folder = recorded / "aligned_frozen_z2"
    edit_file(model(folder), lambda root: root["frozen_param_shapes"].update({"empty": (1, 3)}))

    refused(folder, "frozen_param_fragments['empty']", "(0, 3)", "(1, 3)")


def test_copies_that_deepspeed_averages_are_noted(saved):
    info = {
        "tp_replicated_parameter_patterns": ["^wte$"],
        "parameter_to_average_patterns": ["^norm$"],
        "parameter_with_row_parallelism_patterns": ["^down$"],
    }
    for tp in range(2):
        edit_file(model(saved, tp), lambda root: root.update(universal_checkpoint_info=info))
    before = gather_all(read_catalog(saved))

    assert kinds(saved) == [("note", "averaged")]
    expected = parameters()
    for name, parameter in expected.items():
        found = before[f"{name}/exp_avg"].view(np.float32)[..., 0]
        assert np.array_equal(found, parameter.states["exp_avg"].reshape(parameter.shape))


# Everything, everywhere.


STRANGE = (
    None,
    True,
    -1,
    10**30,
    2.5,
    float("nan"),
    "text",
    [],
    [None],
    {},
    {1: 2},
    GlobalName("os", "system"),
    Constructed(GlobalName("os", "system"), ("true",)),
    Array("float32", (), bytes(4)),
)


def places(value, path=()):
    """Every place in nested containers and objects, containers included."""
    yield path
    if isinstance(value, dict):
        for key in list(value)[:40]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 2)):
            yield from places(value[number], (*path, number))
    elif isinstance(value, Constructed) and isinstance(value.state, dict):
        for key in value.state:
            yield (*path, "state", key)


def replaced(root, path, value):
    """Put `value` at a place."""
    if not path:
        return value
    at = root
    for step in path[:-1]:
        at = at.state if isinstance(at, Constructed) else at[step]
    if isinstance(at, Constructed):
        at.state = value
    else:
        at[path[-1]] = value
    return root


def place_of_refusal(folder: Path) -> str | None:
    """Where the checkpoint is refused, or None where it is read."""
    try:
        read_catalog(folder)
    except RestrideError as error:
        return error.where
    return None


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_no_value_of_a_wrong_type_breaks_the_reader(saved, which):
    """Each place of a file in turn holds each strange value: refused cleanly, or carried."""
    file = model(saved) if which == "model" else optimizer(saved)
    original = file.read_bytes()
    seen: list[tuple[object, ...]] = []
    edit_file(file, lambda root: seen.extend(places(root)))
    refusals: list[str | None] = []

    for number, path in enumerate(seen):
        for strange in STRANGE[number % 4 :: 4]:
            file.write_bytes(original)
            edit_file(file, lambda root, p=path, s=strange: replaced(root, p, s))
            refusals.append(place_of_refusal(saved))

    assert "" not in refusals
    assert len(refusals) - refusals.count(None) > len(refusals) / 2


@pytest.mark.parametrize("name", ["experts_z1", "aligned_frozen_z2", "elastic_z1"])
def test_no_value_of_a_wrong_type_breaks_the_reader_of_real_files(recorded, name):
    tag = recorded / name / "step"
    for file in [min(tag.glob("mp_rank*")), min(tag.glob("*optim*"))]:
        original = file.read_bytes()
        seen: list[tuple[object, ...]] = []
        edit_file(file, lambda root, found=seen: found.extend(places(root)))
        for number, path in enumerate(seen[:: 1 + len(seen) // 150]):
            strange = STRANGE[number % len(STRANGE)]
            file.write_bytes(original)
            edit_file(file, lambda root, p=path, s=strange: replaced(root, p, s))
            assert place_of_refusal(recorded / name) != ""
        file.write_bytes(original)
