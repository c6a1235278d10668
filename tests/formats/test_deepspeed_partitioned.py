"""ZeRO-3: what a run writes is read back, and files that lie are refused where they lie."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.algebra.coverage import Covered, prove
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.selection import select_weights
from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.partitioned_files import PADDING, write_partitioned_run
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
STATES = ("weight", "fp32", "exp_avg")
FROZEN = ("weight",)


def distinct(shape, first, dtype=np.float32):
    return (first + np.arange(prod(shape))).astype(dtype).reshape(shape)


def parameter(shape, first, cut=None, group=0, states=STATES) -> Parameter:
    """Values of which no two are equal."""
    arrays = {
        state: distinct(shape, 0, np.float16)
        if state == "weight"
        else distinct(shape, first + 100 * n)
        for n, state in enumerate(states)
    }
    return Parameter(shape, arrays, cut, group)


def parameters() -> dict[str, Parameter]:
    return {
        "wte": parameter((5, 3), 1000),
        "up": parameter((6, 3), 2000, (0, (3, 3))),
        "down": parameter((3, 5), 3000, (1, (2, 3)), group=1),
        "base": parameter((4, 3), 400, (0, (3, 1)), states=FROZEN),
        "norm": parameter((3,), 4000, group=1),
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of two data-parallel and two tensor-parallel ranks."""
    write_partitioned_run(tmp_path / "run", ZeroRun(2, 2, parameters()))
    return tmp_path / "run"


def model(folder: Path, dp: int = 0, tp: int = 0) -> Path:
    return folder / "step" / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_model_states.pt"


def optimizer(folder: Path, dp: int = 0, tp: int = 0) -> Path:
    return folder / "step" / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"


def refused(folder: Path, *words: str, error: type[RestrideError] = CorruptError) -> None:
    with pytest.raises(error) as caught:
        read_catalog(folder)
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message


def kinds(folder: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in read_catalog(folder).findings]


def of_state(change):
    return lambda root: change(root["optimizer_state_dict"])


# What is written is read.


@st.composite
def _runs(draw: DrawFn) -> ZeroRun:
    dp, tp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    found = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        cut = None
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            widths = draw(st.lists(st.integers(0, 4), min_size=tp, max_size=tp))
            widths = tuple(widths) if any(widths) else (1, *widths[1:])
            shape = (*shape[:dim], sum(widths), *shape[dim + 1 :])
            cut = (dim, widths)
        # A frozen parameter has a weight, in half precision, and nothing else.
        is_frozen = draw(st.integers(0, 4)) == 0
        first = 0 if is_frozen else 10_000 * number
        states = FROZEN if is_frozen else STATES
        found[f"layer.{number}.weight"] = parameter(
            shape, first, cut, draw(st.integers(0, 1)), states
        )
    for group in range(2):  # no rank's group is empty
        found[f"norm.{group}"] = parameter((3,), 90_000 + 1000 * group, None, group)
    return ZeroRun(dp, tp, found)


@given(_runs(), st.integers(1, 3))
@settings(max_examples=40)
def test_every_state_is_found_in_the_files_element_by_element(run, sub_group_length):
    with TemporaryDirectory() as folder:
        write_partitioned_run(Path(folder) / "run", run, sub_group_length=sub_group_length)

        catalog = read_catalog(Path(folder) / "run")
        found = gather_all(catalog)

        assert not catalog.findings
        assert catalog.format == "deepspeed zero-3"
        for name, whole in run.parameters.items():
            for state, expected in whole.states.items():
                if state == "weight" and "fp32" in whole.states:
                    continue  # is in no file
                actual = found.pop(f"{name}/{state}")
                assert np.array_equal(actual.view(expected.dtype)[..., 0], expected)
            if "fp32" in whole.states:
                assert found.pop(f"{name}/step").view(np.float32) == 2
        assert not found
        for tensor in catalog.tensors:
            assert isinstance(prove(tensor.layout), Covered)
            assert tensor.is_frozen == ("fp32" not in run.parameters[tensor.name].states)
            for entry in tensor.states.values():
                # Chunks tile to the last element of the padding, which is said to be padding.
                is_scalar = not entry.layout.full_shape
                assert isinstance(
                    prove(entry.layout, side="full" if is_scalar else "both"), Covered
                )


def test_the_padding_of_the_last_rank_is_declared_and_not_read(tmp_path):
    run = ZeroRun(4, 1, {"norm": parameter((5,), 10)})
    write_partitioned_run(tmp_path / "run", run)

    catalog = read_catalog(tmp_path / "run")
    entry = catalog.tensors[0].states["fp32"]

    # Chunks of two: the third rank's has one element of padding, the fourth's is all padding.
    assert [entry.layout.shard_shape(rank) for rank in range(4)] == [(2,)] * 4
    padded = [sum(pad.as_piece().numel for pad in entry.layout.paddings(rank)) for rank in range(4)]
    assert padded == [0, 0, 1, 2]
    assert PADDING not in gather(catalog, entry).view(np.float32)


def test_parameters_of_several_sub_groups_belong_to_their_parameter_group(saved):
    groups = read_catalog(saved).values["optimizer"]["param_groups"]

    assert [group["params"] for group in groups] == [["wte", "up"], ["down", "norm"]]
    assert [group["lr"] for group in groups] == [0.5, 1.5]


def test_weights_are_the_masters_rounded_to_the_type_of_the_training(saved, tmp_path):
    """The empty tensors of the module are fp16, whatever else the configuration says."""
    catalog = read_catalog(saved)
    chosen = {selected.key: selected for selected in select_weights(catalog)}
    api.convert(saved, tmp_path / "out")

    written = gather_all(api.open(tmp_path / "out"))
    for name, whole in parameters().items():
        assert chosen[name].state == ("fp32" if "fp32" in whole.states else "weight")
        expected = whole.states.get("fp32", whole.states["weight"]).astype(np.float16)
        assert np.array_equal(written[f"{name}/weight"].view(np.float16)[..., 0], expected)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"bfloat16": {"enabled": True}}, "bfloat16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "float16"),
        ({"zero_optimization": {"stage": 3}}, "float32"),
    ],
)
def test_the_configuration_says_the_type_where_the_module_does_not(tmp_path, config, dtype):
    write_partitioned_run(tmp_path / "run", ZeroRun(1, 1, {"norm": parameter((3,), 10)}))
    for file in (tmp_path / "run" / "step").iterdir():
        edit_file(file, lambda root: root.update(ds_config=config))
    edit_file(model(tmp_path / "run"), lambda root: root["module"].clear())

    (selected,) = select_weights(read_catalog(tmp_path / "run"))

    assert (selected.state, selected.dtype.name) == ("fp32", dtype)


def test_a_master_copy_of_integers_is_not_taken_for_the_weight(saved, tmp_path):
    """It was written as it is, under the name of a weight that is trained in fp16."""

    def lie(root):
        state = root["optimizer_state_dict"]
        state["fp32_flat_groups"] = [
            replace(tensor, storage=replace(tensor.storage, dtype=DTYPES["int32"]))
            for tensor in state["fp32_flat_groups"]
        ]

    for file in (saved / "step").glob("*optim_states.pt"):
        edit_file(file, lie)

    for options in ({}, {"dtype": "bfloat16"}, {"to": "universal"}, {"to": "deepspeed"}):
        with pytest.raises(CorruptError, match="'fp32': the master copy is int32, the parameter"):
            api.convert(saved, tmp_path / "out", **options)
    (finding, *_) = api.check(saved).findings
    assert (finding.severity, finding.kind) == ("error", "master-dtype")


def test_a_weight_of_bools_beside_a_master_copy_is_of_another_save(tmp_path):
    write_zero_run(tmp_path / "run", ZeroRun(1, 1, {"norm": parameter((3,), 10)}))
    for file in (tmp_path / "run" / "step").glob("*model_states.pt"):
        edit_file(file, lambda root: root["module"].update(norm=Array("bool", (3,), b"\1\0\1")))

    (finding,) = (f for f in api.check(tmp_path / "run").findings if f.severity == "error")

    assert finding.kind == "master-dtype"
    assert "the master copy is float32, the parameter is trained in bool" in finding.message


def test_a_weight_that_the_module_has_after_all_is_read(tmp_path):
    write_partitioned_run(tmp_path / "run", ZeroRun(2, 1, {"norm": parameter((3,), 10)}))
    whole = np.array([1, 2, 3], np.float16)
    for dp in range(2):
        stored = Array("float16", (3,), whole.tobytes())
        edit_file(model(tmp_path / "run", dp), lambda root, t=stored: root["module"].update(norm=t))

    catalog = read_catalog(tmp_path / "run")

    found = gather(catalog, catalog.tensors[0].states["weight"])
    assert np.array_equal(found.view(np.float16)[..., 0], whole)


def test_every_rank_has_a_copy_of_a_buffer_and_one_that_differs_is_found(saved):
    for dp in range(2):
        for tp in range(2):
            values = np.arange(3) + (dp == 1 and tp == 1)

            def add(root, values=values):
                root["module"]["steps"] = Array("int64", (3,), values.tobytes())
                root["buffer_names"] = ["steps"]

            edit_file(model(saved, dp, tp), add)

    report = api.check(saved)

    assert [finding.kind for finding in report.findings] == ["replica-drift"]
    assert report.findings[0].details["tensor"] == "steps"

    def drop(root):
        del root["module"]["steps"]

    edit_file(model(saved, 1, 0), drop)
    refused(saved, "zero_pp_rank_1_mp_rank_00_model_states.pt: tensor 'steps'", "has no buffer")


def test_a_map_of_an_empty_partition_says_nothing_and_the_category_holds(saved):
    """DeepSpeed maps a parameter that zero.Init has emptied by the shape (0,)."""

    def empty(root):
        info = root["universal_checkpoint_info"]
        ranks = {
            tp: {
                "shard_shape": [0],
                "pieces": [
                    {"shape": [0], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
                ],
            }
            for tp in range(2)
        }
        info["affine_map"]["params"]["^wte$"] = {"logical_shape": [0], "ranks": ranks}
        info["tp_replicated_parameter_patterns"] = ["^wte$"]
        info["parameter_with_row_parallelism_patterns"] = []

    expected = gather_all(read_catalog(saved))
    for file in (saved / "step").glob("*model_states.pt"):
        edit_file(file, empty)

    found = gather_all(read_catalog(saved))

    assert all(np.array_equal(found[key], expected[key]) for key in expected)


# What lies is refused.


def test_a_flat_partition_of_another_length(saved):
    def shorten(state):
        state["fp32_flat_groups"][1] = Array("float32", (5,), bytes(20))

    edit_file(optimizer(saved, 1, 1), of_state(shorten))

    refused(
        saved,
        "zero_pp_rank_1_mp_rank_01_optim_states.pt: optimizer_state_dict['fp32_flat_groups'][1]",
        "dp rank 1, tp rank 1",
        "has 5 elements",
        "have 7 on 2 ranks",
    )


def test_partitions_that_an_engine_left_on_nvme(saved):
    """What ZeRO-Infinity has on disks is saved as empty tensors, and files of the disk beside."""
    empty = Array("float32", (0,), b"")

    def leave(state):
        state["fp32_flat_groups"] = [empty for _ in state["fp32_flat_groups"]]
        for own in state["optimizer_state_dict"]["state"].values():
            own.update(exp_avg=empty)

    for rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        edit_file(optimizer(saved, *rank), of_state(leave))

    refused(saved, "is empty", "NVMe", "'offloaded_tensors'", error=UnsupportedError)


def test_a_partition_that_is_no_vector(saved):
    def fold(state):
        state["fp32_flat_groups"][1] = Array("float32", (7, 1), bytes(28))

    edit_file(optimizer(saved), of_state(fold))

    with pytest.raises(RestrideError, match="a flat tensor is expected"):
        read_catalog(saved)


def test_a_partition_count_of_another_run(saved):
    edit_file(optimizer(saved), of_state(lambda state: state.update(partition_count=4)))

    refused(saved, "partition_count is 4, 2 ranks share")


def test_ranks_that_do_not_share_a_sub_group(tmp_path):
    shutil.copytree(RECORDED / "experts_z3", tmp_path / "run")

    def swap(state):
        state["ds_zero_partition_groups"][1]["partition_ranks"] = [1, 2]

    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit_file(tmp_path / "run" / "step" / name, of_state(swap))

    refused(tmp_path / "run", name, "by ranks [1, 2], by the parallelism it is ranks [1, 3]")


def test_sub_groups_that_the_model_does_not_have(saved):
    def drop(root):
        root["param_shapes"].pop()

    edit_file(model(saved, 0, 1), drop)

    refused(saved, "has 2 sub-groups", "_mp_rank_01_model_states.pt has 1")


def test_sub_groups_that_are_numbered_otherwise(saved):
    def swap(state):
        groups = state["optimizer_state_dict"]["param_groups"]
        groups[0]["params"], groups[1]["params"] = [1], [0]

    edit_file(optimizer(saved), of_state(swap))

    refused(saved, "param_groups", "numbers the sub-groups [[1], [0]]", "has 2")


def test_states_of_a_sub_group_that_is_not_there(saved):
    def add(state):
        state["optimizer_state_dict"]["state"][7] = {}

    edit_file(optimizer(saved), of_state(add))

    refused(saved, "has states of sub-groups [7]")


@pytest.mark.parametrize("change", ["shape", "order", "name"])
def test_a_rank_that_says_other_shapes_than_the_first(saved, change):
    def lie(root):
        group = root["param_shapes"][0]
        if change == "shape":
            group["wte"] = (3, 5)
        elif change == "order":
            group["wte"] = group.pop("wte")
        else:
            group["wpe"] = group.pop("wte")

    edit_file(model(saved, 1, 1), lie)

    refused(saved, "zero_pp_rank_1_mp_rank_01_model_states.pt: param_shapes[0]: tensor")


def test_a_moment_of_another_length_belongs_to_no_parameter(saved):
    def widen(state):
        state["optimizer_state_dict"]["state"][0]["factor"] = Array("float32", (3,), bytes(12))

    edit_file(optimizer(saved), of_state(widen))

    assert kinds(saved) == [("warning", "uncut-state")]


def test_a_moment_that_one_rank_lacks(saved):
    def drop(state):
        del state["optimizer_state_dict"]["state"][0]["exp_avg"]

    edit_file(optimizer(saved, 1, 0), of_state(drop))

    refused(saved, "has no state 'exp_avg'", "dp rank 1, tp rank 0")


def test_a_frozen_chunk_of_another_length(saved):
    def shorten(root):
        root["frozen_param_fragments"]["base"] = Array("float16", (2,), bytes(4))

    edit_file(model(saved, 1, 0), shorten)

    refused(saved, "zero_pp_rank_1_mp_rank_00", "['base']", "has shape (2,)", "a chunk of 5")


def test_a_frozen_chunk_that_is_quantized(saved):
    def quantize(root):
        root["frozen_param_fragments"]["base"] = Array("uint8", (5,), bytes(5))

    edit_file(model(saved, 1, 0), quantize)

    refused(saved, "is uint8, the parameter is float16", "quantized", error=UnsupportedError)


def test_parameters_that_are_cut_over_some_ranks_only(saved):
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    edit_file(model(saved), lambda root: root.update(ds_config=config))

    refused(saved, "over groups of 1 of 2 data-parallel ranks", error=UnsupportedError)


@pytest.mark.parametrize(("dp", "tp"), [(0, 0), (1, 1)])
def test_a_missing_optimizer_file_costs_what_it_holds_a_part_of(saved, dp, tp):
    optimizer(saved, dp, tp).unlink()

    catalog = read_catalog(saved)

    assert ("error", "missing-file") in kinds(saved)
    assert f"(dp {dp} tp {tp})" in catalog.findings[0].message
    assert {t.name: list(t.states) for t in catalog.tensors if t.states} == {"base": ["weight"]}
    with pytest.raises(UnsupportedError, match="tensor 'wte': the checkpoint has no weight"):
        list(select_weights(catalog))


def test_a_missing_model_file_costs_the_frozen_weights(saved):
    model(saved, 1, 1).unlink()

    catalog = read_catalog(saved)

    assert kinds(saved) == [("error", "missing-file"), ("warning", "no-weight")]
    assert {t.name for t in catalog.tensors if not t.states} == {"base"}
    model(saved, 0, 1).unlink()
    refused(saved, "1 of 2 model files is missing: zero_pp_rank_*_mp_rank_01_model_states.pt")


def test_files_of_a_larger_run_are_left_out_with_a_warning(saved):
    for file in (model, optimizer):
        shutil.copy(file(saved, 1, 1), file(saved, 2, 1))
        shutil.copy(file(saved, 1, 1), file(saved, 1, 2))

    assert kinds(saved) == [("warning", "stale-file")] * 4


def test_the_files_of_two_saves(saved):
    edit_file(model(saved, 1, 1), lambda root: root.update(global_steps=3))

    assert kinds(saved) == [("error", "step-mismatch")]


def test_files_of_two_stages(saved, tmp_path):
    whole = {name: value for name, value in parameters().items() if name != "base"}
    write_zero_run(tmp_path / "one", ZeroRun(2, 2, whole))
    name = "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    shutil.copy(tmp_path / "one" / "step" / name, saved / "step" / name)
    with pytest.raises(CorruptError, match=r"zero_stage is \d, in step/.* it is \d"):
        read_catalog(saved)
    for file in (saved / "step").glob("*optim_states.pt"):
        shutil.copy(tmp_path / "one" / "step" / file.name, file)
    refused(saved, "is of ZeRO-1", "zero_pp_rank_0_mp_rank_00_model_states.pt is not")
    shutil.copy(tmp_path / "one" / "step" / "mp_rank_00_model_states.pt", saved / "step")
    refused(saved, "has model files of ZeRO-3 and of another stage")


def test_two_model_files_of_one_rank(saved):
    shutil.copy(model(saved), saved / "step" / "zero_pp_rank_00_mp_rank_00_model_states.pt")

    refused(saved, "has two model files of dp rank 0, mp rank 0")


def test_shapes_are_missing(saved):
    for file in (saved / "step").glob("*model_states.pt"):
        edit_file(file, lambda root: root.update(param_shapes=None))

    refused(saved, "has no param_shapes, yet there are optimizer files")


def test_a_name_that_no_file_holds_is_told_of(saved):
    def add(root):
        root["module"]["ghost"] = Array("float16", (0,), b"")

    edit_file(model(saved), add)

    assert kinds(saved) == [("warning", "no-weight")]
    assert "'ghost' is named in the module" in read_catalog(saved).findings[0].message


STRANGE = (
    None,
    True,
    -1,
    10**30,
    "text",
    [],
    [None],
    {},
    {1: 2},
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


def place_of_refusal(folder: Path) -> str | None:
    """Where the checkpoint is refused, or None where it is read."""
    try:
        read_catalog(folder)
    except RestrideError as error:
        return error.where
    return None


@pytest.mark.parametrize("file", [model, optimizer])
def test_no_value_of_a_wrong_type_breaks_the_reader(saved, file):
    """Each place of a file in turn holds strange values: refused cleanly, or carried."""
    original = file(saved, 1, 0).read_bytes()
    seen: list[tuple[object, ...]] = []
    edit_file(file(saved, 1, 0), lambda root: seen.extend(places(root)))
    refusals = 0

    for number, path in enumerate(seen):
        for strange in STRANGE[number % 4 :: 4]:

            def replace(root, path=path, strange=strange):
                at = root
                for step in path[:-1]:
                    at = at[step]
                if not path:
                    return strange
                at[path[-1]] = strange
                return root

            file(saved, 1, 0).write_bytes(original)
            edit_file(file(saved, 1, 0), replace)
            place = place_of_refusal(saved)
            assert place != ""
            refusals += place is not None
    assert refusals > len(seen) / 2
